"""Layers of a library's module whose weights stay in host memory and pass through a device.

Invariant: the device holds the weights of one layer at a time, in memory of its own that every
layer reuses; the host copy is the only one, and is never written. Whatever fails, each layer has
its host weights back.

The weights usually are the file's memory map, so the host holds nothing but page cache, and copies
run at the speed of pageable memory (7 GB/s where pinned memory gives 55: docs/performance.md), a
second or less for all of UMT5. Pinning would cost as much once, and keep gigabytes from the host.
A layer's compute is a fiftieth of its copy, so a second place would gain nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

Place = tuple[str, torch.dtype, torch.Size]


@contextmanager
def passing(layers: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside the block, each layer's forward runs with its weights on `device`.

    Device memory: one layer's weights, freed at the end of the block. The calls must come from one
    thread, and from one stream: a layer's weights are overwritten in its order.
    """
    places: dict[Place, Tensor] = {}
    with ExitStack() as stack:
        for layer in layers:
            home = {name: tensor.data for name, tensor in _weights(layer)}
            enter, leave = partial(_enter, home, places, device), partial(_leave, home)
            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


def _enter(
    home: dict[str, Tensor],
    places: dict[Place, Tensor],
    device: torch.device,
    layer: nn.Module,
    _inputs: object,
) -> None:
    for name, tensor in _weights(layer):
        host = home[name]
        key = (name, host.dtype, host.shape)
        if key not in places:
            places[key] = torch.empty_like(host, device=device)
        tensor.data = places[key].copy_(host)


def _leave(home: dict[str, Tensor], layer: nn.Module, _inputs: object, _output: object) -> None:
    for name, tensor in _weights(layer):
        tensor.data = home[name]


def _weights(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()
