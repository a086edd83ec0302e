"""Wan 2.1's DiT in float64, written to be read: loops where the package has views.

One token grid, one branch, no batch axis: x (S, D). Weights under a checkpoint's names.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def dense(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[f"{name}.weight"].double().T + w[f"{name}.bias"].double()


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head: (S, H), (E, H), (E, H) -> (S, H)."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def by_head(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    parts = zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True)
    return torch.cat([softmax_attention(*part) for part in parts], dim=-1)


def rotation(position: tuple[int, int, int], head_dim: int) -> list[complex]:
    """The factor of each pair of channels of one token."""
    side = 2 * (head_dim // 6)
    return [
        cmath.exp(1j * place * 10000.0 ** (-2 * pair / width))
        for place, width in zip(position, (head_dim - 2 * side, side, side), strict=True)
        for pair in range(width // 2)
    ]


def rotate(x: Tensor, grid: tuple[int, int, int], heads: int) -> Tensor:
    positions = [(t, y, z) for t in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
    head_dim = x.shape[-1] // heads
    rows = [rotation(p, head_dim) * heads for p in positions]
    factors = torch.tensor(rows, dtype=torch.complex128)
    pairs = torch.view_as_complex(x.reshape(len(positions), -1, 2).contiguous())
    return torch.view_as_real(pairs * factors).flatten(1)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def block(
    x: Tensor,
    w: Weights,
    e0: Tensor,
    text: Tensor,
    image: Tensor | None,
    grid: tuple[int, int, int],
    heads: int,
    eps: float,
) -> Tensor:
    m = w["modulation"][0].double() + e0
    y = layer_norm(x, eps) * (1 + m[1]) + m[0]
    q = rms_norm(dense(y, w, "self_attn.q"), w["self_attn.norm_q.weight"], eps)
    k = rms_norm(dense(y, w, "self_attn.k"), w["self_attn.norm_k.weight"], eps)
    q, k, v = rotate(q, grid, heads), rotate(k, grid, heads), dense(y, w, "self_attn.v")
    x = x + dense(by_head(q, k, v, heads), w, "self_attn.o") * m[2]

    y = layer_norm(x, eps) * w["norm3.weight"].double() + w["norm3.bias"].double()
    q = rms_norm(dense(y, w, "cross_attn.q"), w["cross_attn.norm_q.weight"], eps)
    k = rms_norm(dense(text, w, "cross_attn.k"), w["cross_attn.norm_k.weight"], eps)
    out = by_head(q, k, dense(text, w, "cross_attn.v"), heads)
    if image is not None:
        k = dense(image, w, "cross_attn.k_img")
        k = rms_norm(k, w["cross_attn.norm_k_img.weight"], eps)
        out = out + by_head(q, k, dense(image, w, "cross_attn.v_img"), heads)
    x = x + dense(out, w, "cross_attn.o")

    y = layer_norm(x, eps) * (1 + m[4]) + m[3]
    return x + dense(gelu_tanh(dense(y, w, "ffn.0")), w, "ffn.2") * m[5]


def embed_time(timestep: float, w: Weights, freq_dim: int) -> tuple[Tensor, Tensor]:
    half = freq_dim // 2
    angles = [timestep * 10000.0 ** (-i / half) for i in range(half)]
    wave = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
    e = dense(silu(dense(wave, w, "time_embedding.0")), w, "time_embedding.2")
    return e, dense(silu(e), w, "time_projection.1").view(6, -1)


def embed_text(text: Tensor, w: Weights, rows: int) -> Tensor:
    padded = torch.zeros(rows, text.shape[1], dtype=torch.float64)
    padded[: text.shape[0]] = text
    return dense(gelu_tanh(dense(padded, w, "text_embedding.0")), w, "text_embedding.2")


def embed_image(clip: Tensor, w: Weights) -> Tensor:
    def affine(x: Tensor, name: str) -> Tensor:
        scale, shift = w[f"{name}.weight"].double(), w[f"{name}.bias"].double()
        return layer_norm(x, 1e-5) * scale + shift

    hidden = dense(affine(clip.double(), "img_emb.proj.0"), w, "img_emb.proj.1")
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return affine(dense(hidden, w, "img_emb.proj.3"), "img_emb.proj.4")


def velocity(
    weights: Weights,
    latent: Tensor,
    timestep: float,
    text: Tensor,
    image: Tensor | None,
    *,
    heads: int,
    freq_dim: int,
    text_rows: int,
    eps: float = 1e-6,
) -> Tensor:
    """The whole model on raw T5 rows and CLIP features; latent with its condition."""
    _channels, frames, height, width = latent.shape
    grid = (frames, height // 2, width // 2)
    cells = [
        latent[:, t, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].double()
        for t in range(grid[0])
        for y in range(grid[1])
        for x in range(grid[2])
    ]
    kernel = weights["patch_embedding.weight"][:, :, 0].double()
    bias = weights["patch_embedding.bias"].double()
    x = torch.stack([torch.einsum("dcyx,cyx->d", kernel, cell) for cell in cells]) + bias
    e, e0 = embed_time(timestep, weights, freq_dim)
    context = embed_text(text, weights, text_rows)
    picture = None if image is None else embed_image(image, weights)
    for number in range(1 + max(int(n.split(".")[1]) for n in weights if n.startswith("blocks."))):
        start = f"blocks.{number}."
        w = {n.removeprefix(start): t for n, t in weights.items() if n.startswith(start)}
        x = block(x, w, e0, context, picture, grid, heads, eps)
    m = weights["head.modulation"][0].double() + e
    rows = dense(layer_norm(x, eps) * (1 + m[1]) + m[0], weights, "head.head")
    out = torch.zeros(rows.shape[1] // 4, frames, height, width, dtype=torch.float64)
    for i, row in enumerate(rows):
        t, y, z = i // (grid[1] * grid[2]), i // grid[2] % grid[1], i % grid[2]
        out[:, t, 2 * y : 2 * y + 2, 2 * z : 2 * z + 2] = row.view(2, 2, -1).permute(2, 0, 1)
    return out
