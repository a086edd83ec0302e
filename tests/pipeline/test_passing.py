"""UMT5 block by block: the same rows, one block's memory, and weights that come home."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared_offload.pipeline import passing
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.synth.models import t5_recipes
from shared_offload.synth.recipes import values
from shared_offload.synth.sizes import SIZES
from shared_offload.synth.tokenizer import write_tokenizer
from shared_offload.weights.fp8 import quantise_weight

PROMPTS = ["a train goes over a bridge in the snow", "", "blurry, static"]
TINY = SIZES["tiny"].t5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """fp32.pth, bf16.pth and fp8.pth of the same weights, and a tokenizer."""
    root = tmp_path_factory.mktemp("t5")
    write_tokenizer(root / "tokenizer")
    tensors = {n: values(r, n, 0, 0, r.shape[0]) for n, r in t5_recipes(TINY).items()}
    torch.save({n: t.float() for n, t in tensors.items()}, root / "fp32.pth")
    torch.save({n: t.bfloat16() for n, t in tensors.items()}, root / "bf16.pth")
    quantised = {}
    for name, tensor in tensors.items():
        if ".attn." in name or ".ffn." in name:
            quantised[name], quantised[name + "_scale"] = quantise_weight(tensor.float())
        else:
            quantised[name] = tensor.bfloat16()
    torch.save(quantised, root / "fp8.pth")
    return root


def load(folder: Path, file: str, dtype: torch.dtype, device="cpu", **options) -> TextEncoder:
    path = folder / f"{file}.pth"
    tokenizer = load_tokenizer(folder / "tokenizer")
    return TextEncoder.load(path, tokenizer, device=device, dtype=dtype, text_len=512, **options)


@pytest.fixture
def allocated(monkeypatch) -> list[int]:
    """Bytes of each place that layers share."""
    sizes: list[int] = []
    empty_like = torch.empty_like

    def watched(tensor, **options):
        sizes.append(tensor.nbytes)
        return empty_like(tensor, **options)

    monkeypatch.setattr(passing.torch, "empty_like", watched)
    return sizes


def test_each_layer_passes_once_for_all_prompts(folder, monkeypatch) -> None:
    encoder = load(folder, "bf16", torch.bfloat16, block_by_block=True)
    passed = []
    lend = passing.Passage.lend

    def watched(self, layer):
        passed.append(layer)
        return lend(self, layer)

    monkeypatch.setattr(passing.Passage, "lend", watched)
    encoder.encode(PROMPTS)
    stack = encoder._model.encoder
    assert passed == [*stack.block, stack.final_layer_norm]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("file", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)],
)
def test_rows_are_those_of_resident_weights(folder, allocated, file, dtype, inference) -> None:
    want = load(folder, file, dtype).encode(PROMPTS)
    with torch.inference_mode(inference):
        encoder = load(folder, file, dtype, block_by_block=True)
    block, norm = encoder._model.encoder.block[0], encoder._model.encoder.final_layer_norm
    one = sum(t.nbytes for m in (block, norm) for t in (*m.parameters(), *m.buffers()))
    for _ in range(2):
        allocated.clear()
        got = encoder.encode(PROMPTS)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert sum(allocated) == one


def test_weights_stay_the_map_of_the_file(folder, monkeypatch) -> None:
    encoder = load(folder, "bf16", torch.bfloat16, block_by_block=True)
    weights = list(encoder._model.parameters())
    before = [w.data_ptr() for w in weights]
    encoder.encode(PROMPTS[:1])
    encoder.move(torch.device("cpu"))
    assert [w.data_ptr() for w in weights] == before
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(a, 16) for a in m.split()[0].split("-")] for m in maps if "bf16.pth" in m]
    assert all(any(start <= p < end for start, end in spans) for p in before)


def test_weights_come_home_when_a_block_fails(folder, monkeypatch) -> None:
    encoder = load(folder, "bf16", torch.bfloat16, block_by_block=True)
    want = encoder.encode(PROMPTS)
    weights = list(encoder._model.parameters())
    before = [w.data_ptr() for w in weights]
    layer = encoder._model.encoder.block[1].layer[1]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encoder.encode(PROMPTS)
    assert [w.data_ptr() for w in weights] == before
    assert all(torch.equal(a, b) for a, b in zip(encoder.encode(PROMPTS), want, strict=True))


def test_close(folder) -> None:
    encoder = load(folder, "bf16", torch.bfloat16, block_by_block=True)
    encoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        encoder.encode(PROMPTS)


XXL_GPU_NBYTES = 3e9


@pytest.fixture(scope="module")
def xxl(tmp_path_factory) -> Path:
    """fp8.pth with the sizes of UMT5-XXL. Its blocks are one and the same on disk, to save time."""
    root = tmp_path_factory.mktemp("xxl")
    write_tokenizer(root / "tokenizer")
    size = SIZES["14b"].t5
    one: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, recipe in t5_recipes(size).items():
        key = name.split(".", 2)[-1] if name.startswith("blocks.") else name
        if ".attn." in name or ".ffn." in name:
            if key not in one:
                codes = torch.randint(0, 112, recipe.shape, dtype=torch.uint8)  # finite numbers
                one[key] = codes.view(torch.float8_e4m3fn)
                one[key + "_scale"] = torch.full((recipe.shape[0], 1), 1e-4)
            tensors[name + "_scale"] = one[key + "_scale"]
        elif key not in one:
            one[key] = torch.ones(recipe.shape, dtype=torch.bfloat16)
        tensors[name] = one[key]
    torch.save(tensors, root / "fp8.pth")
    return root


@pytest.mark.gpu
@pytest.mark.slow
def test_xxl_in_fp8_needs_less_than_3_gb_of_gpu_memory(xxl) -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    encoder = load(xxl, "fp8", torch.bfloat16, device, block_by_block=True)
    (rows,) = encoder.encode(["fox " * 600])
    assert rows.shape == (512, 4096)
    assert rows.device.type == "cuda"
    assert torch.cuda.max_memory_reserved() - before < XXL_GPU_NBYTES
    encoder.close()
    del rows
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 100e6


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["bf16", "fp8"])
def test_rows_on_a_gpu_are_those_of_resident_weights(folder, file) -> None:
    device = torch.device("cuda")
    want = load(folder, file, torch.bfloat16, device).encode(PROMPTS)
    got = load(folder, file, torch.bfloat16, device, block_by_block=True).encode(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
