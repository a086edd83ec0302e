"""Training of the demo model, tried with tiny models and a few steps.

What it writes must be, to the pipeline, what it trained: its own sampler in batches of diffusers'
and transformers' modules, against whole pipelines on the files.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample
from torch import Tensor

from shared_offload.config import Settings
from shared_offload.pipeline import conditioning
from shared_offload.pipeline.generate import Pipeline, Video
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.pipeline.vae import Vae
from shared_offload.synth.parts import TOKENIZER_FOLDER, VAE_FILE
from shared_offload.weights.pth import load_pth
from tests.reference.options import FP8
from tools.train_demo import dit, sampling, text, training, vae
from tools.train_demo.clips import Painter
from tools.train_demo.main import PICTURE, REPORT, Studio, parse
from tools.train_demo.training import Plan
from tools.train_demo.whole_clip import WholeClip, lay_out

PROMPT = "A red circle moves right on a blue background"
STEPS = 4
GUIDED = {"infer_steps": STEPS, "enable_cfg": True, "sample_guide_scale": sampling.GUIDANCE}
FEW = {"model_cls": "wan2.1_distill", "denoising_step_list": list(sampling.FEW_STEPS)}
SEED = 7
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Trained:
    studio: Studio
    out: Path
    plain: Path

    def video(self, folder: Path, task: str, **options: Any) -> Video:
        small = {
            "model_path": str(folder / task),
            "size": [64, 64],
            "num_frames": 17,
            "device": "cpu",
            "sample_shift": dit.SHIFT,
            "prompt": PROMPT,
            "seed": SEED,
        }
        if task == "i2v":
            small["image_path"] = str(self.out / PICTURE)
        settings = Settings.from_json_and_flags({**small, **options}, {"task": task})
        with Pipeline(settings) as pipeline:
            return pipeline.generate()

    def given(self, task: str) -> sampling.Given:
        tokenizer = load_tokenizer(self.studio.work / TOKENIZER_FOLDER)
        ids = text.token_ids(tokenizer, [PROMPT])
        if task == "t2v":
            return sampling.Given(ids)
        picture = conditioning.load_image(self.out / PICTURE)[None]
        clip = picture[:, :, None].expand(-1, -1, 17, -1, -1)
        latents = vae.encode(self.studio.load_vae(), dit.first_frames(clip))
        return sampling.Given(ids, dit.with_mask(latents), picture)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--quick", "--device", "cpu", "--work", str(folder / "work")]
    studio = Studio(parse([*flags, "--out", str(folder / "out")]))
    studio.run()
    for task in ("t2v", "i2v"):
        studio.write_task(task, folder / "plain" / task, fp8=False)
    return Trained(studio, folder / "out", folder / "plain")


@pytest.fixture(scope="module")
def noise() -> Tensor:
    return conditioning.initial_noise(conditioning.latent_shape(17, 64, 64), SEED)[None]


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_pipeline_samples_what_was_trained(trained: Trained, noise: Tensor, task: str) -> None:
    models = trained.studio.load_models(task, trained=True)
    given = trained.given(task)
    guided = sampling.sample(models, given, noise, steps=STEPS)
    made = trained.video(trained.plain, task, dtype="FP32", **GUIDED)
    assert difference(made.latents, guided[0]) < 1e-5
    decoded = (vae.decode(trained.studio.load_vae(), guided)[0].permute(1, 2, 3, 0) + 1) * 127.5
    assert made.frames is not None
    assert (made.frames.float() - decoded).abs().max() < 0.51
    few = trained.video(trained.plain, task, dtype="FP32", **FEW)
    assert difference(few.latents, sampling.sample_few(models, given, noise)[0]) < 1e-5
    shipped = trained.video(trained.out, task, **FP8, **GUIDED)
    assert 1e-4 < difference(shipped.latents, guided[0]) < 0.1
    other = trained.video(trained.plain, task, dtype="FP32", **GUIDED | {"prompt": "two dogs"})
    assert difference(other.latents, guided[0]) > 1e-3, "or the prompt was not compared"


def test_the_picture_tells_in_the_image_rows(trained: Trained) -> None:
    models = trained.studio.load_models("i2v", trained=True)
    pictures = trained.given("i2v").pictures
    assert models.clip is not None and pictures is not None
    rows = dit.image_rows(models.clip, torch.cat((pictures, -pictures)))
    assert difference(rows[1], rows[0]) > 1e-2


def test_latents_have_wans_mean_and_deviation(trained: Trained) -> None:
    """By the pipeline's VAE from the file, on clips that training did not see."""
    torch.manual_seed(1234)
    painter = trained.studio.painter
    clips = painter.clips(painter.labels(24), spread=1.0)
    encoder = Vae.load(trained.out / "t2v" / VAE_FILE, device="cpu", dtype=torch.float32)
    latents = torch.stack([encoder.encode(clip) for clip in clips])
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.2
    assert (latents.std((0, 2, 3, 4)) - 1).abs().max() < 0.2
    decoded = encoder.decode(latents[0])
    raw = trained.studio.load_vae()
    # A pixel where the norm has little to divide by shows the file's fp16 many times larger.
    assert difference(decoded, vae.decode(raw, vae.encode(raw, clips[:1]))[0]) < 0.01


