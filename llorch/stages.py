"""The stage table: every named point of the forward pass, in order, and all that belongs to it.

One row says which checkpoint a stage is part of, what goes in, the op that makes it, its shape in named axes, and
where llama.cpp and transformers show it; what computes it is `llorch.forward`. Tests, `verify`, the checkpoint pages
and the known mistakes read this table.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from llorch.config import ModelConfig

CHECKPOINTS: Mapping[str, str] = {
    "00": "foundation",
    "01": "rms_norm",
    "01b": "rope",
    "02": "qkv",
    "03": "kv_cache",
    "04": "attention_scores",
    "05": "attention_output",
    "06": "swiglu",
    "07": "block",
    "08": "logits",
    "09": "selected_logits",
    "10": "argmax",
    "11": "probabilities",
    "12": "generation",
    "13": "quantised",
    "14": "torch",
    "15": "lora_delta",
    "16": "loss",
    "17": "gradients",
    "18": "optimizer_step",
    "19": "training_curve",
    "20": "merge_export",
}  # number -> name; design decides, the numbers are public interface


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table."""

    name: str
    checkpoint: str  # number, as in `pytest -k checkpoint_01b`
    axes: str  # named axes of the array
    inputs: tuple[str, ...]  # stages it is made from; block_in is the block's input
    formula: str
    function: str  # ours
    llamacpp: str  # node and op of the eval callback; {i} is the layer
    transformers: str  # what is hooked; {i} is the layer
    in_layer: bool = True
    needs_qk_norm: bool = False
    matrix: str = ""  # the weight that its first input is multiplied with

    @property
    def masked(self) -> bool:
        """Whether -inf marks masked entries."""
        return self.name == "attn_scores"

    def applies_to(self, config: ModelConfig) -> bool:
        """Whether a model of this configuration has the stage."""
        return config.qk_norm or not self.needs_qk_norm

    def input_names(self, config: ModelConfig) -> tuple[str, ...]:
        """Its inputs in a model of this configuration."""
        if self.name in ("q_rope", "k_rope"):
            return (rope_input(self.name[0], config),)
        return self.inputs

    def shape(self, config: ModelConfig, *, seq: int, ctx: int) -> tuple[int, ...]:
        """The shape its axes have for a pass of `seq` tokens in a context of `ctx`."""
        sizes = {
            "seq": seq, "ctx": ctx, "hidden": config.hidden_size, "inter": config.intermediate_size,
            "heads": config.n_heads, "kv_heads": config.n_kv_heads, "head_dim": config.head_dim,
            "q_width": config.q_width, "kv_width": config.kv_width, "vocab": config.vocab_size,
        }  # fmt: skip
        return tuple(sizes[axis] for axis in self.axes.split())


