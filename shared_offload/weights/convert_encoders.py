"""T5 and CLIP to LightX2V's FP8 files: a flat dict in a .pth, linear weights with one scale a row.

Names stay Wan's own. Scales are fp32: LightX2V writes them in the source's dtype, and every reader
of either takes both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shared_offload.errors import CheckpointError
from shared_offload.weights.fp8 import FP8_DTYPE, quantise_weight
from shared_offload.weights.layout import SCALE
from shared_offload.weights.pth import load_pth, save_pth
from shared_offload.weights.writer import row_chunks, run_all

EncoderKind = Literal["t5", "clip"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """`quantised` matches names of weights, `dropped` begins names that FP8 files leave out."""

    quantised: re.Pattern[str]
    rest: torch.dtype
    dropped: str


_RULES: Mapping[EncoderKind, _Rule] = {
    "t5": _Rule(
        re.compile(r"blocks\.\d+\.(?:attn\.[qkvo]|ffn\.(?:gate\.0|fc1|fc2))\.weight"),
        torch.bfloat16,
        "-",  # nothing
    ),
    "clip": _Rule(
        re.compile(r"visual\.transformer\.\d+\.(?:attn\.(?:to_qkv|proj)|mlp\.[02])\.weight"),
        torch.float16,
        "textual.",
    ),
}


@dataclass(frozen=True, slots=True)
class EncoderConversion:
    """One encoder's file, read from `source`, to be written as `file`."""

    kind: EncoderKind
    file: str
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that `write_into` makes; the container adds some kilobytes."""
        return sum(t.nbytes for t in self._results(torch.device("meta")).values())

    def write_into(self, folder: Path, threads: int, on_bytes: Callable[[int], None]) -> None:
        """Write the file. Peak memory: its size, and 16 MiB per thread."""
        results = self._results(torch.device("cpu"))
        run_all(self._jobs(results), threads, on_bytes)
        save_pth(results, folder / self.file)

    def _results(self, device: torch.device) -> dict[str, Tensor]:
        rule = _RULES[self.kind]
        results: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            dtype = FP8_DTYPE if rule.quantised.fullmatch(name) else rule.rest
            results[name] = torch.empty(tensor.shape, dtype=dtype, device=device)
            if dtype == FP8_DTYPE:
                results[name + SCALE] = torch.empty(len(tensor), 1, device=device)
        return results

    def _jobs(self, results: Mapping[str, Tensor]) -> Iterator[Callable[[], int]]:
        for name, tensor in self.tensors.items():
            for first, end in row_chunks(tuple(tensor.shape)):
                yield partial(_convert_rows, tensor, results, name, slice(first, end))


def plan_encoder(kind: EncoderKind, source: Path, file: str) -> EncoderConversion:
    """Look at a .pth of Wan's release; CheckpointError where it is none, or is FP8 already."""
    rule = _RULES[kind]
    kept = {n: t for n, t in load_pth(source).items() if not n.startswith(rule.dropped)}
    if not any(rule.quantised.fullmatch(name) for name in kept):
        raise CheckpointError(
            f"{source} has no weights of {kind.upper()} to quantise",
            expected=f"Wan's {kind.upper()} file, with names such as {next(iter(kept), 'none')}",
            hint="is it the file of another model?",
            path=str(source),
        )
    other = next((n for n, t in kept.items() if not t.is_floating_point() or t.itemsize < 2), "")
    if other:
        raise CheckpointError(
            f"{source} holds {other} as {kept[other].dtype}",
            expected="an unquantised file: bf16, fp16 or fp32",
            hint="convert the original file of the release",
            path=str(source),
            name=other,
        )
    return EncoderConversion(kind, file, kept)


def _convert_rows(tensor: Tensor, results: Mapping[str, Tensor], name: str, rows: slice) -> int:
    result = results[name]
    if tensor.dim() == 0:
        result.copy_(tensor)
        return result.nbytes
    if result.dtype != FP8_DTYPE:
        return result[rows].copy_(tensor[rows]).nbytes
    codes, scales = quantise_weight(tensor[rows].float())
    if not bool(scales.isfinite().all()):
        raise CheckpointError(
            f"{name} has values that are not finite in rows {rows.start} to {rows.stop}",
            hint="the source is damaged; download it again",
            name=name,
        )
    results[name + SCALE][rows] = scales
    return result[rows].copy_(codes).nbytes + scales.nbytes
