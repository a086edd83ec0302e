"""The launchers with a stub python on PATH that records how it was called."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).parent.parent / "launchers"
SCRIPTS = tuple(sorted(path.name for path in LAUNCHERS.glob("run_*.sh")))
STUB = """#!/bin/bash
{ printf '%s\\0' "$@"; } > "$RECORD/arguments"
echo -n "$CUDA_VISIBLE_DEVICES" > "$RECORD/devices"
echo -n "$PWD" > "$RECORD/folder"
echo -n $$ > "$RECORD/pid"
[ -z "$WAIT" ] || exec sleep 60
"""


class Host:
    """A copy of the launchers in a project folder of its own, a stub python, and a model folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "a project"
        shutil.copytree(LAUNCHERS, self.project / "launchers")
        configs = LAUNCHERS.parent / "configs"
        shutil.copytree(configs, self.project / "configs")
        (folder / "bin").mkdir()
        stub = folder / "bin" / "python3"
        stub.write_text(STUB)
        stub.chmod(0o755)
        (folder / "model").mkdir()
        (folder / "image.png").touch()

    def edit(self, name: str, **values: str) -> Path:
        """The script with `values` put into its lines, as a person would."""
        script = self.project / "launchers" / name
        text = script.read_text()
        for key, value in values.items():
            text, count = re.subn(f'^{key}="[^"]*"', f'{key}="{value}"', text, flags=re.M)
            assert count == 1, key
        script.write_text(text)
        return script

    def ready(self, name: str, **values: str) -> Path:
        paths = {"model_path": f"{self.folder}/model", "image_path": f"{self.folder}/image.png"}
        return self.edit(name, **(paths | values))

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return dict(os.environ, PATH=path, RECORD=str(self.folder), **more)

    def run(self, script: Path, *arguments: str, cwd: Path | None = None, **more: str):
        command = ["bash", str(script), *arguments]
        return subprocess.run(
            command,
            env=self.environment(**more),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=20,
        )

    def arguments(self) -> list[str]:
        return (self.folder / "arguments").read_text().split("\0")[:-1]

    def started(self) -> bool:
        return (self.folder / "arguments").exists()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def flags(arguments: list[str]) -> dict[str, str]:
    rest = arguments[arguments.index("shared_offload.infer") + 1 :]
    return dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_started(host, name):
    done = host.run(host.ready(name, prompt="a cat, two  dogs; $HOME", seed="7"))
    assert done.returncode == 0, done.stderr
    called = host.arguments()
    count = 8 if "shared" in name else 1
    assert called[:2] == ["-m", "torch.distributed.run"]
    assert f"--nproc_per_node={count}" in called
    assert called[called.index("shared_offload.infer") - 1] == "-m"
    task = "t2v" if "t2v" in name else "i2v"
    given = flags(called)
    assert given["--task"] == task
    assert given["--seed"] == "7"
    assert given["--model_path"] == f"{host.folder}/model"
    assert Path(given["--config_json"]).is_relative_to(host.project / "configs")
    assert ("--image_path" in given) == (task == "i2v")
    assert (host.folder / "devices").read_text() == ",".join(map(str, range(count)))


def test_a_prompt_is_one_argument(host):
    prompt = "it's a cat;  two dogs & *"
    host.run(host.ready("run_wan_i2v.sh", prompt=prompt, negative_prompt=""))
    given = flags(host.arguments())
    assert (given["--prompt"], given["--negative_prompt"]) == (prompt, "")


def test_the_environment_does_not_override(host):
    names = ("TASK", "task", "CONFIG_JSON", "config_json", "MODEL_PATH", "model_path", "gpus")
    names += ("SHARED_CPU_WEIGHT_SCOPE", "WAN_GPUS", "WAN_NPROC", "processes", "seed", "root")
    names += ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "python", "problems", "arguments")
    script = host.ready("run_wan_block_shared_offload.sh")
    host.run(script)
    plain = host.arguments()
    host.run(script, **dict.fromkeys(names, "7"))
    assert host.arguments() == plain
    assert (host.folder / "devices").read_text() == "0,1,2,3,4,5,6,7"


