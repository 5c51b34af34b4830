"""Micro models of every quantised type, generated on demand: random blocks, the same bytes on every machine.

A block has the codes of neighbouring weights and their scales. All its bits are random, so that every code and every
inner scale occurs. Only its float scales have a fixed size (weights of a standard deviation near 0.05) and random
signs. No quantiser would produce such blocks, but every pattern of bits is a valid matrix. As committed files these
models would take 25 MB, so this module generates them, and the goldens hold the hash of each file.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.export import add_hyperparameters
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.tensor_names import Weight, inventory

_OUTLIERS = (5, 133)  # channels with a large gain, as trained models have: they set the scale of rounded activations
_OUTLIER = 8.0  # factor of their gain


@dataclass(frozen=True)
class ModelRecipe:
    """Family and matrix types of one micro model.

    Attributes:
        family: Llama files permute the rows of q and k, Qwen2 has biases, and Qwen3 has norms of q and k.
        ggml_type: Type of the matrices.
        exceptions: Types of other matrices, by canonical name, `lm_head` or `layers.1.v_proj`.
    """

    family: str
    ggml_type: GGMLType
    exceptions: Mapping[str, GGMLType] = field(default_factory=dict)

    @property
    def types(self) -> set[GGMLType]:
        """All types of the matrices."""
        return {self.ggml_type, *self.exceptions.values()}

    @property
    def config(self) -> ModelConfig:
        """Configuration; its widths are multiples of 256, the largest block, and differ if llama.cpp can load that."""
        family = FAMILIES[self.family]
        return ModelConfig(
            family=self.family,
            hidden_size=256,
            intermediate_size=512,
            n_layers=2,
            n_heads=8 if family.llamacpp.same_width else 24,
            n_kv_heads=2,
            head_dim=32,
            vocab_size=96,
            rms_norm_eps=2.0**-17,  # exact in float32, the dtype in the file
            rope_theta=10000.0,
            rope_scaling=None,
            max_position_embeddings=256,
            qkv_bias=bool(family.qkv_bias),
            o_bias=False,
            qk_norm=family.qk_norm,
            tie_word_embeddings=False,
        )


def _pure(family: str, *types: GGMLType) -> dict[str, ModelRecipe]:
    return {kind.name: ModelRecipe(family, kind) for kind in types}


# llama-quantize uses Q6_K for these matrices in a Q4_K_M file of two layers.
_Q4_K_M: dict[str, GGMLType] = dict.fromkeys(("lm_head", "layers.1.v_proj", "layers.1.down_proj"), GGMLType.Q6_K)

MODELS: Mapping[str, ModelRecipe] = MappingProxyType(
    {
        **_pure("llama", GGMLType.F16, GGMLType.BF16),
        **_pure("llama", GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0),
        **_pure("llama", GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K),
        **_pure("qwen3", GGMLType.IQ4_NL, GGMLType.IQ4_XS, GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.MXFP4),
        **_pure("qwen2", GGMLType.IQ1_S, GGMLType.IQ1_M, GGMLType.IQ2_XXS, GGMLType.IQ2_XS, GGMLType.IQ2_S),
        **_pure("qwen2", GGMLType.IQ3_XXS, GGMLType.IQ3_S, GGMLType.NVFP4, GGMLType.Q1_0, GGMLType.Q2_0),
        "Q4_K_M": ModelRecipe("qwen2", GGMLType.Q4_K, _Q4_K_M),
    }
)


@dataclass(frozen=True)
class Scale:
    """A float16 scale or minimum of a block: random between 0.5 and 1.5 times `size`, with a random sign.

    Minima get the sign that moves the mean of the block towards zero: the sign of the scale if they are subtracted, the
    opposite sign if they are added.
    """

    offset: int  # of its bytes in the block
    size: float
    pulls: str = ""  # of minima: `added` or `subtracted`


SCALES: Mapping[GGMLType, tuple[Scale, ...]] = {
    GGMLType.Q4_0: (Scale(0, 0.0105),),
    GGMLType.Q4_1: (Scale(0, 0.0095), Scale(2, 0.07, "added")),
    GGMLType.Q5_0: (Scale(0, 0.0052),),
    GGMLType.Q5_1: (Scale(0, 0.0047), Scale(2, 0.07, "added")),
    GGMLType.Q8_0: (Scale(0, 0.00065),),
    GGMLType.Q2_K: (Scale(80, 0.0033), Scale(82, 0.005, "subtracted")),
    GGMLType.Q3_K: (Scale(108, 0.00115),),
    GGMLType.Q4_K: (Scale(0, 0.00016), Scale(2, 0.0012, "subtracted")),
    GGMLType.Q5_K: (Scale(0, 0.00008), Scale(2, 0.0012, "subtracted")),
    GGMLType.Q6_K: (Scale(208, 0.000035),),
    GGMLType.IQ4_NL: (Scale(0, 0.0007),),
    GGMLType.IQ4_XS: (Scale(0, 0.000038),),
    GGMLType.IQ1_S: (Scale(0, 0.0065),),
    GGMLType.IQ2_XXS: (Scale(0, 0.00085),),
    GGMLType.IQ2_XS: (Scale(0, 0.00085),),
    GGMLType.IQ2_S: (Scale(0, 0.00085),),
    GGMLType.IQ3_XXS: (Scale(0, 0.00034),),
    GGMLType.IQ3_S: (Scale(0, 0.00034),),
    GGMLType.TQ1_0: (Scale(52, 0.06),),
    GGMLType.TQ2_0: (Scale(64, 0.04),),
    GGMLType.Q1_0: (Scale(0, 0.05),),
    GGMLType.Q2_0: (Scale(0, 0.04),),
}
_IQ1_M_SIZE = 0.0065


def write_model(name: str, folder: Path) -> Path:
    """Write one of `MODELS` into a folder as a GGUF file without vocabulary; return the path."""
    recipe, path = MODELS[name], folder / f"{name}.gguf"
    config = recipe.config
    writer = GGUFWriter(path, config.family)
    try:
        writer.add_name(f"llorch micro {name}")
        writer.add_quantization_version(GGML_QUANT_VERSION)
        writer.add_tokenizer_model("no_vocab")
        add_hyperparameters(writer, config)
        for weight in inventory(config).values():
            if len(weight.shape) == 1:
                writer.add_tensor(weight.gguf, _vector(name, weight))
                continue
            kind = recipe.exceptions.get(weight.name, recipe.ggml_type)
            raw = matrix_bytes(kind, weight.shape, key=f"{name} {weight.name}")
            # The gguf package accepts any type number, even of types that it cannot name, and does not convert int8.
            ggml_type: GGMLQuantizationType = kind  # pyright: ignore[reportAssignmentType]
            writer.add_tensor(weight.gguf, raw.view(np.int8), raw_shape=weight.shape, raw_dtype=ggml_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def random_blocks(ggml_type: GGMLType, count: int, *, key: str) -> np.ndarray:
    """Draw blocks of random codes and scales, one per row, uint8; the same `key` gives the same blocks."""
    block_bytes = BLOCK_SIZES[ggml_type][1]
    blocks = _random_bytes(count * block_bytes, key).reshape(count, block_bytes)
    match ggml_type:
        case GGMLType.F16:
            blocks[...] = _bits_to_floats(blocks.view("<u2"), 0.085).astype("<f2").view(np.uint8)
        case GGMLType.BF16:
            blocks[...] = (_bits_to_floats(blocks.view("<u2"), 0.085).view("<u4") >> 16).astype("<u2").view(np.uint8)
        case GGMLType.MXFP4:
            blocks[:, 0] = 119 + blocks[:, 0] % 4  # the scale, a power of two; 128 stands for 1
        case GGMLType.NVFP4:
            blocks[:, :4] &= 0x0F  # of the scales: three bits after the point, and the lowest of the exponent
        case GGMLType.IQ1_M:
            _scatter_scale(blocks[:, 48:56].view("<u2"))
        case GGMLType.TQ1_0:
            blocks[:, :52] = (blocks[:, :52].astype(np.uint16) % 243 * 256 + 242) // 243  # five digits of base three
    for scale in SCALES.get(ggml_type, ()):
        _set_scale(blocks, scale)
    return blocks


def matrix_bytes(ggml_type: GGMLType, shape: tuple[int, ...], *, key: str) -> np.ndarray:
    """Draw the bytes of a random matrix, (out, in), from `random_blocks`."""
    return random_blocks(ggml_type, shape[0] * shape[1] // BLOCK_SIZES[ggml_type][0], key=key).reshape(-1)


def _vector(name: str, weight: Weight) -> np.ndarray:
    """Draw a gain around 1 with outliers if the name ends with `_norm`, else a bias."""
    units = _bits_to_floats(_random_bytes(2 * weight.shape[0], f"{name} {weight.name}").view("<u2"), 0.5)
    if not weight.name.endswith("_norm"):
        return units
    gains = np.float32(1) + units
    if gains.size > max(_OUTLIERS):
        gains[list(_OUTLIERS)] *= np.float32(_OUTLIER)
    return gains


def _random_bytes(count: int, key: str) -> np.ndarray:
    """Draw bytes that depend on the key only, and are equal on every machine."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    # NumPy guarantees that this stream of bits never changes; it does not guarantee this for distributions.
    words = np.random.Philox(key=seed).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.uint8)[:count].copy()


