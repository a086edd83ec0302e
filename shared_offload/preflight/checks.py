"""Checks of what the host has against what the run needs, before anything big is allocated.

Invariant: every rank gets the same list of errors, made from what all ranks found, so that all end
alike and one of them can say everything that is wrong at once. Each check is a plain function of
plain values. Memory of the host is checked where arenas are planned (memory/domain.py), because
only there it is known who shares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from shared_offload.errors import ConfigError, OffloadError, PreflightError, Problems, from_json
from shared_offload.preflight.plan import total_of
from shared_offload.ranks.board import Board
from shared_offload.ranks.devices import (
    host_gpus,
    too_few_gpus,
    visible_devices_problem,
    visible_gpu_count,
)
from shared_offload.ranks.facts import RankFacts, member_facts, visible_devices_variable
from shared_offload.ranks.group import wrong_world

GIB = 1 << 30

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """The GPU that a rank is going to hold, in bytes where it is memory."""

    uuid: str
    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank found by itself, as JSON types."""

    rank: int
    hostname: str
    host: str
    local_world_size: int
    visible: int
    gpu: GpuReport | None
    files: dict[str, tuple[int, int] | None]
    """Size and modification time in ns of each file; None where the rank does not see it."""
    settings: str
    """A digest of what was asked for."""
    errors: tuple[str, ...]

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> RankReport:
        """From what `asdict` and JSON made of it."""
        values: dict[str, object] = dict(fields)
        gpu = values["gpu"]
        values["gpu"] = GpuReport(**gpu) if isinstance(gpu, dict) else None
        return cls(**values)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class Preflight:
    """One run's checks. `run` is collective; `warnings` is filled by it."""

    facts: RankFacts
    board: Board
    device: DeviceChoice
    allow_shared_gpu: bool
    seq_p_size: int
    cfg_p_size: int
    settings: str = ""
    """What was asked for, as any text: all ranks must have been asked for the same."""
    heads: int | None = None
    """None: config.json could not be read, which is among `found`."""
    gpu_needs: Mapping[str, int] = field(default_factory=dict)
    """From `gpu_plan`; empty: not known."""
    files: Sequence[Path] = ()
    found: Sequence[OffloadError] = ()
    """What this rank has found already, checkpoint files for instance."""
    warnings: list[str] = field(default_factory=list)

    def run(self) -> list[OffloadError]:
        """Collective. Everything that is wrong on any rank, in the same order on every rank."""
        gathered = self.board.gather(asdict(self._report()))
        reports = [RankReport.of(fields) for fields in gathered]
        visible = min(report.visible for report in reports)
        errors = check_world(self.facts.world_size, self.seq_p_size, self.cfg_p_size)
        if self.heads is not None:
            errors += check_heads(self.heads, self.seq_p_size, visible)
        errors += merge_errors([report.errors for report in reports])
        errors += check_settings(reports)
        errors += check_files(reports)
        if self.device == "cuda" or any(report.visible for report in reports):
            count_errors, notes = check_gpu_count(reports, self.allow_shared_gpu)
            errors += count_errors
            self.warnings += notes + check_gpu_kinds(reports)
            if not count_errors:
                errors += check_gpu_memory(reports, self.gpu_needs)
        return errors

    def _report(self) -> RankReport:
        member = member_facts(self.facts.rank)
        found = _flat(self.found)
        visible = visible_gpu_count() if self.device != "cpu" else 0
        if self.device != "cpu":
            gpus = host_gpus()
            if gpus or self.device == "cuda":
                problem = visible_devices_problem(visible_devices_variable(), gpus)
                found += [problem] if problem else []
        return RankReport(
            rank=self.facts.rank,
            hostname=member.hostname,
            host=f"{member.boot_id} {self.facts.host_rank}",
            local_world_size=self.facts.local_world_size,
            visible=visible,
            gpu=gpu_report(self.facts.local_rank % visible) if visible else None,
            files={str(path): _file_facts(path) for path in self.files},
            settings=hashlib.sha256(self.settings.encode()).hexdigest(),
            errors=tuple(error.to_json() for error in found),
        )


