"""Stage table: every named array of the forward pass, in order, with its properties.

One row has a stage's validation point (`checkpoint`), inputs, op, shape in named axes, and the corresponding tensor in
llama.cpp and transformers. Its trace key in layer 0 is like `l0.q_rope`. `llorch.model.forward` computes the stages.
Tests, `verify`, the pages of `checkpoints/` and the known mistakes read this table.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from llorch.families.config import ModelConfig

CHECKPOINTS: Mapping[str, str] = {
    "00": "foundation",
    "01": "rms_norm",
    "01b": "rope",
    "02": "qkv",
    "03": "kv_cache",
    "04": "attention_scores",
    "05": "attention_output",
    "05b": "delta_net",
    "06": "swiglu",
    "06b": "experts",
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
}  # numbered validation points (no weights files), number -> name; the numbers are public interface


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table."""

    name: str
    checkpoint: str  # key of `CHECKPOINTS`, as in `pytest -k checkpoint_01b`
    axes: str  # named axes of the array, see `axis_sizes`; `seq` new tokens, `ctx` tokens in the cache
    inputs: tuple[
        str, ...
    ]  # stages; `a|b`: the first that the layer has, `a|`: a or nothing; block_in: the block's input
    formula: str
    function: str  # llorch's implementation
    llamacpp: str  # node and op of the eval callback; {i} is the layer
    transformers: str  # hooked module or call; {i} is the layer
    in_layer: bool = True
    needs: tuple[str, ...] = ()  # traits of a layer with the stage, see `ModelConfig.traits`
    lacks: tuple[str, ...] = ()  # traits that a layer with the stage must not have
    matrix: str = ""  # weight that multiplies the first input; `experts_*` has one per expert

    @property
    def masked(self) -> bool:
        """True if -inf marks masked entries."""
        return self.name == "attn_scores"

    @property
    def is_selection(self) -> bool:
        """True if the stage is a set of selected ids per token, int64."""
        return self.name == "topk_ids"

    @property
    def by_expert(self) -> bool:
        """True if each expert has its own matrix for the stage."""
        return self.matrix.startswith("experts_")

    @property
    def is_dense(self) -> bool:
        """True if every dense model (plain attention and feed-forward in all layers) has the stage."""
        return {"attention", "rope", "dense"}.issuperset(self.needs)

    @property
    def dense_input(self) -> str:
        """First input of the stage in a dense model."""
        alternatives = self.inputs[0].split("|")
        return next(name for name in alternatives if name not in BY_NAME or BY_NAME[name].is_dense)

    def applies_to(self, config: ModelConfig, layer: int | None = None) -> bool:
        """Check if a layer of a model has the stage; without a layer, check if any layer has it."""
        if self.in_layer and layer is None:
            return any(self.applies_to(config, i) for i in range(config.n_layers))
        traits = config.traits(layer)
        return traits.issuperset(self.needs) and traits.isdisjoint(self.lacks)

    def first_layer(self, config: ModelConfig) -> int | None:
        """Return the first layer of a model that has the stage; None for a stage outside the layers."""
        return next(i for i in range(config.n_layers) if self.applies_to(config, i)) if self.in_layer else None

    def input_names(self, config: ModelConfig, layer: int | None = None) -> tuple[str, ...]:
        """Return the inputs of the stage in a layer; without a layer, in the first layer that has the stage."""
        layer = self.first_layer(config) if layer is None else layer
        names = (first_present(name, config, layer) for name in self.inputs)
        return tuple(name for name in names if name)

    def shape(self, config: ModelConfig, *, seq: int, ctx: int) -> tuple[int, ...]:
        """Compute the shape of the stage in a pass of `seq` tokens in a context of `ctx`."""
        sizes = axis_sizes(config, seq=seq, ctx=ctx)
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
        needs=("attention",), lacks=("gate",),
    ),
    Stage(
        name="q_gate_proj", checkpoint="02", axes="seq q_and_gate", inputs=("attn_norm",), matrix="q_proj",
        formula="attn_norm @ q_proj.T, each head's query and then its gate", function="llorch.ops.linear.linear",
        llamacpp="Qcur_full-{i} (MUL_MAT)", transformers="output of layers.{i}.self_attn.q_proj", needs=("gate",),
    ),
    Stage(
        name="k_proj", checkpoint="02", axes="seq kv_width", inputs=("attn_norm",), matrix="k_proj",
        formula="attn_norm @ k_proj.T + k_bias", function="llorch.ops.linear.linear",
        llamacpp="Kcur-{i} (MUL_MAT, or ADD with bias)", transformers="output of layers.{i}.self_attn.k_proj",
        needs=("attention",),
    ),
    Stage(
        name="v_proj", checkpoint="02", axes="seq kv_width", inputs=("attn_norm",), matrix="v_proj",
        formula="attn_norm @ v_proj.T + v_bias", function="llorch.ops.linear.linear",
        llamacpp="Vcur-{i} (MUL_MAT, or ADD with bias)", transformers="output of layers.{i}.self_attn.v_proj",
        needs=("attention",),
    ),
    Stage(
        name="q_norm", checkpoint="02", axes="seq heads head_dim", needs=("qk_norm",), inputs=("q_proj|q_gate_proj",),
        formula="rms_norm of every query head", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="Qcur_normed-{i} (MUL)", transformers="output of layers.{i}.self_attn.q_norm",
    ),
    Stage(
        name="k_norm", checkpoint="02", axes="seq kv_heads head_dim", needs=("qk_norm",), inputs=("k_proj",),
        formula="rms_norm of every key head", function="llorch.ops.rms_norm.rms_norm",
        llamacpp="Kcur_normed-{i} (MUL)", transformers="output of layers.{i}.self_attn.k_norm",
    ),
    Stage(
        name="q_rope", checkpoint="01b", axes="seq heads head_dim", needs=("rope",),
        inputs=("q_norm|q_proj|q_gate_proj",),
        formula="pairs (j, j + half) turned by position * inv_freq[j]", function="llorch.ops.rope.rope",
        llamacpp="Qcur-{i} (ROPE)", transformers="query given to the attention function of layer {i}",
    ),
    Stage(
        name="k_rope", checkpoint="01b", axes="seq kv_heads head_dim", needs=("rope",), inputs=("k_norm|k_proj",),
        formula="pairs (j, j + half) turned by position * inv_freq[j]", function="llorch.ops.rope.rope",
        llamacpp="Kcur-{i} (ROPE)", transformers="newest keys given to the attention function of layer {i}",
    ),
    Stage(
        name="q_head_norm", checkpoint="02", axes="seq heads head_dim", inputs=("q_rope",), needs=("head_norm",),
        formula="x / sqrt(mean(x * x) + eps) of every rotated query head",
        function="llorch.model.blocks.llama4.attention",
        llamacpp="Qcur_normed-{i} (RMS_NORM)", transformers="query given to the attention function of layer {i}",
    ),
    Stage(
        name="k_head_norm", checkpoint="02", axes="seq kv_heads head_dim", inputs=("k_rope",), needs=("head_norm",),
        formula="x / sqrt(mean(x * x) + eps) of every rotated key head",
        function="llorch.model.blocks.llama4.attention",
        llamacpp="Kcur_normed-{i} (RMS_NORM)", transformers="newest keys given to the attention function of layer {i}",
    ),
    Stage(
        name="q_tempered", checkpoint="04", axes="seq heads head_dim", needs=("tempered",),
        inputs=("q_head_norm|q_rope|q_norm|q_proj",),
        formula="q * (1 + scale * ln(1 + floor((position + offset) / floor)))",
        function="llorch.families.layers.Temperature.of", llamacpp="Qcur_attn_temp_scaled-{i} (MUL)",
        transformers="query given to the attention function of layer {i}",
    ),
    Stage(
        name="k_cache", checkpoint="03", axes="kv_heads ctx head_dim", inputs=("k_head_norm|k_rope|k_norm|k_proj",),
        formula="keys so far, then the new ones", function="llorch.model.cache.KVCache.append",
        llamacpp="first source of kq-{i}", transformers="key given to the attention function of layer {i}",
        needs=("attention",),
    ),
    Stage(
        name="v_cache", checkpoint="03", axes="kv_heads ctx head_dim", inputs=("v_proj",),
        formula="values so far, then the new ones, not rotated", function="llorch.model.cache.KVCache.append",
        llamacpp="first source of kqv-{i}", transformers="value given to the attention function of layer {i}",
        needs=("attention",),
    ),
    Stage(
        name="attn_scores", checkpoint="04", axes="heads seq ctx",
        inputs=("q_tempered|q_head_norm|q_rope|q_norm|q_proj|q_gate_proj", "k_cache"),
        formula="q k^T / sqrt(head_dim), -inf for later keys", function="llorch.ops.attention.attention_scores",
        llamacpp="kq-{i} (MUL_MAT) times the scale, plus the mask of kq_soft_max-{i}",
        transformers="scores that the softmax of layer {i} gets", needs=("attention",),
    ),
    Stage(
        name="attn_probs", checkpoint="04", axes="heads seq ctx", inputs=("attn_scores",),
        formula="softmax over ctx", function="llorch.ops.attention.attention_probs",
        llamacpp="kq_soft_max-{i} (SOFT_MAX)", transformers="weights returned by the attention function of layer {i}",
        needs=("attention",),
    ),
    Stage(
        name="attn_context", checkpoint="05", axes="seq q_width", inputs=("attn_probs", "v_cache"),
        formula="probs v, heads joined", function="llorch.ops.attention.attention_context",
        llamacpp="kqv_out-{i} (CONT)", transformers="input of layers.{i}.self_attn.o_proj", needs=("attention",),
    ),
    Stage(
        name="attn_gate", checkpoint="05", axes="seq q_width", inputs=("q_gate_proj",), needs=("gate",),
        formula="1 / (1 + exp(-gate)), gate from q_gate_proj", function="llorch.ops.sigmoid.sigmoid",
        llamacpp="gate_sigmoid-{i} (SIGMOID)", transformers="the sigmoid in self_attn of layer {i}",
    ),
    Stage(
        name="attn_gated", checkpoint="05", axes="seq q_width", inputs=("attn_context", "attn_gate"), needs=("gate",),
        formula="attn_context * attn_gate", function="llorch.model.blocks.gated_attention.gated_attention",
        llamacpp="attn_gated-{i} (MUL)", transformers="input of layers.{i}.self_attn.o_proj",
    ),
    Stage(
        name="attn_out", checkpoint="05", axes="seq hidden", inputs=("attn_gated|attn_context",), matrix="o_proj",
        formula="attn_context @ o_proj.T + o_bias", function="llorch.ops.linear.linear",
        llamacpp="attn_out-{i}, or the MUL_MAT with blk.{i}.attn_output.weight",
        transformers="output of layers.{i}.self_attn.o_proj", needs=("attention",),
    ),
    Stage(
        name="qkv_in", checkpoint="05b", axes="seq conv_width", inputs=("attn_norm",), matrix="in_qkv",
        formula="attn_norm @ in_qkv.T: queries, keys, values", function="llorch.ops.linear.linear",
        llamacpp="linear_attn_qkv_mixed-{i} (MUL_MAT)",
        transformers="output of layers.{i}.linear_attn.in_proj_qkv", needs=("delta_net",),
    ),
    Stage(
        name="z_in", checkpoint="05b", axes="seq value_width", inputs=("attn_norm",), matrix="in_z",
        formula="attn_norm @ in_z.T, gate of the gated norm", function="llorch.ops.linear.linear",
        llamacpp="z-{i} (MUL_MAT)", transformers="output of layers.{i}.linear_attn.in_proj_z", needs=("delta_net",),
    ),
    Stage(
        name="b_in", checkpoint="05b", axes="seq v_heads", inputs=("attn_norm",), matrix="in_b",
        formula="attn_norm @ in_b.T", function="llorch.ops.linear.linear",
        llamacpp="MUL_MAT with blk.{i}.ssm_beta.weight",
        transformers="output of layers.{i}.linear_attn.in_proj_b", needs=("delta_net",),
    ),
    Stage(
        name="a_in", checkpoint="05b", axes="seq v_heads", inputs=("attn_norm",), matrix="in_a",
        formula="attn_norm @ in_a.T", function="llorch.ops.linear.linear",
        llamacpp="MUL_MAT with blk.{i}.ssm_alpha.weight",
        transformers="output of layers.{i}.linear_attn.in_proj_a", needs=("delta_net",),
    ),
    Stage(
        name="conv_state", checkpoint="03", axes="taps conv_width", inputs=("qkv_in",),
        formula="the last (kernel size - 1) rows of qkv_in", function="llorch.ops.short_conv.next_state",
        llamacpp="values that layer {i} stores in its conv state",
        transformers="conv state of layer {i} in the cache", needs=("delta_net",),
    ),
    Stage(
        name="conv_out", checkpoint="05b", axes="seq conv_width", inputs=("qkv_in",),
        formula="silu(sum(kernel[last - j] * qkv_in[t - j]))", function="llorch.ops.short_conv.short_conv",
        llamacpp="conv_output_silu-{i} (UNARY)",
        transformers="queries, keys and values given to the delta rule of layer {i}", needs=("delta_net",),
    ),
    Stage(
        name="q_l2", checkpoint="05b", axes="seq k_heads key_dim", inputs=("conv_out",),
        formula="q / sqrt(sum(q * q) + 1e-6) of every head", function="llorch.ops.delta_rule.l2_norm",
        llamacpp="q_conv_predelta-{i} (L2_NORM)",
        transformers="the first l2norm in the delta rule of layer {i}", needs=("delta_net",),
    ),
    Stage(
        name="k_l2", checkpoint="05b", axes="seq k_heads key_dim", inputs=("conv_out",),
        formula="k / sqrt(sum(k * k) + 1e-6) of every head", function="llorch.ops.delta_rule.l2_norm",
        llamacpp="k_conv_predelta-{i} (L2_NORM)",
        transformers="the second l2norm in the delta rule of layer {i}", needs=("delta_net",),
    ),
    Stage(
        name="beta", checkpoint="05b", axes="seq v_heads", inputs=("b_in",),
        formula="1 / (1 + exp(-b_in)), share of the update written to S", function="llorch.ops.sigmoid.sigmoid",
        llamacpp="beta-{i} (UNARY)", transformers="beta given to the delta rule of layer {i}", needs=("delta_net",),
    ),
    Stage(
        name="log_decay", checkpoint="05b", axes="seq v_heads", inputs=("a_in",),
        formula="-exp(A_log) * softplus(a_in + dt_bias)", function="llorch.ops.delta_rule.log_decay",
        llamacpp="gate-{i} (MUL)", transformers="g given to the delta rule of layer {i}", needs=("delta_net",),
    ),
    Stage(
        name="delta_state", checkpoint="03", axes="v_heads key_dim value_dim",
        inputs=("conv_out", "q_l2", "k_l2", "beta", "log_decay"),
        formula="S = exp(g) S, then S = S + k (beta (v - S^T k))^T, token by token",
        function="llorch.ops.delta_rule.delta_rule",
        llamacpp="state part of the delta rule's result in layer {i}",
        transformers="recurrent state of layer {i} in the cache", needs=("delta_net",),
    ),
    Stage(
        name="delta_out", checkpoint="05b", axes="seq v_heads value_dim",
        inputs=("conv_out", "q_l2", "k_l2", "beta", "log_decay"),
        formula="S^T q / sqrt(key_dim) after each token", function="llorch.ops.delta_rule.delta_rule",
        llamacpp="output part of the delta rule's result in layer {i}",
        transformers="output of the delta rule of layer {i}", needs=("delta_net",),
    ),
    Stage(
        name="gated_norm", checkpoint="05b", axes="seq value_width", inputs=("delta_out", "z_in"),
        formula="rms_norm of every head, times silu(z)", function="llorch.model.blocks.delta_net.delta_net",
        llamacpp="final_output-{i} (MUL)",
        transformers="input of layers.{i}.linear_attn.out_proj", needs=("delta_net",),
    ),
    Stage(
        name="linear_out", checkpoint="05b", axes="seq hidden", inputs=("gated_norm",), matrix="out_proj",
        formula="gated_norm @ out_proj.T", function="llorch.ops.linear.linear",
        llamacpp="linear_attn_out-{i} (MUL_MAT)",
        transformers="output of layers.{i}.linear_attn.out_proj", needs=("delta_net",),
    ),
    Stage(
        name="attn_residual", checkpoint="05", axes="seq hidden", inputs=("block_in", "attn_out|linear_out"),
        formula="block_in + attn_out", function="llorch.model.forward.block",
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
        llamacpp="ffn_gate-{i} (MUL_MAT)", transformers="output of layers.{i}.mlp.gate_proj", needs=("dense",),
    ),
    Stage(
        name="ffn_up", checkpoint="06", axes="seq inter", inputs=("ffn_norm",), matrix="up_proj",
        formula="ffn_norm @ up_proj.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_up-{i} (MUL_MAT)", transformers="output of layers.{i}.mlp.up_proj", needs=("dense",),
    ),
    Stage(
        name="ffn_act", checkpoint="06", axes="seq inter", inputs=("ffn_gate", "ffn_up"),
        formula="gate / (1 + exp(-gate)) * up", function="llorch.ops.swiglu.swiglu",
        llamacpp="ffn_swiglu-{i} (GLU)", transformers="input of layers.{i}.mlp.down_proj", needs=("dense",),
    ),
    Stage(
        name="ffn_out", checkpoint="06", axes="seq hidden", inputs=("ffn_act",), matrix="down_proj",
        formula="ffn_act @ down_proj.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_out-{i} (MUL_MAT)", transformers="output of layers.{i}.mlp.down_proj", needs=("dense",),
    ),
    Stage(
        name="router_logits", checkpoint="06b", axes="seq experts", inputs=("ffn_norm",), matrix="router",
        formula="ffn_norm @ router.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_moe_logits-{i} (MUL_MAT)", transformers="logits in layers.{i}.mlp.gate", needs=("experts",),
    ),
    Stage(
        name="router_probs", checkpoint="06b", axes="seq experts", inputs=("router_logits",),
        formula="softmax over all experts", function="llorch.ops.routing.router_probs",
        llamacpp="ffn_moe_probs-{i} (SOFT_MAX)",
        transformers="softmax in layers.{i}.mlp.gate", needs=("experts",), lacks=("scaled_inputs",),
    ),
    Stage(
        name="topk_ids", checkpoint="06b", axes="seq topk", inputs=("router_probs|router_logits",),
        formula="the experts with the largest probabilities, a set", function="llorch.ops.routing.top_k",
        llamacpp="ffn_moe_topk-{i} (VIEW of ARGSORT)", transformers="topk in layers.{i}.mlp.gate", needs=("experts",),
    ),
    Stage(
        name="topk_weights", checkpoint="06b", axes="seq topk", inputs=("router_probs|router_logits", "topk_ids"),
        formula="probabilities of topk_ids, divided by their sum if norm_topk_prob",
        function="llorch.ops.routing.topk_weights",
        llamacpp="ffn_moe_weights-{i} or ffn_moe_weights_norm-{i}",
        transformers="weights returned by layers.{i}.mlp.gate", needs=("experts",),
    ),
    Stage(
        name="expert_in", checkpoint="06b", axes="seq topk hidden", inputs=("ffn_norm", "topk_ids", "topk_weights"),
        formula="ffn_norm * topk_weight, once per chosen expert", function="llorch.model.blocks.experts.experts",
        llamacpp="ffn_moe_weighted-{i} (MUL)",
        transformers="rows given to the first product in layers.{i}.mlp.experts", needs=("scaled_inputs",),
    ),
    Stage(
        name="expert_gate", checkpoint="06b", axes="seq topk expert_inter", inputs=("expert_in|ffn_norm", "topk_ids"),
        matrix="experts_gate_proj",
        formula="input @ gate_proj.T of each chosen expert", function="llorch.ops.routing.linear_by_expert",
        llamacpp="ffn_moe_gate-{i} (MUL_MAT_ID)",
        transformers="first half of the first product in layers.{i}.mlp.experts", needs=("experts",),
    ),
    Stage(
        name="expert_up", checkpoint="06b", axes="seq topk expert_inter", inputs=("expert_in|ffn_norm", "topk_ids"),
        matrix="experts_up_proj",
        formula="input @ up_proj.T of each chosen expert", function="llorch.ops.routing.linear_by_expert",
        llamacpp="ffn_moe_up-{i} (MUL_MAT_ID)",
        transformers="second half of the first product in layers.{i}.mlp.experts", needs=("experts",),
    ),
    Stage(
        name="expert_act", checkpoint="06b", axes="seq topk expert_inter", inputs=("expert_gate", "expert_up"),
        formula="gate / (1 + exp(-gate)) * up", function="llorch.ops.swiglu.swiglu",
        llamacpp="ffn_moe_swiglu-{i} (GLU)",
        transformers="input of the second product in layers.{i}.mlp.experts", needs=("experts",),
    ),
    Stage(
        name="expert_out", checkpoint="06b", axes="seq topk hidden", inputs=("expert_act", "topk_ids"),
        matrix="experts_down_proj",
        formula="expert_act @ down_proj.T of each chosen expert", function="llorch.ops.routing.linear_by_expert",
        llamacpp="ffn_moe_down-{i} (MUL_MAT_ID)",
        transformers="output of the second product in layers.{i}.mlp.experts", needs=("experts",),
    ),
    Stage(
        name="shared_ffn_gate", checkpoint="06b", axes="seq shared_inter", inputs=("ffn_norm",),
        matrix="shared_gate_proj",
        formula="ffn_norm @ shared_gate_proj.T", function="llorch.ops.linear.linear",
        llamacpp="MUL_MAT with blk.{i}.ffn_gate_shexp.weight",
        transformers="output of layers.{i}.mlp.shared_expert.gate_proj", needs=("shared",),
    ),
    Stage(
        name="shared_ffn_up", checkpoint="06b", axes="seq shared_inter", inputs=("ffn_norm",), matrix="shared_up_proj",
        formula="ffn_norm @ shared_up_proj.T", function="llorch.ops.linear.linear",
        llamacpp="MUL_MAT with blk.{i}.ffn_up_shexp.weight",
        transformers="output of layers.{i}.mlp.shared_expert.up_proj", needs=("shared",),
    ),
    Stage(
        name="shared_ffn_act", checkpoint="06b", axes="seq shared_inter", inputs=("shared_ffn_gate", "shared_ffn_up"),
        formula="gate / (1 + exp(-gate)) * up", function="llorch.ops.swiglu.swiglu",
        llamacpp="GLU of the shared expert",
        transformers="input of layers.{i}.mlp.shared_expert.down_proj", needs=("shared",),
    ),
    Stage(
        name="shared_out", checkpoint="06b", axes="seq hidden", inputs=("shared_ffn_act",), matrix="shared_down_proj",
        formula="shared_ffn_act @ shared_down_proj.T", function="llorch.ops.linear.linear",
        llamacpp="ffn_shexp-{i} (MUL_MAT)",
        transformers="output of layers.{i}.mlp.shared_expert.down_proj", needs=("shared",),
    ),
    Stage(
        name="shared_gate", checkpoint="06b", axes="seq one", inputs=("ffn_norm",),
        formula="1 / (1 + exp(-ffn_norm @ shared_gate.T))", function="llorch.ops.sigmoid.sigmoid",
        llamacpp="shared_expert_gate_sigmoid-{i}",
        transformers="sigmoid of the output of layers.{i}.mlp.shared_expert_gate", needs=("shared_gate",),
    ),
    Stage(
        name="moe_out", checkpoint="06b", axes="seq hidden", needs=("experts",),
        inputs=("expert_out", "topk_weights", "shared_out|", "shared_gate|"),
        formula="sum(topk_weight * expert_out) + shared_gate * shared_out", function="llorch.ops.routing.mixed",
        llamacpp="ffn_moe_out-{i} or ffn_out-{i} (ADD)", transformers="output of layers.{i}.mlp",
    ),
    Stage(
        name="block_out", checkpoint="07", axes="seq hidden", inputs=("attn_residual", "ffn_out|moe_out"),
        formula="attn_residual + ffn_out", function="llorch.model.forward.block",
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

ATTENTION = "attention"  # name for scores, probabilities and context as one operation, no row of the table
BY_NAME: Mapping[str, Stage] = {stage.name: stage for stage in STAGES}
_ROWS = {name: row for row, name in enumerate(BY_NAME)}
DENSE_PRODUCTS = tuple(stage for stage in STAGES if stage.matrix and stage.is_dense)  # the last product: logits
# Products that engines may compute as one matrix product.
FUSABLE: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("ffn_gate", "ffn_up"))


