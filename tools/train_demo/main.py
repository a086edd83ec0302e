"""The command: trains part after part, keeps each in the work folder, writes the folders.

A part starts from what earlier parts left in the work folder, so parts may be trained by commands
of their own. Folders are written of what is there: text to video needs the parts vae and t2v, image
to video all three.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image

from shared_offload.synth.parts import TOKENIZER_FOLDER
from shared_offload.synth.sizes import Task
from tools.train_demo import dit, export, models, text, vae
from tools.train_demo.clips import DIRECTIONS, PAIRS, SHAPES, Labels, Painter
from tools.train_demo.scores import picture, score
from tools.train_demo.training import History, Plan, Run
from tools.train_demo.unpack import unpack

PARTS = ("vae", "t2v", "i2v")
SHARES = {"vae": 0.5, "t2v": 0.25, "i2v": 0.25}
"""Of the minutes, among the parts that are trained."""
PLANS: Mapping[str, dict[str, float]] = {
    "vae": {"peak_lr": 2e-3, "warmup": 200, "weight_decay": 1e-4},
    "t2v": {"peak_lr": 1e-3, "warmup": 300, "weight_decay": 0.01},
    "i2v": {"peak_lr": 1e-3, "warmup": 300, "weight_decay": 0.01},
}
QUICK_STEPS = dict.fromkeys(PARTS, 3)
DONE = ".pt"
SNAPSHOT = ".snapshot.pt"
REPORT = "TRAINING.json"
PICTURE = "first_frame.png"
SHOWN = {"color": "red", "background": "blue", "shape": "circle", "direction": "right"}
LICENSE = "Apache-2.0, as the project; trained from nothing on clips that the script draws"


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of everything but training."""

    encoded: dit.Amount
    """Clips, before a DiT is trained."""
    scored: int
    vae_batch: int
    dit_batch: int
    folded_batches: int
    folded: int
    """Clips in each of these batches, and to tell the VAE's quality."""


FULL = Amounts(dit.Amount(24576, 256, 4096), 96, vae.BATCH, dit.BATCH, 16, 64)
QUICK = Amounts(dit.Amount(4, 4, 4), 2, vae.QUICK_BATCH, dit.QUICK_BATCH, 2, 4)
DATA_SHARE = 0.2
"""Of a DiT's minutes, at most, for encoding clips."""


