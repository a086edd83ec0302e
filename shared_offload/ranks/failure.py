"""What went wrong on which rank: the one record that all ranks end with."""

from __future__ import annotations

import json
import signal
import traceback
from dataclasses import asdict, dataclass

import torch

from shared_offload.errors import OffloadError, Problems, RankError, from_json
from shared_offload.ranks.facts import Member


class Agreed(Problems):
    """Errors that all ranks have told each other and raise alike: they are not one rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first thing that went wrong in a run; `error` is an OffloadError as JSON."""

    rank: int
    stage: str
    error: str
    exit_code: int
    details: str = ""
    """A traceback, where the error is one nobody foresaw."""
    lost: bool = False
    """The rank ended without a word, so it cannot print its own error."""
    agreed: bool = False
    """Every rank has found the same."""

    def to_json(self) -> str:
        """The record as JSON; the inverse of `failure_from_json`."""
        return json.dumps(asdict(self))

    def text(self, world_size: int) -> str:
        """What a person reads: the error, then where it happened."""
        body = str(from_json(self.error))
        if self.details:
            body = f"{self.details.rstrip()}\n{body}"
        if world_size == 1 or self.lost or self.agreed:
            return body
        stage = f", stage {self.stage}" if self.stage else ""
        return f"{body}\nin rank {self.rank} of {world_size}{stage}"


def failure_from_json(text: str) -> Failure:
    """The record that `Failure.to_json` wrote."""
    return Failure(**json.loads(text))


def of_exception(error: BaseException, rank: int, stage: str) -> Failure:
    """The failure of a rank whose program raised `error`."""
    details = ""
    if isinstance(error, OffloadError):
        known = error
    elif isinstance(error, torch.OutOfMemoryError):
        known = RankError(
            f"out of GPU memory: {_first_line(error)}",
            hint="fewer frames or a smaller size, offload_granularity phase, more ranks, or end "
            "what else uses this GPU",
            rank=rank,
            stage=stage,
        )
    elif isinstance(error, MemoryError):
        known = RankError(
            f"out of host memory: {_first_line(error)}",
            hint="shared_cpu_weight_scope host needs the least; see also the cgroup's limit",
            rank=rank,
            stage=stage,
        )
    else:
        known = RankError(f"{type(error).__name__}: {_first_line(error)}", rank=rank, stage=stage)
        details = "".join(traceback.format_exception(error))
    return Failure(
        rank=rank,
        stage=stage,
        error=known.to_json(),
        exit_code=known.exit_code,
        details=details,
        agreed=isinstance(error, Agreed),
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no message")


def of_lost(member: Member, world_size: int, stage: str) -> Failure:
    """The failure of a rank whose process is gone though it had not finished."""
    error = RankError(
        f"rank {member.rank} of {world_size} (pid {member.pid} on {member.hostname}) "
        f"disappeared in stage {stage or 'start'}",
        expected="every rank to live until the video is written",
        hint="it was killed or crashed: the launcher's report names the signal; dmesg tells "
        "whether the kernel ended it for lack of memory",
        rank=member.rank,
        stage=stage,
        pid=member.pid,
    )
    return Failure(
        rank=member.rank,
        stage=stage,
        error=error.to_json(),
        exit_code=error.exit_code,
        lost=True,
    )


def of_signal(signum: int, rank: int, stage: str) -> Failure:
    """The failure of a rank that was told to end; its exit code is 128 + the signal's number."""
    error = RankError(f"ended by {signal.Signals(signum).name}", rank=rank, stage=stage)
    return Failure(rank=rank, stage=stage, error=error.to_json(), exit_code=128 + signum)


def of_launcher(rank: int, stage: str, what: str) -> Failure:
    """The failure of a run whose launcher, or whose store, is gone."""
    error = RankError(
        what,
        expected="the launcher to outlive its ranks",
        hint="look at the first host: the launcher there ended, or the network between the hosts",
        rank=rank,
        stage=stage,
    )
    return Failure(
        rank=rank, stage=stage, error=error.to_json(), exit_code=error.exit_code, lost=True
    )
