"""A library's layers whose weights stay in host memory and pass through a device, one at a time.

Invariant: the device holds the weights of one layer, in memory that every layer reuses; the host
copy is the only one, and is never written. Whatever fails, a layer has its host weights back.

The weights usually are the file's memory map, so the host holds nothing but page cache;
`courier.py` brings them. A layer's compute is a fraction of its copy, so a second place that is
filled meanwhile would gain next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared_offload.pipeline.courier import Courier

Kind = tuple[str, torch.dtype, torch.Size]


class Passage:
    """Device memory for one layer, made as layers need it, and freed with this object.

    All use is from one thread and one stream, in whose order weights are overwritten.
    """

    def __init__(self, courier: Courier) -> None:
        """Through the device that the courier goes to."""
        self._courier = courier
        self._places: dict[Kind, Tensor] = {}

    @contextmanager
    def lend(self, layer: nn.Module) -> Iterator[None]:
        """Inside the block, the layer's weights are on the device."""
        weights = dict([*layer.named_parameters(), *layer.named_buffers()])
        home = {name: tensor.data for name, tensor in weights.items()}
        try:
            for name, tensor in weights.items():
                place = self._place(name, home[name])
                self._courier.copy(home[name], place)
                tensor.data = place
            yield
        finally:
            for name, tensor in weights.items():
                tensor.data = home[name]

    def _place(self, name: str, host: Tensor) -> Tensor:
        kind = (name, host.dtype, host.shape)
        if kind not in self._places:
            self._places[kind] = torch.empty_like(host, device=self._courier.device)
        return self._places[kind]