class Studio:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.sizes = models.QUICK if args.quick else models.FULL
        amounts = QUICK if args.quick else FULL
        self.amounts = replace(amounts, dit_batch=args.batch or amounts.dit_batch)
        self.painter = Painter(self.device)
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)
        tokenizer = self.work / TOKENIZER_FOLDER
        text.make_tokenizer(tokenizer)
        self.table = text.caption_table(tokenizer).to(self.device)
        self.vocabulary = text.load_tokenizer(tokenizer).get_vocab_size()

    def run(self) -> None:
        """Train, write, and say what was done."""
        if self.args.unpack:
            for part, state in unpack(self.args.out, self.args.out / REPORT).items():
                self.save(part, state, DONE)
        asked = [part for part in PARTS if part in self.args.parts]
        total = sum(SHARES[part] for part in asked)
        steps = dict(QUICK_STEPS if self.args.quick else {}) | self.args.steps
        trainers: dict[str, Callable[[Plan], dict[str, Any]]] = {
            "vae": self.train_vae,
            "t2v": lambda plan: self.train_dit("t2v", plan),
            "i2v": lambda plan: self.train_dit("i2v", plan),
        }
        for part in asked:
            torch.manual_seed(self.args.seed + PARTS.index(part))
            seconds = 60 * self.args.minutes * SHARES[part] / total
            how = {"captured": not self.args.eager, "compiled": not self.args.no_compile}
            plan = Plan(seconds, steps.get(part), **how, **PLANS[part])
            earlier = self.load_snapshot(part) if self.args.resume else {}
            begun = time.monotonic()
            state = trainers[part](plan)
            state["report"]["seconds_with_data_and_scores"] = round(time.monotonic() - begun, 1)
            state["report"]["made_with"] = self.made_with()
            if earlier:
                state["report"]["before"] = earlier.get("report", "a snapshot")
            self.save(part, state, DONE)
            (self.work / f"{part}{SNAPSHOT}").unlink(missing_ok=True)
            _say(part, state["report"])
        self.write()

    def train_vae(self, plan: Plan) -> dict[str, Any]:
        """Train the VAE and fold its statistics."""
        amounts = self.amounts
        model = models.make_vae(self.sizes).to(self.device)
        if self.args.resume:
            model.load_state_dict(self.load_snapshot("vae")["vae"])
        run = Run(
            amounts.vae_batch,
            time.monotonic(),
            lambda: self.save("vae", {"vae": model.state_dict()}, SNAPSHOT),
        )
        history = vae.train_vae(model, self.painter, plan, run)
        batch = amounts.folded
        vae.fold(model, self.painter, batches=amounts.folded_batches, batch=batch)
        report = _history(history, plan, amounts.vae_batch, models.parameters(model))
        report |= vae.quality(model, self.painter, batch=batch)
        return {"vae": model.state_dict(), "report": report}

    def train_dit(self, task: Task, plan: Plan) -> dict[str, Any]:
        """Train a DiT and the encoder that belongs to it."""
        amounts, i2v = self.amounts, task == "i2v"
        autoencoder = self.load_vae()
        made = self.load_models(task) if i2v else self.new_models("t2v")
        started = time.monotonic()
        if self.args.resume:
            load(made, self.load_snapshot(task))
        seconds = DATA_SHARE * plan.seconds if plan.steps is None else float("inf")
        data = dit.make_data(autoencoder, self.painter, self.encoded(), seconds=seconds, i2v=i2v)
        clips = len(data.latents)
        print(f"{task}: {clips} clips in {time.monotonic() - started:.0f} s", flush=True)
        run = Run(
            amounts.dit_batch, started, lambda: self.save(task, states(made, i2v=i2v), SNAPSHOT)
        )
        history = dit.train_dit(made, data, self.table, plan, run)
        trained = (made.dit, made.clip if i2v else made.t5)
        report = _history(history, plan, amounts.dit_batch, models.parameters(*trained))
        report["clips"] = clips
        report["scores"] = score(made, autoencoder, self.painter, self.table, count=amounts.scored)
        return {**states(made, i2v=i2v), "report": report}

    def encoded(self) -> dit.Amount:
        """How many clips a DiT is trained on."""
        amount = self.amounts.encoded
        clips = self.args.clips or amount.clips
        return replace(amount, clips=clips, least=min(amount.least, clips))

    def new_models(self, task: Task) -> dit.Models:
        """Untrained ones."""
        arch = models.architecture(self.sizes, task)
        clip = None
        if task == "i2v":
            clip = models.make_clip(self.sizes).to(self.device)
            dit.add_pixel_statistics(clip, self.device)
        t5 = models.make_t5(self.sizes, self.vocabulary).to(self.device)
        return dit.Models(models.make_dit(arch).to(self.device), t5, clip, arch.text_len)

    def load_models(self, task: Task, *, trained: bool = False) -> dit.Models:
        """For image to video: from the part t2v, or `trained` ones of its own."""
        made, t2v = self.new_models(task), self.load("t2v")
        made.t5.load_state_dict(t2v["t5"])
        made.t5.eval().requires_grad_(False)
        if not trained and task == "i2v":
            dit.extend(made.dit, t2v["dit"])
            return made
        load(made, self.load(task))
        for module in (made.dit, made.clip):
            if module is not None:
                module.eval().requires_grad_(False)
        return made

    def load_vae(self) -> vae.Vae:
        """The trained VAE."""
        model = models.make_vae(self.sizes).to(self.device)
        model.load_state_dict(self.load("vae")["vae"])
        return model.eval().requires_grad_(False)

    def load(self, part: str) -> dict[str, Any]:
        """What a part left in the work folder."""
        path = self.work / f"{part}{DONE}"
        if not path.is_file():
            raise SystemExit(f"{path} is missing: train the part {part} first")
        found: dict[str, Any] = torch.load(path, map_location=self.device)
        return found

    def load_snapshot(self, part: str) -> dict[str, Any]:
        """What a part that was not finished had come to, or one that was."""
        paths = [self.work / f"{part}{suffix}" for suffix in (SNAPSHOT, DONE)]
        for path in paths:
            if path.is_file():
                found: dict[str, Any] = torch.load(path, map_location=self.device)
                return found
        raise SystemExit(f"{paths[0]} is missing: there is nothing to resume")

    def save(self, part: str, state: dict[str, Any], suffix: str) -> None:
        """Keep it in the work folder; whoever is killed leaves the one before."""
        path = self.work / f"{part}{suffix}"
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def write(self) -> None:
        """Write the folders of all tasks whose parts are trained, and the report."""
        there = [part for part in PARTS if (self.work / f"{part}{DONE}").is_file()]
        out: Path = self.args.out
        for task in ("t2v", "i2v"):
            if {"vae", "t2v", task} <= set(there):
                self.write_task(task, out / task, fp8=True)
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(self.args.seed)
        labels = _labels(self.device)
        Image.fromarray(picture(self.painter, labels)[0].numpy()).save(out / PICTURE)
        report = self.report(there)
        (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {out}: {report['bytes']} bytes", flush=True)

    def write_task(self, task: Task, folder: Path, *, fp8: bool) -> None:
        """One folder. FP8, bf16 and fp16 as shipped, or everything fp32 (for comparisons)."""
        arch, state = models.architecture(self.sizes, task), self.load(task)
        export.write_dit(arch, state["dit"], folder, fp8=fp8)
        if task == "i2v":
            shapes = models.clip_shapes(self.sizes)
            dtype = torch.float16 if fp8 else torch.float32
            export.write_clip(shapes, state["clip"], folder, dtype)
            export.share(folder.with_name("t2v"), folder)
            return
        t5_shapes = models.t5_shapes(self.sizes, self.vocabulary)
        dtype = torch.bfloat16 if fp8 else torch.float32
        export.write_t5(t5_shapes, state["t5"], folder, dtype)
        dtype = torch.float16 if fp8 else torch.float32
        export.write_vae(models.vae_shapes(self.sizes), self.load("vae")["vae"], folder, dtype)
        text.make_tokenizer(folder / TOKENIZER_FOLDER)

    def made_with(self) -> dict[str, str]:
        """The device and the versions of this run."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            "torch": str(torch.__version__),
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        }

    def report(self, parts: list[str]) -> dict[str, Any]:
        """Everything that is known of the training."""
        files = [path for path in self.args.out.rglob("*") if path.is_file()]
        own = [path for path in files if not path.is_symlink() and path.name != REPORT]
        return {
            "license": LICENSE,
            "seed": self.args.seed,
            "sizes": asdict(self.sizes),
            "bytes": sum(path.stat().st_size for path in own if _no_link(path, self.args.out)),
            "parts": {part: self.load(part)["report"] for part in parts},
        }


def states(made: dit.Models, *, i2v: bool) -> dict[str, Any]:
    """The weights that a DiT's part has trained."""
    encoder = {"clip": made.clip} if i2v else {"t5": made.t5}
    modules = {"dit": made.dit, **encoder}
    return {name: module.state_dict() for name, module in modules.items()}


def load(made: dit.Models, state: Mapping[str, Any]) -> None:
    """Put `states` into the models."""
    for name in set(state) - {"report"}:
        getattr(made, name).load_state_dict(state[name])


def main(argv: list[str] | None = None) -> None:
    """Parse and run."""
    Studio(parse(argv)).run()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Train the demo model; see docs/demo-model.md.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="for the folders t2v/ and i2v/ and the report")
    add("--work", type=Path, default=Path("build/train_demo"), help="keeps what parts leave")
    add("--minutes", type=float, default=16.0, help="training time of all parts asked for")
    add("--parts", type=_parts, default=PARTS, help="some of vae,t2v,i2v")
    add("--steps", type=_steps, default={}, help="instead of minutes: vae=9000,t2v=12000,...")
    add("--clips", type=int, help="to train a DiT on; else as many as fit")
    add("--batch", type=int, help=f"latents in a step of a DiT; default: {dit.BATCH}")
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    add("--resume", action="store_true", help="go on from what parts had come to")
    add("--unpack", action="store_true", help="start from what is in --out, not in --work")
    add("--no-compile", action="store_true", help="do not try torch.compile")
    add("--eager", action="store_true", help="no CUDA graphs: four times slower")
    add("--quick", action="store_true", help="tiny models, a few steps: tries the code")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    return args


