"""Captions as token ids, and as rows for the DiT.

The DiT attends to 512 rows of which all after a caption's own are alike (embedded zeros). Training
computes E rows only and gives the zero rows among them the weight of all that are left out: the
same softmax at a twentieth of the cost. Shape letters: B prompts, E token places, D T5's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_offload.pipeline import libraries
from shared_offload.pipeline.text_encoder import clean
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.synth.tokenizer import SENTENCES, write_tokenizer
from tools.train_demo.clips import captions, combinations

PLACES = 24  # token places of a caption, its end and one empty place included
END = 1
FIRST_WORD = 3  # ids below are <pad>, </s>, <unk>
JUNK_TOKENS = 20  # at most, in a caption that says nothing


def make_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files: the words of all captions, some others, letters and bytes."""
    said = [caption for names in combinations() for caption in captions(names)]
    write_tokenizer(folder, "\n".join([*said, SENTENCES]), lowercase=True)


def caption_table(folder: Path) -> Tensor:
    """Token ids (combinations, captions of each, E), 0 where a caption has ended."""
    tokenizer = load_tokenizer(folder)
    return torch.stack([token_ids(tokenizer, captions(names)) for names in combinations()])


def token_ids(tokenizer: libraries.Tokenizer, prompts: Sequence[str]) -> Tensor:
    """(B, E) ids of prompts that must fit."""
    rows = [tokenizer.encode(clean(prompt)).ids for prompt in prompts]
    if (longest := max(map(len, rows))) >= PLACES:
        raise ValueError(f"a prompt has {longest} tokens, at most {PLACES - 1} fit")
    return torch.tensor([row + [0] * (PLACES - len(row)) for row in rows])


def no_caption(count: int, device: torch.device) -> Tensor:
    """The ids of an empty prompt: its end alone."""
    ids = torch.zeros(count, PLACES, dtype=torch.int64, device=device)
    ids[:, 0].fill_(END)
    return ids


def junk(count: int, vocabulary: int, device: torch.device) -> Tensor:
    """Ids of tokens at random: a prompt in words that the model does not know says nothing."""
    places = torch.arange(PLACES, device=device)
    words = torch.randint(FIRST_WORD, vocabulary, (count, PLACES), device=device)
    length = torch.randint(1, JUNK_TOKENS + 1, (count, 1), device=device)
    return torch.where(places < length, words, (places == length).long() * END)


def encode(t5: Any, ids_BE: Tensor) -> Tensor:  # noqa: ANN401  transformers has no types
    """T5's rows (B, E, D), zero where a prompt has ended."""
    real = (ids_BE > 0).long()
    rows = t5(input_ids=ids_BE, attention_mask=real).last_hidden_state
    return rows * real[..., None]


def row_bias(ids_BE: Tensor, text_len: int) -> Tensor:
    """What to add to attention's logits, (B, 1, 1, E): log of the rows that each row stands for."""
    real = ids_BE > 0
    count = real.sum(1, keepdim=True)
    stands_for = torch.where(real, 1.0, (text_len - count) / (PLACES - count))
    return stands_for.log()[:, None, None]