STAGES: tuple[Stage, ...] = (
    Stage(
        name="embed", checkpoint="00", axes="seq hidden", inputs=(), in_layer=False,
        formula="embed[t] = embed_tokens[ids[t]]", function="llorch.ops.embedding.embedding",
        llamacpp="embd (GET_ROWS)", transformers="output of model.embed_tokens",
    ),
    Stage(
        name="attn_norm", checkpoint="01", axes="seq hidden", inputs=("block_in",),
        formula="x / sqrt(mean(x * x) + eps) * weight", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="attn_norm-{i} (MUL)", transformers="output of layers.{i}.input_layernorm",
    ),
    Stage(
        name="q_proj", checkpoint="02", axes="seq q_width", inputs=("attn_norm",), matrix="q_proj",
        formula="attn_norm @ q_proj.T + q_bias", function="llorch.ops.linear.linear",
        llamacpp="Qcur-{i} (MUL_MAT, or ADD with bias)", transformers="output of layers.{i}.self_attn.q_proj",
    ),
    Stage(
        name="k_proj", checkpoint="02", axes="seq kv_width", inputs=("attn_norm",), matrix="k_proj",
        formula="attn_norm @ k_proj.T + k_bias", function="llorch.ops.linear.linear",
        llamacpp="Kcur-{i} (MUL_MAT, or ADD with bias)", transformers="output of layers.{i}.self_attn.k_proj",
    ),
    Stage(
        name="v_proj", checkpoint="02", axes="seq kv_width", inputs=("attn_norm",), matrix="v_proj",
        formula="attn_norm @ v_proj.T + v_bias", function="llorch.ops.linear.linear",
        llamacpp="Vcur-{i} (MUL_MAT, or ADD with bias)", transformers="output of layers.{i}.self_attn.v_proj",
    ),
    Stage(
        name="q_norm", checkpoint="02", axes="seq heads head_dim", inputs=("q_proj",), needs_qk_norm=True,
        formula="rms_norm of every query head", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="Qcur_normed-{i} (MUL)", transformers="output of layers.{i}.self_attn.q_norm",
    ),
    Stage(
        name="k_norm", checkpoint="02", axes="seq kv_heads head_dim", inputs=("k_proj",), needs_qk_norm=True,
        formula="rms_norm of every key head", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="Kcur_normed-{i} (MUL)", transformers="output of layers.{i}.self_attn.k_norm",
    ),
    Stage(
        name="q_rope", checkpoint="01b", axes="seq heads head_dim", inputs=("q_proj",),
        formula="pairs (j, j + half) turned by position * inv_freq[j]", function="llorch.ops.rope.rope",
        llamacpp="Qcur-{i} (ROPE)", transformers="query given to the attention function of layer {i}",
    ),
    Stage(
        name="k_rope", checkpoint="01b", axes="seq kv_heads head_dim", inputs=("k_proj",),
        formula="pairs (j, j + half) turned by position * inv_freq[j]", function="llorch.ops.rope.rope",
        llamacpp="Kcur-{i} (ROPE)", transformers="newest keys given to the attention function of layer {i}",
    ),
    Stage(
        name="k_cache", checkpoint="03", axes="kv_heads ctx head_dim", inputs=("k_rope",),
        formula="keys so far, then the new ones", function="llorch.cache.KVCache.append",
        llamacpp="first source of kq-{i}", transformers="key given to the attention function of layer {i}",
    ),
    Stage(
        name="v_cache", checkpoint="03", axes="kv_heads ctx head_dim", inputs=("v_proj",),
        formula="values so far, then the new ones, not rotated", function="llorch.cache.KVCache.append",
        llamacpp="first source of kqv-{i}", transformers="value given to the attention function of layer {i}",
    ),
    Stage(
        name="attn_scores", checkpoint="04", axes="heads seq ctx", inputs=("q_rope", "k_cache"),
        formula="q k^T / sqrt(head_dim), -inf for later keys", function="llorch.ops.attention.attention_scores",
        llamacpp="kq-{i} (MUL_MAT) times the scale, plus the mask of kq_soft_max-{i}",
        transformers="what the softmax of layer {i} is given",
    ),
    Stage(
        name="attn_probs", checkpoint="04", axes="heads seq ctx", inputs=("attn_scores",),
        formula="softmax over ctx", function="llorch.ops.attention.attention_probs",
        llamacpp="kq_soft_max-{i} (SOFT_MAX)", transformers="weights returned by the attention function of layer {i}",
    ),
    Stage(
        name="attn_context", checkpoint="05", axes="seq q_width", inputs=("attn_probs", "v_cache"),
        formula="probs v, heads joined", function="llorch.ops.attention.attention_context",
        llamacpp="kqv_out-{i} (CONT)", transformers="input of layers.{i}.self_attn.o_proj",
    ),
    Stage(
        name="attn_out", checkpoint="05", axes="seq hidden", inputs=("attn_context",), matrix="o_proj",
        formula="attn_context @ o_proj.T + o_bias", function="llorch.ops.linear.linear",
        llamacpp="attn_out-{i}, or the MUL_MAT with blk.{i}.attn_output.weight",
        transformers="output of layers.{i}.self_attn.o_proj",
    ),
    Stage(
        name="attn_residual", checkpoint="05", axes="seq hidden", inputs=("block_in", "attn_out"),
        formula="block_in + attn_out", function="llorch.forward.block",
        llamacpp="ffn_inp-{i} (ADD)", transformers="input of layers.{i}.post_attention_layernorm",
    ),
    Stage(
        name="ffn_norm", checkpoint="01", axes="seq hidden", inputs=("attn_residual",),
        formula="x / sqrt(mean(x * x) + eps) * weight", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="ffn_norm-{i} (MUL)", transformers="output of layers.{i}.post_attention_layernorm",
    ),
    Stage(
        name="ffn_gate", checkpoint="06", axes="seq inter", inputs=("ffn_norm",), matrix="gate_proj",
        formula="ffn_norm @ gate_proj.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_gate-{i} (MUL_MAT)", transformers="output of layers.{i}.mlp.gate_proj",
    ),
    Stage(
        name="ffn_up", checkpoint="06", axes="seq inter", inputs=("ffn_norm",), matrix="up_proj",
        formula="ffn_norm @ up_proj.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_up-{i} (MUL_MAT)", transformers="output of layers.{i}.mlp.up_proj",
    ),
    Stage(
        name="ffn_act", checkpoint="06", axes="seq inter", inputs=("ffn_gate", "ffn_up"),
        formula="gate / (1 + exp(-gate)) * up", function="llorch.ops.swiglu.swiglu",
        llamacpp="ffn_swiglu-{i} (GLU)", transformers="input of layers.{i}.mlp.down_proj",
    ),
    Stage(
        name="ffn_out", checkpoint="06", axes="seq hidden", inputs=("ffn_act",), matrix="down_proj",
        formula="ffn_act @ down_proj.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_out-{i} (MUL_MAT)", transformers="output of layers.{i}.mlp.down_proj",
    ),
    Stage(
        name="block_out", checkpoint="07", axes="seq hidden", inputs=("attn_residual", "ffn_out"),
        formula="attn_residual + ffn_out", function="llorch.forward.block",
        llamacpp="l_out-{i} (ADD)", transformers="output of layers.{i}",
    ),
    Stage(
        name="final_norm", checkpoint="01", axes="seq hidden", inputs=("last_block_out",), in_layer=False,
        formula="x / sqrt(mean(x * x) + eps) * weight", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="result_norm (MUL)", transformers="output of model.norm",
    ),
    Stage(
        name="logits", checkpoint="08", axes="seq vocab", inputs=("final_norm",), in_layer=False, matrix="lm_head",
        formula="final_norm @ lm_head.T, or embed_tokens.T when tied", function="llorch.ops.linear.linear",
        llamacpp="result_output (MUL_MAT)", transformers="output of lm_head",
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Stage] = {stage.name: stage for stage in STAGES}


def rope_input(which: str, config: ModelConfig) -> str:
    """What RoPE rotates: the normalised heads where the family normalises them, else the projection."""
    return f"{which}_norm" if config.qk_norm else f"{which}_proj"


def output_matrix(config: ModelConfig) -> str:
    """The weight that makes logits."""
    return "embed_tokens" if config.tie_word_embeddings else "lm_head"


def matrix_of(stage: Stage, config: ModelConfig) -> str:
    """The short name of the weight that a stage multiplies with, empty for the other stages."""
    return output_matrix(config) if stage.matrix == "lm_head" else stage.matrix


def keys(config: ModelConfig) -> Iterator[tuple[str, Stage, int | None]]:
    """Every stage of a model in the order of the forward pass.

    Args:
        config: The model.

    Yields:
        Trace key, stage, and layer (None outside the layers).
    """
    present = [stage for stage in STAGES if stage.applies_to(config)]
    in_layers = [stage for stage in present if stage.in_layer]
    outside = [stage for stage in present if not stage.in_layer]
    yield outside[0].name, outside[0], None
    for layer in range(config.n_layers):
        for stage in in_layers:
            yield key(stage.name, layer), stage, layer
    for stage in outside[1:]:
        yield stage.name, stage, None


def forward_order(names: Iterable[str]) -> list[str]:
    """Sort trace keys; a file may have stored them in another order.

    Args:
        names: Trace keys.

    Returns:
        Stages in the order of the forward pass, then whatever else there is, as it came.
    """
    return sorted(names, key=_place)


def _place(name: str) -> tuple[float, int]:
    """Layer and row of the table, infinite where there is none; a layer lies behind `embed` and before `final_norm`."""
    parts = re.fullmatch(r"(?:l([0-9]+)\.)?(\w+)", name)
    stage = BY_NAME.get(parts[2]) if parts else None
    if not parts or stage is None or stage.in_layer != (parts[1] is not None):
        return math.inf, len(STAGES)
    outside = -1.0 if stage is STAGES[0] else math.inf
    return float(parts[1]) if stage.in_layer else outside, STAGES.index(stage)


def key(name: str, layer: int | None) -> str:
    """The trace key of a stage of one layer, `l0.q_rope`."""
    return name if layer is None else f"l{layer}.{name}"


def input_key(name: str, layer: int | None, config: ModelConfig) -> str:
    """The trace key that an input name of a stage stands for."""
    if name == "block_in":
        assert layer is not None
        return "embed" if layer == 0 else key("block_out", layer - 1)
    if name == "last_block_out":
        return key("block_out", config.n_layers - 1)
    return key(name, layer)
