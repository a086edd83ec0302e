"""What a DiT block does between its matrix products and attention, as operations of one interface.

`Plain` says them in torch and runs anywhere. `fused.Fused` runs each as one kernel of a GPU; which
one runs is chosen once (`select_operations`). Invariant: both round where the other does: norms,
rotation, activation and gates are fp32, rounded once to the model's dtype, and what an FP8 layer
reads is quantised from that. They differ in the order of sums alone.

Shape letters: B batch, L tokens on this rank, D width, K input width, N heads, H head width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.errors import ConfigError
from shared_offload.model.layers import Quantised, Rows, layer_norm, rms_norm
from shared_offload.model.rope import RopeTable, rotate
from shared_offload.weights.fp8 import FP8_DTYPE, multiplies_fp8, quantise_rows

Compile = bool | str
"""`compile` of the settings: "auto", True or False."""


class Operations(Protocol):
    """`weight` is that of the layer that reads the result, which comes quantised if it is FP8."""

    def norm(
        self, x_BLD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float, weight: Tensor
    ) -> Rows:
        """LN(x) * scale + shift, for the layer of `weight`."""

    def gelu(self, x_BLK: Tensor, weight: Tensor) -> Rows:
        """GELU in its tanh form, for the layer of `weight`."""

    def total(self, parts: Sequence[Tensor], weight: Tensor) -> Rows:
        """The sum of one or two tensors (B, L, ...) whose rows are D values, as (B, L, D), for the
        layer of `weight`. The parts of a row may lie apart: heads of several ranks.
        """

    def heads(
        self,
        x_BLD: Tensor,
        norm_D: Tensor | None,
        eps: float,
        heads: int,
        rope: RopeTable | None,
        place_BLPMH: Tensor | None = None,
    ) -> Tensor:
        """RMS-normed over D if there is a norm, split into heads and turned by `rope` if there is
        one: (B, L, N, H) in x's dtype.

        Written to `place_BLPMH` where there is one, which is then returned; N is P times M.
        """

    def add(self, x_BLD: Tensor, y_BLD: Tensor, gate_D: Tensor | None) -> Tensor:
        """x + y * gate in x's dtype; without a gate, x + y."""


class Plain:
    """In torch, for any device and dtype."""

    def norm(
        self, x_BLD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float, weight: Tensor
    ) -> Rows:
        return _ready(layer_norm(x_BLD, scale_D, shift_D, eps).to(x_BLD.dtype), weight)

    def gelu(self, x_BLK: Tensor, weight: Tensor) -> Rows:
        return _ready(F.gelu(x_BLK, approximate="tanh"), weight)

    def total(self, parts: Sequence[Tensor], weight: Tensor) -> Rows:
        first, *others = (part.flatten(2) for part in parts)
        return _ready(first + others[0] if others else first, weight)

    def heads(
        self,
        x_BLD: Tensor,
        norm_D: Tensor | None,
        eps: float,
        heads: int,
        rope: RopeTable | None,
        place_BLPMH: Tensor | None = None,
    ) -> Tensor:
        y_BLD = x_BLD if norm_D is None else rms_norm(x_BLD, norm_D, eps)
        y_BLNH = y_BLD.view(*x_BLD.shape[:-1], heads, -1)
        out_BLNH = (y_BLNH if rope is None else rotate(y_BLNH, rope)).to(x_BLD.dtype)
        if place_BLPMH is None:
            return out_BLNH
        return place_BLPMH.copy_(out_BLNH.view(place_BLPMH.shape))

    def add(self, x_BLD: Tensor, y_BLD: Tensor, gate_D: Tensor | None) -> Tensor:
        if gate_D is None:
            return x_BLD + y_BLD
        # The gate is fp32, so both operations are, by type promotion and without fp32 copies.
        return (x_BLD + y_BLD * gate_D).to(x_BLD.dtype)


PLAIN: Operations = Plain()


def _ready(x: Tensor, weight: Tensor) -> Rows:
    if weight.dtype != FP8_DTYPE:
        return x
    return Quantised(*quantise_rows(x), x.shape[:-1], x.dtype)


_hashing: list[threading.Thread] = []


def prepare_operations(compiled: Compile) -> None:
    """Begin what `select_operations` will have to wait for, where there may be a GPU; returns soon.

    Triton hashes all its files once a process, a second where reading them is slow. To be called
    while no other thread imports: Triton's modules import each other.
    """
    if compiled is False or not torch.cuda.is_available():
        return
    try:
        from triton.runtime import cache  # an optional package
    except ImportError:
        return

    def hash_files() -> None:
        with suppress(Exception):  # whatever it is, the first kernel meets it again
            cache.triton_key()

    _hashing.append(threading.Thread(target=hash_files, name="triton", daemon=True))
    _hashing[-1].start()


def select_operations(
    compiled: Compile, device: torch.device, dtype: torch.dtype
) -> tuple[Operations, str]:
    """The operations for a model in `dtype` on `device`, and their name.

    "auto" takes fused kernels where they run. Raises ConfigError where True asks for them and they
    do not. Runs each of them on a small input, so a Triton that cannot compile here is found now.
    """
    refusal = "compile is false" if compiled is False else _refusal(device, dtype)
    if not refusal:
        from shared_offload.model.fused import Fused, probe

        while _hashing:
            _hashing.pop().join()
        refusal = probe(device)
        if not refusal:
            return Fused(), "fused kernels"
    if compiled is True:
        raise ConfigError(
            f"compile is true, but fused kernels do not run here: {refusal}",
            expected="a GPU with FP8 tensor cores (compute capability 8.9 or more), dtype BF16, "
            "and the package triton",
            hint='set "compile": "auto", which runs plain torch operations instead',
            found=refusal,
        )
    return PLAIN, f"plain operations ({refusal})"


def _refusal(device: torch.device, dtype: torch.dtype) -> str:
    """Why fused kernels cannot run, or ""."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}"
    if not multiplies_fp8(torch.cuda.current_device() if device.index is None else device.index):
        return "the GPU has no FP8 tensor cores"
    try:
        import triton  # noqa: F401  an optional package
    except ImportError:
        return "triton is not installed"
    return ""
