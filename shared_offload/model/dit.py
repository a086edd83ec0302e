"""The DiT of Wan 2.1: a noisy latent, a timestep and a context become a velocity.

    patches -> patch embedding -> blocks (borrowed unit by unit) -> head -> latent

This file owns the weights outside the blocks, the loop over units, and the tables that depend on
the latent's size. Invariant: in `velocities` the host never waits for the device, every unit is
borrowed once however many branches there are, and all ranks return the whole velocity.

Shape letters: B batch (1 here), S all tokens, L tokens on this rank, E text tokens, I image tokens,
D width, K channels of a patch, C latent channels, T latent frames, Y X latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.errors import InputError
from shared_offload.model.attention import AttentionFn
from shared_offload.model.block import PHASE_FUNCTIONS, BlockInputs, Memo, in_step
from shared_offload.model.layers import Weights, layer_norm, linear, linear_fp32
from shared_offload.model.operations import PLAIN, Operations
from shared_offload.model.rope import RopeTable, angles
from shared_offload.model.ulysses import SINGLE, Exchange
from shared_offload.weights.architecture import MODULATIONS, PATCH, Architecture, Phase
from shared_offload.weights.layout import WeightSource

TIME_PERIOD = 10000.0
IMAGE_NORM_EPS = 1e-5  # Wan leaves torch's default here, unlike in its blocks

# Computed in fp32, so kept as they come; the rest is cast to the compute dtype once.
_FP32_PREFIXES = ("time_", "head.", "img_emb.proj.0.", "img_emb.proj.4.")

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Branch:
    """One half of classifier-free guidance: its embedded text and, image-to-video, image."""

    text_ED: Tensor
    image_ID: Tensor | None = None
    memos: Sequence[Memo] | None = None
    """One for each block, to keep keys and values over the context from step to step; or none."""


class Dit:
    """A Wan DiT whose blocks live elsewhere.

    `weights` are the tensors outside the blocks under Wan's full names, on any device and in any
    float dtype; they are moved to `device`. Not thread-safe; with several ranks, every rank calls
    `velocities` alike.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        self_attention: AttentionFn,
        cross_attention: AttentionFn,
        exchange: Exchange = SINGLE,
        operations: Operations = PLAIN,
    ) -> None:
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self._self_attention = self_attention
        self._cross_attention = cross_attention
        self._exchange = exchange
        self._operations = operations
        self._w = {
            name: tensor.to(device, None if name.startswith(_FP32_PREFIXES) else dtype)
            for name, tensor in weights.items()
        }
        even = torch.arange(arch.freq_dim // 2, dtype=torch.float64, device=device)
        self._frequencies = TIME_PERIOD ** (-even / (arch.freq_dim // 2))
        self._ropes: dict[Grid, RopeTable] = {}

    @torch.no_grad()
    def embed_text(self, text_E: Tensor) -> Tensor:
        """T5's rows of one prompt (up to text_len, text_dim): (text_len, D) in the compute dtype.

        Missing rows are zeros before the embedding. Its biases turn them into one constant row
        that is attended to like any other: Wan has no mask here.
        """
        missing = self.arch.text_len - text_E.shape[0]
        if missing < 0:
            raise InputError(
                f"the prompt has {text_E.shape[0]} tokens",
                expected=f"at most {self.arch.text_len}",
                hint="shorten the prompt",
                found=text_E.shape[0],
            )
        rows = F.pad(text_E.to(self.device, self.dtype), (0, 0, 0, missing))
        hidden = F.gelu(linear(rows, self._w, "text_embedding.0"), approximate="tanh")
        return linear(hidden, self._w, "text_embedding.2")

    @torch.no_grad()
    def embed_image(self, clip_I: Tensor) -> Tensor:
        """CLIP's features (I, image_dim): (I, D) in the compute dtype. GELU is exact here."""
        y = self._image_norm(clip_I.to(self.device), 0)
        hidden = F.gelu(linear(y, self._w, "img_emb.proj.1"))
        return self._image_norm(linear(hidden, self._w, "img_emb.proj.3"), 4)

    def make_branch(self, text_E: Tensor, image_ID: Tensor | None, *, keep: bool) -> Branch:
        """A branch of T5's rows and the embedded image. `keep`: with memos, `memo_nbytes` of them
        once it has been used; results are the same bits.
        """
        memos: list[Memo] | None = [{} for _ in range(self.arch.num_layers)] if keep else None
        return Branch(self.embed_text(text_E), image_ID, memos)

    @torch.no_grad()
    def velocities(
        self,
        latent_CTYX: Tensor,
        timestep: float,
        branches: Sequence[Branch],
        source: WeightSource,
        condition: Tensor | None = None,
    ) -> list[Tensor]:
        """The velocity (C, T, Y, X) in fp32 of each branch, in their order.

        `timestep` counts from 999 down to 0. `condition` is image-to-video's mask and latent, on
        channels. Collective over the exchange's ranks. Peak memory: one x (L, D) a branch, and
        what one phase of one branch needs.
        """
        full = latent_CTYX if condition is None else torch.cat((latent_CTYX, condition))
        grid = self._grid(full)
        e_D, e0_6D = self._embed_time(timestep)
        inputs = [self._inputs(branch, e0_6D, grid) for branch in branches]
        xs = [self._embed_patches(full)] * len(branches)  # phases make new tensors
        memos: list[Sequence[Memo | None]] = [
            branch.memos or [None] * self.arch.num_layers for branch in branches
        ]
        with self._on_device():
            for unit in source.units:
                with source.borrow(unit) as w:
                    block_memos = [kept[unit.block] for kept in memos]
                    for phase in unit.phases:
                        xs = self._pass(phase, xs, w, inputs, block_memos)
            return [self._head(x_BLD, e_D, grid) for x_BLD in xs]

    def memo_nbytes(self, image_tokens: int) -> int:
        """Bytes that the memos of one branch take."""
        rows = self.arch.text_len + image_tokens
        return 2 * rows * self.arch.dim * self.arch.num_layers * self.dtype.itemsize

    def _pass(
        self,
        phase: Phase,
        xs: Sequence[Tensor],
        w: Weights,
        inputs: Sequence[BlockInputs],
        memos: Sequence[Memo | None],
    ) -> list[Tensor]:
        """All branches through a phase: in step where they exchange with other ranks (`block.py`
        says why), else one after the other, which needs less memory.
        """
        function = PHASE_FUNCTIONS[phase]
        passages = (function(x, w, i, memo) for x, i, memo in zip(xs, inputs, memos, strict=True))
        if self._exchange.size > 1:
            return in_step(list(passages))
        return [x for passage in passages for x in in_step([passage])]

    def _on_device(self) -> AbstractContextManager[object]:
        """Fused kernels are launched on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _inputs(self, branch: Branch, e0_6D: Tensor, grid: Grid) -> BlockInputs:
        return BlockInputs(
            e0_6D=e0_6D,
            rope=self._rope(grid),
            text_BED=branch.text_ED[None],
            image_BID=None if branch.image_ID is None else branch.image_ID[None],
            tokens=math.prod(grid),
            heads=self.arch.num_heads,
            eps=self.arch.eps,
            self_attention=self._self_attention,
            cross_attention=self._cross_attention,
            exchange=self._exchange,
            operations=self._operations,
        )

    def _grid(self, latent_CTYX: Tensor) -> Grid:
        channels, *sizes = latent_CTYX.shape
        odd = [size for size, patch in zip(sizes, PATCH, strict=True) if size % patch]
        if channels != self.arch.in_dim or odd:
            raise InputError(
                f"latent and condition have shape {tuple(latent_CTYX.shape)}",
                expected=f"{self.arch.in_dim} channels, and a height and width that are even",
                hint="height and width of the video must be multiples of 16",
                found=list(latent_CTYX.shape),
            )
        t, y, x = (size // patch for size, patch in zip(sizes, PATCH, strict=True))
        return t, y, x

    def _rope(self, grid: Grid) -> RopeTable:
        """This rank's rows of the table; the last size is kept."""
        if grid not in self._ropes:
            angle = angles(grid, self.arch.head_dim, self.device)[None]
            cos, sin = (
                self._exchange.split_tokens(part.float()).unsqueeze(2)
                for part in (angle.cos(), angle.sin())
            )
            self._ropes = {grid: RopeTable(cos, sin)}
        return self._ropes[grid]

    def _embed_patches(self, latent_CTYX: Tensor) -> Tensor:
        """This rank's tokens (B, L, D).

        Wan's convolution has a kernel as large as its stride, so it is a linear layer over
        patches. Patches are split over ranks before it: they are much smaller than tokens.
        """
        patches = patchify(latent_CTYX)[None].to(self.dtype)
        weight, bias = self._w["patch_embedding.weight"], self._w["patch_embedding.bias"]
        return F.linear(self._exchange.split_tokens(patches), weight.flatten(1), bias)

    def _embed_time(self, timestep: float) -> tuple[Tensor, Tensor]:
        """e (D), which the head reads, and e0 (6, D), which blocks read; fp32.

        Cosines come first. Angles are fp64 as in Wan: 999 radians in fp32 are off by 3e-5.
        """
        # A fill, not a copy from the host: the host need not wait, nor keep a buffer alive.
        angle = torch.full_like(self._frequencies, timestep) * self._frequencies
        wave = torch.cat((angle.cos(), angle.sin())).float()
        hidden = F.silu(linear_fp32(wave, self._w, "time_embedding.0"))
        e_D = linear_fp32(hidden, self._w, "time_embedding.2")
        e0 = linear_fp32(F.silu(e_D), self._w, "time_projection.1", pieces=MODULATIONS)
        return e_D, e0.view(MODULATIONS, -1)

    def _image_norm(self, x: Tensor, index: int) -> Tensor:
        weight, bias = (self._w[f"img_emb.proj.{index}.{kind}"] for kind in ("weight", "bias"))
        return layer_norm(x, weight.float(), bias.float(), IMAGE_NORM_EPS).to(self.dtype)

    def _head(self, x_BLD: Tensor, e_D: Tensor, grid: Grid) -> Tensor:
        """(C, T, Y, X) in fp32. Projected before it is gathered: few channels travel."""
        shift, scale = (self._w["head.modulation"][0].float() + e_D).unbind(0)
        y_BLD = layer_norm(x_BLD, 1 + scale, shift, self.arch.eps)
        patches = linear_fp32(y_BLD, self._w, "head.head")
        return unpatchify(self._exchange.gather_tokens(patches, math.prod(grid))[0], grid)


def patchify(latent_CTYX: Tensor) -> Tensor:
    """Patches as rows (S, K): time slowest, then height, width; in a row, channel slowest."""
    channels, frames, height, width = latent_CTYX.shape
    pt, py, px = PATCH
    split = latent_CTYX.reshape(channels, frames // pt, pt, height // py, py, width // px, px)
    return split.permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)


def unpatchify(rows_SK: Tensor, grid: Grid) -> Tensor:
    """The latent (C, T, Y, X) of the head's rows, in which the channel is fastest."""
    pt, py, px = PATCH
    t, y, x = grid
    split = rows_SK.reshape(t, y, x, pt, py, px, -1)
    return split.permute(6, 0, 3, 1, 4, 2, 5).reshape(-1, t * pt, y * py, x * px)
