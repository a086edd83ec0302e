"""The DiT against diffusers' model, and against Wan's formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared_offload.errors import InputError
from shared_offload.model.attention import sdpa
from shared_offload.model.dit import Branch, Dit, patchify, unpatchify
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.layout import build_layout
from shared_offload.weights.views import views
from tests.reference import diffusers_dit, tiny_model, wan_dit

CPU = torch.device("cpu")
TIMESTEP = 937.0


def sqnr_db(found: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return 20 * math.log10(exact.norm() / (found.double() - exact).norm())


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max() / exact.abs().max())


class Case:
    """A model, its weights and the inputs of one step."""

    def __init__(self, arch: Architecture, frames: int, height: int, width: int) -> None:
        self.arch = arch
        self.weights = tiny_model.full_weights(arch)
        self.blocks = [tiny_model.block_weights(arch, i) for i in range(arch.num_layers)]
        random = torch.Generator().manual_seed(7)
        i2v = arch.model_type == "i2v"
        self.latent = torch.randn(16, frames, height, width, generator=random)
        self.condition = torch.randn(20, frames, height, width, generator=random) if i2v else None
        self.text = torch.randn(19, arch.text_dim, generator=random)
        self.other_text = torch.randn(3, arch.text_dim, generator=random)
        # Small, so that the norm's 1e-5 shows.
        clip = 0.01 * torch.randn(11, arch.image_dim, generator=random)
        self.clip = clip if i2v else None

    def dit(self, dtype: torch.dtype = torch.float32) -> Dit:
        return Dit(
            self.arch,
            {n: t for n, t in self.weights.items() if not n.startswith("blocks.")},
            dtype=dtype,
            device=CPU,
            self_attention=sdpa,
            cross_attention=sdpa,
        )

    def source(
        self,
        dtype: torch.dtype = torch.float32,
        granularity: str = "block",
        fp8: bool = False,
    ) -> tiny_model.DictSource:
        blocks = [tiny_model.quantise_block(b) if fp8 else b for b in self.blocks]
        return tiny_model.DictSource([tiny_model.as_read(b, dtype) for b in blocks], granularity)

    def branch(self, dit: Dit, text: Tensor) -> Branch:
        image = None if self.clip is None else dit.embed_image(self.clip)
        return Branch(dit.embed_text(text), image)

    def run(self, source: tiny_model.DictSource, dtype: torch.dtype = torch.float32) -> Tensor:
        dit = self.dit(dtype)
        branches = [self.branch(dit, self.text)]
        return dit.velocities(self.latent, TIMESTEP, branches, source, self.condition)[0]

    def model_input(self) -> Tensor:
        parts = [self.latent] if self.condition is None else [self.latent, self.condition]
        return torch.cat(parts)

    def exact(self) -> Tensor:
        return wan_dit.velocity(
            self.weights,
            self.model_input(),
            TIMESTEP,
            self.text,
            self.clip,
            heads=self.arch.num_heads,
            freq_dim=self.arch.freq_dim,
            text_rows=self.arch.text_len,
            eps=self.arch.eps,
        )

    def from_diffusers(self) -> Tensor:
        model = diffusers_dit.build(self.arch, self.weights)
        rows = self.arch.text_len - self.text.shape[0]
        text = torch.nn.functional.pad(self.text, (0, 0, 0, rows))
        return diffusers_dit.velocity(model, self.model_input(), TIMESTEP, text, self.clip)


@pytest.fixture(scope="module", params=["t2v", "i2v"])
def case(request: pytest.FixtureRequest) -> Case:
    # eps is far above Wan's 1e-6, so that a wrong one shows.
    arch = tiny_model.make_architecture(request.param, eps=1e-3)
    return Case(arch, frames=3, height=6, width=10)


def test_equals_diffusers(case: Case) -> None:
    assert relative_error(case.run(case.source()), case.from_diffusers()) < 1e-5


def test_equals_the_formulas(case: Case) -> None:
    assert relative_error(case.run(case.source()), case.exact()) < 2e-6


@pytest.mark.slow
def test_full_width_block_equals_diffusers() -> None:
    sizes = {"dim": 5120, "ffn_dim": 13824, "freq_dim": 256, "num_heads": 40, "num_layers": 1}
    arch = tiny_model.make_architecture("i2v", **sizes, text_dim=4096, image_dim=1280)
    wide = Case(arch, frames=2, height=4, width=6)
    assert relative_error(wide.run(wide.source()), wide.from_diffusers()) < 1e-5


def test_fp8_weights_equal_what_they_stand_for(case: Case) -> None:
    """Only the activations' 8 bits differ: 3 mantissa bits are about 31 dB a product."""
    blocks = [tiny_model.quantise_block(b) for b in case.blocks]
    real = [tiny_model.as_read(tiny_model.dequantise_block(b)) for b in blocks]
    exact = case.run(tiny_model.DictSource(real))
    assert sqnr_db(case.run(case.source(fp8=True)), exact) > 28
    in_bf16 = case.run(case.source(torch.bfloat16, fp8=True), torch.bfloat16)
    assert sqnr_db(in_bf16, exact) > 28


