"""Tiny synthetic folders, made once."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint


@pytest.fixture(scope="session")
def quiet() -> Progress:
    return Progress(stream=io.StringIO(), enabled=False)


@pytest.fixture(scope="session")
def tiny_i2v(tmp_path_factory: pytest.TempPathFactory, quiet: Progress) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "i2v"
    make_checkpoint(folder, "tiny", "i2v", threads=2, progress=quiet)
    return folder


@pytest.fixture(scope="session")
def tiny_t2v(tmp_path_factory: pytest.TempPathFactory, quiet: Progress) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "t2v"
    make_checkpoint(folder, "tiny", "t2v", threads=2, progress=quiet)
    return folder
