"""The numbers of a Wan DiT, read from its config.json, and the tensors that follow from them.

Invariant: names and shapes of a checkpoint are a function of `Architecture` alone; nothing else in
the project states which tensors a Wan model has. Names here are Wan's own, whatever the format on
disk; `names.py` maps diffusers' names to them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from shared_offload.errors import CheckpointError, raise_all

Phase = Literal["self_attn", "cross_attn", "ffn"]
PHASES: tuple[Phase, ...] = ("self_attn", "cross_attn", "ffn")

PATCH = (1, 2, 2)  # latent frames, rows and columns that make one token
MASK_CHANNELS = 4  # i2v: the mask beside the condition latent
MODULATIONS = 6  # shift, scale, gate of self-attention, then of the feed-forward
CONFIG_NAME = "config.json"

_MAX_CONFIG_BYTES = 1 << 20
_DIFFUSERS_CLASS = "WanTransformer3DModel"
_DIFFUSERS_TEXT_LEN = 512  # diffusers has no such key: its block splits off the last 512 rows
_NOTES = frozenset({"_class_name", "_diffusers_version", "_name_or_path"})
# Wan states these in code and not in config.json; a file that repeats them must agree.
_WAN_CONSTANTS: Mapping[str, object] = {
    "patch_size": list(PATCH),
    "qk_norm": True,
    "cross_attn_norm": True,
    "window_size": [-1, -1],
}
_DIFFUSERS_CONSTANTS: Mapping[str, object] = {
    "patch_size": list(PATCH),
    "qk_norm": "rms_norm_across_heads",
    "cross_attn_norm": True,
    "pos_embed_seq_len": None,  # set by first-and-last-frame models
    "rope_max_seq_len": 1024,
}
# field of Architecture -> key of diffusers' config
_DIFFUSERS_KEYS: Mapping[str, str] = {
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_heads": "num_attention_heads",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "num_layers": "num_layers",
    "text_dim": "text_dim",
    "eps": "eps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What config.json of a Wan folder says. Widths in channels; `eps` of the norms in blocks.

    `text_dim` (T5's output) and `image_dim` (CLIP's features) are constants of Wan that its
    config.json leaves out; small test models state them.
    """

    model_type: Literal["t2v", "i2v"]
    dim: int
    ffn_dim: int
    freq_dim: int
    in_dim: int
    out_dim: int
    num_heads: int
    num_layers: int
    text_len: int
    eps: float
    text_dim: int = 4096
    image_dim: int = 1280

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


_FIELDS = {field.name: field for field in dataclasses.fields(Architecture)}
_OPTIONAL = frozenset(n for n, f in _FIELDS.items() if f.default is not dataclasses.MISSING)


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a checkpoint folder, or of the folder of a single checkpoint file.

    Reads Wan's config.json, or diffusers' (of the folder or of its `transformer` subfolder).
    Raises CheckpointError, or Problems with everything that is wrong in the file.
    """
    path = _find_config(folder if folder.is_dir() else folder.parent)
    raw = _read_json(path)
    if raw.get("_class_name") == _DIFFUSERS_CLASS or "num_attention_heads" in raw:
        raw = _from_diffusers(raw, path)
    problems = _key_problems(raw, path) or _value_problems(raw, path)
    raise_all(problems)
    arch = Architecture(**{name: raw[name] for name in _FIELDS if name in raw})  # type: ignore[arg-type]
    raise_all(_relation_problems(arch, path))
    return arch


def write_config(arch: Architecture, path: Path) -> None:
    """Write Wan's config.json: its 12 keys, byte for byte in its style.

    `text_dim` and `image_dim` are added only where they differ from Wan's constants.
    """
    raw: dict[str, object] = {"_class_name": "WanModel", "_diffusers_version": "0.30.0"}
    for name, field in _FIELDS.items():
        value = getattr(arch, name)
        if name not in _OPTIONAL or value != field.default:
            raw[name] = value
    path.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def non_block_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Full names and shapes of the tensors outside the blocks."""
    dim, patch = arch.dim, math.prod(PATCH)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (dim, arch.in_dim, *PATCH),
        "patch_embedding.bias": (dim,),
        "head.modulation": (1, 2, dim),
    }
    shapes |= _linear("text_embedding.0", dim, arch.text_dim)
    shapes |= _linear("text_embedding.2", dim, dim)
    shapes |= _linear("time_embedding.0", dim, arch.freq_dim)
    shapes |= _linear("time_embedding.2", dim, dim)
    shapes |= _linear("time_projection.1", MODULATIONS * dim, dim)
    shapes |= _linear("head.head", arch.out_dim * patch, dim)
    if arch.model_type == "i2v":
        image = arch.image_dim
        shapes |= _affine("img_emb.proj.0", image)
        shapes |= _linear("img_emb.proj.1", image, image)
        shapes |= _linear("img_emb.proj.3", dim, image)
        shapes |= _affine("img_emb.proj.4", dim)
    return shapes


