"""Names, shapes and scales of every tensor of a Wan folder, for random values.

Names are Wan's own: those of the .pth files, and of the DiT as `weights.architecture` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shared_offload.synth.recipes import Kernel, Recipe, default_recipe
from shared_offload.synth.sizes import ClipSize, T5Size
from shared_offload.weights.architecture import Architecture, block_shapes, non_block_shapes
from shared_offload.weights.checkpoint import block_name

Recipes = dict[str, Recipe]

T5_BUCKETS = 32  # of relative positions
CLIP_POSITION_STD = 0.3

VAE_LATENT = 16
VAE_MULTIPLIERS = (1, 2, 4, 4)
VAE_RES_BLOCKS = 2
VAE_DOWN_TIME = (False, True, True)
VAE_LATENT_GAIN = 4.0  # the encoder's output has the deviation of Wan's latents, about 2
VAE_PIXEL_GAIN = 0.2  # the decoder's output seldom leaves [-1, 1]


def dit_recipes(arch: Architecture) -> Recipes:
    """All tensors of the DiT, non-block ones first, then block by block.

    `modulation` is N(0, 1 / D), what Wan's training starts from. The modulation that depends on
    time comes out at about 0.2, so a gated branch adds a fraction of what it computes and the
    residual stream stays within one order of magnitude through 40 blocks.
    """
    shapes = non_block_shapes(arch)
    for block in range(arch.num_layers):
        shapes |= {block_name(block, name): shape for name, shape in block_shapes(arch).items()}
    return {
        name: Recipe(shape, arch.dim**-0.5)
        if name.endswith("modulation")
        else default_recipe(name, shape)
        for name, shape in shapes.items()
    }


def t5_recipes(size: T5Size) -> Recipes:
    """The encoder of umT5. Its attention has no 1 / sqrt(head width): the queries carry it."""
    dim, width, ffn = size.dim, size.heads * size.head_dim, size.ffn_dim
    shapes = {"token_embedding.weight": (size.vocabulary, dim), "norm.weight": (dim,)}
    for n in range(size.layers):
        shapes |= {
            f"blocks.{n}.norm1.weight": (dim,),
            **{f"blocks.{n}.attn.{part}.weight": (width, dim) for part in "qkv"},
            f"blocks.{n}.attn.o.weight": (dim, width),
            f"blocks.{n}.norm2.weight": (dim,),
            f"blocks.{n}.ffn.gate.0.weight": (ffn, dim),
            f"blocks.{n}.ffn.fc1.weight": (ffn, dim),
            f"blocks.{n}.ffn.fc2.weight": (dim, ffn),
            f"blocks.{n}.pos_embedding.embedding.weight": (T5_BUCKETS, size.heads),
        }
    gains = {".attn.q.weight": size.head_dim**-0.5}
    fixed = {"token_embedding.weight": 1.0, ".pos_embedding.embedding.weight": 0.5}
    return _recipes(shapes, gains, fixed)


def clip_recipes(size: ClipSize) -> Recipes:
    """The visual tower of CLIP, and the scalar that Wan's file has beside it."""
    dim, mlp, tokens = size.dim, size.mlp_dim, (size.image // size.patch) ** 2 + 1
    shapes: dict[str, tuple[int, ...]] = {
        "log_scale": (),
        "visual.cls_embedding": (1, 1, dim),
        "visual.pos_embedding": (1, tokens, dim),
        "visual.head": (dim, size.projection),
        "visual.patch_embedding.weight": (dim, 3, size.patch, size.patch),
    }
    linears = {"attn.to_qkv": (3 * dim, dim), "attn.proj": (dim, dim)}
    linears |= {"mlp.0": (mlp, dim), "mlp.2": (dim, mlp)}
    for n in range(size.layers):
        prefix = f"visual.transformer.{n}."
        for name, shape in linears.items():
            shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
        shapes |= _affine(f"{prefix}norm1", dim) | _affine(f"{prefix}norm2", dim)
    shapes |= _affine("visual.pre_norm", dim) | _affine("visual.post_norm", dim)
    fixed = {"cls_embedding": CLIP_POSITION_STD, "pos_embedding": CLIP_POSITION_STD}
    recipes = _recipes(shapes, {}, fixed)
    return recipes | {"log_scale": Recipe((), 0.0, mean=4.6052)}  # ln 100, where CLIP clamps it


def vae_recipes(dim: int) -> Recipes:
    """The causal 3-D VAE whose first convolution has `dim` channels (96 in Wan 2.1)."""
    latent = VAE_LATENT
    shapes = dict(
        [
            *_encoder(dim),
            *_conv("conv1", 2 * latent, 2 * latent, 1, 1, 1),
            *_conv("conv2", latent, latent, 1, 1, 1),
            *_decoder(dim),
        ]
    )
    gains = {"encoder.head.2.weight": VAE_LATENT_GAIN, "decoder.head.2.weight": VAE_PIXEL_GAIN}
    recipes = _recipes(shapes, gains, {})
    return {name: replace(recipe, kernel=_kernel(name)) for name, recipe in recipes.items()}


def _kernel(name: str) -> Kernel:
    """Kernels that see neighbours in space or time, on the way to pixels, blur."""
    if not (name.startswith("decoder.") and name.endswith(".weight")):
        return "noise"
    if "time_conv" in name:
        return "twin"
    flat = ("shortcut.weight", "to_qkv.weight", "proj.weight")
    return "noise" if name.endswith(flat) else "blur"


Shapes = Iterable[tuple[str, tuple[int, ...]]]


def _encoder(dim: int) -> Shapes:
    widths = [dim * m for m in (1, *VAE_MULTIPLIERS)]
    yield from _conv("encoder.conv1", widths[0], 3, 3, 3, 3)
    index = 0
    for level, out in enumerate(widths[1:]):
        for width in (widths[level], *[out] * (VAE_RES_BLOCKS - 1)):
            yield from _residual(f"encoder.downsamples.{index}", width, out)
            index += 1
        if level < len(VAE_DOWN_TIME):
            prefix = f"encoder.downsamples.{index}"
            yield from _conv(f"{prefix}.resample.1", out, out, 3, 3)
            if VAE_DOWN_TIME[level]:
                yield from _conv(f"{prefix}.time_conv", out, out, 3, 1, 1)
            index += 1
    yield from _middle("encoder.middle", widths[-1])
    yield from _head("encoder.head", widths[-1], 2 * VAE_LATENT)


def _decoder(dim: int) -> Shapes:
    widths = [dim * m for m in (VAE_MULTIPLIERS[-1], *reversed(VAE_MULTIPLIERS))]
    yield from _conv("decoder.conv1", widths[0], VAE_LATENT, 3, 3, 3)
    yield from _middle("decoder.middle", widths[0])
    index, width = 0, widths[0]
    for level, out in enumerate(widths[1:]):
        for _ in range(VAE_RES_BLOCKS + 1):
            yield from _residual(f"decoder.upsamples.{index}", width, out)
            index, width = index + 1, out
        if level < len(VAE_DOWN_TIME):
            prefix = f"decoder.upsamples.{index}"
            width = out // 2
            yield from _conv(f"{prefix}.resample.1", width, out, 3, 3)
            if VAE_DOWN_TIME[-1 - level]:  # one feature map for each of the two new frames
                yield from _conv(f"{prefix}.time_conv", 2 * out, out, 3, 1, 1)
            index += 1
    yield from _head("decoder.head", widths[-1], 3)


def _residual(prefix: str, width: int, out: int) -> Shapes:
    yield f"{prefix}.residual.0.gamma", (width, 1, 1, 1)
    yield from _conv(f"{prefix}.residual.2", out, width, 3, 3, 3)
    yield f"{prefix}.residual.3.gamma", (out, 1, 1, 1)
    yield from _conv(f"{prefix}.residual.6", out, out, 3, 3, 3)
    if width != out:
        yield from _conv(f"{prefix}.shortcut", out, width, 1, 1, 1)


def _middle(prefix: str, width: int) -> Shapes:
    yield from _residual(f"{prefix}.0", width, width)
    yield f"{prefix}.1.norm.gamma", (width, 1, 1)
    yield from _conv(f"{prefix}.1.to_qkv", 3 * width, width, 1, 1)
    yield from _conv(f"{prefix}.1.proj", width, width, 1, 1)
    yield from _residual(f"{prefix}.2", width, width)


def _head(prefix: str, width: int, out: int) -> Shapes:
    yield f"{prefix}.0.gamma", (width, 1, 1, 1)
    yield from _conv(f"{prefix}.2", out, width, 3, 3, 3)


def _conv(name: str, out: int, width: int, *kernel: int) -> Shapes:
    yield f"{name}.weight", (out, width, *kernel)
    yield f"{name}.bias", (out,)


def _affine(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _recipes(
    shapes: Mapping[str, tuple[int, ...]], gains: Mapping[str, float], stds: Mapping[str, float]
) -> Recipes:
    """Default recipes, but for names that end in a key of `gains` or of `stds`."""

    def recipe(name: str, shape: tuple[int, ...]) -> Recipe:
        for ending, std in stds.items():
            if name.endswith(ending):
                return Recipe(shape, std)
        gain = next((g for ending, g in gains.items() if name.endswith(ending)), 1.0)
        return default_recipe(name, shape, gain)

    return {name: recipe(name, shape) for name, shape in shapes.items()}
