"""Map the nodes of llama.cpp's graph to stages (llorch's named intermediate arrays), in the shapes of `stages.table`.

One name can mean up to four tensors: `Qcur-0` is the product, the sum with the bias, a reshape and the rotated heads.
In some families, the output projection has no name. So a rule identifies a node by its name, its operation and one of
its sources together. Two nodes for one stage are an error, and so is a stage without a node.

Experts: files may fuse the gate and up matrices of all experts; then both stages are views of one product. Some
architectures give equal names to the dense product and the shared expert's product, so their weights identify them.

Delta nets: the delta rule is one fused operation on the CPU, and both of its outputs are named views. The L2 norm of
queries and keys is a SCALE after an unnamed RMS_NORM. A state in memory is (value, key) for each head; the state of a
convolution has the channel axis first. Files of Qwen3.5 order value heads differently than Hugging Face: head j of
every key head in turn (tiled) instead of all heads of one key head (grouped). Files of Qwen3-Next keep the order, but
fuse b and a into one matrix.

Source: llama.cpp `src/llama-graph.cpp`, `src/models/{llama,llama4,qwen2,qwen3,qwen2moe,qwen3moe}.cpp`,
`src/models/{delta-net-base,qwen3next,qwen35,qwen35moe}.cpp`, `conversion/qwen.py`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import llama_cpp
import numpy as np

from llorch.engines import ggml_tensor
from llorch.engines.dumps.layout import to_half_split
from llorch.engines.ggml_tensor import GgmlTensor
from llorch.families.config import ModelConfig
from llorch.families.layers import DeltaNet
from llorch.families.table import FAMILIES

B_AND_A = "b_and_a"  # fused matrix of Qwen3-Next: for every key head its b, then its a
Rule = tuple[str, str, str | None, str | None]  # `NodeRule` of any layer: names without it, {i} in the source


class NodeRule(NamedTuple):
    """Rule that identifies the node of a stage; None matches anything."""

    stage: str
    op: str
    name: str | None
    source: str | None  # name of one of the node's source tensors


def node_rules(config: ModelConfig) -> list[NodeRule]:
    """List the rules for every node that a trace of this model needs; a stage may have two alternative rules."""
    rules = [NodeRule("embed", "GET_ROWS", None, "token_embd.weight")]
    for layer in range(config.n_layers):
        for stage, op, name, source in _layer_rules(config, layer):
            rules.append(
                NodeRule(f"l{layer}.{stage}", op, name and f"{name}-{layer}", source and source.format(i=layer))
            )
    head = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    return [
        *rules,
        NodeRule("final_norm", "MUL", "h_nextn" if config.delta_net else "result_norm", "output_norm.weight"),
        NodeRule("logits", "MUL_MAT", "result_output", head),
    ]


def _layer_rules(config: ModelConfig, layer: int) -> Iterator[Rule]:
    hybrid = config.delta_net is not None
    yield "attn_norm", "MUL", "attn_norm", "blk.{i}.attn_norm.weight"
    yield from _delta_net_rules(config) if "delta_net" in config.traits(layer) else _attention_rules(config, layer)
    yield "attn_residual", "ADD", "attn_residual" if hybrid else "ffn_inp", None
    norm = FAMILIES[config.family].layout.all_names["ffn_norm"]
    yield "ffn_norm", "MUL", None, f"blk.{{i}}.{norm}.weight"  # no name: in Llama 4 another node has it
    yield from _expert_rules(config) if "experts" in config.traits(layer) else _FEED_FORWARD_RULES
    yield "block_out", "ADD", "l_out", None


_FEED_FORWARD_RULES: tuple[Rule, ...] = (
    ("ffn_gate", "MUL_MAT", "ffn_gate", "blk.{i}.ffn_gate.weight"),
    ("ffn_up", "MUL_MAT", "ffn_up", "blk.{i}.ffn_up.weight"),
    ("ffn_act", "SWIGLU", "ffn_swiglu", None),
    ("ffn_out", "MUL_MAT", "ffn_out", "blk.{i}.ffn_down.weight"),
)


def _attention_rules(config: ModelConfig, layer: int) -> Iterator[Rule]:
    """Yield the rules of the attention stages of a layer."""
    traits = config.layer(layer)
    for letter in "qkv":
        name, tensor = f"{letter.upper()}cur", f"blk.{{i}}.attn_{letter}"
        if config.attention_gate and letter == "q":
            yield "q_gate_proj", "MUL_MAT", "Qcur_full", f"{tensor}.weight"
        else:
            operation, part = ("ADD", "bias") if config.qkv_bias else ("MUL_MAT", "weight")
            yield f"{letter}_proj", operation, name, f"{tensor}.{part}"
    for letter in "qk":
        name = f"{letter.upper()}cur"
        if config.qk_norm:
            yield f"{letter}_norm", "MUL", f"{name}_normed", f"blk.{{i}}.attn_{letter}_norm.weight"
        if traits.rope:
            yield f"{letter}_rope", "ROPE", name, None
        if traits.head_norm:
            yield f"{letter}_head_norm", "RMS_NORM", f"{name}_normed", None
    if traits.has_attention_temperature:
        yield "q_tempered", "MUL", "Qcur_attn_temp_scaled" if traits.rope else "Qcur", None
    yield "kq", "MUL_MAT", "kq", None  # kq and kqv are no stages, but their sources are the cached keys and values
    yield "attn_probs", "SOFT_MAX", "kq_soft_max", "kq-{i}"
    yield "kqv", "MUL_MAT", "kqv", "kq_soft_max-{i}"
    yield "attn_context", "CONT", "attn_pregate" if config.attention_gate else "kqv_out", None
    if config.attention_gate:
        yield "attn_gate", "SIGMOID", "gate_sigmoid", None
        yield "attn_gated", "MUL", "attn_gated", None
    operation, part = ("ADD", "bias") if config.o_bias else ("MUL_MAT", "weight")
    yield "attn_out", operation, None, f"blk.{{i}}.attn_output.{part}"


def _delta_net_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of the delta net stages of a layer."""
    yield "qkv_in", "MUL_MAT", None, "blk.{i}.attn_qkv.weight"
    yield "z_in", "MUL_MAT", "z", "blk.{i}.attn_gate.weight"
    if FAMILIES[config.family].delta_net == "fused":
        yield B_AND_A, "MUL_MAT", "linear_attn_mixed_ba", "blk.{i}.ssm_ba.weight"
        yield "beta", "SIGMOID", None, "b-{i} (cont)"
    else:
        yield "b_in", "MUL_MAT", None, "blk.{i}.ssm_beta.weight"
        yield "a_in", "MUL_MAT", None, "blk.{i}.ssm_alpha.weight"
        yield "beta", "SIGMOID", "beta_sigmoid", None
    yield "conv_state", "CPY", None, "conv_state_last-{i}"
    yield "conv_out", "SILU", "conv_output_silu", None
    yield "q_l2", "SCALE", None, "q_conv-{i}"
    yield "k_l2", "SCALE", None, "k_conv-{i}"
    yield "log_decay", "MUL", "gate", "blk.{i}.ssm_a"
    yield "delta_state", "VIEW", "new_state", None
    yield "delta_out", "VIEW", "attn_output", None
    yield "gated_norm", "RESHAPE", "final_output", None
    yield "linear_out", "MUL_MAT", "linear_attn_out", "blk.{i}.ssm_out.weight"


