"""Hyperparameters of one model, read from a Hugging Face `config.json` or from GGUF metadata.

A family declares the parts of its blocks (biases, query and key norms); the weight loader then checks that the file
agrees. A setting that llorch does not compute is an error that names its key.

    family              record of a family; each family has a module, and `table` lists them
    read_huggingface    config.json to a ModelConfig
    read_gguf           GGUF metadata to a ModelConfig
    rules               rules of files that several families share
    rope_scaling        RoPE for longer contexts
    llamacpp_limits     configurations that llama.cpp, and so a GGUF file, cannot express
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llorch.families.layers import DeltaNet, Experts, Layer, Temperature
from llorch.families.rope_scaling import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import shortest

__all__ = ["FactorScaling", "LinearScaling", "Llama3Scaling", "ModelConfig", "RopeScaling", "YarnScaling"]

MOST_LAYERS = 512
DENSE_LAYER = Layer()  # of a model whose `layers` is empty
_LARGEST = {
    "hidden_size": 2**20, "intermediate_size": 2**24, "n_layers": MOST_LAYERS, "n_heads": 2**16, "n_kv_heads": 2**16,
    "head_dim": 2**16, "vocab_size": 2**24, "max_position_embeddings": 2**27,
}  # fmt: skip
_LARGEST_OF_EXPERTS = {"n_experts": 2**16, "expert_size": 2**24}
_LARGEST_OF_DELTA_NET = {
    "conv_kernel": 2**8, "n_key_heads": 2**16, "n_value_heads": 2**16, "key_head_dim": 2**16, "value_head_dim": 2**16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hyperparameters of a decoder; the constructor raises FormatError OutOfRange for impossible values."""

    family: str  # name in `llorch.families.table`
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width of the feed-forward block
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
    # Settings that dense models do not have:
    layers: tuple[Layer, ...] = ()  # one for each layer; empty: all are dense
    experts: Experts | None = None  # settings of layers with experts
    delta_net: DeltaNet | None = None  # settings of layers with a delta net
    attention_gate: bool = False  # attention times a sigmoid, whose input rows follow each query head in q_proj
    rotary_dim: int = 0  # leading part of a head that RoPE rotates, even; 0: the whole head
    interleaved_rope_hf: bool = False  # RoPE rotates (2j, 2j + 1), as in Llama 4, not (j, j + half)
    temperature: Temperature | None = None  # settings of layers with an attention temperature
    rope_sections: tuple[int, ...] = field(default=(), compare=False)  # from a GGUF file; no effect on text
    part_of_whole: bool = field(default=False, compare=False)  # text part of a multimodal folder; affects paths only

    def __post_init__(self) -> None:
        """Raise FormatError for impossible values."""
        _check_sizes(self, _LARGEST)
        if self.n_heads % self.n_kv_heads:
            raise _out_of_range(
                f"n_heads must be a multiple of n_kv_heads, got n_heads={self.n_heads} n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise _out_of_range(f"head_dim must be even for RoPE, got {self.head_dim}")
        if not 0 < self.rms_norm_eps < 1:
            raise _out_of_range(f"rms_norm_eps must be between 0 and 1, got {shortest(self.rms_norm_eps)}")
        if not 1 < self.rope_theta < math.inf:
            raise _out_of_range(f"rope_theta must be above 1 and finite, got {shortest(self.rope_theta)}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise _out_of_range(f"rotary_dim must be even, at most head_dim = {self.head_dim}, got {self.rotary_dim}")
        self._check_layers()
        if isinstance(self.rope_scaling, FactorScaling):
            self._check_factors(self.rope_scaling.factors)
        if isinstance(self.rope_scaling, YarnScaling):
            self._check_ramp(self.rope_scaling)

    def _check_layers(self) -> None:
        if self.layers and len(self.layers) != self.n_layers:
            raise _out_of_range(f"layers must have {self.n_layers} entries, one for each layer, got {len(self.layers)}")
        if any(layer.experts for layer in self.layers):
            if self.experts is None:
                raise _out_of_range("experts: expected settings for the layers with experts, got None")
            _check_sizes(self.experts, _LARGEST_OF_EXPERTS)
            n_used, n_experts = self.experts.n_experts_per_token, self.experts.n_experts
            if not 1 <= n_used <= n_experts:
                raise _out_of_range(
                    f"experts per token must be from 1 to {n_experts}, the number of experts, got {n_used}"
                )
        if any(layer.mixer == "delta_net" for layer in self.layers):
            if (net := self.delta_net) is None:
                raise _out_of_range("delta_net: expected settings for the layers with a delta net, got None")
            _check_sizes(net, _LARGEST_OF_DELTA_NET)
            if net.n_value_heads % net.n_key_heads:
                heads = f"{net.n_value_heads} value and {net.n_key_heads} key heads"
                raise _out_of_range(f"value heads of a delta net must be a multiple of its key heads, got {heads}")
            if net.conv_kernel < 2:
                raise _out_of_range(
                    f"the convolution kernel of a delta net must cover at least 2 tokens, got {net.conv_kernel}"
                )

    def _check_factors(self, factors: tuple[float, ...]) -> None:
        if len(factors) != self.rotated // 2:
            raise _out_of_range(
                f"rope_freqs.weight must have head_dim / 2 = {self.rotated // 2} factors, got {len(factors)}"
            )
        if wrong := [factor for factor in factors if not 0 < factor < math.inf]:
            raise _out_of_range(f"rope_freqs.weight: expected positive finite factors, got {wrong[0]}")

    def _check_ramp(self, yarn: YarnScaling) -> None:
        start, end = yarn.ramp(head_dim=self.rotated, theta=self.rope_theta)
        if end < start:  # transformers divides by the negative width, llama.cpp by 0.001
            raise _out_of_range(
                f"the ramp of yarn must end after its start, got pairs {start} to {end} from beta_fast="
                f"{yarn.beta_fast} beta_slow={yarn.beta_slow} original_max_position_embeddings="
                f"{yarn.original_max_position_embeddings} rope_theta={self.rope_theta}; "
                "transformers and llama.cpp compute different frequencies from it"
            )

    def layer(self, index: int) -> Layer:
        """Return the description of one layer; a model without a list of layers has dense layers."""
        return self.layers[index] if self.layers else DENSE_LAYER

    def traits(self, layer: int | None) -> frozenset[str]:
        """Return the traits of a layer, or with None of the model outside its layers: words such as `qkv_bias`.

        The tables of weights and of stages (named intermediate arrays) select their rows by traits.
        """
        if layer is None:
            return frozenset({"tied" if self.tie_word_embeddings else "untied"})
        traits, experts = self.layer(layer), self.experts
        flags = {
            traits.mixer: True, "experts" if traits.experts else "dense": True,
            "shared": traits.experts and experts is not None and experts.shared_size > 0,
            "shared_gate": traits.experts and experts is not None and experts.shared_gate,
            "scaled_inputs": traits.experts and experts is not None and experts.scaled_inputs,
        }  # fmt: skip
        if traits.mixer == "attention":
            flags |= {
                "qkv_bias": self.qkv_bias, "o_bias": self.o_bias, "qk_norm": self.qk_norm, "gate": self.attention_gate,
                "rope": traits.rope, "head_norm": traits.head_norm, "tempered": traits.has_attention_temperature,
            }  # fmt: skip
        return frozenset(trait for trait, is_present in flags.items() if is_present)

    @property
    def rotated(self) -> int:
        """Width of the part of a head that RoPE rotates."""
        return self.rotary_dim or self.head_dim

    @property
    def q_width(self) -> int:
        """Width of all query heads joined."""
        return self.n_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q_proj, which includes the gates in gated attention."""
        return 2 * self.q_width if self.attention_gate else self.q_width

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads joined."""
        return self.n_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key and value head."""
        return self.n_heads // self.n_kv_heads


def _check_sizes(settings: object, largest: Mapping[str, int]) -> None:
    for name, limit in largest.items():
        if not 1 <= getattr(settings, name) <= limit:
            raise _out_of_range(f"{name} must be from 1 to {limit}, got {getattr(settings, name)}")


def _out_of_range(message: str) -> FormatError:
    return FormatError("OutOfRange", f"config: {message}")
