"""Sequence parallelism from outside: what the model hands its tokens to, and gets heads back from.

Tokens are split over P ranks; around self-attention ranks trade tokens for heads, so that each sees
the whole sequence for N/P of the heads (DeepSpeed-Ulysses). Everything else of a DiT block works
on tokens one by one and never notices. A block costs two collectives: q, k, v out in one
all-to-all, the result back in another.

Invariant: padding never enters a softmax. Tokens are padded with zeros at the end to a multiple of
P, so pads lie behind token S, and what attention sees is trimmed to S.

Shape letters: B batch, S all tokens, L tokens on this rank (L = ceil(S / P)), N heads, M = N/P
heads on this rank, H head width, C channels, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shared_offload.ranks.tensors import all_gather

Qkv = tuple[Tensor, Tensor, Tensor]
Heads = Callable[[], Qkv]
"""q, k, v when they have come; to be called once."""
Tokens = Callable[[], Tensor]


class Exchange(Protocol):
    """Sequence parallelism as the model sees it; every method is collective over `size` ranks.

    `to_heads` and `to_tokens` begin an exchange and return what waits for its end, so that other
    work can run meanwhile.
    """

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""

    def split_tokens(self, x_BSC: Tensor) -> Tensor:
        """This rank's chunk (B, L, C), padded with zeros. Local: no communication."""

    def to_heads(self, qkv_BLNH: Qkv, tokens: int) -> Heads:
        """q, k, v of all `tokens` for this rank's heads: three of (B, S, M, H)."""

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        """The way back: (B, L, N, H), zeros for pads."""

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:
        """All chunks in order, pads cut off: (B, S, C) on every rank."""


class Single:
    """One rank: the identity, without a copy."""

    size = 1

    def split_tokens(self, x_BSC: Tensor) -> Tensor:
        return x_BSC

    def to_heads(self, qkv_BLNH: Qkv, tokens: int) -> Heads:  # noqa: ARG002 - S is L here
        return lambda: qkv_BLNH

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        return lambda: out_BSMH

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:  # noqa: ARG002
        return x_BLC


SINGLE: Exchange = Single()


class Ulysses:
    """Exchange over a process group (gloo on CPU, NCCL on GPUs); does not own the group.

    NCCL collectives run on the group's own stream, beside what is enqueued until their result is
    asked for; then the current stream waits for them, and the host never does. The number of heads
    must be a multiple of the group's size; start-up checks that.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def split_tokens(self, x_BSC: Tensor) -> Tensor:
        """This rank's chunk (B, L, C), padded with zeros. Local: no communication."""
        tokens = x_BSC.shape[1]
        chunk = self._chunk(tokens)
        start = min(self._rank * chunk, tokens)
        x_BLC = x_BSC[:, start : start + chunk]
        return F.pad(x_BLC, (0, 0, 0, chunk - x_BLC.shape[1])).contiguous()

    def to_heads(self, qkv_BLNH: Qkv, tokens: int) -> Heads:
        """Collective. One all-to-all; peak memory: send and receive buffers of 3 B L N H each."""
        size = self.size
        batch, chunk, heads, width = qkv_BLNH[0].shape
        send = qkv_BLNH[0].new_empty(size, 3, batch, chunk, heads // size, width)
        for part, x_BLNH in enumerate(qkv_BLNH):
            # (B, L, N, H) -> (B, L, P, M, H) -> (P, B, L, M, H): heads of one peer together
            by_peer = x_BLNH.reshape(batch, chunk, size, heads // size, width)
            send[:, part] = by_peer.permute(2, 0, 1, 3, 4)
        arrived = self._begin(send)

        def joined() -> Qkv:
            received = arrived()
            q, k, v = (self._join(received[:, part], tokens) for part in range(3))
            return q, k, v

        return joined

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        """Collective. One all-to-all."""
        size = self.size
        batch, tokens, heads, width = out_BSMH.shape
        chunk = self._chunk(tokens)
        padded = F.pad(out_BSMH, (0, 0, 0, 0, 0, size * chunk - tokens))
        # (B, P L, M, H) -> (B, P, L, M, H) -> (P, B, L, M, H): tokens of one peer together
        by_peer = padded.reshape(batch, size, chunk, heads, width)
        arrived = self._begin(by_peer.transpose(0, 1).contiguous())
        # received (P, B, L, M, H), P counting heads now -> (B, L, P, M, H) -> (B, L, N, H)
        return lambda: arrived().permute(1, 2, 0, 3, 4).flatten(2, 3)

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:
        """Collective. One all-gather."""
        x_BLC = x_BLC.contiguous()
        received = x_BLC.new_empty(self.size, *x_BLC.shape)
        all_gather(received.flatten(0, 1), x_BLC, group=self._group)
        return self._join(received, tokens)

    def _begin(self, send: Tensor) -> Tokens:
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=self._group, async_op=True)

        def arrived() -> Tensor:
            nonlocal send  # kept until here: the exchange reads it
            work.wait()
            del send
            return received

        return arrived

    def _chunk(self, tokens: int) -> int:
        return -(-tokens // self.size)

    @staticmethod
    def _join(x_PBL: Tensor, tokens: int) -> Tensor:
        """(P, B, L, ...) -> (B, P, L, ...) -> (B, P L, ...) -> (B, S, ...)."""
        return x_PBL.transpose(0, 1).flatten(1, 2)[:, :tokens]