def axis_sizes(config: ModelConfig, *, seq: int, ctx: int) -> dict[str, int]:
    """Return the size of every axis of a model, for a pass of `seq` tokens in a context of `ctx`."""
    sizes = {
        "seq": seq, "ctx": ctx, "hidden": config.hidden_size, "inter": config.intermediate_size,
        "heads": config.n_heads, "kv_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "q_width": config.q_width, "kv_width": config.kv_width, "vocab": config.vocab_size,
        "q_and_gate": 2 * config.q_width, "one": 1,
    }  # fmt: skip
    if (experts := config.experts) is not None:
        sizes |= {
            "experts": experts.n_experts, "topk": experts.n_experts_per_token,
            "expert_inter": experts.expert_size, "shared_inter": experts.shared_size,
        }  # fmt: skip
    if (net := config.delta_net) is not None:
        sizes |= {
            "conv_width": net.conv_width, "taps": net.conv_kernel - 1, "k_heads": net.n_key_heads,
            "v_heads": net.n_value_heads, "key_dim": net.key_head_dim, "value_dim": net.value_head_dim,
            "value_width": net.value_width,
        }  # fmt: skip
    return sizes


def first_present(names: str, config: ModelConfig, layer: int | None) -> str:
    """Return the first of the alternatives `q_norm|q_proj` that a layer has; names that are no stages are present."""
    return next(name for name in names.split("|") if name not in BY_NAME or BY_NAME[name].applies_to(config, layer))


