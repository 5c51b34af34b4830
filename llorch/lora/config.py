"""Configuration of an adapter: rank, scaling and target matrices (those that the adapter changes).

    y = W x + scaling * B A x          scaling = alpha / r of the matrix (alpha_pattern, else lora_alpha; rank_pattern,
                                       else r), or alpha / sqrt(r) with rank-stabilised LoRA

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
from llorch.lora.targets import OF_EXPERTS, ROUTERS, LoraTarget, targets_of, with_multimodal_paths
from llorch.runtime.errors import UserError

Number = TypeVar("Number", int, float)
_MATCH_SECONDS = 1.0  # time limit of one match, because a pattern from a file may backtrack without end
LAYER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # modules of dense models
ALL_LINEAR = "all-linear"  # every target module of the layers, without embedding and output


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Hyperparameters of one adapter, validated on creation."""

    r: int = 8  # rank, at least 1
    lora_alpha: float = 16.0  # numerator of the scaling; finite, above 0
    target_modules: tuple[str, ...] | str = ALL_LINEAR  # suffixes of module paths (`q_proj`), or a regex for full paths
    target_parameters: tuple[str, ...] = ()  # suffixes of parameter paths that are no modules (`experts.down_proj`)
    exclude_modules: tuple[str, ...] | str = ()  # suffixes or regex of modules without an adapter
    layers_to_transform: tuple[int, ...] | None = None  # None means all layers
    lora_dropout: float = 0.0  # dropout probability of the adapter's input in training, in [0, 1)
    use_rslora: bool = False  # divide alpha by the square root of the rank
    use_dora: bool = False  # train the norm of every row separately from its direction
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # regex for a path suffix -> rank
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # regex for a path suffix -> alpha

    def __post_init__(self) -> None:
        """Refuse invalid values (UserError)."""
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
        conflicting = [name for name in ("lora_dropout", "use_dora") if getattr(self, name)]
        if self.target_parameters and conflicting:
            raise UserError(f"lora config: {conflicting[0]} cannot be combined with target_parameters (nor in PEFT)")
        patterns = [*self.rank_pattern, *self.alpha_pattern]
        patterns += [p for p in (self.target_modules, self.exclude_modules) if isinstance(p, str)]
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"lora config: {pattern!r} is no regular expression: {error}") from None

    def targets(self, config: ModelConfig) -> Mapping[str, LoraTarget]:
        """Return the matrices that the adapter changes, in forward order; UserError if a name matches none."""
        all_targets = targets_of(config)
        requested = {"module": (self.target_modules, False), "parameter": (self.target_parameters, True)}
        for kind, (ends, is_parameter) in requested.items():
            paths = [t.path for t in all_targets.values() if t.is_parameter is is_parameter]
            names = ends if isinstance(ends, tuple) else ()
            if absent := [end for end in names if not any(_path_ends_with(path, end) for path in paths)]:
                raise UserError(f"lora config: {_explain_absent(kind, absent, paths, config)}")
        selected = {name: target for name, target in all_targets.items() if self._is_targeted(target)}
        if not selected:
            keys = ("target_modules", "exclude_modules", "layers_to_transform")
            criteria = ", ".join(f"{key} {value!r:.80}" for key in keys if (value := getattr(self, key)))
            raise UserError(f"lora config: {criteria} match no matrix of the model")
        return selected

    def require_effect(self, config: ModelConfig) -> None:
        """Refuse (UserError) a name, layer or pattern that has no effect."""
        selected, candidates = self.targets(config).values(), replace(self, exclude_modules=()).targets(config).values()
        idle = [
            *(("target_modules", end) for end in _idle(self.target_modules, modules(selected))),
            *(("exclude_modules", end) for end in _idle(self.exclude_modules, candidates)),
            *(("layers_to_transform", n) for n in self.layers_to_transform or () if n not in map(_layer_of, selected)),
            *(("rank_pattern", key) for key in self.rank_pattern if not _matches_any(key, selected)),
            *(("alpha_pattern", key) for key in self.alpha_pattern if not _matches_any(key, selected)),
        ]
        if idle:
            listing = ", ".join(f"{name} {value!r}" for name, value in idle[:8]) + (" and more" if idle[8:] else "")
            message = f"lora config: expected names that match a matrix of the adapter, got {listing}"
            raise UserError(f"{message}; correct or remove it")

    def rank_of(self, target: LoraTarget) -> int:
        """Return the rank of one matrix's adapter."""
        return _value_for(self.rank_pattern, target.path, self.r)

    def alpha_of(self, target: LoraTarget) -> float:
        """Return the alpha of one matrix's adapter."""
        return _value_for(self.alpha_pattern, target.path, self.lora_alpha)

    def scaling_of(self, target: LoraTarget) -> float:
        """Compute the scaling of one matrix's adapter."""
        rank = self.rank_of(target)
        return self.alpha_of(target) / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_targeted(self, target: LoraTarget) -> bool:
        if target.is_parameter:  # as in PEFT, layers_to_transform and exclude_modules do not apply
            return any(_path_ends_with(target.path, end) for end in self.target_parameters)
        if self.layers_to_transform is not None and _layer_of(target) not in self.layers_to_transform:
            return False
        return _is_in_modules(target, self.target_modules) and not (
            self.exclude_modules and _is_in_modules(target, self.exclude_modules)
        )


