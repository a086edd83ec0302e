"""CLIP's image tower from Wan-named files against transformers' module with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from shared_offload.errors import CheckpointError
from shared_offload.pipeline.image_encoder import ImageEncoder, heads_of, preprocess
from shared_offload.weights.fp8 import quantise_weight

LAYERS, WIDTH, HIDDEN = 3, 64, 160


@pytest.fixture(scope="module")
def library_model() -> CLIPVisionModel:
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=16, image_size=28, patch_size=7, hidden_act="gelu",
    )  # fmt: skip
    model = CLIPVisionModel(config).eval()
    for name, weight in model.named_parameters():
        scale = 0.2 if weight.ndim == 1 else weight[0].numel() ** -0.5
        weight.data = torch.randn_like(weight) * scale + ("norm" in name and "weight" in name)
    return model


def wan_names(model: CLIPVisionModel) -> dict[str, torch.Tensor]:
    """All that Wan's file holds: the image tower, its unused head, and a text tower."""
    state = {n.removeprefix("vision_model."): t.clone() for n, t in model.state_dict().items()}
    named = {
        "log_scale": torch.zeros(1),
        "textual.token_embedding.weight": torch.zeros(5, 5),
        "visual.head": torch.zeros(WIDTH, 32),
        "visual.cls_embedding": state["embeddings.class_embedding"].view(1, 1, -1),
        "visual.pos_embedding": state["embeddings.position_embedding.weight"][None],
        "visual.patch_embedding.weight": state["embeddings.patch_embedding.weight"],
    }
    for end in ("weight", "bias"):
        named[f"visual.pre_norm.{end}"] = state[f"pre_layrnorm.{end}"]
        named[f"visual.post_norm.{end}"] = state[f"post_layernorm.{end}"]
        for n in range(LAYERS):
            layer, wan = f"encoder.layers.{n}", f"visual.transformer.{n}"
            fused = [state[f"{layer}.self_attn.{part}_proj.{end}"] for part in "qkv"]
            named[f"{wan}.attn.to_qkv.{end}"] = torch.cat(fused)
            named[f"{wan}.attn.proj.{end}"] = state[f"{layer}.self_attn.out_proj.{end}"]
            named[f"{wan}.norm1.{end}"] = state[f"{layer}.layer_norm1.{end}"]
            named[f"{wan}.norm2.{end}"] = state[f"{layer}.layer_norm2.{end}"]
            named[f"{wan}.mlp.0.{end}"] = state[f"{layer}.mlp.fc1.{end}"]
            named[f"{wan}.mlp.2.{end}"] = state[f"{layer}.mlp.fc2.{end}"]
    return named


@pytest.fixture
def wan_file(library_model, tmp_path) -> Path:
    torch.save(wan_names(library_model), tmp_path / "clip.pth")
    return tmp_path / "clip.pth"


@pytest.fixture
def image() -> torch.Tensor:
    return torch.rand(3, 50, 70, generator=torch.Generator().manual_seed(3)) * 2 - 1


def load(path: Path, dtype=torch.float32, **options) -> ImageEncoder:
    return ImageEncoder.load(path, device="cpu", dtype=dtype, **options)


@torch.no_grad()
@pytest.mark.parametrize(("use_31_block", "state"), [(True, -2), (False, -1)])
def test_rows_are_the_librarys_hidden_states(
    wan_file, library_model, image, use_31_block, state
) -> None:
    encoder = load(wan_file, use_31_block=use_31_block)
    got = encoder.encode(image)
    want = library_model(preprocess(image, 28)[None], output_hidden_states=True)
    torch.testing.assert_close(got, want.hidden_states[state][0], rtol=1e-5, atol=1e-5)
    assert got.shape == (encoder.tokens, encoder.dim) == (17, WIDTH)


def test_only_what_is_used_is_kept(wan_file, library_model) -> None:
    encoder = load(wan_file)
    numbers = sum(
        p.numel() for n, p in library_model.named_parameters() if f"layers.{LAYERS - 1}." not in n
    )
    assert encoder.num_parameters == numbers
    assert encoder.nbytes == 4 * numbers + 8 * encoder.tokens  # and the table of positions


def test_fp8_keeps_the_features(wan_file, library_model, image, tmp_path) -> None:
    """As LightX2V's converter writes it: no text tower, linear weights FP8, the rest fp16."""
    tensors = {}
    for name, tensor in wan_names(library_model).items():
        if "transformer." in name and tensor.ndim == 2:
            tensors[name], tensors[name + "_scale"] = quantise_weight(tensor)
        elif not name.startswith("textual."):
            tensors[name] = tensor.half()
    torch.save(tensors, tmp_path / "fp8.pth")
    exact = load(wan_file).encode(image).double()
    encoder = load(tmp_path / "fp8.pth", torch.float16)
    got = encoder.encode(image)
    assert got.dtype == torch.float16
    noise = (got.double() - exact).square().sum()
    assert 10 * torch.log10(exact.square().sum() / noise) > 22
    assert encoder.num_parameters == load(wan_file).num_parameters


def test_a_missing_tensor_is_named(library_model, tmp_path) -> None:
    tensors = wan_names(library_model)
    tensors.pop("visual.transformer.1.mlp.2.bias")
    torch.save(tensors, tmp_path / "clip.pth")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "clip.pth")
    assert caught.value.facts["kind"] == "are missing"
    assert caught.value.facts["names"][0].endswith("encoder.layers.1.mlp.fc2.bias")


def test_positions_that_make_no_square(library_model, tmp_path) -> None:
    tensors = wan_names(library_model)
    tensors["visual.pos_embedding"] = tensors["visual.pos_embedding"][:, :-1].clone()
    torch.save(tensors, tmp_path / "clip.pth")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "clip.pth")
    assert caught.value.facts["name"] == "visual.pos_embedding"


def test_heads() -> None:
    assert (heads_of(1280), heads_of(64), heads_of(40)) == (16, 16, 1)


def test_close_is_idempotent(wan_file, image) -> None:
    encoder = load(wan_file)
    encoder.close()
    encoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        encoder.encode(image)
