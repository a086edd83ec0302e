"""Prompts to rows of text features: UMT5 from Wan's own files, through tokenizers and transformers.

Invariant: only real tokens are encoded and returned (the end token included), so a prompt's rows
depend neither on padding nor on the prompts beside it; the DiT pads with zeros. Nothing is looked
up on the network. Shape letters: E real text tokens of one prompt, D width of the encoder.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ftfy
import torch
from torch import Tensor

from shared_offload.errors import CheckpointError
from shared_offload.pipeline import libraries, module_weights
from shared_offload.pipeline.courier import courier_to
from shared_offload.pipeline.module_weights import OnBytes, told_to_nobody
from shared_offload.pipeline.passing import Passage
from shared_offload.weights.pth import load_pth

BLOCK_NAMES = {  # Wan's name within blocks.N. -> transformers' within encoder.block.N.
    "norm1": "layer.0.layer_norm",
    "norm2": "layer.1.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
TOP_NAMES = {
    "token_embedding.weight": ("shared.weight", "encoder.embed_tokens.weight"),
    "norm.weight": ("encoder.final_layer_norm.weight",),
}


class TextEncoder:
    """UMT5's encoder with its tokenizer; `close` frees the weights."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401  transformers has no types
        tokenizer: libraries.Tokenizer,
        *,
        text_len: int,
        source: Path,
        passing_through: torch.device | None = None,
    ) -> None:
        self._model = model
        self._passing_through = passing_through
        self._tokenizer = tokenizer
        self._tokenizer.enable_truncation(text_len)
        self._source = source
        self.dim: int = model.config.d_model
        self.nbytes = module_weights.count_bytes(model)
        self.num_parameters = module_weights.count_parameters(model)

    @classmethod
    def load(
        cls,
        path: Path,
        tokenizer: libraries.Tokenizer,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        text_len: int,
        block_by_block: bool = False,
        on_bytes: OnBytes = told_to_nobody,
    ) -> TextEncoder:
        """From a .pth file (bf16, fp32 or FP8).

        With `block_by_block` the weights stay in host memory (as the file's own map where the dtype
        fits): tokens are looked up there, and `encode` takes block after block through `device`,
        which needs memory for one block. The rows are the same, bit for bit.

        The sizes are read from the tensors. Raises CheckpointError or Problems. Peak memory: the
        weights, once.
        """
        tensors = load_pth(path)
        config = read_config(tensors, path)
        with torch.device("meta"):
            model = libraries.UMT5EncoderModel(config)
        device = torch.device(device)
        home = torch.device("cpu") if block_by_block else device
        module_weights.assign(
            model, rename(tensors), path=path, device=home, dtype=dtype, on_bytes=on_bytes
        )
        through = device if block_by_block else None
        return cls(model, tokenizer, text_len=text_len, source=path, passing_through=through)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], on_bytes: OnBytes = told_to_nobody) -> list[Tensor]:
        """One (E, D) tensor for each prompt; E is at most `text_len`, an empty prompt has 1 row.

        `on_bytes` is told of weights that went to the device for this call.
        """
        tokens_1E = [self._tokenize(prompt) for prompt in prompts]
        if self._passing_through is not None:
            rows_1ED = self._pass_through(tokens_1E, self._passing_through, on_bytes)
        else:
            device = self._model.device
            rows_1ED = [self._model(input_ids=t.to(device)).last_hidden_state for t in tokens_1E]
        self._check_finite(rows_1ED)
        return [rows[0] for rows in rows_1ED]

    def _pass_through(
        self, tokens_1E: Sequence[Tensor], device: torch.device, on_bytes: OnBytes
    ) -> list[Tensor]:
        """What the model does, but each layer for all prompts before the next one."""
        stack = self._model.encoder
        rows_1ED = [self._model.shared(tokens).to(device) for tokens in tokens_1E]
        with courier_to(device) as courier:
            passage = Passage(courier)
            for layer in (*stack.block, stack.final_layer_norm):
                with passage.lend(layer):
                    outputs = [layer(rows) for rows in rows_1ED]
                on_bytes(module_weights.count_bytes(layer))
                # Some versions of the library return a tuple.
                rows_1ED = [out if isinstance(out, Tensor) else out[0] for out in outputs]
        return rows_1ED

    @property
    def passes(self) -> bool:
        """The weights go to the device block by block, in every `encode`."""
        return self._passing_through is not None

    def move(self, device: torch.device) -> None:
        """Put the weights on a device; those that go block by block stay in host memory."""
        if self._passing_through is None:
            module_weights.move(self._model, device)

    def close(self) -> None:
        """Free the weights. Idempotent; `encode` cannot be called afterwards."""
        self._model = None

    def _tokenize(self, prompt: str) -> Tensor:
        """(1, E) token ids, on the CPU."""
        if self._model is None:
            raise RuntimeError("the text encoder is closed")
        ids: list[int] = self._tokenizer.encode(clean(prompt)).ids
        vocabulary = self._model.config.vocab_size
        if not ids or max(ids) >= vocabulary:
            raise CheckpointError(
                f"the tokenizer turns a prompt into {len(ids)} tokens, the largest "
                f"{max(ids, default=None)}; {self._source.name} knows {vocabulary}",
                expected="a tokenizer and an encoder of the same model",
                path=str(self._source),
            )
        return torch.tensor([ids])

    def _check_finite(self, rows_1ED: Sequence[Tensor]) -> None:
        if not all(bool(torch.isfinite(rows).all()) for rows in rows_1ED):
            raise CheckpointError(
                f"{self._source.name} gives text features that are not finite "
                f"in {rows_1ED[0].dtype}",
                expected="finite numbers",
                hint="UMT5 overflows in float16: use bfloat16 or float32",
                path=str(self._source),
            )


def clean(prompt: str) -> str:
    """The prompt as Wan tokenizes it: mended, html-unescaped twice, white space collapsed."""
    unescaped = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", unescaped.strip()).strip()


def read_config(tensors: Mapping[str, Tensor], path: Path) -> libraries.UMT5Config:
    """The sizes that the tensors of Wan's .pth file say; CheckpointError where they cannot."""
    vocabulary, dim = module_weights.need(tensors, "token_embedding.weight", 2, path)
    bias = "blocks.0.pos_embedding.embedding.weight"
    buckets, heads = module_weights.need(tensors, bias, 2, path)
    inner, _ = module_weights.need(tensors, "blocks.0.attn.q.weight", 2, path)
    hidden, _ = module_weights.need(tensors, "blocks.0.ffn.fc1.weight", 2, path)
    return libraries.UMT5Config(
        vocab_size=vocabulary,
        d_model=dim,
        d_kv=inner // heads,
        d_ff=hidden,
        num_layers=module_weights.layer_count(tensors, "blocks."),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=128,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )


def rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wan's names to those of UMT5EncoderModel; unknown names stay, to be reported."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for target in TOP_NAMES.get(name, (_block_name(name),)):
            renamed[target] = tensor
    return renamed


def _block_name(name: str) -> str:
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|weight_scale)", name)
    if match is None or match[2] not in BLOCK_NAMES:
        return name
    return f"encoder.block.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"
