"""A decode or an encode that passes over the picture in strips, one after another, on one device.

Most of a pass's memory is features at full resolution: those at work, and the last two frames that
each causal convolution keeps of its input. Here only those of one strip exist at a time. What works
at the size of the latent (the middle block, which attends over a whole frame, and the level beside
it) is done for whole frames; the rest is convolution, and each strip goes through all frames there.

A 3 x 3 convolution at the end of a strip needs a column that comes with the next strip only. So it
makes one column less there and keeps the last columns of its input, from which it goes on in the
next strip: strips shift towards the start of the picture, layer by layer. Nothing is computed
twice, each value is the same sum as in the undivided pass, and there is no seam to blend.

Nothing of the library is replaced: strips are hooks for as long as one pass runs. A *column* is a
place along the dimension that is cut. Shape letters: B batch, C channels, T Y X latent frames,
height and width, F frames, H W height and width in pixels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared_offload.pipeline import libraries
from shared_offload.pipeline.conditioning import SPACE_STRIDE, TIME_STRIDE

TIME = 2  # the dimension of frames in (B, C, T, Y, X)
PAST = 2  # frames before its own that a causal convolution of 3 sees
SHIFT = 6  # latents by which strips have shifted at the decoder's end (6.25; encoder: 4.5)
THINNEST = SHIFT + 1  # latents of a strip: the first makes something in every layer
OnStep = Callable[[], None]
Form = Callable[[Tensor], Tensor]


def most_strips(height: int, width: int) -> int:
    """How many strips a plane of latents can be cut into."""
    return max(1, max(height, width) // THINNEST)


def around(begin: int, end: int, size: int) -> tuple[int, int]:
    """The latents that the frames over some of `size` latents depend on, after the whole part."""
    return max(0, begin - THINNEST), min(size, end + THINNEST)


def decode(
    model: Any,  # noqa: ANN401  diffusers has no types
    latent: Tensor,
    strips: int,
    on_step: OnStep,
    form: Form,
    share: tuple[int, int] | None = None,
) -> Tensor:
    """The frames (B, 3, F, H, W) of a latent (B, C, T, Y, X), in [-1, 1].

    `on_step` is called before each latent frame of each strip is enqueued; `form` turns some frames
    of a strip, as soon as they are made, into what is kept of them. `share`: only what lies over
    these columns of the latent (start, end). The latents `around` a share are worked on.
    """
    decoder = model.decoder
    level, *levels = decoder.up_blocks
    whole = [decoder.mid_block, *level.resnets]
    cut = [*(level.upsamplers or ())]
    cut += [layer for each in levels for layer in (*each.resnets, *(each.upsamplers or ()))]
    sweep = _Sweep(latent)
    begin, end = share or (0, sweep.size)
    low, high = around(begin, end, sweep.size)
    memory, features = _Memory(), []
    for frame in model.post_quant_conv(latent).split(1, TIME):
        made = memory.run(whole, memory.convolve(decoder.conv_in, frame))
        features.append(sweep.part(made, low, high))
    del memory, made  # no strip needs what the whole frames left
    video = []
    with sweep.hooked(cut):
        for start, stop in sweep.over(_bounds(high - low, strips, SHIFT)):
            memory, frames = _Memory(), []
            for sweep.frame, feature in enumerate(features):
                on_step()
                x = memory.run(cut, sweep.part(feature, start, stop), sweep)
                x = sweep.join(decoder.conv_out, decoder.nonlinearity(decoder.norm_out(x)))
                x = sweep.trim(memory.convolve(decoder.conv_out, x))
                frames.append(form(x.clamp(-1, 1)))
            video.append(torch.cat(frames, TIME))
    return sweep.part(
        torch.cat(video, sweep.dim), *(SPACE_STRIDE * (x - low) for x in (begin, end))
    )


def encode(
    model: Any,  # noqa: ANN401  diffusers has no types
    video: Tensor,
    strips: int,
    blank: int = 0,
) -> Tensor:
    """The mode (B, C, T, Y, X) of a video (B, 3, F, H, W) with `blank` frames of zeros behind it.

    There are 4n + 1 frames in all. The video may lie on another device, and passes to the model's
    piece by piece. Work on blank frames ends where layers remember no other: what follows is equal.
    """
    encoder = model.encoder
    last = max(i for i, e in enumerate(encoder.down_blocks) if isinstance(e, libraries.WanResample))
    cut = list(encoder.down_blocks[: last + 1])
    whole = [*encoder.down_blocks[last + 1 :], encoder.mid_block]
    groups = _frame_groups(video.shape[TIME] + blank)
    still = sum(begin < video.shape[TIME] for begin, _ in groups)
    sweep = _Sweep(video)
    parts: list[list[Tensor]] = [[] for _ in groups]  # of each latent frame, its strips in order
    with sweep.hooked(cut):
        for start, end in sweep.over(_bounds(sweep.size, strips, 0)):
            strip = sweep.part(video, start, end)
            chain = _Chain(_entry(model, cut, sweep), still)
            for sweep.frame, group in enumerate(groups):
                made = chain.run(sweep.frame, partial(_frames, strip, *group))
                parts[sweep.frame].append(made)
    memory, moments = _Memory(), []
    for strips_of_frame in parts:
        x = memory.run(whole, torch.cat(strips_of_frame, sweep.dim))
        strips_of_frame.clear()
        x = encoder.nonlinearity(encoder.norm_out(x))
        moments.append(model.quant_conv(memory.convolve(encoder.conv_out, x)))
    mode: Tensor = torch.cat(moments, TIME).chunk(2, 1)[0]  # the other half is the variance
    return mode


def _entry(model: Any, cut: Sequence[nn.Module], sweep: _Sweep) -> list[_Step]:  # noqa: ANN401
    """An encoder's first convolution and the layers behind it, for one strip."""
    memory, conv = _Memory(), model.encoder.conv_in

    def enter(x: Tensor) -> Tensor:
        x = sweep.join(conv, x.to(model.device, model.dtype))
        return sweep.trim(memory.convolve(conv, x))

    behind = (_Step(_remembered(each), partial(memory.run, [each], sweep=sweep)) for each in cut)
    return [_Step(_remembered(conv), enter), *behind]


