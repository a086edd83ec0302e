"""The conductor: a prompt, and a picture for image-to-video, become a video.

`Pipeline.generate` is the whole job in order; `denoise` is the loop. What computes is owned by
`runner.Runner` and stays loaded between requests as the settings say. A request that fails leaves
the pipeline usable.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from shared_offload.config import Settings
from shared_offload.pipeline import conditioning
from shared_offload.pipeline.branches import make_branches
from shared_offload.pipeline.inventory import Inventory
from shared_offload.pipeline.request import Request
from shared_offload.pipeline.runner import Runner
from shared_offload.pipeline.scheduler import Scheduler, make_scheduler
from shared_offload.pipeline.video import check_target, write_video
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress

Predict = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class Video:
    """What `generate` returns. On ranks other than the first, `frames` is None."""

    frames: Tensor | None
    """uint8 (F, H, W, 3) on the CPU."""
    latents: Tensor
    """fp32 (16, T, Y, X), as the sampler left them."""
    path: Path | None
    """The file, where one was asked for."""
    metadata: Mapping[str, Any]
    """What the JSON beside the file says."""


def denoise(
    noise: Tensor, scheduler: Scheduler, predict: Predict, on_step: Callable[[], None]
) -> Tensor:
    """From noise to latents: one velocity and one step of the sampler for every timestep."""
    latent = noise
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = predict(latent, timestep)
        latent = scheduler.step(velocity, index, latent)
        on_step()
    return latent


def guide(velocities: Sequence[Tensor], scale: float) -> Tensor:
    """Classifier-free guidance in fp32: unconditional + scale * (conditional - unconditional)."""
    if len(velocities) == 1:
        return velocities[0]
    conditional, unconditional = velocities
    return unconditional + scale * (conditional - unconditional)


class Pipeline:
    """Wan 2.1 as the settings describe it; a context manager.

    Everything that can be checked without loading weights is checked here. Weights are loaded by
    the first `generate`. With several ranks, every rank makes the same calls.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: Ranks | None = None,
        progress: Progress | None = None,
        inventory: Inventory | None = None,
    ) -> None:
        """`inventory`: where the caller has taken it already."""
        self.settings = settings
        self.progress = progress or Progress(enabled=False)
        self.runner = Runner(settings, ranks, self.progress, inventory)

    def generate(
        self,
        *,
        prompt: str | None = None,
        negative_prompt: str | None = None,
        image_path: str | Path | None = None,
        seed: int | None = None,
        save_result_path: str | Path | None = None,
    ) -> Video:
        """Make one video; what is not given comes from the settings. Collective.

        Raises OffloadError for what the caller can mend; the pipeline stays usable.
        """
        request = Request.resolve(
            self.settings,
            prompt=prompt,
            negative_prompt=negative_prompt,
            image_path=image_path,
            seed=seed,
            save_result_path=save_result_path,
        )
        try:
            return self._generate(request)
        except BaseException as error:
            _empty_frames(error)
            gc.collect()  # 0.4 s beside 400,000 objects of libraries, so only for what failed
            raise
        finally:
            self.runner.end_request()

    def _generate(self, request: Request) -> Video:
        settings, runner, stage = self.settings, self.runner, self.runner.stage
        spent = dict(self.progress.stage_seconds)
        image = None if request.image_path is None else conditioning.load_image(request.image_path)
        height, width = request.video_size(settings, image)
        shape = conditioning.latent_shape(settings.num_frames, height, width)
        if request.save_path is not None and runner.is_first:
            check_target(request.save_path, bytes_needed=settings.num_frames * height * width)
        if settings.trace is not None and runner.is_first:
            check_target(settings.trace, bytes_needed=0, suffixes=(".json",), flag="--trace")
        scheduler = make_scheduler(
            steps=settings.infer_steps,
            shift=settings.sample_shift,
            distilled_steps=settings.denoising_step_list if settings.distilled else None,
            device=runner.device,
        )
        if not settings.unload_modules:  # libraries for the encoders are imported meanwhile
            self._load_dit()
        with stage("encode text"):
            texts = runner.encode_texts(request.prompts(settings))
        features, condition = None, None
        if image is not None:
            with stage("encode image"):
                features = runner.encode_image(image)
                frame = conditioning.first_frame(image, height, width)
                condition = runner.encode_condition(frame, settings.num_frames)
        if settings.unload_modules:  # the text encoder has left host memory
            self._load_dit()
        noise = conditioning.initial_noise(shape, request.seed, settings.noise_device)
        with stage("denoise"):
            latents = self._denoise(noise, scheduler, texts, features, condition)
        with stage("decode"):
            frames = runner.decode(latents)
        seconds = {
            name: round(total - spent.get(name, 0.0), 3)
            for name, total in self.progress.stage_seconds.items()
        }
        metadata = {
            **request.describe(settings),
            **runner.describe(),
            "stage_seconds": seconds,
        }
        if frames is not None and request.save_path is not None:
            with stage("write video"):
                write_video(request.save_path, frames, settings.fps, metadata)
        runner.report_streaming()
        return Video(frames, latents, request.save_path, metadata)

    def _load_dit(self) -> None:
        with self.runner.stage("load DiT"):
            self.runner.load_dit()

    def _denoise(
        self,
        noise: Tensor,
        scheduler: Scheduler,
        texts: Sequence[Tensor],
        features: Tensor | None,
        condition: Tensor | None,
    ) -> Tensor:
        """Latents. The branches, with all that they keep, end here: the VAE needs their room."""
        runner, scale = self.runner, self.settings.sample_guide_scale
        with runner.stepping(len(scheduler.timesteps)) as on_step:
            branches = make_branches(runner.load_dit().model, texts, features)

            def predict(latent: Tensor, timestep: float) -> Tensor:
                return guide(runner.velocities(latent, timestep, branches, condition), scale)

            return denoise(noise.to(runner.device), scheduler, predict, on_step)

    def close(self) -> None:
        """Give everything back. Idempotent; works after failures."""
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _empty_frames(error: BaseException | None) -> None:
    """Drop the local variables that a traceback keeps alive.

    Whoever holds the error (a caller, a notebook) would otherwise hold arenas and GPU memory of the
    failed request, and the next one might not find room.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
