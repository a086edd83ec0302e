"""The thread of each rank that notices the end of another, and ends this one.

Threads: the main thread runs the program; the watch thread alone talks to the other ranks about
failures, prints, and ends the process. Both may enter `stage`. Between them: `_failure` (set once,
by the watch thread), `_left` (set by the main thread when the program has unwound).

Bounds, from the moment a failure is known here: POLL_SECONDS to notice, END_SECONDS for the main
thread to unwind and for the other ranks to take note, CLEANUP_SECONDS for registered cleanups.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from torch.distributed.distributed_c10d import PrefixStore

from shared_offload.ranks.board import connect, open_board
from shared_offload.ranks.facts import Member, RankFacts, member_facts
from shared_offload.ranks.failure import Failure, of_exception, of_launcher, of_signal
from shared_offload.ranks.peers import Peers

POLL_SECONDS = 0.5
FIRST_SECONDS = 0.05  # between looks until all members are known
PRINT_SECONDS = 1.5  # how long a rank leaves the printing to a lower one
END_SECONDS = 2.5
CLEANUP_SECONDS = 1.0
HOST_SECONDS = 1.0  # a killed process closes its sockets before its pid is free
BLAME_SECONDS = 3.0  # how long an error of a collective waits for the rank that caused it
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunEnded(BaseException):
    """Raised in the main thread to unwind it: a signal came, or another rank failed."""


class Watch:
    """Facts, stages and cleanups of this process; the watch thread between `start` and `stop`."""

    def __init__(self, facts: RankFacts) -> None:
        self.facts = facts
        self.board = open_board(facts)
        """For messages between ranks before they have a device."""
        prefix = f"shared_offload/{facts.run_id}/{facts.restarts}/watch"
        self._peers = Peers(PrefixStore(prefix, connect(facts)), facts, member_facts(facts.rank))
        self._parent = os.getppid()
        self._main = threading.get_ident()
        self._stage = ""
        self._failed_stage: str | None = None
        self._cleanups: list[Callable[[], None]] = []
        self._failure: Failure | None = None
        self._found = threading.Event()
        self._left = threading.Event()
        self._raised = False
        self._hosts = facts.rank == 0 and not facts.agent_store
        self._finished = False
        self._store_lost = False
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, object] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # -- for the program ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name what this rank does inside the `with`; an error there carries the name."""
        outer = self._stage
        self._enter(name)
        try:
            yield
        except BaseException:
            self._failed_stage = self._failed_stage or name
            self._stage = outer
            raise
        self._enter(outer)

    def on_abort(self, cleanup: Callable[[], None]) -> Callable[[], None]:
        """Run `cleanup` should this process end without unwinding; returns what takes it back.

        It runs in another thread, at most a second, while the main thread may be anywhere.
        """
        self._cleanups.append(cleanup)
        return lambda: self._cleanups.remove(cleanup) if cleanup in self._cleanups else None

    def meet(self, members: Iterable[Member]) -> None:
        """Take in who the other ranks are, before the thread has found out."""
        self._peers.meet(members)

    def _enter(self, stage: str) -> None:
        self._stage = stage
        self._failed_stage = None
        with contextlib.suppress(RuntimeError):  # the watch thread sees to a lost store
            self._peers.beat(stage)

    # -- for run_ranks -----------------------------------------------------------------------------

    def start(self) -> None:
        """Take over SIGINT and SIGTERM, and start the thread. Main thread only."""
        for signum in SIGNALS:
            self._handlers[signum] = signal.signal(signum, self._on_signal)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the signals back. Main thread only."""
        self._stopping = True
        self._wake()
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        os.close(self._wake_read)
        os.close(self._wake_write)

    def leave(self) -> None:
        """Finish without an error. A rank that hosts the store waits for the others."""
        with contextlib.suppress(RuntimeError):  # the watch thread sees to a lost store
            self._peers.leave()
            self._finished = True
            while self._hosts and not self._peers.all_left():
                time.sleep(0.05)

    def fail(self, error: BaseException) -> Failure:
        """The program has unwound with `error`: the failure of the run. Returns for a lone process;
        otherwise the watch thread ends this process, with the failure's exit code.
        """
        self._raised = True  # a signal from now on has nothing to interrupt
        stage = self._stage if self._failed_stage is None else self._failed_stage
        if not isinstance(error, RunEnded) and not self._found.is_set():
            self._blame(error, of_exception(error, self.facts.rank, stage))
        self._wake()
        self._found.wait()
        self._left.set()
        if self.facts.world_size > 1:
            self._thread.join()
        assert self._failure is not None  # set before _found
        return self._failure

    def _blame(self, error: BaseException, mine: Failure) -> None:
        # An error of a collective is often only the echo of another rank's end.
        if isinstance(error, RuntimeError) and self.facts.world_size > 1 and mine.details:
            self._found.wait(BLAME_SECONDS)
        if not self._found.is_set():
            with contextlib.suppress(RuntimeError):
                self._peers.refresh()
                self._peers.publish(self._peers.lost() or mine)

    # -- signals -----------------------------------------------------------------------------------

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if not self._raised:
            self._raised = True
            raise RunEnded

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            os.write(self._wake_write, b"\0")

    # -- the watch thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            pause = POLL_SECONDS if self._peers.complete() else FIRST_SECONDS
            ready, _, _ = select.select([self._wake_read], [], [], pause)
            came = os.read(self._wake_read, 64) if ready else b""
            failure = None if self._stopping else self._look(came)
            if failure is not None:
                self._failure = failure
                self._found.set()
                self._end(failure)
                return

    def _look(self, came: bytes) -> Failure | None:
        signum = next((number for number in came if number in SIGNALS), 0)
        try:
            if self._host_gone():  # asking its store would only print torch's stack frames
                return self._without_store(signum)
            self._peers.beat(self._stage)
            self._peers.refresh()
            found = self._peers.published() or self._peers.lost() or self._ended(signum)
            return found and self._peers.publish(found)
        except RuntimeError:
            return None if self._finished else self._without_store(signum)

    def _ended(self, signum: int) -> Failure | None:
        # Only after the others were looked at: torchrun sends SIGTERM when one of them has ended.
        if signum:
            return of_signal(signum, self.facts.rank, self._stage)
        if self.facts.run_id and os.getppid() != self._parent:
            return self._launcher_gone()
        return None

    def _launcher_gone(self) -> Failure:
        what = f"the launcher of rank {self.facts.rank} (pid {self._parent}) is gone"
        return of_launcher(self.facts.rank, self._stage, what)

    def _host_gone(self) -> bool:
        """The process that hosts the store is seen from here, and is gone."""
        if self.facts.agent_store:
            return os.getppid() != self._parent and self.facts.host_rank == 0
        return self._peers.gone(0) and not self._finished

    def _without_store(self, signum: int) -> Failure:
        deadline = time.monotonic() + HOST_SECONDS
        while not self._host_gone() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._store_lost = True
        if not self.facts.agent_store and self._peers.gone(0):
            return self._peers.loss_of(0)
        if signum or os.getppid() != self._parent:
            return self._ended(signum) or self._launcher_gone()
        address = f"{self.facts.master_addr}:{self.facts.master_port}"
        what = f"the store at {address} no longer answers rank {self.facts.rank}"
        return of_launcher(self.facts.rank, self._stage, what)

    def _end(self, failure: Failure) -> None:
        deadline = time.monotonic() + END_SECONDS
        if not self._raised:
            # Runs _on_signal there as soon as Python code runs, and ends a sleep or a lock's wait.
            signal.pthread_kill(self._main, signal.SIGTERM)
        alone = self.facts.world_size == 1
        if not alone:
            self._announce(failure)
        while time.monotonic() < deadline and not self._settled():
            time.sleep(0.02)
        if self._left.is_set() and alone:
            return  # run_ranks prints and returns
        if not self._left.is_set():
            self._run_cleanups()
        if alone:
            write(failure.text(1))
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            sys.stdout.flush()
        os._exit(failure.exit_code)

    def _announce(self, failure: Failure) -> None:
        """Print the failure if this is the lowest rank alive, or if that one does not."""
        deadline = time.monotonic() + PRINT_SECONDS
        try:
            if self._store_lost:  # ranks cannot agree: the lowest one seen here prints
                prints = self._lowest(failure)
            else:
                self._peers.acknowledge()
                while not (self._peers.printed() or self._peers.first_alive()):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)
                prints = self._peers.claim_printing()
        except RuntimeError:
            self._store_lost = True
            prints = self._lowest(failure)
        if prints:
            write(failure.text(self.facts.world_size))

    def _lowest(self, failure: Failure) -> bool:
        ended = failure.rank if failure.lost and failure.rank != self.facts.rank else -1
        return self._peers.lowest_here(without=ended)

    def _settled(self) -> bool:
        """The main thread has unwound, and the other ranks know."""
        if not self._left.is_set() or self._store_lost or self.facts.world_size == 1:
            return self._left.is_set()
        if self._hosts:
            return self._peers.others_gone()
        try:
            return self._peers.all_acknowledged()
        except RuntimeError:
            self._store_lost = True
            return True

    def _run_cleanups(self) -> None:
        def run() -> None:
            for cleanup in reversed(self._cleanups):
                with contextlib.suppress(Exception):  # the process ends; the next one still runs
                    cleanup()

        thread = threading.Thread(target=run, name="cleanup", daemon=True)
        thread.start()
        thread.join(CLEANUP_SECONDS)


def write(text: str) -> None:
    """One message to stderr, whole, even while other ranks write too."""
    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), f"{text}\n".encode())
