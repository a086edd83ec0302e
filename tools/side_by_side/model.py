"""diffusers' Wan DiT: random weights of a size, inputs, placement, attention kernel.

Invariant: weights have the distribution of those that ours are measured with, and are nowhere zero;
dtypes are those that from_pretrained(torch_dtype=torch.bfloat16) gives.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch
from torch import Tensor

from shared_offload.bench.workload import IMAGE_TOKENS, TIMESTEP, grid_of
from shared_offload.model.attention import AUTO, select_attention
from shared_offload.synth.recipes import default_recipe
from shared_offload.weights.architecture import PATCH, Architecture
from tests.reference.diffusers_dit import arguments
from tools.side_by_side.modes import Mode

# diffusers' names of the kernels that ours chooses from.
_BACKENDS = {
    "flash_attn3": "_flash_3",
    "sdpa_cudnn": "_native_cudnn",
    "sdpa_flash": "_native_flash",
    "sdpa": "native",
}
_GROUP_HOOKS = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")
HOST = torch.device("cpu")


def build(arch: Architecture, device: torch.device) -> WanTransformer3DModel:
    """The model in bf16 on the device, but for the modules that diffusers keeps in fp32."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = WanTransformer3DModel(**arguments(arch))
    finally:
        torch.set_default_dtype(usual)
    in_fp32 = set(model._keep_in_fp32_modules)
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        recipe = default_recipe(name, tuple(parameter.shape))
        parameter.normal_(recipe.mean, recipe.std)
        if in_fp32 & set(name.split(".")):
            parameter.data = parameter.data.float()
    return model


def quantise(model: WanTransformer3DModel, weights: str) -> float | None:
    """Make its weights FP8 where the mode says so; seconds that took."""
    begun = time.perf_counter()
    if weights == "fp8-cast":
        model.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    elif weights == "fp8-torchao":
        torchao = importlib.import_module("torchao.quantization")
        config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
        torchao.quantize_(model.blocks, config)
    else:
        return None
    wait(model.device)
    return time.perf_counter() - begun


def branches(arch: Architecture, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Random inputs of the two forwards of a step: same latents and picture, other text."""
    sizes = [size * patch for size, patch in zip(grid_of(tokens), PATCH, strict=True)]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    i2v = arch.model_type == "i2v"
    shared = {
        "hidden_states": random(1, arch.in_dim, *sizes),
        "timestep": torch.tensor([TIMESTEP], device=device),
        "encoder_hidden_states_image": random(1, IMAGE_TOKENS, arch.image_dim) if i2v else None,
        "return_dict": False,
    }
    texts = [random(1, arch.text_len, arch.text_dim) for _ in range(2)]
    return [{**shared, "encoder_hidden_states": text} for text in texts]


def place(
    model: WanTransformer3DModel, mode: Mode, device: torch.device
) -> tuple[float | None, str]:
    """Put the weights where the mode wants them; seconds that its user waits for, and a note."""
    if mode.place == "resident":
        model.to(device)
        return None, ""
    model.to(HOST)
    wait(device)
    note = ""
    options = dict(mode.offload)
    if device.type != "cuda" and mode.place == "streamed":
        options |= {"use_stream": False, "record_stream": False}
        note = "without a stream"
    pinned_before = pinned_nbytes()
    begun = time.perf_counter()
    if mode.place == "moved":
        model.to(device)
    else:
        model.enable_group_offload(onload_device=device, offload_device=HOST, **options)
    wait(device)
    if pinned_before and mode.place == "streamed":  # torch keeps what it has pinned once
        return None, "pinned by a mode before"
    return time.perf_counter() - begun, note


def unplace(model: WanTransformer3DModel) -> None:
    """Undo compilation and group offload; weights end up on the host, pinned, if they were."""
    for module in model.modules():
        module._compiled_call_impl = None
    registry = getattr(model, "_diffusers_hook", None)
    if registry is not None:
        for hook in _GROUP_HOOKS:
            registry.remove_hook(hook)


def use_attention(model: WanTransformer3DModel, name: str, device: torch.device) -> str:
    """Set the kernel by diffusers' name, or for `auto` the one that ours takes; its name."""
    if name == AUTO:
        name = _BACKENDS[select_attention(AUTO, device, torch.bfloat16)[0].name]
    if name == "_flash_3":
        _lend_flash_3()
    model.set_attention_backend(name)
    return name


def _lend_flash_3() -> None:
    """Let diffusers' FlashAttention 3 backend use the `fa3-fwd` wheel, as we do.

    diffusers takes FlashAttention 3 only from a distribution called flash_attn_3, which has to be
    built from source. The wheel's function is the same one with the same arguments.
    """
    if not attention_dispatch._CAN_USE_FLASH_ATTN_3 and importlib.util.find_spec("fa3_fwd"):
        kernel = importlib.import_module("fa3_fwd_interface").flash_attn_func
        attention_dispatch.flash_attn_3_func = kernel
        attention_dispatch._CAN_USE_FLASH_ATTN_3 = True


def pinned_nbytes() -> int | None:
    """What torch's allocator holds of the host: each tensor is rounded up to a power of two."""
    return cast("int | None", torch.cuda.host_memory_stats().get("allocated_bytes.current"))


def wait(device: torch.device) -> None:
    """For the device, if it runs behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
