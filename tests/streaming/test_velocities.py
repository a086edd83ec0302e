"""Velocities of the real DiT: streamed equals resident, bit for bit, whatever the mode."""

from __future__ import annotations

import pytest
import torch

from shared_offload.model.attention import select_attention
from shared_offload.model.dit import Dit
from shared_offload.model.operations import select_operations
from shared_offload.streaming.source import Source, resident_from_host
from shared_offload.streaming.streamer import StreamedSource
from tests.reference import tiny_model

STEPS = 3


class Model:
    """A tiny model, its inputs, and a denoising loop that depends on every step before."""

    def __init__(self, case, dtype: torch.dtype, device: torch.device) -> None:
        self.case, self.device = case, device
        attention, _ = select_attention("auto", device, dtype)
        self.dit = Dit(
            case.arch,
            tiny_model.non_block_weights(case.arch),
            dtype=dtype,
            device=device,
            self_attention=attention.run,
            cross_attention=attention.run,
            operations=select_operations("auto", device, dtype)[0],
        )
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        i2v = case.arch.model_type == "i2v"
        self.latent = random(16, 3, 6, 10)
        self.condition = random(20, 3, 6, 10) if i2v else None
        image = self.dit.embed_image(random(9, case.arch.image_dim)) if i2v else None
        texts = [random(n, case.arch.text_dim) for n in (11, 4)]
        self.branches = [self.dit.make_branch(text, image, keep=True) for text in texts]

    def step(self, latent: torch.Tensor, source: Source, number: int) -> torch.Tensor:
        time = 900.0 - 100 * number
        velocities = self.dit.velocities(latent, time, self.branches, source, self.condition)
        return latent + 0.1 * (velocities[0] - 0.5 * velocities[1])

    def run(self, source: Source, steps: int = STEPS) -> torch.Tensor:
        source.begin_run()
        latent = self.latent
        for number in range(steps):
            latent = self.step(latent, source, number)
        source.end_run()
        return latent

    def resident(self) -> Source:
        return resident_from_host(self.case.layout.units("block"), self.case.arena, self.device)


@pytest.mark.parametrize("model_type", ["t2v", "i2v"])
@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_every_mode_equals_resident(model_type, dtype, fp8, cases, engine) -> None:
    case = cases(model_type, dtype=dtype, fp8=fp8)
    model = Model(case, dtype, torch.device("cpu"))
    expected = model.run(model.resident())
    assert expected.isfinite().all() and not torch.equal(expected, model.latent)
    for granularity in ("block", "phase"):
        for resident in (0, 2, 5):
            source = StreamedSource(
                case.layout.units(granularity),
                case.arena,
                model.device,
                resident_blocks=resident,
                engine=engine(late=True, copy_seconds=0.001),
            )
            assert torch.equal(model.run(source), expected), (granularity, resident)


def test_a_missing_wait_shows_in_the_velocity(case, engine) -> None:
    model = Model(case, torch.bfloat16, torch.device("cpu"))
    source = StreamedSource(
        case.layout.units("block"),
        case.arena,
        model.device,
        engine=engine(late=True, copy_seconds=0.05, ignores={"compute"}),
    )
    assert not torch.equal(model.run(source), model.run(model.resident()))


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["t2v", "i2v"])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_mode_equals_resident_on_the_gpu(model_type, fp8, gpu_case) -> None:
    case = gpu_case(model_type, fp8)
    model = Model(case, torch.bfloat16, torch.device("cuda", 0))
    expected = model.run(model.resident())
    assert expected.isfinite().all() and not torch.equal(expected, model.latent)
    for granularity in ("block", "phase"):
        for resident in (0, 2, "auto", case.arch.num_layers):
            units = case.layout.units(granularity)
            source = StreamedSource(units, case.arena, model.device, resident_blocks=resident)
            for _ in range(2):
                assert torch.equal(model.run(source), expected), (granularity, resident)
            assert source.metrics.unread_steps == 0
            assert source.metrics.steps[0].copied_nbytes == sum(unit.nbytes for unit in units)
            source.close()


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["block", "phase"])
def test_a_step_never_synchronises_and_allocates_nothing_new(
    granularity, gpu_case, host_must_not_wait
) -> None:
    case = gpu_case("i2v", True)
    model = Model(case, torch.bfloat16, torch.device("cuda", 0))
    source = StreamedSource(case.layout.units(granularity), case.arena, model.device)
    source.begin_run()
    latent = model.step(model.latent, source, 0)
    latent = model.step(latent, source, 1)
    torch.cuda.synchronize()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with host_must_not_wait():
        for number in range(2, 6):
            latent = model.step(latent, source, number)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.memory_reserved() == reserved
    source.close()


@pytest.mark.parametrize("granularity", ["block", "phase"])
def test_units_from_files_equal_resident(case, disk, engine, granularity) -> None:
    model = Model(case, torch.bfloat16, torch.device("cpu"))
    found = disk(granularity, 2)
    source = StreamedSource(
        found.units,
        found.rank(),
        model.device,
        engine=engine(late=True, copy_seconds=0.002),
    )
    assert torch.equal(model.run(source), model.run(model.resident()))
    source.close()


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["block", "phase"])
@pytest.mark.parametrize("places", [2, 4, 100])
def test_units_from_files_on_the_gpu(
    gpu_case, disk, granularity, places, host_must_not_wait
) -> None:
    """Equal to resident, whatever stays; and the host waits for files, but never for the GPU."""
    case = gpu_case("i2v", True)
    model = Model(case, torch.bfloat16, torch.device("cuda", 0))
    expected = model.run(model.resident())
    for resident in (0, 2, "auto"):
        found = disk(granularity, places, of=case, pinned=True)
        source = StreamedSource(found.units, found.rank(), model.device, resident_blocks=resident)
        for _ in range(2):
            assert torch.equal(model.run(source), expected), resident
        source.begin_run(STEPS)
        latent = model.step(model.latent, source, 0)
        with host_must_not_wait():
            for number in range(1, STEPS):
                latent = model.step(latent, source, number)
        source.end_run()
        assert torch.equal(latent, expected)
        if resident == 0 and places < len(found.units):
            kept = sum(found.units[index].nbytes for index in found.plan.homes)
            read = source.metrics.disk.read_nbytes
            assert read == STEPS * (found.pass_nbytes - kept)  # homes were read by earlier runs
        source.close()


@pytest.mark.gpu
def test_peak_memory_is_ordered(gpu_case) -> None:
    case = gpu_case("i2v", True)
    model = Model(case, torch.bfloat16, torch.device("cuda", 0))
    block, phase = (case.layout.units(g) for g in ("block", "phase"))
    model.run(model.resident())  # workspaces of libraries are there from now on
    peaks = []
    for make in (
        lambda: StreamedSource(phase, case.arena, model.device),
        lambda: StreamedSource(block, case.arena, model.device),
        model.resident,
    ):
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        source = make()
        model.run(source)
        held = source.device_nbytes
        peaks.append(torch.cuda.max_memory_allocated() - base)
        source.close()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == base
        assert peaks[-1] >= held
    assert peaks[0] < peaks[1] < peaks[2]
