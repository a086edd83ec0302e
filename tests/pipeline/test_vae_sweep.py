"""Strips one after another against the undivided pass, and the memory they are for."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared_offload.pipeline import decoding, vae_fast, vae_memory, vae_sweep
from shared_offload.pipeline.on_demand import OnDemand
from shared_offload.pipeline.vae import Vae
from shared_offload.pipeline.vae_memory import DECODE, ENCODE, Picture, StepMemory
from shared_offload.pipeline.video import to_uint8
from shared_offload.ranks.facts import RankFacts
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress
from tests.reference.small_vae import make_vae

# Latent height and width: wide, tall, square; sides that strips do not divide; the thinnest strips.
SIZES = [(4, 14), (3, 31), (23, 5), (15, 15), (2, 45)]
# A value is a sum of up to 1700 products in fp32, in the order that suits the width of a strip;
# these weights make the differences grow from layer to layer.
ROUNDING = 1e-5


class Alive(TorchDispatchMode):
    """Bytes of all storages that operators made and that are alive, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        for tensor in tree_leaves(made):
            if is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes.keys() | given:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
                    self.peak = max(self.peak, self.now)
        return made

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@pytest.fixture(scope="module")
def model() -> AutoencoderKLWan:
    return make_vae()


@functools.cache
def full_size() -> AutoencoderKLWan:
    """Wan's own sizes, without memory: operators only say how much they would take."""
    with torch.device("meta"):
        model = AutoencoderKLWan().eval().requires_grad_(False)
    vae_fast.quicken(model, gpu=True)
    return model


def hooks(model: AutoencoderKLWan) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def decoded(model: AutoencoderKLWan, latent: torch.Tensor, strips: int, **options: Any) -> Any:
    return vae_sweep.decode(model, latent, strips, lambda: None, torch.Tensor.float, **options)


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_strips_are_the_undivided_pass(model, size, frames) -> None:
    latent = torch.randn(1, 16, frames, *size)
    video = torch.rand(1, 3, 4 * frames - 3, 8 * size[0], 8 * size[1]) * 2 - 1
    frames_of_library, mode = model.decode(latent).sample, model.encode(video).latent_dist.mode()
    assert 0.1 < frames_of_library.std() < 0.9  # neither flat nor clamped away
    assert torch.equal(decoded(model, latent, 1), frames_of_library)
    assert torch.equal(vae_sweep.encode(model, video, 1), mode)
    most = vae_sweep.most_strips(*size)
    assert most > 1
    for strips in range(2, most + 1):
        made = decoded(model, latent, strips)
        torch.testing.assert_close(made, frames_of_library, rtol=0, atol=ROUNDING)
        made = vae_sweep.encode(model, video, strips)
        torch.testing.assert_close(made, mode, rtol=0, atol=ROUNDING)
    assert hooks(model) == 0


@pytest.mark.parametrize("share", [(0, 20), (20, 41), (9, 10), (0, 41)])
@torch.inference_mode()
def test_a_share_is_part_of_the_whole(model, share) -> None:
    latent = torch.randn(1, 16, 2, 3, 41)
    whole = model.decode(latent).sample[..., 8 * share[0] : 8 * share[1]]
    for strips in (1, 2):
        made = decoded(model, latent, strips, share=share)
        torch.testing.assert_close(made, whole, rtol=0, atol=ROUNDING)


