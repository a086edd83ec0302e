"""Host memory of four ranks: one arena and one set of encoders, against a copy for each rank.

Run with -s for the table that the README shows.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from shared_offload.report.progress import Progress
from shared_offload.synth import sizes
from shared_offload.synth.folder import make_checkpoint
from shared_offload.synth.parts import TOKENIZER_FOLDER
from shared_offload.synth.tokenizer import write_tokenizer
from shared_offload.weights.architecture import read_architecture
from shared_offload.weights.checkpoint import open_checkpoint

MIB = 1 << 20
RANKS = 4


@pytest.mark.slow
def test_four_ranks_hold_the_blocks_once(monkeypatch, settings, ranks, tmp_path) -> None:
    t5 = sizes.T5Size(layers=4, dim=512, heads=8, head_dim=64, ffn_dim=2048, vocabulary=65536)
    tiny = sizes.SIZES["tiny"]
    spec = dataclasses.replace(tiny, dim=1024, ffn_dim=4096, num_layers=16, t5=t5)
    monkeypatch.setattr(sizes, "SIZES", {**sizes.SIZES, "tiny": spec})
    monkeypatch.setattr("shared_offload.synth.parts.SIZES", sizes.SIZES)
    folder = tmp_path / "model"
    silent = Progress(enabled=False)
    make_checkpoint(folder, "tiny", "t2v", parts=("dit", "t5", "vae"), threads=2, progress=silent)
    write_tokenizer(folder / TOKENIZER_FOLDER)  # a small one: as large as T5's it takes memory too
    arch = read_architecture(folder)
    layout = open_checkpoint(folder, arch, quantised=False, task="t2v").layout("BF16")
    encoder_nbytes = 2 * (folder / "models_t5_umt5-xxl-enc-bf16.pth").stat().st_size  # in fp32

    def gained(**options: object) -> dict[str, list[float]]:
        small = settings(model_path=str(folder), infer_steps=1, cpu_offload=True, **options)
        run = ranks(RANKS, kind="memory", settings={**small, "parallel": {"seq_p_size": RANKS}})
        assert run.end(200) == [0] * RANKS, run.stderr()
        made = json.loads((run.folder / "memory.json").read_text())
        return {kind: [rank[kind] for rank in made] for kind in ("arena", "rest")}

    private = gained()
    shared = gained(shared_cpu_weights=True, shared_cpu_weight_scope="host")
    arena = layout.arena_nbytes
    table = [f"{RANKS} ranks, blocks of {arena / MIB:.0f} MiB; PSS gained, MiB by rank"]
    for name, found in (("private", private), ("shared", shared)):
        for kind, numbers in found.items():
            row = "".join(f"{n / MIB:8.0f}" for n in (*numbers, sum(numbers)))
            table.append(f"{name:8} {kind:6}{row}")
    sys.stdout.write("\n".join(["", *table, ""]))
    assert sum(private["arena"]) == pytest.approx(RANKS * arena, rel=0.02)
    assert sum(shared["arena"]) == pytest.approx(arena, rel=0.02)
    saved = sum(map(sum, private.values())) - sum(map(sum, shared.values()))
    assert saved == pytest.approx((RANKS - 1) * arena, rel=0.02)
    # All ranks hold the VAE and what is outside the blocks; the encoder is the first rank's alone.
    for rest in (private["rest"], shared["rest"]):
        assert rest[0] - max(rest[1:]) == pytest.approx(encoder_nbytes, rel=0.1)
