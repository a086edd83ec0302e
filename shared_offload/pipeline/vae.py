"""Video to latents and back: Wan's causal VAE from its own .pth file, through diffusers.

Invariant: latents that leave and enter are normalised with Wan's mean and deviation, the
deterministic mode is used, and videos and latents are fp32 whatever the VAE computes in. Shape
letters: C channels, T latent frames, Y X latent height and width, F frames, H W pixels.

Frames pass one latent frame at a time, so memory depends on the size of a frame and hardly on their
number; with a `limit` they pass in as many strips as keep to that (`vae_sweep.py`). The library's
layers compute as `vae_fast.py` says. Error and cost by dtype: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared_offload.errors import CheckpointError
from shared_offload.pipeline import libraries, module_weights, vae_fast, vae_sweep
from shared_offload.pipeline.conditioning import LATENT_CHANNELS, latent_shape
from shared_offload.pipeline.vae_memory import DECODE, ENCODE, Pass, Picture, room
from shared_offload.pipeline.vae_parallel import Place, Strips, Tiles
from shared_offload.weights.pth import load_pth

LEVELS = 4  # resolutions of encoder and decoder
RESIDUALS = 2  # residual blocks of a level of the encoder
CONFIG = "config.json"
OnFrame = Callable[[], None]
Form = Callable[[Tensor], Tensor]  # of frames, value by value: what is kept of them


class Vae:
    """Wan's VAE on one device; `close` frees the weights."""

    def __init__(self, model: Any, *, tiling: bool) -> None:  # noqa: ANN401  diffusers has no types
        self._model = model
        vae_fast.quicken(model, gpu=model.device.type == "cuda")
        if tiling:
            model.enable_tiling()  # 256-pixel tiles, 192 apart, blended over 64
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.limit: int | None = None
        """Bytes that may be allocated on the device while it works; None: any number."""
        self.encode_room: int | None = None
        """Bytes that an encode may take over the weights, whatever the limit; None: as it says."""
        self.nbytes = module_weights.count_bytes(model)
        self.num_parameters = module_weights.count_parameters(model)
        statistics = (model.config.latents_mean, model.config.latents_std)
        self._mean, self._std = (
            torch.tensor(v, device=self.device).view(-1, 1, 1, 1) for v in statistics
        )

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device | str, dtype: torch.dtype, tiling: bool = False
    ) -> Vae:
        """From Wan's .pth file (sizes are read from its tensors) or a diffusers `vae` folder.

        `tiling` bounds memory for large frames, at the price of seams that are blended, not exact.
        Raises CheckpointError or Problems.
        """
        if path.is_dir():
            model = _from_folder(path, dtype)
        else:
            tensors = load_pth(path)
            with torch.device("meta"):
                model = libraries.AutoencoderKLWan(**read_config(tensors, path))
            module_weights.assign(
                model,
                libraries.convert_wan_vae_to_diffusers(tensors),
                path=path,
                device=torch.device(device),
                dtype=dtype,
            )
        return cls(model.to(device).requires_grad_(False).eval(), tiling=tiling)

    @torch.inference_mode()
    def encode(self, video_3FHW: Tensor, blank: int = 0) -> Tensor:
        """Normalised latent (16, T, Y, X) fp32 of a video in [-1, 1], and of `blank` frames of 0
        behind it; there are 4n + 1 in all.

        The video may lie on the CPU: it passes to the VAE's device piece by piece.
        """
        _, frames, height, width = video_3FHW.shape
        model, shape = self._open(), latent_shape(frames + blank, height, width)
        if self._tiled(shape):
            try:
                video = F.pad(video_3FHW[None], (0, 0, 0, 0, 0, blank)).to(self.device, self.dtype)
                mode_CTYX = model.encode(video).latent_dist.mode()[0]
            finally:
                model.clear_cache()  # a failed pass would keep its features, gigabytes of them
        else:
            strips = self.strips(shape, ENCODE)
            mode_CTYX = vae_sweep.encode(model, video_3FHW[None], strips, blank)[0]
        latent_CTYX: Tensor = (mode_CTYX.float() - self._mean) / self._std
        return latent_CTYX

    @torch.inference_mode()
    def decode(
        self,
        latent_CTYX: Tensor,
        on_frame: OnFrame | None = None,
        *,
        form: Form = Tensor.float,
        share: tuple[int, int] | None = None,
    ) -> Tensor:
        """The video (3, F, H, W) in [-1, 1], fp32 or in the `form` given, on the VAE's device.

        `on_frame` is called before each latent frame's work is handed to the device (once for each
        tile or strip; `decode_calls` says how often in all). `share`: of the longer side, only
        what lies over these latents (start, end); a VAE that tiles has no shares.
        """
        with self._decoding(latent_CTYX, on_frame) as latent:
            if self.tiled(latent_CTYX):
                return form(self._open().decode(latent).sample[0])
            strips = self.strips(latent_CTYX.shape, share=share)
            tell = on_frame or _nobody
            return vae_sweep.decode(self._open(), latent, strips, tell, form, share)[0]

    @torch.inference_mode()
    def decode_strip(
        self, latent_CTYX: Tensor, strips: Strips, on_frame: OnFrame | None = None
    ) -> Tensor | None:
        """Collective. This rank's strip of what `decode` returns where it does not tile.

        None on a rank for which no strip is left.
        """
        decoder = self._open().decoder
        if strips.empty:
            strips.stand_by(decoder, self.device)
            return None
        with self._decoding(latent_CTYX, on_frame) as latent, strips.applied(decoder):
            video_3FHW: Tensor = self._open().decode(latent).sample[0]
        return video_3FHW.float()

    @torch.inference_mode()
    def decode_tiles(
        self, latent_CTYX: Tensor, places: Sequence[Place], on_frame: OnFrame | None = None
    ) -> list[Tensor]:
        """Some of the `tiles`: each (3, F, h, w) in the VAE's dtype, not blended, not clamped."""
        tiles = self.tiles(latent_CTYX)
        with self._decoding(latent_CTYX, on_frame) as latent:
            return [tiles.decode(latent, place) for place in places]

    def tiles(self, latent_CTYX: Tensor) -> Tiles:
        """The tiles in which a VAE with tiling decodes this latent."""
        return Tiles(self._open(), latent_CTYX.shape)

    def tiled(self, latent_CTYX: Tensor) -> bool:
        """`decode` works in tiles: it was asked for, and the picture is larger than one."""
        return self._tiled(latent_CTYX.shape)

    def _tiled(self, shape: Sequence[int]) -> bool:
        return bool(self._open().use_tiling) and Tiles(self._open(), shape).needed

    def strips(
        self, shape: Sequence[int], way: Pass = DECODE, share: tuple[int, int] | None = None
    ) -> int:
        """In how many strips it passes over latents (C, T, Y, X), or a `share` of them, now."""
        model = self._open()
        channels = max(model.encoder.dim, model.decoder.dim)
        picture = Picture.of(shape, share, channels * self.dtype.itemsize)
        if way is ENCODE and self.encode_room is not None:
            return picture.strips_within(way, self.encode_room)
        return picture.strips_within(way, room(self.limit, self.device))

    def decode_calls(self, latent_CTYX: Tensor, share: tuple[int, int] | None = None) -> int:
        """How often `decode` calls `on_frame` for this latent."""
        if self.tiled(latent_CTYX):
            return int(latent_CTYX.shape[1]) * len(self.tiles(latent_CTYX).places)
        return int(latent_CTYX.shape[1]) * self.strips(latent_CTYX.shape, share=share)

    @contextmanager
    def _decoding(self, latent_CTYX: Tensor, on_frame: OnFrame | None) -> Iterator[Tensor]:
        """The decoder's own latent (B, C, T, Y, X), while frames are told and features are kept."""
        model = self._open()
        latent = latent_CTYX.to(self.device, torch.float32) * self._std + self._mean
        watch = model.decoder.register_forward_pre_hook(_calling(on_frame)) if on_frame else None
        try:
            yield latent[None].to(self.dtype)
        finally:
            model.clear_cache()
            if watch:
                watch.remove()

    def move(self, device: torch.device) -> None:
        """Put the weights on a device."""
        module_weights.move(self._open(), device)
        vae_fast.quicken(self._open(), gpu=device.type == "cuda")
        self.device = device
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    def close(self) -> None:
        """Free the weights. Idempotent; the VAE cannot be used afterwards."""
        self._model = None

    def _open(self) -> Any:  # noqa: ANN401  diffusers has no types
        if self._model is None:
            raise RuntimeError("the VAE is closed")
        return self._model


