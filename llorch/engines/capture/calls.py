"""Stages that are neither input nor output of a module: made by a function that a module calls.

A torch function mode sees the calls; hooks say inside which module they happen. One class shows the stages of one kind
of module, begun anew whenever such a module runs: `AttentionCalls` below, `calls_delta_net`.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
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

    def called(self, name: str, args: tuple, made: Any) -> None:
        """See a call of a function: what it was given, and what it made."""

    def done(self) -> None:
        """End: the module was left."""


class AttentionCalls(Calls):
    """Attention: its gate, by the only sigmoid in it, and rotated heads that are changed once more before they meet."""

    def __init__(self, module: Any, layer: int, keep: Keep, given: Mapping[str, Any]) -> None:
        """Begin to watch the functions that one attention module calls."""
        super().__init__(module, layer, keep, given)
        self._turning, self._left = "", list[str]()  # a function whose first calls make rotated heads
        rope = getattr(module.config, "rope_parameters", None) or {}
        if hasattr(module, "qk_norm"):  # Llama 4: (batch, seq, heads, head_dim)
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
