"""One forward of diffusers' Wan DiT with resident weights against its group offload with streams.

For comparison with `shared-offload bench stream` of the same dimensions, on the same GPU. diffusers
has no FP8 linear layers for Wan, so weights are bf16. Needs host memory for the model, pinned:
torch rounds each pinned tensor up to a power of two.

    python tools/bench_diffusers_offload.py --size 14b --task i2v --tokens 32760
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import diffusers
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared_offload.bench.workload import IMAGE_TOKENS, grid_of
from shared_offload.synth.sizes import IN_DIM, SIZES, architecture
from shared_offload.weights.architecture import PATCH, Architecture

BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def build(arch: Architecture, device: torch.device) -> torch.nn.Module:
    """The model with random weights, bf16, on the device."""
    i2v = arch.model_type == "i2v"
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = diffusers.WanTransformer3DModel(
            patch_size=PATCH,
            num_attention_heads=arch.num_heads,
            attention_head_dim=arch.head_dim,
            in_channels=arch.in_dim,
            out_channels=arch.out_dim,
            text_dim=arch.text_dim,
            freq_dim=arch.freq_dim,
            ffn_dim=arch.ffn_dim,
            num_layers=arch.num_layers,
            eps=arch.eps,
            image_dim=arch.image_dim if i2v else None,
            added_kv_proj_dim=arch.dim if i2v else None,
        )
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def inputs(arch: Architecture, tokens: int, device: torch.device) -> dict[str, object]:
    """Random inputs of this many tokens."""
    sizes = [size * patch for size, patch in zip(grid_of(tokens), PATCH, strict=True)]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    i2v = arch.model_type == "i2v"
    return {
        "hidden_states": random(1, arch.in_dim, *sizes),
        "timestep": torch.tensor([900], device=device),
        "encoder_hidden_states": random(1, arch.text_len, arch.text_dim),
        "encoder_hidden_states_image": random(1, IMAGE_TOKENS, arch.image_dim) if i2v else None,
        "return_dict": False,
    }


@torch.no_grad()
def seconds(model: torch.nn.Module, given: dict[str, object], steps: int) -> list[float]:
    """Of each forward, after two that are not counted."""
    found = []
    with sdpa_kernel(list(BACKENDS), set_priority=True):
        for _ in range(steps + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            model(**given)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - begun)
    return found[2:]


def main() -> None:
    """Measure both and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(SIZES), default="14b")
    parser.add_argument("--task", choices=tuple(IN_DIM), default="i2v")
    parser.add_argument("--tokens", type=int, default=32760)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    arch = architecture(args.size, args.task)
    model, given = build(arch, device), inputs(arch, args.tokens, device)
    resident = seconds(model, given, args.steps)
    model.to("cpu")
    torch.cuda.empty_cache()
    begun = time.perf_counter()
    model.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=True,
    )
    pinning = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    offloaded = seconds(model, given, args.steps)
    figures = {
        "diffusers": diffusers.__version__,
        "device": torch.cuda.get_device_name(device),
        "resident_seconds": median(resident),
        "group_offload_seconds": median(offloaded),
        "ratio": median(offloaded) / median(resident),
        "pinning_seconds": pinning,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    print(json.dumps({**vars(args), **figures}, indent=2))


if __name__ == "__main__":
    main()
