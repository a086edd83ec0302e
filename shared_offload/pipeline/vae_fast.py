"""Wan's VAE from the library, with its layers' forward made quicker. Same weights, same sums.

What is beside the convolutions is bound by memory, so each pass over the features that can be left
out is time and memory saved. On an H200, 81 frames of 480x832, seconds and GB over the weights:

|                         | decode       | encode       |
|-------------------------|--------------|--------------|
| fp32, the library's     | 2.78 s, 9.40 | 1.78 s, 7.27 |
| fp32, layout alone      | 2.60 s, 8.17 | 1.63 s, 6.03 |
| fp32, layers alone      | 2.47 s, 9.39 | 1.62 s, 7.25 |
| fp32, both              | 2.26 s, 7.86 | 1.43 s, 5.72 |
| bf16, the library's     | 1.82 s, 4.70 | 1.18 s, 3.63 |
| bf16, both              | 1.27 s, 4.24 | 0.82 s, 2.86 |

Counted, not measured: bf16 is enlarged as it is, not as a copy in fp32; 0.46 GB less in a decode.

Invariant: layers keep no state, and stay instances of the library's classes with the same inputs,
outputs and parameters; whoever hooks or moves them need not know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared_offload.pipeline import libraries

TIME = 2  # the dimension of frames in (B, C, T, Y, X)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
SMALLEST = 1e-12  # norms below are taken for this, as the library does


def quicken(model: nn.Module, *, gpu: bool) -> None:
    """Give the layers of an AutoencoderKLWan the forwards below, and its weights their order.

    To be called again when weights have moved or are from a file. Memory: one weight more.

    On a GPU weights have channels last: then what a convolution makes has them last too, and so has
    all that follows; else each convolution turns its features and back. On the CPU convolutions are
    the library's and weights stay as in the file: padding inside takes oneDNN 1.2 times as long.
    """
    kind = libraries.WanCausalConv3d
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            weight = layer.weight.data
            form = CHANNELS_LAST[weight.ndim] if gpu else torch.contiguous_format
            layer.weight.data = weight.contiguous(memory_format=form)
            if isinstance(layer, kind):
                layer.__class__ = _with(kind, _convolve) if gpu else kind
        elif isinstance(layer, libraries.WanRMS_norm):
            layer.__class__ = _with(libraries.WanRMS_norm, _normalise)
        elif isinstance(layer, libraries.WanUpsample):  # copies values: fp32 is not needed
            layer.__class__ = _with(libraries.WanUpsample, nn.Upsample.forward)
        elif isinstance(layer, nn.SiLU):
            layer.inplace = True  # each gets what a norm has just made, and nobody else has that


def wake(device: torch.device) -> None:
    """Let cuDNN load itself, which the first convolution of a process waits for. Python is not held
    meanwhile. Does nothing on the CPU.
    """
    if device.type == "cuda":
        x = torch.zeros(1, 32, 3, 32, 32, device=device).to(memory_format=CHANNELS_LAST[5])
        weight = torch.zeros(32, 32, 3, 3, 3, device=device).to(memory_format=CHANNELS_LAST[5])
        F.conv3d(x, weight)


def _convolve(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:  # noqa: ANN401
    """A causal convolution of the frames of x, which come after `cache_x`.

    Rows and columns are padded inside the convolution; the library pads a copy of its input. Only
    zeros for frames before the first one are still put before a copy, once a video.
    """
    columns, _, rows, _, lack, _ = self._padding
    if cache_x is not None and lack:
        x = torch.cat((cache_x, x), TIME)
        lack -= cache_x.shape[TIME]
    if lack:
        x = F.pad(x, (0, 0, 0, 0, lack, 0))
    return F.conv3d(x, self.weight, self.bias, self.stride, (0, rows, columns))


def _normalise(self: Any, x: Tensor) -> Tensor:  # noqa: ANN401  diffusers has no types
    """x over its root mean square of channels, times gamma: three passes, one tensor of x's size.

    Squares are summed in fp32 or wider. What x is divided by has x's own dtype: a root mean square
    lies within the range of the values, so that it overflows in no dtype (in fp16 a sum may, or an
    inverse). There are as many roundings as in the library's.
    """
    wide, kept = torch.promote_types(x.dtype, torch.float32), torch.finfo(x.dtype)
    least = max(SMALLEST / self.scale, kept.smallest_normal * kept.eps)  # fp16: not 0
    channels = 1 if self.channel_first else -1
    norm = torch.linalg.vector_norm(x, dim=channels, keepdim=True, dtype=wide)
    rms = norm.mul_(1 / self.scale).to(x.dtype).clamp_min_(least)
    normalised: Tensor = (x / rms).mul_(self.gamma)
    if isinstance(self.bias, Tensor):
        normalised += self.bias
    return normalised


@functools.cache
def _with(kind: type[nn.Module], forward: Callable[..., Tensor]) -> type[nn.Module]:
    """A class, not a method put on a layer: that would keep its layer alive after `close`."""
    return type(kind.__name__, (kind,), {"forward": forward})