def _bits_to_floats(bits: np.ndarray, size: float) -> np.ndarray:
    """Convert 16 random bits each to numbers between -size and size, by operations that round equally everywhere."""
    return ((bits.astype(np.float64) - 32767.5) / 32768 * size).astype(np.float32)


def _draw_scales(bits: np.ndarray, size: float) -> np.ndarray:
    """Convert random bits to scales of 0.5 to 1.5 times `size`, as float16 bits; the lowest bit is the sign."""
    magnitude = size * (0.5 + (bits >> 1) / 32768.0)
    return np.where(bits & 1, -magnitude, magnitude).astype("<f2").view("<u2")


def _set_scale(blocks: np.ndarray, scale: Scale) -> None:
    """Replace a random scale of every block by a scale of the given size, in place."""
    bits = np.ascontiguousarray(blocks[:, scale.offset : scale.offset + 2]).view("<u2")
    new = _draw_scales(bits, scale.size).view(np.uint8)
    if scale.pulls:
        sign = blocks[:, scale.offset - 1] & 0x80  # sign of the scale, whose bytes precede the minimum
        new[:, 1] = new[:, 1] & 0x7F | (sign if scale.pulls == "subtracted" else sign ^ 0x80)
    blocks[:, scale.offset : scale.offset + 2] = new


def _scatter_scale(words: np.ndarray) -> None:
    """Set the scale of IQ1_M, the top four bits of each of four words, in place; their other bits are inner scales."""
    random_bits = words[:, 0] >> 12 | words[:, 1] >> 12 << 4 | words[:, 2] >> 12 << 8 | words[:, 3] >> 12 << 12
    bits = _draw_scales(random_bits, _IQ1_M_SIZE)
    for index in range(4):
        words[:, index] = words[:, index] & 0x0FFF | (bits >> 4 * index & 0xF) << 12
