from __future__ import annotations

import itertools
import math

import pytest
import torch

from shared_offload.weights.architecture import PHASES, block_shapes, is_quantised
from shared_offload.weights.layout import DTYPE_BYTES, build_layout
from shared_offload.weights.views import TORCH_DTYPES, views

SIZES = ["t2v-1.3B", "t2v-14B", "i2v-14B"]


def fp8_dtypes(arch) -> dict[str, str]:
    return {n: "F8_E4M3" if is_quantised(n, s) else "F32" for n, s in block_shapes(arch).items()}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_arena_is_little_larger_than_the_weights(published, size: str, quantised: bool) -> None:
    arch = published[size]
    layout = build_layout(arch, fp8_dtypes(arch) if quantised else {}, "BF16")
    weights = arch.num_layers * sum(t.nbytes for t in layout.tensors)
    assert weights <= layout.arena_nbytes <= 1.05 * weights
    assert layout.stride % (2 << 20) == 0  # all published sizes can afford huge pages
    # Not less than the parameters need at their width.
    linear = sum(math.prod(s) for n, s in block_shapes(arch).items() if is_quantised(n, s))
    assert layout.block_nbytes > linear * (1 if quantised else 2)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_tensors_for_fused_products_are_adjacent(published, size: str, quantised: bool) -> None:
    arch = published[size]
    layout = build_layout(arch, fp8_dtypes(arch) if quantised else {}, "BF16")
    place = {t.name: t for t in layout.tensors}
    groups = [["self_attn.q", "self_attn.k", "self_attn.v"], ["cross_attn.k", "cross_attn.v"]]
    if arch.model_type == "i2v":
        groups.append(["cross_attn.k_img", "cross_attn.v_img"])
    suffixes = ["weight", "bias"] + (["weight_scale"] if quantised else [])
    for group, suffix in itertools.product(groups, suffixes):
        for first, second in itertools.pairwise(place[f"{layer}.{suffix}"] for layer in group):
            assert second.offset == first.offset + first.nbytes
            assert second.dtype == first.dtype


def test_every_tensor_has_its_place_once(small_arch) -> None:
    arch = small_arch("i2v")
    layout = build_layout(arch, fp8_dtypes(arch), "F16")
    names = {t.name for t in layout.tensors}
    wanted = set(block_shapes(arch)) - {"modulation"}
    wanted |= {"self_attn.modulation", "ffn.modulation"}
    wanted |= {f"{n}_scale" for n, s in block_shapes(arch).items() if is_quantised(n, s)}
    assert names == wanted and len(names) == len(layout.tensors)
    for first, second in itertools.pairwise(layout.tensors):
        assert first.offset + first.nbytes <= second.offset
    for t in layout.tensors:
        assert t.offset % 256 == 0
        assert t.nbytes == math.prod(t.shape) * DTYPE_BYTES[t.dtype]
    assert layout.block_nbytes <= layout.stride and layout.stride % 4096 == 0


def test_dtypes(small_arch) -> None:
    arch = small_arch("i2v")
    plain = {t.name: t.dtype for t in build_layout(arch, {}, "BF16").tensors}
    fp8 = {t.name: t.dtype for t in build_layout(arch, fp8_dtypes(arch), "BF16").tensors}
    assert plain["ffn.0.weight"] == "BF16" and fp8["ffn.0.weight"] == "F8_E4M3"
    assert fp8["ffn.0.weight_scale"] == "F32" and "ffn.0.weight_scale" not in plain
    for dtypes in (plain, fp8):
        assert dtypes["self_attn.q.bias"] == "BF16"
        for name in ("norm3.weight", "norm3.bias", "ffn.modulation", "cross_attn.norm_q.weight"):
            assert dtypes[name] == "F32"


def test_units_of_both_granularities_view_the_same_bytes(small_arch) -> None:
    layout = build_layout(small_arch(), {}, "F32")
    arena = torch.randint(0, 256, (layout.arena_nbytes,), dtype=torch.uint8)
    blocks, phases = layout.units("block"), layout.units("phase")
    assert [u.index for u in phases] == list(range(3 * layout.num_blocks))
    for block in blocks:
        assert block.offset == block.block * layout.stride
        whole = views(block, arena[block.offset : block.offset + block.nbytes])
        parts = {}
        for unit in (u for u in phases if u.block == block.block):
            assert unit.offset % 4096 == 0
            view = views(unit, arena[unit.offset : unit.offset + unit.nbytes])
            assert not parts.keys() & view.keys()
            parts |= view
        assert parts.keys() == whole.keys()
        for tensor in block.tensors:
            start = block.offset + tensor.offset
            raw = arena[start : start + tensor.nbytes]
            for found in (whole[tensor.name], parts[tensor.name]):
                assert found.dtype == TORCH_DTYPES[tensor.dtype] and found.shape == tensor.shape
                assert torch.equal(found.reshape(-1).view(torch.uint8), raw)
                assert found.data_ptr() == raw.data_ptr()  # a view, not a copy
    assert [u.phases for u in phases[:3]] == [(p,) for p in PHASES]


def test_views_refuse_a_buffer_that_is_too_small(small_arch) -> None:
    unit = build_layout(small_arch(), {}, "F32").units("phase")[1]
    for buffer in (torch.empty(unit.nbytes - 1, dtype=torch.uint8), torch.empty(unit.nbytes)):
        with pytest.raises(ValueError, match="needs a 1-D uint8 buffer"):
            views(unit, buffer)


def test_fingerprint_tells_layouts_apart(small_arch) -> None:
    arch = small_arch()
    layouts = [
        build_layout(arch, {}, "BF16"),
        build_layout(arch, {}, "F16"),
        build_layout(arch, fp8_dtypes(arch), "BF16"),
        build_layout(small_arch(num_layers=4), {}, "BF16"),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    assert build_layout(arch, {}, "BF16").fingerprint() == layouts[0].fingerprint()
