"""One DiT block of Wan 2.1 as three functions x -> x, residual included.

With m = modulation + e0, six rows of width D that are the same for all tokens (0 shift, 1 scale,
2 gate of self-attention; 3, 4, 5 those of the feed-forward):

    x = x + m2 * SelfAttention( LN(x) * (1 + m1) + m0 )
    x = x +      CrossAttention( LN_affine(x), text, image )       no gate, no modulation
    x = x + m5 * FeedForward( LN(x) * (1 + m4) + m3 )

q and k are RMS-normed over the full width D, all heads together, before they are split into heads;
v is not normed. In self-attention q and k are then rotated by position. In image-to-video the
image has keys and values of its own: two softmaxes over the same q, summed before the output
projection.

Invariant: a function reads only tensors of its own phase and has no state, so a run by blocks and a
run by phases are equal bit for bit. x keeps its dtype; norms, modulation, rotation and gates are
fp32 and rounded once.

Shape letters: B batch, S all tokens, L tokens on this rank, E text tokens, I image tokens, D width,
N heads, M heads on this rank, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from shared_offload.model.attention import AttentionFn
from shared_offload.model.layers import Weights, layer_norm, linear, rms_norm
from shared_offload.model.rope import RopeTable, rotate
from shared_offload.model.ulysses import Exchange
from shared_offload.weights.architecture import Phase


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


BlockFunction = Callable[[Tensor, Weights, BlockInputs], Tensor]


def self_attention(x_BLD: Tensor, w: Weights, inputs: BlockInputs) -> Tensor:
    """The first phase. Collective over the exchange's ranks: two all-to-alls."""
    shift, scale, gate = _modulation(w["self_attn.modulation"], inputs.e0_6D[:3])
    y_BLD = layer_norm(x_BLD, 1 + scale, shift, inputs.eps).to(x_BLD.dtype)
    q_BLNH, k_BLNH = (
        rotate(_normed_heads(y_BLD, w, f"self_attn.{part}", inputs), inputs.rope).to(x_BLD.dtype)
        for part in ("q", "k")
    )
    v_BLNH = _heads(linear(y_BLD, w, "self_attn.v"), inputs)
    q_BSMH, k_BSMH, v_BSMH = inputs.exchange.to_heads((q_BLNH, k_BLNH, v_BLNH), inputs.tokens)
    out_BSMH = inputs.self_attention(q_BSMH, k_BSMH, v_BSMH)
    out_BLNH = inputs.exchange.to_tokens(out_BSMH)
    return _gated(x_BLD, linear(out_BLNH.flatten(2), w, "self_attn.o"), gate)


def cross_attention(x_BLD: Tensor, w: Weights, inputs: BlockInputs) -> Tensor:
    """The second phase: text, and the image where there is one. Local to the rank."""
    y_BLD = layer_norm(x_BLD, w["norm3.weight"], w["norm3.bias"], inputs.eps).to(x_BLD.dtype)
    q_BLNH = _normed_heads(y_BLD, w, "cross_attn.q", inputs).to(x_BLD.dtype)

    def attend(context: Tensor, suffix: str) -> Tensor:
        k = _normed_heads(context, w, f"cross_attn.k{suffix}", inputs).to(x_BLD.dtype)
        v = _heads(linear(context, w, f"cross_attn.v{suffix}"), inputs)
        return inputs.cross_attention(q_BLNH, k, v)

    out_BLNH = attend(inputs.text_BED, "")
    if inputs.image_BID is not None:
        out_BLNH = out_BLNH + attend(inputs.image_BID, "_img")
    return x_BLD + linear(out_BLNH.flatten(2), w, "cross_attn.o")


def feed_forward(x_BLD: Tensor, w: Weights, inputs: BlockInputs) -> Tensor:
    """The third phase. Local to the rank."""
    shift, scale, gate = _modulation(w["ffn.modulation"], inputs.e0_6D[3:])
    y_BLD = layer_norm(x_BLD, 1 + scale, shift, inputs.eps).to(x_BLD.dtype)
    hidden = F.gelu(linear(y_BLD, w, "ffn.0"), approximate="tanh")
    return _gated(x_BLD, linear(hidden, w, "ffn.2"), gate)


PHASE_FUNCTIONS: Mapping[Phase, BlockFunction] = {
    "self_attn": self_attention,
    "cross_attn": cross_attention,
    "ffn": feed_forward,
}


def _modulation(modulation_13D: Tensor, e0_3D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and gate of a phase, fp32 (D) each."""
    shift, scale, gate = (modulation_13D[0].float() + e0_3D).unbind(0)
    return shift, scale, gate


def _gated(x_BLD: Tensor, y_BLD: Tensor, gate_D: Tensor) -> Tensor:
    # gate is fp32, so both operations are, by type promotion and without fp32 copies of x and y.
    return (x_BLD + y_BLD * gate_D).to(x_BLD.dtype)


def _heads(x_BLD: Tensor, inputs: BlockInputs) -> Tensor:
    return x_BLD.reshape(*x_BLD.shape[:-1], inputs.heads, -1)


def _normed_heads(x_BLD: Tensor, w: Weights, name: str, inputs: BlockInputs) -> Tensor:
    """q or k of the layer `name` (attention.part), RMS-normed; fp32 (B, L, N, H)."""
    attention, part = name.split(".")
    weight = w[f"{attention}.norm_{part}.weight"]
    return _heads(rms_norm(linear(x_BLD, w, name), weight, inputs.eps), inputs)
