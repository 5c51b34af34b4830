"""Stages that are neither input nor output of a module: made by a function that a module calls.

A torch function mode sees the calls; hooks say inside which module they happen. One class shows the stages of one kind
of module, begun anew whenever such a module runs.

    DeltaNetCalls   Qwen3-Next and Qwen3.5, in chunks and token by token. The fused matrices of Qwen3-Next hold, for
                    every key head, the rows of its query, its key, its values and their gates; here they are taken
                    apart, as Qwen3.5 has them. Queries and keys are seen behind their L2 norm, where each is repeated
                    for the value heads that read it.
    EXPERTS         mixtures of experts, computed expert by expert (the eager implementation). The loop over experts
                    takes, for each, the tokens that chose it: `torch.where` says which, the first product after it
                    makes gate and up, the second what comes out. Put back in the order of the choices these are
                    stages. Llama 4 multiplies every expert with all tokens at once; the rows of those that chose it
                    are picked out.

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

# Given a stage, its layer and its array without the batch, which may be a view that the engine goes on with; says
# whether it wrote other values into that.
Keep = Callable[[str, int, torch.Tensor], bool]


class Calls:
    """Looks at the calls of functions inside one call of a module."""

    # What the engine is to go on with, in a stage that is made in parts, which `keep` is given when it is whole.
    instead: Callable[[str, int], torch.Tensor | None]

    def __init__(self, module: Any, layer: int, keep: Keep, given: Mapping[str, Any]) -> None:
        """Begin; `given` are the arguments of the module that have names."""
        self.module, self.layer, self.keep, self.given = module, layer, keep, given
        self.begin()

    def begin(self) -> None:
        """Begin to watch the functions that the module calls."""

    def called(self, name: str, args: tuple, made: Any) -> None:
        """See a call of a function: what it was given, and what it made."""

    def done(self) -> None:
        """End: the module was left."""


class AttentionCalls(Calls):
    """Attention: its gate, by the only sigmoid in it, and rotated heads that are changed once more before they meet."""

    def begin(self) -> None:
        """Choose the function whose first calls make rotated heads."""
        self._turning, self._left = "", list[str]()
        rope = getattr(self.module.config, "rope_parameters", None) or {}
        if hasattr(self.module, "qk_norm"):  # Llama 4: (batch, seq, heads, head_dim)
            self._turning, self._left = "type_as", ["q_rope", "k_rope"]
        elif BETA in rope:  # Ministral 3: (batch, heads, seq, head_dim)
            self._turning, self._left = "add", ["q_rope"]

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call of a function shows."""
        if name == "sigmoid":
            self.keep("attn_gate", self.layer, made[0])
        elif self._left and name.strip("_") == self._turning:
            self.keep(self._left.pop(0), self.layer, made[0] if name == "type_as" else made[0].transpose(0, 1))


