"""What is imported before a run or a command does anything: each second of it is a second to wait.

Reads `sys.modules` of a process of its own, in which nothing else has imported anything.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# With what they pull in: torch._dynamo alone is 6 s on a host with slow files.
HEAVY = {"transformers", "diffusers", "av", "tokenizers", "torch._dynamo", "torch._inductor"}
HEAVY |= {"torch.distributed.tensor", "sympy", "scipy", "pandas", "sklearn", "triton"}
QUICK = ("status", "stop")  # commands that need neither torch nor settings
REPORT = """
import json, sys
try:
    code = main({argv})
except SystemExit as error:
    code = error.code
sys.stderr.write("\\n" + json.dumps([code, list(sys.modules)]))
"""


def words(flags: Mapping[str, object]) -> list[str]:
    """A command line."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def imported(module: str, *argv: str) -> tuple[int, set[str]]:
    """The exit code of `module.main(argv)`, and the modules there are in its process then."""
    program = f"from {module} import main\n" + REPORT.format(argv=list(argv))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, set(modules)


def test_infer_tells_a_wrong_path_without_heavy_libraries(tmp_path: Path) -> None:
    flags = {"model_path": tmp_path, "task": "t2v", "config_json": ROOT / "configs/demo_t2v.json"}
    code, modules = imported("shared_offload.infer", *words(flags))
    assert code == 1, "it is the checkpoint that is missing"
    assert "shared_offload.pipeline.text_encoder" in modules
    assert not modules & HEAVY, "import these through pipeline/libraries.py"


COLLECTIONS = """
import gc, json, runpy, sys
seen = []
marks = ("torch", "diffusers")  # imported first and, but for one, last
gc.callbacks.append(lambda phase, _: seen.append([mark in sys.modules for mark in marks]))
sys.argv = ["infer", *{argv}]
try:
    runpy.run_module("shared_offload.infer", run_name="__main__")
except SystemExit as error:
    sys.stderr.write("\\n" + json.dumps([error.code, gc.isenabled(), gc.get_freeze_count(), seen]))
"""


def test_no_garbage_is_looked_for_while_libraries_are_imported(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs/demo_t2v.json").read_text()) | {"infer_steps": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {"model_path": ROOT / "assets/demo/t2v", "task": "t2v", "prompt": "a red circle"}
    flags |= {"config_json": tmp_path / "config.json", "save_result_path": tmp_path / "out.mp4"}
    program = COLLECTIONS.format(argv=words(flags))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    code, enabled, frozen, seen = json.loads(done.stderr.splitlines()[-1])
    assert (code, enabled) == (0, True), done.stderr
    assert frozen > 100_000, "what is there to stay"
    assert all(torch == diffusers for torch, diffusers in seen), "none, or all but the last"


def test_ctrl_c_while_torch_is_imported_ends_without_a_word() -> None:
    def restore() -> None:  # a shell that runs tests in the background has it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    command = [sys.executable, "-m", "shared_offload.infer"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=restore
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[1]
    assert (process.returncode, said) == (-signal.SIGINT, "")


@pytest.mark.parametrize("command", ["--help", "doctor", *QUICK])
def test_commands_come_without_heavy_libraries(command: str, tmp_path: Path) -> None:
    ways = {"--help": ["--help"], "doctor": ["doctor", "--arena-gb", "0.001"]}
    argv = ways.get(command, [command, "--socket_folder", str(tmp_path)])
    code, modules = imported("shared_offload.cli", *argv)
    if command != "doctor":  # whose verdict is the host's
        assert code == (1 if command == "stop" else 0)
    names = {n.rpartition(".")[2] for n in modules if n.startswith("shared_offload.cli.")}
    assert ("bench" in names) == (command == "--help"), "which lists all, and they only"
    heavy = HEAVY - {"tokenizers"} if command == "--help" else HEAVY  # synth makes a tokenizer
    assert not modules & heavy, "import these through pipeline/libraries.py"
    assert command not in QUICK or not {"torch", "pydantic", "numpy"} & modules
