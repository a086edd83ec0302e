"""`python -m shared_offload.infer`: one video, on one rank or on as many as torchrun started."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared_offload.config import Settings, load_settings
from shared_offload.pipeline.generate import Pipeline, Video
from shared_offload.pipeline.video import metadata_path
from shared_offload.ranks.devices import choose_device
from shared_offload.ranks.facts import RankFacts, read_facts
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from shared_offload.report.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or that of the error that was printed."""
    arguments = sys.argv[1:] if argv is None else argv

    def program(watch: Watch) -> int:
        with watch.stage("read settings"):
            settings = load_settings(arguments)
        _run(settings, read_facts(), watch)
        return 0

    return run_ranks(program)


def _run(settings: Settings, facts: RankFacts, watch: Watch) -> None:
    progress = Progress(enabled=facts.rank == 0)
    for note in settings.notes:
        progress.note(note)
    device = choose_device(facts, settings.device, settings.allow_shared_gpu)
    with Ranks.start(
        facts,
        device,
        seq_p_size=settings.parallel.seq_p_size,
        cfg_p_size=settings.parallel.cfg_p_size,
        timeout=settings.collective_timeout_seconds,
        watch=watch,
    ) as ranks:
        with watch.stage("check"):
            pipeline = Pipeline(settings, ranks=ranks, progress=progress)
        with pipeline:
            _tell(pipeline.generate(), progress)
        ranks.barrier()


def _tell(video: Video, progress: Progress) -> None:
    progress.summary()
    if video.path is not None:
        progress.note(f"video: {video.path.absolute()}")
        progress.note(f"settings and figures: {metadata_path(video.path).absolute()}")


if __name__ == "__main__":
    sys.exit(main())
