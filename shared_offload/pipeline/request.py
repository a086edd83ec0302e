"""One request: what is made, apart from how. Settings give what the caller leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from shared_offload.config import Settings
from shared_offload.errors import ConfigError
from shared_offload.pipeline.conditioning import i2v_size

SEED_END = 2**63  # of torch's generators, and of the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, a picture for image-to-video, a seed and where the video goes."""

    prompt: str
    negative_prompt: str
    image_path: Path | None
    seed: int
    save_path: Path | None

    @classmethod
    def resolve(
        cls,
        settings: Settings,
        *,
        prompt: str | None,
        negative_prompt: str | None,
        image_path: str | Path | None,
        seed: int | None,
        save_result_path: str | Path | None,
    ) -> Self:
        """What was given, over what the settings say.

        Raises ConfigError for i2v without image and for a seed that is none.
        """
        seed = settings.seed if seed is None else seed
        if not 0 <= seed < SEED_END:
            raise ConfigError(
                f"seed is {seed}", expected=f"0 to {SEED_END - 1}", key="seed", found=seed
            )
        image = Path(image_path) if image_path is not None else settings.image_path
        if settings.task == "i2v" and image is None:
            raise ConfigError(
                "task i2v has no picture",
                expected="the first frame of the video",
                hint="give --image_path, or image_path to generate()",
                key="image_path",
            )
        save = save_result_path if save_result_path is not None else settings.save_result_path
        return cls(
            prompt=settings.prompt if prompt is None else prompt,
            negative_prompt=(
                settings.negative_prompt if negative_prompt is None else negative_prompt
            ),
            image_path=image if settings.task == "i2v" else None,
            seed=seed,
            save_path=None if save is None else Path(save),
        )

    def prompts(self, settings: Settings) -> list[str]:
        """One prompt for each branch: the conditional one first."""
        return [self.prompt, self.negative_prompt] if settings.enable_cfg else [self.prompt]

    def video_size(self, settings: Settings, image_3HW: Tensor | None) -> tuple[int, int]:
        """Height and width of the video in pixels."""
        if image_3HW is None:
            return settings.size
        _, height, width = image_3HW.shape
        return i2v_size(height, width, *settings.size)

    def describe(self, settings: Settings) -> dict[str, Any]:
        """The request and the settings, as JSON values."""
        return {
            **settings.summary(),
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "image_path": None if self.image_path is None else str(self.image_path),
            "seed": self.seed,
            "save_result_path": None if self.save_path is None else str(self.save_path),
        }
