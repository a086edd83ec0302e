"""UMT5 from Wan-named files against transformers' module with the same weights."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from shared_offload.errors import CheckpointError, Problems
from shared_offload.pipeline.quantised import Fp8Linear
from shared_offload.pipeline.text_encoder import TextEncoder, clean
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.synth.tokenizer import write_tokenizer
from shared_offload.weights.fp8 import quantise_weight

TEXT_LEN = 16
PROMPTS = ["a red fox runs", "", "snow falls on the quiet red fox and the old house"]
WORDS = ["<pad>", "</s>", "<unk>", *sorted({w for p in PROMPTS for w in p.split()})]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def library_model() -> UMT5EncoderModel:
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=40, d_model=64, d_kv=24, d_ff=160, num_layers=3, num_heads=4,
        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = UMT5EncoderModel(config).eval()
    for name, weight in model.named_parameters():  # norms and tables away from 1 and 0 too
        scale = 0.2 if weight.ndim == 1 else 1.0 if "shared" in name else weight.shape[-1] ** -0.5
        if ".q." in name:  # UMT5 does not scale its scores: trained queries are small
            scale *= config.d_kv**-0.5
        weight.data = torch.randn_like(weight) * scale + (weight.ndim == 1)
    return model


def wan_names(model: UMT5EncoderModel) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    named = {
        "token_embedding.weight": state["shared.weight"],
        "norm.weight": state["encoder.final_layer_norm.weight"],
    }
    for n in range(model.config.num_layers):
        attention = f"encoder.block.{n}.layer.0."
        feed = f"encoder.block.{n}.layer.1."
        own = {
            "norm1": attention + "layer_norm",
            "norm2": feed + "layer_norm",
            "pos_embedding.embedding": attention + "SelfAttention.relative_attention_bias",
            "ffn.gate.0": feed + "DenseReluDense.wi_0",
            "ffn.fc1": feed + "DenseReluDense.wi_1",
            "ffn.fc2": feed + "DenseReluDense.wo",
            **{f"attn.{p}": f"{attention}SelfAttention.{p}" for p in "qkvo"},
        }
        named |= {f"blocks.{n}.{w}.weight": state[f"{lib}.weight"] for w, lib in own.items()}
    return {name: tensor.clone() for name, tensor in named.items()}


def fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As LightX2V's converter writes it: linear weights FP8, scales and the rest bf16."""
    out = {}
    for name, tensor in tensors.items():
        if ".attn." in name or ".ffn." in name:
            out[name], scale = quantise_weight(tensor)
            out[name + "_scale"] = scale.bfloat16()
        else:
            out[name] = tensor.bfloat16()
    return out


def load(path: Path, tokenizer_path: Path, dtype=torch.float32) -> TextEncoder:
    tokenizer = load_tokenizer(tokenizer_path)
    return TextEncoder.load(path, tokenizer, device="cpu", dtype=dtype, text_len=TEXT_LEN)


@pytest.fixture(scope="module")
def wan_file(library_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("t5") / "t5.pth"
    torch.save(wan_names(library_model), path)
    return path


@pytest.fixture
def no_network(monkeypatch) -> None:
    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    noise = (got.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise))


@torch.no_grad()
def test_rows_are_the_librarys_on_padded_and_masked_input(
    wan_file, tokenizer_path, library_model, no_network
) -> None:
    """Wan pads to text_len, masks and cuts; we never pad. The empty prompt has its end token."""
    encoder = load(wan_file, tokenizer_path)
    rows = encoder.encode(PROMPTS)
    for prompt, got in zip(PROMPTS, rows, strict=True):
        ids = [*(WORDS.index(w) for w in prompt.split()), 1]
        padded = torch.tensor([ids + [0] * (TEXT_LEN - len(ids))])
        mask = (torch.arange(TEXT_LEN) < len(ids)).long()[None]
        want = library_model(input_ids=padded, attention_mask=mask).last_hidden_state[0]
        assert got.shape == (len(ids), 64)
        torch.testing.assert_close(got, want[: len(ids)], rtol=1e-5, atol=1e-5)


