"""Whole videos against diffusers' pipelines: same weights, noise and settings, in fp32.

Theirs runs from the prompt's text to the frames. Where it is not Wan's own pipeline, it is made so:

- Sigmas: diffusers' flow sigmas run from 1 to 0.001, Wan's from 0.999 to 0 before the shift.
- CLIP's picture: diffusers resizes the short side, antialiased, and crops the centre; Wan stretches
  the whole picture to the square without antialias.
- The first frame: diffusers resizes with PIL's Lanczos; Wan bicubically, without antialias.

`test_the_replaced_parts_matter` shows that none of it can be left out. How tensors of the .pth
files are named is tested beside each encoder, and taken as given here.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.video_processor import VideoProcessor
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    BatchFeature,
    CLIPImageProcessor,
    CLIPVisionModel,
    UMT5EncoderModel,
)

from shared_offload.pipeline import image_encoder, text_encoder, vae
from shared_offload.pipeline.generate import Video
from shared_offload.weights.architecture import read_architecture
from tests.reference import diffusers_dit

STEPS, SHIFT, SCALE, SEED = 4, 3.0, 4.0, 11
PROMPT = "  A ship sails across a stormy sea &amp; a dark sky ,\tdramatic light "  # cleaning too
PROMPTS = {  # prompt and negative prompt; the second is cut off at 512 tokens, and an empty one
    "t2v": (PROMPT, "low quality, blurry"),
    "i2v": ("a blue kite on a green hill " * 100, ""),
}
SIZES = {"t2v": (48, 64), "i2v": (64, 32)}  # height, width: the area is one, but not the aspect
FRAMES = 9
OPTIONS = {
    "dtype": "FP32",
    "vae_dtype": "FP32",
    "size": list(SIZES["t2v"]),
    "num_frames": FRAMES,
    "infer_steps": STEPS,
    "sample_shift": SHIFT,
    "sample_guide_scale": SCALE,
    "seed": SEED,
}


class WanGrid(UniPCMultistepScheduler):
    """diffusers' solver on Wan's sigmas."""

    def set_timesteps(self, num_inference_steps=None, device=None, **_) -> None:
        sigmas = np.linspace(0.9990000128746033, 0, num_inference_steps + 1)[:-1]
        super().set_timesteps(sigmas=sigmas, device=device)


class WanClipPixels(CLIPImageProcessor):
    """Wan's pixels for CLIP."""

    def __call__(self, images: Image.Image, **_) -> BatchFeature:
        square = F.interpolate(pixels(images) * 2 - 1, (224, 224), mode="bicubic") / 2 + 0.5
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.image_mean, self.image_std))
        return BatchFeature({"pixel_values": (square - mean) / std})


class WanFirstFrame(VideoProcessor):
    """Wan's first frame."""

    def preprocess(self, image: Image.Image, height: int, width: int) -> Tensor:
        return F.interpolate(pixels(image) * 2 - 1, (height, width), mode="bicubic")


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255


def load(module: torch.nn.Module, tensors: dict[str, Tensor]) -> torch.nn.Module:
    module.load_state_dict(tensors, strict=False)
    assert set(dict(module.named_parameters())) <= set(tensors)
    return module.float().eval()


def transformer(folder: Path) -> WanTransformer3DModel:
    weights = {}
    for shard in folder.glob("diffusion_pytorch_model*.safetensors"):
        weights |= load_file(shard)
    return diffusers_dit.build(read_architecture(folder), weights)


def text_parts(folder: Path) -> dict[str, object]:
    path = folder / "models_t5_umt5-xxl-enc-bf16.pth"
    tensors = torch.load(path, weights_only=True)
    model = UMT5EncoderModel(text_encoder.read_config(tensors, path))
    tokenizer = AutoTokenizer.from_pretrained(folder / "google/umt5-xxl")
    return {"text_encoder": load(model, text_encoder.rename(tensors)), "tokenizer": tokenizer}


def clip(folder: Path) -> CLIPVisionModel:
    (path,) = folder.glob("models_clip*.pth")
    tensors = torch.load(path, weights_only=True)
    visual = {n.removeprefix("visual."): t for n, t in tensors.items() if n.startswith("visual.")}
    config = image_encoder.read_config(visual, path)
    model = CLIPVisionModel(config)
    own = next(iter(model.state_dict()))
    prefix = "vision_model." if own.startswith("vision_model.") else ""
    renamed = image_encoder.rename(visual, blocks=config.num_hidden_layers)
    return load(model, {prefix + name: tensor for name, tensor in renamed.items()})


