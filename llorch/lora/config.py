"""How an adapter was or will be made: rank, scale, and which of a model's matrices it stands beside.

    y = W x + scaling * B A x          scaling = lora_alpha / r, or lora_alpha / sqrt(r) with rank-stabilised LoRA

Names, defaults and patterns are PEFT's. Source: arXiv:2106.09685; rsLoRA arXiv:2312.03732; DoRA arXiv:2402.09353;
peft/tuners/lora/config.py and peft/tuners/tuners_utils.py (`check_target_module_exists`, `get_pattern_key`).
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import regex

from llorch.families.config import ModelConfig
from llorch.lora.targets import OF_EXPERTS, ROUTERS, LoraTarget, in_whole, targets_of
from llorch.runtime.errors import UserError

Number = TypeVar("Number", int, float)
_MATCH_SECONDS = 1.0
LAYER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of dense models
ALL_LINEAR = "all-linear"  # every module of the layers that can be meant; neither embedding nor output


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The hyperparameters of one adapter; validated when it is made."""

    r: int = 8  # rank, at least 1
    lora_alpha: float = 16.0  # numerator of the scale; finite, above 0
    target_modules: tuple[str, ...] | str = ALL_LINEAR  # ends of module paths (`q_proj`), or a regex for whole paths
    target_parameters: tuple[str, ...] = ()  # ends of parameter paths (`experts.down_proj`): what is no module
    exclude_modules: tuple[str, ...] | str = ()  # likewise, of what is left out again
    layers_to_transform: tuple[int, ...] | None = None  # None takes all
    lora_dropout: float = 0.0  # share of the adapter's input that is dropped in training, 0 or more and below 1
    use_rslora: bool = False  # divide alpha by the root of the rank
    use_dora: bool = False  # learn the length of every row apart from its direction
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # regex for the end of a path -> its rank
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # likewise for alpha

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning."""
        for name, rank in {"r": self.r, **{f"rank_pattern {k}": v for k, v in self.rank_pattern.items()}}.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise UserError(f"lora config: {name} must be a whole number of at least 1, got {rank!r}")
        alphas = {"lora_alpha": self.lora_alpha} | {f"alpha_pattern {k}": v for k, v in self.alpha_pattern.items()}
        for name, alpha in alphas.items():
            if not (math.isfinite(alpha) and alpha > 0):
                raise UserError(f"lora config: {name} must be finite and above 0, got {alpha}")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora config: lora_dropout must be 0 or more and below 1, got {self.lora_dropout}")
        if not self.target_modules and not self.target_parameters:
            raise UserError("lora config: target_modules must name at least one module, got none")
        beside = [name for name in ("lora_dropout", "use_dora") if getattr(self, name)]
        if self.target_parameters and beside:
            raise UserError(f"lora config: {beside[0]} cannot be combined with target_parameters (nor in PEFT)")
        patterns = [*self.rank_pattern, *self.alpha_pattern]
        patterns += [p for p in (self.target_modules, self.exclude_modules) if isinstance(p, str)]
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"lora config: {pattern!r} is no regular expression: {error}") from None

    def targets(self, config: ModelConfig) -> Mapping[str, LoraTarget]:
        """Return the matrices that the adapter changes, in forward order; ValueError if a name fits none."""
        every = targets_of(config)
        named = {"module": (self.target_modules, False), "parameter": (self.target_parameters, True)}
        for kind, (ends, is_parameter) in named.items():
            paths = [t.path for t in every.values() if t.is_parameter is is_parameter]
            names = ends if isinstance(ends, tuple) else ()
            if absent := [end for end in names if not any(_path_ends_with(path, end) for path in paths)]:
                raise UserError(f"lora config: {_absent(kind, absent, paths, config)}")
        found = {name: target for name, target in every.items() if self._takes(target)}
        if not found:
            keys = ("target_modules", "exclude_modules", "layers_to_transform")
            told = ", ".join(f"{key} {value!r:.80}" for key in keys if (value := getattr(self, key)))
            raise UserError(f"lora config: {told} match no matrix of the model")
        return found

    def require_effect(self, config: ModelConfig) -> None:
        """Refuse (ValueError) a name, layer or pattern that changes nothing: it was meant to."""
        chosen, offered = self.targets(config).values(), replace(self, exclude_modules=()).targets(config).values()
        idle = [
            *(("target_modules", end) for end in _idle(self.target_modules, modules(chosen))),
            *(("exclude_modules", end) for end in _idle(self.exclude_modules, offered)),
            *(("layers_to_transform", n) for n in self.layers_to_transform or () if n not in map(_layer_of, chosen)),
            *(("rank_pattern", key) for key in self.rank_pattern if not _hits(key, chosen)),
            *(("alpha_pattern", key) for key in self.alpha_pattern if not _hits(key, chosen)),
        ]
        if idle:
            told = ", ".join(f"{name} {value!r}" for name, value in idle[:8]) + (" and more" if idle[8:] else "")
            message = f"lora config: expected names that match a matrix of the adapter, got {told}"
            raise UserError(f"{message}; correct or remove it")

    def rank_of(self, target: LoraTarget) -> int:
        """Rank of the adapter of one matrix."""
        return _by_pattern(self.rank_pattern, target.path, self.r)

    def alpha_of(self, target: LoraTarget) -> float:
        """Return the alpha of the adapter of one matrix."""
        return _by_pattern(self.alpha_pattern, target.path, self.lora_alpha)

    def scaling_of(self, target: LoraTarget) -> float:
        """Compute the factor of the adapter's product."""
        rank = self.rank_of(target)
        return self.alpha_of(target) / (math.sqrt(rank) if self.use_rslora else rank)

    def _takes(self, target: LoraTarget) -> bool:
        if target.is_parameter:
            return any(_path_ends_with(target.path, end) for end in self.target_parameters)
        if self.layers_to_transform is not None and _layer_of(target) not in self.layers_to_transform:
            return False
        return _fits(target, self.target_modules) and not (self.exclude_modules and _fits(target, self.exclude_modules))