def block_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Names relative to `blocks.N.` and shapes of the tensors of one block."""
    dim = arch.dim
    shapes: dict[str, tuple[int, ...]] = {"modulation": (1, MODULATIONS, dim)}
    shapes |= _affine("norm3", dim)
    for attention in ("self_attn", "cross_attn"):
        for part in ("q", "k", "v", "o"):
            shapes |= _linear(f"{attention}.{part}", dim, dim)
        for norm in ("norm_q", "norm_k"):
            shapes[f"{attention}.{norm}.weight"] = (dim,)
    if arch.model_type == "i2v":
        shapes |= _linear("cross_attn.k_img", dim, dim)
        shapes |= _linear("cross_attn.v_img", dim, dim)
        shapes["cross_attn.norm_k_img.weight"] = (dim,)
    shapes |= _linear("ffn.0", arch.ffn_dim, dim)
    shapes |= _linear("ffn.2", dim, arch.ffn_dim)
    return shapes


def is_quantised(relative_name: str, shape: tuple[int, ...]) -> bool:
    """Whether an FP8 checkpoint stores this tensor of a block in FP8: 2-D weights of a phase."""
    return len(shape) == 2 and relative_name.split(".")[0] in PHASES


def _linear(name: str, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)}


def _affine(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _find_config(folder: Path) -> Path:
    candidates = (folder / CONFIG_NAME, folder / "transformer" / CONFIG_NAME)
    for path in candidates:
        if path.is_file():
            return path
    found = "has no config.json" if folder.is_dir() else "does not exist"
    raise CheckpointError(
        f"checkpoint folder {folder} {found}",
        expected="a Wan folder, or a diffusers folder with transformer/config.json",
        hint="give the folder that holds config.json and the DiT's safetensors files",
        path=str(candidates[0]),
    )


def _read_json(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}", hint="check its permissions", path=str(path)
        ) from error
    try:
        if len(data) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {_MAX_CONFIG_BYTES} bytes")
        raw = json.loads(data)
        if not isinstance(raw, dict):
            raise ValueError(f"its top level is {type(raw).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no JSON config: {error}",
            expected="the config.json of a Wan or diffusers DiT",
            hint="download the file again",
            path=str(path),
        ) from error
    return cast("dict[str, object]", raw)


def _from_diffusers(raw: dict[str, object], path: Path) -> dict[str, object]:
    """Wan's keys from diffusers' ones; problems are reported under diffusers' names."""
    derived = {"attention_head_dim", "image_dim", "added_kv_proj_dim"}
    known = {*_DIFFUSERS_KEYS.values(), *_DIFFUSERS_CONSTANTS, *derived, *_NOTES}
    required = {*_DIFFUSERS_KEYS.values(), "attention_head_dim"}
    raise_all(
        _unknown(raw, known, path)
        + _missing(raw, required, path)
        + _constant_problems(raw, _DIFFUSERS_CONSTANTS, path)
    )
    raise_all(_not_positive(raw, {"num_attention_heads", "attention_head_dim"}, path))
    width = cast("int", raw["num_attention_heads"]) * cast("int", raw["attention_head_dim"])
    image = raw.get("image_dim")
    if (raw.get("added_kv_proj_dim") or None) != (width if image else None):
        raise CheckpointError(
            f"{path}: image_dim is {image} but added_kv_proj_dim {raw.get('added_kv_proj_dim')}",
            expected=f"both null (t2v), or a width and {width} (i2v)",
            hint="only Wan 2.1 t2v and i2v models are supported",
            path=str(path),
            name="added_kv_proj_dim",
        )
    wan = {name: raw[key] for name, key in _DIFFUSERS_KEYS.items()}
    wan |= {"model_type": "t2v", "dim": width, "text_len": _DIFFUSERS_TEXT_LEN}
    return wan | ({"model_type": "i2v", "image_dim": image} if image else {})


