"""Hyperparameters of one model, read from a Hugging Face `config.json` or from GGUF metadata.

This is the only place that reads hyperparameters. A family states what its blocks contain (biases, query and
key norms); the weight loader then checks that the file agrees. Whatever is not named here is refused by name.

Source: transformers `configuration_{llama,qwen2,qwen3}.py`; llama.cpp `src/llama-model.cpp` and `docs/gguf.md`.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from llorch.errors import FormatError
from llorch.fields import Fields

FamilyName = Literal["llama", "qwen2", "qwen3"]


@dataclass(frozen=True)
class Family:
    """What the blocks of a family contain; None means that the file decides."""

    qkv_bias: bool | None
    o_bias: bool | None
    qk_norm: bool
    # Where config.json names none, as in transformers:
    head_dim: int | None  # None is hidden_size / n_heads
    n_kv_heads: int | None  # None is n_heads
    context: int


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, o_bias=None, qk_norm=False, head_dim=None, n_kv_heads=None, context=2048),
    "qwen2": Family(qkv_bias=True, o_bias=False, qk_norm=False, head_dim=None, n_kv_heads=32, context=32768),
    "qwen3": Family(qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, n_kv_heads=32, context=32768),
}
_O_BIAS_IN_GGUF = ("llama",)  # llama.cpp reads attn_output.bias for no other family of these

# A null of config.json that transformers does not take for a default: it refuses it, or computes something else.
_NEVER_NULL = (
    "attention_bias", "hidden_act", "is_causal", "max_position_embeddings", "mlp_bias", "tie_word_embeddings",
    "use_sliding_window",
)  # fmt: skip
_NEVER_NULL_IN_ROPE = ("original_max_position_embeddings", "rope_theta", "rope_type", "truncate", "type")
_HUGGINGFACE_LACKED = {  # key to the values that llorch computes; the first is that of an absent key
    "is_causal": (True,), "per_layer_config": (None,), "hidden_act": ("silu", "swish"), "mlp_bias": (False,),
    "use_sliding_window": (False,), "partial_rotary_factor": (1, None), "quantization_config": (None,),
    "original_max_position_embeddings": (None,),  # belongs into rope_scaling
}  # fmt: skip
# llama.cpp reads these of YaRN for other architectures only; a file that needs one would be computed wrongly.
_IGNORED_OF_YARN = {
    "yarn_ext_factor": (1.0, -1.0), "yarn_attn_factor": (1.0,), "yarn_beta_fast": (32.0,), "yarn_beta_slow": (1.0,),
    "yarn_log_multiplier": (0.0,),
}  # fmt: skip
_LARGEST = {
    "hidden_size": 2**20, "intermediate_size": 2**24, "n_layers": 512, "n_heads": 2**16, "n_kv_heads": 2**16,
    "head_dim": 2**16, "vocab_size": 2**24, "max_position_embeddings": 2**27,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`."""

    factor: float  # >= 1


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1 scaling: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float  # >= 1
    low_freq_factor: float  # > 0
    high_freq_factor: float  # > low_freq_factor
    original_max_position_embeddings: int  # positions of pre-training