def _expert_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of the expert stages of a layer."""
    experts = config.experts
    assert experts is not None
    yield "router_logits", "MUL_MAT", "ffn_moe_logits", "blk.{i}.ffn_gate_inp.weight"
    if not experts.scaled_inputs:
        yield "router_probs", "SOFT_MAX", "ffn_moe_probs", None
    yield "topk_ids", "VIEW", "ffn_moe_topk", None
    if experts.norm_topk_prob:
        yield "topk_weights", "DIV", "ffn_moe_weights_norm", None
    else:
        yield "topk_weights", "GET_ROWS", "ffn_moe_weights", None
    if experts.scaled_inputs:
        yield "expert_in", "MUL", "ffn_moe_weighted", None
    for part in ("gate", "up"):  # separate matrices, or else views of a fused product
        yield f"expert_{part}", "MUL_MAT_ID", f"ffn_moe_{part}", f"blk.{{i}}.ffn_{part}_exps.weight"
        yield f"expert_{part}", "VIEW", f"ffn_moe_{part}", "ffn_moe_gate_up-{i}"
    yield "expert_act", "SWIGLU", "ffn_moe_swiglu", None
    yield "expert_out", "MUL_MAT_ID", "ffn_moe_down", "blk.{i}.ffn_down_exps.weight"
    if experts.shared_size:
        yield from _shared_rules(config)
    else:
        yield "moe_out", "CONT" if experts.n_experts_per_token == 1 else "ADD", "ffn_moe_out", None


def _shared_rules(config: ModelConfig) -> Iterator[Rule]:
    yield "shared_ffn_gate", "MUL_MAT", None, "blk.{i}.ffn_gate_shexp.weight"
    yield "shared_ffn_up", "MUL_MAT", None, "blk.{i}.ffn_up_shexp.weight"
    yield "shared_ffn_act", "SWIGLU", "ffn_swiglu", None
    yield "shared_out", "MUL_MAT", None, "blk.{i}.ffn_down_shexp.weight"
    nodes = FAMILIES[config.family].llamacpp.nodes
    if config.experts is not None and config.experts.shared_gate:
        yield "shared_gate", *nodes.get("shared_gate", ("SIGMOID", "shared_expert_gate_sigmoid")), None
    yield "moe_out", *nodes.get("moe_out", ("ADD", "ffn_out")), None


FUSED = ("kq", "attn_probs", "kqv", "attn_context")  # nodes that flash attention replaces by one


class GraphCapture:
    """Capture of the stages of one `llama_decode` call from the nodes of its graph."""

    def __init__(self, config: ModelConfig, n_tokens: int, *, fused_attention: bool = False) -> None:
        """Prepare to capture one pass of `n_tokens` tokens with an empty cache.

        A graph with `fused_attention` (flash attention) has no nodes for caches, scores, probabilities and contexts.
        """
        self.config = config
        self.n_tokens = n_tokens
        self.arrays: dict[str, np.ndarray] = {}
        self._rules: dict[tuple[str, str], list[NodeRule]] = {}
        self._unnamed: list[NodeRule] = []
        fused = FUSED if fused_attention else ()
        self._all_rules = [rule for rule in node_rules(config) if rule.stage.rpartition(".")[2] not in fused]
        for rule in self._all_rules:
            rules = self._unnamed if rule.name is None else self._rules.setdefault((rule.op, rule.name), [])
            rules.append(rule)

    def stage_of(self, tensor: GgmlTensor) -> str | None:
        """Return the stage that a node computes; None for other nodes."""
        op = ggml_tensor.op_name(tensor)
        sources = ggml_tensor.source_names(tensor)
        for rule in (*self._rules.get((op, tensor.name.decode()), ()), *self._unnamed):
            if rule.op == op and (rule.source is None or rule.source in sources):
                return rule.stage
        return None

    def keep(self, tensor: GgmlTensor) -> None:
        """Copy a computed node if it is a stage; call it before ggml reuses the memory of the node's sources."""
        stage = self.stage_of(tensor)
        if stage is None:
            return
        if stage in self.arrays:
            raise RuntimeError(f"llama.cpp: expected one node for {stage}, got a second one, {tensor.name.decode()}")
        layer, _, short = stage.rpartition(".")
        self.arrays[stage] = ggml_tensor.copy_tensor(tensor)
        if short == "kq":
            self.arrays[f"{layer}.k_cache"] = ggml_tensor.copy_tensor(tensor.src[0].contents)
        elif short == "kqv":
            self.arrays[f"{layer}.v_cache"] = ggml_tensor.copy_tensor(tensor.src[0].contents)
        elif short == "attn_probs":
            self.arrays[f"{layer}.attn_scores"] = self._scores(tensor, self.arrays[f"{layer}.kq"])

    def _scores(self, softmax: GgmlTensor, products: np.ndarray) -> np.ndarray:
        """Compute the scaled and masked scores, which ggml computes inside the softmax node."""
        scale, max_bias = ggml_tensor.float_params(softmax)[:2]
        if max_bias != 0:
            raise RuntimeError(f"llama.cpp: expected a softmax without ALiBi, got max_bias {max_bias}")
        mask = ggml_tensor.copy_tensor(softmax.src[1].contents).astype(np.float32)
        return products * scale + mask[..., : products.shape[-2], :]

    def stages(self) -> dict[str, np.ndarray]:
        """Return the captured arrays in llorch's shapes and Hugging Face's order of head dimensions."""
        if missing := [rule for rule in self._all_rules if rule.stage not in self.arrays]:
            stage, *rule = missing[0]
            raise RuntimeError(
                f"llama.cpp: expected a node for every stage, got none for {stage} (operation, name, source: "
                f"{', '.join(map(str, rule))}); correct the rule in llorch/engines/llamacpp_graph.py, or layout and "
                "llamacpp of the record in llorch/families"
            )
        stages = {}
        for stage, array in self.arrays.items():
            layer, dot, short = stage.rpartition(".")
            if short in ("kq", "kqv"):
                continue
            shaped_stages = _delta_net_stages(short, array, self.config) or {short: self._reshape(short, array)}
            for name, stage_array in shaped_stages.items():
                dtype = stage_array.dtype if stage_array.dtype.kind == "i" else np.float32  # a cache may be float16
                stages[f"{layer}{dot}{name}"] = stage_array.astype(dtype, copy=False)
        return stages

    def _reshape(self, short: str, array: np.ndarray) -> np.ndarray:
        """Reshape a node of llama.cpp to the axes of its stage."""
        n_tokens, config = self.n_tokens, self.config
        interleaved = FAMILIES[config.family].layout.interleaved_rope == "gguf"
        match short:
            case "q_norm" | "k_norm" | "q_rope" | "k_rope" | "q_tempered" | "q_head_norm" | "k_head_norm":
                heads = array.reshape(n_tokens, -1, config.head_dim)
                return to_half_split(heads) if interleaved else heads
            case "q_proj" | "k_proj":
                heads = array.reshape(n_tokens, -1, config.head_dim)
                return (to_half_split(heads) if interleaved else heads).reshape(n_tokens, -1)
            case "k_cache":
                cache = array[0, :, :n_tokens]  # the rest of the view is padding
                return to_half_split(cache) if interleaved else cache
            case "v_cache":
                return array[0, :, :, :n_tokens].transpose(0, 2, 1)  # stored with the tokens as fastest axis
            case "attn_scores" | "attn_probs":
                return array[0, :, :, :n_tokens]
            case "topk_ids":
                return array.reshape(n_tokens, -1).astype(np.int64)
            case "expert_in" | "expert_gate" | "expert_up" | "expert_act" | "expert_out":
                return array.reshape(n_tokens, -1, array.shape[-1])
            case _:
                return array.reshape(n_tokens, -1)


