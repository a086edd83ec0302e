"""Phases as torch.compile will see them: one graph each, the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared_offload.model.attention import sdpa
from shared_offload.model.block import PHASE_FUNCTIONS, BlockInputs
from shared_offload.model.rope import RopeTable, angles
from shared_offload.model.ulysses import SINGLE
from shared_offload.weights.architecture import PHASES, Phase
from tests.reference import tiny_model

ARCH = tiny_model.make_architecture("i2v")
GRID = (2, 3, 5)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def inputs(dtype: torch.dtype) -> BlockInputs:
    angle = angles(GRID, ARCH.head_dim, torch.device("cpu"))[None, :, None]
    return BlockInputs(
        e0_6D=random(6, ARCH.dim),
        rope=RopeTable(angle.cos().float(), angle.sin().float()),
        text_BED=random(1, 7, ARCH.dim).to(dtype),
        image_BID=random(1, 5, ARCH.dim).to(dtype),
        tokens=30,
        heads=ARCH.num_heads,
        eps=ARCH.eps,
        self_attention=sdpa,
        cross_attention=sdpa,
        exchange=SINGLE,
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_phase_is_one_graph_for_all_blocks(phase: Phase, fp8: bool) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    torch.compiler.reset()
    function = PHASE_FUNCTIONS[phase]
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=count)
    shared = inputs(torch.bfloat16)
    x = random(1, 30, ARCH.dim).bfloat16()
    with torch.no_grad():
        for block in range(3):
            weights = tiny_model.block_weights(ARCH, block)
            stored = tiny_model.quantise_block(weights) if fp8 else weights
            w = tiny_model.as_read(stored, torch.bfloat16)
            assert torch.equal(compiled(x, w, shared), function(x, w, shared))
    assert graphs == 1