@dataclass(frozen=True, kw_only=True)
class FactorScaling:
    """One divisor per frequency, as the GGUF tensor `rope_freqs.weight` stores them."""

    factors: tuple[float, ...]  # head_dim / 2 of them, each > 0


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: interpolated and unscaled frequencies blended by wavelength, cos and sin multiplied by one factor."""

    factor: float  # >= 1
    original_max_position_embeddings: int  # positions of pre-training
    attention_factor: float  # multiplies cos and sin; > 0
    beta_fast: float = 32.0  # rotations above which a frequency is kept
    beta_slow: float = 1.0  # rotations below which a frequency is interpolated

    def ramp(self, *, head_dim: int, theta: float) -> tuple[int, int]:
        """The last pair whose frequency is kept whole and the first that is wholly interpolated."""

        def pair_with(rotations: float) -> float:
            length = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(theta))

        return max(math.floor(pair_with(self.beta_fast)), 0), min(math.ceil(pair_with(self.beta_slow)), head_dim - 1)


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of a decoder of the Llama, Qwen2 or Qwen3 family; OutOfRange for what no model can have."""

    family: FamilyName
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width of the feed-forward part
    n_layers: int  # 1 to 512
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads, divides n_heads
    head_dim: int  # width of one head, even
    vocab_size: int  # rows of embed_tokens
    rms_norm_eps: float  # added to the mean square; 0 < eps < 1
    rope_theta: float  # base of the RoPE wavelengths; > 1
    rope_scaling: RopeScaling | None
    max_position_embeddings: int  # context length
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # RMSNorm of every query and key head before RoPE
    tie_word_embeddings: bool  # the output matrix is embed_tokens

    def __post_init__(self) -> None:
        """Refuse values that no model can have."""
        for name, limit in _LARGEST.items():
            if not 1 <= getattr(self, name) <= limit:
                raise _out_of_range(f"{name} must be from 1 to {limit}, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise _out_of_range(
                f"n_heads must be a multiple of n_kv_heads, got n_heads={self.n_heads} n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise _out_of_range(f"head_dim must be even for RoPE, got {self.head_dim}")
        if not 0 < self.rms_norm_eps < 1:
            raise _out_of_range(f"rms_norm_eps must be between 0 and 1, got {self.rms_norm_eps}")
        if not 1 < self.rope_theta < math.inf:
            raise _out_of_range(f"rope_theta must be above 1 and finite, got {self.rope_theta}")
        if isinstance(self.rope_scaling, FactorScaling):
            self._check_factors(self.rope_scaling.factors)
        if isinstance(self.rope_scaling, YarnScaling):
            self._check_ramp(self.rope_scaling)

    def _check_factors(self, factors: tuple[float, ...]) -> None:
        if len(factors) != self.head_dim // 2:
            raise _out_of_range(
                f"rope_freqs.weight must have head_dim / 2 = {self.head_dim // 2} factors, got {len(factors)}"
            )
        if not all(0 < factor < math.inf for factor in factors):
            raise _out_of_range("rope_freqs.weight: every factor must be positive and finite")

    def _check_ramp(self, yarn: YarnScaling) -> None:
        start, end = yarn.ramp(head_dim=self.head_dim, theta=self.rope_theta)
        if end < start:  # transformers divides by the negative width, llama.cpp by 0.001
            raise _out_of_range(
                f"the ramp of yarn must end behind its start, got pairs {start} to {end} from beta_fast="
                f"{yarn.beta_fast} beta_slow={yarn.beta_slow} original_max_position_embeddings="
                f"{yarn.original_max_position_embeddings} rope_theta={self.rope_theta}; "
                "transformers and llama.cpp compute different frequencies from it"
            )

    @property
    def q_width(self) -> int:
        """Width of all query heads joined."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads joined."""
        return self.n_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.n_heads // self.n_kv_heads

    @classmethod
    def from_huggingface(cls, values: Mapping[str, object], *, path: str | Path) -> "ModelConfig":
        """Read the object of a `config.json`; a FormatError names the key and the file `path`."""
        fields = Fields(values, path)
        family = _family(fields.text("model_type"), path)
        defaults = FAMILIES[family]
        _refuse_huggingface_variants(fields)
        n_heads = fields.integer("num_attention_heads", low=1)
        hidden_size = fields.integer("hidden_size", low=1)
        bias = fields.boolean("attention_bias", default=False)
        rope = _huggingface_rope(fields)
        context = fields.integer("max_position_embeddings", default=defaults.context)
        with fields.naming_the_file():
            return cls(
                family=family,
                hidden_size=hidden_size,
                intermediate_size=fields.integer("intermediate_size"),
                n_layers=fields.integer("num_hidden_layers"),
                n_heads=n_heads,
                n_kv_heads=_n_kv_heads(fields, n_heads, defaults.n_kv_heads),
                head_dim=_head_dim(fields, "head_dim", hidden_size, n_heads, defaults.head_dim),
                vocab_size=fields.integer("vocab_size"),
                rms_norm_eps=fields.number("rms_norm_eps"),
                rope_theta=_huggingface_theta(fields, rope),
                rope_scaling=_huggingface_scaling(rope, context) if rope is not None else None,
                max_position_embeddings=context,
                qkv_bias=_stated(defaults.qkv_bias, bias),
                o_bias=_stated(defaults.o_bias, bias),
                qk_norm=defaults.qk_norm,
                tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, object],
        *,
        tensor_names: Container[str],
        vocab_size: int,
        rope_factors: np.ndarray | None,
        path: str | Path,
    ) -> "ModelConfig":
        """Read GGUF metadata; errors as in `from_huggingface`.

        Biases and tying show in `tensor_names` only; `vocab_size` is the number of rows of `token_embd.weight`,
        `rope_factors` the tensor `rope_freqs.weight`, when there is one.
        """
        arch = Fields(metadata, path).text("general.architecture")
        family = _family(arch, path)
        fields = Fields(metadata, path, prefix=f"{arch}.")
        n_heads = fields.integer("attention.head_count", low=1)
        hidden_size = fields.integer("embedding_length", low=1)
        with fields.naming_the_file():
            head_dim = _head_dim(fields, "attention.key_length", hidden_size, n_heads, None)
            _refuse_gguf_variants(fields, head_dim)
            return cls(
                family=family,
                hidden_size=hidden_size,
                intermediate_size=fields.integer("feed_forward_length"),
                n_layers=fields.integer("block_count"),
                n_heads=n_heads,
                n_kv_heads=fields.integer("attention.head_count_kv", default=n_heads, low=1),
                head_dim=head_dim,
                vocab_size=vocab_size,
                rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
                rope_theta=fields.number("rope.freq_base", default=10000.0),
                rope_scaling=_gguf_scaling(fields, family, rope_factors),
                max_position_embeddings=fields.integer("context_length"),
                qkv_bias=_stated(FAMILIES[family].qkv_bias, "blk.0.attn_q.bias" in tensor_names),
                o_bias=family in _O_BIAS_IN_GGUF and "blk.0.attn_output.bias" in tensor_names,
                qk_norm=FAMILIES[family].qk_norm,
                tie_word_embeddings="output.weight" not in tensor_names,
            )


