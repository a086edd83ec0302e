"""What a rank certainly needs on its GPU, before anything is loaded there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shared_offload.weights.architecture import PATCH, Architecture, non_block_shapes

VAE_STRIDE = (4, 8, 8)  # frames, rows and columns of the video that make one latent
VAE_CHANNELS = 96  # of the decoder's last layers, at full resolution
ACTIVATIONS = "activations or VAE"  # a part of the plan


def gpu_plan(
    arch: Architecture,
    *,
    frames: int,
    height: int,
    width: int,
    block_weights: int,
    dtype_nbytes: int,
    seq_p_size: int,
    branches: int,
) -> dict[str, int]:
    """What a rank certainly holds at once on its GPU, by name, in bytes.

    `block_weights`: the slots when streaming (slots x the largest unit), else all blocks.
    A lower bound: kernels' workspaces and fragmentation come on top, so a plan that does not fit
    never works, and one that barely fits may not either. ACTIVATIONS is the larger of two that
    follow each other.
    """
    tokens = count_tokens(frames, height, width)
    local = -(-tokens // seq_p_size)
    # Residual stream of each branch, and in self-attention: normed x, q, k, v and the output.
    attention = local * arch.dim * (branches + 5)
    # In the feed-forward: normed x, and the hidden layer.
    feed_forward = local * (arch.dim * (branches + 1) + arch.ffn_dim)
    # The decoder makes one latent's frames at a time; a layer holds its input and its output.
    decode = 2 * VAE_STRIDE[0] * height * width * VAE_CHANNELS
    non_block = sum(_numel(shape) for shape in non_block_shapes(arch).values())
    return {
        "block weights": block_weights,
        "other weights": non_block * dtype_nbytes,
        ACTIVATIONS: max(attention, feed_forward, decode) * dtype_nbytes,
    }


def total_of(needs: Mapping[str, int]) -> int:
    """All parts of a plan together."""
    return sum(needs.values())


def count_tokens(frames: int, height: int, width: int) -> int:
    """Tokens of the DiT for a video of these sizes in pixels."""
    latent = ((frames - 1) // VAE_STRIDE[0] + 1, height // VAE_STRIDE[1], width // VAE_STRIDE[2])
    return _numel([size // patch for size, patch in zip(latent, PATCH, strict=True)])


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
