"""Small messages between ranks, through the store that torchrun (or rank 0) hosts.

Nothing blocks inside native code: waiting is a loop of short sleeps, so signals are answered, a
waiting rank burns no CPU, and a lost rank is noticed by whoever watches. Works before there is a
device or a process group. All ranks call the same methods in the same order: the n-th call of one
rank answers the n-th call of the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, TCPStore  # torch.distributed does not export them
from torch.distributed.distributed_c10d import PrefixStore, Store

from shared_offload.errors import RankError
from shared_offload.ranks.facts import RankFacts

STORE_OPERATION_SECONDS = 10.0  # one request to a live server takes far below a millisecond


def connect(facts: RankFacts, timeout: float = 60.0) -> Store:
    """This rank's own connection to the run's store; a store of its own for a lone process.

    Without an agent's store, rank 0 hosts the server, which ends with its last connection.
    """
    if facts.world_size == 1:
        return HashStore()
    try:
        store = TCPStore(
            facts.master_addr,
            facts.master_port,
            facts.world_size,
            is_master=facts.rank == 0 and not facts.agent_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {facts.rank} cannot reach the store at "
            f"{facts.master_addr}:{facts.master_port} within {timeout:.0f} s: "
            f"{str(error).splitlines()[0]}",
            expected="MASTER_ADDR and MASTER_PORT of the first host, reachable from this one",
            hint="check --rdzv_endpoint or --master_addr, and the firewall between the hosts",
            rank=facts.rank,
        ) from error
    store.set_timeout(timedelta(seconds=STORE_OPERATION_SECONDS))
    return store


class Board:
    """Collectives of JSON values among all ranks."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.store = store
        self.timeout = timeout
        self._rank = rank
        self._world_size = world_size
        self._calls = 0

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401  # any JSON value
        """Collective. The value of each rank, by rank, on every rank."""
        prefix = self._next("gather")
        self.store.set(f"{prefix}/{self._rank}", json.dumps(value))
        keys = [f"{prefix}/{rank}" for rank in range(self._world_size)]
        self._wait(keys)
        return [json.loads(self.store.get(key)) for key in keys]

    def broadcast(self, value: Any = None, root: int = 0) -> Any:  # noqa: ANN401  # any JSON value
        """Collective. The value of rank `root`, on every rank."""
        key = f"{self._next('broadcast')}/{root}"
        if self._rank == root:
            self.store.set(key, json.dumps(value))
            return value
        self._wait([key])
        return json.loads(self.store.get(key))

    def barrier(self) -> None:
        """Collective. Returns once every rank has called it."""
        self.gather(None)

    def _next(self, kind: str) -> str:
        self._calls += 1
        return f"{self._calls}/{kind}"

    def _wait(self, keys: Sequence[str]) -> None:
        deadline = time.monotonic() + self.timeout
        pause = 0.001
        while not self.store.check(list(keys)):
            if time.monotonic() > deadline:
                silent = [int(k.rsplit("/", 1)[1]) for k in keys if not self.store.check([k])]
                raise RankError(
                    f"rank {self._rank} waited {self.timeout:.0f} s for an answer of "
                    f"rank {', '.join(map(str, silent))}",
                    expected="every rank at the same place of the program",
                    hint="raise the timeout of collectives if that rank is only slow",
                    ranks=silent,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)


def open_board(facts: RankFacts, timeout: float = 600.0) -> Board:
    """This rank's place for messages to the others."""
    prefix = f"shared_offload/{facts.run_id}/{facts.restarts}/board"
    store = PrefixStore(prefix, connect(facts))
    return Board(store, facts.rank, facts.world_size, timeout)