def _remembered(layer: nn.Module) -> list[int]:
    """Frames before its own that each causal convolution of a layer sees."""
    convs = [each for each in layer.modules() if isinstance(each, libraries.WanCausalConv3d)]
    return [conv.kernel_size[0] - 1 for conv in convs]


@dataclass(frozen=True, slots=True)
class _Step:
    """A layer: what it remembers, and how x passes it."""

    remembered: list[int]
    do: Form

    def reach(self, frames: int) -> int:
        """How many groups back it remembers, at most, if groups have so many frames there."""
        return sum(math.ceil(count / frames) for count in self.remembered)


class _Chain:
    """Steps one after another, for one group of frames after another.

    From group `still` on, groups are equal. What a step makes of them is too, once all that its
    layer remembers are such groups; from then on it is what it made then, and nothing is computed.
    """

    def __init__(self, steps: Sequence[_Step], still: int) -> None:
        self._steps = steps
        self._done = 0  # steps that need not be run again
        self._since = still  # the group from which on their result is the same
        self._made: Tensor | None = None

    def run(self, group: int, frames: Callable[[], Tensor]) -> Tensor:
        """What the last step makes of a group; `frames` gives it, if it is needed."""
        since = self._since
        x = frames() if self._made is None else self._made
        for at in range(self._done, len(self._steps)):
            step = self._steps[at]
            since += step.reach(x.shape[TIME])
            x = step.do(x)
            if group == since:
                self._done, self._since, self._made = at + 1, since, x
        return x


class _Memory:
    """What causal layers keep of earlier frames, for one pass over the frames of a strip."""

    def __init__(self) -> None:
        # The library's, by its numbers within a layer.
        self._features: dict[nn.Module, dict[int, Any]] = defaultdict(
            lambda: defaultdict(lambda: None)
        )
        self._inputs: dict[nn.Module, Tensor] = {}

    def run(self, layers: Sequence[nn.Module], x: Tensor, sweep: _Sweep | None = None) -> Tensor:
        """The next frames through layers of the library: the same ones each time."""
        for layer in layers:
            if sweep:
                x = sweep.enter(layer, x)
            x = layer(x, feat_cache=self._features[layer], feat_idx=[0])
            if sweep:
                x = sweep.leave(layer, x)
        return x

    def convolve(self, conv: nn.Module, x: Tensor) -> Tensor:
        """The next frames through one causal convolution."""
        before = self._inputs.get(conv)
        seen = x if before is None or x.shape[TIME] >= PAST else torch.cat((before, x), TIME)
        self._inputs[conv] = seen[:, :, -PAST:].clone()
        made: Tensor = conv(x, before)
        return made


