from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
from diffusers import WanTransformer3DModel

from shared_offload.errors import CheckpointError, Problems
from shared_offload.weights.architecture import (
    block_shapes,
    is_quantised,
    non_block_shapes,
    read_architecture,
    write_config,
)

# Of the config.json in the official T2V-1.3B folder.
SHA256_1_3B = "ab37994c43740513f94b3ba6233a784035a67b43c8cde83c8f31aa90468c67ce"
# Counted in the official model class: per block, its 2-D linear weights, outside the blocks.
PARAMETERS = {
    "t2v-1.3B": (46_440_704, 46_399_488, 25_775_680),
    "t2v-14B": (351_394_304, 351_272_960, 232_719_424),
    "i2v-14B": (403_838_464, 403_701_760, 241_340_224),
}


def test_config_is_wans_byte_for_byte(tmp_path: Path, published) -> None:
    write_config(published["t2v-1.3B"], tmp_path / "config.json")
    assert hashlib.sha256((tmp_path / "config.json").read_bytes()).hexdigest() == SHA256_1_3B


def test_round_trip(tmp_path: Path, published, small_arch) -> None:
    for arch in [*published.values(), small_arch("t2v"), small_arch("i2v")]:
        write_config(arch, tmp_path / "config.json")
        assert read_architecture(tmp_path) == arch
        assert read_architecture(tmp_path / "some.safetensors") == arch


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(published, name: str) -> None:
    block = block_shapes(published[name])
    quantised = {k: v for k, v in block.items() if is_quantised(k, v)}
    outside = non_block_shapes(published[name])
    counts = tuple(sum(map(math.prod, t.values())) for t in (block, quantised, outside))
    assert counts == PARAMETERS[name]
    assert len(quantised) == (12 if name.startswith("i2v") else 10)


@pytest.mark.parametrize("image", [None, 40])
def test_config_written_by_diffusers(tmp_path: Path, small_arch, image: int | None) -> None:
    model = WanTransformer3DModel(
        num_attention_heads=8, attention_head_dim=8, in_channels=36 if image else 16,
        out_channels=16, text_dim=48, freq_dim=32, ffn_dim=96, num_layers=3, image_dim=image,
        added_kv_proj_dim=64 if image else None,
    )  # fmt: skip
    model.save_config(tmp_path / "transformer")
    expected = small_arch("i2v" if image else "t2v", text_len=512)
    expected = expected if image else small_arch("t2v", text_len=512, image_dim=1280)
    assert read_architecture(tmp_path) == expected
    assert read_architecture(tmp_path / "transformer") == expected


def broken(tmp_path: Path, arch, **changes: object) -> list[CheckpointError]:
    write_config(arch, path := tmp_path / "config.json")
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}, default=str))
    with pytest.raises((CheckpointError, Problems)) as caught:
        read_architecture(tmp_path)
    errors = getattr(caught.value, "errors", (caught.value,))
    assert all(e.facts["path"] == str(path) and e.hint for e in errors)
    return list(errors)


def test_all_bad_keys_at_once(tmp_path: Path, small_arch) -> None:
    write_config(small_arch(), path := tmp_path / "config.json")
    raw = json.loads(path.read_text())
    del raw["dim"], raw["eps"]
    path.write_text(json.dumps(raw | {"num_head": 8, "qk_norm": False}))
    with pytest.raises(Problems) as caught:
        read_architecture(tmp_path)
    assert {e.facts["name"] for e in caught.value.errors} == {"dim", "eps", "num_head", "qk_norm"}
    hints = {e.facts["name"]: e.hint for e in caught.value.errors}
    assert hints["num_head"] == "did you mean num_heads?"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dim": 0, "ffn_dim": "96", "num_layers": True}, {"dim", "ffn_dim", "num_layers"}),
        ({"eps": 2, "model_type": "vace"}, {"eps", "model_type"}),
        ({"dim": 60}, {"dim"}),
        ({"dim": 32, "freq_dim": 31}, {"dim", "freq_dim"}),
        ({"in_dim": 36}, {"in_dim"}),
        ({"model_type": "i2v"}, {"in_dim"}),
        ({"patch_size": [2, 2, 2]}, {"patch_size"}),
    ],
)
def test_bad_values(tmp_path: Path, small_arch, changes, names: set[str]) -> None:
    assert {e.facts["name"] for e in broken(tmp_path, small_arch(), **changes)} == names


@pytest.mark.parametrize("text", ["", "{", "[]", "<html>", "\xff", "[" * 100_000, '{"dim": 9e'])
def test_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="config"):
        read_architecture(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError) as caught:
            read_architecture(folder)
        assert caught.value.facts["path"].endswith("config.json")


def test_first_and_last_frame_model_of_diffusers_is_refused(tmp_path: Path) -> None:
    model = WanTransformer3DModel(
        num_attention_heads=8, attention_head_dim=8, in_channels=36, out_channels=16, text_dim=48,
        freq_dim=32, ffn_dim=96, num_layers=1, image_dim=40, added_kv_proj_dim=64,
        pos_embed_seq_len=8,
    )  # fmt: skip
    model.save_config(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_architecture(tmp_path)
    assert caught.value.facts["name"] == "pos_embed_seq_len"
