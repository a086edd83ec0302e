"""LoRA: merged weights against float64 sums, every spelling of a key, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import WanLoraLoaderMixin
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_offload.cli import main
from shared_offload.errors import CheckpointError, OffloadError, Problems
from shared_offload.weights.architecture import write_config
from shared_offload.weights.cast import buffer_view, fill_tensors, read_tensors
from shared_offload.weights.checkpoint import Checkpoint, open_checkpoint
from shared_offload.weights.convert import plan_conversion
from shared_offload.weights.lora import LoraFile, with_loras
from shared_offload.weights.lora_keys import KeyTable
from shared_offload.weights.reader import block_pieces
from shared_offload.weights.views import views
from tests.reference.diffusers_dit import rename

RANK = 4
Tensors = dict[str, Tensor]


class Model:
    """A small unquantised checkpoint on disk, and what merging into it should give."""

    def __init__(self, folder: Path, arch, tensors: Tensors) -> None:
        self.folder, self.arch, self.tensors = folder, arch, tensors
        write_config(arch, folder / "config.json")
        self.checkpoint = open_checkpoint(folder, arch, quantised=False, task=arch.model_type)

    def matrices(self) -> list[str]:
        """Modules with a weight that a pair can change: linear ones and the patch convolution."""
        weights = [n for n, t in self.tensors.items() if t.ndim > 1 and n.endswith(".weight")]
        return [name.removesuffix(".weight") for name in weights]

    def pair(self, module: str, seed: int = 0) -> tuple[Tensor, Tensor]:
        weight = self.tensors[f"{module}.weight"]
        generator = torch.Generator().manual_seed(seed + hash_of(module))
        down = torch.randn(RANK, *weight.shape[1:], generator=generator)
        up = torch.randn(len(weight), RANK, *[1] * (weight.ndim - 2), generator=generator)
        return down, up


def hash_of(text: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(text)) * 1000


@pytest.fixture
def model(tmp_path, small_arch, random_tensors, write_checkpoint) -> Callable[..., Model]:
    def make(dtype: torch.dtype = torch.float32, task: str = "i2v") -> Model:
        arch = small_arch(task)
        tensors = random_tensors(arch, dtype)
        folder = write_checkpoint(tmp_path / f"wan {task} {dtype}", tensors, "shards")
        return Model(folder, arch, tensors)

    return make


def save(path: Path, tensors: Tensors, **notes: str) -> Path:
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, notes or None)
    return path


def pairs(model: Model, modules: list[str], dtype=torch.float32, seed: int = 0) -> Tensors:
    """In ComfyUI's style."""
    found: Tensors = {}
    for module in modules:
        down, up = model.pair(module, seed)
        found[f"diffusion_model.{module}.lora_down.weight"] = down.to(dtype)
        found[f"diffusion_model.{module}.lora_up.weight"] = up.to(dtype)
    return found


def product(lora: Tensors, module: str) -> Tensor:
    """up @ down in float64, from what is in the file."""
    down, up = (
        lora[f"diffusion_model.{module}.lora_{which}.weight"].double() for which in ("down", "up")
    )
    return up.flatten(1) @ down.flatten(1)


def read_all(checkpoint: Checkpoint, compute: str, threads: int = 3) -> Tensors:
    """Every tensor as a run has it: blocks through an arena, the others as they are on disk."""
    layout = checkpoint.layout(compute)
    arena = torch.zeros(layout.arena_nbytes, dtype=torch.uint8)
    fill_tensors(block_pieces(checkpoint, layout), buffer_view(arena), threads=threads)
    outside = [name for name in checkpoint.entries if not name.startswith("blocks.")]
    found = read_tensors(checkpoint, outside)
    for unit in layout.units("block"):
        tensors = views(unit, arena[unit.offset : unit.offset + unit.nbytes])
        halves = [tensors.pop(f"{phase}.modulation") for phase in ("self_attn", "ffn")]
        tensors["modulation"] = torch.cat(halves, 1)
        found |= {f"blocks.{unit.block}.{name}": tensor for name, tensor in tensors.items()}
    assert found.keys() == checkpoint.entries.keys()
    return found