def _flat(found: Sequence[OffloadError]) -> list[OffloadError]:
    return [e for one in found for e in (one.errors if isinstance(one, Problems) else [one])]


def gpu_report(index: int) -> GpuReport:
    """The visible GPU `index` as CUDA sees it. Makes a CUDA context on it."""
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return GpuReport(uuid=str(properties.uuid), name=properties.name, total=total, free=free)


def _file_facts(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns)


# -- the checks ------------------------------------------------------------------------------------


def check_world(world_size: int, seq_p_size: int, cfg_p_size: int) -> list[OffloadError]:
    """As many ranks as the mesh has places."""
    if world_size == seq_p_size * cfg_p_size:
        return []
    return [wrong_world(world_size, seq_p_size, cfg_p_size)]


def check_heads(heads: int, seq_p_size: int, visible_gpus: int) -> list[OffloadError]:
    """Ulysses gives each rank of a sequence the same number of heads.

    Lists the counts that divide `heads`: those up to the visible GPUs, all where there is none.
    """
    if heads % seq_p_size == 0:
        return []
    most = visible_gpus or heads
    valid = [count for count in range(1, min(most, heads) + 1) if heads % count == 0]
    bound = f" on the {visible_gpus} visible GPUs" if visible_gpus else ""
    return [
        ConfigError(
            f"parallel.seq_p_size ({seq_p_size}) must divide the model's heads ({heads})",
            hint=f"use {_either(valid)}{bound}",
            key="parallel.seq_p_size",
            found=seq_p_size,
            valid=valid,
        )
    ]


def _either(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def check_gpu_count(
    reports: Sequence[RankReport], allow_shared_gpu: bool
) -> tuple[list[OffloadError], list[str]]:
    """Errors: fewer GPUs than ranks on a host, or two ranks on one GPU. Warnings: idle GPUs."""
    errors: list[OffloadError] = []
    warnings: list[str] = []
    for host in _hosts(reports):
        ranks, visible = host[0].local_world_size, min(report.visible for report in host)
        if visible == 0:
            errors.append(_no_gpu(host[0].hostname))
        elif visible < ranks and not allow_shared_gpu:
            errors.append(too_few_gpus(ranks, visible))
        elif visible > ranks:
            warnings.append(
                f"{visible} GPUs are visible on {host[0].hostname} and {ranks} are used; "
                "--nproc_per_node and parallel in the JSON set how many"
            )
        if visible >= ranks and not allow_shared_gpu:
            errors += [_same_gpu(holders) for holders in _holders(host) if len(holders) > 1]
    return errors, warnings


def _no_gpu(hostname: str) -> PreflightError:
    return PreflightError(
        f"CUDA shows no GPU on {hostname}",
        expected="a GPU and a driver that this torch build can use",
        hint="see nvidia-smi and CUDA_VISIBLE_DEVICES, or set device to cpu",
        needed=1,
        found=0,
    )


def _same_gpu(holders: Sequence[RankReport]) -> PreflightError:
    ranks = [report.rank for report in holders]
    return PreflightError(
        f"ranks {', '.join(map(str, ranks))} on {holders[0].hostname} hold one and the same GPU",
        expected="a GPU of its own for each rank",
        hint="name each GPU once in CUDA_VISIBLE_DEVICES, alike for all ranks, or set "
        "allow_shared_gpu for a test",
        ranks=ranks,
    )


def check_gpu_kinds(reports: Sequence[RankReport]) -> list[str]:
    """A warning when ranks hold GPUs of unequal kind: the slowest sets the pace."""
    kinds: dict[str, list[int]] = {}
    for report in reports:
        if report.gpu:
            kind = f"{report.gpu.name} ({report.gpu.total / GIB:.0f} GiB)"
            kinds.setdefault(kind, []).append(report.rank)
    if len(kinds) < 2:
        return []
    listing = "; ".join(f"{kind}: rank {_list(ranks)}" for kind, ranks in kinds.items())
    return [f"the GPUs are of unequal kind, and all wait for the slowest: {listing}"]


def check_gpu_memory(reports: Sequence[RankReport], needs: Mapping[str, int]) -> list[OffloadError]:
    """The plan of all ranks that hold a GPU against what is free there. `needs` per rank."""
    errors: list[OffloadError] = []
    for host in _hosts(reports):
        for holders in _holders(host):
            gpu = holders[0].gpu
            assert gpu is not None  # _holders keeps ranks that have one
            needed, free = total_of(needs) * len(holders), min(r.gpu.free for r in holders if r.gpu)
            if needed > free:
                errors.append(_short_of_gpu_memory(holders, gpu, needs, needed, free))
    return errors


def _short_of_gpu_memory(
    holders: Sequence[RankReport],
    gpu: GpuReport,
    needs: Mapping[str, int],
    needed: int,
    free: int,
) -> PreflightError:
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in needs.items())
    return PreflightError(
        f"rank {_list([r.rank for r in holders])} needs at least {needed / GIB:.1f} GiB on the "
        f"{gpu.name} of {holders[0].hostname} (GiB for each rank: {parts}), and "
        f"{free / GIB:.1f} of {gpu.total / GIB:.1f} GiB are free",
        hint="cpu_offload with offload_granularity phase needs the least for weights; fewer "
        "frames, a smaller size or more ranks the least for activations; nvidia-smi shows what "
        "else uses the GPU",
        needed=needed,
        found=free,
    )