# Frames of a video and blank ones behind it: a picture; an end within a latent frame; none.
@pytest.mark.parametrize(("frames", "blank"), [(1, 112), (7, 106), (29, 0)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_blank_frames_are_worked_on_while_others_are_remembered(frames, blank, device) -> None:
    def count(module: torch.nn.Module, *_: object) -> None:
        calls[module] += 1

    model, calls = make_vae().to(device), Counter[torch.nn.Module]()
    vae_fast.quicken(model, gpu=device == "cuda")
    video = torch.rand(1, 3, frames, 16, 112, device=device) * 2 - 1
    whole = torch.cat((video, torch.zeros(1, 3, blank, 16, 112, device=device)), 2)
    wanted = {strips: vae_sweep.encode(model, whole, strips) for strips in (1, 2)}
    if device == "cpu":
        assert torch.equal(wanted[1], model.encode(whole).latent_dist.mode())
    encoder = model.encoder
    *_, last = (each for each in encoder.down_blocks if hasattr(each, "time_conv"))
    for layer in (encoder.conv_in, last):
        layer.register_forward_hook(count)
    for strips, want in wanted.items():
        calls.clear()
        assert torch.equal(vae_sweep.encode(model, video, strips, blank), want)
        if blank:
            # Convolutions remember one group each: the first, four of each of two levels with four
            # frames and four of one with two, and the two that halve their number.
            real = 1 if frames == 1 else 3
            assert calls[encoder.conv_in] == strips * (real + 1 + 1)
            assert calls[last] == strips * (real + 1 + (1 + 4 + 4 + 1 + 4 + 1))
        else:
            assert calls[last] == calls[encoder.conv_in] == strips * 8


@torch.inference_mode()
def peaks(frames: int, height: int, width: int, strips: int) -> tuple[int, int]:
    """Bytes of a decode and an encode at full size."""
    model = full_size()
    latent = torch.empty(1, 16, frames, height // 8, width // 8, device="meta")
    with Alive() as decode:
        vae_sweep.decode(model, latent, strips, lambda: None, to_uint8)
    video = torch.empty(1, 3, 4 * frames - 3, height, width, device="meta")
    with Alive() as encode:
        vae_sweep.encode(model, video, strips)
    return decode.peak, encode.peak


@pytest.mark.parametrize(
    ("frames", "size", "strips"), [(21, (480, 832), 5), (6, (832, 480), 3), (6, (720, 1280), 10)]
)
def test_the_rule_knows_what_a_pass_takes(frames, size, strips) -> None:
    """The rule adds what cuDNN takes, which no operator returns."""
    picture = Picture.of((16, frames, size[0] // 8, size[1] // 8), None, 96 * 4)
    for way, took in zip((DECODE, ENCODE), peaks(frames, *size, strips), strict=True):
        assert 1.02 * took < picture.peak(way, strips) < 1.1 * took
        assert took < 0.45 * picture.peak(way, 1)  # what strips are for


def test_as_few_strips_as_fit() -> None:
    picture = Picture.of((16, 21, 60, 104), None, 96 * 4)
    peak = {strips: picture.peak(DECODE, strips) for strips in range(1, 15)}
    assert sorted(peak.values(), reverse=True) == list(peak.values())
    assert picture.strips_within(DECODE, None) == 1
    for strips in range(1, 14):
        assert picture.strips_within(DECODE, peak[strips]) == strips
        assert picture.strips_within(DECODE, peak[strips] - 1) == strips + 1
    assert picture.strips_within(DECODE, 0) == vae_sweep.most_strips(60, 104) == 14
    share = Picture.of((16, 21, 60, 104), (0, 26), 96 * 4)
    assert share.strips_within(DECODE, peak[4]) <= 2


@pytest.mark.parametrize("tiling", [False, True])
def test_a_limit_changes_nothing_but_memory(model, tiling) -> None:
    """Tiles are smaller than any strip; a picture within one tile is not tiled."""
    called: list[int] = []
    for size in ((4, 44), (4, 28)):
        vae = Vae(model, tiling=tiling)
        model.use_tiling = tiling
        latent = torch.randn(16, 2, *size)
        video = torch.rand(3, 5, 8 * size[0], 8 * size[1])
        whole, mode = vae.decode(latent), vae.encode(video)
        vae.limit = 0
        tiled = tiling and size[1] > 32
        assert vae.tiled(latent) == tiled
        called.clear()
        made = vae.decode(latent, lambda: called.append(1), form=to_uint8)
        assert len(called) == vae.decode_calls(latent) == 2 * (2 if tiled else size[1] // 7)
        assert (made.int() - to_uint8(whole).int()).abs().max() <= 1
        assert made.dtype == torch.uint8
        torch.testing.assert_close(vae.encode(video), mode, rtol=0, atol=ROUNDING)
        video[:, 1:] = 0
        assert torch.equal(vae.encode(video[:, :1], blank=4), vae.encode(video))
    model.use_tiling = False


def test_an_encode_has_room_of_its_own(model) -> None:
    """Whatever else is on the device: a picture's latent is to be the same."""
    vae, shape = Vae(model, tiling=False), (16, 2, 4, 44)
    vae.limit = 0
    assert vae.strips(shape, ENCODE) == vae.strips(shape, DECODE) == 6
    vae.encode_room = 1 << 40
    assert (vae.strips(shape, ENCODE), vae.strips(shape, DECODE)) == (1, 6)
    vae.limit, vae.encode_room = None, 0
    assert (vae.strips(shape, ENCODE), vae.strips(shape, DECODE)) == (6, 1)


@pytest.mark.parametrize("strips", [1, 3])
def test_a_failed_pass_leaves_no_hooks_and_no_features(model, strips) -> None:
    def stop() -> None:
        told.append(1)
        if len(told) == 4 * strips - 1:
            raise KeyboardInterrupt

    told: list[int] = []
    latent = torch.randn(1, 16, 4, 3, 24)
    with Alive() as alive:
        with pytest.raises(KeyboardInterrupt):
            vae_sweep.decode(model, latent, strips, stop, torch.Tensor.float)
        broken = torch.full((1, 3, 5, 16, 192), 0.5)
        with pytest.raises(RuntimeError):
            vae_sweep.encode(model, broken[:, :2], strips)
        del broken
    assert hooks(model) == 0
    assert alive.now == 0


def test_decoding_keeps_to_its_limit(model, monkeypatch) -> None:
    asked: list[int | None] = []

    @contextmanager
    def vae() -> Iterator[Vae]:
        yield made

    made = Vae(model, tiling=False)
    monkeypatch.setattr(vae_memory, "most_strips", lambda *_: 2)
    plain = Vae.strips

    def strips(self: Vae, *shape: Any, **options: Any) -> int:
        asked.append(self.limit)
        return plain(self, *shape, **options)

    monkeypatch.setattr(Vae, "strips", strips)
    vaes = OnDemand(lambda _: made, torch.device("cpu"))
    monkeypatch.setattr(vaes, "use", vae)
    latent = torch.randn(16, 2, 3, 15)
    ranks = Ranks.start(RankFacts(), torch.device("cpu"), seq_p_size=1, cfg_p_size=1)
    quiet = Progress(enabled=False)
    free = decoding.decode(vaes, latent, ranks, quiet, together=True)
    tight = decoding.decode(vaes, latent, ranks, quiet, together=True, limit=1)
    assert set(asked) == {None, 1}
    assert tight.shape == (5, 24, 120, 3)
    assert (tight.int() - free.int()).abs().max() <= 1


def test_without_a_gpu_nothing_limits() -> None:
    memory = StepMemory(torch.device("cpu"), 1)
    with memory.measured():
        pass
    assert memory.limit is None
    assert memory.peak is None
