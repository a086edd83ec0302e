"""A decode split over ranks: strips of the picture, or tiles where the VAE is tiled.

Strips. Only the decoder's middle block attends over a whole frame; it works at an eighth of the
size and costs 2.6 % of a decode. Every rank computes up to there, keeps a strip of the longer
side, and goes on with that alone. From then on all is convolution: before each of 3 x 3, neighbours
swap the one row that the kernel reaches across the cut. So each rank has just what the
undivided decode has there, nothing is computed twice, and a strip may be as thin as one latent.
Ranks beyond the number of latents have nothing to decode and only take part in the swaps.

Tiles (`use_tiling_vae`). The same tiles, blended alike, as in the undivided tiled decode; each rank
decodes every P-th of them.

Nothing of the library is replaced: strips are hooks for as long as one decode runs. Shape letters:
C channels, T latent frames, Y X latent height and width, F frames, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[int, int]  # the upper left corner of a tile, in latents
Swap = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
TIME_RATIO = 4  # frames of the video that one latent frame makes, but for the first
TIME = 2  # the dimension of frames in (B, C, T, Y, X)


class Strips:
    """One rank's strip of a plane of latents, and the way to decode it."""

    def __init__(self, latent_CTYX: Tensor, rank: int, world_size: int, swap: Swap) -> None:
        _, self._frames, height, width = latent_CTYX.shape
        self.dim = -1 if width >= height else -2
        """The dimension that is cut, in all of (C, T, Y, X), (3, F, H, W) and (B, C, T, Y, X)."""
        size = max(width, height)
        self._chain = min(world_size, size)
        at = min(rank, self._chain)
        self.start, self.end = (x * size // self._chain for x in (at, at + 1))
        """In latents along that dimension."""
        self._length = max(0, min(self.end, size) - self.start)
        self._swap = swap

    @property
    def empty(self) -> bool:
        """This rank has nothing to decode."""
        return self._length == 0

    @contextmanager
    def applied(self, decoder: Any) -> Iterator[None]:  # noqa: ANN401  diffusers has no types
        """Inside the `with`, `decoder` makes this strip instead of whole frames. Collective."""
        handles = [decoder.mid_block.register_forward_hook(self._cut)]
        for conv in _reaching_convs(decoder):
            handles.append(conv.register_forward_pre_hook(self._extend))
            handles.append(conv.register_forward_hook(self._trim))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def stand_by(self, decoder: Any, device: torch.device) -> None:  # noqa: ANN401
        """Take part in the swaps of a decode with an empty strip."""
        nothing = torch.empty(0, device=device)
        for _ in range(self._frames * len(_reaching_convs(decoder))):
            self._swap(nothing, nothing, self._chain)

    def _cut(self, _module: nn.Module, _inputs: object, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self._length)

    def _extend(self, _module: nn.Module, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """Input, and the frames before it, with the neighbours' edges on both sides."""
        x, *earlier = (tensor for tensor in inputs if tensor is not None)
        parts = [*earlier, x]  # in time; a 2-D convolution has no earlier frames
        first, last = (
            torch.cat([part.narrow(self.dim, at, 1) for part in parts], TIME)
            if earlier
            else x.narrow(self.dim, at, 1)
            for at in (0, x.shape[self.dim] - 1)
        )
        edges = self._swap(first, last, self._chain)
        if not earlier:
            return (self._between(x, *edges),)
        counts = [part.shape[TIME] for part in parts]
        befores, afters = (torch.split(edge, counts, TIME) for edge in edges)
        past, now = map(self._between, parts, befores, afters)
        return now, past

    def _between(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return torch.cat((before, x, after), self.dim)

    def _trim(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        """Without what the convolution made in place of the neighbours."""
        return output.narrow(self.dim, 1, output.shape[self.dim] - 2)


def _reaching_convs(decoder: Any) -> list[nn.Module]:  # noqa: ANN401  diffusers has no types
    """Convolutions after the middle block that reach over the cut; each runs once a frame."""
    return [
        module
        for part in (decoder.up_blocks, decoder.conv_out)
        for module in part.modules()
        if isinstance(module, nn.Conv2d | nn.Conv3d) and tuple(module.kernel_size[-2:]) == (3, 3)
    ]


class Tiles:
    """The tiles of a frame as `AutoencoderKLWan.tiled_decode` cuts and blends them."""

    def __init__(self, model: Any, latent_shape: Sequence[int]) -> None:  # noqa: ANN401
        ratio: int = model.spatial_compression_ratio
        self._model = model
        self._frames, height, width = latent_shape[1:]
        self._size = (height, width)
        self._tile = (model.tile_sample_min_height // ratio, model.tile_sample_min_width // ratio)
        stride = (model.tile_sample_stride_height // ratio, model.tile_sample_stride_width // ratio)
        self._stride = tuple(ratio * step for step in stride)
        self._blend = tuple(ratio * (a - b) for a, b in zip(self._tile, stride, strict=True))
        self._rows = range(0, height, stride[0])
        self._columns = range(0, width, stride[1])
        self.places = [(y, x) for y in self._rows for x in self._columns]
        self.needed = height > self._tile[0] or width > self._tile[1]

    def shape(self, place: Place) -> list[int]:
        """Of the decoded tile (3, F, h, w)."""
        ratio: int = self._model.spatial_compression_ratio
        sides = zip(self._size, place, self._tile, strict=True)
        spans = [ratio * min(tile, size - at) for size, at, tile in sides]
        return [3, TIME_RATIO * (self._frames - 1) + 1, *spans]

    def decode(self, latent: Tensor, place: Place) -> Tensor:
        """One tile (3, F, h, w), not clamped, of a latent (B, C, T, Y, X)."""
        model, (y, x), (tall, wide) = self._model, place, self._tile
        model.clear_cache()
        frames = []
        for t in range(self._frames):
            model._conv_idx = [0]  # as the library's own loop keeps its place in the cache
            part = model.post_quant_conv(latent[:, :, t : t + 1, y : y + tall, x : x + wide])
            frames.append(
                model.decoder(
                    part, feat_cache=model._feat_map, feat_idx=model._conv_idx, first_chunk=t == 0
                )
            )
        return torch.cat(frames, TIME)[0]

    def join(self, tiles: Sequence[Tensor]) -> Tensor:
        """The video (3, F, H, W) of all tiles, blended where they overlap. Writes into them."""
        (tall, wide), (down, across) = self._stride, self._blend
        width = len(self._columns)
        rows = [list(tiles[i : i + width]) for i in range(0, len(tiles), width)]
        joined = []
        for i, row in enumerate(rows):
            for j, tile in enumerate(row):
                if i:
                    self._model.blend_v(rows[i - 1][j][None], tile[None], down)
                if j:
                    self._model.blend_h(row[j - 1][None], tile[None], across)
            joined.append(torch.cat([tile[..., :tall, :wide] for tile in row], -1))
        return torch.cat(joined, -2).clamp_(-1, 1)
