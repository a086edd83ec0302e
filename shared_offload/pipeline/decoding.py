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
    vaes: OnDemand[Vae], latents: Tensor, ranks: Ranks, progress: Progress, *, together: bool
) -> Tensor | None:
    """Collective. Frames, uint8 (F, H, W, 3), on the CPU of the first rank; None elsewhere.

    `together`: on all ranks, each with the VAE loaded; else the others wait, and burn no CPU.
    """
    frames: Tensor | None = None
    if together and ranks.world_size > 1:
        with vaes.use() as vae:
            ranks.barrier()  # until all have loaded theirs
            way = _tiles if vae.tiled(latents) else _strips
            frames = way(vae, latents, ranks, progress)
    elif ranks.is_first:
        with vaes.use() as vae, progress.task("decode", vae.decode_calls(latents), "it") as task:
            frames = _frames(to_uint8(vae.decode(latents, task.advance)))
    ranks.barrier()
    return frames


def _strips(vae: Vae, latents: Tensor, ranks: Ranks, progress: Progress) -> Tensor | None:
    strips = Strips(latents, ranks.rank, ranks.world_size, ranks.swap_edges)
    with progress.task("decode", latents.shape[1], "it") as task:
        strip = vae.decode_strip(latents, strips, task.advance)
    none = torch.empty(0, dtype=torch.uint8, device=vae.device)
    parts = ranks.collect_tensors(none if strip is None else to_uint8(strip))
    return _frames(torch.cat([p for p in parts if p.numel()], strips.dim)) if parts else None


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