def names_of(targets: Mapping[str, LoraTarget], model: ModelConfig) -> dict[str, Any]:
    """Make `target_modules` and `target_parameters`, sorted: path suffixes, or full paths if suffixes match others."""
    names = {}
    for name, is_parameter in (("target_modules", False), ("target_parameters", True)):
        paths = {target.path for target in targets.values() if target.is_parameter is is_parameter}
        outside = {target.path for target in targets_of(model).values() if target.is_parameter is is_parameter} - paths
        ends = {_end(path) for path in paths}
        is_unambiguous = not any(_path_ends_with(path, end) for path in outside for end in ends)
        names[name] = tuple(sorted(ends if is_unambiguous else paths))
    return names


def text_only_config(config: LoraConfig, model: ModelConfig, form: tuple[str, str]) -> LoraConfig:
    """Translate a configuration from names of a multimodal model to names of its text model.

    `form` is the family's `multimodal_prefixes`. Modules outside the text model are dropped; UserError if none remains.
    """
    targets = with_multimodal_paths(targets_of(model), form)
    multimodal = {name: replace(target, path=target.multimodal_path) for name, target in targets.items()}
    selected = {name: targets[name] for name, target in multimodal.items() if config._is_targeted(target)}
    if not selected:
        raise UserError(f"lora config: target_modules {config.target_modules!r:.80} match no matrix of the text model")
    patterns = value_patterns(config, {targets[name].path: multimodal[name] for name in selected})
    return replace(config, **names_of(selected, model), **patterns, exclude_modules=(), layers_to_transform=None)