class _Sweep:
    """Where a pass is: which strip, which frame; and the columns that strips leave to the next."""

    def __init__(self, plane: Tensor) -> None:
        height, width = plane.shape[-2:]
        self.dim = -1 if width >= height else -2
        """The dimension that is cut: the longer side, so that kept columns are short."""
        self.size = max(height, width)
        self.frame = 0
        self._first = self._last = True
        self._kept: dict[tuple[nn.Module, int], Tensor] = {}

    def over(self, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Start and end of each strip."""
        for at, strip in enumerate(pairwise(bounds)):
            self._first, self._last = at == 0, at == len(bounds) - 2
            yield strip

    def enter(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What the layer is to get, of what has been made for it."""
        if not isinstance(layer, libraries.WanResample):
            return self.join(layer, x)
        if layer.mode.startswith("up"):
            return self.join(layer, x, 1)  # two columns of what the convolution gets
        # Its convolution reads 2j, 2j + 1 and 2j + 2 for column j; the last strip is padded.
        x = self.join(layer, x, lambda size: 2 - size % 2)
        even = not self._last and x.shape[self.dim] % 2 == 0
        return self._cut(x, 0, 1) if even else x

    def leave(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What is right of what the layer made."""
        grows = isinstance(layer, libraries.WanResample) and layer.mode[0] == "u"
        return self.trim(x) if grows else x

    def join(self, key: nn.Module, x: Tensor, keep: int | Callable[[int], int] = 2) -> Tensor:
        """x behind the columns that the strip before kept; the next strip finds x's last ones."""
        before = self._kept.pop((key, self.frame), None)
        if before is not None:
            x = torch.cat((before, x), self.dim)
        if not self._last:
            size = x.shape[self.dim]
            count = keep if isinstance(keep, int) else keep(size)
            self._kept[key, self.frame] = x.narrow(self.dim, size - count, count).clone()
        return x

    def trim(self, made: Tensor) -> Tensor:
        """Without the columns for which a 3 x 3 convolution lacked a neighbour."""
        return self._cut(made, 0 if self._first else 1, 0 if self._last else 1)

    def part(self, x: Tensor, start: int, end: int) -> Tensor:
        """Columns of x."""
        return x.narrow(self.dim, start, end - start)

    def _cut(self, x: Tensor, before: int, after: int) -> Tensor:
        return x.narrow(self.dim, before, x.shape[self.dim] - before - after)

    @contextmanager
    def hooked(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Residual blocks get what `enter` gives: two columns of the strip before, then x.

        Their first convolution gives up one column, the second one more, and so does the shortcut
        at once.
        """

        def trim(_module: nn.Module, _inputs: object, made: Tensor) -> Tensor:
            return self.trim(made)

        def join(module: nn.Module, _inputs: object, made: Tensor) -> Tensor:
            return self.join(module, made)

        def shift(_module: nn.Module, _inputs: object, made: Tensor) -> Tensor:
            return made if self._last else self._cut(made, 0, 2)

        handles = []
        try:
            for block in (each for each in layers if isinstance(each, libraries.WanResidualBlock)):
                handles.append(block.conv_shortcut.register_forward_hook(shift))
                handles.append(block.conv1.register_forward_hook(trim))
                handles.append(block.norm2.register_forward_hook(join))
                handles.append(block.conv2.register_forward_hook(trim))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _bounds(size: int, strips: int, lead: int) -> list[int]:
    """Where strips begin, and the end. The first is wider by `lead`, the last less wide.

    By `lead` the strips shift, so where the memory is needed they are of one width.
    """
    inner = [at * size // strips + lead for at in range(1, strips)]
    return [0, *inner, size]


def _frames(video: Tensor, begin: int, count: int) -> Tensor:
    """Frames of a video, which has zeros behind it."""
    frames = video[:, :, begin : begin + count]
    lack = count - frames.shape[TIME]
    return F.pad(frames, (0, 0, 0, 0, 0, lack)) if lack else frames


def _frame_groups(frames: int) -> list[tuple[int, int]]:
    """Begin and number of the frames of each latent frame: one, then four each."""
    return [(0, 1), *((at, TIME_STRIDE) for at in range(1, frames, TIME_STRIDE))]
