"""One DiT block of Wan 2.1 as three phases x -> x, residual included.

With m = modulation + e0, six rows of width D that are the same for all tokens (0 shift, 1 scale,
2 gate of self-attention; 3, 4, 5 those of the feed-forward):

    x = x + m2 * SelfAttention( LN(x) * (1 + m1) + m0 )
    x = x +      CrossAttention( LN_affine(x), text, image )       no gate, no modulation
    x = x + m5 * FeedForward( LN(x) * (1 + m4) + m3 )

q and k are RMS-normed over the full width D, all heads together, before they are split into heads;
v is not normed. In self-attention q and k are then rotated by position. In image-to-video the
image has keys and values of its own: two softmaxes over the same q, summed before the output
projection.

Invariant: a phase reads only tensors of its own and has no state but the memo that it is given, so
a run by blocks and a run by phases are equal bit for bit. What is not a matrix product, attention
or communication is in `operations`, which says how it is rounded.

No exchange is under way while self-attention runs: where branches are in step, it begins when
what all of them sent has come, and results leave when all are done. FlashAttention's kernel has a
group of threads on every SM and splits its work evenly beforehand. A collective that holds some
SMs, and waits on them for a peer whose SMs are all taken by attention, makes attention take twice
as long. Exchanges run beside matrix products instead.

Shape letters: B batch, S all tokens, L tokens on this rank, E text tokens, I image tokens, D width,
N heads, M heads on this rank, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared_offload.model.attention import AttentionFn
from shared_offload.model.layers import Weights, linear, linears
from shared_offload.model.operations import PLAIN, Operations
from shared_offload.model.rope import RopeTable
from shared_offload.model.ulysses import Exchange
from shared_offload.weights.architecture import Phase

Memo = dict[str, tuple[Tensor, Tensor]]
"""Keys and values of one block over the context of one branch, by the layers' suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """What all blocks of one forward pass share beside x."""

    e0_6D: Tensor
    """fp32 (6, D): what the timestep adds to every block's modulation."""
    rope: RopeTable
    """Of this rank's tokens."""
    text_BED: Tensor
    image_BID: Tensor | None
    """None: no image attention."""
    tokens: int
    """S, without padding."""
    heads: int
    eps: float
    self_attention: AttentionFn
    cross_attention: AttentionFn
    exchange: Exchange
    operations: Operations = PLAIN


Passage = Generator[None, None, Tensor]
"""A phase under way. Yields where it waits for other ranks, or other branches are to come as far;
returns x."""

BlockFunction = Callable[[Tensor, Weights, BlockInputs, Memo | None], Passage]


_QKV = tuple(f"self_attn.{part}" for part in "qkv")


def in_step(passages: Sequence[Passage]) -> list[Tensor]:
    """Run phases to their ends, each up to its next yield in turn; their results in order."""
    results: dict[int, Tensor] = {}
    while len(results) < len(passages):
        for index, passage in enumerate(passages):
            if index in results:
                continue
            try:
                next(passage)
            except StopIteration as end:
                results[index] = end.value
    return [results[index] for index in range(len(passages))]


def self_attention(
    x_BLD: Tensor, w: Weights, inputs: BlockInputs, memo: Memo | None = None
) -> Passage:
    """The first phase. Collective over the exchange's ranks: two all-to-alls."""
    del memo
    shift, scale, gate = _modulation(w["self_attn.modulation"], inputs.e0_6D[:3])
    do = inputs.operations
    y = do.norm(x_BLD, 1 + scale, shift, inputs.eps, w["self_attn.q.weight"])
    q, k, v = (_heads(part, inputs) for part in linears(y, w, _QKV))
    out = inputs.exchange.outgoing(x_BLD, inputs.heads)
    qkv = (
        _placed(out.place(0), q, inputs, w["self_attn.norm_q.weight"], inputs.rope),
        _placed(out.place(1), k, inputs, w["self_attn.norm_k.weight"], inputs.rope),
        _placed(out.place(2), v, inputs),
    )
    heads = out.send(qkv, inputs.tokens)
    del y, q, k, v, qkv, out  # gigabytes, while another branch runs
    yield
    qkv = heads()
    del heads
    yield
    out_BSMH = inputs.self_attention(*qkv)
    del qkv
    yield
    tokens = inputs.exchange.to_tokens(out_BSMH)
    del out_BSMH
    yield
    rows = do.total([tokens()], w["self_attn.o.weight"])
    return do.add(x_BLD, linear(rows, w, "self_attn.o"), gate)


