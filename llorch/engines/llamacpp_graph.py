"""Which node of llama.cpp's graph is which stage, and how its bytes become the stage's array.

One name can mean up to four tensors (`Qcur-0` is the product, the sum with the bias, a reshape and the rotated
heads), and the output projection has no name of its own in some families. So a node is known by its name, its
operation and one of its sources together. A node that matches twice is an error, and so is a stage without one.

Source: llama.cpp `src/llama-graph.cpp`, `src/models/{llama,qwen2,qwen3}.cpp`; of delta nets see `llamacpp_delta_net`,
of experts `llamacpp_experts`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import llama_cpp
import numpy as np

from llorch.engines import ggml_tensor
from llorch.engines.ggml_tensor import GgmlTensor
from llorch.engines.llamacpp_delta_net import Rule, delta_net_rules, delta_net_stages
from llorch.engines.llamacpp_experts import expert_rules, of_experts
from llorch.families.config import FAMILIES, ModelConfig
from llorch.files.tensor_names import undo_interleave


class NodeRule(NamedTuple):
    """How to know the node of a stage; None matches anything."""

    stage: str
    op: str
    name: str | None
    source: str | None  # one of the tensors that it is computed from


def node_rules(config: ModelConfig) -> list[NodeRule]:
    """List the rules for every node that a trace of this model needs."""
    rules = [NodeRule("embed", "GET_ROWS", None, "token_embd.weight")]
    for i in range(config.n_layers):
        for stage, op, name, source in _layer_rules(config, i):
            rules.append(NodeRule(f"l{i}.{stage}", op, name and f"{name}-{i}", source and source.format(i=i)))
    head = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    return [
        *rules,
        NodeRule("final_norm", "MUL", "h_nextn" if config.delta_net else "result_norm", "output_norm.weight"),
        NodeRule("logits", "MUL_MAT", "result_output", head),
    ]


def _layer_rules(config: ModelConfig, layer: int) -> Iterator[Rule]:
    hybrid = config.delta_net is not None
    yield "attn_norm", "MUL", "attn_norm", "blk.{i}.attn_norm.weight"
    yield from delta_net_rules(config) if "delta_net" in config.traits(layer) else _attention_rules(config, layer)
    yield "attn_residual", "ADD", "attn_residual" if hybrid else "ffn_inp", None
    if hybrid:
        yield "ffn_norm", "MUL", "attn_post_norm", "blk.{i}.post_attention_norm.weight"
    else:  # Llama 4 gives that name to what attention made
        name = "ffn_norm" if FAMILIES[config.family].named_norm else None
        yield "ffn_norm", "MUL", name, "blk.{i}.ffn_norm.weight"
    yield from expert_rules(config) if "experts" in config.traits(layer) else _FEED_FORWARD_RULES
    yield "block_out", "ADD", "l_out", None


_FEED_FORWARD_RULES: tuple[Rule, ...] = (
    ("ffn_gate", "MUL_MAT", "ffn_gate", "blk.{i}.ffn_gate.weight"),
    ("ffn_up", "MUL_MAT", "ffn_up", "blk.{i}.ffn_up.weight"),
    ("ffn_act", "SWIGLU", "ffn_swiglu", None),
    ("ffn_out", "MUL_MAT", "ffn_out", "blk.{i}.ffn_down.weight"),
)


def _attention_rules(config: ModelConfig, layer: int) -> Iterator[Rule]:
    """Yield the rule of each attention stage of a layer: stage, ggml operation, name of the node, tensor."""
    this = config.layer(layer)
    for letter in "qkv":
        name, tensor = f"{letter.upper()}cur", f"blk.{{i}}.attn_{letter}"
        if config.attention_gate and letter == "q":
            yield "q_gate_proj", "MUL_MAT", "Qcur_full", f"{tensor}.weight"
        elif config.qkv_bias:
            yield f"{letter}_proj", "ADD", name, f"{tensor}.bias"
        else:
            yield f"{letter}_proj", "MUL_MAT", name, f"{tensor}.weight"
    for letter in "qk":
        name = f"{letter.upper()}cur"
        if config.qk_norm:
            yield f"{letter}_norm", "MUL", f"{name}_normed", f"blk.{{i}}.attn_{letter}_norm.weight"
        if this.rope:
            yield f"{letter}_rope", "ROPE", name, None
        if this.head_norm:
            yield f"{letter}_head_norm", "RMS_NORM", f"{name}_normed", None
    if this.has_attention_temperature:
        yield "q_tempered", "MUL", "Qcur_attn_temp_scaled" if this.rope else "Qcur", None
    yield "kq", "MUL_MAT", "kq", None
    yield "attn_probs", "SOFT_MAX", "kq_soft_max", "kq-{i}"
    yield "kqv", "MUL_MAT", "kqv", "kq_soft_max-{i}"
    yield "attn_context", "CONT", "attn_pregate" if config.attention_gate else "kqv_out", None
    if config.attention_gate:
        yield "attn_gate", "SIGMOID", "gate_sigmoid", None
        yield "attn_gated", "MUL", "attn_gated", None
    if config.o_bias:
        yield "attn_out", "ADD", None, "blk.{i}.attn_output.bias"
    else:
        yield "attn_out", "MUL_MAT", None, "blk.{i}.attn_output.weight"


class GraphCapture:
    """Receives the nodes of one decode and keeps the arrays of the stages."""

    def __init__(self, config: ModelConfig, n_tokens: int) -> None:
        """Prepare for one decode of `n_tokens` tokens into an empty cache."""
        self.config = config
        self.n_tokens = n_tokens
        self.arrays: dict[str, np.ndarray] = {}
        self._rules: dict[tuple[str, str], list[NodeRule]] = {}
        self._unnamed: list[NodeRule] = []
        for rule in node_rules(config):
            known = self._unnamed if rule.name is None else self._rules.setdefault((rule.op, rule.name), [])
            known.append(rule)

    def stage_of(self, tensor: GgmlTensor) -> str | None:
        """Find the stage that a node computes; None for other nodes."""
        op = ggml_tensor.op_name(tensor)
        sources = ggml_tensor.source_names(tensor)
        for rule in (*self._rules.get((op, tensor.name.decode()), ()), *self._unnamed):
            if rule.op == op and (rule.source is None or rule.source in sources):
                return rule.stage
        return None

    def keep(self, tensor: GgmlTensor) -> None:
        """Copy a computed node for which `stage_of` gave a stage; called while its sources are still in place."""
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
        """Compute the input of the softmax.

        ggml scales and masks inside the node, by a parameter and a second input of the node.
        """
        scale, max_bias = ggml_tensor.float_params(softmax)[:2]
        if max_bias != 0:
            raise RuntimeError(f"llama.cpp: expected a softmax without ALiBi, got max_bias {max_bias}")
        mask = ggml_tensor.copy_tensor(softmax.src[1].contents).astype(np.float32)
        return products * scale + mask[..., : products.shape[-2], :]

    def stages(self) -> dict[str, np.ndarray]:
        """Return the captured arrays in llorch's shapes and in Hugging Face's order of head dimensions."""
        out = {}
        for stage, array in self.arrays.items():
            layer, dot, short = stage.rpartition(".")
            if short in ("kq", "kqv"):
                continue
            shaped = delta_net_stages(short, array, self.config) or {short: self._shaped(short, array)}
            for name, each in shaped.items():
                wide = each.dtype if each.dtype.kind == "i" else np.float32  # a cache may be float16
                out[f"{layer}{dot}{name}"] = each.astype(wide, copy=False)
        return out

    def _shaped(self, short: str, array: np.ndarray) -> np.ndarray:
        """Reshape a node of llama.cpp to the axes of its stage."""
        n, config = self.n_tokens, self.config
        if (rows := of_experts(short, array, config.experts)) is not None:
            return rows
        interleaved = FAMILIES[
            config.family
        ].interleaved_rope_gguf  # its GGUF files store the rows of Q and K in RoPE pairs
        match short:
            case "q_norm" | "k_norm" | "q_rope" | "k_rope" | "q_tempered" | "q_head_norm" | "k_head_norm":
                heads = array.reshape(n, -1, config.head_dim)
                return half_split(heads) if interleaved else heads
            case "q_proj" | "k_proj":
                heads = array.reshape(n, -1, config.head_dim)
                return (half_split(heads) if interleaved else heads).reshape(n, -1)
            case "k_cache":
                cache = array[0, :, :n]  # the view is padded beyond the real context
                return half_split(cache) if interleaved else cache
            case "v_cache":
                return array[0, :, :, :n].transpose(0, 2, 1)  # stored with the tokens as fastest axis
            case "attn_scores" | "attn_probs":
                return array[0, :, :, :n]
            case _:
                return array.reshape(n, -1)


def half_split(heads: np.ndarray) -> np.ndarray:
    """Bring the last axis from llama.cpp's order of pairs (2j, 2j+1) to Hugging Face's (j, j + half)."""
    return undo_interleave(heads.reshape(-1), heads.size // heads.shape[-1]).reshape(heads.shape)


class GraphWatcher:
    """The scheduler's callback: first asked whether a node matters, then given it when it is computed.

    An exception must not cross the C frames (ctypes would print it and go on as if we had said no), so it is
    kept here and raised after the decode.
    """

    def __init__(self, capture: GraphCapture) -> None:
        """Hand computed nodes to a capture."""
        self.error: BaseException | None = None
        self._capture = capture
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, address: int, ask: bool, _user_data: int | None) -> bool:
        """Answer the scheduler: keep a computed node, or tell if a node is wanted; errors are kept for later."""
        if self.error is not None:
            return ask  # yes, we want the node: the next answer can then stop the graph
        try:
            tensor = ggml_tensor.node(address)
            if ask:
                return self._capture.stage_of(tensor) is not None
            self._capture.keep(tensor)
        except BaseException as error:
            self.error = error
            return ask
        return True
