"""Who checks what was asked: JSON and flags become one frozen `Settings`."""

from __future__ import annotations

from shared_offload.config.load import load_settings, make_parser, read_json
from shared_offload.config.options import Options, Parallel
from shared_offload.config.paths import (
    clip_file,
    dit_path,
    find_file,
    t5_file,
    tokenizer_folder,
    vae_file,
)
from shared_offload.config.request import check_request
from shared_offload.config.settings import Settings

__all__ = [
    "Options",
    "Parallel",
    "Settings",
    "check_request",
    "clip_file",
    "dit_path",
    "find_file",
    "load_settings",
    "make_parser",
    "read_json",
    "t5_file",
    "tokenizer_folder",
    "vae_file",
]