def rope_input(side: str, config: ModelConfig, layer: int | None = None) -> str:
    """Return the input of RoPE (`side` q or k): the normalised heads if the family has them, else the projection."""
    return BY_NAME[f"{side}_rope"].input_names(config, layer)[0]


def output_matrix(config: ModelConfig) -> str:
    """Return the name of the weight that computes logits."""
    return "embed_tokens" if config.tie_word_embeddings else "lm_head"


def matrix_of(stage: Stage, config: ModelConfig) -> str:
    """Return the short name of the matrix of a stage; empty for stages without a matrix."""
    return output_matrix(config) if stage.matrix == "lm_head" else stage.matrix


def keys(config: ModelConfig) -> Iterator[tuple[str, Stage, int | None]]:
    """Yield trace key, stage and layer (None outside the layers) of every stage, in the order of the forward pass."""
    outside = [stage for stage in STAGES if not stage.in_layer]
    yield outside[0].name, outside[0], None
    for layer in range(config.n_layers):
        for stage in STAGES:
            if stage.in_layer and stage.applies_to(config, layer):
                yield key(stage.name, layer), stage, layer
    for stage in outside[1:]:
        yield stage.name, stage, None


def forward_order(names: Iterable[str]) -> list[str]:
    """Sort trace keys into the order of the forward pass; other names come last, in their order."""
    return sorted(names, key=_key_rank)


