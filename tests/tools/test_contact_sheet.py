"""The contact sheet shows frames of each video, in order, the last one included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from shared_offload.pipeline.video import write_video

SCRIPT = Path(__file__).parents[2] / "tools/contact_sheet.py"


def test_rows_are_videos_and_columns_frames(tmp_path: Path) -> None:
    levels = torch.linspace(20, 220, 17).to(torch.uint8)
    rising = levels[:, None, None, None].expand(17, 32, 48, 3).contiguous()
    for name, frames in (("up", rising), ("down", rising.flip(0))):
        write_video(tmp_path / f"{name}.mp4", frames, 16, {})
    out = tmp_path / "new" / "sheet.png"
    videos = [str(tmp_path / "up.mp4"), str(tmp_path / "down.mp4")]
    command = [sys.executable, str(SCRIPT), *videos, "--out", str(out), "--frames", "5"]
    subprocess.run([*command, "--height", "64"], check=True, capture_output=True)
    found = np.array(Image.open(out)).astype(int)
    assert found.shape == (2 * (64 + 4) + 4, 5 * (96 + 4) + 4, 3)
    middles = [[found[36 + 68 * row, 52 + 100 * column] for column in range(5)] for row in (0, 1)]
    wanted = levels[::4].int().numpy()
    for row, expected in zip(middles, (wanted, wanted[::-1]), strict=True):
        assert np.abs(np.array(row) - expected[:, None]).max() < 6
