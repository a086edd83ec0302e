"""A small tokenizer in the form of umT5's files: google/umt5-xxl of a Wan folder.

A unigram model over words, letters and the 256 bytes: any text encodes, in any script, since what
is not a word is spelt in letters and what is not a known letter in bytes. `<pad>` is 0 and `</s>`,
added at the end, is 1, as in umT5.
"""

from __future__ import annotations

import json
import math
import string
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
WORD_START = "\u2581"  # sentencepiece's mark for the space before a word
BYTE_SCORE = -20.0  # log probabilities: a byte is the last resort, then a letter
LETTER_SCORE = -12.0
FILLER_SCORE = -30.0
FILLER_START, FILLER_DIGITS = 0xE000, 0x1000  # characters that Unicode gives to nobody

SENTENCES = """
A cat sits on a red sofa and looks out of the window at the rain.
Two dogs run along the beach at sunset while waves break on the sand.
A woman in a white dress walks slowly through a field of yellow flowers.
An old man plays the piano in a small room lit by a single lamp.
The camera moves forward over a quiet lake with mountains in the background.
A city street at night, neon lights, people with umbrellas, cinematic style.
A robot paints a picture of a tree in bright colours, close up, high detail.
A ship sails across a stormy sea under a dark sky, dramatic light, slow motion.
Children fly a blue kite on a green hill in the summer wind.
A train goes over a bridge in the snow, seen from above, realistic, 4k video.
low quality, blurry, static, overexposed, worst quality, bad hands, still picture
""".strip()


def write_tokenizer(
    folder: Path, sentences: str = SENTENCES, *, lowercase: bool = False, pieces: int = 0
) -> None:
    """Write the files of TOKENIZER_FILES; transformers' AutoTokenizer reads them offline.

    Words of `sentences` become tokens. With `lowercase` the tokenizer does not tell A from a. Up to
    `pieces` are filled up by some that no text has: a file as large as umT5's takes time to read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = {"eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN}
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    known = vocabulary(sentences.lower() if lowercase else sentences)
    tokenizer = _tokenizer([*known, *_filler(pieces - len(known))], lowercase=lowercase)
    contents = (tokenizer.to_str(pretty=True), _json(config), _json(special))
    for name, content in zip(TOKENIZER_FILES, contents, strict=True):
        (folder / name).write_text(content, encoding="utf-8")


def vocabulary(sentences: str = SENTENCES) -> list[tuple[str, float]]:
    """Pieces and their log probabilities; the index of a piece is its token id."""
    words = Counter(sentences.replace(",", " ,").replace(".", " .").split())
    total = sum(words.values())
    pieces = [(PAD, 0.0), (END, 0.0), (UNKNOWN, 0.0)]
    pieces += [(f"<0x{byte:02X}>", BYTE_SCORE) for byte in range(256)]
    pieces += [(c, LETTER_SCORE) for c in (WORD_START, *_printable())]
    known = {piece for piece, _ in pieces}
    for word, count in sorted(words.items()):
        score = math.log(count / total)
        pieces += [(p, score) for p in (WORD_START + word, word) if p not in known]
        known |= {WORD_START + word, word}
    return pieces


def _filler(count: int) -> list[tuple[str, float]]:
    digits = (divmod(number, FILLER_DIGITS) for number in range(count))
    return [(chr(FILLER_START + a) + chr(FILLER_START + b), FILLER_SCORE) for a, b in digits]


def _printable() -> str:
    return string.ascii_letters + string.digits + string.punctuation


def _tokenizer(pieces: list[tuple[str, float]], *, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    if lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(WORD_START)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(WORD_START), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, 1)]
    )
    return tokenizer


def _json(content: object) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
