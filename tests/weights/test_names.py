from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from shared_offload.weights.names import from_diffusers, is_diffusers, to_diffusers


@pytest.mark.parametrize("model_type", ["t2v", "i2v"])
def test_equals_diffusers_own_conversion(small_arch, random_tensors, model_type: str) -> None:
    wan = random_tensors(small_arch(model_type))
    theirs = convert_wan_transformer_to_diffusers(dict(wan))
    ours = {to_diffusers(name): tensor for name, tensor in wan.items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(from_diffusers(to_diffusers(name)) == name for name in wan)
    assert is_diffusers(theirs) and not is_diffusers(wan)


def test_every_name_of_the_model_class_has_a_wan_name() -> None:
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=8, attention_head_dim=8, in_channels=36, out_channels=16,
            text_dim=48, freq_dim=32, ffn_dim=96, num_layers=12, image_dim=40, added_kv_proj_dim=64,
        )  # fmt: skip
    assert all(to_diffusers(str(from_diffusers(name))) == name for name in model.state_dict())


def test_scales_and_strangers() -> None:
    scale = "blocks.11.cross_attn.o.weight_scale"
    assert to_diffusers(scale) == "blocks.11.attn2.to_out.0.weight_scale"
    assert from_diffusers("blocks.11.attn2.to_out.0.weight_scale") == scale
    for name in ("", "blocks.1.", "blocks.x.norm3.weight", "vae.conv.weight", "head.head.alpha"):
        assert to_diffusers(name) is None
        assert from_diffusers(name) is None
