"""The tokenizer files through transformers, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shared_offload.synth.tokenizer import TOKENIZER_FILES, vocabulary, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "google" / "umt5-xxl"
    write_tokenizer(path)
    return path


def test_files_and_ids(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == set(TOKENIZER_FILES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("")["input_ids"] == [1], "an empty prompt is the end token alone"
    batch = tokenizer(["a cat"], padding="max_length", max_length=8, truncation=True)
    ids, mask = batch["input_ids"][0], batch["attention_mask"][0]
    assert ids[sum(mask) - 1] == 1 and set(ids[sum(mask) :]) == {0} and len(ids) == 8
    long = tokenizer("cat " * 900, max_length=512, truncation=True)["input_ids"]
    assert len(long) == 512 and long[-1] == 1
    assert len({piece for piece, _ in vocabulary()}) == len(vocabulary()) <= 1024


@pytest.mark.parametrize(
    "text", ["A cat sits on a red sofa.", "Zyx 42!", "一只猫坐在红色的沙发上", "naïve 🚀", "a  b"]
)
def test_any_text_survives(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    assert 2 not in ids, "no unknown token"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_different_prompts_differ_and_words_are_single_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cat, dog = (tokenizer(f"A {animal}")["input_ids"] for animal in ("cat", "dogs"))
    assert len(cat) == len(dog) == 3 and cat[0] == dog[0] and cat[1] != dog[1]


def test_filled_up_to_the_size_of_umt5s(folder: Path, tmp_path: Path) -> None:
    """As many pieces and nearly as many bytes (16.8 MB), and no text gets other tokens."""
    write_tokenizer(tmp_path, pieces=256_384)
    large, small = (AutoTokenizer.from_pretrained(where) for where in (tmp_path, folder))
    assert len(large) == 256_384
    assert 10e6 < (tmp_path / "tokenizer.json").stat().st_size < 25e6
    text = "A cat sits, \u4e00\u53ea\u732b \U0001f680 ~12"
    assert large(text)["input_ids"] == small(text)["input_ids"]
