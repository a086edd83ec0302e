"""FP8 T5 and CLIP: names and dtypes of LightX2V, values of the source, encoders that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared_offload.cli import main
from shared_offload.config import Settings, clip_file, t5_file
from shared_offload.errors import CheckpointError
from shared_offload.pipeline.image_encoder import ImageEncoder
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from shared_offload.synth.models import clip_recipes, t5_recipes
from shared_offload.synth.sizes import SIZES
from shared_offload.weights.convert_encoders import EncoderConversion, plan_encoder

T5 = "models_t5_umt5-xxl-enc"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14"
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint whose FP8 encoders were made by the command."""
    root = tmp_path_factory.mktemp("model") / "wan"
    make_checkpoint(
        root, "tiny", "i2v", parts=["dit", "t5", "clip", "tokenizer"], progress=Progress()
    )
    code = main(
        ["convert", "--model_path", str(root), "--out", str(root / "fp8"), "--parts", "t5", "clip"]
    )
    assert code == 0
    return root


def read(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("kind", "recipes", "count"),
    [
        ("t5", t5_recipes(SIZES["14b"].t5), 168),
        ("clip", clip_recipes(SIZES["14b"].clip), 128),
    ],
)
def test_as_many_weights_as_lightx2v_quantises(kind, recipes, count) -> None:
    tensors = {n: torch.empty(r.shape, device="meta") for n, r in recipes.items()}
    results = EncoderConversion(kind, "x.pth", tensors)._results(torch.device("meta"))
    assert sum(t.dtype == FP8 for t in results.values()) == count
    assert sum(name.endswith(".weight_scale") for name in results) == count
    assert {t.dtype for n, t in results.items() if not n.endswith("_scale")} == {
        FP8,
        {"t5": torch.bfloat16, "clip": torch.float16}[kind],
    }


@pytest.mark.parametrize(
    ("name", "rest"), [(T5, torch.bfloat16), (CLIP, torch.float16)], ids=["t5", "clip"]
)
def test_values_are_those_of_the_source(folder, name, rest) -> None:
    source = read(folder / (f"{T5}-bf16.pth" if name == T5 else f"{CLIP}.pth"))
    made = read(folder / "fp8" / f"{name}-fp8.pth")
    scales = {n.removesuffix("_scale") for n in made if n.endswith("_scale")}
    kept = {n for n in source if not n.startswith("textual.")}
    assert made.keys() == kept | {f"{n}_scale" for n in scales}
    for key in kept:
        if key in scales:
            exact = source[key].double()
            scale = made[f"{key}_scale"]
            amax = exact.abs().amax(1, keepdim=True)
            assert (made[key].dtype, scale.dtype, scale.shape) == (FP8, torch.float32, amax.shape)
            assert torch.allclose(scale.double(), amax / 448, rtol=1e-6)
            error = (made[key].double() * scale - exact).abs()
            assert bool((error <= exact.abs() / 16 + scale * 2**-10 * 1.001).all())  # half a step
        else:
            assert torch.equal(made[key], source[key].to(rest))


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    noise = (got.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise))


def test_a_run_finds_and_uses_them(folder) -> None:
    quantised = {
        f"{part}_{key}": value
        for part in ("t5", "clip")
        for key, value in (("quantized", True), ("quant_scheme", "fp8"))
    }
    plain, fp8 = (
        Settings.from_json_and_flags({"model_path": str(folder), "task": "i2v", **more}, {})
        for more in ({}, quantised)
    )
    assert t5_file(fp8).parent == clip_file(fp8).parent == folder / "fp8"
    texts, images = [], []
    picture = torch.rand(3, 40, 60, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for settings in (plain, fp8):
        text = TextEncoder.load(
            t5_file(settings),
            load_tokenizer(folder / "google/umt5-xxl"),
            device="cpu",
            dtype=torch.float32,
            text_len=512,
        )
        texts += text.encode(["a train goes over a bridge in the snow"])
        image = ImageEncoder.load(clip_file(settings), device="cpu", dtype=torch.float32)
        images.append(image.encode(picture))
    assert 15 < sqnr_db(texts[1], texts[0]) < 60
    assert 15 < sqnr_db(images[1], images[0]) < 60


def test_files_that_are_not_to_be_converted(folder, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="quantise"):
        plan_encoder("clip", folder / f"{T5}-bf16.pth", "x.pth")
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        plan_encoder("t5", folder / "fp8" / f"{T5}-fp8.pth", "x.pth")
    broken = read(folder / f"{T5}-bf16.pth")
    broken["blocks.0.attn.q.weight"][3, 3] = torch.nan
    (tmp_path / "model").mkdir()
    torch.save(broken, tmp_path / "model" / f"{T5}-bf16.pth")
    out = tmp_path / "out"
    given = ["--model_path", str(tmp_path / "model"), "--out", str(out), "--parts", "t5"]
    assert main(["convert", *given]) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_all_parts_in_one_folder(folder, tmp_path) -> None:
    out = tmp_path / "all"
    given = ["--model_path", str(folder), "--out", str(out), "--parts", "dit", "t5", "clip"]
    assert main(["convert", *given, "--layout", "single"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
        f"{CLIP}-fp8.pth",
        f"{T5}-fp8.pth",
    ]
