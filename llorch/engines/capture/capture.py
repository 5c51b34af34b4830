"""Capture every stage (named intermediate array, see `stages.table`) of an unmodified torch model with hooks.

    with llorch.capture(model) as dump:         a transformers model, or a model with equal module names
        model(ids)                              each call is one pass; further calls continue with its cache
    dump.save("my-dump")                        for `llorch diagnose`; or use dump.stage_dump(weights)

    llorch.capture(model, {"blocks.{i}.attn.wq": "q_proj", "input of blocks.{i}.attn.wo": "attn_context"})

Some stages are neither input nor output of a module. transformers passes rotated queries, keys and values of the whole
context to its attention function; in eager attention, the scores are the input of its softmax. Other stages are results
of functions that a module calls, see `calls`. For other models, name modules whose output is the stage, or use
`llorch.Recorder` in the code.
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

from llorch.engines.capture.calls import EXPERTS, AttentionCalls, Calls, DeltaNetCalls, observe_calls
from llorch.engines.dumps.raw import digest
from llorch.engines.dumps.recorder import Recorder
from llorch.families.config import ModelConfig
from llorch.families.read_huggingface import config_from_huggingface
from llorch.runtime.errors import FormatError, UserError
from llorch.stages.table import BY_NAME, STAGES

QUERY = "query given to the attention function of layer {i}"
NEW_KEYS = "newest keys given to the attention function of layer {i}"
CONTEXT = "input of layers.{i}.self_attn.o_proj"  # after the gate, in gated attention
# Hook in the stage table, like `output of layers.{i}.mlp.up_proj` -> possible stages, in table order.
HUGGINGFACE = {
    stage.transformers.replace("model.", ""): [same for same in STAGES if same.transformers == stage.transformers]
    for stage in STAGES
    if re.match("(output|input) of ", stage.transformers) or stage.transformers in (QUERY, NEW_KEYS)
}
CALLS: Mapping[str, type[Calls]] = {  # path in a layer -> observer
    "self_attn": AttentionCalls, "linear_attn": DeltaNetCalls, **EXPERTS,
}  # fmt: skip
_WITHOUT_CONFIG = {"attention", "rope", "dense", "qk_norm"}  # assumed traits: those of Llama, Qwen2 and Qwen3
_POSITIONS = ("position_ids", "cache_position", "positions", "start_pos", "first_position")  # arguments of models
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def capture(
    model: nn.Module, names: Mapping[str, str] | None = None, *, weights: bool = True, **features: str | bool
) -> Iterator[Recorder]:
    """Record the runs of a model on one sequence inside the `with` block; each pass records the whole cache.

    Args:
        model: Model in eager mode; a module compiled by torch.compile calls no hooks.
        names: Hook to stage name, or to a name that a mapping file explains later. A hook is `PATH` or `output of
            PATH`, or `input of PATH`; `{i}` stands for the layer. None: Hugging Face's names, and attention's stages.
        weights: Record SHA-256 of every parameter, so that a diagnosis can detect different weights.
        features: Declared arithmetic of the engine: attributes of `Features`.

    Yields:
        The recorder, which keeps its arrays after the block.

    Raises:
        UserError: The model is compiled, or no module has such a name. In the block: a batch, padding, positions with
            gaps, or no token ids among the arguments.
    """
    config = config_of(model)
    points = _require_points(model, config, names)
    watch = _Watch(Recorder(source=type(model).__name__, **_detect_features(model) | features), config)
    if weights:
        hashes = {name: digest(_on_cpu(tensor)[0].float().numpy()) for name, tensor in model.state_dict().items()}
        watch.recorder.weights = hashes
    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(watch.begin, with_kwargs=True))
        for point in points:
            hooks.enter_context(point.hook(watch.keep))
        if names is None:
            hooks.enter_context(_record_attention(model, watch))
            hooks.enter_context(observe_calls(model, CALLS, watch.keep))
        yield watch.recorder


def _require_points(model: nn.Module, config: ModelConfig | None, names: Mapping[str, str] | None) -> list["HookPoint"]:
    """Return the hook points; raise UserError for a compiled model, which calls no hooks, and for unknown names."""
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
    """Input or output of a module that is a stage."""

    module: nn.Module
    end: str  # input or output
    stage: str
    layer: int | None
    name: str  # pattern that matches the module's path

    def hook(self, keep: Callable[[str, int | None, torch.Tensor], Any]) -> Any:
        """Register a hook that calls `keep` with the tensor; return the handle that removes it."""

        def record(output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, torch.Tensor):
                expected = f"{self.end} of {type(self.module).__name__}, got {type(tensor).__name__}"
                raise UserError(f"capture: expected a tensor as {expected}; name a module inside it")
            keep(self.stage, self.layer, tensor)

        if self.end == "input":
            return self.module.register_forward_pre_hook(
                lambda _, args, kwargs: record((*args, *kwargs.values())), with_kwargs=True
            )
        return self.module.register_forward_hook(lambda _, __, output: record(output))


def stage_at(hook: str, config: ModelConfig | None, layer: int | None) -> str | None:
    """Return the stage of a hook: the last of its possible stages that the layer has (later ones are more special)."""
    for stage in reversed(HUGGINGFACE[hook]):
        if stage.applies_to(config, layer) if config else _WITHOUT_CONFIG.issuperset(stage.needs):
            return stage.name
    return None


def hook_points(
    model: nn.Module, config: ModelConfig | None, names: Mapping[str, str] | None = None
) -> Iterator[HookPoint]:
    """Yield a hook point for every module whose path ends like a pattern in `names`."""
    patterns = []
    for name in names or HUGGINGFACE:
        end, path = re.fullmatch(r"(?:(output|input) of )?(.*)", name).groups()  # type: ignore[union-attr] (all fit)
        pattern = re.escape(path).replace(r"\{i\}", r"(\d+)").replace(r"\.mlp", r"\.(?:mlp|feed_forward)")  # Llama 4
        patterns.append((re.compile(rf"(?:[a-zA-Z_]\w*\.)*{pattern}"), end or "output", name))
    for path, module in model.named_modules():
        for pattern, end, name in patterns:
            if match := pattern.fullmatch(path):
                layer = int(match[1]) if match.groups() else None
                if stage := names[name] if names else stage_at(name, config, layer):
                    yield HookPoint(module, end, stage, layer, name)


def config_of(model: nn.Module) -> ModelConfig | None:
    """Read the transformers configuration of a model; None for other models and unsupported families."""
    hf_config: Any = getattr(model, "config", None)
    if not hasattr(hf_config, "to_dict"):
        return None
    try:
        return config_from_huggingface(hf_config.to_dict(), path=type(model).__name__)
    except FormatError:
        return None


class _Watch:
    """Hook functions of one capture, which write to its recorder."""

    def __init__(self, recorder: Recorder, config: ModelConfig | None) -> None:
        self.recorder, self._config = recorder, config

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Start a pass at a call of the model: its ids are the first integer tensor of 1 or 2 axes; check them."""
        arguments = signature(model.forward)
        bound = dict.fromkeys(arguments.parameters) | arguments.bind_partial(*args, **kwargs).arguments | kwargs
        tensors = [argument for argument in bound.values() if isinstance(argument, torch.Tensor)]
        ids = next((t for t in tensors if t.dim() in (1, 2) and t.dtype in (torch.int64, torch.int32)), None)
        if ids is None:
            raise UserError(f"capture: expected token ids among the arguments, got none in {', '.join(bound)}")
        if ids.dim() == 2 and len(ids) != 1:
            problem = f"expected one sequence, got a batch of {len(ids)}"
            raise UserError(f"capture: {problem}; capture one sequence at a time")
        mask = bound.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise UserError("capture: expected no padding, got an attention_mask with zeros; remove the padding")
        self.recorder.begin(ids.flatten().tolist(), _first_position(bound))

    def keep(self, stage: str, layer: int | None, tensor: torch.Tensor) -> bool:
        """Record a stage; return False, because the model's tensor is not changed (see `calls.Keep`)."""
        tensor = without_batch(stage, tensor)
        n_tokens = len(self.recorder.passes[-1].ids) if self.recorder.passes else 0
        is_last_rows = stage == "logits" and len(tensor) < n_tokens  # transformers' logits_to_keep
        tokens = range(n_tokens - len(tensor), n_tokens) if is_last_rows else None
        on_cpu, dtype = _on_cpu(tensor)
        bits = on_cpu.view(torch.uint16) if dtype == "bfloat16" else on_cpu
        self.recorder.add(stage, bits.numpy(), layer=layer, tokens=tokens, stored=dtype)
        return False

    def attend(
        self, original: Attention, is_eager: bool, module: Any, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, mask: torch.Tensor | None, **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Record the inputs of an attention function and, in eager mode, its intermediate stages."""
        layer, tokens = module.layer_idx, self.recorder.passes[-1]
        n_tokens, n_context = query.shape[2], min(key.shape[2], tokens.first_position + query.shape[2])
        keys, values = key[0, :, :n_context], value[0, :, :n_context]  # a static cache has more slots
        for hook, heads in ((QUERY, query[0]), (NEW_KEYS, keys[:, n_context - n_tokens :])):
            if stage := stage_at(hook, self._config, layer):
                self.keep(stage, layer, heads.transpose(0, 1))  # (seq, heads, head_dim)
        self.keep("k_cache", layer, keys)
        self.keep("v_cache", layer, values)
        if not is_eager:
            return self._context(layer, *original(module, query, key, value, mask, **settings))

        def record_scores(scores: torch.Tensor) -> None:
            self.keep("attn_scores", layer, with_infinite_mask(scores, mask)[0, ..., :n_context])

        with _Softmax(record_scores):
            output, probs = original(module, query, key, value, mask, **settings)
        self.keep("attn_probs", layer, probs[0, ..., :n_context])
        return self._context(layer, output, probs)

    def _context(self, layer: int, output: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the output of attention as the context, unless another hook records that stage."""
        if stage_at(CONTEXT, self._config, layer) != "attn_context":
            self.keep("attn_context", layer, output[0].flatten(1))
        return output, probs


class _Softmax(TorchFunctionMode):
    """Torch function mode that records the input of a softmax."""

    def __init__(self, record: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is nn.functional.softmax:
            self._record(args[0])
        return func(*args, **(kwargs or {}))


def without_batch(stage: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the only sequence of a batch; arrays of experts have no batch axis and are unchanged."""
    axes = BY_NAME[stage].axes.split() if stage in BY_NAME else []
    return tensor[0] if tensor.dim() == len(axes) + 1 and len(tensor) == 1 else tensor


def with_infinite_mask(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Set masked scores to -inf; transformers' mask adds the lowest finite float instead."""
    if mask is None:
        return scores
    return scores.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


@contextmanager
def _record_attention(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Replace the model's attention function in transformers' registry by one that records, until the block ends."""
    own_modules = {module for module in model.modules() if hasattr(module, "layer_idx")}
    if not (kind := _attention_kind(model)):
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

    registered = REGISTRY.get(kind)

    def attention(module: Any, *args: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        original: Attention = registered or sys.modules[type(module).__module__].eager_attention_forward
        if module not in own_modules:
            return original(module, *args, **settings)
        return watch.attend(original, kind == "eager", module, *args, **settings)

    REGISTRY[kind] = attention
    try:
        yield
    finally:
        del REGISTRY[kind]
        if REGISTRY.get(kind) is not registered:  # `del` restores transformers' default, but not an added function
            REGISTRY[kind] = registered


def _first_position(arguments: Mapping[str, Any]) -> int | None:
    """Return the first position from the arguments, or else the number of cached tokens; None if both are absent."""
    positions = next((arguments[name] for name in _POSITIONS if arguments.get(name) is not None), None)
    if isinstance(positions, torch.Tensor):
        row = positions.flatten().tolist()
        if row != list(range(row[0], row[0] + len(row))):
            raise UserError(f"capture: expected consecutive positions of one sequence, got {row[:8]}")
        return row[0]
    if positions is not None:
        return int(positions)
    if "past_key_values" not in arguments:
        return None
    return 0 if arguments["past_key_values"] is None else arguments["past_key_values"].get_seq_length()


def _detect_features(model: nn.Module) -> dict[str, str | bool]:
    """Return the attributes of `Features` that the model itself shows; other properties must be declared."""
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "")
    if not (kind := _attention_kind(model)):
        return {"engine": "torch", "dtype": dtype}
    return {"engine": "transformers", "dtype": dtype, "kv_cache": dtype, "flash_attention": kind != "eager"}


def _attention_kind(model: nn.Module) -> str:
    """Return the name of the attention function in transformers' registry; empty for other models."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _on_cpu(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a contiguous tensor on the CPU, and the name of its dtype."""
    return tensor.detach().cpu().contiguous(), str(tensor.dtype).removeprefix("torch.")
