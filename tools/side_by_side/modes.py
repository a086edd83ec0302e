"""The modes: which weights, where they are, what is compiled; and the row that each gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# resident: on the device. moved: on the host until denoising begins, as enable_model_cpu_offload
# does. streamed: enable_group_offload with the mode's options.
Place = Literal["resident", "moved", "streamed"]
Weights = Literal["bf16", "fp8-cast", "fp8-torchao", "ours-fp8", "ours-bf16"]
Status = Literal["measured", "failed", "not run"]

BLOCK = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True}
LEAF = {"offload_type": "leaf_level", "use_stream": True}
RECORD = {"record_stream": True}
LOW = {"low_cpu_mem_usage": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One row to measure. Modes of one family run in one process, in the order of MODES."""

    name: str
    weights: Weights
    place: Place = "resident"
    offload: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False  # ours: by fused kernels, which is what it does by itself
    attention: str | None = None  # of diffusers' dispatcher; None: what --attention says
    usual: bool = True  # part of a run without --modes
    fresh: bool = False  # needs weights that no mode before it has pinned

    @property
    def ours(self) -> bool:
        """Not diffusers."""
        return self.weights.startswith("ours")

    @property
    def needs(self) -> str | None:
        """A package beyond ours; without accelerate group offload fails in the first forward."""
        if self.weights == "fp8-torchao":
            return "torchao"
        return "accelerate" if self.place == "streamed" else None

    @property
    def family(self) -> str:
        """Modes with an equal one share a model."""
        return self.name if self.ours or self.fresh else self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a mode gave. None: does not apply, or the device cannot tell."""

    mode: str
    status: Status
    step_seconds: list[float] = field(default_factory=list)
    first_forward_seconds: float | None = None  # kernels are chosen and compiled in it
    prepare_seconds: float | None = None  # quantising, moving, pinning; once per start
    peak_nbytes: int | None = None  # of the device, in the measured steps
    host_nbytes: int | None = None  # pinned
    attention: str = ""
    note: str = ""


def _resident(weights: Weights) -> tuple[Mode, Mode]:
    name = f"{weights}-resident"
    return Mode(name=name, weights=weights), Mode(
        name=f"{name}-compiled", weights=weights, compiled=True
    )


def _streamed(weights: Weights, name: str, offload: dict[str, Any], **more: Any) -> Mode:  # noqa: ANN401
    return Mode(
        name=f"{weights}-{name}", weights=weights, place="streamed", offload=offload, **more
    )


_BF16, _BF16_COMPILED = _resident("bf16")
_CAST, _CAST_COMPILED = _resident("fp8-cast")
_AO, _AO_COMPILED = _resident("fp8-torchao")

# A family's weights are on the device first, then on the host, then back where some are compiled.
MODES: tuple[Mode, ...] = (
    Mode(name="ours-fp8", weights="ours-fp8", compiled=True),
    Mode(name="ours-fp8-plain", weights="ours-fp8", usual=False),
    _BF16,
    Mode(
        name="bf16-resident-native", weights="bf16", attention="native", usual=False
    ),  # what users get who set no attention backend
    Mode(name="bf16-model-offload", weights="bf16", place="moved"),
    _streamed("bf16", "block", BLOCK),
    _streamed("bf16", "block-record", {**BLOCK, **RECORD}),
    _streamed("bf16", "leaf", LEAF),
    _streamed("bf16", "leaf-record", {**LEAF, **RECORD}),
    _BF16_COMPILED,
    _streamed("bf16", "block-record-compiled", {**BLOCK, **RECORD}, compiled=True, usual=False),
    # Pins each block anew each time it is used: a minute per step at 14B.
    _streamed("bf16", "block-low-memory", {**BLOCK, **LOW}, usual=False, fresh=True),
    _CAST,
    _streamed("fp8-cast", "block", BLOCK),
    _streamed("fp8-cast", "block-record", {**BLOCK, **RECORD}, usual=False),
    _CAST_COMPILED,
    _AO,
    _streamed("fp8-torchao", "block", BLOCK),
    _AO_COMPILED,
    Mode(name="ours-bf16", weights="ours-bf16", compiled=True),
)


def usual_modes(*, compiled: bool) -> tuple[Mode, ...]:
    """Without --modes. `compiled`: diffusers' resident ones both ways."""
    return tuple(mode for mode in MODES if mode.usual and (mode.ours or mode.compiled <= compiled))