def _delta_net_stages(short: str, array: np.ndarray, config: ModelConfig) -> Mapping[str, np.ndarray]:
    """Split a delta net's node into its stages, in llorch's shapes and Hugging Face's order; empty for other nodes."""
    net = config.delta_net
    if net is None:
        return {}
    match short:
        case "b_and_a":
            by_key_head = array.reshape(array.shape[-2], net.n_key_heads, 2, -1)
            return {"b_in": _join_heads(by_key_head[:, :, 0]), "a_in": _join_heads(by_key_head[:, :, 1])}
        case "qkv_in" | "conv_out":
            return {short: _reorder_channels(array.reshape(-1, net.conv_width), net, config)}
        case "conv_state":
            return {short: _reorder_channels(array.reshape(net.conv_width, -1).T, net, config)}
        case "b_in" | "a_in" | "beta" | "log_decay":
            return {short: _reorder_heads(array.reshape(-1, net.n_value_heads), 1, net, config)}
        case "q_l2" | "k_l2":
            return {short: array.reshape(-1, net.n_key_heads, net.key_head_dim)}
        case "delta_state":
            states = array.reshape(net.n_value_heads, net.value_head_dim, net.key_head_dim)
            return {short: _reorder_heads(states, 0, net, config).swapaxes(1, 2)}
        case "delta_out" | "z_in" | "gated_norm":
            heads = _reorder_heads(array.reshape(-1, net.n_value_heads, net.value_head_dim), 1, net, config)
            return {short: heads if short == "delta_out" else _join_heads(heads)}
        case _:
            return {}


