"""tokenizers, transformers, diffusers and PyAV take seconds to import: imported when first used.

`libraries.UMT5Config` is the class of that name, imported now if it was not before. Call `preload`
when a run's files are in order, and a thread imports ahead of time what the run will use. This
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
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    from tokenizers import Tokenizer as Tokenizer
    from transformers import CLIPVisionConfig as CLIPVisionConfig
    from transformers import CLIPVisionModel as CLIPVisionModel
    from transformers import UMT5Config as UMT5Config
    from transformers import UMT5EncoderModel as UMT5EncoderModel

# Name -> the module that has it, or that it is.
TEXT = {
    "Tokenizer": "tokenizers",
    "UMT5Config": "transformers",
    "UMT5EncoderModel": "transformers",
}
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

POLL_SECONDS = 0.005
TOLD_SECONDS = 2.0  # of waiting
END_SECONDS = 5.0  # for one module: libraries on a slow disk


def preload(names: Iterable[str], then: Callable[[], None] | None = None) -> None:
    """Import these (keys of HOMES) in a thread, in this order, and return at once.

    `then` is called once, by that thread, when nothing is left to import.

    Raises ModuleNotFoundError for a library that is not installed: better now than when its turn
    comes, after the last step perhaps.
    """
    names = list(names)
    for library in dict.fromkeys(HOMES[name].partition(".")[0] for name in names):
        if library not in sys.modules and importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    _importer.want(names, then)


def wait(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Return when these (keys of HOMES) are imported. Raises what an import raised.

    `tell` gets a line if that takes a while.
    """
    due = time.monotonic() + TOLD_SECONDS
    told = False

    def waiting() -> None:
        nonlocal told
        if not told and time.monotonic() > due:
            tell(f"{HOMES[name]} is still being imported")
            told = True

    for name in names:
        _importer.get(name, waiting)


class _Ended(BaseException):
    """Raised in the importing thread to end it."""


class _Importer:
    """The thread, while there is something to import, and what it has imported.

    The main thread takes no lock here, and polls: a signal's handler that raises while Python's
    `Condition` or `Event` is entered would leave it locked, and the importing thread stuck.
    """

    def __init__(self) -> None:
        self._wanted: deque[str] = deque()
        self._then: list[Callable[[], None]] = []
        self._now = ""  # what is being imported
        self._found: dict[str, Any] = {}
        self._failed: dict[str, BaseException] = {}
        self._thread: threading.Thread | None = None
        self._one_at_a_time = threading.Lock()  # taken by importing threads alone
        self._ending = False

    def want(self, names: Iterable[str], then: Callable[[], None] | None = None) -> None:
        self._wanted += [name for name in names if name not in self._wanted]
        self._then += [then] if then else []
        self._run_thread()

    def get(self, name: str, waiting: Callable[[], None] | None = None) -> Any:  # noqa: ANN401
        """Waits for the import; raises what it raised. The next call tries again.

        `waiting` is called again and again meanwhile.
        """
        while name not in self._found and name not in self._failed:
            if self._ending:
                raise RuntimeError(f"{name} was asked for when the interpreter was ending")
            if name != self._now:
                with suppress(ValueError):
                    self._wanted.remove(name)
                self._wanted.appendleft(name)  # before what nobody waits for yet
            self._run_thread()
            if waiting:
                waiting()
            time.sleep(POLL_SECONDS)
        if name in self._failed:
            raise self._failed.pop(name)
        return self._found[name]

    def _run_thread(self) -> None:
        if self._thread is None:
            atexit.register(self._end)
        busy = self._thread is not None and self._thread.is_alive()
        if (self._wanted or self._then) and not busy:
            self._thread = threading.Thread(target=self._work, name="imports", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        with self._one_at_a_time:
            while self._wanted and not self._ending:
                self._now = self._wanted.popleft()
                if self._now not in self._found and self._now not in self._failed:
                    self._import(self._now)
                self._now = ""
            while self._then and not self._ending:
                self._then.pop()()

    def _import(self, name: str) -> None:
        try:
            module = importlib.import_module(HOMES[name])
            own = module.__name__.endswith(name)
            self._found[name] = module if own else getattr(module, name)
        except BaseException as error:  # raised again in `get`
            self._failed[name] = error

    def _end(self) -> None:
        """Wait until the thread has ended, which it does at its next import.

        Else it would be cut off inside a library's C++ code, which may abort the process.
        """
        self._ending = True
        if self._thread is not None:
            sys.meta_path.insert(0, _Barrier(self._thread))
            self._thread.join(END_SECONDS)


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