def _key_problems(raw: Mapping[str, object], path: Path) -> list[CheckpointError]:
    return (
        _unknown(raw, {*_FIELDS, *_WAN_CONSTANTS, *_NOTES}, path)
        + _missing(raw, set(_FIELDS) - _OPTIONAL, path)
        + _constant_problems(raw, _WAN_CONSTANTS, path)
    )


def _value_problems(raw: Mapping[str, object], path: Path) -> list[CheckpointError]:
    problems = _not_positive(raw, set(_FIELDS) - {"model_type", "eps"}, path)
    eps = raw["eps"]
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
        problems.append(_bad_value(path, "eps", eps, "a number between 0 and 1"))
    if raw["model_type"] not in ("t2v", "i2v"):
        problems.append(_bad_value(path, "model_type", raw["model_type"], "'t2v' or 'i2v'"))
    return problems


def _relation_problems(arch: Architecture, path: Path) -> list[CheckpointError]:
    problems = []
    if arch.dim % arch.num_heads or arch.head_dim % 2 or arch.head_dim < 6:
        expected = "num_heads * an even head width of at least 6 (rotary pairs for three axes)"
        problems.append(_bad_value(path, "dim", arch.dim, expected))
    if arch.freq_dim % 2:
        problems.append(_bad_value(path, "freq_dim", arch.freq_dim, "an even number"))
    condition = MASK_CHANNELS + arch.out_dim if arch.model_type == "i2v" else 0
    if arch.in_dim != arch.out_dim + condition:
        expected = f"{arch.out_dim + condition} for {arch.model_type} with out_dim {arch.out_dim}"
        problems.append(_bad_value(path, "in_dim", arch.in_dim, expected))
    return problems


def _not_positive(raw: Mapping[str, object], keys: set[str], path: Path) -> list[CheckpointError]:
    bad = {k: raw[k] for k in sorted(keys & set(raw)) if type(raw[k]) is not int or raw[k] <= 0}  # type: ignore[operator]
    return [_bad_value(path, key, value, "a whole number above 0") for key, value in bad.items()]


def _unknown(raw: Mapping[str, object], known: set[str], path: Path) -> list[CheckpointError]:
    return [
        CheckpointError(
            f"{path}: unknown key {key}",
            hint=f"did you mean {near[0]}?" if near else "only Wan 2.1 t2v and i2v are supported",
            path=str(path),
            name=key,
        )
        for key in sorted(set(raw) - known)
        for near in [difflib.get_close_matches(key, known, n=1)]
    ]


def _missing(raw: Mapping[str, object], required: set[str], path: Path) -> list[CheckpointError]:
    return [
        CheckpointError(
            f"{path}: key {key} is missing",
            hint="download the config.json of this checkpoint again",
            path=str(path),
            name=key,
        )
        for key in sorted(required - set(raw))
    ]


def _constant_problems(
    raw: Mapping[str, object], constants: Mapping[str, object], path: Path
) -> list[CheckpointError]:
    return [
        _bad_value(path, key, raw[key], str(value))
        for key, value in constants.items()
        if key in raw and raw[key] != value
    ]


def _bad_value(path: Path, key: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {key} is {found!r}",
        expected=expected,
        hint="only Wan 2.1 t2v and i2v models are supported; check that config.json is theirs",
        path=str(path),
        name=key,
        found=found,
    )