def autoencoder(folder: Path) -> AutoencoderKLWan:
    path = folder / "Wan2.1_VAE.pth"
    tensors = torch.load(path, weights_only=True)
    model = AutoencoderKLWan(**vae.read_config(tensors, path))
    return load(model, convert_wan_vae_to_diffusers(tensors))


def scheduler(kind: type[UniPCMultistepScheduler]) -> UniPCMultistepScheduler:
    return kind(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)


@pytest.fixture(scope="module")
def theirs(checkpoints) -> dict[str, WanPipeline | WanImageToVideoPipeline]:
    pipelines = {}
    for task, folder in checkpoints.items():
        parts = {
            **text_parts(folder),
            "vae": autoencoder(folder),
            "scheduler": scheduler(WanGrid),
            "transformer": transformer(folder),
        }
        if task == "i2v":
            parts |= {"image_encoder": clip(folder), "image_processor": WanClipPixels()}
        kind = WanImageToVideoPipeline if task == "i2v" else WanPipeline
        pipelines[task] = kind(**parts)
        pipelines[task].set_progress_bar_config(disable=True)
        if task == "i2v":
            pipelines[task].video_processor = WanFirstFrame()
    return pipelines


def ours(studio, task: str, **options) -> Video:
    prompt, negative = PROMPTS[task]
    return studio.video(task, prompt=prompt, negative_prompt=negative, **(OPTIONS | options))


def make(pipeline, task: str, picture: Path) -> tuple[Tensor, Tensor]:
    """Frames (F, H, W, 3) in 0..255, not rounded, and latents (16, T, Y, X)."""
    image = {"image": Image.open(picture)} if task == "i2v" else {}
    height, width = SIZES[task]
    prompt, negative = PROMPTS[task]
    seen = []

    def keep(_pipeline, _step, _timestep, tensors):
        seen.append(tensors["latents"])
        return {}

    result = pipeline(
        prompt=prompt,
        negative_prompt=negative,
        height=height,
        width=width,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        generator=torch.Generator().manual_seed(SEED),
        output_type="pt",
        callback_on_step_end=keep,
        **image,
    )
    assert len(seen) == STEPS
    return result.frames[0].permute(0, 2, 3, 1) * 255, seen[-1][0]


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_frames_are_diffusers_within_one_level(studio, theirs, task) -> None:
    frames, latents = make(theirs[task], task, studio.picture)
    video = ours(studio, task)
    assert frames.std() > 10  # levels: there is something to see
    assert video.frames.shape == frames.shape == (FRAMES, *SIZES[task], 3)
    torch.testing.assert_close(video.latents, latents, rtol=1e-4, atol=1e-4)
    assert (video.frames - frames).abs().max() <= 1


@pytest.mark.parametrize("part", ["scheduler", "image_processor", "video_processor"])
def test_the_replaced_parts_matter(studio, theirs, part, monkeypatch) -> None:
    """diffusers with its own part instead of Wan's makes another video."""
    own = {
        "scheduler": scheduler(UniPCMultistepScheduler),
        "image_processor": CLIPImageProcessor(),
        "video_processor": VideoProcessor(),
    }
    monkeypatch.setattr(theirs["i2v"], part, own[part])
    frames, _ = make(theirs["i2v"], "i2v", studio.picture)
    assert (ours(studio, "i2v").frames - frames).abs().max() > 1


def test_distilled_steps_are_euler_steps(studio, theirs) -> None:
    """wan2.1_distill: no guidance, steps at 1000, 750, 500 and 250 of 1000, shifted."""
    distilled = {"model_cls": "wan2.1_distill", "enable_cfg": False, "infer_steps": 4}
    video = ours(studio, "t2v", **distilled)
    rows, _ = theirs["t2v"].encode_prompt(PROMPT, None, False, max_sequence_length=512)
    sigmas = [1.0, 0.9, 0.75, 0.5, 0.0]  # s * t / (1 + (s - 1) * t), s = 3
    noise = torch.Generator().manual_seed(SEED)
    latent = torch.randn(video.latents.shape, generator=noise)
    for now, following in pairwise(sigmas):
        model = theirs["t2v"].transformer
        velocity = diffusers_dit.velocity(model, latent, 1000 * now, rows[0])
        latent = latent + (following - now) * velocity
    torch.testing.assert_close(video.latents, latent, rtol=1e-4, atol=1e-4)
