"""The quicker layers against the library's own, in all ways in which a VAE passes over frames.

On the CPU convolutions are the library's; here those for GPUs are run there too.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanRMS_norm,
    WanUpsample,
)
from torch import Tensor, nn

from shared_offload.pipeline import vae_fast, vae_sweep
from shared_offload.pipeline.vae import Vae
from shared_offload.pipeline.vae_memory import DECODE, ENCODE, Picture
from shared_offload.pipeline.vae_parallel import Strips
from shared_offload.pipeline.video import to_uint8
from tests.reference.small_vae import make_vae

# A value is a sum of up to 1700 products, and these weights make differences grow by layers.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}
FRAMES = [1, 5, 17]  # of a video; of a latent 1, 2, 5
SIZES = [(3, 15), (7, 2)]  # latent height and width: wide and tall, odd
GPU = torch.device("cuda")
SLACK = 16 * 2**20  # the latent itself lies on the GPU too


@pytest.fixture(scope="module")
def library() -> AutoencoderKLWan:
    return make_vae()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=[False, True], ids=["as on CPUs", "as on GPUs"])
def pair(library, dtype, request) -> tuple[AutoencoderKLWan, Vae]:
    """The library's model, and the same one made quicker."""
    theirs = copy.deepcopy(library).to(dtype)
    for layer in theirs.modules():
        if isinstance(layer, WanUpsample) and dtype == torch.float64:
            layer.__class__ = nn.Upsample  # the library's rounds to fp32
    return theirs, quick(theirs, gpu=request.param)


def quick(model: AutoencoderKLWan, *, gpu: bool) -> Vae:
    """Of a copy."""
    vae = Vae(copy.deepcopy(model), tiling=False)
    vae_fast.quicken(vae._model, gpu=gpu)
    return vae


