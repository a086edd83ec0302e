"""umT5's tokenizer, from the folder of Wan's release.

Apart from the encoder, so that who only checks files imports nothing that encodes.
"""

from __future__ import annotations

from pathlib import Path

from shared_offload.errors import CheckpointError
from shared_offload.pipeline import libraries
from shared_offload.weights.files import read_head

TOKENIZER_FILE = "tokenizer.json"
END_TOKEN = "</s>"


def tokenizer_file(folder: Path) -> Path:
    """What `load_tokenizer` reads; CheckpointError if it is missing, a pointer or a web page."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(
            f"there is no {TOKENIZER_FILE} in {folder}",
            expected="the folder google/umt5-xxl of Wan's release, with all its files",
            hint="download it again, or set t5_tokenizer_path",
            path=str(folder),
        )
    read_head(file)  # raises
    return file


def load_tokenizer(path: Path) -> libraries.Tokenizer:
    """The tokenizer of a folder, as its tokenizer.json says. Raises CheckpointError.

    Not through transformers, whose class T5Tokenizer, the one that Wan's folder names, takes the
    vocabulary alone since version 5: it maps no character to a simpler form, spells none in bytes,
    and takes token 2 for the unknown one. In umT5 that is another, and Wan's negative prompt
    is Chinese, whose commas the file maps to ours.
    """
    file = tokenizer_file(path)
    try:
        tokenizer = libraries.Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        empty = tokenizer.encode("").tokens
    except Exception as error:  # the library raises bare Exception, for broken JSON for one
        raise CheckpointError(f"{file} cannot be read ({error})", path=str(file)) from error
    if empty[-1:] != [END_TOKEN]:
        raise CheckpointError(
            f"{file} ends an empty prompt with {empty}",
            expected=f"{END_TOKEN} at the end of every prompt",
            hint="is this umT5's tokenizer?",
            path=str(file),
        )
    return tokenizer
