"""Ulysses over real gloo processes against one process: exact where nothing is added up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import ulysses_rank
from tests.model.ulysses_rank import GROUP_SIZES, HEADS, MODELS, ROUND_TRIPS, WORLD

ROOT = Path(__file__).parents[2]
Results = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return ulysses_rank.alone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each process saved, by the size of the group."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", "-m", "tests.model.ulysses_rank", str(folder)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=os.environ | one_thread, check=True, timeout=120)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.fixture(params=GROUP_SIZES, ids="P={}".format)
def ranks(saved: Results, request: pytest.FixtureRequest) -> Results:
    """Of one group: the last one, so that ranks in the group are not ranks of the world."""
    return [of_process[request.param] for of_process in saved[-request.param :]]


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=str)
def test_exchanges_move_every_value_to_its_place(
    ranks: Results, alone: dict[Any, Any], case: tuple[int, int, torch.dtype]
) -> None:
    batch, tokens, dtype = case
    whole, size = alone[case], len(ranks)
    chunk = -(-tokens // size)
    padded = torch.zeros(batch, size * chunk, whole["local"].shape[2], dtype=dtype)
    padded[:, :tokens] = whole["local"]
    for rank, found in enumerate(r[case] for r in ranks):
        assert torch.equal(found["local"], padded[:, rank * chunk : (rank + 1) * chunk])
        heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        for part in ("q", "k", "v"):
            assert torch.equal(found[part], whole[part][:, :, heads])
        assert torch.equal(found["gathered"], 2 * whole["local"])


@pytest.mark.parametrize("case", MODELS, ids="-".join)
def test_every_rank_has_the_velocity_of_one_process(
    ranks: Results, alone: dict[Any, Any], case: tuple[str, str]
) -> None:
    for found in (r[case] for r in ranks):
        for branch, exact in alone[case].items():
            assert torch.equal(found[branch], ranks[0][case][branch])
            assert (found[branch] - exact).abs().max() / exact.abs().max() < 2e-6


def test_a_batch_of_two(ranks: Results, alone: dict[Any, Any]) -> None:
    for found in ranks:
        torch.testing.assert_close(found["batch"]["x"], alone["batch"]["x"], rtol=0, atol=1e-5)


def test_a_block_costs_two_all_to_alls(ranks: Results, alone: dict[Any, Any]) -> None:
    assert alone["collectives"] == {}
    for found in ranks:
        [(operation, count)] = found["collectives"].items()
        assert "alltoall" in operation
        assert count == 2
