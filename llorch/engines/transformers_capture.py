"""Hooks that record every stage (named intermediate array) of an unmodified transformers model with eager attention.

Most stages are inputs or outputs of modules. Rotated queries, keys and the cache are arguments of the attention
function, which transformers looks up in its registry. llorch registers a function under the name "eager" that calls the
family's function and, in an observed run, records its arguments first. The scores exist only inside that function, as
the input of its softmax; a torch function mode intercepts this call.

In an *isolated* run, every stage is recorded and then overwritten in place by a golden (stored stage of another run).
So each stage is computed from golden inputs, and errors do not add up.

A float64 reference needs more than `model.double()`: norms, RoPE, softmax and loss of transformers cast to float32
explicitly. Every such cast is an operator call that the dispatch mode `Float64Everywhere` intercepts below autograd; it
replaces each float dtype by float64. It raises an error if an operator still returns a narrower dtype.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llorch.engines.capture.calls import observe_calls
from llorch.engines.capture.capture import (
    CALLS,
    CONTEXT,
    NEW_KEYS,
    QUERY,
    hook_points,
    stage_at,
    with_infinite_mask,
    without_batch,
)
from llorch.families.config import ModelConfig
from llorch.stages.table import ATTENTION, key

_RECORDER: ContextVar["HookRecorder | None"] = ContextVar(
    "recorder", default=None
)  # recorder of the pass that this thread computes; passes of a streamed model run in several threads
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class HookRecorder:
    """Recorder of stages, which replaces them by goldens if there are any."""

    def __init__(
        self, config: ModelConfig, golden: Mapping[str, np.ndarray], note: Callable[[str, np.ndarray], Any]
    ) -> None:
        """Prepare a recorder; `stages` gets `note(key, array)` of each stage, before its golden replaces the array."""
        self.stages: dict[str, Any] = {}
        self.config, self.golden, self._note = config, golden, note

    def keep(self, stage: str, tensor: torch.Tensor) -> bool:
        """Record a stage; overwrite the engine's tensor by the golden, if there is one, and return True."""
        if _RECORDER.get() is not self:
            return False  # another thread computes this pass
        if stage in self.stages:
            raise RuntimeError(f"transformers: expected stage {stage} once in a run, got it twice")
        self.stages[stage] = self._note(stage, as_array(tensor))
        if stage in self.golden:
            tensor.copy_(torch.from_numpy(self.golden[stage].astype(as_array(tensor).dtype)))
        return stage in self.golden

    def replacement_for(self, stage: str, layer: int) -> torch.Tensor | None:
        """Return the golden that replaces a stage computed in parts (expert by expert); None to keep the stage."""
        golden_stage = self.golden.get(key(stage, layer)) if _RECORDER.get() is self else None
        return None if golden_stage is None else torch.from_numpy(golden_stage.astype(np.float64))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to a contiguous array, if possible a view; dtypes except float64 and int64 become float32."""
    is_unchanged = tensor.dtype in (torch.float64, torch.int64)
    converted = tensor.detach() if is_unchanged else tensor.detach().float()
    return converted.contiguous().numpy()


@contextmanager
def captured(
    model: nn.Module,
    config: ModelConfig,
    golden: Mapping[str, np.ndarray] | None = None,
    note: Callable[[str, np.ndarray], Any] = lambda stage, array: array.copy(),
) -> Iterator[dict[str, Any]]:
    """Record the runs of a model inside the `with` block; yield a dictionary of stages, converted by `note`.

    With `golden` the run is isolated. `l0.attention` then also records the output of the attention function for golden
    queries, keys and values only.
    """
    recorder = HookRecorder(config, golden or {}, note)
    with ExitStack() as hooks:
        keep = lambda stage, i, tensor: recorder.keep(key(stage, i), tensor)  # noqa: E731
        for point in hook_points(model, config):
            hooks.enter_context(point.hook(lambda stage, i, tensor: keep(stage, i, without_batch(stage, tensor))))
        hooks.enter_context(observe_calls(model, CALLS, keep, recorder.replacement_for))
        token = _RECORDER.set(recorder)
        hooks.callback(_RECORDER.reset, token)
        yield recorder.stages


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run transformers' eager attention and record its stages; with goldens, first run it without replacing scores."""
    eager: Attention = sys.modules[type(module).__module__].eager_attention_forward
    recorder = _RECORDER.get()
    if recorder is None:
        return eager(module, query, key, value, attention_mask, **settings)
    stage = f"l{module.layer_idx}.".__add__
    for hook, heads in ((QUERY, query[0]), (NEW_KEYS, key[0])):
        if stage_name := stage_at(hook, recorder.config, module.layer_idx):
            recorder.keep(stage(stage_name), heads.transpose(0, 1))  # (seq, heads, head_dim)
    recorder.keep(stage("k_cache"), key[0])
    recorder.keep(stage("v_cache"), value[0])
    if recorder.golden:
        attention_output, _ = eager(module, query, key, value, attention_mask, **settings)
        recorder.keep(stage(ATTENTION), attention_output[0].flatten(1))
    with _SoftmaxHook(recorder, stage, attention_mask):
        output, probs = eager(module, query, key, value, attention_mask, **settings)
    if stage("attn_probs") not in recorder.golden:
        recorder.keep(stage("attn_probs"), probs[0])
    if stage_at(CONTEXT, recorder.config, module.layer_idx) != "attn_context":
        recorder.keep(stage("attn_context"), output[0].flatten(1))
    return output, probs


ALL_ATTENTION_FUNCTIONS["eager"] = _attention


class _SoftmaxHook(TorchFunctionMode):
    """Torch function mode that records the input of a softmax, and its output if a golden replaces it."""

    def __init__(self, recorder: HookRecorder, stage: Callable[[str], str], mask: torch.Tensor | None) -> None:
        super().__init__()
        self._recorder, self._stage, self._mask = recorder, stage, mask

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is not nn.functional.softmax:
            return func(*args, **(kwargs or {}))
        scores = with_infinite_mask(args[0], self._mask).clone()
        self._recorder.keep(self._stage("attn_scores"), scores[0])
        is_replaced = self._stage("attn_scores") in self._recorder.golden
        probs = func(scores if is_replaced else args[0], *args[1:], **(kwargs or {}))
        if self._stage("attn_probs") in self._recorder.golden:
            self._recorder.keep(self._stage("attn_probs"), probs[0])
        return probs


NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Float64Everywhere(TorchDispatchMode):
    """Dispatch mode that replaces every float dtype in operator calls by float64."""

    def __init__(self, *, refuse: bool) -> None:
        """Prepare the mode; with `refuse`, narrower results raise RuntimeError. Loading files needs it off."""
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator in float64."""
        kwargs = {name: _widen(argument) for name, argument in (kwargs or {}).items()}
        output = func(*map(_widen, args), **kwargs)
        if func is torch.ops.aten.lift_fresh.default and output.dtype in NARROW:
            return output.double()  # a tensor created from Python or NumPy data
        tensors = (part for part in tree_leaves(output) if isinstance(part, torch.Tensor))
        if self._refuse and any(tensor.dtype in NARROW for tensor in tensors):
            raise RuntimeError(f"float64 reference: {func} computed below float64, so this run is no reference")
        return output


@contextmanager
def float64_everywhere(*, refuse: bool = True) -> Iterator[None]:
    """Compute everything inside the `with` block in float64; models must be created inside, too."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Everywhere(refuse=refuse):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def _widen(value: object) -> object:
    """Return float64 for a narrower torch dtype, and any other value unchanged."""
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
