"""Capture: every stage that hooks on an unmodified torch model show.

    with llorch.capture(model) as dump:         a model of transformers, or one whose modules are called as there
        model(ids)                              one call is one pass; further ones go on in its cache
    dump.save("my-dump")                        for `llorch diagnose`; or stay here with dump.stage_dump(weights)

    llorch.capture(model, {"blocks.{i}.attn.wq": "q_proj", "input of blocks.{i}.attn.wo": "attn_context"})

Some stages are neither input nor output of a module. transformers hands them to its attention function: rotated
queries, keys and values of the whole context; in eager attention the scores are the input of its softmax. Or a module
calls a function that makes it, see `calls`. Elsewhere, name modules that end there, or use `llorch.Recorder` in the
code.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from llorch.engines.capture.calls import EXPERTS, AttentionCalls, Calls, DeltaNetCalls, watched_calls
from llorch.engines.dumps.raw import digest
from llorch.engines.dumps.recorder import Recorder
from llorch.families.config import ModelConfig
from llorch.families.read_huggingface import config_from_huggingface
from llorch.runtime.errors import FormatError, UserError
from llorch.stages.table import BY_NAME, STAGES

QUERY = "query given to the attention function of layer {i}"
NEW_KEYS = "newest keys given to the attention function of layer {i}"
CONTEXT = "input of layers.{i}.self_attn.o_proj"  # gated, where attention is
# What the stage table says is hooked, `output of layers.{i}.mlp.up_proj`, to the stages that it may show, in order.
HUGGINGFACE = {
    stage.transformers.replace("model.", ""): [one for one in STAGES if one.transformers == stage.transformers]
    for stage in STAGES
    if re.match("(output|input) of ", stage.transformers) or stage.transformers in (QUERY, NEW_KEYS)
}
CALLS: Mapping[str, type[Calls]] = {  # by the path in a layer
    "self_attn": AttentionCalls, "linear_attn": DeltaNetCalls, **EXPERTS,
}  # fmt: skip
_WITHOUT_CONFIG = {"attention", "rope", "dense", "qk_norm"}  # what layers of Llama, Qwen2 and Qwen3 have
_POSITIONS = ("position_ids", "cache_position", "positions", "start_pos", "first_position")  # arguments of models
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def capture(
    model: nn.Module, names: Mapping[str, str] | None = None, *, weights: bool = True, **features: str | bool
) -> Iterator[Recorder]:
    """Record the runs of a model inside the `with` block, of one sequence; each has the cache whole, so a few do.

    Args:
        model: In eager mode; a module that torch.compile made shows nothing.
        names: The arrays to watch, `output of PATH`, which `PATH` alone means, too, or `input of PATH`; `{i}` stands
            for the layer. To the name of a stage, or one that a mapping explains later. Names of Hugging Face if None.
        weights: Note SHA-256 of every parameter, by which a diagnosis knows other weights.
        features: Other facts about the engine: attributes of `Features`.

    Yields:
        The recorder; what it recorded stays when the block ends.

    Raises:
        ValueError: The model is compiled, or no module has such a name. In the block: a batch, padding, positions
            with gaps, or no token ids among the arguments.
    """
    config = config_of(model)
    points = _require_points(model, config, names)
    watch = _Watch(Recorder(source=type(model).__name__, **_features(model) | features), config)
    if weights:
        hashes = {name: digest(_on_cpu(tensor)[0].float().numpy()) for name, tensor in model.state_dict().items()}
        watch.recorder.weights = hashes
    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(watch.begin, with_kwargs=True))
        for point in points:
            hooks.enter_context(point.hook(watch.keep))
        if names is None:
            hooks.enter_context(_watched_attention(model, watch))
            hooks.enter_context(watched_calls(model, CALLS, watch.keep))
        yield watch.recorder


def _require_points(model: nn.Module, config: ModelConfig | None, names: Mapping[str, str] | None) -> list["HookPoint"]:
    """Find the places to watch; refuse a compiled model, which calls no hooks, and names that no module has."""
    kind = type(model).__name__
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        raise UserError(
            f"capture: expected a model in eager mode, got {kind} from torch.compile, which calls no hooks; "
            "capture the model before torch.compile, or `model._orig_mod`"
        )
    points = list(hook_points(model, config, names))
    missing = (names or HUGGINGFACE).keys() - {point.name for point in points}
    if not points or (names and missing):
        raise UserError(
            f"capture: expected modules of {kind} called {', '.join(sorted(missing))}, got none; "
            "call capture(model, {name: stage}) with names of model.named_modules()"
        )
    return points


@dataclass(frozen=True)
class HookPoint:
    """An end of a module that shows a stage."""

    module: nn.Module
    end: str  # input or output
    stage: str
    layer: int | None
    name: str  # the pattern that it fits

    def hook(self, keep: Callable[[str, int | None, torch.Tensor], Any]) -> Any:
        """Have `keep` called with what is seen here; removed by the handle that is returned."""

        def see(shown: object) -> None:
            tensor = shown[0] if isinstance(shown, tuple) else shown
            if not isinstance(tensor, torch.Tensor):
                what = f"{self.end} of {type(self.module).__name__}, got {type(tensor).__name__}"
                raise UserError(f"capture: expected a tensor as {what}; name a module inside it")
            keep(self.stage, self.layer, tensor)

        if self.end == "input":
            return self.module.register_forward_pre_hook(
                lambda _, args, kwargs: see((*args, *kwargs.values())), with_kwargs=True
            )
        return self.module.register_forward_hook(lambda _, __, made: see(made))


def shown_at(hook: str, config: ModelConfig | None, layer: int | None) -> str | None:
    """Return the stage that a hook shows: the last of its stages that the layer has; None where it has none."""
    for stage in reversed(HUGGINGFACE[hook]):
        if stage.applies_to(config, layer) if config else _WITHOUT_CONFIG.issuperset(stage.needs):
            return stage.name
    return None


def hook_points(
    model: nn.Module, config: ModelConfig | None, names: Mapping[str, str] | None = None
) -> Iterator[HookPoint]:
    """Yield every module whose path ends as a name says; outside the layers a path has no number."""
    patterns = []
    for name in names or HUGGINGFACE:
        end, path = re.fullmatch(r"(?:(output|input) of )?(.*)", name).groups()  # type: ignore[union-attr] (all fit)
        pattern = re.escape(path).replace(r"\{i\}", r"(\d+)").replace(r"\.mlp", r"\.(?:mlp|feed_forward)")  # Llama 4
        patterns.append((re.compile(rf"(?:[a-zA-Z_]\w*\.)*{pattern}"), end or "output", name))
    for path, module in model.named_modules():
        for pattern, end, name in patterns:
            if fits := pattern.fullmatch(path):
                layer = int(fits[1]) if fits.groups() else None
                if stage := names[name] if names else shown_at(name, config, layer):
                    yield HookPoint(module, end, stage, layer, name)


def config_of(model: nn.Module) -> ModelConfig | None:
    """Read the transformers configuration of a model; None for other models, and for families that llorch lacks."""
    theirs: Any = getattr(model, "config", None)
    if not hasattr(theirs, "to_dict"):
        return None
    try:
        return config_from_huggingface(theirs.to_dict(), path=type(model).__name__)
    except FormatError:
        return None


class _Watch:
    """The hooks of one capture."""

    def __init__(self, recorder: Recorder, config: ModelConfig | None) -> None:
        self.recorder, self._config = recorder, config

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = signature(model.forward)
        given = dict.fromkeys(arguments.parameters) | arguments.bind_partial(*args, **kwargs).arguments | kwargs
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        ids = next((one for one in tensors if one.dim() in (1, 2) and one.dtype in (torch.int64, torch.int32)), None)
        if ids is None:
            raise UserError(f"capture: expected token ids among the arguments, got none in {', '.join(given)}")
        if ids.dim() == 2 and len(ids) != 1:
            what = f"expected one sequence, got a batch of {len(ids)}"
            raise UserError(f"capture: {what}; capture one sequence at a time")
        mask = given.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise UserError("capture: expected no padding, got an attention_mask with zeros; remove the padding")
        self.recorder.begin(ids.flatten().tolist(), _first_position(given))

    def keep(self, stage: str, layer: int | None, tensor: torch.Tensor) -> bool:
        """Record a stage; the run goes on as it would."""
        tensor = without_batch(stage, tensor)
        n_tokens = len(self.recorder.passes[-1].ids) if self.recorder.passes else 0
        is_last_rows = stage == "logits" and len(tensor) < n_tokens  # as transformers' logits_to_keep has it
        tokens = range(n_tokens - len(tensor), n_tokens) if is_last_rows else None
        on_cpu, stored = _on_cpu(tensor)
        bits = on_cpu.view(torch.uint16) if stored == "bfloat16" else on_cpu
        self.recorder.add(stage, bits.numpy(), layer=layer, tokens=tokens, stored=stored)
        return False

    def attend(
        self, theirs: Attention, is_eager: bool, module: Any, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, mask: torch.Tensor | None, **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Show what attention is given, and in eager mode what it makes of that on the way."""
        layer, tokens = module.layer_idx, self.recorder.passes[-1]
        n_tokens, n_context = query.shape[2], min(key.shape[2], tokens.first_position + query.shape[2])
        keys, values = key[0, :, :n_context], value[0, :, :n_context]  # a cache may have room for more
        for hook, heads in ((QUERY, query[0]), (NEW_KEYS, keys[:, n_context - n_tokens :])):
            if stage := shown_at(hook, self._config, layer):
                self.keep(stage, layer, heads.transpose(0, 1))  # (seq, heads, head_dim)
        self.keep("k_cache", layer, keys)
        self.keep("v_cache", layer, values)
        if not is_eager:
            return self._context(layer, *theirs(module, query, key, value, mask, **settings))

        def note(scores: torch.Tensor) -> None:
            self.keep("attn_scores", layer, with_infinite_mask(scores, mask)[0, ..., :n_context])

        with _Softmax(note):
            output, probs = theirs(module, query, key, value, mask, **settings)
        self.keep("attn_probs", layer, probs[0, ..., :n_context])
        return self._context(layer, output, probs)

    def _context(self, layer: int, output: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the output of attention as the context, unless another hook shows that stage."""
        if shown_at(CONTEXT, self._config, layer) != "attn_context":
            self.keep("attn_context", layer, output[0].flatten(1))
        return output, probs


class _Softmax(TorchFunctionMode):
    """Notes what goes into a softmax that is called while it is active."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is nn.functional.softmax:
            self._note(args[0])
        return func(*args, **(kwargs or {}))


def without_batch(stage: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the only sequence of a batch; arrays of experts have rows and no batch, and are unchanged."""
    axes = BY_NAME[stage].axes.split() if stage in BY_NAME else []
    return tensor[0] if tensor.dim() == len(axes) + 1 and len(tensor) == 1 else tensor


def with_infinite_mask(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Write the -inf that transformers' mask means: it adds the lowest finite float instead."""
    if mask is None:
        return scores
    return scores.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


@contextmanager
def _watched_attention(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Put a function that watches this model into transformers' registry, which others may use meanwhile."""
    watched = {module for module in model.modules() if hasattr(module, "layer_idx")}
    if not (kind := _attention_kind(model)):
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

    before = REGISTRY.get(kind)

    def attention(module: Any, *args: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        theirs: Attention = before or sys.modules[type(module).__module__].eager_attention_forward
        if module not in watched:
            return theirs(module, *args, **settings)
        return watch.attend(theirs, kind == "eager", module, *args, **settings)

    REGISTRY[kind] = attention
    try:
        yield
    finally:
        del REGISTRY[kind]
        if REGISTRY.get(kind) is not before:
            REGISTRY[kind] = before


def _first_position(given: Mapping[str, Any]) -> int | None:
    """Return the first position from the arguments, else the number of cached tokens; None if neither tells."""
    positions = next((given[name] for name in _POSITIONS if given.get(name) is not None), None)
    if isinstance(positions, torch.Tensor):
        row = positions.flatten().tolist()
        if row != list(range(row[0], row[0] + len(row))):
            raise UserError(f"capture: expected consecutive positions of one sequence, got {row[:8]}")
        return row[0]
    if positions is not None:
        return int(positions)
    if "past_key_values" not in given:
        return None
    return 0 if given["past_key_values"] is None else given["past_key_values"].get_seq_length()


def _features(model: nn.Module) -> dict[str, str | bool]:
    dtype = next((str(one.dtype).removeprefix("torch.") for one in model.parameters() if one.is_floating_point()), "")
    if not (kind := _attention_kind(model)):
        return {"engine": "torch", "dtype": dtype}
    return {"engine": "transformers", "dtype": dtype, "kv_cache": dtype, "flash_attention": kind != "eager"}


def _attention_kind(model: nn.Module) -> str:
    """Name in transformers' registry of attention functions; empty for models of others."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _on_cpu(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a tensor on the CPU, in one piece of memory, and the name of its dtype."""
    return tensor.detach().cpu().contiguous(), str(tensor.dtype).removeprefix("torch.")
