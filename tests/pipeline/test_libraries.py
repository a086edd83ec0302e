"""Imports in a thread: who waits for what, where errors show, and how a process ends meanwhile.

Modules are files made here, of which each says when it is imported and takes its time.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_offload.pipeline import libraries

ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count()
RAN: list[str] = []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module with this text; returns its name, which `libraries` then knows."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "_importer", libraries._Importer())
    RAN.clear()
    monkeypatch.setitem(sys.modules, "order_of_imports", sys.modules[__name__])

    def write(text: str = "") -> str:
        name = f"library_{next(NUMBERS)}"
        said = f"import order_of_imports\norder_of_imports.RAN.append({name!r})\n"
        (tmp_path / f"{name}.py").write_text(said + text)
        monkeypatch.setitem(libraries.HOMES, name, name)
        return name

    return write


def test_what_is_waited_for_comes_next(make) -> None:
    names = [make("import time\ntime.sleep(0.2)") for _ in range(4)]
    began = time.monotonic()
    libraries.preload(names)
    assert time.monotonic() - began < 0.15
    assert getattr(libraries, names[3]).__name__ == names[3]
    assert names[3] in RAN[:2], "behind the one that was under way"
    assert [getattr(libraries, name).__name__ for name in names] == names
    libraries.preload(names)
    libraries.preload([last := make()])
    assert getattr(libraries, last)
    assert sorted(RAN) == sorted([*names, last]), "each once"
    assert [name for name in RAN if name in names[:3]] == names[:3], "in the order of preload"


def test_an_error_is_raised_where_the_library_is_used(make, tmp_path: Path) -> None:
    broken, sound = make("raise OSError('libx264.so: no such file')"), make()
    libraries.preload([broken, sound])
    assert getattr(libraries, sound)
    with pytest.raises(OSError, match="libx264"):
        getattr(libraries, broken)
    (tmp_path / f"{broken}.py").write_text("mended = True")
    assert getattr(libraries, broken).mended


def test_what_comes_after_the_last_import(make) -> None:
    called: list[int] = []
    names = [make("import time\ntime.sleep(0.05)"), make()]
    libraries.preload(names, then=lambda: called.append(len(RAN)))
    assert getattr(libraries, names[1]) and getattr(libraries, names[0])
    libraries._importer._thread.join(10)
    assert called == [2]
    libraries.preload([], then=lambda: called.append(len(RAN)))
    libraries._importer._thread.join(10)
    assert called == [2, 2], "nothing to import is no reason to wait"


def test_who_waits_for_long_is_told_once(make, monkeypatch) -> None:
    told: list[str] = []
    slow = [make("import time\ntime.sleep(0.3)") for _ in range(2)]
    libraries.wait([quick := make()], told.append)
    assert (RAN, told) == ([quick], [])
    monkeypatch.setattr(libraries, "TOLD_SECONDS", 0.05)
    libraries.wait(slow, told.append)
    assert (RAN, told) == ([quick, *slow], [f"{slow[0]} is still being imported"])


def test_a_library_that_is_not_installed_is_told_at_once(make, monkeypatch) -> None:
    monkeypatch.setitem(libraries.HOMES, "absent", "absent_library.of_models")
    with pytest.raises(ModuleNotFoundError, match="absent_library"):
        libraries.preload([make(), "absent"])
    assert RAN == []
    with pytest.raises(AttributeError, match="no attribute 'UMT6'"):
        libraries.UMT6  # noqa: B018


def test_the_mode_of_the_caller_has_no_effect(make) -> None:
    name = make("import torch\nconstant = torch.ones(2)")
    with torch.device("meta"), torch.inference_mode():
        constant = getattr(libraries, name).constant
    assert constant.device.type == "cpu" and not constant.is_inference()


def test_every_name_is_there() -> None:
    for name, home in libraries.HOMES.items():
        value = getattr(libraries, name)
        assert (
            value.__name__ == name and (value.__module__ if name != "av" else "av")[:2] == home[:2]
        )


# -- processes that end meanwhile ------------------------------------------------------------------


def run(program: str, *argv: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return time.monotonic() - began, done


def test_a_process_that_ends_does_not_wait_for_all(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"slow_{i}.py").write_text(f"import time\ntime.sleep(0.1)\nimport slow_{i + 1}")
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from shared_offload.pipeline import libraries\n"
        "libraries.HOMES['slow_0'] = 'slow_0'\n"
        "libraries.preload(['slow_0'])\n"
        "time.sleep(0.3); sys.exit(7)"
    )
    seconds, done = run(program, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert seconds < 5


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.5])
def test_a_process_ends_quietly_amid_the_real_libraries(delay: float) -> None:
    program = (
        "import sys, time, torch\n"
        "from shared_offload.pipeline import libraries\n"
        "libraries.preload(libraries.HOMES)\n"
        "time.sleep(float(sys.argv[1])); sys.exit(7)"
    )
    _, done = run(program, str(delay))
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_library_is_waited_for(signum: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1.5)\nimport never_reached")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from shared_offload.pipeline import libraries\n"
        "from shared_offload.ranks.run import run_ranks\n"
        "libraries.HOMES['slow'] = 'slow'\n"
        "def program(watch):\n"
        "    with watch.stage('encode text'):\n"
        "        libraries.preload(['slow'])\n"
        "        print('waiting', flush=True)\n"
        "        libraries.slow\n"
        "sys.exit(run_ranks(program))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        process.send_signal(signum)
        stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signum
    assert stderr == f"RankError: ended by {signum.name}\n"