def _out_of_range(message: str) -> FormatError:
    return FormatError("OutOfRange", f"config: {message}")


def _stated(by_family: bool | None, by_file: bool) -> bool:
    return by_file if by_family is None else by_family


def _head_dim(fields: Fields, key: str, hidden_size: int, n_heads: int, default: int | None) -> int:
    if default is None and hidden_size % n_heads == 0:
        default = hidden_size // n_heads
    if default is None and not fields.has(key):
        raise _out_of_range(f"hidden_size {hidden_size} is no multiple of n_heads {n_heads} and head_dim is not given")
    return fields.integer(key, default=default)


def _n_kv_heads(fields: Fields, n_heads: int, default: int | None) -> int:
    if default is None or fields.is_null("num_key_value_heads"):
        default = n_heads
    return fields.integer("num_key_value_heads", default=default, low=1)


def _family(name: str, path: str | Path) -> FamilyName:
    if name not in get_args(FamilyName):
        raise FormatError("Unsupported", f"architecture {name!r}: llorch reads {', '.join(FAMILIES)}", path=path)
    return name  # pyright: ignore[reportReturnType]


def _refuse_huggingface_variants(fields: Fields) -> None:
    fields.refuse_null(*_NEVER_NULL)
    if fields.values["model_type"] != "llama":
        fields.refuse_null("head_dim")
    for key, known in _HUGGINGFACE_LACKED.items():
        fields.refuse(key, unless=known, default=known[0])
    every_layer = ["full_attention"] * fields.integer("num_hidden_layers")
    if fields.has("layer_types") and fields.values["layer_types"] != every_layer:
        raise fields.error("Unsupported", "layer_types", "full_attention for every layer", fields.values["layer_types"])


def _refuse_gguf_variants(fields: Fields, head_dim: int) -> None:
    fields.refuse("expert_count", unless=(0,), default=0)
    fields.refuse("nextn_predict_layers", unless=(0,), default=0)
    fields.refuse("attention.causal", unless=(True,), default=True)
    fields.refuse("attention.value_length", unless=(head_dim,), default=head_dim)
    rope_width = fields.integer("rope.dimension_count", default=head_dim)
    if rope_width != head_dim:
        raise _out_of_range(f"rope.dimension_count must be head_dim = {head_dim}, got {rope_width}")


