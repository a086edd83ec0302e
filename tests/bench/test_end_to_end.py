"""The end-to-end benchmark: one real run of the tiny model, and the arithmetic of its parts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from shared_offload.bench import end_to_end as bench
from shared_offload.errors import ConfigError, OffloadError

SMALL = ("--size", "tiny", "--height", "32", "--width", "48", "--frames", "5")


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["end-to-end", *SMALL, *flags])
    return args.run(args)


def test_stages_of_a_run_add_up_to_its_time(tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    begun = time.monotonic()
    assert run("--steps", "3", "--json", str(path)) == 0
    around = time.monotonic() - begun
    figures = json.loads(path.read_text())
    stages = figures["stages"]
    assert sum(stages.values()) == pytest.approx(figures["wall"])
    assert figures["wall"] < around
    assert list(stages) == [
        *("start and checks", "load DiT", "encode text", "encode image", "denoise", "decode"),
        *("write video", "close and exit"),
    ]
    assert stages["write video"] >= 0  # told in hundredths of a second, and it may take less
    assert all(seconds > 0 for name, seconds in stages.items() if name != "write video")
    metadata = figures["metadata"]
    told = metadata["stage_seconds"]
    assert {name: stages[name] for name in told} == told
    assert metadata["infer_steps"] == metadata["streaming"]["steps"] == 3
    assert metadata["enable_cfg"] and metadata["cpu_offload"] and metadata["dit_quantized"]
    assert figures["step"] == metadata["streaming"]["step_seconds_median"]
    assert 2 * figures["step"] < stages["denoise"] * 1.01  # two of three take the median or more
    before = ("start and checks", "load DiT", "encode text", "encode image")
    assert figures["before_steps"] == pytest.approx(sum(stages[name] for name in before))
    assert figures["full_total"] == pytest.approx(figures["wall"] + 37 * figures["per_step"])
    table = capsys.readouterr().out
    assert "measured" in table and "40 steps, extrapolated" in table


def test_the_second_video_of_a_process(tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    assert run("--steps", "1", "--next", "--json", str(path)) == 0
    first = json.loads(path.read_text())
    following = first["next"]
    assert (first["steps"], following["steps"]) == (1, 3)
    assert sum(following["stages"].values()) == pytest.approx(following["wall"])
    assert "start and checks" not in following["stages"]
    assert following["stages"]["load DiT"] < first["stages"]["load DiT"] / 10
    assert following["wall"] < first["wall"]  # three steps take less than a start
    assert following["metadata"]["infer_steps"] == 3
    assert following["full_overhead"] < first["full_overhead"]
    table = capsys.readouterr().out
    assert "next video" in table and "between stages" in table


def test_two_ranks_make_one_video(tmp_path, capfd) -> None:
    path = tmp_path / "figures.json"
    assert run("--steps", "1", "--ranks", "2", "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert sum(figures["stages"].values()) == pytest.approx(figures["wall"])
    assert figures["metadata"]["ranks"] == 2
    assert "before the steps" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="--ranks is 2"):
        run("--ranks", "2", "--next")


def test_a_run_that_fails_is_an_error(tmp_path, capsys) -> None:
    with pytest.raises(OffloadError, match="exit code") as caught:
        run("--model_path", str(tmp_path))
    assert caught.value.facts["code"] != 0
    assert "config.json" in capsys.readouterr().err  # what the run itself said


def ended(wall: float, last_line: float | None, printed: dict[str, float]) -> bench.Ended:
    return bench.Ended(wall, last_line, printed)


METADATA = {"stage_seconds": {"encode text": 2.0, "denoise": 25.0, "decode": 3.0}}


def test_parts_of_the_time() -> None:
    told = {**METADATA, "streaming": {"step_seconds_median": 4.0}}
    result = bench.split(told, ended(40.0, 38.5, {"denoise": 25.01, "write video": 1.5}), 5)
    assert result.stages == {
        "start and checks": 7.0,
        **METADATA["stage_seconds"],
        "write video": 1.5,
        "close and exit": 1.5,
    }
    assert result.in_steps == 20  # the other 5 s of denoising are the first step's
    assert result.overhead(5) == 0.5
    assert result.total(40) == 40 + 35 * 4
    assert result.overhead(40) == pytest.approx(20 / 180)


def test_without_figures_of_the_device_all_of_denoising_counts() -> None:
    result = bench.split(METADATA, ended(40.0, None, {}), 5)
    assert result.step is None and result.per_step == 5
    assert result.stages["close and exit"] == 0 and sum(result.stages.values()) == 40


def test_the_runs_own_table_is_understood() -> None:
    lines = ["encode text         2.00 s    5.0 %", "write video       101.25 s  100.0 %"]
    found = [bench.STAGE_LINE.match(line) for line in lines]
    assert [(m[1], float(m[2])) for m in found] == [("encode text", 2.0), ("write video", 101.25)]
    assert bench.STAGE_LINE.match("denoise: 3 steps in 0.192 s (0.064 s/step)") is None


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--steps", "0"), "--steps 0"),
        (("--frames", "6"), "--frames 6"),
        (("--config_json", "missing.json"), "cannot be read"),
    ],
)
def test_what_cannot_be_run_is_refused(flags, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(*flags)


def test_a_given_config_is_run_with_the_size_and_steps_asked_for(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"enable_cfg": False, "infer_steps": 9, "unload_modules": True}))
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(required=True))
    flags = ["end-to-end", *SMALL, "--steps", "2", "--config_json", str(path)]
    config = bench._config(parser.parse_args(flags))
    assert config == {
        "enable_cfg": False,
        "unload_modules": True,
        "infer_steps": 2,
        "size": [32, 48],
        "num_frames": 5,
    }
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        run("--config_json", str(Path(path)))