def check_settings(reports: Sequence[RankReport]) -> list[OffloadError]:
    """Ranks of several hosts read a JSON each, and it may not be the same one."""
    other = [report.rank for report in reports if report.settings != reports[0].settings]
    if not other:
        return []
    hosts = sorted({report.hostname for report in reports if report.rank in other})
    return [
        ConfigError(
            f"rank {_list(other)} (on {', '.join(hosts)}) has other settings than rank 0",
            expected="the same flags and the same JSON on every host",
            hint="compare the files of --config_json and the command lines",
            key="config_json",
            ranks=other,
        )
    ]


def check_files(reports: Sequence[RankReport]) -> list[OffloadError]:
    """Files that only some ranks see, or that are not the same for all.

    A rank that has not listed a file and reports errors has said there what it lacks.
    """
    errors: list[OffloadError] = []
    for path in reports[0].files:
        said = [r for r in reports if path in r.files or not r.errors]
        seen = {report.rank: report.files.get(path) for report in said}
        blind = [rank for rank, facts in seen.items() if facts is None]
        sizes = sorted({facts[0] for facts in seen.values() if facts is not None})
        if blind and sizes:
            hosts = sorted({r.hostname for r in reports if r.rank in blind})
            what = f"{path} is not seen by rank {_list(blind)} (on {', '.join(hosts)})"
        elif len(sizes) > 1:
            what = f"{path} has {' or '.join(map(str, sizes))} bytes, depending on the rank"
        else:
            continue
        errors.append(
            PreflightError(
                what,
                expected="every rank to read the same files",
                hint="use one shared folder, or equal copies under the same path on each host",
                path=path,
                ranks=blind,
                sizes=sizes,
            )
        )
    return errors


def agree(board: Board, found: Sequence[OffloadError]) -> list[OffloadError]:
    """Collective. What any rank has found by itself, on every rank."""
    return merge_errors(board.gather([error.to_json() for error in _flat(found)]))


def merge_errors(found: Sequence[Sequence[str]]) -> list[OffloadError]:
    """What each rank found by itself, each error once; one that not all have names its ranks."""
    finders: dict[str, list[int]] = {}
    for rank, texts in enumerate(found):
        for text in dict.fromkeys(texts):
            finders.setdefault(text, []).append(rank)
    errors: list[OffloadError] = []
    for text, ranks in finders.items():
        error = from_json(text)
        if len(ranks) < len(found):
            error.what += f" (on rank {_list(ranks)} only)"
            error.facts["ranks"] = ranks
        errors.append(error)
    return errors


def _hosts(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    return list(hosts.values())


def _holders(host: Sequence[RankReport]) -> list[list[RankReport]]:
    """Ranks of a host, grouped by the GPU they hold."""
    holders: dict[str, list[RankReport]] = {}
    for report in host:
        if report.gpu:
            holders.setdefault(report.gpu.uuid, []).append(report)
    return list(holders.values())


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
