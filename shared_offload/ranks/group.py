"""`Ranks`: the process groups of a run, and the messages between its ranks.

The mesh is (cfg, seq), row-major: rank = cfg * seq_p_size + seq. Ranks with one cfg index split the
tokens of one branch (`seq_group`); ranks with one seq index hold the same tokens of different
branches (`cfg_group`). A group of one rank is None: there is nobody to talk to. A lone process has
no process group at all.

Tensors go through NCCL where each rank has a GPU of its own, through gloo otherwise. Whatever may
take long (waiting for an encoder, for a file) is awaited on the board, which burns neither CPU nor
GPU and runs into no collective's timeout.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shared_offload.errors import ConfigError
from shared_offload.ranks.board import Board, open_board
from shared_offload.ranks.devices import pci_id
from shared_offload.ranks.facts import Member, RankFacts, member_facts
from shared_offload.ranks.tensors import as_bytes, collect, gather_equal, swap_edges
from shared_offload.ranks.watch import Watch

CLOSE_SECONDS = 5.0


class Ranks:
    """This rank's groups. A context manager: leaving it after an error leaves the groups to the end
    of the process, since ending them may wait for a lost rank.
    """

    def __init__(
        self,
        facts: RankFacts,
        device: torch.device,
        board: Board,
        members: Sequence[Member],
        watch: Watch | None,
    ) -> None:
        """Use `start`."""
        self.facts = facts
        self.device = device
        self.board = board
        self.members = tuple(members)
        self.seq_p_size = facts.world_size
        self.cfg_p_size = 1
        self.backend = ""
        self.seq_group: dist.ProcessGroup | None = None
        self.cfg_group: dist.ProcessGroup | None = None
        self.world_group: dist.ProcessGroup | None = None
        self._watch = watch
        self._names = itertools.count(1)

    @classmethod
    def start(
        cls,
        facts: RankFacts,
        device: torch.device,
        *,
        seq_p_size: int = 1,
        cfg_p_size: int = 1,
        timeout: float = 600.0,
        watch: Watch | None = None,
    ) -> Ranks:
        """Collective. Connect to the others and make the groups.

        `timeout` in seconds bounds each collective of tensors and each wait on the board. `watch`
        (of `run_ranks`) lends its stages; without one, nobody notices the end of another rank.
        """
        if seq_p_size * cfg_p_size != facts.world_size:
            raise wrong_world(facts.world_size, seq_p_size, cfg_p_size)
        board = watch.board if watch else open_board(facts)
        board.timeout = timeout
        gathered = board.gather(member_facts(facts.rank, pci_id(device)).to_json())
        members = [Member(**fields) for fields in gathered]
        if watch:
            watch.meet(members)
        ranks = cls(facts, device, board, members, watch)
        ranks.seq_p_size, ranks.cfg_p_size = seq_p_size, cfg_p_size
        if facts.world_size > 1:
            ranks._make_groups(timedelta(seconds=timeout))
        return ranks

    def _make_groups(self, timeout: timedelta) -> None:
        own_gpu = self.device.type == "cuda" and not shared_devices(self.members)
        self.backend = "nccl" if own_gpu else "gloo"
        dist.init_process_group(
            self.backend,
            store=PrefixStore("groups", self.board.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=self.device if own_gpu else None,
        )
        self.world_group = dist.group.WORLD
        world = list(range(self.world_size))
        rows = [world[i : i + self.seq_p_size] for i in world[:: self.seq_p_size]]
        columns = [world[i :: self.seq_p_size] for i in range(self.seq_p_size)]
        self.seq_group = self._own_of(rows, timeout)
        self.cfg_group = self._own_of(columns, timeout)

    def _own_of(self, groups: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
        if len(groups) == 1:
            return self.world_group
        if len(groups[0]) == 1:
            return None
        # Every rank makes every group, in one order.
        made: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
        return next(group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks)

    @property
    def rank(self) -> int:
        """Index among all ranks."""
        return self.facts.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.facts.world_size

    @property
    def is_first(self) -> bool:
        """This is rank 0: the one that encodes, prints and writes the video."""
        return self.facts.rank == 0

    @property
    def seq_rank(self) -> int:
        """Which part of the tokens this rank has."""
        return self.facts.rank % self.seq_p_size

    @property
    def cfg_rank(self) -> int:
        """Which branch this rank computes when cfg_p_size is 2: 0 conditional, 1 not."""
        return self.facts.rank // self.seq_p_size

    @property
    def member(self) -> Member:
        """This process."""
        return self.members[self.rank]

    @property
    def store(self) -> Store:
        """The run's store, for keys of one's own."""
        return self.board.store

    def new_name(self, name: str) -> str:
        """A name for use on the board that no earlier call returned; the same one on every rank."""
        return f"{name} {next(self._names)}"

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Name what this rank does inside the `with`; see `Watch.stage`."""
        return self._watch.stage(name) if self._watch else nullcontext()

    def on_abort(self, cleanup: Callable[[], None]) -> Callable[[], None]:
        """See `Watch.on_abort`."""
        return self._watch.on_abort(cleanup) if self._watch else lambda: None

    def gather_json(self, value: Any) -> list[Any]:  # noqa: ANN401  # any JSON value
        """Collective. The JSON value of each rank, by rank, on every rank."""
        return self.board.gather(value)

    def broadcast_json(self, value: Any = None, root: int = 0) -> Any:  # noqa: ANN401  # same
        """Collective. The JSON value of rank `root`, on every rank."""
        return self.board.broadcast(value, root)

    def barrier(self) -> None:
        """Collective. Returns once every rank has called it; a waiting rank burns no CPU."""
        self.board.barrier()

    def broadcast_tensor(self, tensor: torch.Tensor | None = None, root: int = 0) -> torch.Tensor:
        """Collective. The tensor of rank `root` on this rank's device; other ranks pass None.

        Ranks wait for `root` on the board, so it may take its time before it calls. A copy of the
        tensor is made on `root` only when it lies elsewhere or is not contiguous.
        """
        if self.world_size == 1:
            return _given(tensor).to(self.device)
        if self.rank == root:
            tensor = _given(tensor).to(self.device).contiguous()
            self.board.broadcast([str(tensor.dtype).removeprefix("torch."), *tensor.shape], root)
        else:
            dtype, *shape = self.board.broadcast(root=root)
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        if tensor.numel():
            dist.broadcast(as_bytes(tensor), src=root)
        return tensor

    def gather_branches(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Collective. The tensor of each branch's rank with the tokens of this one, cond. first."""
        return [tensor] if self.cfg_group is None else gather_equal(tensor, self.cfg_group)

    def collect_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Collective. On the first rank the tensor of each rank, of any shapes; elsewhere none."""
        if self.world_size == 1:
            return [tensor]
        return collect(tensor, self.board.gather(list(tensor.shape)), self.rank)

    def swap_edges(
        self, first: torch.Tensor, last: torch.Tensor, chain: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective. See `tensors.swap_edges`."""
        return swap_edges(first, last, self.rank, chain)

    def close(self) -> None:
        """End the groups, at most CLOSE_SECONDS long. May be called again."""
        if self.world_group is None:
            return
        self.world_group = self.seq_group = self.cfg_group = None
        ender = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ender.start()
        ender.join(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or self._watch is None:
            self.close()


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "the root of a broadcast passes a tensor"
    return tensor


def wrong_world(world_size: int, seq_p_size: int, cfg_p_size: int) -> ConfigError:
    """The error for a number of ranks that is not the mesh's."""
    needed = seq_p_size * cfg_p_size
    return ConfigError(
        f"parallel.seq_p_size ({seq_p_size}) x parallel.cfg_p_size ({cfg_p_size}) is {needed}, "
        f"and {world_size} ranks were started",
        expected="as many ranks as the product",
        hint=f"start {needed} (--nproc_per_node on each host), or change parallel in the JSON",
        key="parallel",
        needed=needed,
        found=world_size,
    )


def shared_devices(members: Sequence[Member]) -> list[tuple[Member, ...]]:
    """Ranks that hold one and the same GPU, in groups of two or more."""
    holders: dict[tuple[str, str], list[Member]] = {}
    for member in members:
        if member.pci_id is not None:
            holders.setdefault((member.boot_id, member.pci_id), []).append(member)
    return [tuple(group) for group in holders.values() if len(group) > 1]