def test_long_prompts_are_cut_and_keep_their_end(wan_file, tokenizer_path) -> None:
    encoder = load(wan_file, tokenizer_path)
    cut, exact = encoder.encode(["red fox " * 50, "red fox " * 7 + "red"])
    assert cut.shape == (TEXT_LEN, 64)
    torch.testing.assert_close(cut, exact)


def test_each_weight_exists_once(wan_file, tokenizer_path, library_model) -> None:
    """The token table is tied: two names, one memory; and the file's own map, not a copy."""
    encoder = load(wan_file, tokenizer_path)
    numbers = sum(p.numel() for p in library_model.parameters())
    assert (encoder.num_parameters, encoder.nbytes, encoder.dim) == (numbers, 4 * numbers, 64)
    table = encoder._model.shared.weight
    assert table.data_ptr() == encoder._model.encoder.embed_tokens.weight.data_ptr()
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(a, 16) for a in m.split()[0].split("-")] for m in maps if str(wan_file) in m]
    assert any(start <= table.data_ptr() < end for start, end in spans)


def test_fp8_keeps_the_features(wan_file, tokenizer_path, library_model, tmp_path) -> None:
    torch.save(fp8(wan_names(library_model)), tmp_path / "fp8.pth")
    exact, bf16, quantised = (
        torch.cat(load(path, tokenizer_path, dtype).encode(PROMPTS))
        for path, dtype in (
            (wan_file, torch.float32),
            (wan_file, torch.bfloat16),
            (tmp_path / "fp8.pth", torch.bfloat16),
        )
    )
    assert quantised.dtype == torch.bfloat16
    assert sqnr_db(bf16, exact) > 36
    assert sqnr_db(quantised, exact) > 20


def test_fp8_weights_stay_fp8_and_their_scales_matter(
    tokenizer_path, library_model, tmp_path
) -> None:
    tensors = fp8(wan_names(library_model))
    torch.save(tensors, tmp_path / "fp8.pth")
    encoder = load(tmp_path / "fp8.pth", tokenizer_path, torch.bfloat16)
    layers = [m for m in encoder._model.modules() if isinstance(m, Fp8Linear)]
    assert len(layers) == 7 * library_model.config.num_layers
    assert all(m.codes.dtype == torch.float8_e4m3fn for m in layers)
    assert encoder.num_parameters == sum(p.numel() for p in library_model.parameters())
    before = encoder.encode(PROMPTS[:1])[0]
    tensors["blocks.0.attn.v.weight_scale"] *= 1.1
    torch.save(tensors, tmp_path / "other.pth")
    after = load(tmp_path / "other.pth", tokenizer_path, torch.bfloat16).encode(PROMPTS[:1])[0]
    assert sqnr_db(after, before) < 35


def change(name: str, value):
    return lambda tensors: tensors.update({name: value(tensors)})


