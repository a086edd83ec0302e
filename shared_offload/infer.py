"""`python -m shared_offload.infer`: one video, on one rank or on as many as torchrun started."""

from __future__ import annotations

import gc
import signal

if __name__ == "__main__":
    # What libraries make while they are imported is there to stay, and to look for garbage among it
    # again and again takes a quarter of the time to the first step: not before `_collect_again`.
    gc.disable()
    # Ctrl-C before `run_ranks` takes it over ends the process: it holds nothing yet, and where in
    # torch it was nobody asks.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from collections.abc import Sequence

from shared_offload.config import Settings, load_settings
from shared_offload.errors import OffloadError
from shared_offload.model.operations import prepare_operations
from shared_offload.pipeline import libraries
from shared_offload.pipeline.generate import Pipeline, Video
from shared_offload.pipeline.inventory import Inventory, Survey, gpu_needs, survey_files
from shared_offload.pipeline.video import metadata_path
from shared_offload.preflight import Preflight, agree
from shared_offload.ranks.devices import choose_device
from shared_offload.ranks.facts import RankFacts, read_facts
from shared_offload.ranks.failure import Agreed
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from shared_offload.report.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or that of the error that was printed."""
    arguments = sys.argv[1:] if argv is None else argv

    def program(watch: Watch) -> int:
        with watch.stage("read settings"):
            settings = _settings(arguments, watch)
        _run(settings, read_facts(), watch)
        return 0

    return run_ranks(program)


def _settings(arguments: Sequence[str], watch: Watch) -> Settings:
    """Collective. What was asked for, if that is in order on every rank."""
    settings: Settings | None = None
    found: list[OffloadError] = []
    try:
        settings = load_settings(arguments)
    except OffloadError as error:
        found = [error]
    if errors := agree(watch.board, found):
        raise Agreed(errors)
    assert settings is not None  # else there was an error
    return settings


def _run(settings: Settings, facts: RankFacts, watch: Watch) -> None:
    progress = Progress(enabled=facts.rank == 0)
    for note in settings.notes:
        progress.note(note)
    names = _libraries(settings, first=facts.rank == 0)
    with watch.stage("check"):
        survey = survey_files(settings)
        if facts.world_size == 1 and not survey.errors:  # the GPU starts meanwhile
            _import_ahead(settings, names)
        inventory = _check(settings, survey, facts, watch, progress)
    device = choose_device(facts, settings.device, settings.allow_shared_gpu)
    with Ranks.start(
        facts,
        device,
        seq_p_size=settings.parallel.seq_p_size,
        cfg_p_size=settings.parallel.cfg_p_size,
        timeout=settings.collective_timeout_seconds,
        watch=watch,
    ) as ranks:
        # Not before: to make groups, torch uses torch._dynamo if it finds a part of it imported.
        if facts.world_size > 1:
            _import_ahead(settings, names)
        with Pipeline(settings, ranks=ranks, progress=progress, inventory=inventory) as pipeline:
            _tell(pipeline.generate(), progress)
        ranks.barrier()


def _import_ahead(settings: Settings, names: list[str]) -> None:
    if settings.device != "cpu":
        prepare_operations(settings.compile)
    libraries.preload(names, then=_collect_again)


def _collect_again() -> None:
    """Look for garbage from now on, among what is made from now on."""
    if __name__ == "__main__":
        gc.freeze()
        gc.enable()


def _libraries(settings: Settings, *, first: bool) -> list[str]:
    """What this rank will import, in the order in which it will need it."""
    i2v, together = settings.task == "i2v", settings.parallel.vae_parallel
    steps = (
        (libraries.TEXT, first),
        (libraries.IMAGE, first and i2v),
        (libraries.VAE, first or together),
        (libraries.VIDEO, first and settings.save_result_path is not None),
    )
    return [name for names, used in steps if used for name in names]


def _check(
    settings: Settings, survey: Survey, facts: RankFacts, watch: Watch, progress: Progress
) -> Inventory:
    """Collective. All files, if nothing at all is wrong on any rank; else everything that is."""
    files = survey.inventory
    paths = list(files.paths()) if files else []
    if settings.task == "i2v" and settings.image_path is not None:
        paths.append(settings.image_path.absolute())
    preflight = Preflight(
        facts=facts,
        board=watch.board,
        device=settings.device,
        allow_shared_gpu=settings.allow_shared_gpu,
        seq_p_size=settings.parallel.seq_p_size,
        cfg_p_size=settings.parallel.cfg_p_size,
        settings=settings.model_dump_json(exclude={"notes"}),
        heads=survey.arch.num_heads if survey.arch else None,
        gpu_needs=gpu_needs(settings, files) if files else {},
        files=paths,
        found=survey.errors,
    )
    errors = preflight.run()
    for warning in preflight.warnings:
        progress.warn(warning)
    if errors:
        raise Agreed(errors)
    assert files is not None  # a lack of it was among the errors
    return files


def _tell(video: Video, progress: Progress) -> None:
    progress.summary()
    if video.path is not None:
        progress.note(f"video: {video.path.absolute()}")
        progress.note(f"settings and figures: {metadata_path(video.path).absolute()}")


if __name__ == "__main__":
    code = main()
    # The interpreter's end looks for cycles several times over, among 400,000 objects of libraries:
    # 1.8 s, or 0.2 s if it is told to let them be. Finalizers run all the same.
    gc.freeze()
    sys.exit(code)
