"""Names of a Wan DiT's tensors in diffusers' `WanTransformer3DModel`, in both directions.

Invariant: the two functions are inverse to each other on every tensor of `architecture.py`, FP8
scales included. Note that Wan's `norm3` is diffusers' `norm2` (and its own norm2 has no tensors).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_OUTSIDE: Mapping[str, str] = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_ATTENTIONS = {"self_attn": "attn1", "cross_attn": "attn2"}
_ATTENTION: Mapping[str, str] = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
}
_INSIDE: Mapping[str, str] = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    **{
        f"{wan}.{part}": f"{diffusers}.{name}"
        for wan, diffusers in _ATTENTIONS.items()
        for part, name in _ATTENTION.items()
    },
}
_OUTSIDE_BACK = {diffusers: wan for wan, diffusers in _OUTSIDE.items()}
_INSIDE_BACK = {diffusers: wan for wan, diffusers in _INSIDE.items()}

_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)", re.DOTALL)
_SUFFIX = re.compile(r"(.+?)(\.(?:weight|bias|weight_scale))?", re.DOTALL)
_OF_DIFFUSERS = re.compile(
    r"condition_embedder\.|proj_out\.|scale_shift_table|blocks\.\d+\.attn1\."
)


def to_diffusers(name: str) -> str | None:
    """Diffusers' name of Wan's tensor `name`; None where there is none."""
    return _translate(name, _OUTSIDE, _INSIDE)


def from_diffusers(name: str) -> str | None:
    """Wan's name of diffusers' tensor `name`; None where there is none."""
    return _translate(name, _OUTSIDE_BACK, _INSIDE_BACK)


def is_diffusers(names: Iterable[str]) -> bool:
    """Whether these tensor names are diffusers' and not Wan's own."""
    return any(_OF_DIFFUSERS.match(name) for name in names)


def _translate(name: str, outside: Mapping[str, str], inside: Mapping[str, str]) -> str | None:
    block = _BLOCK.fullmatch(name)
    prefix, rest, table = (block[1], block[2], inside) if block else ("", name, outside)
    parts = _SUFFIX.fullmatch(rest)
    if parts is None or parts[1] not in table:
        return None
    return f"{prefix}{table[parts[1]]}{parts[2] or ''}"
