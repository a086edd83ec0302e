"""Wan 2.1 video generation with one host copy of the DiT weights, streamed to every GPU."""

__version__ = "0.1.0"