def _parts(given: str) -> tuple[str, ...]:
    parts = tuple(given.split(","))
    if odd := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no parts: {sorted(odd)}")
    return parts


def _steps(given: str) -> dict[str, int]:
    return {part: int(count) for part, count in (one.split("=") for one in given.split(","))}


def _history(history: History, plan: Plan, batch: int, parameters: int) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "batch": batch,
        "steps": history.steps,
        "training_seconds": round(history.seconds, 1),
        "peak_learning_rate": plan.peak_lr,
        "losses": [(step, round(loss, 5)) for step, loss in history.losses],
    }


def _say(part: str, report: Mapping[str, Any]) -> None:
    """Everything but the losses, which were printed as they came."""
    for name, value in report.items():
        if name != "losses":
            print(f"{part}: {name}: {json.dumps(value)}", flush=True)


def _labels(device: torch.device) -> Labels:
    pair = PAIRS.index((SHOWN["color"], SHOWN["background"]))
    at = (pair, SHAPES.index(SHOWN["shape"]), list(DIRECTIONS).index(SHOWN["direction"]), 1)
    return Labels(*(torch.tensor([index], device=device) for index in at))


def _no_link(path: Path, root: Path) -> bool:
    """No folder on the way is a link: its files are counted where they are."""
    between = path.relative_to(root).parents
    return not any((root / folder).is_symlink() for folder in between)
