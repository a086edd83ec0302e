"""One DiT step to measure: random weights in an arena, a model over them, inputs of a size.

Invariant: nothing is zero. Zeros take less power and so clock higher than real weights do.
Shape letters: B batch, S all tokens, L tokens on this rank, N heads, M heads on this rank, H head
width, C channels, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from shared_offload.memory.arena import create
from shared_offload.memory.pinning import CudaRegistrar, chunk_spans, pin
from shared_offload.model.attention import AttentionFn
from shared_offload.model.dit import Dit
from shared_offload.model.operations import PLAIN, Operations
from shared_offload.model.ulysses import SINGLE, Ulysses
from shared_offload.synth.recipes import default_recipe
from shared_offload.weights.architecture import (
    PATCH,
    Architecture,
    block_shapes,
    is_quantised,
    non_block_shapes,
)
from shared_offload.weights.fp8 import FP8_DTYPE, FP8_MAX
from shared_offload.weights.layout import FP8, SCALE, BlockLayout, Unit, WeightSource, build_layout
from shared_offload.weights.threads import usable_threads
from shared_offload.weights.views import views

TIMESTEP = 900.0
IMAGE_TOKENS = 257  # CLIP's patches of one picture and its class token
LATENT_CHANNELS = 16
FRAMES = 21  # of the latent of an 81-frame video; taken where it divides the tokens

# Row-wise scales put the largest of thousands of normal values, about 4 deviations, at FP8's end.
_CODE_STD = FP8_MAX / 4
_POOL_VALUES = 1 << 24
_REGISTRATION_NBYTES = 2 << 30
_MAX_FILLERS = 16


def lay_out(arch: Architecture, *, fp8: bool) -> BlockLayout:
    """The layout of a checkpoint with these dtypes, in bf16 compute."""
    shapes = block_shapes(arch)
    source = {n: FP8 if fp8 and is_quantised(n, s) else "BF16" for n, s in shapes.items()}
    return build_layout(arch, source, "BF16")


@contextmanager
def filled_arena(layout: BlockLayout, device: torch.device) -> Iterator[Tensor]:
    """An arena of random weights as 1-D uint8, registered where the device is a GPU."""
    _, mapping = create(layout.arena_nbytes, layout.fingerprint())
    mapping.prefer_huge_pages()
    host = torch.frombuffer(mapping.view(), dtype=torch.uint8)
    mapping.release()  # the tensor holds it now
    units = layout.units("block")
    pool = _Pool()
    with ThreadPoolExecutor(usable_threads(_MAX_FILLERS)) as threads:
        list(threads.map(lambda unit: pool.fill(unit, host[unit.offset :]), units))
    if device.type != "cuda":
        yield host
        return
    torch.cuda.synchronize(device)  # registration needs CUDA to be initialised
    spans = chunk_spans(layout.arena_nbytes, [unit.offset for unit in units], _REGISTRATION_NBYTES)
    pins = pin(host.data_ptr(), list(spans), CudaRegistrar(device.index or 0), read_only=False)
    try:
        yield host
    finally:
        torch.cuda.synchronize(device)
        pins.undo()


class _Pool:
    """Random values that tensors are cut from: making each one afresh would take minutes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randn(_POOL_VALUES, generator=generator)
        self._codes = (self._values * _CODE_STD).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)

    def fill(self, unit: Unit, place: Tensor) -> None:
        """Write every tensor of the unit; they differ by where in the pool they begin."""
        for number, (name, tensor) in enumerate(views(unit, place).items()):
            start = (unit.index * 104729 + number * 15485863) % _POOL_VALUES
            if tensor.dtype == FP8_DTYPE:
                self._write(tensor.view(torch.uint8), self._codes.view(torch.uint8), start)
            elif name.endswith(SCALE):
                inputs = unit_inputs(unit, name.removesuffix(SCALE))
                tensor.fill_(1 / (_CODE_STD * math.sqrt(inputs)))
            else:
                self._write(tensor, self._values, start)
                recipe = default_recipe(name, tuple(tensor.shape))
                tensor.mul_(recipe.std).add_(recipe.mean)

    @staticmethod
    def _write(tensor: Tensor, source: Tensor, start: int) -> None:
        flat = tensor.view(-1)
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, source.numel() - start)
            flat[done : done + count].copy_(source[start : start + count])
            done, start = done + count, 0


def unit_inputs(unit: Unit, weight: str) -> int:
    """Columns of a weight of the unit."""
    return next(placed.shape[1] for placed in unit.tensors if placed.name == weight)


class LocalShare(Ulysses):
    """The first of `size` ranks, alone: its tokens, and the attention work of its heads.

    Nothing is communicated: what it sends to its peers is what it gets from them, so time is that
    of a rank whose peers answer at once, and values mean nothing.
    """

    def __init__(self, size: int) -> None:
        self.size, self._rank = size, 0

    def begin(self, send: Tensor) -> Callable[[], Tensor]:
        """Its own parts come back."""
        return lambda: send

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:
        """This rank's chunk in everyone's place."""
        return x_BLC.repeat(1, self.size, 1)[:, :tokens]


class Workload:
    """A model with inputs for `tokens` tokens; weights come with each step."""

    def __init__(
        self,
        arch: Architecture,
        device: torch.device,
        *,
        tokens: int,
        share: int,
        attention: AttentionFn,
        operations: Operations = PLAIN,
        branches: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Weights outside the blocks have bf16 values whatever the `dtype` that is computed in."""
        self.grid = grid_of(tokens)
        self._generator = torch.Generator(device).manual_seed(1)
        self._device = device
        self.dit = Dit(
            arch,
            {name: self._weight(name, shape) for name, shape in non_block_shapes(arch).items()},
            dtype=dtype,
            device=device,
            self_attention=attention,
            cross_attention=attention,
            exchange=SINGLE if share == 1 else LocalShare(share),
            operations=operations,
        )
        sizes = [size * patch for size, patch in zip(self.grid, PATCH, strict=True)]
        i2v = arch.model_type == "i2v"
        self._latent = self._random(LATENT_CHANNELS, *sizes)
        condition = arch.in_dim - LATENT_CHANNELS
        self._condition = self._random(condition, *sizes) if i2v else None
        clip = self._random(IMAGE_TOKENS, arch.image_dim) if i2v else None
        image = None if clip is None else self.dit.embed_image(clip)
        self._branches = [
            self.dit.make_branch(self._random(rows, arch.text_dim), image, keep=True)
            for rows in (arch.text_len // 2, arch.text_len // 4)[:branches]
        ]

    def step(self, source: WeightSource) -> Sequence[Tensor]:
        """The velocities of one step; enqueued, not waited for."""
        return self.dit.velocities(self._latent, TIMESTEP, self._branches, source, self._condition)

    def _weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        recipe = default_recipe(name, shape)
        values = self._random(*shape).mul_(recipe.std).add_(recipe.mean)
        return values.to(torch.bfloat16)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, generator=self._generator)


def grid_of(tokens: int) -> tuple[int, int, int]:
    """Frames, rows and columns with this product; time does not depend on which."""
    frames = FRAMES if tokens % FRAMES == 0 else 1
    rest = tokens // frames
    rows = next(n for n in range(math.isqrt(rest), 0, -1) if rest % n == 0)
    return frames, rows, rest // rows
