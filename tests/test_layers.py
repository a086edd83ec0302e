"""The import table of docs/architecture.md: imports point downward only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "shared_offload"

WEIGHTS_MODEL_MAY_SEE = ("weights.fp8", "weights.architecture", "weights.layout")
LOWER = ("errors", "report", "ranks", "config", "weights", "memory", "streaming", "model", "server")
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": ("errors",),
    "ranks": ("errors",),
    "report": ("errors",),
    "weights": ("errors",),
    "memory": ("errors", "ranks"),
    "server": ("errors", "ranks", "memory", "report"),
    "streaming": ("errors", "weights", "memory", "report"),
    "model": ("errors", "ranks", *WEIGHTS_MODEL_MAY_SEE),
    "synth": ("errors", "weights", "report"),
    "preflight": ("errors", "config", "ranks", "weights", "memory"),
    "pipeline": (*LOWER, "preflight"),
    "bench": (*LOWER, "preflight", "pipeline", "synth"),
    "infer": (*LOWER, "preflight", "pipeline"),
    "cli": (*LOWER, "preflight", "pipeline", "synth", "bench"),
}
FENCED: dict[str, tuple[str, ...]] = {
    "sysv_ipc": ("memory/arena.py",),
    "safetensors": ("weights/",),
    "pynvml": ("memory/numa.py", "ranks/", "preflight", "report/"),
    "psutil": ("memory/numa.py", "ranks/", "preflight", "report/"),
    "torch.distributed": (
        "ranks/",
        "model/ulysses.py",
        "memory/lifecycle.py",
    ),
    "transformers": ("pipeline/libraries.py",),
    "diffusers": ("pipeline/libraries.py",),
    "av": ("pipeline/libraries.py",),
    "tokenizers": ("synth/", "pipeline/libraries.py"),
    "triton": ("model/fused.py", "model/kernels.py", "model/operations.py"),
}
# Who may import by name, and so when it likes: libraries that take seconds, the one command that
# was asked for, and optional kernels.
BY_NAME = ("pipeline/libraries.py", "cli/__init__.py", "model/attention.py")
OPTIONAL_KERNELS = (
    "flash_attn",
    "flash_attn_interface",
    "fa3_fwd_interface",
    "sageattention",
    "triton",
    "shared_offload.model.fused",  # imports triton
)
FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """(full dotted name, level) of each import; `from a import b` gives a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(f"{node.module}.{alias.name}", node.level) for alias in node.names]
    return found


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_table(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    package = file.split("/")[0].removesuffix(".py")
    for name, level in imports(tree):
        assert level == 0, f"{file}: relative import of {name}"
        if within(name, "shared_offload") and package != "__init__":
            ours = name.removeprefix("shared_offload.")
            allowed = (package, *ALLOWED[package])
            assert any(within(ours, a) for a in allowed) or ours == "__version__", (
                f"{file} must not import {name}"
            )
        for library, homes in FENCED.items():
            if within(name, library):
                assert file.startswith(homes), f"{file} must not import {library}"


@pytest.mark.parametrize("file", FILES)
def test_no_import_inside_a_function(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for name, _ in imports(function):
                assert name.startswith(OPTIONAL_KERNELS), f"{file}: {function.name} imports {name}"


@pytest.mark.parametrize("file", FILES)
def test_imports_by_name(file: str) -> None:
    names = {name for name, _ in imports(ast.parse((ROOT / file).read_text()))}
    by_name = {name for name in names if within(name, "importlib") or within(name, "runpy")}
    assert not by_name or file in BY_NAME, f"{file} must not import {by_name}"
    assert "__import__(" not in (ROOT / file).read_text()


@pytest.mark.parametrize("file", FILES)
def test_environment_is_read_in_one_place(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "environ"]
    assert not reads or file == "ranks/facts.py"


@pytest.mark.parametrize("file", FILES)
def test_sizes(file: str) -> None:
    text = (ROOT / file).read_text()
    assert text.count("\n") <= 400, f"{file} is longer than 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < 60, f"{file}: {node.name} is too long"
