"""Stages (named intermediate arrays) that are results of functions which a module calls, not inputs or outputs of it.

A torch function mode intercepts the calls; hooks track the module in which they happen. One class records the stages of
one kind of module; each run of such a module gets a new instance. A stage is recognised by function name and order.

    DeltaNetCalls   Qwen3-Next and Qwen3.5, in chunks and token by token. The fused matrices of Qwen3-Next hold, for
                    every key head, the rows of its query, its key, its values and their gates. This class splits
                    them like Qwen3.5. Queries and keys are recorded after their L2 norm, where each is repeated for
                    the value heads that read it.
    EXPERTS         Mixtures of experts, computed expert by expert (the eager implementation). For each expert, the
                    loop selects the tokens routed to it: `torch.where` returns them, the first product after it
                    computes gate and up, the second the output. Scattered back to (token, slot), these are stages.
                    Llama 4 multiplies every expert with all tokens at once; the class gathers the routed rows.

Source: transformers `modeling_qwen3_next.py`, class Qwen3NextGatedDeltaNet, `modeling_qwen3_5.py`,
`modeling_llama4.py`, `modeling_qwen3_moe.py`, classes Qwen3MoeTopKRouter and Qwen3MoeExperts; Qwen2-MoE, Qwen3-Next and
Qwen3.5-MoE have the same.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from llorch.families.rules import BETA

# (stage, layer, array without batch axis) -> True if it overwrote the array in place, to replace the stage of the run.
Keep = Callable[[str, int, torch.Tensor], bool]


class Calls:
    """Observer of the function calls inside one call of a module."""

    # (stage, layer) -> array that replaces a stage computed in parts; `keep` gets that stage only when it is complete.
    replacement_for: Callable[[str, int], torch.Tensor | None]

    def __init__(self, module: Any, layer: int, keep: Keep, kwargs: Mapping[str, Any]) -> None:
        """Start to observe; `kwargs` are the keyword arguments of the module's call."""
        self.module, self.layer, self.keep, self.kwargs = module, layer, keep, kwargs
        self.on_enter()

    def on_enter(self) -> None:
        """Prepare at the start of the module's call."""

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Observe a function call: its name, arguments and output."""

    def on_exit(self) -> None:
        """Finish at the end of the module's call."""


class AttentionCalls(Calls):
    """Observer of attention: its gate (the only sigmoid), and rotated heads that change again before the scores."""

    def on_enter(self) -> None:
        """Choose the function whose first calls return rotated heads: the last function of the model's RoPE."""
        self._rotation, self._remaining = "", list[str]()
        rope = getattr(self.module.config, "rope_parameters", None) or {}
        if hasattr(self.module, "qk_norm"):  # Llama 4: (batch, seq, heads, head_dim)
            self._rotation, self._remaining = "type_as", ["q_rope", "k_rope"]
        elif BETA in rope:  # Ministral 3: (batch, heads, seq, head_dim)
            self._rotation, self._remaining = "add", ["q_rope"]

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Record the stages that a function call computes."""
        if name == "sigmoid":
            self.keep("attn_gate", self.layer, output[0])
        elif self._remaining and name.strip("_") == self._rotation:
            self.keep(self._remaining.pop(0), self.layer, output[0] if name == "type_as" else output[0].transpose(0, 1))


class _Mode(TorchFunctionMode):
    """Torch function mode that passes every call to the observer of the innermost module."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[Calls] = []
        self._thread = threading.get_ident()  # a mode is active in one thread only, but hooks run in all threads

    def on_enter(self, make_observer: Callable[[Mapping[str, Any]], Calls], kwargs: Mapping[str, Any]) -> None:
        """Observe the calls inside a module from now on, only in the thread of the capture."""
        if threading.get_ident() == self._thread:
            self._inside.append(make_observer(kwargs))

    def end(self) -> None:
        if threading.get_ident() == self._thread and self._inside:
            self._inside.pop().on_exit()

    def __torch_function__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._inside:
            self._inside[-1].on_call(func.__name__, args, output)
        return output


