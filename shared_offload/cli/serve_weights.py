"""`shared-offload serve-weights`: keep a model's blocks in host memory for run after run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shared_offload.config import Settings, dit_path, load_settings
from shared_offload.errors import ConfigError
from shared_offload.memory import numa
from shared_offload.pipeline.arena_blocks import plan_arena
from shared_offload.pipeline.inventory import index_dit
from shared_offload.report.arena_table import GIB, arena_table
from shared_offload.report.progress import Progress
from shared_offload.server.folder import candidates
from shared_offload.server.launch import Rows, serve_or_join
from shared_offload.server.recipe import Order, Recipe, serving_nodes

FLAGS = ("config_json", "model_path", "model_cls", "task", "shared_cpu_weight_scope")
# Of a request, or of this command.
NOT_ORDERED = {
    "prompt",
    "negative_prompt",
    "image_path",
    "save_result_path",
    "trace",
    "weight_server",
    "weight_server_folder",
    "architecture_claims",
    "notes",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "serve-weights",
        help="hold a model's weights in host memory for the runs to come",
        description="Fill the arenas that runs with this JSON share, and hold them until a signal "
        "or `shared-offload stop`. Where a server of this user runs already, it is told to hold "
        "this model too, and the command ends when it does.",
        argument_default=argparse.SUPPRESS,
    )
    for name in FLAGS:
        parser.add_argument(f"--{name}", metavar=name.upper(), help="as for a run")
    parser.add_argument(
        "--socket_folder", type=Path, help="folder of the socket (default: weight_server_folder)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="GIB",
        help="most that all models take together; the least recently used leaves when no run "
        "holds it (default: what the host allows)",
    )
    parser.add_argument(
        "--nodes",
        type=numa.parse_list,
        help="NUMA nodes to serve with scope numa, such as 0,2-3 (default: all with CPUs)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop, with progress on stderr."""
    given = vars(args)
    settings = load_settings({name: given[name] for name in FLAGS if name in given})
    if not settings.shared_cpu_weights or settings.lazy_load:
        raise ConfigError(
            "no run with these settings would use a weight server: "
            + ("lazy_load is true" if settings.lazy_load else "shared_cpu_weights is false"),
            hint="set cpu_offload and shared_cpu_weights to true, lazy_load to false",
            key="shared_cpu_weights",
        )
    progress = Progress()

    def opener(order: Order) -> Recipe:
        return open_recipe(order, progress)

    def tell(rows: Rows) -> None:
        progress.show(arena_table(rows))

    budget = given.get("budget")
    serve_or_join(
        given.get("socket_folder") or settings.weight_server_folder or candidates()[0],
        opener,
        make_order(settings),
        progress,
        nodes=sorted(given.get("nodes", ())) or serving_nodes(),
        budget=None if budget is None else int(budget * GIB),
        tell=tell,
    )
    return 0


def make_order(settings: Settings) -> Order:
    """What decides the content of arenas, as JSON values; the server may run elsewhere."""
    order: Order = _absolute(settings.model_dump(exclude=NOT_ORDERED))
    return order


def _absolute(value: Any) -> Any:  # noqa: ANN401 - JSON values
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in value.items()}
    return [_absolute(item) for item in value] if isinstance(value, list | tuple) else value


def open_recipe(order: Order, progress: Progress) -> Recipe:
    """Index the checkpoint that is ordered; reads headers, and with `verify_weights` every byte."""
    settings = Settings.from_json_and_flags(order, {})
    checkpoint = index_dit(settings).checkpoint
    plan = plan_arena(settings, checkpoint, progress, name="served")
    return Recipe(
        path=str(dit_path(settings).resolve()),
        request=plan.request,
        fill=plan.fill,
        unchanged=checkpoint.unchanged,
    )