@pytest.fixture
def exact() -> Iterator[None]:
    """Convolutions without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def latents(frames: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(1, 16, (frames + 3) // 4, *size, dtype=dtype)


def videos(frames: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.rand(1, 3, frames, *(8 * side for side in size), dtype=dtype) * 2 - 1


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING[theirs.dtype])


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_undivided_and_in_strips(pair, dtype, frames, size) -> None:
    theirs, vae = pair
    latent, video = latents(frames, size, dtype), videos(frames, size, dtype)
    want, mode = theirs.decode(latent).sample, theirs.encode(video).latent_dist.mode()
    assert 0.1 < want.std() < 0.9  # neither flat nor clamped away
    close(vae._model.decode(latent).sample, want)
    close(vae._model.encode(video).latent_dist.mode(), mode)
    for strips in range(1, vae_sweep.most_strips(*size) + 1):
        close(vae_sweep.decode(vae._model, latent, strips, lambda: None, lambda x: x), want)
        close(vae_sweep.encode(vae._model, video, strips), mode)


@pytest.mark.parametrize("frames", FRAMES[:2])
@torch.inference_mode()
def test_tiled(pair, dtype, frames) -> None:
    theirs, vae = pair
    size = (5, 35)
    latent, video = latents(frames, size, dtype), videos(frames, size, dtype)
    for model in (theirs, vae._model):
        model.enable_tiling()
    close(vae._model.decode(latent).sample, theirs.decode(latent).sample)
    ours, mode = (m.encode(video).latent_dist.mode() for m in (vae._model, theirs))
    close(ours, mode)


class Row:
    """Ranks as threads, each beside the next."""

    def __init__(self, world: int) -> None:
        self._all_here = threading.Barrier(world, timeout=60)
        self._edges: dict[int, tuple[Tensor, Tensor]] = {}

    def swap(self, rank: int) -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]:
        def swap(first: Tensor, last: Tensor, chain: int) -> tuple[Tensor, Tensor]:
            self._edges[rank] = (first.contiguous(), last.contiguous())
            self._all_here.wait()
            zeros = torch.zeros(first.shape, dtype=first.dtype)
            before = self._edges[rank - 1][1] if rank else zeros
            after = self._edges[rank + 1][0] if rank + 1 < chain else zeros
            self._all_here.wait()
            return before, after

        return swap


def in_ranks(model: AutoencoderKLWan, latent: Tensor, world: int, *, gpu: bool) -> Tensor:
    """A normalised latent (C, T, Y, X), decoded in threads that swap edges as ranks do."""
    row = Row(world)

    def strip(rank: int) -> Tensor | None:
        strips = Strips(latent, rank, world, row.swap(rank))
        return quick(model, gpu=gpu).decode_strip(latent, strips)

    with ThreadPoolExecutor(world) as threads:
        made = list(threads.map(strip, range(world)))
    return torch.cat(made, -1 if latent.shape[-1] >= latent.shape[-2] else -2)


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("size", SIZES)
def test_in_strips_over_ranks(pair, dtype, frames, size) -> None:
    """The latent is in fp32 where it enters, so float64 has it exactly."""
    theirs, vae = pair
    latent = latents(frames, size, torch.float32)[0]
    want = theirs.decode((latent * vae._std + vae._mean)[None].to(dtype)).sample[0]
    made = in_ranks(theirs, latent, 3, gpu=type(vae._model.quant_conv) is not WanCausalConv3d)
    torch.testing.assert_close(made, want.float(), rtol=0, atol=ROUNDING[torch.float32])


def shapes(model: AutoencoderKLWan, work: Callable[[], Any]) -> list[object]:
    """What hooks of convolutions and norms see, in order."""
    seen: list[object] = []

    def note(_layer: nn.Module, given: tuple[Tensor | None, ...], made: Tensor) -> None:
        seen.append(([None if x is None else x.shape for x in given], made.shape, made.dtype))

    kinds = (nn.Conv2d, nn.Conv3d, WanRMS_norm, nn.Upsample, nn.SiLU)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    work()
    for handle in handles:
        handle.remove()
    return seen


def test_hooks_see_what_the_librarys_layers_would_show(library) -> None:
    ours = quick(library, gpu=True)._model
    latent, video = latents(5, (3, 5), torch.float32), videos(5, (3, 5), torch.float32)
    for work in (lambda m: m.decode(latent), lambda m: m.encode(video)):
        theirs = shapes(library, lambda work=work: work(library))
        assert shapes(ours, lambda work=work: work(ours)) == theirs
        assert len(theirs) > 80


@torch.inference_mode()
def test_channels_stay_last(library) -> None:
    """Where convolutions make them last, as on GPUs, little beside them turns features back.

    The library does so in a first frame: where a feature has one frame its order is not defined.
    """
    model = quick(library, gpu=True)._model
    sizes: Counter[bool] = Counter()

    def look(_layer: nn.Module, given: tuple[Tensor | None, ...]) -> None:
        for x in given:
            if x is not None:
                sizes[x.stride(1) == 1] += x.numel()

    def make(_layer: nn.Module, _given: object, made: Tensor) -> Tensor:
        return made.contiguous(memory_format=vae_fast.CHANNELS_LAST[made.ndim])

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            layer.register_forward_hook(make)
        if isinstance(layer, nn.Conv3d) and layer is not model.encoder.conv_in:  # gets the video
            layer.register_forward_pre_hook(look)
    latent, video = latents(17, (3, 22), torch.float32), videos(17, (3, 22), torch.float32)
    strip = Strips(latent[0], 1, 3, lambda first, last, _: (first.contiguous(), last.contiguous()))

    def in_ranks() -> None:
        with strip.applied(model.decoder):
            model.decode(latent)

    for work in (
        lambda: vae_sweep.decode(model, latent, 1, lambda: None, lambda x: x),
        lambda: vae_sweep.decode(model, latent, 3, lambda: None, lambda x: x),
        lambda: vae_sweep.encode(model, video, 1),
        lambda: vae_sweep.encode(model, video, 3),
        in_ranks,
    ):
        sizes.clear()
        work()
        assert sizes[False] < 0.02 * sizes.total()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_norms_in_half_precision(half) -> None:
    """From zero to the largest values: sums and inverses that fp16 cannot hold."""
    layer = WanRMS_norm(384, images=False).requires_grad_(False)
    layer.gamma.data = 1 + 0.2 * torch.randn_like(layer.gamma)
    x = torch.randn(1, 384, 8, 3, 2)
    x *= torch.tensor([0, 1e-5, 1e-3, 0.1, 1, 100, 3e3, 1.2e4]).view(-1, 1, 1)
    x[:, :, -1].clamp_(-6e4, 6e4)
    x = x.to(half)
    want = layer(x.double()).float()
    vae_fast.quicken(layer, gpu=False)
    made = layer.to(half)(x)
    assert made.dtype == half
    error = (made.float() - want).abs()
    assert (error <= 3 * torch.finfo(half).eps * want.abs() + 1e-7)[:, :, [0, *range(2, 8)]].all()
    assert (error <= 0.05 * want.abs() + 1e-7)[:, :, 1].all()  # x itself has a few bits there


def test_a_failure_leaves_nothing(pair, dtype) -> None:
    _, vae = pair
    latent = torch.randn(16, 2, 3, 15)
    whole = vae.decode(latent)  # the library counts its layers in the first pass, whoever runs it
    state = {layer: set(vars(layer)) for layer in vae._model.modules()}

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vae.decode(latent, stop)
    with pytest.raises(RuntimeError):
        vae.encode(torch.zeros(2, 5, 24, 120))
    assert torch.equal(vae.decode(latent), whole)
    assert {layer: set(vars(layer)) for layer in vae._model.modules()} == state


def test_weights_are_freed_at_once(library) -> None:
    """No layer is in a circle, which would keep gigabytes until Python looks for circles."""
    vae = quick(library, gpu=True)
    alive = [weakref.ref(layer) for layer in vae._model.modules()]
    gc.disable()
    try:
        vae.close()
        assert [layer() for layer in alive if layer() is not None] == []
    finally:
        gc.enable()


def test_in_host_memory_weights_are_as_in_files(library) -> None:
    vae = Vae(copy.deepcopy(library), tiling=False)
    places = {name: weight.data_ptr() for name, weight in vae._model.named_parameters()}
    vae.move(torch.device("cpu"))
    assert {name: weight.data_ptr() for name, weight in vae._model.named_parameters()} == places
    latent = torch.randn(16, 2, 3, 5)
    whole = vae.decode(latent)
    vae_fast.quicken(vae._model, gpu=True)
    assert not vae._model.decoder.conv_in.weight.is_contiguous()
    vae.move(torch.device("cpu"))
    assert all(weight.is_contiguous() for weight in vae._model.parameters())
    assert torch.equal(vae.decode(latent), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_on_a_gpu(library, exact, kind) -> None:
    """Against the library in fp32; then there, back and there again, with the same bits."""
    size = (9, 35)
    latent, video = latents(17, size, torch.float32)[0], videos(17, size, torch.float32)[0]
    vae = Vae(copy.deepcopy(library).to(kind), tiling=False)
    want = library.decode((latent * vae._std + vae._mean)[None]).sample[0]
    mode = (library.encode(video[None]).latent_dist.mode()[0] - vae._mean) / vae._std
    homes = {name: weight.data_ptr() for name, weight in vae._model.named_parameters()}
    made = []
    for _ in range(2):
        vae.move(GPU)
        last = vae._model.decoder.conv_in.weight
        assert last.is_contiguous(memory_format=torch.channels_last_3d)
        assert not last.is_contiguous()
        for vae.limit in (None, 0):
            made.append((vae.decode(latent).cpu(), vae.encode(video).cpu()))
        vae.move(torch.device("cpu"))
        assert {n: w.data_ptr() for n, w in vae._model.named_parameters()} == homes
    error = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}[kind]
    for frames, mean in made:
        assert (frames - want).square().mean().sqrt() < error * want.std()
        assert (mean - mode).square().mean().sqrt() < error * mode.std()
    for first, again in zip(made[:2], made[2:], strict=True):
        assert all(map(torch.equal, first, again))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_the_rule_holds(kind) -> None:
    """Peaks keep to the rule, which asks for little more than they are."""
    torch.manual_seed(0)
    with GPU:
        model = AutoencoderKLWan().eval().requires_grad_(False).to(kind)
    vae = Vae(model, tiling=False)
    latent, video = torch.randn(16, 6, 60, 104), torch.rand(3, 21, 480, 832) * 2 - 1
    picture = Picture.of(latent.shape, None, 96 * kind.itemsize)
    passes = {
        DECODE: lambda latent, _: vae.decode(latent, form=to_uint8),
        ENCODE: lambda _, video: vae.encode(video),
    }
    for way, work in passes.items():
        for strips in (1, 2, 6):
            vae.limit = None
            work(latent[:, :2], video[:, :5])  # what libraries allocate once
            torch.cuda.empty_cache()
            spare = picture.peak(way, strips)
            before = torch.cuda.memory_allocated()
            vae.limit = before + spare + SLACK
            assert vae.strips(latent.shape, way) == strips
            torch.cuda.reset_peak_memory_stats()
            work(latent, video)
            took = torch.cuda.max_memory_allocated() - before
            assert 0.8 * spare < took <= spare + SLACK, (way, strips)
