"""diffusers' WanTransformer3DModel with given Wan weights: an independent forward pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from shared_offload.weights.architecture import Architecture

# Wan's module -> diffusers' module; first match wins. Written down here on its own, so that a
# mistake in the package's own table cannot hide itself.
RENAMES = (
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
    (r"^img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
    (r"^img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
    (r"^img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
    (r"^head\.head\.", "proj_out."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
    (r"\.self_attn\.([qkv])\.", r".attn1.to_\1."),
    (r"\.self_attn\.o\.", ".attn1.to_out.0."),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.norm_k_img\.", ".attn2.norm_added_k."),
    (r"\.cross_attn\.([kv])_img\.", r".attn2.add_\1_proj."),
    (r"\.cross_attn\.([qkv])\.", r".attn2.to_\1."),
    (r"\.cross_attn\.o\.", ".attn2.to_out.0."),
    (r"\.cross_attn\.", ".attn2."),
)


def rename(name: str) -> str:
    for pattern, replacement in RENAMES:
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def arguments(arch: Architecture) -> dict[str, Any]:
    """WanTransformer3DModel's, for a model of these sizes; its own defaults are Wan's."""
    image = {"image_dim": arch.image_dim, "added_kv_proj_dim": arch.dim}
    return {
        "num_attention_heads": arch.num_heads,
        "attention_head_dim": arch.head_dim,
        "in_channels": arch.in_dim,
        "out_channels": arch.out_dim,
        "text_dim": arch.text_dim,
        "freq_dim": arch.freq_dim,
        "ffn_dim": arch.ffn_dim,
        "num_layers": arch.num_layers,
        "eps": arch.eps,
        **(image if arch.model_type == "i2v" else {}),
    }


def build(arch: Architecture, weights: Mapping[str, Tensor]) -> WanTransformer3DModel:
    """The model in fp32; it holds the given tensors, not copies of them."""
    with torch.device("meta"):
        model = WanTransformer3DModel(**arguments(arch))
    model.load_state_dict({rename(n): t for n, t in weights.items()}, strict=True, assign=True)
    rope = type(model.rope)(arch.head_dim, model.config.patch_size, model.config.rope_max_seq_len)
    model.rope = rope  # its tables are no weights, so they were left on the meta device
    return model.eval()


@torch.no_grad()
def velocity(
    model: WanTransformer3DModel,
    latent: Tensor,
    timestep: float,
    text: Tensor,
    image: Tensor | None = None,
) -> Tensor:
    """One forward pass over unbatched inputs; `text` has all its 512 rows."""
    out = model(
        latent[None],
        torch.tensor([timestep]),
        text[None],
        None if image is None else image[None],
        return_dict=False,
    )
    return out[0][0]