def names_of(targets: Mapping[str, LoraTarget], model: ModelConfig) -> dict[str, Any]:
    """Make `target_modules` and `target_parameters`, sorted: ends of paths, whole paths if layers differ."""
    found = {}
    for name, is_parameter in (("target_modules", False), ("target_parameters", True)):
        paths = {target.path for target in targets.values() if target.is_parameter is is_parameter}
        others = {target.path for target in targets_of(model).values() if target.is_parameter is is_parameter} - paths
        ends = {_end(path) for path in paths}
        same = not any(_path_ends_with(path, end) for path in others for end in ends)
        found[name] = tuple(sorted(ends if same else paths))
    return found


def from_whole(config: LoraConfig, model: ModelConfig, form: tuple[str, str]) -> LoraConfig:
    """Translate a configuration from names of a multimodal model to names of its text part alone.

    `form`: `multimodal_prefixes` of the family. Modules outside the text are left out; ValueError if none is left.
    """
    targets = in_whole(targets_of(model), form)
    seen = {name: replace(target, path=target.whole_path) for name, target in targets.items()}
    chosen = {name: targets[name] for name, target in seen.items() if config._takes(target)}
    if not chosen:
        raise UserError(f"lora config: target_modules {config.target_modules!r:.80} match no matrix of the text model")
    patterns = patterns_of(config, {targets[name].path: seen[name] for name in chosen})
    return replace(config, **names_of(chosen, model), **patterns, exclude_modules=(), layers_to_transform=None)


