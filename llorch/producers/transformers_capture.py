"""Hooks that read every stage out of an unmodified transformers model with eager attention.

Most stages are inputs or outputs of modules. Rotated queries and keys and the cache are arguments of the
attention function, which transformers looks up in its registry: for one run we register, under the name "eager",
a function that notes its arguments and then calls the family's own. The scores exist only inside that function,
as the input of its softmax; a torch function mode sees that call.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Stage -> path of the module inside a decoder layer.
LAYER_OUTPUTS = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attn_out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_out": "mlp.down_proj",
    "block_out": "",
}
LAYER_INPUTS = {
    "attn_context": "self_attn.o_proj",
    "attn_residual": "post_attention_layernorm",
    "ffn_act": "mlp.down_proj",
}
MODEL_OUTPUTS = {"embed": "model.embed_tokens", "final_norm": "model.norm", "logits": "lm_head"}


@contextmanager
def captured(model: nn.Module) -> Iterator[dict[str, np.ndarray]]:
    """Watch the runs inside the `with` block.

    Args:
        model: A LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM with eager attention.

    Yields:
        Stage to array, float32 whatever the dtype of the run; filled by the run.
    """
    stages: dict[str, np.ndarray] = {}
    with ExitStack() as hooks:
        for stage, path in MODEL_OUTPUTS.items():
            hooks.enter_context(model.get_submodule(path).register_forward_hook(_output_hook(stages, stage)))
        for i, layer in enumerate(model.get_submodule("model.layers").children()):
            for stage, path in LAYER_OUTPUTS.items():
                if stage not in ("q_norm", "k_norm") or hasattr(layer.self_attn, stage):
                    hook = _output_hook(stages, f"l{i}.{stage}")
                    hooks.enter_context(layer.get_submodule(path).register_forward_hook(hook))
            for stage, path in LAYER_INPUTS.items():
                hook = _input_hook(stages, f"l{i}.{stage}")
                hooks.enter_context(layer.get_submodule(path).register_forward_pre_hook(hook))
        hooks.enter_context(_watched_attention(stages))
        yield stages


def _output_hook(stages: dict[str, np.ndarray], stage: str) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        _keep(stages, stage, output[0])

    return hook


def _input_hook(stages: dict[str, np.ndarray], stage: str) -> Callable[..., None]:
    def hook(_module: nn.Module, inputs: tuple) -> None:
        _keep(stages, stage, inputs[0][0])

    return hook


def _keep(stages: dict[str, np.ndarray], stage: str, tensor: torch.Tensor) -> None:
    if stage in stages:
        raise RuntimeError(f"transformers: stage {stage} was computed twice in one run")
    stages[stage] = tensor.detach().float().contiguous().numpy().copy()  # half values are floats too


@contextmanager
def _watched_attention(stages: dict[str, np.ndarray]) -> Iterator[None]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eager: Attention = sys.modules[type(module).__module__].eager_attention_forward
        with _SoftmaxInputs() as softmax:
            output, probs = eager(module, query, key, value, attention_mask, **settings)
        (scores,) = softmax.inputs
        stage = f"l{module.layer_idx}.".__add__
        _keep(stages, stage("q_rope"), query[0].transpose(0, 1))  # (seq, heads, head_dim)
        _keep(stages, stage("k_rope"), key[0].transpose(0, 1))
        _keep(stages, stage("k_cache"), key[0])
        _keep(stages, stage("v_cache"), value[0])
        _keep(stages, stage("attn_scores"), _with_infinite_mask(scores, attention_mask)[0])
        _keep(stages, stage("attn_probs"), probs[0])
        return output, probs

    ALL_ATTENTION_FUNCTIONS["eager"] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]


class _SoftmaxInputs(TorchFunctionMode):
    """Notes what goes into every softmax called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is nn.functional.softmax:
            self.inputs.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def _with_infinite_mask(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Write the -inf that transformers' mask means: it adds the lowest finite float instead."""
    if mask is None:
        return scores
    return scores.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
