"""A module (encoder, VAE) that is loaded when it is first needed, and where it stays afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch


class Module(Protocol):
    """What `OnDemand` needs of an encoder or a VAE."""

    def move(self, device: torch.device) -> None:
        """Put the weights on a device; those on the old one are freed."""

    def close(self) -> None:
        """Free the weights."""


M = TypeVar("M", bound=Module)
HOST = torch.device("cpu")


class OnDemand(Generic[M]):
    """Loads a module at its first use.

    Between uses it stays on the device, or in host memory (`offload`), or nowhere (`unload`).
    """

    def __init__(
        self,
        load: Callable[[torch.device], M],
        device: torch.device,
        *,
        offload: bool = False,
        unload: bool = False,
    ) -> None:
        self._load = load
        self._device = device
        self._offload = offload and device != HOST
        self._unload = unload
        self._module: M | None = None

    @contextmanager
    def use(self) -> Iterator[M]:
        """The module, on the device for as long as the block runs."""
        keeps_host_copy = self._offload and not self._unload
        if self._module is None:
            self._module = self._load(HOST if keeps_host_copy else self._device)
        module = self._module
        try:
            module.move(self._device)
            yield module
        finally:
            if self._unload:
                self.close()
            elif self._offload:
                module.move(HOST)

    def close(self) -> None:
        """Free the module. It is loaded again if it is used again."""
        module, self._module = self._module, None
        if module is not None:
            module.close()
