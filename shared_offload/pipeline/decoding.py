"""From latents to frames: on the first rank alone, or on all ranks together.

Only the first rank gets frames. They travel as the bytes that the video file is made from: a
quarter of fp32. Tiles travel in the VAE's dtype, because they are blended first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared_offload.pipeline.on_demand import OnDemand
from shared_offload.pipeline.vae import Vae
from shared_offload.pipeline.vae_parallel import Strips
from shared_offload.pipeline.video import to_uint8
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress


def decode(
    vaes: OnDemand[Vae],
    latents: Tensor,
    ranks: Ranks,
    progress: Progress,
    *,
    together: bool,
    limit: int | None = None,
) -> Tensor | None:
    """Collective. Frames, uint8 (F, H, W, 3), on the CPU of the first rank; None elsewhere.

    `together`: on all ranks, each with the VAE loaded; else the others wait, and burn no CPU.
    `limit`: bytes that may be allocated on a rank's GPU meanwhile; None: any number.
    """
    frames: Tensor | None = None
    if together and ranks.world_size > 1:
        with vaes.use() as vae:
            vae.limit = limit
            fits = ranks.gather_json(_fits(vae, latents, ranks))  # waits until all have loaded
            if vae.tiled(latents):
                frames = _tiles(vae, latents, ranks, progress)
            else:
                frames = (_strips if all(fits) else _shares)(vae, latents, ranks, progress)
    elif ranks.is_first:
        with vaes.use() as vae:
            vae.limit = limit
            with progress.task("decode", vae.decode_calls(latents), "it") as task:
                frames = _frames(vae.decode(latents, task.advance, form=to_uint8))
    ranks.barrier()
    return frames


def _fits(vae: Vae, latents: Tensor, ranks: Ranks) -> bool:
    """A strip that swaps edges with its neighbours, whole, keeps to the limit."""
    return vae.strips(latents.shape) <= ranks.world_size


def _strips(vae: Vae, latents: Tensor, ranks: Ranks, progress: Progress) -> Tensor | None:
    strips = Strips(latents, ranks.rank, ranks.world_size, ranks.swap_edges)
    with progress.task("decode", latents.shape[1], "it") as task:
        strip = vae.decode_strip(latents, strips, task.advance)
    none = torch.empty(0, dtype=torch.uint8, device=vae.device)
    return _joined(none if strip is None else to_uint8(strip), strips, ranks)


def _shares(vae: Vae, latents: Tensor, ranks: Ranks, progress: Progress) -> Tensor | None:
    """As strips, but each cut once more to keep to the limit, and no edges are swapped."""
    strips = Strips(latents, ranks.rank, ranks.world_size, ranks.swap_edges)
    made = torch.empty(0, dtype=torch.uint8, device=vae.device)
    share = (strips.start, strips.end)
    calls = 0 if strips.empty else vae.decode_calls(latents, share)
    with progress.task("decode", calls, "it") as task:
        if calls:
            made = vae.decode(latents, task.advance, form=to_uint8, share=share)
    return _joined(made, strips, ranks)


def _joined(made: Tensor, strips: Strips, ranks: Ranks) -> Tensor | None:
    """On the first rank the frames of all ranks' parts, empty ones left out."""
    parts = [part for part in ranks.collect_tensors(made) if part.numel()]
    return _frames(torch.cat(parts, strips.dim)) if parts else None


def _tiles(vae: Vae, latents: Tensor, ranks: Ranks, progress: Progress) -> Tensor | None:
    tiles, world = vae.tiles(latents), ranks.world_size
    mine = tiles.places[ranks.rank :: world]
    with progress.task("decode", latents.shape[1] * len(mine), "it") as task:
        made = vae.decode_tiles(latents, mine, task.advance)
    none = torch.empty(0, dtype=vae.dtype, device=vae.device)
    parts = ranks.collect_tensors(torch.cat([none, *(tile.flatten() for tile in made)]))
    if not parts:
        return None
    found: dict[tuple[int, int], Tensor] = {}
    for rank, part in enumerate(parts):
        places = tiles.places[rank::world]
        shapes = [tiles.shape(place) for place in places]
        rows = torch.split(part, [math.prod(shape) for shape in shapes])
        views = (row.view(shape) for row, shape in zip(rows, shapes, strict=True))
        found |= zip(places, views, strict=True)
    return _frames(to_uint8(tiles.join([found[place] for place in tiles.places])))


def _frames(levels_3FHW: Tensor) -> Tensor:
    return levels_3FHW.permute(1, 2, 3, 0).contiguous().cpu()