def patterns_of(config: LoraConfig, targets: Mapping[str, LoraTarget]) -> dict[str, Any]:
    """Make patterns that give each target, by path, its rank and alpha: the present ones if they do."""
    moved = [(replace(target, path=path), target) for path, target in targets.items()]
    if all(config.rank_of(a) == config.rank_of(b) and config.alpha_of(a) == config.alpha_of(b) for a, b in moved):
        return {"rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern)}
    ranks = {re.escape(path): config.rank_of(target) for path, target in targets.items()}
    alphas = {re.escape(path): config.alpha_of(target) for path, target in targets.items()}
    return {
        "rank_pattern": {path: rank for path, rank in ranks.items() if rank != config.r},
        "alpha_pattern": {path: alpha for path, alpha in alphas.items() if alpha != config.lora_alpha},
    }


def pattern_of(paths: Iterable[str]) -> str:
    """Write a regex for these modules and no others; modules that the same layers have stand together."""
    layers: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        before, of_layers, rest = path.partition(".layers.")
        number, _, end = rest.partition(".")
        layers.setdefault((re.escape(before + of_layers), end), []).append(number)
    ends: dict[tuple[str, str], list[str]] = {}
    for (before, end), numbers in layers.items():
        ends.setdefault((before, "|".join(numbers)), []).append(re.escape(end))
    return "|".join(
        rf"{before}({numbers})\.({'|'.join(of_these)})" if numbers else before
        for (before, numbers), of_these in ends.items()
    )


def modules(targets: Iterable[LoraTarget]) -> list[LoraTarget]:
    """Return the targets that are modules of transformers, not parameters."""
    return [target for target in targets if not target.is_parameter]


def _end(path: str) -> str:
    """Return the name of a module, or of a parameter and the module that has it."""
    parts = path.split(".")
    return ".".join(parts[-2:] if parts[-1] == "weight" or parts[-2:-1] == ["experts"] else parts[-1:])


def _absent(kind: str, absent: list[str], paths: list[str], config: ModelConfig) -> str:
    """Explain what is missing, what there is, and where a name means something else in PEFT."""
    known = ", ".join(sorted({_end(path) for path in paths})) or "none"
    told = f"the model has no {kind} {', '.join(absent)}; it has {known}"
    if kind == "module" and config.experts is not None and {*OF_EXPERTS, *ROUTERS} & {_end(end) for end in absent}:
        told += "; name parameters that are no module in target_parameters, as in PEFT"
    return told


def _fits(target: LoraTarget, modules: tuple[str, ...] | str) -> bool:
    """Tell if a target is one of the modules: ends of paths, a regular expression, or all-linear."""
    if modules == ALL_LINEAR:
        return target.name not in ("embed_tokens", "lm_head")
    if isinstance(modules, str):
        return _matches(modules, target.path)
    return any(_path_ends_with(target.path, end) for end in modules)


def _matches(pattern: str, path: str) -> bool:
    """Tell if a pattern fits a whole path, as PEFT's `re` does; ValueError if it takes too long: `(.*)*x`."""
    try:
        return regex.fullmatch(pattern, path, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        where = "lora config: target_modules, exclude_modules, rank_pattern or alpha_pattern"
        message = f"{where}: {pattern!r} took over {_MATCH_SECONDS} s to match {path}; simplify it"
        raise UserError(message) from None
    except regex.error as error:
        raise UserError(f"lora config: {pattern!r} is no regular expression: {error}") from None


def _idle(modules: tuple[str, ...] | str, targets: Collection[LoraTarget]) -> list[str]:
    """Return the names, or the pattern, that fit no target."""
    each = [(name, (name,)) for name in modules] if isinstance(modules, tuple) else [(modules, modules)]
    return [shown for shown, one in each if not any(_fits(target, one) for target in targets)]


def _layer_of(target: LoraTarget) -> int | None:
    found = re.match(r"layers\.(\d+)\.", target.name)
    return None if found is None else int(found[1])


def _path_ends_with(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _hits(pattern: str, targets: Collection[LoraTarget]) -> bool:
    """Tell if a pattern names at least one of the targets."""
    return any(_fits_end(pattern, target.path) for target in targets)


def _by_pattern(patterns: Mapping[str, Number], path: str, default: Number) -> Number:
    """Return the value of the first pattern that fits the end of a path."""
    return next((value for pattern, value in patterns.items() if _fits_end(pattern, path)), default)


def _fits_end(pattern: str, path: str) -> bool:
    """Tell if a path ends in whole names of a pattern, any of the alternatives `q_proj|v_proj`, as PEFT does."""
    return _matches(rf"(.*\.)?({pattern})", path)
