"""`run_ranks`: the frame around a program that runs on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable

from shared_offload.errors import OffloadError
from shared_offload.ranks.facts import RankFacts, read_facts
from shared_offload.ranks.failure import Failure
from shared_offload.ranks.watch import RunEnded, Watch, write


def run_ranks(program: Callable[[Watch], int], facts: RankFacts | None = None) -> int:
    """Run `program` and return its exit code; if a rank fails, all ranks end, and one says why.

    Call it from the main thread, first thing. `program` returns a code, the same on all ranks, or
    raises: an OffloadError for what a user can cause, anything else for what nobody foresaw
    (printed with its traceback).
    A lone process returns the exit code also after a failure. One of several ranks then does not
    return at all: the process ends with that code, without the interpreter's clean-up, because
    libraries of collectives may wait there for the lost rank.
    """
    try:
        facts = read_facts() if facts is None else facts
        watch = Watch(facts)
    except OffloadError as error:  # nothing is shared yet, so each rank speaks for itself
        write(str(error))
        return error.exit_code
    watch.start()
    try:
        try:
            code = program(watch)
        except SystemExit as error:  # argparse: --help, or a usage error, alike on all ranks
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        watch.leave()
    except BaseException as error:
        failure = _fail(watch, error)
        write(failure.text(facts.world_size))
        code = failure.exit_code
    watch.stop()
    return code


def _fail(watch: Watch, error: BaseException) -> Failure:
    try:
        return watch.fail(error)
    except RunEnded as signalled:  # it came between the program's end and this line
        return watch.fail(signalled)