def _key_rank(name: str) -> tuple[float, int]:
    match = re.fullmatch(r"(?:l([0-9]+)\.)?(\w+)", name)
    stage = BY_NAME.get(match[2]) if match else None
    if not match or stage is None or stage.in_layer != (match[1] is not None):
        return forward_rank("", None)
    return forward_rank(stage.name, int(match[1]) if stage.in_layer else None)


def forward_rank(stage: str, layer: int | None) -> tuple[float, int]:
    """Return (layer, row of the table): layer -1 for `embed`, infinity after the layers; the last row if unknown."""
    row = _ROWS.get(stage, len(STAGES))
    outside = math.inf if row else -1.0
    return outside if layer is None else float(layer), row


def key(name: str, layer: int | None) -> str:
    """Format the trace key of a stage of one layer, `l0.q_rope`."""
    return name if layer is None else f"l{layer}.{name}"


def input_keys(stage: Stage, layer: int | None, config: ModelConfig) -> tuple[str, ...]:
    """Return the trace keys of the inputs of a stage of a layer."""
    return tuple(input_key(name, layer, config) for name in stage.input_names(config, layer))


def input_key(name: str, layer: int | None, config: ModelConfig) -> str:
    """Return the trace key of an input name; `block_in` and `last_block_out` are outputs of earlier stages."""
    if name == "block_in":
        assert layer is not None
        return "embed" if layer == 0 else key("block_out", layer - 1)
    if name == "last_block_out":
        return key("block_out", config.n_layers - 1)
    return key(name, layer)
