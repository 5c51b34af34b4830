"""Hooks that read every stage out of an unmodified transformers model with eager attention.

Most stages are inputs or outputs of modules. Rotated queries and keys and the cache are arguments of the
attention function, which transformers looks up in its registry: we register, under the name "eager", a function that
calls the family's own and, in a run that is watched, notes its arguments first. The scores exist only inside that
function, as the input of its softmax; a torch function mode sees that call.

*Isolated*, every stage is recorded and then overwritten with the golden's, so that the next one is made of the golden.

Float64 references need more than `model.double()`: norms, RoPE, the softmax and the loss of transformers go through
float32 by name. Every such cast is an operator call that the dispatch mode `Float64Everywhere` sees, below autograd;
each float dtype that is asked for becomes float64. A run in which any operator still makes a narrower number is
refused.
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

from llorch.engines.capture.calls import watched_calls
from llorch.engines.capture.capture import (
    CALLS,
    CONTEXT,
    NEW_KEYS,
    QUERY,
    hook_points,
    shown_at,
    with_infinite_mask,
    without_batch,
)
from llorch.families.config import ModelConfig
from llorch.stages.table import ATTENTION, key

_RECORDER: ContextVar["HookRecorder | None"] = ContextVar(
    "recorder", default=None
)  # of the pass that this thread computes
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class HookRecorder:
    """Notes stages, and says what the run goes on with."""

    def __init__(
        self, config: ModelConfig, golden: Mapping[str, np.ndarray], note: Callable[[str, np.ndarray], Any]
    ) -> None:
        """Prepare; `golden` takes the place of each stage that it has, once `note` made something of that."""
        self.stages: dict[str, Any] = {}
        self.config, self.golden, self._note = config, golden, note

    def keep(self, stage: str, tensor: torch.Tensor) -> bool:
        """Note a stage; where there is a golden, write that into the very tensor that the engine goes on with."""
        if _RECORDER.get() is not self:
            return False  # a pass that another thread computes meanwhile
        if stage in self.stages:
            raise RuntimeError(f"transformers: expected stage {stage} once in a run, got it twice")
        self.stages[stage] = self._note(stage, as_array(tensor))
        if stage in self.golden:
            tensor.copy_(torch.from_numpy(self.golden[stage].astype(as_array(tensor).dtype)))
        return stage in self.golden

    def instead(self, stage: str, layer: int) -> torch.Tensor | None:
        """Return the golden that replaces a stage computed in parts; None if the engine's result stays."""
        theirs = self.golden.get(key(stage, layer)) if _RECORDER.get() is self else None
        return None if theirs is None else torch.from_numpy(theirs.astype(np.float64))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to a contiguous array, if possible a view; all types but float64 and int64 become float32."""
    as_it_is = tensor.dtype in (torch.float64, torch.int64)
    wide = tensor.detach() if as_it_is else tensor.detach().float()
    return wide.contiguous().numpy()


@contextmanager
def captured(
    model: nn.Module,
    config: ModelConfig,
    golden: Mapping[str, np.ndarray] | None = None,
    note: Callable[[str, np.ndarray], Any] = lambda stage, array: array.copy(),
) -> Iterator[dict[str, Any]]:
    """Watch the runs of a model with eager attention inside the `with` block: stage to what `note` makes of its array.

    With `golden`, as for `HookRecorder`, the run is that of no prompt; noted is then, as `l0.attention`, what attention
    as a whole makes of its inputs, too.
    """
    recorder = HookRecorder(config, golden or {}, note)
    with ExitStack() as hooks:
        keep = lambda stage, i, tensor: recorder.keep(key(stage, i), tensor)  # noqa: E731
        for point in hook_points(model, config):
            hooks.enter_context(point.hook(lambda stage, i, tensor: keep(stage, i, without_batch(stage, tensor))))
        hooks.enter_context(watched_calls(model, CALLS, keep, recorder.instead))
        before = _RECORDER.set(recorder)
        hooks.callback(_RECORDER.reset, before)
        yield recorder.stages


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run transformers' eager attention and record its stages."""
    eager: Attention = sys.modules[type(module).__module__].eager_attention_forward
    recorder = _RECORDER.get()
    if recorder is None:
        return eager(module, query, key, value, attention_mask, **settings)
    stage = f"l{module.layer_idx}.".__add__
    for hook, heads in ((QUERY, query[0]), (NEW_KEYS, key[0])):
        if shown := shown_at(hook, recorder.config, module.layer_idx):
            recorder.keep(stage(shown), heads.transpose(0, 1))  # (seq, heads, head_dim)
    recorder.keep(stage("k_cache"), key[0])
    recorder.keep(stage("v_cache"), value[0])
    if recorder.golden:
        as_one, _ = eager(module, query, key, value, attention_mask, **settings)
        recorder.keep(stage(ATTENTION), as_one[0].flatten(1))
    with _SoftmaxHook(recorder, stage, attention_mask):
        output, probs = eager(module, query, key, value, attention_mask, **settings)
    if stage("attn_probs") not in recorder.golden:
        recorder.keep(stage("attn_probs"), probs[0])
    if shown_at(CONTEXT, recorder.config, module.layer_idx) != "attn_context":
        recorder.keep(stage("attn_context"), output[0].flatten(1))
    return output, probs


ALL_ATTENTION_FUNCTIONS["eager"] = _attention


class _SoftmaxHook(TorchFunctionMode):
    """Notes what goes into the softmax called while it is active; and what comes out, where that is replaced."""

    def __init__(self, recorder: HookRecorder, stage: Callable[[str], str], mask: torch.Tensor | None) -> None:
        super().__init__()
        self._recorder, self._stage, self._mask = recorder, stage, mask

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is not nn.functional.softmax:
            return func(*args, **(kwargs or {}))
        scores = with_infinite_mask(args[0], self._mask).clone()
        self._recorder.keep(self._stage("attn_scores"), scores[0])
        replaced = self._stage("attn_scores") in self._recorder.golden
        probs = func(scores if replaced else args[0], *args[1:], **(kwargs or {}))
        if self._stage("attn_probs") in self._recorder.golden:
            self._recorder.keep(self._stage("attn_probs"), probs[0])
        return probs


NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Float64Everywhere(TorchDispatchMode):
    """Turns every float dtype that an operator is asked for into float64."""

    def __init__(self, *, refuse: bool) -> None:
        """Prepare; while files are read there are narrower results, which `refuse` refuses."""
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, as wide as it goes."""
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        made = func(*map(_widened, args), **kwargs)
        if func is torch.ops.aten.lift_fresh.default and made.dtype in NARROW:
            return made.double()  # numbers of NumPy, on their way in
        tensors = (value for value in tree_leaves(made) if isinstance(value, torch.Tensor))
        if self._refuse and any(tensor.dtype in NARROW for tensor in tensors):
            raise RuntimeError(f"float64 reference: {func} computed below float64, so this run is no reference")
        return made


@contextmanager
def float64_everywhere(*, refuse: bool = True) -> Iterator[None]:
    """Compute in float64 whatever the code inside asks for; models must be made inside too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Everywhere(refuse=refuse):
            yield
    finally:
        torch.set_default_dtype(before)


def _widened(value: object) -> object:
    """Return float64 for a narrower torch dtype, any other value as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
