"""transformers, diffusers and PyAV, which take seconds to import: imported when first used.

`libraries.UMT5Config` is the class of that name, imported now if it was not before. Call `preload`
when a run is known to be in order, and a thread imports ahead of time what the run will use. This
is the one place in the package that imports modules by name, but for the commands of `cli`.

Invariant: one daemon thread does all these imports, one at a time, and whoever uses a name waits
for it. So no two threads are amid the circular imports of one library, where Python would give one
of them a half-made module; and what a library makes at import does not depend on a mode of the
caller's thread (a default device, inference mode). A failed import is raised where the name is
used. At the interpreter's end the thread stops before the next module that it would import.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import av as av
    from diffusers import AutoencoderKLWan as AutoencoderKLWan
    from diffusers.loaders.single_file_utils import (
        convert_wan_vae_to_diffusers as convert_wan_vae_to_diffusers,
    )
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d as WanCausalConv3d
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample as WanResample
    from diffusers.models.autoencoders.autoencoder_kl_wan import (
        WanResidualBlock as WanResidualBlock,
    )
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm as WanRMS_norm
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample as WanUpsample
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import CLIPVisionConfig as CLIPVisionConfig
    from transformers import CLIPVisionModel as CLIPVisionModel
    from transformers import UMT5Config as UMT5Config
    from transformers import UMT5EncoderModel as UMT5EncoderModel

# Name -> the module that has it, or that it is.
TEXT = dict.fromkeys(("AutoTokenizer", "UMT5Config", "UMT5EncoderModel"), "transformers")
IMAGE = dict.fromkeys(("CLIPVisionConfig", "CLIPVisionModel"), "transformers")
VAE = {
    "AutoencoderKLWan": "diffusers",
    "convert_wan_vae_to_diffusers": "diffusers.loaders.single_file_utils",
    "WanCausalConv3d": "diffusers.models.autoencoders.autoencoder_kl_wan",
    "WanResample": "diffusers.models.autoencoders.autoencoder_kl_wan",
    "WanResidualBlock": "diffusers.models.autoencoders.autoencoder_kl_wan",
    "WanRMS_norm": "diffusers.models.autoencoders.autoencoder_kl_wan",
    "WanUpsample": "diffusers.models.autoencoders.autoencoder_kl_wan",
}
VIDEO = {"av": "av"}
HOMES = {**TEXT, **IMAGE, **VAE, **VIDEO}

END_SECONDS = 10.0  # for one module: libraries on a slow disk


def preload(names: Iterable[str]) -> None:
    """Import these (keys of HOMES) in a thread, in this order, and return at once.

    Raises ModuleNotFoundError for a library that is not installed: better now than when its turn
    comes, after the last step perhaps.
    """
    names = list(names)
    for library in dict.fromkeys(HOMES[name].partition(".")[0] for name in names):
        if library not in sys.modules and importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    _importer.want(names)


class _Ended(BaseException):
    """Raised in the importing thread to end it."""


class _Importer:
    """The thread, while there is something to import, and what it has imported."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: deque[str] = deque()  # the first of them is being imported
        self._found: dict[str, Any] = {}
        self._failed: dict[str, BaseException] = {}
        self._thread: threading.Thread | None = None
        self._ending = False

    def want(self, names: Iterable[str]) -> None:
        with self._changed:
            self._wanted += [name for name in names if self._is_new(name)]
            self._run_thread()

    def get(self, name: str) -> Any:  # noqa: ANN401  of libraries without types
        """Waits for the import; raises what it raised. The next call tries again."""
        with self._changed:
            if name in self._wanted and name != self._wanted[0]:
                self._wanted.remove(name)
            if self._is_new(name):
                self._wanted.insert(1, name)  # before what nobody waits for yet
                self._run_thread()
            while name not in self._found and name not in self._failed:
                self._changed.wait()
            if name in self._failed:
                raise self._failed.pop(name)
            return self._found[name]

    def _is_new(self, name: str) -> bool:
        return not any(name in known for known in (self._wanted, self._found, self._failed))

    def _run_thread(self) -> None:
        if self._wanted and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="imports", daemon=True)
            self._thread.start()
            atexit.unregister(self._end)
            atexit.register(self._end)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._wanted:
                    self._thread = None
                    return
                name = self._wanted[0]
            error: BaseException | None = None
            try:
                module = importlib.import_module(HOMES[name])
                value = module if module.__name__.endswith(name) else getattr(module, name)
            except BaseException as raised:  # raised again in `get`
                error = raised
            with self._changed:
                self._wanted.popleft()
                if error is None:
                    self._found[name] = value
                else:
                    self._failed[name] = error
                if self._ending:
                    self._failed |= {name: _Ended() for name in self._wanted}
                    self._wanted.clear()
                self._changed.notify_all()

    def _end(self) -> None:
        """Wait until the thread has ended, which it does at its next import.

        Else it would be cut off inside a library's C++ code, which may abort the process.
        """
        with self._changed:
            self._ending, thread = True, self._thread
        if thread is not None:
            sys.meta_path.insert(0, _Barrier(thread))
            thread.join(END_SECONDS)


class _Barrier:
    """A finder of modules that finds none, and ends the thread that asks for one."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def find_spec(
        self, _name: str, _path: object = None, _target: object = None
    ) -> ModuleSpec | None:
        if threading.current_thread() is self._thread:
            raise _Ended
        return None


_importer = _Importer()

if not TYPE_CHECKING:  # a type checker shall know the names above, and no others

    def __getattr__(name: str) -> Any:  # noqa: ANN401  the same
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = globals()[name] = _importer.get(name)
        return value