def assert_rounded_once(got: Tensor, exact: Tensor, size: Tensor) -> None:
    """`got` is as near to `exact` (float64) as its dtype allows, but for fp32's own noise."""
    best = (exact.to(got.dtype).double() - exact).abs()
    noise = size * 2.0**-20
    assert bool(((got.double() - exact).abs() <= best + noise).all())


# -- the sum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_the_sum_is_rounded_once(model, tmp_path, monkeypatch, disk, compute, cut) -> None:
    """W + s * (alpha / r) * B @ A, diff, diff_b and diff_m; untouched tensors keep their bits."""
    wan = model(disk)
    modules = [m for m in wan.matrices() if "blocks.1" not in m]
    lora = pairs(wan, modules, torch.bfloat16)
    adds = {
        "blocks.0.self_attn.q.diff_b": "blocks.0.self_attn.q.bias",
        "blocks.0.ffn.0.diff": "blocks.0.ffn.0.weight",
        "blocks.2.norm3.diff": "blocks.2.norm3.weight",
        "blocks.2.diff_m": "blocks.2.modulation",
        "head.diff_m": "head.modulation",
        "patch_embedding.diff_b": "patch_embedding.bias",
    }
    for key, target in adds.items():
        lora[f"diffusion_model.{key}"] = torch.randn(wan.tensors[target].shape)
    alphas = {module: float(n % 7) for n, module in enumerate(modules) if n % 3}
    for module, alpha in alphas.items():
        lora[f"diffusion_model.{module}.alpha"] = torch.tensor(alpha)
    if cut:
        monkeypatch.setattr("shared_offload.weights.reader.REQUEST_NBYTES", 5000)
        monkeypatch.setattr("shared_offload.weights.reader.BOUNCE_NBYTES", 1236)
    loaded = with_loras(wan.checkpoint, [LoraFile(save(tmp_path / "x.safetensors", lora), 0.75)])
    got = read_all(loaded.checkpoint, compute)
    plain = read_all(wan.checkpoint, compute)
    exact = {name: tensor.double() for name, tensor in wan.tensors.items()}
    size = {name: tensor.abs() for name, tensor in exact.items()}
    for module in modules:
        name, alpha = f"{module}.weight", alphas.get(module, 0.0)
        delta = product(lora, module).view(exact[name].shape)
        delta *= 0.75 * (alpha / RANK if alpha else 1.0)  # an alpha of 0 counts as none
        exact[name] = exact[name] + delta
        size[name] = size[name] + delta.abs() + 1
    for key, target in adds.items():
        delta = 0.75 * lora[f"diffusion_model.{key}"].double()
        exact[target], size[target] = exact[target] + delta, size[target] + delta.abs()
    changed = {f"{module}.weight" for module in modules} | set(adds.values())
    for name, tensor in got.items():
        if name in changed:
            assert not torch.equal(tensor, plain[name]), name
            assert_rounded_once(tensor, exact[name], size[name])
        else:
            assert torch.equal(tensor, plain[name]), name


