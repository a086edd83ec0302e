"""Dense attention behind one function, and the choice of the kernel that runs it.

Every kernel is wrapped to one form: q (B, S, N, H), k and v (B, E, N, H) in, (B, S, N, H) out,
softmax(q k^T / sqrt(H)) v without mask or dropout (Wan 2.1 has neither). Whatever is chosen has
run and agreed with plain arithmetic on this device first, so that a package built for another GPU,
another torch or another argument order is found before anything loads, and not in step one.

Shape letters: B batch, S query tokens, E key tokens, N heads, H head width.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.errors import ConfigError

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]

AUTO = "auto"
TORCH = "torch_sdpa"
EXACT = (TORCH, "flash_attn2", "flash_attn3", "flash_attn4")
QUANTISED = ("sage_attn2", "sage_attn3", "sage_attn2_k_int8_v_fp8")
ATTENTION_NAMES = (AUTO, *EXACT, *QUANTISED)
SPARSE_NAMES = (
    "draft_attn",
    "dynamic_sparse_attn",
    "general_sparse_attn",
    "nbhd_attn",
    "nbhd_attn_flashinfer",
    "radial_attn",
    "rainfusion_attn",
    "sol_attn",
    "sparge_attn",
    "spas_flash_attn4",
    "spas_sage_attn2",
    "spas_sage_attn3",
    "svg2_attn",
    "svg_attn",
)

# Fused half-precision kernels load heads in pieces of 8 channels; all take up to 128 of them.
_HEAD_MULTIPLE = 8
_HEAD_MAX = 128
_HALF = (torch.bfloat16, torch.float16)

# A right kernel is above 20 dB on random data even in int8 or fp4; a wrong layout is below 3 dB.
_PROBE_FLOOR_DB = 10.0


@dataclass(frozen=True, slots=True)
class Attention:
    """A kernel by the name that users are shown."""

    name: str
    run: AttentionFn


def select_attention(
    requested: str, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, str]:
    """The kernel for inputs of `dtype` on `device`, and one line of warning or "".

    `auto` takes the fastest exact kernel that runs here. A dense kernel asked for by name that
    does not run here is replaced by that one, and the warning says so. Raises ConfigError for
    sparse and unknown names. Runs kernels on small inputs, so it initialises CUDA and waits.
    """
    check_attention_name(requested)
    order = _exact_order(device, dtype)
    if requested == TORCH:
        order = tuple(name for name in order if name in _OF_TORCH)
    elif requested != AUTO:
        order = (requested, *(name for name in order if name != requested))
    refusals: dict[str, str] = {}
    for name in order:
        kernel, refusals[name] = _load(name, device, dtype)
        if kernel is not None:
            break
    else:  # the last one runs everything, so an error in it is the device's
        name, kernel = _PLAIN, sdpa
    refusal = refusals.get(requested, "")
    warning = f"attention kernel {requested} {refusal}; {name} runs instead" if refusal else ""
    return Attention(name, kernel), warning


def sdpa(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
    """Torch's own choice: any device, dtype and head width."""
    q, k, v = q_BSNH.transpose(1, 2), k_BENH.transpose(1, 2), v_BENH.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


# The two operators below are what F.scaled_dot_product_attention ends in. Calling them pins the
# kernel without the process-wide switches of torch.nn.attention.sdpa_kernel, which cost seven
# calls around each attention and would also steer every other model of the process.


