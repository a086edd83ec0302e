"""The VAE's arithmetic over all frames of a clip at once, on the modules of diffusers' VAE.

diffusers encodes and decodes frame groups one after the other (1, 4, 4, 4, 4 frames) and hands on
what a causal convolution needs of the past: thousands of small kernels. Over the whole clip the
past is there, and zeros stand in front of it. Two layers are not plain causal convolutions: the
encoder's halving of time and the decoder's doubling leave the first frame as it is, and the
doubling does not see it either. Equal to diffusers' in values and gradients, but for `decode`,
which does not clamp. Shape letters: B clips, C channels, T frames, Y X height and width.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResidualBlock
from torch import Tensor
from torch.nn import functional as F

SMALLEST_NORM = 1e-12  # as in torch's normalize
HISTORY = 2  # frames that a convolution over three sees before its own
SHAPES_COMPILED = 32  # more than there are; torch gives up after eight

Module = Any  # diffusers has no types


class WholeClip:
    """A VAE's encode and decode; it holds no weights of its own.

    Weights in `channels_last_3d` make everything between them lie so. `compiled`: what stands
    between two convolutions is one kernel.
    """

    def __init__(self, vae: Module, *, compiled: bool = False) -> None:
        self._vae = vae
        self._activate = _compiled_activate() if compiled else activate

    def encode(self, clips: Tensor) -> Tensor:
        """The latents' mean (B, C, T, Y, X), as it comes out of the convolution."""
        encoder = self._vae.encoder
        x = _causal(encoder.conv_in, clips)
        for layer in encoder.down_blocks:
            x = self._layer(layer, x, _halved)
        x = self._head(encoder, self._middle(encoder.mid_block, x))
        return _causal(self._vae.quant_conv, x).chunk(2, 1)[0]

    def decode(self, latents: Tensor) -> Tensor:
        """Clips (B, 3, T, Y, X). Not clamped: outside of [-1, 1] a loss must still have a slope."""
        decoder = self._vae.decoder
        x = _causal(decoder.conv_in, _causal(self._vae.post_quant_conv, latents))
        x = self._middle(decoder.mid_block, x)
        for block in decoder.up_blocks:
            for layer in (*block.resnets, *(block.upsamplers or ())):
                x = self._layer(layer, x, _doubled)
        return self._head(decoder, x)

    def _layer(self, layer: Module, x: Tensor, resample: Any) -> Tensor:  # noqa: ANN401
        if isinstance(layer, WanResidualBlock):
            return self._residual(layer, x)
        found: Tensor = layer(x) if isinstance(layer, WanAttentionBlock) else resample(layer, x)
        return found

    def _middle(self, block: Module, x: Tensor) -> Tensor:
        first, *others = block.resnets
        x = self._residual(first, x)
        for attention, resnet in zip(block.attentions, others, strict=True):
            x = self._residual(resnet, attention(x))  # attention is within a frame
        return x

    def _residual(self, block: Module, x: Tensor) -> Tensor:
        shortcut = block.conv_shortcut
        around = x if isinstance(shortcut, torch.nn.Identity) else _causal(shortcut, x)
        x = _convolved(block.conv1, self._activate(x, block.norm1.gamma))
        return _convolved(block.conv2, self._activate(x, block.norm2.gamma)) + around

    def _head(self, side: Module, x: Tensor) -> Tensor:
        return _convolved(side.conv_out, self._activate(x, side.norm_out.gamma))


def activate(x: Tensor, gamma: Tensor) -> Tensor:
    """Normalised over channels, SiLU, and zeros for the frames before the first."""
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    square = full.square().sum(1, keepdim=True).clamp_min(SMALLEST_NORM**2)
    normed = full * square.rsqrt() * (gamma * gamma.numel() ** 0.5)
    return F.pad(F.silu(normed).to(x.dtype), (0, 0, 0, 0, HISTORY, 0))


def lay_out(vae: Module, memory_format: torch.memory_format) -> None:
    """Convolutions' weights in `channels_last_3d` (or its like in two dimensions), or back."""
    flat = memory_format
    if memory_format == torch.channels_last_3d:
        flat = torch.channels_last
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=memory_format)
        elif isinstance(module, torch.nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=flat)


def _compiled_activate() -> Any:  # noqa: ANN401  what torch.compile returns
    torch._dynamo.config.recompile_limit = SHAPES_COMPILED
    return torch.compile(activate, dynamic=False)


def _causal(conv: Module, x: Tensor) -> Tensor:
    """A causal convolution of any size, zeros before the first frame."""
    before = conv._padding[4]
    return _convolved(conv, F.pad(x, (0, 0, 0, 0, before, 0)) if before else x)


def _convolved(conv: Module, x: Tensor) -> Tensor:
    """A causal convolution of what already has the frames before the first."""
    around = (0, conv._padding[2], conv._padding[0])
    return F.conv3d(x, conv.weight, conv.bias, conv.stride, around)


def _halved(layer: Module, x: Tensor) -> Tensor:
    """Height and width halved, and time after the first frame where the layer does that."""
    x = _per_frame(layer.resample, x)
    if layer.mode == "downsample2d" or x.shape[2] == 1:
        return x
    return torch.cat((x[:, :, :1], _causal(layer.time_conv, x)), 2)


def _doubled(layer: Module, x: Tensor) -> Tensor:
    """Time after the first frame doubled where the layer does that, and height and width."""
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        pairs = _causal(layer.time_conv, x[:, :, 1:]).unflatten(1, (2, -1))
        later = pairs.transpose(1, 2).transpose(2, 3).flatten(2, 3)
        x = torch.cat((x[:, :, :1], later), 2)
    _, convolution = layer.resample
    return _per_frame(lambda y: convolution(F.interpolate(y, scale_factor=2.0)), x)


def _per_frame(run: Any, x: Tensor) -> Tensor:  # noqa: ANN401  a module or a function
    count = len(x)
    frames: Tensor = run(x.transpose(1, 2).flatten(0, 1))
    return frames.unflatten(0, (count, -1)).transpose(1, 2)
