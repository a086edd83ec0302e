"""`shared-offload bench end-to-end`: one video as a user makes it, in DiT steps and all the rest.

The product runs as a process of its own, or several under torchrun; wall time is taken around it,
stages come from the JSON beside the video. A program that makes video after video pays for start
and end once: `--next` makes two in one process, and splits the second. Invariant: stages, start and
end add up to the wall time; what was computed from fewer steps than a video has is shown apart from
what was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table

from shared_offload.bench.arguments import (
    COMPILE,
    add_dit,
    add_json,
    add_video,
    at_least,
    video_size,
)
from shared_offload.bench.clock import publish
from shared_offload.bench.folder import add_folder_flag, model_folder, video_parts
from shared_offload.config import load_settings
from shared_offload.errors import ConfigError, OffloadError
from shared_offload.pipeline.generate import Pipeline
from shared_offload.pipeline.video import metadata_path
from shared_offload.report.progress import Progress

FULL_STEPS = 40
SCHEME = "fp8-vllm"
DENOISE, WRITE = "denoise", "write video"
START, END = "start and checks", "close and exit"
BETWEEN = "between stages"
NEXT_STEPS = 3
PROMPT = "a sailing boat on a calm lake at sunrise, mountains behind, slow camera movement"
NEGATIVE = "low quality, blurry, static, overexposed"
# A line of the table of stages at the end of a run, and the very last one.
STAGE_LINE = re.compile(r"^(\S.*?) +(\d+\.\d+) s +\d+\.\d %")
LAST_LINE = "settings and figures: "
TAIL = 20


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of one video."""

    steps: int
    wall: float
    stages: Mapping[str, float]
    """In order; they add up to `wall`."""
    metadata: Mapping[str, Any]

    @property
    def step(self) -> float | None:
        """The median step as the device saw it, None where the run does not tell."""
        median: float | None = self.metadata.get("streaming", {}).get("step_seconds_median")
        return median

    @property
    def per_step(self) -> float:
        """The median step, or the mean of all of denoising."""
        return self.stages[DENOISE] / self.steps if self.step is None else self.step

    @property
    def before_steps(self) -> float:
        """From the start to the first step."""
        names = list(self.stages)
        return sum(self.stages[name] for name in names[: names.index(DENOISE)])

    @property
    def in_steps(self) -> float:
        """DiT steps at their own pace; what their first one took longer is not in it."""
        return self.steps * self.per_step

    def total(self, steps: int) -> float:
        """Wall time with another number of steps of the same pace."""
        return self.wall + (steps - self.steps) * self.per_step

    def overhead(self, steps: int) -> float:
        """The share of `total` that is no DiT step."""
        return 1 - steps * self.per_step / self.total(steps)

    def document(self) -> dict[str, Any]:
        """Its fields and what follows from them, as JSON values."""
        return {
            **asdict(self),
            "step": self.step,
            "per_step": self.per_step,
            "before_steps": self.before_steps,
            "in_steps": self.in_steps,
            "overhead": self.overhead(self.steps),
            "full_steps": FULL_STEPS,
            "full_total": self.total(FULL_STEPS),
            "full_overhead": self.overhead(FULL_STEPS),
            "full_is_extrapolated": self.steps != FULL_STEPS,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """What was seen of a process."""

    wall: float
    last_line: float | None
    """Seconds after the start at which its last line came."""
    printed: Mapping[str, float]
    """Stages of the table that it printed."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "end-to-end",
        help="one whole video, and what of it is not DiT steps",
        description="Run python -m shared_offload.infer once and split its wall time. With fewer "
        f"than {FULL_STEPS} steps, the time of {FULL_STEPS} is computed as well.",
    )
    add_dit(parser)
    add_video(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=FULL_STEPS,
        help="3 or more tell the pace; default: %(default)s",
    )
    parser.add_argument("--no-cfg", action="store_true", help="one branch instead of two")
    parser.add_argument("--weights", choices=("streamed", "resident"), default="streamed")
    parser.add_argument(
        "--config_json",
        type=Path,
        metavar="FILE",
        help="a config to run instead of all the above but the size of the video and the steps",
    )
    parser.add_argument(
        "--next",
        action="store_true",
        help=f"then make two videos of {NEXT_STEPS} steps in one process, and split the second",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that share the work, under torchrun"
    )
    add_folder_flag(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the video, print the table, write the JSON."""
    at_least("--steps", args.steps)
    at_least("--ranks", args.ranks)
    if args.next and args.ranks > 1:
        raise ConfigError(
            f"--next makes its videos in one process, and --ranks is {args.ranks}",
            hint="leave one of them out",
            key="--next",
            found=args.ranks,
        )
    video_size(args.frames, args.height, args.width)
    config = _config(args)
    parts = video_parts(args.task, "dit-fp8" if args.dtype == "fp8" else "dit")
    with (
        model_folder(args.model_path, args.size, args.task, parts) as folder,
        tempfile.TemporaryDirectory(prefix="shared_offload-bench-") as place,
    ):
        video = Path(place) / "out.mp4"
        words = _arguments(args, config, folder, video)
        ended = _infer([*_launcher(args.ranks), "-m", "shared_offload.infer", *words])
        metadata = json.loads(metadata_path(video).read_text(encoding="utf-8"))
        results = {"measured": split(metadata, ended, args.steps)}
        document = {"config": config, **results["measured"].document()}
        if args.next:
            shorter = {**config, "infer_steps": NEXT_STEPS}
            results["next video"] = _next_video(_arguments(args, shorter, folder, video))
            document["next"] = results["next video"].document()
    publish(_table(results), document, args.json)
    return 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON of the run."""
    config: dict[str, Any]
    if args.config_json is not None:
        config = _read_config(args.config_json)
    else:
        streamed = args.weights == "streamed"
        config = {
            "enable_cfg": not args.no_cfg,
            **({"dit_quantized": True, "dit_quant_scheme": SCHEME} if args.dtype == "fp8" else {}),
            "cpu_offload": streamed,
            "shared_cpu_weights": streamed,
            "offload_granularity": args.granularity,
            "self_attn_1_type": args.attention,
            "cross_attn_1_type": args.attention,
            "compile": COMPILE[args.compile],
        }
    size = {"size": [args.height, args.width], "num_frames": args.frames}
    parallel = {"parallel": {"seq_p_size": args.ranks}} if args.ranks > 1 else {}
    return {**parallel, **config, **size, "infer_steps": args.steps}


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *torchrun]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config_json {path} cannot be read ({error})", key="--config_json", found=str(path)
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"--config_json {path} holds no JSON object", key="--config_json", found=str(path)
        )
    return config


def _arguments(
    args: argparse.Namespace, config: Mapping[str, Any], folder: Path, video: Path
) -> list[str]:
    """What a user types; a config and, where one is needed, a picture lie beside the video."""
    config_path = video.with_name("config.json")
    config_path.write_text(json.dumps(config), encoding="utf-8")
    flags = {
        "--task": args.task,
        "--model_path": folder,
        "--config_json": config_path,
        "--prompt": PROMPT,
        "--negative_prompt": NEGATIVE,
        "--save_result_path": video,
    }
    if args.task == "i2v":
        flags["--image_path"] = video.with_name("first_frame.png")
        draw_picture(flags["--image_path"], args.height, args.width)
    return [str(word) for flag in flags.items() for word in flag]


def draw_picture(path: Path, height: int, width: int) -> None:
    """A picture of soft noise."""
    small = torch.rand(max(1, height // 16), max(1, width // 16), 3)
    levels = (255 * small).to(torch.uint8).numpy()
    Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC).save(path)


def _infer(command: Sequence[str]) -> Ended:
    """Run it to its end; its messages go to stderr as they come."""
    begun = time.monotonic()
    last_line: float | None = None
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # a pipe was asked for
        for line in process.stderr:
            if line.startswith(LAST_LINE):
                last_line = time.monotonic() - begun
            sys.stderr.write(line)
            lines.append(line)
    wall = time.monotonic() - begun
    if process.returncode:
        raise OffloadError(
            f"the run ended with exit code {process.returncode}",
            expected="a video",
            hint="its own messages are above",
            code=process.returncode,
            tail=lines[-TAIL:],
        )
    found = (STAGE_LINE.match(line) for line in lines)
    return Ended(wall, last_line, {m[1]: float(m[2]) for m in found if m})


def split(metadata: Mapping[str, Any], ended: Ended, steps: int) -> Result:
    """Wall time by stage: those of the JSON, writing (printed after it was written), the ends."""
    stages: dict[str, float] = dict(metadata["stage_seconds"])
    if WRITE in ended.printed:
        stages[WRITE] = ended.printed[WRITE]
    known = sum(stages.values())
    last = ended.wall if ended.last_line is None else ended.last_line
    ends = {END: ended.wall - last}
    stages = {START: last - known, **stages, **ends}
    return Result(steps, ended.wall, stages, metadata)


def _next_video(arguments: Sequence[str]) -> Result:
    """The second of two videos that one pipeline makes."""
    progress = Progress()
    with Pipeline(load_settings(arguments), progress=progress) as pipeline:
        pipeline.generate()
        before = dict(progress.stage_seconds)
        begun = time.monotonic()
        video = pipeline.generate()
        wall = time.monotonic() - begun
    stages = {name: total - before[name] for name, total in progress.stage_seconds.items()}
    stages[BETWEEN] = wall - sum(stages.values())
    return Result(video.metadata["infer_steps"], wall, stages, video.metadata)


def _table(results: Mapping[str, Result]) -> Table:
    """A column for each, and one for a whole video where it had fewer steps."""
    first = next(iter(results.values()))
    ranks, device = first.metadata["ranks"], first.metadata["device"]
    device = f"{ranks} x {device}" if ranks > 1 else device
    table = Table(title=f"{first.steps} steps, {first.metadata['attention']}, {device}")
    table.add_column("", no_wrap=True)
    columns: list[tuple[Result, int]] = []
    for title, result in results.items():
        columns.append((result, result.steps))
        table.add_column(title, justify="right")
        if result.steps != FULL_STEPS:
            columns.append((result, FULL_STEPS))
            table.add_column(f"{FULL_STEPS} steps, extrapolated", justify="right")
    for name in dict.fromkeys(name for result in results.values() for name in result.stages):
        table.add_row(name, *(_seconds(result, name, n) for result, n in columns))
    table.add_section()
    table.add_row("before the steps", *(f"{result.before_steps:.2f} s" for result, _ in columns))
    table.add_row("total", *(f"{result.total(n):.2f} s" for result, n in columns))
    kind = "mean of denoise" if first.step is None else "median"
    table.add_row(f"a step ({kind})", *(f"{result.per_step:.4f} s" for result, _ in columns))
    table.add_row("steps", *(f"{n * result.per_step:.2f} s" for result, n in columns))
    table.add_row("outside the steps", *(f"{result.overhead(n):.2%}" for result, n in columns))
    return table


def _seconds(result: Result, stage: str, steps: int) -> str:
    if stage not in result.stages:
        return "-"
    more = (steps - result.steps) * result.per_step if stage == DENOISE else 0.0
    return f"{result.stages[stage] + more:.2f} s"
