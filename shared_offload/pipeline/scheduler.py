"""The sampler: from a velocity and a latent to the next latent.

UniPC (order 2, bh2, x0 prediction) on Wan's own grid, and plain Euler for models distilled to few
steps. Invariant: timesteps and sigmas are known on the host before the first step, latents stay
fp32, and no step makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared_offload.errors import ConfigError

TRAIN_TIMESTEPS = 1000
FIRST_SIGMA = 0.9990000128746033  # float32(1 - 1/1000): Wan's grid starts here, before the shift
NEARLY_ONE = 1e-6  # a first sigma closer to 1 is put this far below it, as the log of 0 is infinite


class Scheduler(Protocol):
    """What the denoising loop needs; one object serves one video."""

    @property
    def timesteps(self) -> Sequence[float]: ...  # one per step, as the DiT gets them

    @property
    def sigmas(self) -> Sequence[float]: ...  # one more than there are steps; the last is 0

    def step(self, velocity: Tensor, index: int, latent: Tensor) -> Tensor:
        """The fp32 latent after step `index`; steps are taken in order, from 0."""
        ...


def make_scheduler(
    *,
    steps: int,
    shift: float,
    distilled_steps: Sequence[int] | None,
    device: torch.device | str,
) -> Scheduler:
    """A scheduler for one video; `distilled_steps` (1..1000, falling) selects Euler.

    Raises ConfigError where the numbers cannot make a grid.
    """
    if steps < 1:
        raise ConfigError(
            f"infer_steps ({steps}) is no number of steps",
            expected="1 or more",
            key="infer_steps",
            found=steps,
        )
    if shift <= 0:
        raise ConfigError(
            f"sample_shift ({shift}) is no shift",
            expected="above 0",
            key="sample_shift",
            found=shift,
        )
    if distilled_steps is None:
        return UniPC(steps=steps, shift=shift, device=device)
    found = list(distilled_steps)
    falling = found == sorted(set(found), reverse=True) and found[:1] <= [TRAIN_TIMESTEPS]
    if not falling or len(found) != steps or found[-1] < 1:
        raise ConfigError(
            f"denoising_step_list {found} does not fit infer_steps ({steps})",
            expected=f"{steps} falling numbers within 1..{TRAIN_TIMESTEPS}",
            key="denoising_step_list",
            found=found,
        )
    return DistilledEuler(found, shift=shift)


class DistilledEuler:
    """x + (sigma_next - sigma) * v, on sigmas of the given training steps after the shift."""

    def __init__(self, steps: Sequence[int], *, shift: float) -> None:
        base = torch.tensor(steps, dtype=torch.float32) / TRAIN_TIMESTEPS
        sigmas = shift * base / (1 + (shift - 1) * base)
        self.timesteps: list[float] = (TRAIN_TIMESTEPS * sigmas).tolist()
        self.sigmas: list[float] = [*sigmas.tolist(), 0.0]

    def step(self, velocity: Tensor, index: int, latent: Tensor) -> Tensor:
        """The fp32 latent after step `index`."""
        x0 = latent.float() - self.sigmas[index] * velocity.float()
        return x0 + self.sigmas[index + 1] * velocity.float()


class UniPC:
    """UniPC on Wan's grid: sigmas, timesteps and results of Wan and diffusers, bit for bit.

    Coefficients depend on sigmas alone. They are 0-dim fp32 tensors on the host, which become
    arguments of kernels: on the device, each would be a copy or a solve that makes the host wait.
    Holds the data predictions of two steps and the last latent (3 latents of device memory). Maths:
    https://arxiv.org/abs/2302.04867, section 3.
    """

    def __init__(self, *, steps: int, shift: float, device: torch.device | str) -> None:
        base = np.linspace(FIRST_SIGMA, 0, steps + 1)[:-1]
        sigmas = shift * base / (1 + (shift - 1) * base)
        if 1 - sigmas[0] < NEARLY_ONE:
            sigmas[0] -= NEARLY_ONE
        self._sigmas = torch.from_numpy(np.append(sigmas, 0).astype(np.float32))
        self._device = torch.device(device)
        self._steps = steps
        self._at = 0
        self._order = 0  # of the last step
        self._data: list[Tensor] = []  # predicted by the last two steps, the newest last
        self._last: Tensor | None = None  # the latent from which the last step went on
        self.timesteps: list[float] = [float(int(t)) for t in sigmas * TRAIN_TIMESTEPS]
        self.sigmas: list[float] = self._sigmas.tolist()

    def step(self, velocity: Tensor, index: int, latent: Tensor) -> Tensor:
        """The fp32 latent after step `index`; RuntimeError where a step was left out."""
        if index != self._at:
            raise RuntimeError(f"step {index} was asked for, step {self._at} is next")
        latent = latent.to(self._device, torch.float32)
        data = latent - self._sigmas[index] * velocity.to(self._device, torch.float32)
        if self._last is not None:
            latent = self._corrected(data, self._last)
        self._data = [*self._data[-1:], data]
        self._order = min(2, index + 1, self._steps - index)  # the first and the last are of 1
        self._last = latent
        following = self._predicted(latent)
        self._at += 1
        return following

    def _predicted(self, latent: Tensor) -> Tensor:
        """The latent of the next sigma."""
        at = self._at
        keep, alpha, h_phi_1, h = self._exponentials(at + 1, at)
        m0 = self._data[-1]
        x_t = keep * latent - alpha * h_phi_1 * m0
        if self._order == 1:
            return x_t
        slope = (self._data[-2] - m0) / self._ratio(at - 1, at, h)
        return x_t - alpha * h_phi_1 * (0.5 * slope)

    def _corrected(self, data: Tensor, last: Tensor) -> Tensor:
        """The last step once more, now that the data prediction at its end is known."""
        at = self._at
        keep, alpha, h_phi_1, h = self._exponentials(at, at - 1)
        m0 = self._data[-1]
        x_t = keep * last - alpha * h_phi_1 * m0
        if self._order == 1:
            return x_t - alpha * h_phi_1 * (0.5 * (data - m0))
        ratio = self._ratio(at - 2, at - 1, h)
        rhos = self._corrector_weights(ratio, h, h_phi_1)
        slope = (self._data[-2] - m0) / ratio
        return x_t - alpha * h_phi_1 * (rhos[0] * slope + rhos[1] * (data - m0))

    def _lambda(self, index: int) -> Tensor:
        """Half the log of the signal-to-noise ratio at sigma `index`; infinite at sigma 0."""
        sigma = self._sigmas[index]
        return torch.log(1 - sigma) - torch.log(sigma)

    def _exponentials(self, to: int, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is kept of x, alpha at the end, expm1(-h), which is also B(h), and h."""
        h = self._lambda(to) - self._lambda(start)
        return self._sigmas[to] / self._sigmas[start], 1 - self._sigmas[to], torch.expm1(-h), h

    def _ratio(self, before: int, start: int, h: Tensor) -> Tensor:
        return (self._lambda(before) - self._lambda(start)) / h

    @staticmethod
    def _corrector_weights(ratio: Tensor, h: Tensor, h_phi_1: Tensor) -> Tensor:
        """The two weights of the order-2 corrector: a 2x2 Vandermonde system."""
        rks = torch.stack([ratio, torch.ones(())])
        h_phi_2 = h_phi_1 / -h - 1
        h_phi_3 = h_phi_2 / -h - 1 / 2
        right = torch.stack([h_phi_2 / h_phi_1, h_phi_3 * 2 / h_phi_1])
        weights: Tensor = torch.linalg.solve(torch.stack([torch.pow(rks, 0), rks]), right)
        return weights
