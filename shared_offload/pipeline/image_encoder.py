"""A picture to rows of image features: CLIP's ViT from Wan's own .pth file, through transformers.

Invariant: the rows are those of Wan: the whole picture stretched to the encoder's square, the state
after all blocks but the last, the class row kept, no norm and no projection after. Shape letters:
I image tokens (1 + patches), D width of the encoder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_offload.errors import CheckpointError
from shared_offload.pipeline import libraries, module_weights
from shared_offload.pipeline.conditioning import bicubic
from shared_offload.pipeline.module_weights import OnBytes, told_to_nobody
from shared_offload.weights.pth import load_pth

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training pictures, in [0, 1]
STD = (0.26862954, 0.26130258, 0.27577711)
VISUAL = "visual."  # the rest of the file is CLIP's text tower and its temperature
HEADS = 16

TOP_NAMES = {  # Wan's name within visual. -> transformers'
    "cls_embedding": "embeddings.class_embedding",
    "pos_embedding": "embeddings.position_embedding.weight",
    "patch_embedding.weight": "embeddings.patch_embedding.weight",
    "pre_norm.weight": "pre_layrnorm.weight",
    "pre_norm.bias": "pre_layrnorm.bias",
    "post_norm.weight": "post_layernorm.weight",
    "post_norm.bias": "post_layernorm.bias",
}
BLOCK_NAMES = {  # within visual.transformer.N. -> within encoder.layers.N.
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.proj": "self_attn.out_proj",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
}
FUSED = "attn.to_qkv"  # rows of q, k and v, in this order
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class ImageEncoder:
    """CLIP's image tower; `close` frees the weights."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401  transformers has no types
        self._model = model
        self.image_size: int = model.config.image_size
        self.dim: int = model.config.hidden_size
        self.tokens = (self.image_size // model.config.patch_size) ** 2 + 1
        self.nbytes = module_weights.count_bytes(model)
        self.num_parameters = module_weights.count_parameters(model)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        use_31_block: bool = True,
        cast_later: bool = False,
        on_bytes: OnBytes = told_to_nobody,
    ) -> ImageEncoder:
        """From a .pth file (fp32, fp16, bf16 or FP8); the text tower in it is left out.

        `use_31_block` ends before the last block, as Wan does; that block is then not loaded. Sizes
        are read from the tensors. With `cast_later` weights in host memory are the file's map, and
        `dtype` only where they move to. Raises CheckpointError or Problems. Peak memory: the image
        tower's weights, once.
        """
        tensors = {
            name.removeprefix(VISUAL): tensor
            for name, tensor in load_pth(path).items()
            if name.startswith(VISUAL)
        }
        config = read_config(tensors, path)
        config.num_hidden_layers -= use_31_block
        with torch.device("meta"):
            model = libraries.CLIPVisionModel(config)
        own = model.state_dict().keys()
        prefix = "vision_model." if any(n.startswith("vision_model.") for n in own) else ""
        renamed = rename(tensors, blocks=config.num_hidden_layers)
        module_weights.assign(
            model,
            {prefix + name: tensor for name, tensor in renamed.items()},
            path=path,
            device=torch.device(device),
            dtype=dtype,
            cast_later=cast_later,
            on_bytes=on_bytes,
        )
        # The table of positions is a buffer that no file holds; it is still on meta.
        embeddings = model.get_submodule(prefix + "embeddings")
        embeddings.position_ids = torch.arange(embeddings.num_positions, device=device)[None]
        return cls(model)

    @torch.inference_mode()
    def encode(self, image_3HW: Tensor) -> Tensor:
        """(I, D) features of a picture (3, H, W) in [-1, 1] of any size."""
        if self._model is None:
            raise RuntimeError("the image encoder is closed")
        pixels_3HW = preprocess(image_3HW, self.image_size).to(self._model.device)
        features_1ID: Tensor = self._model(
            pixel_values=pixels_3HW[None].to(self._model.dtype)
        ).last_hidden_state
        return features_1ID[0]

    def move(self, device: torch.device) -> None:
        """Put the weights on a device."""
        module_weights.move(self._model, device)

    def close(self) -> None:
        """Free the weights. Idempotent; `encode` cannot be called afterwards."""
        self._model = None


def preprocess(image_3HW: Tensor, size: int) -> Tensor:
    """The picture (-1..1) as CLIP sees it: stretched to size x size, then normalised; fp32."""
    square_3HW = bicubic(image_3HW, size, size) * 0.5 + 0.5
    mean, std = (square_3HW.new_tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    return (square_3HW - mean) / std


def heads_of(width: int) -> int:
    """Attention heads, which no tensor tells: 16 as in ViT-H/14 where they divide the width."""
    return HEADS if width % HEADS == 0 else 1


def read_config(tensors: Mapping[str, Tensor], path: Path) -> libraries.CLIPVisionConfig:
    """The sizes that tensors (names within `visual.`) say; CheckpointError where they cannot."""
    _, positions, width = module_weights.need(tensors, "pos_embedding", 3, path)
    *_, patch = module_weights.need(tensors, "patch_embedding.weight", 4, path)
    hidden, _ = module_weights.need(tensors, "transformer.0.mlp.0.weight", 2, path)
    side = math.isqrt(positions - 1)
    if side * side != positions - 1:
        raise CheckpointError(
            f"{path.name}: {VISUAL}pos_embedding has {positions} positions",
            expected="one more than a square number",
            path=str(path),
            name=VISUAL + "pos_embedding",
        )
    return libraries.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=module_weights.layer_count(tensors, "transformer."),
        num_attention_heads=heads_of(width),
        image_size=side * patch,
        patch_size=patch,
        hidden_act="gelu",  # the exact one; the library's default is an approximation
        layer_norm_eps=1e-5,
    )


def rename(tensors: Mapping[str, Tensor], *, blocks: int) -> dict[str, Tensor]:
    """Names within `visual.` to those of CLIPVisionModel; unknown names stay, to be reported.

    Blocks from `blocks` on and the projection `head` are left out. The fused q, k, v is cut into
    views.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"transformer\.(\d+)\.(.+)\.(weight|bias|weight_scale)", name)
        if match is None:
            if name != "head":
                renamed[TOP_NAMES.get(name, name)] = _flat(name, tensor)
        elif int(match[1]) < blocks:
            targets = PARTS if match[2] == FUSED else (BLOCK_NAMES.get(match[2], match[2]),)
            for target, part in zip(targets, tensor.tensor_split(len(targets)), strict=True):
                renamed[f"encoder.layers.{match[1]}.{target}.{match[3]}"] = part
    return renamed


def _flat(name: str, tensor: Tensor) -> Tensor:
    """Wan keeps leading axes of size 1 on two tables; transformers does not."""
    if name == "cls_embedding":
        return tensor.flatten()
    return tensor.flatten(0, 1) if name == "pos_embedding" else tensor