def _sdpa_cudnn(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
    q, k, v = q_BSNH.transpose(1, 2), k_BENH.transpose(1, 2), v_BENH.transpose(1, 2)
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    return out.transpose(1, 2)


def _sdpa_flash(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
    q, k, v = q_BSNH.transpose(1, 2), k_BENH.transpose(1, 2), v_BENH.transpose(1, 2)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return out.transpose(1, 2)


_PLAIN = "sdpa"
_OF_TORCH: Mapping[str, AttentionFn] = {
    "sdpa_cudnn": _sdpa_cudnn,
    "sdpa_flash": _sdpa_flash,
    _PLAIN: sdpa,
}


def check_attention_name(requested: str) -> None:
    """Raises ConfigError for names that are sparse or unknown. Looks at no device."""
    if requested in ATTENTION_NAMES:
        return
    valid = ", ".join(ATTENTION_NAMES)
    if requested in SPARSE_NAMES:
        raise ConfigError(
            f"attention kernel {requested!r} is sparse, which is not supported",
            expected=f"a dense kernel: {valid}",
            hint='use "auto" for the fastest exact kernel of this GPU',
            found=requested,
            valid=list(ATTENTION_NAMES),
        )
    near = difflib.get_close_matches(requested, ATTENTION_NAMES, n=1)
    raise ConfigError(
        f"unknown attention kernel {requested!r}",
        expected=f"one of {valid}",
        hint=f"did you mean {near[0]}?" if near else 'use "auto"',
        found=requested,
        valid=list(ATTENTION_NAMES),
    )


def _exact_order(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Exact kernels, fastest first; the last one always runs.

    H200, 32,760 tokens of 40 heads, bf16: FlashAttention 3 702, cuDNN 579, flash of torch 362
    TFLOP/s. Before Hopper torch's flash kernel is the one that was tuned for the hardware.
    """
    if device.type != "cuda" or dtype not in _HALF:
        return (_PLAIN,)
    major, _ = torch.cuda.get_device_capability(device)
    if major < 9:
        return ("sdpa_flash", "sdpa_cudnn", _PLAIN)
    newest = ("flash_attn3",) if major == 9 else ()
    return (*newest, "sdpa_cudnn", "sdpa_flash", _PLAIN)


def _load(name: str, device: torch.device, dtype: torch.dtype) -> tuple[AttentionFn | None, str]:
    """The kernel `name` for this device, or None and why not."""
    if name == _PLAIN:
        return sdpa, ""
    if device.type != "cuda":
        return None, f"needs a CUDA device, not {device.type}"
    if dtype not in _HALF:
        return None, f"needs bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    refusal = "is not installed"
    for find in _OPTIONAL.get(name, (lambda: _OF_TORCH[name],)):
        try:
            kernel = _fused(find())
            agreement = _agreement_db(kernel, device, dtype)
        except ImportError:
            continue
        except Exception as error:  # a foreign kernel on a GPU it may not know: anything may come
            first, *_ = (str(error) or repr(error)).splitlines()
            refusal = f"does not run on this GPU ({first})"
            continue
        if agreement >= _PROBE_FLOOR_DB:
            return kernel, ""
        refusal = f"gives wrong results on this GPU ({agreement:.0f} dB)"
    return None, refusal


def _imported(module: str, function: str) -> Callable[..., Any]:
    """A function of a package. Raises ImportError where there is none."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except AttributeError as error:
        raise ImportError(str(error)) from error
    return found


def _function(module: str, function: str) -> AttentionFn:
    kernel = _imported(module, function)

    def run(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
        out = kernel(q_BSNH, k_BENH, v_BENH)
        first: Tensor = out[0] if isinstance(out, tuple) else out  # some add the log-sum-exp
        return first

    return run


def _flash_3(package: str) -> AttentionFn:
    """The operator that its library registers in a namespace of the package's name.

    The package's function wraps it so that the first call imports torch._dynamo, a second or two.
    """
    importlib.import_module(f"{package}._C")
    forward = getattr(torch.ops, package).fwd

    def run(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
        scale = q_BSNH.shape[-1] ** -0.5
        out: Tensor = forward(q_BSNH, k_BENH, v_BENH, softmax_scale=scale, num_splits=1)[0]
        return out

    return run


def _sage_2() -> AttentionFn:
    kernel = _imported("sageattention", "sageattn")

    def run(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
        out: Tensor = kernel(q_BSNH, k_BENH, v_BENH, tensor_layout="NHD")
        return out

    return run


def _sage_3() -> AttentionFn:
    kernel = _imported("sageattn3", "sageattn3_blackwell")

    def run(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q_BSNH, k_BENH, v_BENH))
        out: Tensor = kernel(q, k, v)
        return out.transpose(1, 2)

    return run


def _of_lightx2v() -> AttentionFn:
    """Its KV-cache kernel: k and v come in quantised."""
    raise ValueError("takes keys and values that were quantised before")


# What may find each optional kernel, best first; it raises ImportError where its package is not.
# fa3_fwd is FlashAttention 3 as a forward-only wheel, flash_attn_3 the same built from source.
_OPTIONAL: Mapping[str, tuple[Callable[[], AttentionFn], ...]] = {
    "flash_attn2": (partial(_function, "flash_attn", "flash_attn_func"),),
    "flash_attn3": (
        partial(_flash_3, "fa3_fwd"),
        partial(_flash_3, "flash_attn_3"),
        partial(_function, "fa3_fwd_interface", "flash_attn_func"),
        partial(_function, "flash_attn_interface", "flash_attn_func"),
    ),
    "flash_attn4": (partial(_function, "flash_attn.cute", "flash_attn_func"),),
    "sage_attn2": (_sage_2,),
    "sage_attn3": (_sage_3,),
    "sage_attn2_k_int8_v_fp8": (_of_lightx2v,),
}


def _fused(kernel: AttentionFn) -> AttentionFn:
    """`kernel`, and plain SDPA for head widths that fused kernels do not take (small models)."""

    def run(q_BSNH: Tensor, k_BENH: Tensor, v_BENH: Tensor) -> Tensor:
        width = q_BSNH.shape[-1]
        fits = width % _HEAD_MULTIPLE == 0 and width <= _HEAD_MAX
        return (kernel if fits else sdpa)(q_BSNH, k_BENH, v_BENH)

    return run


@torch.no_grad()
def _agreement_db(kernel: AttentionFn, device: torch.device, dtype: torch.dtype) -> float:
    """Signal over error, in dB, of `kernel` against fp32 arithmetic; tokens as in no multiple."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the global stream alone

    def random(tokens: int) -> Tensor:
        shape = (1, tokens, 2, _HEAD_MAX)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q, k, v = random(333), random(257), random(257)
    out = kernel(q, k, v).float()
    q32, k32, v32 = (t.float().transpose(1, 2) for t in (q, k, v))
    scores = q32 @ k32.transpose(-1, -2) * _HEAD_MAX**-0.5
    exact = (scores.softmax(dim=-1) @ v32).transpose(1, 2)
    return float(20 * torch.log10(exact.norm() / (out - exact).norm()))
