"""Host memory on its way to a device: every byte arrives, in pieces and whole."""

from __future__ import annotations

import pytest
import torch

from shared_offload.pipeline import courier
from shared_offload.pipeline.courier import courier_to

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [1, 7, 999, 1000, 1001, 2501, 4000])
def test_pieces_make_the_whole(monkeypatch, tmp_path, nbytes: int) -> None:
    """Through the buffers, which the CPU itself does not need."""
    monkeypatch.setattr(courier, "CHUNK_NBYTES", 1000)
    path = tmp_path / "weights.pth"
    torch.save({"w": torch.randint(0, 256, (nbytes,), dtype=torch.uint8)}, path)
    mapped = torch.load(path, mmap=True, weights_only=True)["w"]
    target = torch.zeros_like(mapped)
    with courier_to(CPU) as sender:
        for _ in range(2):
            target.zero_()
            sender._send(mapped, target)
            assert torch.equal(target, mapped)


@pytest.mark.gpu
def test_what_arrives_on_a_gpu() -> None:
    """Large and small, in order of the stream, with sources that change right after."""
    device = torch.device("cuda", torch.cuda.current_device())
    many = 3 * courier.CHUNK_NBYTES + 6
    sources = [
        torch.randint(0, 256, (many,), dtype=torch.uint8),
        torch.randn(3000, 5000).bfloat16(),
        torch.randn(2000, 3000).T,
        torch.randn(1000, 2000).pin_memory(),
        torch.randn(5),
        torch.tensor(3.0),
    ]
    kept = [source.clone() for source in sources]
    for inference in (False, True):
        with torch.inference_mode(inference), courier_to(device) as sender:
            sent = []
            for source in sources:
                sent.append(sender.deliver(source))
                if not source.is_pinned():
                    source.zero_()
            place = torch.empty(many, dtype=torch.uint8, device=device)
            for value in (1, 2):  # a place that is used again
                sender.copy(torch.full((many,), value, dtype=torch.uint8), place)
                found = place.long().sum()
                assert found.item() == value * many
        for arrived, wanted, source in zip(sent, kept, sources, strict=True):
            assert torch.equal(arrived.cpu(), wanted)
            source.copy_(wanted)
