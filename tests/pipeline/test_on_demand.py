"""When modules are loaded, moved and freed; a device that is never touched stands for a GPU."""

from __future__ import annotations

import pytest
import torch

from shared_offload.pipeline.on_demand import OnDemand

GPU = torch.device("cuda", 0)


class Recorder:
    """A module that writes down what happens to it."""

    def __init__(self, device: torch.device, log: list[str]) -> None:
        self.log = log
        log.append(f"load {device.type}")

    def move(self, device: torch.device) -> None:
        self.log.append(f"move {device.type}")

    def close(self) -> None:
        self.log.append("close")


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({}, "load cuda, move cuda, used", "move cuda, used"),
        (
            {"offload": True},
            "load cpu, move cuda, used, move cpu",
            "move cuda, used, move cpu",
        ),
        (
            {"unload": True},
            "load cuda, move cuda, used, close",
            "load cuda, move cuda, used, close",
        ),
        (
            {"unload": True, "offload": True},  # no host copy that nobody would keep
            "load cuda, move cuda, used, close",
            "load cuda, move cuda, used, close",
        ),
    ],
    ids=lambda value: " ".join(value) or "stays" if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("fails", [False, True])
def test_where_a_module_is_before_during_and_after(options, first, second, fails) -> None:
    log: list[str] = []
    module = OnDemand(lambda device: Recorder(device, log), GPU, **options)
    assert log == []
    for expected in (first, second):
        log.clear()
        try:
            with module.use() as lent:
                lent.log.append("used")
                if fails:
                    raise RuntimeError
        except RuntimeError:
            assert fails
        assert ", ".join(log) == expected
    log.clear()
    module.close()
    module.close()
    assert log == ([] if "unload" in options else ["close"])


def test_on_the_cpu_there_is_nothing_to_move_away_from() -> None:
    log: list[str] = []
    host = torch.device("cpu")
    with OnDemand(lambda device: Recorder(device, log), host, offload=True).use():
        pass
    assert log == ["load cpu", "move cpu"]