def value_patterns(config: LoraConfig, targets: Mapping[str, LoraTarget]) -> dict[str, Any]:
    """Make patterns that give each target its rank and alpha under a new path, the key; keep patterns that do so."""
    pairs = [(replace(target, path=path), target) for path, target in targets.items()]
    if all(config.rank_of(a) == config.rank_of(b) and config.alpha_of(a) == config.alpha_of(b) for a, b in pairs):
        return {"rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern)}
    ranks = {re.escape(path): config.rank_of(target) for path, target in targets.items()}
    alphas = {re.escape(path): config.alpha_of(target) for path, target in targets.items()}
    return {
        "rank_pattern": {path: rank for path, rank in ranks.items() if rank != config.r},
        "alpha_pattern": {path: alpha for path, alpha in alphas.items() if alpha != config.lora_alpha},
    }


def modules_regex(paths: Iterable[str]) -> str:
    """Write a regex for exactly these modules; modules of the same layers are grouped."""
    layers: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        prefix, separator, suffix = path.partition(".layers.")
        number, _, end = suffix.partition(".")
        layers.setdefault((re.escape(prefix + separator), end), []).append(number)
    ends: dict[tuple[str, str], list[str]] = {}
    for (prefix, end), numbers in layers.items():
        ends.setdefault((prefix, "|".join(numbers)), []).append(re.escape(end))
    return "|".join(
        rf"{prefix}({numbers})\.({'|'.join(suffixes)})" if numbers else prefix
        for (prefix, numbers), suffixes in ends.items()
    )


def modules(targets: Iterable[LoraTarget]) -> list[LoraTarget]:
    """Select the targets that are modules of transformers, not parameters."""
    return [target for target in targets if not target.is_parameter]


def _end(path: str) -> str:
    """Return the last name of a path; for a parameter (`gate.weight`, `experts.down_proj`) the last two."""
    parts = path.split(".")
    return ".".join(parts[-2:] if parts[-1] == "weight" or parts[-2:-1] == ["experts"] else parts[-1:])


def _explain_absent(kind: str, absent: list[str], paths: list[str], config: ModelConfig) -> str:
    """List the missing and the available names; add a hint for experts and routers, which are parameters."""
    available = ", ".join(sorted({_end(path) for path in paths})) or "none"
    message = f"the model has no {kind} {', '.join(absent)}; it has {available}"
    if kind == "module" and config.experts is not None and {*OF_EXPERTS, *ROUTERS} & {_end(end) for end in absent}:
        message += "; name parameters that are no module in target_parameters, as in PEFT"
    return message


def _is_in_modules(target: LoraTarget, modules: tuple[str, ...] | str) -> bool:
    """Tell if a target is in `modules`: path suffixes, a regular expression, or all-linear."""
    if modules == ALL_LINEAR:
        return target.name not in ("embed_tokens", "lm_head")
    if isinstance(modules, str):
        return _matches(modules, target.path)
    return any(_path_ends_with(target.path, end) for end in modules)


def _matches(pattern: str, path: str) -> bool:
    """Tell if a pattern matches a full path, like PEFT's `re`; UserError if it takes too long, as `(.*)*x` does."""
    try:
        return regex.fullmatch(pattern, path, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        fields = "lora config: target_modules, exclude_modules, rank_pattern or alpha_pattern"
        message = f"{fields}: {pattern!r} took over {_MATCH_SECONDS} s to match {path}; simplify it"
        raise UserError(message) from None
    except regex.error as error:
        raise UserError(f"lora config: {pattern!r} is no regular expression: {error}") from None


def _idle(modules: tuple[str, ...] | str, targets: Collection[LoraTarget]) -> list[str]:
    """Return the entries of a setting such as `target_modules` (names, or one pattern) that match no target."""
    entries = [(name, (name,)) for name in modules] if isinstance(modules, tuple) else [(modules, modules)]
    return [name for name, criterion in entries if not any(_is_in_modules(target, criterion) for target in targets)]


def _layer_of(target: LoraTarget) -> int | None:
    match = re.match(r"layers\.(\d+)\.", target.name)
    return None if match is None else int(match[1])


def _path_ends_with(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _matches_any(pattern: str, targets: Collection[LoraTarget]) -> bool:
    """Tell if a pattern matches at least one of the targets."""
    return any(_matches_suffix(pattern, target.path) for target in targets)


def _value_for(patterns: Mapping[str, Number], path: str, default: Number) -> Number:
    """Return the value of the first pattern that matches a suffix of the path."""
    return next((value for pattern, value in patterns.items() if _matches_suffix(pattern, path)), default)


def _matches_suffix(pattern: str, path: str) -> bool:
    """Tell if a pattern such as `q_proj|v_proj` matches complete last names of a path, as in PEFT."""
    return _matches(rf"(.*\.)?({pattern})", path)
