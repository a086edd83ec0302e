"""The sampler: from a velocity and a latent to the next latent.

UniPC (order 2, bh2, x0 prediction) on Wan's own grid, through diffusers, and plain Euler for models
distilled to few steps. Invariant: timesteps and sigmas are known on the host before the first step,
latents stay fp32, and no step makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from shared_offload.errors import ConfigError

TRAIN_TIMESTEPS = 1000
FIRST_SIGMA = 0.9990000128746033  # float32(1 - 1/1000): Wan's grid starts here, before the shift


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
    """diffusers' UniPC on Wan's grid: same sigmas, timesteps and results as Wan, bit for bit.

    Holds the velocities of two steps and the last latent (3 latents of device memory).
    """

    def __init__(self, *, steps: int, shift: float, device: torch.device | str) -> None:
        # diffusers' own grid for flow sigmas runs from 1 to 0.001, which is not Wan's; explicit
        # values before the shift reproduce it.
        base = np.linspace(FIRST_SIGMA, 0, steps + 1)[:-1]
        self._solver = _HostUniPC(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=TRAIN_TIMESTEPS,
            flow_shift=shift,
        )
        self._solver.set_timesteps(sigmas=base, device="cpu")
        self._solver.set_begin_index(0)  # else the first step looks its timestep up
        self._device = torch.device(device)
        self.timesteps: list[float] = [float(t) for t in self._solver.timesteps.tolist()]
        self.sigmas: list[float] = self._solver.sigmas.tolist()

    def step(self, velocity: Tensor, index: int, latent: Tensor) -> Tensor:
        """The fp32 latent after step `index`; RuntimeError where a step was left out."""
        at = self._solver.step_index or 0
        if index != at:
            raise RuntimeError(f"step {index} was asked for, step {at} is next")
        latent = latent.to(self._device, torch.float32)
        following: Tensor = self._solver.step(
            velocity.to(self._device, torch.float32),
            self.timesteps[index],
            latent,
            return_dict=False,
        )[0]
        return following


class _HostUniPC(UniPCMultistepScheduler):  # type: ignore[misc]  # diffusers has no types
    """UniPC of order 1 or 2 whose coefficients are computed on the host.

    diffusers copies each sigma to the sample's device (a blocking copy) and solves a 2x2 system
    there (torch.linalg.solve waits for its status): 2 to 7 waits a step, counted on CUDA with
    torch.cuda.set_sync_debug_mode. The coefficients depend on sigmas alone. As 0-dim fp32 host
    tensors they are kernel arguments, and the arithmetic is the same, in the same order. Maths:
    https://arxiv.org/abs/2302.04867, section 3.
    """

    sigmas: Tensor  # one more than there are steps, on the host
    model_outputs: list[Tensor]  # x0 predictions, the newest last

    def multistep_uni_p_bh_update(
        self, *_: object, sample: Tensor, order: int, **__: object
    ) -> Tensor:
        at: int = self.step_index
        keep, alpha, h_phi_1, b_h, h = self._exponentials(at + 1, at)
        m0 = self.model_outputs[-1]
        x_t = keep * sample - alpha * h_phi_1 * m0
        if order == 1:
            return x_t
        slope = (self.model_outputs[-2] - m0) / self._ratio(at - 1, at, h)
        return x_t - alpha * b_h * (0.5 * slope)

    def multistep_uni_c_bh_update(
        self, *_: object, this_model_output: Tensor, last_sample: Tensor, order: int, **__: object
    ) -> Tensor:
        at: int = self.step_index
        keep, alpha, h_phi_1, b_h, h = self._exponentials(at, at - 1)
        m0 = self.model_outputs[-1]
        x_t = keep * last_sample - alpha * h_phi_1 * m0
        if order == 1:
            return x_t - alpha * b_h * (0.5 * (this_model_output - m0))
        ratio = self._ratio(at - 2, at - 1, h)
        rhos = self._corrector_weights(ratio, h, h_phi_1, b_h)
        slope = (self.model_outputs[-2] - m0) / ratio
        return x_t - alpha * b_h * (rhos[0] * slope + rhos[1] * (this_model_output - m0))

    def _lambda(self, index: int) -> Tensor:
        """Half the log of the signal-to-noise ratio at sigma `index`; infinite at sigma 0."""
        sigma = self.sigmas[index]
        return torch.log(1 - sigma) - torch.log(sigma)

    def _exponentials(self, to: int, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What is kept of x, alpha at the end, expm1(-h) (as h_phi_1 and as B(h)), and h."""
        h = self._lambda(to) - self._lambda(start)
        h_phi_1 = torch.expm1(-h)
        return self.sigmas[to] / self.sigmas[start], 1 - self.sigmas[to], h_phi_1, h_phi_1, h

    def _ratio(self, before: int, start: int, h: Tensor) -> Tensor:
        return (self._lambda(before) - self._lambda(start)) / h

    @staticmethod
    def _corrector_weights(ratio: Tensor, h: Tensor, h_phi_1: Tensor, b_h: Tensor) -> Tensor:
        """The two weights of the order-2 corrector: a 2x2 Vandermonde system."""
        rks = torch.stack([ratio, torch.ones(())])
        h_phi_2 = h_phi_1 / -h - 1
        h_phi_3 = h_phi_2 / -h - 1 / 2
        right = torch.stack([h_phi_2 / b_h, h_phi_3 * 2 / b_h])
        weights: Tensor = torch.linalg.solve(torch.stack([torch.pow(rks, 0), rks]), right)
        return weights