def test_half_precision(case: Case) -> None:
    exact = case.exact()
    for dtype, floor in ((torch.bfloat16, 40), (torch.float16, 58)):
        assert sqnr_db(case.run(case.source(dtype), dtype), exact) > floor


def test_phases_equal_blocks_and_every_unit_is_borrowed_once(case: Case) -> None:
    dit = case.dit(torch.bfloat16)
    texts = (case.text, case.other_text)
    branches = [case.branch(dit, text) for text in texts]
    results = []
    for granularity in ("block", "phase"):
        source = case.source(torch.bfloat16, granularity)
        both = dit.velocities(case.latent, TIMESTEP, branches, source, case.condition)
        assert source.borrowed == [unit.index for unit in source.units]
        results.append(both)
    for block, phase in zip(*results, strict=True):
        assert torch.equal(block, phase)
    for branch, together in zip(branches, results[0], strict=True):
        source = case.source(torch.bfloat16)
        [alone] = dit.velocities(case.latent, TIMESTEP, [branch], source, case.condition)
        assert torch.equal(alone, together)
    assert not torch.equal(*results[0])


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_reads_what_the_layout_places(case: Case, fp8: bool) -> None:
    """Through the bytes of an arena, phase by phase, with nothing missing and nothing unused."""
    source = case.source(torch.bfloat16, fp8=fp8)
    on_disk = dict.fromkeys(case.blocks[0], "F32")
    if fp8:
        on_disk = {n: "F8_E4M3" if t.ndim == 2 else "F32" for n, t in case.blocks[0].items()}
    units = build_layout(case.arch, on_disk, "BF16").units("phase")
    placed: list[dict[str, Tensor]] = [{} for _ in case.blocks]
    for unit, shown in zip(units, case.source(torch.bfloat16, "phase", fp8).units, strict=True):
        assert (unit.block, unit.phases) == (shown.block, shown.phases)
        view = views(unit, torch.zeros(unit.nbytes, dtype=torch.uint8))
        for name, tensor in view.items():
            original = source.blocks[unit.block][name]
            assert tensor.dtype == original.dtype
            tensor.copy_(original)
        placed[unit.block] |= view
    assert [set(block) for block in placed] == [set(block) for block in source.blocks]
    direct = case.run(source, torch.bfloat16)
    assert torch.equal(direct, case.run(tiny_model.DictSource(placed), torch.bfloat16))


def test_inputs_survive_a_step(case: Case) -> None:
    latent = case.latent.clone()
    first, second = case.run(case.source()), case.run(case.source())
    assert torch.equal(first, second)
    assert torch.equal(latent, case.latent)


def test_size_may_change_between_steps(case: Case) -> None:
    dit = case.dit()
    branches = [case.branch(dit, case.text)]

    def step(columns: int) -> Tensor:
        condition = None if case.condition is None else case.condition[..., :columns]
        latent = case.latent[..., :columns]
        return dit.velocities(latent, TIMESTEP, branches, case.source(), condition)[0]

    wide, narrow, again = step(10), step(6), step(10)
    assert torch.equal(wide, again)
    assert narrow.shape == (16, 3, 6, 6)


def test_text_is_padded_before_the_embedding(case: Case) -> None:
    found = case.dit().embed_text(case.text)
    assert relative_error(found, wan_dit.embed_text(case.text, case.weights, 512)) < 1e-6
    assert torch.equal(found[19], found[511])
    assert found[511].abs().max() > 0


def test_too_many_tokens_and_odd_sizes_are_told(case: Case) -> None:
    with pytest.raises(InputError) as long:
        case.dit().embed_text(torch.zeros(513, case.arch.text_dim))
    assert long.value.facts["found"] == 513
    dit = case.dit()
    for bad in (case.latent[..., :9], case.latent[:15]):
        with pytest.raises(InputError) as wrong:
            dit.velocities(bad, 1.0, [case.branch(dit, case.text)], case.source())
        assert wrong.value.facts["found"] == list(bad.shape)


def test_time_embedding_matches_float64(case: Case) -> None:
    for timestep in (0.0, 71.0, 999.0):
        e, e0 = case.dit()._embed_time(timestep)
        exact_e, exact_e0 = wan_dit.embed_time(timestep, case.weights, case.arch.freq_dim)
        assert relative_error(e, exact_e) < 1e-6
        assert relative_error(e0, exact_e0) < 1e-6


def test_head_has_the_channel_fastest_and_patches_have_it_slowest() -> None:
    latent = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    rows = patchify(latent)
    assert rows.shape == (3 * 2 * 3, 2 * 4)
    token = rows[1 * 6 + 1 * 3 + 2]  # frame 1, row 1, column 2
    assert token.tolist() == latent[:, 1, 2:4, 4:6].flatten().tolist()
    as_head = rows.view(-1, 2, 4).transpose(1, 2).flatten(1)
    assert torch.equal(unpatchify(as_head, (3, 2, 3)), latent)
