"""A complete checkpoint folder of random weights, in the layout of Wan's releases.

Invariants: the same size, task and seed give the same bytes, whichever parts are made, in whatever
order, by however many threads; `fp8/` is what a conversion of the official files gives. A folder
that holds a model is left alone, unless its SYNTHETIC.json says that it is this very one; then the
parts that it lacks are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared_offload.errors import ConfigError, OutputError
from shared_offload.report.progress import Progress
from shared_offload.synth.parts import PARTS, Part, PartName, plan_part
from shared_offload.synth.sizes import Size, Task, architecture
from shared_offload.weights.architecture import CONFIG_NAME, write_config
from shared_offload.weights.writer import require_disk_space

MARKER = "SYNTHETIC.json"
SLACK_NBYTES = 1 << 20  # headers of .pth files, JSON files


def make_checkpoint(
    out: Path,
    size: Size,
    task: Task,
    *,
    parts: Sequence[PartName] = (),
    seed: int = 0,
    threads: int = 1,
    progress: Progress,
) -> None:
    """Write config.json and those of the parts (none given: all of them) that `out` lacks.

    Disk space for all of them is checked first. Peak memory: about 64 MiB per thread, and for a
    .pth file its whole content (T5: 11.4 GB at full size). Raises ConfigError for a part that the
    task does not have, PreflightError for a small disk, OutputError for a folder of something else.
    """
    planned = [plan_part(name, size, task, seed) for name in _choose(parts, task)]
    identity = {"size": size, "task": task, "seed": seed}
    _check_folder(out, identity, planned)
    missing = [part for part in planned if not all((out / file).exists() for file in part.files)]
    if missing:
        require_disk_space(out, sum(part.nbytes for part in missing) + SLACK_NBYTES)
    _start_folder(out, identity)
    write_config(architecture(size, task), out / CONFIG_NAME)
    for part in missing:
        with progress.task(part.title, part.nbytes, "B") as shown:
            part.make(out, threads, shown.advance)
    for part in planned:
        if part not in missing:
            progress.note(f"{part.title}: already there")


def _choose(parts: Sequence[PartName], task: Task) -> list[PartName]:
    known = [part for part in PARTS if part != "clip" or task == "i2v"]
    wrong = [part for part in parts if part not in known]
    if wrong:
        raise ConfigError(
            f"--only names {', '.join(wrong)}",
            expected=f"parts of a {task} checkpoint: {', '.join(known)}",
            hint="clip belongs to i2v only" if "clip" in wrong else "separate names by commas",
            key="only",
            found=wrong,
        )
    return [part for part in known if not parts or part in parts]


def _check_folder(out: Path, identity: Mapping[str, object], parts: Iterable[Part]) -> None:
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is no folder", hint="give a new folder", path=str(out))
    marker = out / MARKER
    try:
        found = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else None
    except (OSError, ValueError):
        found = "unreadable"
    if found == identity:
        return
    files = [CONFIG_NAME, *(file for part in parts for file in part.files)]
    there = [file for file in files if (out / file).exists()]
    if found is not None or there:
        what = f"synthetic weights of {found}" if found else f"a model ({there[0]})"
        raise OutputError(
            f"{out} holds {what}",
            expected=f"an empty folder, or one that was begun with {dict(identity)}",
            hint="give another folder; nothing is overwritten",
            path=str(out),
            found=found or there,
        )


def _start_folder(out: Path, identity: Mapping[str, object]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).write_text(json.dumps(identity) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write to {out}: {error.strerror}", hint="check --out", path=str(out)
        ) from error
