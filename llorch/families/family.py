"""The record of one model family: names, facts of its architecture, and what its files and engines do otherwise.

One module of this package holds the records of one family, and its rules as functions; `table` lists them all.

Source: transformers `configuration_*.py` of each; llama.cpp `src/models/*.cpp`, which fixes what a GGUF file lacks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from llorch.families.config import ModelConfig
from llorch.families.layers import Layer, Temperature
from llorch.families.rules import full_attention, no_gguf_window
from llorch.runtime.fields import Fields

EPSILON = "attention.layer_norm_rms_epsilon"
FREQUENCY_FACTORS = "rope_freqs.weight"
OUTPUT_BIAS = "attn_output.bias"
TEMPERATURE_SCALE = "attention.temperature_scale"
EXPERT_STEP = "interleave_moe_layer_step"
NULLABLE = frozenset({"num_key_value_heads", "head_dim"})
YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")  # all three are read, or none


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Names and order of the numbers in files. Read by `files/tensor_names.py`, and where another module is named.

    Attributes:
        names: Parts of tensor names that differ: `ffn_norm` (the norm before the feed-forward part, in GGUF files),
            `mlp` and `router` (in Hugging Face folders). Also read by `engines/llamacpp_graph.py`, `lora/targets.py`.
        interleaved_rope: Files whose rows of q and k lie in the pairs (2j, 2j + 1): none, GGUF files, or both formats.
            Also read by both readers here, `engines/llamacpp_graph.py`, `engines/dumps/reading.py` and mistakes of
            `diagnosis/mistakes`.
        transposed_experts: One tensor (experts, in, out) in published folders, or in the modules of transformers, too.
        norm_weight_offset: Hugging Face stores gains less one, but that of the delta net.
        has_mtp_layers: Files may have further layers, which predict further tokens (`files/opening.py`).
        multimodal_prefixes: Beginnings of the paths of modules in the text part alone, and in the whole model.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: Literal["", "gguf", "both"] = ""
    transposed_experts: Literal["", "files", "modules"] = ""
    norm_weight_offset: bool = False
    has_mtp_layers: bool = False
    multimodal_prefixes: tuple[str, str] = ("", "")

    @property
    def all_names(self) -> Mapping[str, str]:
        """The parts of tensor names, with the usual ones."""
        return {"mlp": "mlp", "router": "gate", "ffn_norm": "ffn_norm", **self.names}


@dataclass(frozen=True, kw_only=True)
class LlamaCppQuirks:
    """Things that llama.cpp computes or expects. Read by `families/llamacpp_limits.py`, and where a module is named.

    Attributes:
        reads: Optional tensors and keys that it reads for this architecture, see the constants of this module. Read by
            `families/read_gguf.py`, `files/export.py`.
        reads_epsilon: It reads the key `EPSILON` for this architecture (`engines/interface.py`).
        nodes: Operation and name of the graph node of a stage, where they differ (`engines/llamacpp_graph.py`).
        norm_topk_prob: The constant that it has for this setting; None: no experts, or it does not apply.
        same_width: It expects that all heads together are as wide as the model.
        limits: Further reasons why it differs in runs of so many tokens.
    """

    reads: frozenset[str] = frozenset()
    reads_epsilon: bool = True
    nodes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    norm_topk_prob: bool | None = None
    same_width: bool = False
    limits: Callable[[ModelConfig, int], Iterable[str]] = lambda config, n_tokens: ()


@dataclass(frozen=True, kw_only=True)
class TransformersQuirks:
    """Things that transformers and PEFT do.

    Attributes:
        keys: Keys of config.json that differ, by the usual name. `qkv_bias` and `o_bias` are usually decided by
            attention_bias. Read by `families/read_huggingface.py`, `files/export_huggingface.py`,
            `engines/transformers.py`.
        nullable: Keys whose null does not mean their default: as many key heads as query heads, heads that share the
            width of the model. Other families refuse a null of `_NEVER_NULL` (`families/read_huggingface.py`).
        config_settings: Further keys that llorch writes into config.json (`files/export_huggingface.py`).
        engine_settings: Further settings that transformers needs to run a GGUF file (`engines/transformers.py`).
        pre_tokenizer: The one of transformers, whatever tokenizer.json says (`files/tokenizer/export_huggingface.py`).
        habits: transformers counts positions by the length of its cache (`engines/transformers.py`); PEFT takes names
            of modules for parameters of experts (`lora/targets.py`, `lora/peft_config.py`).
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset({"num_key_value_heads"})
    config_settings: Callable[[ModelConfig], Mapping[str, object]] = lambda config: {}
    engine_settings: Callable[[ModelConfig], Mapping[str, object]] = lambda config: {}
    pre_tokenizer: str = ""
    habits: frozenset[Literal["counts_by_cache", "old_expert_names"]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: the two readers of this package read every fact; further readers are named.

    Attributes:
        gguf: Architecture in GGUF files. Every reader and writer of GGUF files.
        classes: Stem of its classes in transformers (`engines/transformers.py`).
        multimodal_type: Model type of the whole model that it is the text part of.
        written_as: Family with the same text part, where transformers has no class for this part alone.
        qkv_bias: Bias of q, k and v; None: the file decides, in config.json by a key (`TransformersQuirks.keys`).
        o_bias: Bias of o_proj, likewise.
        qk_norm: RMSNorm of every query and key head before RoPE.
        delta_net: Delta nets lie between layers of gated attention. A delta net has four input matrices (qkv, z, b, a),
            or two fused ones (`files/tensor_names.py`, `engines/llamacpp_graph.py`, `lora/targets.py`).
        rope_interval: Every n-th layer has no RoPE, unless config.json lists layers; 0: all have RoPE.
        sections: RoPE of three axes, all equal for text (`files/export.py`, `engines/interface.py`).
        router: Weights of the chosen experts, by which function of the logits; empty: no experts. After a sigmoid the
            weights multiply what the experts are given.
        shared_expert: An expert that every token has; if gated, its output is multiplied by a sigmoid.
        layer_rules: Rules of config.json, each applied to the layers that the one before returned: for layers with
            experts first, then for windows, chunks or delta nets.
        read_gguf_layers: Rule of GGUF metadata for the same.
        read_temperature: Rule of config.json for the temperature of the queries, in the layers without RoPE if the
            family has such layers, else in all.
        read_gguf_temperature: The same of GGUF metadata.
        defaults: What transformers takes for keys that config.json omits.
        layout: Names and order of numbers in files.
        llamacpp: Things that llama.cpp computes or expects.
        transformers: Things that transformers and PEFT do.
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
        """RoPE settings that transformers takes where config.json has none."""
        settings = self.defaults.get("rope_parameters")
        return settings if isinstance(settings, Mapping) else {}
