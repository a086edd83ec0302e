"""The sampler against Wan's stored grid, diffusers, a plain float64 solver and a solvable ODE."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from shared_offload.errors import ConfigError
from shared_offload.pipeline.scheduler import make_scheduler

solve = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "plain_unipc.py"))["solve"]

# (steps, shift): first timesteps, last timesteps, first sigmas, last sigmas but the 0
GRID = {
    (40, 3): ([999, 991, 982, 973, 963], [195, 136, 71], [0.999666, 0.991189], [0.13624, 0.071361]),
    (40, 5): ([999, 994, 989, 983, 978], [288, 208, 113], [0.9998, 0.994695], [0.20816, 0.113533]),
    (50, 5): ([999, 995, 991, 987, 982], [241, 172, 92], [0.9998, 0.995732], [0.172265, 0.092507]),
    (50, 8): (
        [999, 997, 994, 991, 989],
        [337, 249, 140],
        [0.999875, 0.997328],
        [0.249805, 0.140228],
    ),
    (4, 5): ([999, 937, 833, 624], [937, 833, 624], [0.9998, 0.937265], [0.833055, 0.624687]),
}


def unipc(steps: int, shift: float):
    return make_scheduler(steps=steps, shift=shift, distilled_steps=None, device="cpu")


@pytest.mark.parametrize(("steps", "shift"), GRID)
def test_grid_is_wans(steps: int, shift: float) -> None:
    first, last, first_sigmas, last_sigmas = GRID[steps, shift]
    scheduler = unipc(steps, shift)
    assert list(scheduler.timesteps[: len(first)]) == first
    assert list(scheduler.timesteps[-3:]) == last
    assert scheduler.sigmas[:2] == pytest.approx(first_sigmas, abs=6e-7)
    assert scheduler.sigmas[-3:] == pytest.approx([*last_sigmas, 0], abs=6e-7)
    assert len(scheduler.timesteps) == len(scheduler.sigmas) - 1 == steps


def diffusers_unipc(steps: int, shift: float) -> UniPCMultistepScheduler:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(sigmas=np.linspace(0.9990000128746033, 0, steps + 1)[:-1])
    return scheduler


@pytest.mark.parametrize("shift", [0.1, 3.0, 5.3, 2000.0])  # the last: a sigma within 1e-6 of 1
def test_grid_is_diffusers(shift: float) -> None:
    for steps in (1, 2, 17, 40):
        theirs, ours = diffusers_unipc(steps, shift), unipc(steps, shift)
        assert ours.timesteps == theirs.timesteps.tolist()
        assert ours.sigmas == theirs.sigmas.tolist()


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_bit_equal_to_diffusers(steps: int, shift: float) -> None:
    theirs, ours = diffusers_unipc(steps, shift), unipc(steps, shift)
    generator = torch.Generator().manual_seed(1)
    a = b = torch.randn(1, 16, 3, 4, 6, generator=generator)
    for i, t in enumerate(theirs.timesteps):
        velocity = torch.randn(a.shape, generator=generator)
        a = theirs.step(velocity, t, a, return_dict=False)[0]
        b = ours.step(velocity, i, b)
        assert torch.equal(a, b)


def test_agrees_with_plain_float64() -> None:
    """The velocity depends on the latent here, so an error of one step would grow."""
    scheduler = unipc(12, 5.0)
    start = np.random.default_rng(0).standard_normal((2, 3))

    def velocity(x, i):
        return np.sin(3 * x) + scheduler.sigmas[i]

    want = solve(start, scheduler.sigmas, velocity)
    x = torch.from_numpy(start).float()
    for i in range(12):
        x = scheduler.step(torch.from_numpy(velocity(x.double().numpy(), i)).float(), i, x)
        np.testing.assert_allclose(x.numpy(), want[i], rtol=2e-5, atol=2e-5)


def test_solves_an_ode_with_a_known_answer() -> None:
    """Data N(0, c^2): the flow only scales x, by sqrt(s^2 + (1 - s)^2 c^2)."""
    c = 0.5
    scheduler = unipc(160, 3.0)
    spread = [(s**2 + (1 - s) ** 2 * c**2) ** 0.5 for s in scheduler.sigmas]
    x = euler = torch.tensor([1.0, -2.0])
    for i, s in enumerate(scheduler.sigmas[:-1]):
        rate = (s - (1 - s) * c**2) / spread[i] ** 2
        euler = euler + (scheduler.sigmas[i + 1] - s) * rate * euler
        x = scheduler.step(rate * x, i, x)
    exact = torch.tensor([1.0, -2.0]) * spread[-1] / spread[0]
    assert (x - exact).abs().max() < 1.5e-3 < 0.1 * (euler - exact).abs().max()


@pytest.mark.parametrize(
    ("shift", "sigmas"), [(5.0, [1.0, 0.9375, 0.8333333, 0.625]), (3.0, [1.0, 0.9, 0.75, 0.5])]
)
def test_distilled_is_euler_on_given_steps(shift: float, sigmas: list[float]) -> None:
    scheduler = make_scheduler(
        steps=4, shift=shift, distilled_steps=[1000, 750, 500, 250], device="cpu"
    )
    assert scheduler.sigmas == pytest.approx([*sigmas, 0.0])
    assert scheduler.timesteps == pytest.approx([1000 * s for s in sigmas])  # not cut to integers
    # Velocity of a straight path: Euler is exact on it, whatever the steps.
    data, noise = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    x = noise
    for i in range(4):
        x = scheduler.step((noise - data).to(torch.bfloat16).float(), i, x)
    want = noise - (noise - data).to(torch.bfloat16).float()
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)


def test_a_step_left_out_is_noticed() -> None:
    scheduler = unipc(4, 5.0)
    x = torch.zeros(2)
    x = scheduler.step(x, 0, x)
    with pytest.raises(RuntimeError, match="step 2 was asked for, step 1 is next"):
        scheduler.step(x, 2, x)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"steps": 0}, "infer_steps"),
        ({"shift": 0.0}, "sample_shift"),
        ({"distilled_steps": [1000, 500]}, "denoising_step_list"),
        ({"distilled_steps": [1000, 500, 750, 250]}, "denoising_step_list"),
        ({"distilled_steps": [1001, 750, 500, 250]}, "denoising_step_list"),
        ({"distilled_steps": [1000, 750, 500, 0]}, "denoising_step_list"),
    ],
)
def test_numbers_that_make_no_grid(change: dict[str, object], key: str) -> None:
    asked = {"steps": 4, "shift": 5.0, "distilled_steps": None, "device": "cpu", **change}
    with pytest.raises(ConfigError) as caught:
        make_scheduler(**asked)
    assert caught.value.facts["key"] == key


@pytest.mark.gpu
def test_no_step_waits_for_the_device(host_must_not_wait) -> None:
    scheduler = make_scheduler(steps=6, shift=5.0, distilled_steps=None, device="cuda")
    on_host = unipc(6, 5.0)
    x = torch.randn(16, 3, 8, 8, device="cuda")
    y = x.cpu()
    with host_must_not_wait():
        for i in range(6):
            x = scheduler.step(torch.sin(x), i, x)
    for i in range(6):
        y = on_host.step(torch.sin(y), i, y)
    torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-4)