def test_folding_changes_the_scale_of_latents_and_no_pixel() -> None:
    torch.manual_seed(3)
    model = AutoencoderKLWan(base_dim=4).eval().requires_grad_(False)
    painter = Painter(torch.device("cpu"))
    clips = painter.clips(painter.labels(6), spread=1.0)
    before = model.decode(model.encode(clips).latent_dist.mode()).sample
    vae.fold(model, painter, batches=3, batch=8)
    after = model.decode(model.encode(clips).latent_dist.mode()).sample
    assert (after - before).abs().max() < 1e-4
    latents = vae.encode(model, clips)
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.3
    assert (latents.std((0, 2, 3, 4)) - 1).abs().max() < 0.3


@pytest.mark.parametrize("frames", [17, 9, 5, 1])
def test_a_whole_clip_is_what_frame_groups_are(
    frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, in float64; the weights as a GPU may have them laid out."""
    monkeypatch.setattr(WanUpsample, "forward", torch.nn.Upsample.forward)  # it rounds to float32
    torch.manual_seed(frames)
    model = AutoencoderKLWan(base_dim=4).double()
    for name, parameter in model.named_parameters():
        if "gamma" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    painter = Painter(torch.device("cpu"))
    clips = painter.clips(painter.labels(2), spread=1.0)[:, :, :frames].double()
    weight = torch.randn_like(clips)

    def all_of(latents: Tensor, decoded: Tensor, x: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        decoded = decoded.clamp(-1, 1)
        ((decoded * weight).sum() + latents.sin().sum()).backward()
        assert x.grad is not None
        found = {"latents": latents.detach(), "decoded": decoded.detach(), "clips'": x.grad}
        return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    x = clips.clone().requires_grad_()
    latents = model.encode(x).latent_dist.mean
    wanted = all_of(latents, model.decode(latents).sample, x)
    lay_out(model, torch.channels_last_3d)
    whole, x = WholeClip(model), clips.clone().requires_grad_()
    latents = whole.encode(x)
    found = all_of(latents, whole.decode(latents), x)
    timed = [name for name in wanted if "time_conv" in name]
    assert found.keys() == wanted.keys() and bool(timed) == (frames > 1)
    for name, one in found.items():
        assert (one - wanted[name]).abs().max() <= 1e-9 * wanted[name].abs().max() + 1e-12, name


def test_the_fastest_form_is_trained_and_one_that_fails_is_not() -> None:
    layer = torch.nn.Linear(1, 1)
    plan = Plan(0.0, 1, peak_lr=0.1, warmup=1, weight_decay=0.1)
    made = []

    def form(name: str, seconds: float) -> Callable[[], training.Trainer]:
        def loss() -> Tensor:
            time.sleep(seconds)
            return layer(torch.ones(1, 1)).square().mean()

        def trainer() -> training.Trainer:
            if seconds < 0:
                raise RuntimeError("no such layout")
            made.append(name)
            return training.Trainer(loss, list(layer.parameters()), plan)

        return trainer

    before = layer.weight.item()
    forms = {"slow": form("slow", 0.01), "fast": form("fast", 0.001), "broken": form("", -1.0)}
    trainer = training.fastest("line", forms, tried=True)
    assert made == ["slow", "fast", "fast"]
    assert abs(layer.weight.item() - before) < 1e-5, "trying a form trains nothing"
    trainer.step(0.1)
    assert abs(layer.weight.item() - before) > 1e-2
    with pytest.raises(RuntimeError, match="no form"):
        training.fastest("line", {"broken": forms["broken"]}, tried=True)


def test_a_killed_part_goes_on_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--quick", "--device", "cpu", "--work", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(training, "SNAPSHOT_SECONDS", 0.0)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(vae, "fold", killed)
        Studio(parse([*flags, "--parts", "vae"])).run()
    kept = torch.load(tmp_path / "vae.snapshot.pt")["vae"]
    with monkeypatch.context() as patched:
        patched.setattr(vae, "fold", lambda *_, **__: None)
        studio = Studio(parse([*flags, "--parts", "vae", "--resume", "--steps", "vae=0"]))
        studio.run()
    found = studio.load("vae")["vae"]
    assert all(torch.equal(tensor, kept[name]) for name, tensor in found.items())
    assert found.keys() == kept.keys() and not (tmp_path / "vae.snapshot.pt").exists()


def test_what_is_unpacked_is_written_as_it_was(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.out, out, symlinks=True)
    flags = ["--quick", "--device", "cpu", "--work", str(tmp_path / "work"), "--out", str(out)]
    Studio(parse([*flags, "--unpack", "--resume", "--parts", "i2v", "--steps", "i2v=0"])).run()
    files = [path for path in trained.out.rglob("*") if path.is_file() and path.name != REPORT]
    assert len(files) > 20
    for path in files:
        assert (out / path.relative_to(trained.out)).read_bytes() == path.read_bytes(), path
    before, after = (json.loads((f / REPORT).read_text())["parts"] for f in (trained.out, out))
    assert after["i2v"]["steps"] == 0 and after["i2v"]["before"] == before["i2v"]
    assert {part: after[part] for part in ("vae", "t2v")} == {
        part: before[part] for part in ("vae", "t2v")
    }


def test_the_folders_are_wans(trained: Trained) -> None:
    report: Mapping[str, Any] = json.loads((trained.out / REPORT).read_text())
    assert set(report["parts"]) == {"vae", "t2v", "i2v"}
    links = sorted(p.name for p in (trained.out / "i2v").rglob("*") if p.is_symlink())
    assert links == ["Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth", "umt5-xxl"]
    assert all(
        not str(p.readlink()).startswith("/")
        for p in (trained.out / "i2v").rglob("*")
        if p.is_symlink()
    )
    assert (
        load_pth(trained.out / "i2v" / VAE_FILE).keys()
        == load_pth(trained.plain / "t2v" / VAE_FILE).keys()
    )
