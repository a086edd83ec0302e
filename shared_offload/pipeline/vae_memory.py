"""How much GPU memory the VAE may take, and in how many strips it keeps to that.

The rule: where weights leave the GPU to save memory, a decode takes no more than a denoising step
did, all that is on the GPU meanwhile included; so it never decides which GPU a video needs. An
encode keeps to what was planned for a step's activations, in every mode alike. As few strips as
that asks for, and the whole picture where it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shared_offload.pipeline.conditioning import SPACE_STRIDE, TIME_STRIDE
from shared_offload.pipeline.vae_sweep import around, most_strips


@dataclass(frozen=True, slots=True)
class Pass:
    """What one direction of the VAE holds at its peak, over its weights."""

    planes: float
    """Feature maps of one frame at full resolution, divided by the number of strips. Counted from
    the storages alive (43.5 and 37.5), and what cuDNN takes on top (on an H200, TF32 and channels
    last: nothing that could be measured in a decode, 2.5 in an encode)."""
    edges: float
    """Columns of features at full resolution, of all frames; whatever the number of strips."""


DECODE, ENCODE = Pass(planes=45, edges=34), Pass(planes=40, edges=16)


@dataclass(frozen=True, slots=True)
class Picture:
    """A plane of latents, and what features of it take."""

    frames: int
    height: int
    width: int
    channel_nbytes: int
    """Channels at full resolution, times bytes of a value."""

    @classmethod
    def of(
        cls, shape: Sequence[int], share: tuple[int, int] | None, channel_nbytes: int
    ) -> Picture:
        """From the shape (C, T, Y, X) of a latent, or what is worked on for a share of it."""
        _, frames, *sides = shape
        if share is not None:
            low, high = around(*share, max(sides))
            sides = [min(sides), high - low]
        return cls(frames, sides[0], sides[1], channel_nbytes)

    def peak(self, way: Pass, strips: int) -> int:
        """Bytes of a pass, over the weights."""
        row, column = sorted((self.height, self.width))
        frames = TIME_STRIDE * self.frames
        pixels = row * column * SPACE_STRIDE**2
        plane = pixels * self.channel_nbytes
        whole = self.frames * row * column * 4 * self.channel_nbytes  # four times the channels
        edges = way.edges * frames * row * SPACE_STRIDE * self.channel_nbytes if strips > 1 else 0
        video = 3 * frames * pixels  # as bytes
        return int(way.planes * plane / strips + whole + edges + video)

    def strips_within(self, way: Pass, room: int | None) -> int:
        """The fewest strips that keep to `room` bytes; the most there can be where none do."""
        most = most_strips(self.height, self.width)
        fits = (n for n in range(1, most) if room is None or self.peak(way, n) <= room)
        return next(fits, most)


class StepMemory:
    """What denoising took on a GPU, measured; before the first measurement what was planned."""

    def __init__(self, device: torch.device, planned: int | None) -> None:
        """`planned`: bytes; None: the VAE may take what it likes."""
        self._gpu = device if device.type == "cuda" else None
        self._limit = planned if self._gpu else None
        self._limits = self._limit is not None
        self._earlier = 0

    @property
    def limit(self) -> int | None:
        """Bytes that may be allocated while the VAE works; None: any number."""
        return self._limit

    @property
    def peak(self) -> int | None:
        """The most that was ever allocated; None without a GPU."""
        if self._gpu is None:
            return None
        return max(self._earlier, torch.cuda.max_memory_allocated(self._gpu))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Denoising. Resets the device's peak statistics; a failed one does not count."""
        if self._gpu is None or not self._limits:
            yield
            return
        self._earlier = self.peak or 0
        torch.cuda.reset_peak_memory_stats(self._gpu)
        yield
        self._limit = torch.cuda.max_memory_allocated(self._gpu)


def room(limit: int | None, device: torch.device) -> int | None:
    """Bytes of `limit` that are not allocated."""
    if limit is None:
        return None
    return limit - (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
