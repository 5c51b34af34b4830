"""Record of one model family: names, facts of the architecture, and differences of its files and engines.

Each family has a module in this package with its record and its rules as functions; `table` lists all families.

Source: transformers `configuration_*.py` of each; llama.cpp `src/models/*.cpp` for facts that GGUF files omit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from llorch.families.config import ModelConfig
from llorch.families.layers import Layer, Temperature
from llorch.families.rules import full_attention, no_gguf_window
from llorch.runtime.fields import Fields

# Keys and tensors of GGUF files, for `LlamaCppQuirks.reads`.
EPSILON = "attention.layer_norm_rms_epsilon"
FREQUENCY_FACTORS = "rope_freqs.weight"
OUTPUT_BIAS = "attn_output.bias"
TEMPERATURE_SCALE = "attention.temperature_scale"
EXPERT_STEP = "interleave_moe_layer_step"
NULLABLE = frozenset({"num_key_value_heads", "head_dim"})  # for `TransformersQuirks.nullable`
YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")  # llama.cpp reads all three, or none


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Names of tensors and order of their numbers in files. Used by `files/tensor_names.py` and the listed modules.

    Attributes:
        names: Parts of tensor names that differ: `ffn_norm` (the norm before the feed-forward block, in GGUF files),
            `mlp` and `router` (in Hugging Face folders). Also used by `engines/llamacpp_graph.py`, `lora/targets.py`.
        interleaved_rope: Formats in which RoPE rotates rows (2j, 2j + 1) of q and k: none (""), GGUF files, or both.
            Also used by both readers here, `engines/llamacpp_graph.py`, `engines/dumps/reading.py` and mistakes of
            `diagnosis/mistakes`.
        transposed_experts: One tensor (experts, in, out) in published folders, or also in the modules of transformers.
        norm_weight_offset: Hugging Face stores norm gains minus one, except in delta nets.
        has_mtp_layers: Files may have extra layers for multi-token prediction (`files/opening.py`).
        multimodal_prefixes: Prefixes of module paths in the text model, and in the multimodal model.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: Literal["", "gguf", "both"] = ""
    transposed_experts: Literal["", "files", "modules"] = ""
    norm_weight_offset: bool = False
    has_mtp_layers: bool = False
    multimodal_prefixes: tuple[str, str] = ("", "")

    @property
    def all_names(self) -> Mapping[str, str]:
        """All parts of tensor names, including the defaults."""
        return {"mlp": "mlp", "router": "gate", "ffn_norm": "ffn_norm", **self.names}


@dataclass(frozen=True, kw_only=True)
class LlamaCppQuirks:
    """Facts about llama.cpp. Used by `families/llamacpp_limits.py` and the listed modules.

    Attributes:
        reads: Optional tensors and keys that llama.cpp reads for this architecture, see the constants of this module.
            Used by `families/read_gguf.py`, `files/export.py`.
        reads_epsilon: llama.cpp reads the key `EPSILON` for this architecture (`engines/interface.py`).
        nodes: Operation and name of llama.cpp's graph node, for stages (intermediate arrays) in which the family is an
            exception (`engines/llamacpp_graph.py`).
        norm_topk_prob: Hard-coded value of this setting; None: no experts, or not applicable.
        same_width: llama.cpp requires that n_heads * head_dim = hidden_size.
        limits: Function that yields further reasons why llama.cpp computes another result for up to `n_tokens` tokens.
    """

    reads: frozenset[str] = frozenset()
    reads_epsilon: bool = True
    nodes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    norm_topk_prob: bool | None = None
    same_width: bool = False
    limits: Callable[[ModelConfig, int], Iterable[str]] = lambda config, n_tokens: ()


@dataclass(frozen=True, kw_only=True)
class TransformersQuirks:
    """Facts about transformers and PEFT.

    Attributes:
        keys: Keys of config.json that differ, by the usual name. The usual key of `qkv_bias` and `o_bias` is
            attention_bias. Used by `families/read_huggingface.py`, `files/export_huggingface.py`,
            `engines/transformers.py`.
        nullable: Keys for which null is not the default, but means n_kv_heads = n_heads, or head_dim = hidden_size /
            n_heads. A null of other `_NEVER_NULL` keys is an error (`families/read_huggingface.py`).
        config_settings: Function for extra keys that llorch writes into config.json (`files/export_huggingface.py`).
        engine_settings: Function for extra settings of transformers for a GGUF file (`engines/transformers.py`).
        pre_tokenizer: Pre-tokenizer that transformers uses instead of tokenizer.json's
            (`files/tokenizer/export_huggingface.py`).
        habits: `counts_by_cache`: transformers counts positions by the length of its cache (`engines/transformers.py`).
            `old_expert_names`: PEFT uses module names for expert parameters (`lora/targets.py`, `lora/peft_config.py`).
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset({"num_key_value_heads"})
    config_settings: Callable[[ModelConfig], Mapping[str, object]] = lambda config: {}
    engine_settings: Callable[[ModelConfig], Mapping[str, object]] = lambda config: {}
    pre_tokenizer: str = ""
    habits: frozenset[Literal["counts_by_cache", "old_expert_names"]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a model family. Both readers of this package use them; other modules that use them are listed.

    Attributes:
        gguf: Architecture name in GGUF files; used by all readers and writers of GGUF files.
        classes: Stem of the class names in transformers (`engines/transformers.py`).
        multimodal_type: Model type of the multimodal model, of which this family is the text part.
        written_as: Family with an equal text part, for files of a text part without its own class in transformers.
        qkv_bias: Bias of q, k and v; None: the file decides, in config.json by a key (`TransformersQuirks.keys`).
        o_bias: Bias of o_proj; None: the file decides, in config.json by a key.
        qk_norm: RMSNorm of every query and key head before RoPE.
        delta_net: Kind of delta net, in layers between gated attention: four input matrices (qkv, z, b, a), or two
            fused ones (`files/tensor_names.py`, `engines/llamacpp_graph.py`, `lora/targets.py`); empty: none.
        rope_interval: Every n-th layer has no RoPE, unless config.json lists layers; 0: all have RoPE.
        sections: Order of the axes of multimodal RoPE, equal for text (`files/export.py`, `engines/interface.py`).
        router: Function from logits to expert weights; empty: no experts. With a sigmoid, the weights multiply the
            inputs of the experts.
        shared_expert: Expert that every token uses; if gated, its output is multiplied by a sigmoid.
        layer_rules: Rules of config.json, each applied to the layers that the previous rule returned: first for layers
            with experts, then for windows, chunks or delta nets.
        read_gguf_layers: Rule of GGUF metadata for the layers.
        read_temperature: Rule of config.json for the attention temperature of queries, in the layers without RoPE if
            the family has such layers, else in all layers.
        read_gguf_temperature: Rule of GGUF metadata for the attention temperature.
        defaults: Defaults of transformers for keys that config.json omits.
        layout: Names of tensors and order of their numbers in files.
        llamacpp: Facts about llama.cpp.
        transformers: Facts about transformers and PEFT.
    """

    gguf: str
    classes: str
    multimodal_type: str = ""
    written_as: str | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    delta_net: Literal["", "separate", "fused"] = ""
    rope_interval: int = 0
    sections: Literal["", "halves", "interleaved"] = ""
    router: Literal["", "softmax", "sigmoid"] = ""
    shared_expert: Literal["", "plain", "gated"] = ""
    layer_rules: tuple[Callable[[Fields, list[Layer]], list[Layer]], ...] = (full_attention,)
    read_gguf_layers: Callable[[Fields, list[Layer]], list[Layer]] = no_gguf_window
    read_temperature: Callable[[Fields], Temperature | None] = lambda fields: None
    read_gguf_temperature: Callable[[Fields], Temperature | None] = lambda fields: None
    defaults: Mapping[str, object]
    layout: TensorLayout = TensorLayout()
    llamacpp: LlamaCppQuirks = LlamaCppQuirks()
    transformers: TransformersQuirks = TransformersQuirks()

    @property
    def rope_defaults(self) -> Mapping[str, object]:
        """RoPE settings that transformers uses if config.json has none."""
        settings = self.defaults.get("rope_parameters")
        return settings if isinstance(settings, Mapping) else {}