def read_config(tensors: Mapping[str, Tensor], path: Path) -> dict[str, object]:
    """AutoencoderKLWan's arguments as Wan's tensors say; CheckpointError where they cannot."""
    base, *_ = module_weights.need(tensors, "encoder.conv1.weight", 5, path)
    channels, *_ = module_weights.need(tensors, "conv2.weight", 5, path)
    _, decoder_base, *_ = module_weights.need(tensors, "decoder.head.2.weight", 5, path)
    if channels != LATENT_CHANNELS:
        raise CheckpointError(
            f"{path.name}: the VAE has {channels} latent channels",
            expected=f"{LATENT_CHANNELS}, as in Wan 2.1",
            path=str(path),
            name="conv2.weight",
        )
    starts = [level * (RESIDUALS + 1) for level in range(LEVELS)]  # a downsampler ends each level
    widths = [
        module_weights.need(tensors, f"encoder.downsamples.{at}.residual.2.weight", 5, path)[0]
        for at in starts
    ]
    return {
        "base_dim": base,
        "decoder_base_dim": decoder_base,
        "z_dim": channels,
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": RESIDUALS,
        "temperal_downsample": [
            f"encoder.downsamples.{at + RESIDUALS}.time_conv.weight" in tensors
            for at in starts[:-1]
        ],
    }


def _from_folder(path: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401  diffusers has no types
    """A diffusers folder: config.json and safetensors."""
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"there is no {CONFIG} in {path}",
            expected="a diffusers `vae` folder, or Wan2.1_VAE.pth",
            path=str(path),
        )
    try:
        model, report = libraries.AutoencoderKLWan.from_pretrained(
            path,
            torch_dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,  # the other way needs the accelerate package
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no usable VAE folder ({error})", path=str(path)
        ) from error
    wrong = {kind: [str(name) for name in names] for kind, names in report.items() if names}
    if wrong:
        raise CheckpointError(
            f"{path} does not fit its own {CONFIG}: {wrong}", path=str(path), faults=wrong
        )
    return model


def _nobody() -> None:
    """Told of frames where nobody asked."""


def _calling(on_frame: OnFrame) -> Callable[[nn.Module, object], None]:
    return lambda _module, _inputs: on_frame()