def _huggingface_rope(fields: Fields) -> Fields | None:
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        # transformers takes the old key then, and with it the default theta: never what the author meant.
        raise fields.error("Inconsistent", "rope_scaling", "no other values than rope_parameters", old.values)
    rope = new or old
    if rope is not None:
        rope.refuse_null(*_NEVER_NULL_IN_ROPE)
        for key, value in rope.values.items():
            if isinstance(value, Mapping):
                raise rope.error("Unsupported", key, "one set of RoPE parameters for all layers", value)
    return rope


def _huggingface_theta(fields: Fields, rope: Fields | None) -> float:
    if rope is not None and rope.has("rope_theta"):
        return rope.number("rope_theta")
    fields.refuse_null("rope_theta")
    return fields.number("rope_theta", default=10000.0)


def _huggingface_scaling(rope: Fields, context: int) -> RopeScaling | None:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    rope.refuse("partial_rotary_factor", unless=(1, None), default=None)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=rope.number("factor", low=1.0))
        case "llama3":
            low = rope.number("low_freq_factor", low=1e-6)
            return Llama3Scaling(
                factor=rope.number("factor", low=1.0),
                low_freq_factor=low,
                high_freq_factor=rope.number("high_freq_factor", low=np.nextafter(low, math.inf)),
                original_max_position_embeddings=rope.integer("original_max_position_embeddings", low=1),
            )
        case "yarn":
            for name in ("mscale", "mscale_all_dim"):
                rope.refuse(name, unless=(None,), default=None)
            rope.refuse("truncate", unless=(True,), default=True)
            factor = rope.number("factor", low=1.0)
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=rope.integer(
                    "original_max_position_embeddings", default=context, low=1
                ),
                attention_factor=rope.number("attention_factor", default=yarn_gain(factor), low=1e-6),
                beta_fast=rope.number("beta_fast", default=32.0, low=1e-6),
                beta_slow=rope.number("beta_slow", default=1.0, low=1e-6),
            )
        case _:
            raise rope.error("Unsupported", "rope_type", "default, linear, llama3 or yarn", kind)


def _gguf_scaling(fields: Fields, family: str, rope_factors: np.ndarray | None) -> RopeScaling | None:
    """Scaling as llama.cpp reads it: linear when the type is absent, and a factor of 0 means none."""
    kind = fields.text("rope.scaling.type", default="linear")
    factor = fields.number("rope.scaling.factor", default=fields.number("rope.scale_linear", default=0.0)) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("Unsupported", "rope.scaling.type", "none, linear or yarn", kind)
    if rope_factors is not None:
        if family != "llama":
            raise fields.error("Unexpected", "rope_freqs.weight", "frequency factors for llama only", family)
        if kind == "yarn" or factor != 1.0:
            raise fields.error("Unsupported", "rope.scaling.type", "none beside rope_freqs.weight", kind)
    if kind != "yarn":
        fields.refuse("rope.scaling.attn_factor", unless=(1.0,), default=1.0)
    if rope_factors is not None:
        return FactorScaling(factors=tuple(float(value) for value in rope_factors))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if factor < 1:
        raise fields.error("OutOfRange", "rope.scaling.factor", "at least 1.0", factor)
    return _gguf_yarn(fields, factor) if kind == "yarn" else LinearScaling(factor=factor)


def _gguf_yarn(fields: Fields, factor: float) -> YarnScaling:
    for name, ignored in _IGNORED_OF_YARN.items():
        fields.refuse(f"rope.scaling.{name}", unless=ignored, default=ignored[0])
    context = fields.integer("context_length")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", default=context, low=1),
        attention_factor=fields.number("rope.scaling.attn_factor", default=1.0, low=1e-6) * yarn_gain(factor),
    )


def yarn_gain(factor: float) -> float:
    """What the paper multiplies cos and sin by; llama.cpp does so in any case, transformers by default."""
    return 0.1 * math.log(factor) + 1.0
