"""The models that are trained: sizes, and modules whose configs the pipeline's own loaders read.

Modules are diffusers' and transformers'. Their configs come from the shapes of the files that will
be written, through the functions that will read those files, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionModel, UMT5EncoderModel

from shared_offload.pipeline import image_encoder, text_encoder, vae
from shared_offload.synth.models import clip_recipes, t5_recipes, vae_recipes
from shared_offload.synth.sizes import IN_DIM, ClipSize, T5Size, Task
from shared_offload.weights.architecture import Architecture
from tests.reference.diffusers_dit import arguments

CLIP_LAYERS = 3  # the last one is never computed: Wan reads the state before it
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths and depths of all models."""

    dim: int
    ffn_dim: int
    layers: int
    t5: int
    clip: int
    vae: int


FULL = Sizes(dim=192, ffn_dim=512, layers=8, t5=128, clip=128, vae=16)
QUICK = Sizes(dim=96, ffn_dim=128, layers=8, t5=32, clip=32, vae=4)
"""For a try of the code on a CPU: too small to learn the task."""


def architecture(sizes: Sizes, task: Task) -> Architecture:
    """What config.json will say."""
    return Architecture(
        model_type=task,
        dim=sizes.dim,
        ffn_dim=sizes.ffn_dim,
        freq_dim=256,
        in_dim=IN_DIM[task],
        out_dim=16,
        num_heads=8,
        num_layers=sizes.layers,
        text_len=512,
        eps=1e-6,
        text_dim=sizes.t5,
        image_dim=sizes.clip,
    )


def t5_shapes(sizes: Sizes, vocabulary: int) -> Shapes:
    """Names and shapes of T5's file."""
    size = T5Size(
        layers=2,
        dim=sizes.t5,
        heads=4,
        head_dim=sizes.t5 // 4,
        ffn_dim=2 * sizes.t5,
        vocabulary=vocabulary,
    )
    return {name: recipe.shape for name, recipe in t5_recipes(size).items()}


def clip_shapes(sizes: Sizes) -> Shapes:
    """Names and shapes of CLIP's file."""
    size = ClipSize(
        layers=CLIP_LAYERS,
        dim=sizes.clip,
        mlp_dim=2 * sizes.clip,
        patch=14,
        image=224,
        projection=16,
    )
    return {name: recipe.shape for name, recipe in clip_recipes(size).items()}


def vae_shapes(sizes: Sizes) -> Shapes:
    """Names and shapes of the VAE's file."""
    return {name: recipe.shape for name, recipe in vae_recipes(sizes.vae).items()}


def make_vae(sizes: Sizes) -> Any:  # noqa: ANN401  diffusers has no types
    """An untrained VAE."""
    return AutoencoderKLWan(**vae.read_config(_on_meta(vae_shapes(sizes)), Path("vae")))


def make_t5(sizes: Sizes, vocabulary: int) -> Any:  # noqa: ANN401  transformers has no types
    """An untrained text encoder."""
    shapes = t5_shapes(sizes, vocabulary)
    config = text_encoder.read_config(_on_meta(shapes), Path("t5"))
    config.dropout_rate = 0.0  # only training sees it; a model this small has nothing to spare
    return UMT5EncoderModel(config)


def make_clip(sizes: Sizes) -> Any:  # noqa: ANN401  transformers has no types
    """An untrained image tower without its last block."""
    shapes = {
        name.removeprefix(image_encoder.VISUAL): shape for name, shape in clip_shapes(sizes).items()
    }
    config = image_encoder.read_config(_on_meta(shapes), Path("clip"))
    config.num_hidden_layers -= 1
    return CLIPVisionModel(config)


def make_dit(arch: Architecture) -> Any:  # noqa: ANN401  diffusers has no types
    """An untrained DiT; its attention is `Attend`."""
    dit = WanTransformer3DModel(**arguments(arch))
    attend = Attend()
    for block in dit.blocks:
        block.attn1.set_processor(attend)
        block.attn2.set_processor(attend)
    return dit


def compile_blocks(dit: Any, *, compiled: bool) -> None:  # noqa: ANN401  diffusers has no types
    """Let torch.compile join what stands between a block's products, or take that back."""
    for block in dit.blocks:
        if compiled:
            block.compile(dynamic=False)
        else:
            block._compiled_call_impl = None


def velocity(
    dit: Any,  # noqa: ANN401  diffusers has no types
    x: Tensor,
    sigma: Tensor,
    rows_BED: Tensor,
    bias_B11E: Tensor,
    image_BID: Tensor | None = None,
) -> Tensor:
    """The DiT's answer, fp32, for noise levels `sigma` (B) in 0..1."""
    attend: Attend = dit.blocks[0].attn1.processor
    attend.bias_B11E = bias_B11E
    found: Tensor = dit(
        hidden_states=x,
        timestep=sigma * 1000,
        encoder_hidden_states=rows_BED,
        encoder_hidden_states_image=image_BID,
        return_dict=False,
    )[0]
    return found.float()


class Attend:
    """Wan's attention for text of any number of rows, each with a weight of its own.

    Text stands last in the context, after the image's rows.
    """

    bias_B11E: Tensor

    def __call__(
        self,
        attn: Any,  # noqa: ANN401  diffusers has no types
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        del attention_mask  # diffusers passes None
        q = _normed(attn.norm_q, attn.to_q(hidden_states))
        if encoder_hidden_states is None:
            out = self._over(attn, q, hidden_states, rotary=rotary_emb)
        else:
            images = encoder_hidden_states.shape[1] - self.bias_B11E.shape[-1]
            image, text = encoder_hidden_states.split((images, self.bias_B11E.shape[-1]), 1)
            out = self._over(attn, q, text, bias=self.bias_B11E)
            if images:
                k, v = _normed(attn.norm_added_k, attn.add_k_proj(image)), attn.add_v_proj(image)
                out = out + _attention(attn.heads, q, k, v)
        return attn.to_out[0](out)

    @staticmethod
    def _over(
        attn: Any,  # noqa: ANN401  diffusers has no types
        q: Tensor,
        context: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        k, v = _normed(attn.norm_k, attn.to_k(context)), attn.to_v(context)
        return _attention(attn.heads, q, k, v, rotary=rotary, bias=bias)


def _attention(
    heads: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    q, k, v = (t.unflatten(2, (heads, -1)) for t in (q, k, v))
    if rotary is not None:
        q, k = (_rotated(t, *rotary) for t in (q, k))
    q, k, v = (t.transpose(1, 2).to(v.dtype) for t in (q, k, v))
    mask = None if bias is None else bias.to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """In fp32, as the weight: torch has one kernel for equal dtypes only."""
    return F.rms_norm(x.float(), (x.shape[-1],), norm.weight, norm.eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., ::2], sin[..., ::2]  # each angle stands twice
    return torch.stack((real * c - imaginary * s, real * s + imaginary * c), -1).flatten(-2)


def parameters(*modules: nn.Module) -> int:
    """Numbers in all weights."""
    return sum(p.numel() for module in modules for p in module.parameters())


def _on_meta(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
