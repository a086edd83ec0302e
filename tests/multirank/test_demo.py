"""`make demo` as a stranger runs it: launcher, torchrun, two ranks, one arena, two videos."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import av
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo(tmp_path) -> None:
    out, prompt = tmp_path / "a demo", """it's "two"  dogs & a $HOME; `x` \\ /"""
    environment = dict(os.environ, OUT=str(out), PROMPT=prompt)
    command = ["bash", str(ROOT / "tools/demo.sh")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Arenas in host memory") == 2
    assert done.stderr.count("of host memory saved against a copy for each rank") == 2
    for task in ("t2v", "i2v"):
        said = json.loads((out / f"{task}.mp4.json").read_text())
        assert (said["task"], said["prompt"], said["seed"]) == (task, prompt, 42)
        assert said["ranks"] == 2
        assert [arena["ranks"] for arena in said["arenas"]] == [[0, 1]]
        with av.open(str(out / f"{task}.mp4")) as container:
            assert sum(1 for _ in container.decode(video=0)) == 17
        assert f"video: {out / task}.mp4" in done.stderr
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.width > 5 * 64 and sheet.height >= 2 * 64
