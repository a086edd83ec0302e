"""The four ranks of test_ulysses.py: `python -m tests.model.ulysses_rank FOLDER`.

Runs everything over gloo, in groups of one, two and four ranks side by side, and saves what came
out; the test compares it with one process. Ranks are forked before torch has made threads, so that
it is imported once and not four times.
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from shared_offload.model.attention import sdpa
from shared_offload.model.block import BlockInputs, in_step, self_attention
from shared_offload.model.dit import Branch, Dit
from shared_offload.model.rope import RopeTable, angles
from shared_offload.model.ulysses import SINGLE, Exchange, Ulysses
from tests.reference import tiny_model

WORLD = 4
GROUP_SIZES = (1, 2, 4)
HEADS, WIDTH = 4, 8
CPU = torch.device("cpu")
ROUND_TRIPS = [
    (batch, tokens, dtype)
    for batch in (1, 2)
    for tokens in (1, 3, 8, 45)
    for dtype in (torch.float32, torch.bfloat16)
]
SIZES = {"even": (2, 4, 8), "odd": (3, 6, 10)}  # 16 and 45 tokens
MODELS = [(model, size) for model in ("t2v", "i2v") for size in SIZES]
GRID = (3, 3, 5)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(
    exchange: Exchange, batch: int, tokens: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All four exchanges over known values; the heads' attention is multiplication by 2."""
    x = random(batch, tokens, 3 * HEADS * WIDTH, dtype=dtype)
    local = exchange.split_tokens(x)
    qkv = local.reshape(batch, local.shape[1], 3, HEADS, WIDTH).unbind(2)
    out = exchange.outgoing(local[..., : HEADS * WIDTH], HEADS)
    for part, x in enumerate(qkv):
        place = out.place(part)
        if place is not None:
            place.copy_(x.reshape(place.shape))
    q, k, v = out.send(qkv, tokens)()
    back = [exchange.to_tokens(2 * part)().flatten(2, 3) for part in (q, k, v)]
    gathered = exchange.gather_tokens(torch.stack(back, 2).flatten(2), tokens)
    return {"local": local, "q": q, "k": k, "v": v, "gathered": gathered}


def velocities(exchange: Exchange, model_type: str, size: str) -> dict[str, Tensor]:
    arch = tiny_model.make_architecture(model_type, num_heads=HEADS)
    dit = Dit(
        arch,
        tiny_model.non_block_weights(arch),
        dtype=torch.float32,
        device=CPU,
        self_attention=sdpa,
        cross_attention=sdpa,
        exchange=exchange,
    )
    blocks = [tiny_model.block_weights(arch, i) for i in range(arch.num_layers)]
    source = tiny_model.DictSource([tiny_model.as_read(b) for b in blocks], "phase")
    i2v = model_type == "i2v"
    image = dit.embed_image(random(11, arch.image_dim)) if i2v else None
    branches = [Branch(dit.embed_text(random(n, arch.text_dim)), image) for n in (19, 2)]
    latent = random(16, *SIZES[size])
    condition = random(20, *SIZES[size], seed=1) if i2v else None
    first, second = dit.velocities(latent, 937.0, branches, source, condition)
    return {"first": first, "second": second}


def block_of_batch_two(exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Self-attention over two videos at once, and the collectives it took."""
    arch = tiny_model.make_architecture("t2v", num_heads=HEADS)
    angle = angles(GRID, arch.head_dim, CPU)[None]
    tables = (part.float() for part in (angle.cos(), angle.sin()))
    inputs = BlockInputs(
        e0_6D=random(6, arch.dim),
        rope=RopeTable(*(exchange.split_tokens(part).unsqueeze(2) for part in tables)),
        text_BED=random(2, 5, arch.dim),
        image_BID=None,
        tokens=45,
        heads=HEADS,
        eps=arch.eps,
        self_attention=sdpa,
        cross_attention=sdpa,
        exchange=exchange,
    )
    w = tiny_model.as_read(tiny_model.block_weights(arch, 0))
    x = exchange.split_tokens(random(2, 45, arch.dim))
    with CommDebugMode() as collectives:
        [x] = in_step([self_attention(x, w, inputs)])
    counts = {str(op): n for op, n in collectives.get_comm_counts().items() if n}
    return {"x": exchange.gather_tokens(x, 45)}, counts


def run_all(exchange: Exchange) -> dict[object, object]:
    out: dict[object, object] = {case: round_trip(exchange, *case) for case in ROUND_TRIPS}
    out |= {case: velocities(exchange, *case) for case in MODELS}
    out["batch"], out["collectives"] = block_of_batch_two(exchange)
    return out


def own_group(rank: int, size: int) -> dist.ProcessGroup:
    """Of the neighbours that share a sequence; every rank makes every group."""
    ranks = range(0, WORLD, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in ranks]
    group = groups[rank // size]
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    groups = {size: own_group(rank, size) for size in GROUP_SIZES}
    results = {size: run_all(Ulysses(group)) for size, group in groups.items()}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Exit status: the number of ranks that failed."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)


def alone() -> dict[object, object]:
    return run_all(SINGLE)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