class _Mode(TorchFunctionMode):
    """Shows every call to what watches the innermost module."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[Calls] = []
        self._thread = threading.get_ident()  # in which a mode is active; hooks run in all of them

    def begin(self, watch: Callable[[Mapping[str, Any]], Calls], given: Mapping[str, Any]) -> None:
        """Watch the calls inside a module from here on, in the thread of the capture only."""
        if threading.get_ident() == self._thread:
            self._inside.append(watch(given))

    def end(self) -> None:
        if threading.get_ident() == self._thread and self._inside:
            self._inside.pop().done()

    def __torch_function__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._inside:
            self._inside[-1].called(func.__name__, args, made)
        return made


@contextmanager
def watched_calls(
    model: nn.Module,
    kinds: Mapping[str, type[Calls]],
    keep: Keep,
    instead: Callable[[str, int], torch.Tensor | None] = lambda stage, layer: None,
) -> Iterator[None]:
    """Watch modules by their path inside a layer, `self_attn`, in this thread; `instead` is that of `Calls`."""
    mode = _Mode()

    def watch(kind: type[Calls], module: Any, layer: int, given: Mapping[str, Any]) -> Calls:
        calls = kind(module, layer, keep, given)
        calls.instead = instead
        return calls

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            place = re.fullmatch(r"(?:[a-zA-Z_]\w*\.)*layers\.(\d+)\.([\w.]+)", path)
            if place is None or place[2] not in kinds:
                continue

            def begin(
                module: Any, _args: tuple, given: Mapping, layer: int = int(place[1]), kind: type = kinds[place[2]]
            ) -> None:
                mode.begin(lambda given: watch(kind, module, layer, given), given)

            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(lambda *_: mode.end(), always_call=True))
        hooks.enter_context(mode)
        yield


class DeltaNetCalls(Calls):
    """Looks at one delta net."""

    def begin(self) -> None:
        """Watch the modules in a delta net, too."""
        module = self.module
        self._n_tokens = self.given["hidden_states"].shape[1]
        self._repeated = module.num_v_heads // module.num_k_heads
        self._softplus = self._inverse_norm = None  # what these functions made last
        self._left = {"silu": ["conv_out"], "sigmoid": ["beta"], "l2": ["q_l2", "k_l2"]}  # stages not seen yet
        self._hooks = [module.norm.register_forward_pre_hook(lambda _, inputs: self._norm(inputs[0]))]
        if hasattr(module, "in_proj_qkvz"):
            self._hooks += [
                module.in_proj_qkvz.register_forward_hook(lambda _, __, made: self._qkvz(made[0])),
                module.in_proj_ba.register_forward_hook(lambda _, __, made: self._ba(made[0])),
            ]

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call shows; of several calls the first counts, in the order of the formulas."""
        if self._left.get(name):
            shown = made[0, :, -self._n_tokens :].T if name == "silu" else made[0]
            self.keep(self._left[name].pop(0), self.layer, shown)
        elif name == "softplus":
            self._softplus = made
        elif name == "rsqrt":
            self._inverse_norm = made
        elif name in ("mul", "__mul__") and args[1] is self._softplus is not None:
            self.keep("log_decay", self.layer, made[0])
        elif name in ("mul", "__mul__") and args[1] is self._inverse_norm is not None and self._left["l2"]:
            self._normalised(made[0])

    def done(self) -> None:
        """Show what the cache holds now."""
        for hook in self._hooks:
            hook.remove()
        if (cache := self.given.get("cache_params")) is not None:
            states = cache.layers[self.layer]
            self.keep("conv_state", self.layer, states.conv_states[0][0, :, 1 - self.module.conv_kernel_size :].T)
            self.keep("delta_state", self.layer, states.recurrent_states[0][0])

    def _normalised(self, heads: torch.Tensor) -> None:
        """Show one row for each key head, of (v_heads, seq, key_dim)."""
        once = heads[:: self._repeated]
        if self.keep(self._left["l2"].pop(0), self.layer, once.transpose(0, 1)):
            heads.copy_(once.repeat_interleave(self._repeated, dim=0))

    def _norm(self, rows: torch.Tensor) -> None:
        self.keep("delta_out", self.layer, rows.view(self._n_tokens, -1, rows.shape[-1]))

    def _qkvz(self, fused: torch.Tensor) -> None:
        net, values = self.module, self._repeated * self.module.head_v_dim
        query, key, value, z = self._split_by_key_head(fused, [net.head_k_dim, net.head_k_dim, values, values])
        self._joined("qkv_in", [query, key, value])
        self._joined("z_in", [z])

    def _ba(self, fused: torch.Tensor) -> None:
        b, a = self._split_by_key_head(fused, [self._repeated, self._repeated])
        self._joined("b_in", [b])
        self._joined("a_in", [a])

    def _split_by_key_head(self, fused: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Split a fused projection into parts of the given sizes, each (tokens, key heads, size)."""
        return fused.view(self._n_tokens, self.module.num_k_heads, -1).split(sizes, dim=-1)

    def _joined(self, stage: str, parts: Sequence[torch.Tensor]) -> None:
        """Keep parts as one stage; what replaces the stage is written back into the parts."""
        shown = torch.cat([part.flatten(1) for part in parts], dim=-1)
        if self.keep(stage, self.layer, shown):
            widths = [part[0].numel() for part in parts]
            for part, new in zip(parts, shown.split(widths, dim=-1), strict=True):
                part.copy_(new.view(part.shape))


class SharedGate(Calls):
    """The block: the only sigmoid in it is the gate of the shared expert."""

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the gate of the shared expert that a call shows."""
        if name == "sigmoid":
            self.keep("shared_gate", self.layer, made)


class Router(Calls):
    """Logits, probabilities, the choice and its weights."""

    _probs: torch.Tensor
    _chosen = False

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call shows; weights are final in the last call, except for the dtype of the run."""
        if name == "linear":
            self.keep("router_logits", self.layer, made)
        elif name == "softmax":
            self.keep("router_probs", self.layer, made)
            self._probs = made
        elif name == "topk":
            if self.keep("topk_ids", self.layer, made.indices):
                made.values.copy_(self._probs.gather(-1, made.indices))
            self._chosen = True
        elif name == "to" and self._chosen:
            self.keep("topk_weights", self.layer, made)


class Chosen(Calls):
    """The loop over experts."""

    _PARTS = ("expert_gate", "expert_up", "expert_act", "expert_out")

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the products of the chosen experts that a call shows."""
        if name == "one_hot":
            self._shape, self._stages, self._theirs = args[0].shape, dict[str, torch.Tensor](), dict[str, Any]()
        elif name == "where":
            self._at, self._is_first = (made[1], made[0]), True  # token, place among its experts
        elif name == "linear" and self._is_first:
            gate, up = made.chunk(2, dim=-1)
            self._part("expert_gate", gate)
            self._part("expert_up", up)
            self._is_first = False
        elif name == "linear":
            if self._part("expert_act", args[0]):
                made.copy_(torch.nn.functional.linear(*args))
            self._part("expert_out", made)

    def done(self) -> None:
        """Show the stages of all experts, put together."""
        for stage in self._PARTS:
            self.keep(stage, self.layer, self._stages[stage])

    def _part(self, stage: str, rows: torch.Tensor) -> bool:
        """Note the rows of one expert; whether the engine goes on with others."""
        if stage not in self._stages:
            self._stages[stage] = rows.new_empty(*self._shape, rows.shape[-1])
            self._theirs[stage] = self.instead(stage, self.layer)
        self._stages[stage][self._at] = rows
        if (theirs := self._theirs[stage]) is None:
            return False
        rows.copy_(theirs[self._at])
        return True


class Llama4Calls(Calls):
    """The feed-forward part of Llama 4: every expert is given all tokens, times nothing where it was not chosen."""

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call shows; a dense layer has no router."""
        if not hasattr(self.module, "router"):
            return
        if name == "linear" and not hasattr(self, "_logits"):
            self._logits = made
            self.keep("router_logits", self.layer, made)
        elif name == "topk":
            if self.keep("topk_ids", self.layer, made.indices):
                made.values.copy_(self._logits.gather(-1, made.indices))
            self._ids = made.indices
        elif name == "sigmoid":
            weights = made.gather(-1, self._ids)
            if self.keep("topk_weights", self.layer, weights):
                made.scatter_(-1, self._ids, weights)
        elif name == "bmm":
            self._product(args, made)

    def _product(self, args: tuple, made: torch.Tensor) -> None:
        """Show a product over all experts: the first makes gate and up, the second makes the experts' outputs."""
        is_first = not hasattr(self, "_is_second")
        self._is_second = True
        if self._chosen("expert_in" if is_first else "expert_act", args[0]):
            torch.bmm(*args, out=made)
        if not is_first:
            self._chosen("expert_out", made)
            return
        for stage, part in zip(("expert_gate", "expert_up"), made.chunk(2, dim=-1), strict=True):
            self._chosen(stage, part)

    def _chosen(self, stage: str, of_all: torch.Tensor) -> bool:
        """Show what experts have of the tokens that chose them, of (experts, tokens, width)."""
        tokens = torch.arange(len(self._ids), device=of_all.device)[:, None]
        rows = of_all[self._ids, tokens]  # (tokens, chosen, width)
        if wrote := self.keep(stage, self.layer, rows):
            of_all[self._ids, tokens] = rows
        return wrote


EXPERTS: dict[str, type[Calls]] = {
    "mlp": SharedGate, "mlp.gate": Router, "mlp.experts": Chosen, "feed_forward": Llama4Calls,
}  # fmt: skip
