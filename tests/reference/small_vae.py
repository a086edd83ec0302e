"""A small VAE of the library's whose weights make rounding show."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan


def make_vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    model = AutoencoderKLWan(base_dim=4).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("gamma"):
            weight.data = 1 + 0.2 * torch.randn_like(weight)
        elif name.endswith("bias"):
            weight.data = 0.1 * torch.randn_like(weight)
        else:
            weight.data *= 2
    return model