def test_several_loras_add_up_in_one_rounding(model, tmp_path) -> None:
    wan = model(torch.bfloat16)
    module = "blocks.1.cross_attn.k_img"
    files = [(pairs(wan, [module], seed=seed), strength) for seed, strength in ((1, 0.5), (2, -2))]
    loras = [
        LoraFile(save(tmp_path / f"{n}.safetensors", lora), s) for n, (lora, s) in enumerate(files)
    ]
    got = read_all(with_loras(wan.checkpoint, loras).checkpoint, "BF16")[f"{module}.weight"]
    base = wan.tensors[f"{module}.weight"].double()
    deltas = [strength * product(lora, module) for lora, strength in files]
    assert_rounded_once(got, base + sum(deltas), base.abs() + sum(d.abs() + 1 for d in deltas))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_alpha_is_a_number_of_any_kind(model, tmp_path, dtype, shape) -> None:
    wan = model()
    module = "blocks.0.ffn.0"
    lora = pairs(wan, [module])
    want = product(lora, module) * 3 / RANK + wan.tensors[f"{module}.weight"].double()
    lora[f"diffusion_model.{module}.alpha"] = torch.full(shape, 3, dtype=dtype)
    path = save(tmp_path / "x.safetensors", lora)
    merged = with_loras(wan.checkpoint, [LoraFile(path)]).checkpoint
    got = read_tensors(merged, [f"{module}.weight"])[f"{module}.weight"]
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_does_not_matter(model, tmp_path) -> None:
    wan = model()
    path = save(tmp_path / "x.safetensors", pairs(wan, wan.matrices()))
    merged = with_loras(wan.checkpoint, [LoraFile(path)]).checkpoint
    team = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, many = (read_all(merged, "BF16", threads) for threads in (1, 8))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(team)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_the_fingerprint_is_of_files_and_strengths(model, tmp_path) -> None:
    wan = model()
    path = save(tmp_path / "x.safetensors", pairs(wan, ["blocks.0.ffn.0"]))

    def fingerprint(*loras: LoraFile) -> str:
        return with_loras(wan.checkpoint, loras).checkpoint.fingerprint()

    before = fingerprint(LoraFile(path))
    assert fingerprint(LoraFile(path)) == before
    others = {
        fingerprint(),
        fingerprint(LoraFile(path, 0.5)),
        fingerprint(LoraFile(path), LoraFile(path)),
        fingerprint(LoraFile(save(tmp_path / "y.safetensors", load_file(path)))),
    }
    save(path, load_file(path))  # rewritten
    others.add(fingerprint(LoraFile(path)))
    assert len(others | {before}) == 6


# -- the keys --------------------------------------------------------------------------------------

SUFFIXES = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
    (".lora_A", ".lora_B"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
)
PREFIXES = (
    "",
    "diffusion_model.",
    "model.",
    "unet.",
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.diffusion_model.",
)


def to_diffusers(module: str) -> str:
    return rename(f"{module}.weight").removesuffix(".weight")


SPELLINGS: dict[str, Callable[[str], str]] = {
    **{prefix or "none": lambda m, p=prefix: p + m for prefix in PREFIXES},
    "diffusers": to_diffusers,
    "transformer.": lambda m: f"transformer.{to_diffusers(m)}",
    "peft of diffusers": lambda m: f"base_model.model.{to_diffusers(m)}",
    "lora_unet_": lambda m: f"lora_unet_{m.replace('.', '_')}",
    "lora_unet_ of diffusers": lambda m: f"lora_unet_{to_diffusers(m).replace('.', '_')}",
}


@pytest.mark.parametrize("suffixes", SUFFIXES, ids=lambda pair: pair[0])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_the_same(model, tmp_path, spelling, suffixes) -> None:
    wan = model()
    modules = wan.matrices()
    table = KeyTable(wan.checkpoint.entries)
    lora: Tensors = {}
    for module in modules:
        down, up = model_pair = wan.pair(module)
        for role, suffix, tensor in zip(("down", "up"), suffixes, model_pair, strict=True):
            key = SPELLINGS[spelling](module) + suffix
            found = table.read(key)
            assert found and (found.target, found.role) == (f"{module}.weight", role)
            lora[key] = tensor
        lora[SPELLINGS[spelling](module) + ".alpha"] = torch.tensor(2.0)
    path = save(tmp_path / "x.safetensors", lora)
    merged = with_loras(wan.checkpoint, [LoraFile(path)]).checkpoint
    name = "blocks.2.cross_attn.k_img.weight"
    got = read_tensors(merged, [name])[name]
    down, up = wan.pair(name.removesuffix(".weight"))
    exact = wan.tensors[name].double() + 2 / RANK * up.double() @ down.double()
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert merged.merges.keys() == {f"{module}.weight" for module in modules}


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "lora_unet_"])
def test_additions_in_every_spelling(model, prefix) -> None:
    table = KeyTable(model().checkpoint.entries)
    for module, suffix, target in (
        ("blocks.0", ".diff_m", "blocks.0.modulation"),
        ("head", ".diff_m", "head.modulation"),
        ("blocks.1.cross_attn.norm_k_img", ".diff", "blocks.1.cross_attn.norm_k_img.weight"),
        ("img_emb.proj.0", ".diff_b", "img_emb.proj.0.bias"),
    ):
        spelled = module.replace(".", "_") if prefix == "lora_unet_" else module
        found = table.read(prefix + spelled + suffix)
        assert found and (found.target, found.role) == (target, "add")