def cross_attention(
    x_BLD: Tensor, w: Weights, inputs: BlockInputs, memo: Memo | None = None
) -> Passage:
    """The second phase: text, and the image where there is one. Local to the rank."""
    do = inputs.operations
    y = do.norm(x_BLD, w["norm3.weight"], w["norm3.bias"], inputs.eps, w["cross_attn.q.weight"])
    norm = w["cross_attn.norm_q.weight"]
    q_BLNH = do.heads(linear(y, w, "cross_attn.q"), norm, inputs.eps, inputs.heads, None)
    outs = [
        inputs.cross_attention(q_BLNH, *_keys_and_values(context, w, suffix, inputs, memo))
        for context, suffix in ((inputs.text_BED, ""), (inputs.image_BID, "_img"))
        if context is not None
    ]
    out = do.total(outs, w["cross_attn.o.weight"])
    return do.add(x_BLD, linear(out, w, "cross_attn.o"), None)
    yield


def feed_forward(
    x_BLD: Tensor, w: Weights, inputs: BlockInputs, memo: Memo | None = None
) -> Passage:
    """The third phase. Local to the rank."""
    del memo
    shift, scale, gate = _modulation(w["ffn.modulation"], inputs.e0_6D[3:])
    do = inputs.operations
    y = do.norm(x_BLD, 1 + scale, shift, inputs.eps, w["ffn.0.weight"])
    hidden = do.gelu(linear(y, w, "ffn.0"), w["ffn.2.weight"])
    del y
    return do.add(x_BLD, linear(hidden, w, "ffn.2"), gate)
    yield


PHASE_FUNCTIONS: Mapping[Phase, BlockFunction] = {
    "self_attn": self_attention,
    "cross_attn": cross_attention,
    "ffn": feed_forward,
}


def _keys_and_values(
    context: Tensor, w: Weights, suffix: str, inputs: BlockInputs, memo: Memo | None
) -> tuple[Tensor, Tensor]:
    """Of the context's rows; they are the same in every step, so a memo keeps them."""
    if memo is not None and suffix in memo:
        return memo[suffix]
    norm = w[f"cross_attn.norm_k{suffix}.weight"]
    k, v = linears(context, w, [f"cross_attn.{part}{suffix}" for part in "kv"])
    k_BENH, v_BENH = (
        inputs.operations.heads(k, norm, inputs.eps, inputs.heads, None),
        _heads(v, inputs),
    )
    if memo is not None:
        memo[suffix] = k_BENH, v_BENH.contiguous()  # not a view that keeps the whole product
    return memo[suffix] if memo is not None else (k_BENH, v_BENH)


def _modulation(modulation_13D: Tensor, e0_3D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and gate of a phase, fp32 (D) each."""
    shift, scale, gate = (modulation_13D[0].float() + e0_3D).unbind(0)
    return shift, scale, gate


def _placed(
    place_BLPMH: Tensor | None,
    x_BLNH: Tensor,
    inputs: BlockInputs,
    norm_D: Tensor | None = None,
    rope: RopeTable | None = None,
) -> Tensor:
    """q, k or v, normed and turned or as it is, there or where it is: nobody needs it as it was."""
    if place_BLPMH is None and norm_D is None:
        return x_BLNH
    place = x_BLNH.unsqueeze(2) if place_BLPMH is None else place_BLPMH
    do, heads = inputs.operations, inputs.heads
    do.heads(x_BLNH.flatten(2), norm_D, inputs.eps, heads, rope, place)
    return x_BLNH if place_BLPMH is None else place


def _heads(x_BLD: Tensor, inputs: BlockInputs) -> Tensor:
    return x_BLD.view(*x_BLD.shape[:-1], inputs.heads, -1)