def _join_heads(heads: np.ndarray) -> np.ndarray:
    return heads.reshape(len(heads), -1)


def _reorder_channels(rows: np.ndarray, net: DeltaNet, config: ModelConfig) -> np.ndarray:
    """Bring the value channels of a convolution into Hugging Face's order of heads."""
    values = rows[:, 2 * net.key_width :].reshape(len(rows), net.n_value_heads, net.value_head_dim)
    return np.concatenate([rows[:, : 2 * net.key_width], _join_heads(_reorder_heads(values, 1, net, config))], axis=1)


def _reorder_heads(array: np.ndarray, axis: int, net: DeltaNet, config: ModelConfig) -> np.ndarray:
    """Bring the axis of value heads into Hugging Face's order."""
    if FAMILIES[config.family].delta_net == "fused":  # already in this order; other files are tiled
        return array
    leading, trailing = array.shape[:axis], array.shape[axis + 1 :]
    tiled = array.reshape(*leading, -1, net.n_key_heads, *trailing)
    return tiled.swapaxes(axis, axis + 1).reshape(array.shape)


class GraphWatcher:
    """Callback of ggml's scheduler, which first asks if a node is wanted, and passes it again once it is computed.

    An exception must not cross the C frames: ctypes would print it and return False. So it is stored in `error`, and
    the caller raises it after the pass.
    """

    def __init__(self, capture: GraphCapture) -> None:
        """Prepare a callback that passes computed nodes to a capture."""
        self.error: BaseException | None = None
        self._capture = capture
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, address: int, ask: bool, _user_data: int | None) -> bool:
        """Return True if a node is wanted (`ask`), or capture a computed node; store exceptions in `error`."""
        if self.error is not None:
            return ask  # request the next node, then return False for it, which stops the graph
        try:
            tensor = ggml_tensor.node(address)
            if ask:
                return self._capture.stage_of(tensor) is not None
            self._capture.keep(tensor)
        except BaseException as error:
            self.error = error
            return ask
        return True