FAULTS = {
    "are missing": lambda tensors: tensors.pop("blocks.1.ffn.fc2.weight"),
    "are unexpected": change("blocks.1.ffn.fc3.weight", lambda t: t["norm.weight"]),
    "have a wrong shape": change("blocks.1.ffn.fc2.weight", lambda t: t["norm.weight"][:, None]),
    "have a wrong dtype": change(
        "blocks.1.attn.k.weight", lambda t: t["blocks.1.attn.k.weight"].view(torch.int8)
    ),
    "have a scale or are FP8, but not both": lambda tensors: tensors.pop(
        "blocks.1.attn.k.weight_scale"
    ),
    "are not usable as scales": change(
        "blocks.1.attn.k.weight_scale", lambda t: -t["blocks.1.attn.k.weight_scale"]
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_name_their_tensors(kind, tokenizer_path, library_model, tmp_path) -> None:
    tensors = fp8(wan_names(library_model))
    FAULTS[kind](tensors)
    torch.save(tensors, tmp_path / "broken.pth")
    with pytest.raises((CheckpointError, Problems)) as caught:
        load(tmp_path / "broken.pth", tokenizer_path)
    found = caught.value
    errors = found.errors if isinstance(found, Problems) else (found,)
    facts = next(e.facts for e in errors if e.facts["kind"] == kind)
    assert facts["path"] == str(tmp_path / "broken.pth")
    assert len(facts["names"]) == 1
    assert "block.1." in facts["names"][0] or "blocks.1." in facts["names"][0]


def test_all_faults_come_together(tokenizer_path, library_model, tmp_path) -> None:
    tensors = fp8(wan_names(library_model))
    FAULTS["are missing"](tensors)
    FAULTS["are unexpected"](tensors)
    torch.save(tensors, tmp_path / "broken.pth")
    with pytest.raises(Problems) as caught:
        load(tmp_path / "broken.pth", tokenizer_path)
    kinds = [e.facts["kind"] for e in caught.value.errors]
    assert "are missing" in kinds
    assert "are unexpected" in kinds


def test_another_models_file(tokenizer_path, tmp_path) -> None:
    torch.save({"encoder.conv1.weight": torch.zeros(2)}, tmp_path / "vae.pth")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "vae.pth", tokenizer_path)
    assert caught.value.facts["name"] == "token_embedding.weight"


def test_tokens_are_those_of_the_file_whatever_class_its_folder_names(tmp_path) -> None:
    """Wan's folder names T5Tokenizer, which in transformers 5 takes from the file its words alone.

    The expected tokens are written down here: NFKC makes U+FF0C, the comma of Chinese writing, one
    of ours, and what the vocabulary lacks is spelt in the bytes of UTF-8.
    """
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "T5Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)

    def spelt(character: str) -> list[str]:
        return [f"<0x{byte:02X}>" for byte in character.encode()]

    expected = ["▁A", "▁cat", ",", "▁", *spelt("帆"), *spelt("船"), "</s>"]
    assert tokenizer.encode("A cat\uff0c 帆船").tokens == expected
    assert tokenizer.encode("").tokens == ["</s>"]


def test_a_tokenizer_without_an_end_is_told(tmp_path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    with pytest.raises(CheckpointError, match="ends an empty prompt with"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer(tmp_path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path / "no" / "umt5-xxl")
    assert caught.value.facts["path"] == str(tmp_path / "no" / "umt5-xxl")


def test_a_broken_tokenizer(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.facts["path"] == str(tmp_path / "tokenizer.json")


def test_a_tokenizer_of_another_model(tokenizer_path, library_model, tmp_path) -> None:
    tensors = wan_names(library_model)
    tensors["token_embedding.weight"] = tensors["token_embedding.weight"][:5].clone()
    torch.save(tensors, tmp_path / "t5.pth")
    encoder = load(tmp_path / "t5.pth", tokenizer_path)
    with pytest.raises(CheckpointError, match="knows 5"):
        encoder.encode(PROMPTS)


def test_overflow_is_an_error_and_not_a_black_video(
    tokenizer_path, library_model, tmp_path
) -> None:
    tensors = wan_names(library_model)
    tensors["blocks.0.ffn.fc1.weight"] *= 1e4
    tensors["blocks.0.ffn.gate.0.weight"] *= 1e4
    torch.save(tensors, tmp_path / "t5.pth")
    with pytest.raises(CheckpointError, match="not finite"):
        load(tmp_path / "t5.pth", tokenizer_path, torch.float16).encode(PROMPTS)


def test_loads_inside_inference_mode_and_works_outside(wan_file, tokenizer_path) -> None:
    with torch.inference_mode():
        encoder = load(wan_file, tokenizer_path, torch.bfloat16)
    assert not any(p.requires_grad for p in encoder._model.parameters())
    assert not encoder._model.training  # dropout would make two calls differ
    assert torch.equal(encoder.encode(PROMPTS)[0], encoder.encode(PROMPTS[:1])[0])


def test_close_is_idempotent(wan_file, tokenizer_path) -> None:
    encoder = load(wan_file, tokenizer_path)
    encoder.close()
    encoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        encoder.encode(PROMPTS)


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  two\n\tlines \u3000 here ", "two lines here"),
        ("Tom &amp;amp; Jerry &lt;3", "Tom & Jerry <3"),  # unescaped twice, not lower-cased
        ("schÃ¶n", "sch\u00f6n"),  # UTF-8 read as Latin-1
        ("&nbsp;&amp;nbsp;", ""),
    ],
)
def test_cleaning(prompt: str, cleaned: str) -> None:
    assert clean(prompt) == cleaned
