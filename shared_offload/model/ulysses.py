"""Sequence parallelism from outside: what the model hands its tokens to, and gets heads back from.

Tokens are split over P ranks; around self-attention ranks trade tokens for heads, so that each sees
the whole sequence for N/P of the heads (DeepSpeed-Ulysses). Everything else of a DiT block works
on tokens one by one and never notices. A block costs two collectives: q, k, v out in one
all-to-all, the result back in another.

Nothing is packed or unpacked on the way: who makes q, k and v writes them where they are sent from,
attention reads them where they arrived, and so does who reads its result. Buffers hold rows of a
peer together, and in a row q, k and v beside each other; so for one video, what has come from all
peers is one sequence.

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
"""q, k, v of all tokens for this rank's heads, three of (B, S, M, H), when they have come; to be
called once."""
Tokens = Callable[[], Tensor]
"""The way back, (B, L, P, M, H), zeros for pads; likewise."""


class Outgoing(Protocol):
    """q, k, v on their way out: one use."""

    def place(self, part: int) -> Tensor | None:
        """Where q (0), k (1) or v (2) is to be written, (B, L, P, M, H); None: anywhere."""

    def send(self, qkv_BLNH: Qkv, tokens: int) -> Heads:
        """Begin the exchange of what was written, or is handed over where there is no place."""


class Exchange(Protocol):
    """Sequence parallelism as the model sees it; every method is collective over `size` ranks.

    Exchanges begin when they are called and return what waits for their end, so that other work can
    run meanwhile.
    """

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""

    def split_tokens(self, x_BSC: Tensor) -> Tensor:
        """This rank's chunk (B, L, C), padded with zeros. Local: no communication."""

    def outgoing(self, x_BLD: Tensor, heads: int) -> Outgoing:
        """For q, k and v of x's size and dtype. Local."""

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        """Attention's result back to its tokens."""

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:
        """All chunks in order, pads cut off: (B, S, C) on every rank."""


class Single:
    """One rank: the identity, without a copy."""

    size = 1

    def split_tokens(self, x_BSC: Tensor) -> Tensor:
        return x_BSC

    def outgoing(self, x_BLD: Tensor, heads: int) -> Outgoing:  # noqa: ARG002 - need no room
        return _HandedOver()

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        return lambda: out_BSMH.unsqueeze(2)

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:  # noqa: ARG002
        return x_BLC


class _HandedOver:
    def place(self, part: int) -> Tensor | None:  # noqa: ARG002
        return None

    def send(self, qkv_BLNH: Qkv, tokens: int) -> Heads:  # noqa: ARG002 - S is L here
        return lambda: qkv_BLNH


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

    def outgoing(self, x_BLD: Tensor, heads: int) -> Outgoing:
        """Memory: 3 B L D, and as much again when it is sent."""
        batch, chunk, width = x_BLD.shape
        shape = (self.size, batch, chunk, 3, heads // self.size, width // heads)
        return _Package(x_BLD.new_empty(shape), self.begin)

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        """Collective. One all-to-all; no copy where S divides by P and B is 1."""
        size = self.size
        batch, tokens, heads, width = out_BSMH.shape
        chunk = self._chunk(tokens)
        lack = size * chunk - tokens
        padded = F.pad(out_BSMH, (0, 0, 0, 0, 0, lack)) if lack else out_BSMH
        # (B, P L, M, H) -> (B, P, L, M, H) -> (P, B, L, M, H): tokens of one peer together
        by_peer = padded.reshape(batch, size, chunk, heads, width)
        arrived = self.begin(by_peer.transpose(0, 1).contiguous())
        # received (P, B, L, M, H), P counting heads now -> (B, L, P, M, H)
        return lambda: arrived().permute(1, 2, 0, 3, 4)

    def gather_tokens(self, x_BLC: Tensor, tokens: int) -> Tensor:
        """Collective. One all-gather."""
        x_BLC = x_BLC.contiguous()
        received = x_BLC.new_empty(self.size, *x_BLC.shape)
        all_gather(received.flatten(0, 1), x_BLC, group=self._group)
        return self._join(received, tokens)

    def begin(self, send: Tensor) -> Callable[[], Tensor]:
        """Collective. Send each peer its part along the first dimension, and get theirs."""
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


class _Package:
    """A buffer (P, B, L, 3, M, H) to be filled and exchanged."""

    def __init__(self, send: Tensor, begin: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._send, self._begin = send, begin

    def place(self, part: int) -> Tensor | None:
        """(P, B, L, M, H) -> (B, L, P, M, H)."""
        return self._send[:, :, :, part].permute(1, 2, 0, 3, 4)

    def send(self, qkv_BLNH: Qkv, tokens: int) -> Heads:  # noqa: ARG002 - they are in the buffer
        """Collective. One all-to-all."""
        arrived = self._begin(self._send)
        del self._send

        def heads() -> Qkv:
            # (P, B, L, 3, M, H) -> (B, P, L, 3, M, H) -> (B, P L, 3, M, H): a view where B is 1
            rows = arrived().transpose(0, 1).flatten(1, 2)[:, :tokens]
            q, k, v = rows.unbind(2)
            return q, k, v

        return heads
