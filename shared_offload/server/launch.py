"""Starting a weight server, or handing the order to the one that is there: one per folder.

Of two that start at once the lock of the folder decides; the other becomes its client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared_offload.errors import ArenaError
from shared_offload.report.progress import Progress
from shared_offload.server.client import hold
from shared_offload.server.folder import Folder
from shared_offload.server.protocol import Message
from shared_offload.server.recipe import Opener, Order
from shared_offload.server.serve import serve
from shared_offload.server.shelf import Model

START_SECONDS = 10.0
"""Between a server's lock and its socket, or its last word and its end."""
RETRY_SECONDS = 0.05
Rows = list[dict[str, Any]]


def serve_or_join(
    path: Path,
    opener: Opener,
    order: Order,
    progress: Progress,
    *,
    nodes: Sequence[int],
    budget: int | None,
    tell: Callable[[Rows], None],
) -> None:
    """Hold the order here until told to stop; or have the folder's server hold it, and return.

    `tell` gets a row for each arena, when all are filled. Raises OffloadError when that cannot be.
    """

    def on_held(model: Model) -> None:
        tell([copy.row() for copy in model.copies])
        progress.note(f"serving in {path}")

    deadline = time.monotonic() + START_SECONDS
    with Folder.make(path) as folder:
        while not folder.lock():
            answer = _join(path, order, progress)
            if answer is not None:
                tell(answer["rows"])
                progress.note(
                    f"the weight server with pid {answer['server']['pid']} holds it, within its "
                    "own budget and nodes; this command has nothing left to do"
                )
                return
            if time.monotonic() > deadline:
                raise ArenaError(
                    f"a weight server has locked {path}, but does not listen there",
                    hint="see `shared-offload status`; end it, then start again",
                    path=str(path),
                )
            time.sleep(RETRY_SECONDS)
        serve(folder, opener, order, progress, nodes=nodes, budget=budget, on_held=on_held)


def _join(path: Path, order: Order, progress: Progress) -> Message | None:
    """The answer of the server in `path`; None when none listens (yet, or any more)."""
    with progress.task("blocks, read by the running weight server", None, "B") as task:

        def tell(news: Message) -> None:
            if news["total"]:
                task.total = news["total"]
            task.advance(max(0, news["done"] - task.done))

        return hold(path, order, tell)