def test_the_number_of_ranks_is_not_counted_from_the_gpus(host):
    script = host.ready("run_wan_block_shared_offload.sh", gpus="4,2", processes="3")
    assert host.run(script).returncode == 0
    assert "--nproc_per_node=3" in host.arguments()
    assert (host.folder / "devices").read_text() == "4,2"


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_are_refused(host, name):
    done = host.run(host.ready(name), "--seed", "3")
    assert done.returncode == 2
    assert not host.started()
    assert "--seed 3" in done.stderr
    assert "forwards no arguments" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_shipped_it_names_the_lines_to_edit(host, name):
    script = host.project / "launchers" / name
    done = host.run(script)
    assert done.returncode == 2
    assert not host.started()
    unset = ["model_path"] if "t2v" in name else ["model_path", "image_path"]
    lines = script.read_text().splitlines()
    for key in unset:
        number = next(n for n, line in enumerate(lines, 1) if line.startswith(f"{key}="))
        assert f"{key} is not set; edit line {number} of {script}" in done.stderr
    assert len(done.stderr.splitlines()) == len(unset)


def test_missing_paths_show_the_absolute_path_tried(host):
    script = host.edit("run_wan_i2v.sh", model_path="no/model", image_path="/no/image.png")
    done = host.run(script)
    assert done.returncode == 2
    assert f"there is no folder {host.folder}/no/model; edit line" in done.stderr
    assert "there is no file /no/image.png; edit line" in done.stderr


@pytest.mark.parametrize("value", ["", "0", "eight", "-2"])
def test_the_number_of_ranks_is_a_number(host, value):
    done = host.run(host.ready("run_wan_block_shared_offload.sh", processes=value))
    assert done.returncode == 2
    assert f"processes is '{value}'" in done.stderr
    assert not host.started()


def test_it_works_from_any_folder_and_keeps_it(host):
    elsewhere = host.folder / "else where"
    (elsewhere / "weights").mkdir(parents=True)
    script = host.ready("run_wan_i2v.sh", model_path="weights")
    done = host.run(script, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert (host.folder / "folder").read_text() == str(elsewhere)
    assert flags(host.arguments())["--model_path"] == "weights"


def test_a_copy_elsewhere_works_with_its_root_line_changed(host):
    script = host.ready("run_wan_i2v.sh")
    copy = host.folder / "mine.sh"
    text = re.sub("^root=.*", f'root="{host.project}"', script.read_text(), flags=re.M)
    copy.write_text(text)
    assert host.run(copy).returncode == 0


def test_the_projects_own_python_comes_first(host):
    own = host.project / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/bash\ntouch "$RECORD/own"\n')
    own.chmod(0o755)
    assert host.run(host.ready("run_wan_i2v.sh")).returncode == 0
    assert (host.folder / "own").exists()
    assert not host.started()


def test_the_launcher_becomes_the_program_so_signals_reach_it(host):
    script = host.ready("run_wan_i2v.sh")
    command = ["bash", str(script)]
    process = subprocess.Popen(command, env=host.environment(WAIT="1"), cwd=host.folder)
    while not (host.folder / "pid").exists() or not (host.folder / "pid").read_text():
        time.sleep(0.01)
    assert int((host.folder / "pid").read_text()) == process.pid
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == -signal.SIGINT


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_config_exists_and_its_ranks_are_the_scripts(name):
    text = (LAUNCHERS / name).read_text()
    values = dict(re.findall(r'^(\w+)="(.*?)"', text, flags=re.M))
    config = json.loads(
        Path(values["config_json"].replace("${root}", str(LAUNCHERS.parent))).read_text()
    )
    parallel = config.get("parallel") or {}
    ranks = parallel.get("seq_p_size", 1) * parallel.get("cfg_p_size", 1)
    assert int(values["processes"]) == ranks == len(values["gpus"].split(","))


def test_shellcheck():
    root = LAUNCHERS.parent
    scripts = [*LAUNCHERS.glob("*sh"), *(root / "tools").glob("*.sh"), root / ".ci/run"]
    assert len(scripts) > len(SCRIPTS) + 5
    checker = shutil.which("shellcheck", path=Path(sys.executable).parent) or "shellcheck"
    command = [checker, "-x", *(str(path.relative_to(root)) for path in scripts)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
