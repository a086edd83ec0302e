"""What computes, and for how long it stays loaded: encoders, DiT weights, VAE.

The first rank encodes, and the others get what it made; all of them decode, or the first alone
(`decoding.py`). Invariant: after `end_request` nothing is held that only the request needed, and
after `close` nothing at all, whatever failed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from shared_offload import __version__
from shared_offload.config import Settings
from shared_offload.model.dit import Branch
from shared_offload.pipeline import conditioning, libraries, vae_fast
from shared_offload.pipeline.decoding import decode
from shared_offload.pipeline.dit_weights import LoadedDit, load_dit
from shared_offload.pipeline.image_encoder import ImageEncoder
from shared_offload.pipeline.inventory import Inventory, gpu_needs, take_inventory, torch_dtype
from shared_offload.pipeline.on_demand import OnDemand
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.pipeline.vae import Vae
from shared_offload.pipeline.vae_memory import StepMemory
from shared_offload.preflight import ACTIVATIONS
from shared_offload.ranks.devices import choose_device
from shared_offload.ranks.facts import RankFacts
from shared_offload.ranks.group import Ranks
from shared_offload.report.arena_table import arena_table
from shared_offload.report.metrics import StreamMetrics
from shared_offload.report.progress import Progress
from shared_offload.report.timeline import Event, trace_events, write_trace

# By device. As upstream on CUDA: UMT5 overflows in fp16, CLIP was trained in it.
TEXT_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
IMAGE_DTYPE = {"cpu": torch.float32, "cuda": torch.float16}


class Runner:
    """The modules of one pipeline. Making one checks all files and loads nothing."""

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks | None,
        progress: Progress,
        inventory: Inventory | None = None,
    ) -> None:
        if ranks is None:
            facts = RankFacts()
            device = choose_device(facts, settings.device, False)
            parallel = settings.parallel  # one rank alone, so anything else is told
            ranks = Ranks.start(
                facts, device, seq_p_size=parallel.seq_p_size, cfg_p_size=parallel.cfg_p_size
            )
        self.settings = settings
        self.ranks = ranks
        self.progress = progress
        self.device = ranks.device
        self.inventory: Inventory = inventory or take_inventory(settings)
        saves = settings.cpu_offload or settings.vae_cpu_offload
        planned = sum(gpu_needs(settings, self.inventory).values()) if saves else None
        self._step_memory = StepMemory(self.device, planned)
        self._dit: LoadedDit | None = None
        self._last_resort: weakref.finalize[[], Runner] | None = None
        self._texts, self._images, self._vae = self._modules()

    @property
    def is_first(self) -> bool:
        """This rank encodes, decodes and writes."""
        return self.ranks.is_first

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named part of the run, for the table of times and for errors."""
        with self.progress.stage(name), self.ranks.stage(name):
            yield

    def encode_texts(self, prompts: Sequence[str]) -> list[Tensor]:
        """Collective. The rows (E, text_dim) of each prompt, on every rank's device."""
        rows: list[Tensor | None] = [None] * len(prompts)
        if self.is_first:
            with self._texts.use() as encoder:
                rows = list(self._encode(encoder, prompts))
        return [self.ranks.broadcast_tensor(row) for row in rows]

    def _encode(self, encoder: TextEncoder, prompts: Sequence[str]) -> list[Tensor]:
        if not encoder.passes:
            return encoder.encode(prompts)
        with self.progress.task("pass T5 through the GPU", encoder.nbytes, "B") as task:
            return encoder.encode(prompts, task.advance)

    def encode_image(self, image_3HW: Tensor) -> Tensor:
        """Collective. CLIP's features (I, image_dim) of the picture."""
        features: Tensor | None = None
        if self.is_first:
            with self._images.use() as encoder:
                features = encoder.encode(image_3HW)
        return self.ranks.broadcast_tensor(features)

    def encode_condition(self, frame_3HW: Tensor, frames: int) -> Tensor:
        """Collective. Mask and latent (20, T, Y, X) of a video that starts with the frame."""
        condition: Tensor | None = None
        if self.is_first:
            with self._vae.use() as vae:
                condition = conditioning.i2v_condition(vae, frame_3HW, frames)
        return self.ranks.broadcast_tensor(condition)

    def load_dit(self) -> LoadedDit:
        """Collective. The DiT, loaded by the first call."""
        if self._dit is None:
            name = self.ranks.new_name("dit")
            self._dit = load_dit(
                self.settings, self.inventory, self.ranks, self.progress, name=name
            )
            vae_fast.wake(self.device)  # libraries of the encoders are still being imported
            # For a runner that nobody closes: at its end as garbage, or the interpreter's.
            self._last_resort = weakref.finalize(self, self._dit.close)
            if arenas := self._dit.arenas():
                self.progress.show(arena_table(arenas))
        return self._dit

    @contextmanager
    def stepping(self, steps: int) -> Iterator[Callable[[], None]]:
        """Begin and end a pass of `steps` over the weights; yields what to call after each step."""
        source = self.load_dit().source
        source.begin_run(steps)
        try:
            with self._step_memory.measured(), self.progress.task("denoise", steps, "step") as task:
                pace = _Pace(self.device, task.advance)
                try:
                    yield pace.step
                finally:
                    pace.close()
        finally:
            source.end_run()
            if source.broken:  # a file that could not be read may be mended by the next request
                self._close_dit()

    def velocities(
        self,
        latent: Tensor,
        timestep: float,
        branches: Sequence[Branch],
        condition: Tensor | None,
    ) -> list[Tensor]:
        """Collective. The velocity of each branch, whichever ranks compute it."""
        dit = self.load_dit()
        mine = branches
        if self.ranks.cfg_p_size > 1:
            mine = [branches[self.ranks.cfg_rank]]
        found = dit.model.velocities(latent, timestep, mine, dit.source, condition)
        return found if mine is branches else self.ranks.gather_branches(found[0])

    def decode(self, latents: Tensor) -> Tensor | None:
        """Collective. Frames, uint8 (F, H, W, 3), on the CPU of the first rank; None elsewhere."""
        return decode(
            self._vae,
            latents,
            self.ranks,
            self.progress,
            together=self.settings.parallel.vae_parallel,
            limit=self._step_memory.limit,
        )

    def report_streaming(self) -> None:
        """Collective. Show what streaming cost, and write the trace where one is asked for."""
        metrics = self._dit.source.metrics if self._dit else StreamMetrics()
        if rows := metrics.rows():
            self.progress.show(_two_columns("Streaming, on the first rank", rows))
        path = self.settings.trace
        if path is not None:
            mine = trace_events(metrics.units, rank=self.ranks.rank, start=metrics.started)
            everyone = self.ranks.gather_json(mine)
            if self.is_first:
                self._write_trace(path, [event for events in everyone for event in events])

    def _write_trace(self, path: Path, events: list[Event]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(path, events)
        except OSError as error:  # the video is written; a lost trace must not fail the run
            self.progress.warn(f"no trace: {path.absolute()} cannot be written: {error.strerror}")
        else:
            self.progress.note(f"trace: {path.absolute()} (open it in ui.perfetto.dev)")

    def describe(self) -> dict[str, Any]:
        """What ran and what it cost, as JSON values."""
        facts: dict[str, Any] = {
            "version": __version__,
            "torch": torch.__version__,
            "device": _device_name(self.device),
            "ranks": self.ranks.world_size,
            "stage_seconds": {k: round(v, 3) for k, v in self.progress.stage_seconds.items()},
        }
        if (peak := self._step_memory.peak) is not None:
            facts["peak_gpu_bytes"] = peak
        if self._dit is not None:
            facts |= self._dit.describe()
        return facts

    def end_request(self) -> None:
        """Free what only a request needed."""
        if self.settings.unload_modules:
            self._close_dit()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._close_dit()
        for module in (self._texts, self._images, self._vae):
            module.close()

    def _close_dit(self) -> None:
        dit, self._dit = self._dit, None
        if self._last_resort is not None:
            self._last_resort.detach()
        if dit is not None:
            dit.close()

    def _modules(self) -> tuple[OnDemand[TextEncoder], OnDemand[ImageEncoder], OnDemand[Vae]]:
        settings, files, progress = self.settings, self.inventory, self.progress
        kind = self.device.type
        passes = settings.t5_cpu_offload and kind == "cuda"

        def text(device: torch.device) -> TextEncoder:
            tokenizer = load_tokenizer(files.tokenizer)
            libraries.wait(libraries.TEXT, progress.note)  # or it would look as slow reading
            title = "map T5" if passes else "read T5"
            with progress.task(title, files.t5.stat().st_size, "B") as task:
                return TextEncoder.load(
                    files.t5,
                    tokenizer,
                    device=self.device if passes else device,
                    block_by_block=passes,
                    dtype=TEXT_DTYPE[kind],
                    text_len=files.arch.text_len,
                    on_bytes=task.advance,
                )

        def image(device: torch.device) -> ImageEncoder:
            assert files.clip is not None  # encode_image is for i2v, whose inventory has one
            moves = device != self.device
            title = "map CLIP" if moves else "read CLIP"
            with progress.task(title, None, "B") as task:  # part of the file, of no known size
                return ImageEncoder.load(
                    files.clip,
                    device=device,
                    dtype=IMAGE_DTYPE[kind],
                    cast_later=moves,
                    on_bytes=task.advance,
                )

        def vae(device: torch.device) -> Vae:
            made = Vae.load(
                files.vae,
                device=device,
                dtype=torch_dtype(settings.vae_dtype),
                tiling=settings.use_tiling_vae,
            )
            if kind == "cuda":
                made.encode_room = encode_room(settings, files, made.nbytes)
            return made

        unload = settings.unload_modules
        # Other ranks only decode: rather than a host copy each, they read it again from the file.
        forget = unload or (settings.vae_cpu_offload and not self.is_first)
        return (
            OnDemand(text, self.device, offload=settings.t5_cpu_offload, unload=unload),
            OnDemand(image, self.device, offload=settings.clip_cpu_offload, unload=unload),
            OnDemand(vae, self.device, offload=settings.vae_cpu_offload, unload=forget),
        )


def encode_room(settings: Settings, inventory: Inventory, vae_nbytes: int) -> int:
    """Bytes that an encode may take on a GPU beside the VAE: what activations of a step will take.

    The same number wherever the blocks' weights live, and in every request. Strips are rounded
    otherwise than the whole, in TF32 by some 1e-3, and what differs in a picture's latent differs
    in the video: so their number shall not depend on memory that happens to be free.
    """
    return max(0, gpu_needs(settings, inventory)[ACTIVATIONS] - vae_nbytes)


class _Pace:
    """Tells progress of steps when the GPU has done them, while the host runs ahead of it.

    A thread waits for the end of each step. The host enqueues at most MOST_AHEAD steps that are not
    done: enough that the GPU never waits for it.
    """

    MOST_AHEAD = 2

    def __init__(self, device: torch.device, on_done: Callable[[], None]) -> None:
        self._device = device
        self._on_done = on_done
        self._ahead = threading.Semaphore(self.MOST_AHEAD)
        self._pool = ThreadPoolExecutor(1, "steps")

    def step(self) -> None:
        """To be called after a step was enqueued."""
        if self._device.type != "cuda":
            self._on_done()
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._pool.submit(self._wait, event)
        self._ahead.acquire()

    def _wait(self, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()
            self._on_done()
        finally:
            self._ahead.release()

    def close(self) -> None:
        """Wait until all steps are done and told."""
        self._pool.shutdown()


def _two_columns(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