@pytest.mark.parametrize(
    "key",
    [
        "diffusion_model.blocks.3.ffn.0.lora_A.weight",  # the model has blocks 0 to 2
        "diffusion_model.blocks.0.ffn.0.lora_mid.weight",
        "diffusion_model.blocks.0.ffn.0.lora_magnitude_vector",
        "diffusion_model.blocks.0.ffn.0.weight",
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight",
        "diffusion_model.vace_blocks.0.ffn.0.lora_A.weight",
        "lora_A.weight",
        "",
    ],
)
def test_keys_that_mean_nothing(model, key) -> None:
    assert KeyTable(model().checkpoint.entries).read(key) is None


# -- what libraries write --------------------------------------------------------------------------

ADAPTER = {"r": RANK, "lora_alpha": 6, "alpha_pattern": {r"blocks\.0\.attn2\.to_q": 10}}


def save_with_diffusers(folder: Path, layers: Tensors, adapter: dict[str, Any]) -> None:
    WanLoraLoaderMixin.save_lora_weights(
        folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=dict(adapter)
    )


def save_as_peft(folder: Path, layers: Tensors, adapter: dict[str, Any]) -> None:
    """As peft's save_pretrained lays it out."""
    folder.mkdir()
    named = {f"base_model.model.{k}": v for k, v in layers.items()}
    save(folder / "adapter_model.safetensors", named, format="pt")
    content = {"peft_type": "LORA", "bias": "none", "use_rslora": False, **adapter}
    (folder / "adapter_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("writer", [save_with_diffusers, save_as_peft])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["folder", "file"])
def test_alpha_from_the_library_s_description(model, tmp_path, writer, rslora, inside) -> None:
    wan = model()
    modules = ["blocks.0.self_attn.q", "blocks.0.cross_attn.q"]
    layers: Tensors = {}
    for module in modules:
        down, up = wan.pair(module)
        layers[f"{to_diffusers(module)}.lora_A.weight"] = down
        layers[f"{to_diffusers(module)}.lora_B.weight"] = up
    folder = tmp_path / "adapter"
    writer(folder, layers, {**ADAPTER, "use_rslora": rslora})
    path = next(folder.glob("*.safetensors")) if inside else folder
    merged = with_loras(wan.checkpoint, [LoraFile(path, 2.0)]).checkpoint
    got = read_tensors(merged, [f"{module}.weight" for module in modules])
    for module, alpha in zip(modules, (6, 10), strict=True):
        down, up = wan.pair(module)
        factor = 2.0 * alpha / (RANK**0.5 if rslora else RANK)
        exact = wan.tensors[f"{module}.weight"].double() + factor * up.double() @ down.double()
        assert torch.allclose(got[f"{module}.weight"].double(), exact, rtol=1e-5, atol=1e-5)


# -- what does not fit -----------------------------------------------------------------------------


def refused(model: Model, path: Path, **options: bool) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        with_loras(model.checkpoint, [LoraFile(path)], **options)
    return caught.value


def test_no_key_fits(model, tmp_path) -> None:
    path = save(tmp_path / "sd.safetensors", {"lora_te_x.lora_up.weight": torch.ones(2, 2)})
    error = refused(model(), path)
    assert "none of its 1 keys" in error.what
    assert error.facts["names"] == ["lora_te_x.lora_up.weight"]
    assert refused(model(), path, allow_unmatched=True).facts == error.facts


def test_keys_left_over(model, tmp_path) -> None:
    """An i2v LoRA on a t2v model: its image keys are told, or tolerated and told."""
    wide, narrow = model(task="i2v"), model(task="t2v")
    modules = [m for m in wide.matrices() if m.startswith("blocks.")]
    path = save(tmp_path / "i2v.safetensors", pairs(wide, modules))
    left = {key for key in load_file(path) if "_img." in key}
    error = refused(narrow, path)
    assert set(error.facts["names"]) == left
    assert "lora_allow_unmatched" in error.hint
    loaded = with_loras(narrow.checkpoint, [LoraFile(path)], allow_unmatched=True)
    assert f"{len(left)} keys without use" in loaded.notes[0]
    assert len(loaded.checkpoint.merges) == len(modules) - len(left) // 2


DAMAGE: dict[str, tuple[Callable[[Tensors, str], object], str]] = {
    "down too wide": (lambda t, m: t.update({f"{m}.lora_down.weight": torch.ones(4, 65)}), "[4, "),
    "up too long": (lambda t, m: t.update({f"{m}.lora_up.weight": torch.ones(97, 4)}), "[96, 4]"),
    "ranks differ": (lambda t, m: t.update({f"{m}.lora_up.weight": torch.ones(96, 3)}), "[96, 4]"),
    "rank 0": (lambda t, m: t.update({f"{m}.lora_down.weight": torch.ones(0, 64)}), "[1, 64]"),
    "no up": (lambda t, m: t.pop(f"{m}.lora_up.weight"), "a down and an up"),
    "no down": (lambda t, m: t.pop(f"{m}.lora_down.weight"), "a down and an up"),
    "alpha alone": (lambda t, _: t.update({"blocks.1.ffn.0.alpha": torch.ones(())}), "a down and"),
    "nan alpha": (lambda t, m: t.update({f"{m}.alpha": torch.tensor(float("nan"))}), "one number"),
    "two alphas": (lambda t, m: t.update({f"{m}.alpha": torch.ones(2)}), "one number"),
    "diff_b too long": (lambda t, m: t.update({f"{m}.diff_b": torch.ones(97)}), "[96]"),
    "integers": (lambda t, m: t.update({f"{m}.diff_b": torch.ones(96).int()}), "F32 or BF16"),
    "alpha in fp8": (
        lambda t, m: t.update({f"{m}.alpha": torch.tensor(1.0).to(torch.float8_e4m3fn)}),
        "I64",
    ),
    "fp8": (lambda t, m: t.update({f"{m}.diff_b": torch.ones(96).to(torch.float8_e4m3fn)}), "F32"),
    "twice": (lambda t, m: t.update({f"model.{m}.lora_down.weight": torch.ones(4, 64)}), ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_tensors_that_do_not_fit(model, tmp_path, damage) -> None:
    wan = model()
    module = "blocks.0.ffn.0"
    lora = {
        f"{module}.lora_down.weight": torch.ones(4, 64),
        f"{module}.lora_up.weight": torch.ones(96, 4),
    }
    path = tmp_path / "x.safetensors"
    with_loras(wan.checkpoint, [LoraFile(save(path, lora))])
    change, expected = DAMAGE[damage]
    change(lora, module)
    error = refused(wan, save(path, lora))
    assert error.facts["path"] == str(path)
    assert error.facts["name"]
    assert expected in error.expected


def test_files_that_are_broken_are_told_together(model, tmp_path) -> None:
    wan = model()
    whole = save(tmp_path / "whole.safetensors", pairs(wan, ["blocks.0.ffn.0"]))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-10])
    page = tmp_path / "page.safetensors"
    page.write_text("<html>")
    absent, empty = tmp_path / "none.safetensors", tmp_path / "folder"
    empty.mkdir()
    with pytest.raises(Problems) as caught:
        with_loras(wan.checkpoint, [LoraFile(p) for p in (whole, cut, page, absent, empty)])
    told = [error.facts["path"] for error in caught.value.errors]
    assert told == [str(path) for path in (cut, page, absent, empty)]


def test_all_that_is_wrong_in_all_files_is_told(model, tmp_path) -> None:
    wan = model()
    lora = pairs(wan, ["blocks.0.ffn.0"])
    lora["diffusion_model.blocks.0.ffn.0.diff_b"] = torch.ones(1)
    lora["diffusion_model.blocks.1.ffn.0.lora_up.weight"] = torch.ones(96, 4)
    lora["elsewhere.lora_up.weight"] = torch.ones(2, 2)
    paths = [save(tmp_path / f"{n}.safetensors", lora) for n in range(2)]
    with pytest.raises(Problems) as caught:
        with_loras(wan.checkpoint, [LoraFile(path) for path in paths])
    told = [(e.facts["path"], e.facts["name"].split(".")[-1]) for e in caught.value.errors]
    assert told == [(str(p), name) for p in paths for name in ("weight", "diff_b", "weight")]


def test_a_broken_description(model, tmp_path) -> None:
    wan = model()
    folder = tmp_path / "adapter"
    down, up = wan.pair("blocks.0.ffn.0")
    layers = {"blocks.0.ffn.0.lora_A.weight": down, "blocks.0.ffn.0.lora_B.weight": up}
    save_as_peft(folder, layers, {})
    for text in ("{", "[]", '{"lora_alpha": "8"}', '{"alpha_pattern": {"(": 1}}'):
        (folder / "adapter_config.json").write_text(text)
        assert refused(wan, folder).facts["path"] == str(folder / "adapter_config.json")


def test_a_file_that_changes_before_it_is_read(model, tmp_path) -> None:
    wan = model()
    path = save(tmp_path / "x.safetensors", pairs(wan, ["blocks.0.ffn.0"]))
    merged = with_loras(wan.checkpoint, [LoraFile(path)]).checkpoint
    save(path, pairs(wan, ["blocks.0.ffn.0", "blocks.0.ffn.2"]))
    with pytest.raises(CheckpointError, match="changed while") as caught:
        read_all(merged, "BF16")
    assert caught.value.facts["path"] == str(path)


# -- conversion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [torch.float32, torch.bfloat16])
def test_convert_merges_before_it_quantises(model, tmp_path, capsys, disk) -> None:
    wan = model(disk)
    modules = ["blocks.0.ffn.2", "head.head"]
    lora = pairs(wan, modules)
    lora["diffusion_model.blocks.1.self_attn.k.diff_b"] = torch.ones(64)
    path = save(tmp_path / "x:1.safetensors", lora)
    plain, merged = tmp_path / "plain", tmp_path / "merged"
    plan_conversion(wan.folder, "single").write(plain)
    given = ["convert", "--model_path", str(wan.folder), "--layout", "single"]
    assert main([*given, "--out", str(merged), "--lora", f"{path}:0.5"]) == 0
    assert "strength 0.5" in capsys.readouterr().err
    before, after = (load_file(next(f.glob("*.safetensors"))) for f in (plain, merged))
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert different == {
        "blocks.0.ffn.2.weight",
        "blocks.0.ffn.2.weight_scale",
        "head.head.weight",
        "blocks.1.self_attn.k.bias",
    }
    exact = {m: wan.tensors[f"{m}.weight"].double() + 0.5 * product(lora, m) for m in modules}
    scale = after["blocks.0.ffn.2.weight_scale"].double()
    amax = exact["blocks.0.ffn.2"].abs().amax(1, keepdim=True)
    assert torch.allclose(scale, amax / 448, rtol=1e-5)
    codes = (exact["blocks.0.ffn.2"] / scale).float().to(torch.float8_e4m3fn).float()
    same = codes == after["blocks.0.ffn.2.weight"].float()
    assert same.float().mean() > 0.999  # an fp32 sum may fall on the other side of a middle
    assert_rounded_once(after["head.head.weight"], exact["head.head"], exact["head.head"].abs() + 9)


def test_convert_refuses_a_lora_that_does_not_fit(model, tmp_path, capsys) -> None:
    wan = model()
    path = save(tmp_path / "x.safetensors", {"y.lora_A.weight": torch.ones(2, 2)})
    out = tmp_path / "out"
    given = ["convert", "--model_path", str(wan.folder), "--out", str(out), "--lora", str(path)]
    try:
        code = main(given)
    except OffloadError as error:  # printed by the program's entry point
        code = error.exit_code
    assert code == 1
    assert not out.exists()