@contextmanager
def observe_calls(
    model: nn.Module,
    kinds: Mapping[str, type[Calls]],
    keep: Keep,
    replacement_for: Callable[[str, int], torch.Tensor | None] = lambda stage, layer: None,
) -> Iterator[None]:
    """Observe modules in this thread, by their path inside a layer, like `self_attn`; see `Calls`."""
    mode = _Mode()

    def make_observer(kind: type[Calls], module: Any, layer: int, kwargs: Mapping[str, Any]) -> Calls:
        calls = kind(module, layer, keep, kwargs)
        calls.replacement_for = replacement_for
        return calls

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            match = re.fullmatch(r"(?:[a-zA-Z_]\w*\.)*layers\.(\d+)\.([\w.]+)", path)
            if match is None or match[2] not in kinds:
                continue

            def on_enter(
                module: Any, _args: tuple, kwargs: Mapping, layer: int = int(match[1]), kind: type = kinds[match[2]]
            ) -> None:
                mode.on_enter(lambda kwargs: make_observer(kind, module, layer, kwargs), kwargs)

            hooks.enter_context(module.register_forward_pre_hook(on_enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(lambda *_: mode.end(), always_call=True))
        hooks.enter_context(mode)
        yield


class DeltaNetCalls(Calls):
    """Observer of one delta net."""

    def on_enter(self) -> None:
        """Observe the modules inside the delta net, too."""
        module = self.module
        self._n_tokens = self.kwargs["hidden_states"].shape[1]
        self._repeated = module.num_v_heads // module.num_k_heads
        self._softplus = self._inverse_norm = None  # last outputs of softplus and rsqrt
        # Stages not recorded yet, by function; "l2" is no function but the product with the inverse norm.
        self._remaining = {"silu": ["conv_out"], "sigmoid": ["beta"], "l2": ["q_l2", "k_l2"]}
        self._hooks = [module.norm.register_forward_pre_hook(lambda _, inputs: self._norm(inputs[0]))]
        if hasattr(module, "in_proj_qkvz"):
            self._hooks += [
                module.in_proj_qkvz.register_forward_hook(lambda _, __, output: self._qkvz(output[0])),
                module.in_proj_ba.register_forward_hook(lambda _, __, output: self._ba(output[0])),
            ]

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Record the stages that a function call computes; later calls of silu or sigmoid are no stages."""
        if self._remaining.get(name):
            heads = output[0, :, -self._n_tokens :].T if name == "silu" else output[0]
            self.keep(self._remaining[name].pop(0), self.layer, heads)
        elif name == "softplus":
            self._softplus = output
        elif name == "rsqrt":
            self._inverse_norm = output
        elif name in ("mul", "__mul__") and args[1] is self._softplus is not None:
            self.keep("log_decay", self.layer, output[0])
        elif name in ("mul", "__mul__") and args[1] is self._inverse_norm is not None and self._remaining["l2"]:
            self._record_normalised(output[0])

    def on_exit(self) -> None:
        """Record the states of convolution and delta rule from the cache."""
        for hook in self._hooks:
            hook.remove()
        if (cache := self.kwargs.get("cache_params")) is not None:
            states = cache.layers[self.layer]
            self.keep("conv_state", self.layer, states.conv_states[0][0, :, 1 - self.module.conv_kernel_size :].T)
            self.keep("delta_state", self.layer, states.recurrent_states[0][0])

    def _record_normalised(self, heads: torch.Tensor) -> None:
        """Record one row per key head of (v_heads, seq, key_dim); copy a replacement to all its value heads."""
        key_heads = heads[:: self._repeated]
        if self.keep(self._remaining["l2"].pop(0), self.layer, key_heads.transpose(0, 1)):
            heads.copy_(key_heads.repeat_interleave(self._repeated, dim=0))

    def _norm(self, rows: torch.Tensor) -> None:
        self.keep("delta_out", self.layer, rows.view(self._n_tokens, -1, rows.shape[-1]))

    def _qkvz(self, fused: torch.Tensor) -> None:
        net, values = self.module, self._repeated * self.module.head_v_dim
        query, key, value, z = self._split_by_key_head(fused, [net.head_k_dim, net.head_k_dim, values, values])
        self._record_fused("qkv_in", [query, key, value])
        self._record_fused("z_in", [z])

    def _ba(self, fused: torch.Tensor) -> None:
        b, a = self._split_by_key_head(fused, [self._repeated, self._repeated])
        self._record_fused("b_in", [b])
        self._record_fused("a_in", [a])

    def _split_by_key_head(self, fused: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Split a fused projection into parts of the given sizes, each (tokens, key heads, size)."""
        return fused.view(self._n_tokens, self.module.num_k_heads, -1).split(sizes, dim=-1)

    def _record_fused(self, stage: str, parts: Sequence[torch.Tensor]) -> None:
        """Record parts as one stage; write a replacement back into the parts."""
        fused = torch.cat([part.flatten(1) for part in parts], dim=-1)
        if self.keep(stage, self.layer, fused):
            widths = [part[0].numel() for part in parts]
            for part, replacement in zip(parts, fused.split(widths, dim=-1), strict=True):
                part.copy_(replacement.view(part.shape))


class SharedGate(Calls):
    """Observer of a block, whose only sigmoid is the gate of the shared expert."""

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Record the gate of the shared expert."""
        if name == "sigmoid":
            self.keep("shared_gate", self.layer, output)


class Router(Calls):
    """Observer of a router: logits, probabilities, selected experts and their weights."""

    _probs: torch.Tensor
    _is_selected = False

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Record the stages that a function call computes; the cast after topk has the final weights."""
        if name == "linear":
            self.keep("router_logits", self.layer, output)
        elif name == "softmax":
            self.keep("router_probs", self.layer, output)
            self._probs = output
        elif name == "topk":
            if self.keep("topk_ids", self.layer, output.indices):
                output.values.copy_(self._probs.gather(-1, output.indices))
            self._is_selected = True
        elif name == "to" and self._is_selected:
            self.keep("topk_weights", self.layer, output)


class ExpertLoop(Calls):
    """Observer of the loop over experts."""

    _PARTS = ("expert_gate", "expert_up", "expert_act", "expert_out")

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Collect one expert's stages: one_hot starts the loop, `where` an expert, `linear` computes a product."""
        if name == "one_hot":
            self._shape, self._stages, self._replacements = args[0].shape, dict[str, torch.Tensor](), dict[str, Any]()
        elif name == "where":
            self._index, self._is_first = (output[1], output[0]), True  # (token, slot among its experts)
        elif name == "linear" and self._is_first:
            gate, up = output.chunk(2, dim=-1)
            self._collect_rows("expert_gate", gate)
            self._collect_rows("expert_up", up)
            self._is_first = False
        elif name == "linear":
            if self._collect_rows("expert_act", args[0]):  # replaced inputs: compute the product again
                output.copy_(torch.nn.functional.linear(*args))
            self._collect_rows("expert_out", output)

    def on_exit(self) -> None:
        """Record the stages, assembled from all experts."""
        for stage in self._PARTS:
            self.keep(stage, self.layer, self._stages[stage])

    def _collect_rows(self, stage: str, rows: torch.Tensor) -> bool:
        """Collect the rows of one expert; return True if a replacement overwrote them."""
        if stage not in self._stages:
            self._stages[stage] = rows.new_empty(*self._shape, rows.shape[-1])
            self._replacements[stage] = self.replacement_for(stage, self.layer)
        self._stages[stage][self._index] = rows
        if (replacement := self._replacements[stage]) is None:
            return False
        rows.copy_(replacement[self._index])
        return True


class Llama4Calls(Calls):
    """Observer of Llama 4's feed-forward block, in which every expert gets all tokens, times 0 if not selected."""

    def on_call(self, name: str, args: tuple, output: Any) -> None:
        """Record the stages that a function call computes; a dense layer has no router."""
        if not hasattr(self.module, "router"):
            return
        if name == "linear" and not hasattr(self, "_logits"):
            self._logits = output
            self.keep("router_logits", self.layer, output)
        elif name == "topk":
            if self.keep("topk_ids", self.layer, output.indices):
                output.values.copy_(self._logits.gather(-1, output.indices))
            self._ids = output.indices
        elif name == "sigmoid":
            weights = output.gather(-1, self._ids)
            if self.keep("topk_weights", self.layer, weights):
                output.scatter_(-1, self._ids, weights)
        elif name == "bmm":
            self._record_product(args, output)

    def _record_product(self, args: tuple, output: torch.Tensor) -> None:
        """Record a product over all experts: the first computes gate and up, the second the outputs."""
        is_first = not hasattr(self, "_is_second")
        self._is_second = True
        if self._record_selected("expert_in" if is_first else "expert_act", args[0]):
            torch.bmm(*args, out=output)
        if not is_first:
            self._record_selected("expert_out", output)
            return
        for stage, part in zip(("expert_gate", "expert_up"), output.chunk(2, dim=-1), strict=True):
            self._record_selected(stage, part)

    def _record_selected(self, stage: str, stacked: torch.Tensor) -> bool:
        """Record the rows of selected experts from (experts, tokens, width); return True if they were replaced."""
        tokens = torch.arange(len(self._ids), device=stacked.device)[:, None]
        rows = stacked[self._ids, tokens]  # (tokens, chosen, width)
        if was_replaced := self.keep(stage, self.layer, rows):
            stacked[self._ids, tokens] = rows
        return was_replaced


EXPERTS: dict[str, type[Calls]] = {
    "mlp": SharedGate, "mlp.gate": Router, "mlp.experts": ExpertLoop, "feed_forward": Llama4Calls,
}  # fmt: skip
