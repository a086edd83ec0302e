"""Weights from a file into a module that a library built on the meta device.

Invariant: a module is complete or an error lists everything that is wrong; each weight exists once,
in its final dtype on its final device, and on the CPU it stays the file's own memory map where the
dtype already fits, or is cast on the way to the device that it is meant for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shared_offload.errors import CheckpointError, raise_all
from shared_offload.pipeline.courier import courier_to
from shared_offload.pipeline.quantised import Fp8Linear
from shared_offload.pipeline.weight_faults import SCALE_SUFFIX, faults

OnBytes = Callable[[int], None]
_HOST = torch.device("cpu")
_HOME = "weights_in_host_memory"  # attribute of a module that is elsewhere, or was
_DTYPE = "dtype_on_a_device"  # attribute of a module that is to be cast


def told_to_nobody(_: int) -> None:
    """An `OnBytes` that ignores what it is told."""


def assign(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    cast_later: bool = False,
    on_bytes: OnBytes = told_to_nobody,
) -> None:
    """Give `module` (on meta) all its weights, by its own names, and set it to evaluation.

    FP8 weights with their `weight_scale` turn their layer into an Fp8Linear; all else becomes
    `dtype` on `device`. With `cast_later` they stay in host memory as the file has them, and become
    `dtype` on the device where `move` puts them: a cast of gigabytes takes a host longer than their
    copy. A tensor object that stands under two names (tied weights) is moved once.
    `on_bytes` is told of bytes of the file as they are taken. Raises CheckpointError or Problems.
    Peak host memory: the largest tensor, where casting.
    """
    scales = {n: t for n, t in tensors.items() if n.endswith(".weight" + SCALE_SUFFIX)}
    plain = {n: t for n, t in tensors.items() if n not in scales}
    raise_all(faults(module.state_dict(), plain, scales, path))
    moved: dict[int, Tensor] = {}
    for name, scale in scales.items():
        on_bytes(plain[name.removesuffix(SCALE_SUFFIX)].nbytes)
        _place_fp8(module, name, plain, scale.to(device, torch.float32), device, dtype)
    if cast_later:
        setattr(module, _DTYPE, dict.fromkeys(plain, dtype))
    with courier_to(device) as courier:
        for name, tensor in plain.items():
            key = id(tensor)
            if key not in moved:
                moved[key] = courier.deliver(tensor if cast_later else tensor.to(dtype))
                on_bytes(tensor.nbytes)
            plain[name] = moved[key]
    module.requires_grad_(False).eval()
    module.load_state_dict(plain, strict=True, assign=True)


def move(module: nn.Module, device: torch.device) -> None:
    """Put all weights on `device`; weights that share memory (tied ones) still do afterwards.

    Those that leave host memory stay there too, and are taken up again when they come back: nobody
    writes weights, so there is nothing to copy, and a file's memory map stays one.
    """
    home: dict[str, Tensor] = module.__dict__.setdefault(_HOME, {})
    dtypes: dict[str, torch.dtype] = {} if device == _HOST else getattr(module, _DTYPE, {})
    moved: dict[tuple[int | str, int], Tensor] = {}
    with courier_to(device) as courier:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            place = (tensor.data_ptr() or name, tensor.nbytes)  # an empty one has no address
            if tensor.device == _HOST and device != _HOST:
                home[name] = tensor.data
            if place not in moved:
                returns = device == _HOST and name in home
                there = home[name] if returns else courier.deliver(tensor.data)
                moved[place] = there.to(dtypes.get(name, there.dtype))
            tensor.data = moved[place]


def count_parameters(module: nn.Module) -> int:
    """Numbers in all weights, tied ones once; neither scales of FP8 weights nor index tables."""
    weights = ((n, t) for n, t in _storages(module) if t.is_floating_point())
    return sum(t.numel() for n, t in weights if not n.endswith(".scale"))


def count_bytes(module: nn.Module) -> int:
    """Bytes that all weights occupy, tied ones once."""
    return sum(t.nbytes for _, t in _storages(module))


def layer_count(names: Iterable[str], prefix: str) -> int:
    """One more than the largest N of names `<prefix>N.<rest>`; 0 without any."""
    numbers = (n.removeprefix(prefix).split(".")[0] for n in names if n.startswith(prefix))
    return max((int(n) + 1 for n in numbers if n.isdigit()), default=0)


def need(tensors: Mapping[str, Tensor], name: str, ndim: int, path: Path) -> torch.Size:
    """Shape of the tensor that a size is read from; CheckpointError where it cannot be."""
    found = tensors.get(name)
    if found is None or found.ndim != ndim:
        state = "is missing" if found is None else f"has shape {list(found.shape)}"
        raise CheckpointError(
            f"{path.name}: {name} {state}, so the model's size cannot be read",
            expected=f"a tensor of {ndim} dimensions",
            hint="is this the file that the setting names?",
            path=str(path),
            name=name,
        )
    return found.shape


def _storages(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers by name, one for each piece of memory."""
    seen: set[tuple[int, int]] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        where = (tensor.data_ptr(), tensor.nbytes)
        if where not in seen:
            seen.add(where)
            yield name, tensor


def _place_fp8(
    module: nn.Module,
    scale_name: str,
    plain: dict[str, Tensor],
    scale: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Replace one linear layer; its tensors leave `plain`."""
    layer = scale_name.removesuffix(".weight" + SCALE_SUFFIX)
    parent, _, child = layer.rpartition(".")
    bias = plain.pop(layer + ".bias", None)
    linear = Fp8Linear(
        plain.pop(layer + ".weight").to(device).contiguous(),
        scale,
        None if bias is None else bias.to(device, dtype),
    )
    setattr(module.get_submodule(parent), child, linear)
