"""Settings and tensors of a quantised folder, and the matrices that a reader finds in them."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from llorch.files.packed import Scheme
from llorch.files.quantised.matrix import Recipe, StoredPart
from llorch.files.safetensors import SafetensorsInfo
from llorch.files.tensor_names import to_text_only
from llorch.runtime.errors import ErrorCode, FormatError
from llorch.runtime.fields import Fields

_PATH = re.compile(r"[\w-]+(\.[\w-]+)+")  # module path, not a regular expression or a class
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Matrix in a quantised folder: shape (out, in), tensors, and decoding recipe."""

    scheme: Scheme
    shape: Shape
    parts: Mapping[str, str]  # tensor names by the format's name of the part
    recipe: Recipe
    expert: tuple[int, int] | None = None  # (number, count) if the tensors are stacks of experts


@dataclass(frozen=True, slots=True)
class Source:
    """Settings and tensors of a folder, and the matrices that the reader of its method, such as `read_gptq`, finds."""

    settings: Fields  # quantization_config
    tensors: Mapping[str, SafetensorsInfo]
    part: Callable[[str], StoredPart]  # reads a tensor by name
    found: dict[str, Found] = field(default_factory=dict)  # by weight name
    unused: set[str] = field(default_factory=set)  # tensors without use in exact numerics, which round no activations
    notes: list[str] = field(default_factory=list)  # warnings about settings without effect

    def modules(self, *suffixes: str, dtypes: Collection[str] = ()) -> list[str]:
        """Return the quantised modules: with a tensor of one of these suffixes, or a weight of these dtypes.

        A module with a missing tensor is found by its other tensors, so that `take` can report the missing one.
        """
        ends: dict[str, Iterable[str]] = {f".{suffix}": self.tensors for suffix in suffixes}
        ends[".weight"] = [name for name, info in self.tensors.items() if info.dtype in dtypes]
        return [*dict.fromkeys(name.removesuffix(end) for end in ends for name in ends[end] if name.endswith(end))]

    def has(self, module: str, suffix: str) -> bool:
        """Check if a module has a tensor of this suffix."""
        return f"{module}.{suffix}" in self.tensors

    def take(self, module: str, suffix: str, dtypes: Iterable[str], shape: Shape | None = None, key: str = "") -> str:
        """Check a tensor and return its name; FormatError Missing, DType or Shape names `key`, which requires it."""
        reason = f"; {key} says so" if key else ""
        info, allowed = self._info(module, suffix, reason), (*dtypes,)
        name = info.name
        if info.dtype not in allowed:
            raise self.error("DType", f"{name}: expected {' or '.join(allowed)}, got {info.dtype}{reason}")
        if shape is not None and info.shape != shape:
            raise self.error("Shape", f"{name}: expected {shape}, got {info.shape}{reason}")
        return name

    def shape(self, module: str, suffix: str, *, axes: int = 2) -> Shape:
        """Return the shape of a tensor with `axes` axes; FormatError Shape, Missing."""
        info = self._info(module, suffix)
        if len(info.shape) != axes:
            raise self.error("Shape", f"{info.name}: expected {axes} axes, got {info.shape}")
        return info.shape

    def _info(self, module: str, suffix: str, reason: str = "") -> SafetensorsInfo:
        """Look up a tensor of a quantised matrix; FormatError Missing."""
        name = f"{module}.{suffix}"
        if name not in self.tensors:
            message = f"{name}: expected this tensor of a quantised matrix, got none{reason}; download the folder again"
            raise self.error("Missing", message)
        return self.tensors[name]

    def add(self, module: str, name: str, shape: Shape, parts: Mapping[str, str], recipe: Recipe) -> None:
        """Add a matrix; `name` is the displayed name of its scheme."""
        self.found[f"{module}.weight"] = Found(Scheme(name), shape, parts, recipe)

    def add_experts(self, module: str, name: str, add: Callable[["Source", str], None]) -> None:
        """Add every matrix of a module whose tensors have the experts as first axis.

        `name` is the module of one expert, with `{e}` for its number; `add` adds one matrix of it.
        """
        n_experts = self.shape(module, "weight", axes=3)[0]
        stacked = {key: info for key, info in self.tensors.items() if key.startswith(f"{module}.")}
        for key, info in stacked.items():
            if len(info.shape) != 3 or info.shape[0] != n_experts or 0 in info.shape:
                raise self.error("Shape", f"{key}: expected a stack of {n_experts} matrices, got {info.shape}")
        expert_source = replace(
            self, tensors={key: replace(info, shape=info.shape[1:]) for key, info in stacked.items()}, found={}
        )
        add(expert_source, module)
        for matrix in expert_source.found.values():
            for expert in range(n_experts):
                self.found[name.replace("{e}", str(expert)) + ".weight"] = replace(matrix, expert=(expert, n_experts))

    def leave_out(self, *suffixes: str) -> None:
        """Mark tensors with these suffixes as unused."""
        self.unused.update(name for name in self.tensors if name.rpartition(".")[2] in suffixes)

    def require_not_quantised(self, key: str, patterns: Iterable[str], matches: Callable[[str, str], bool]) -> None:
        """Raise Inconsistent for a quantised matrix that the settings exclude.

        Also warns of excluded modules that the folder does not have, see `note_unmatched`.
        """
        self.note_unmatched(key, patterns, matches)
        for name in self.found:
            module = name.removesuffix(".weight")
            for pattern in patterns:
                if matches(pattern, module):
                    message = f"{key}: expected {pattern!r} not to be quantised, but {module} has quantised tensors"
                    raise self.error("Inconsistent", message)

    def note_unmatched(self, key: str, patterns: Iterable[str], matches: Callable[[str, str], bool]) -> None:
        """Add a note for full module names in the settings without a module; regular expressions may match none."""
        modules = {name.rpartition(".")[0] for name in self.tensors}
        names = [name for name in patterns if _PATH.fullmatch(name) and name not in modules]
        names = [name for name in names if not any(matches(name, module) for module in modules)]
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            self.notes.append(f"{key}: expected modules of this folder, got {listed}; correct the spelling")

    def error(self, code: ErrorCode, message: str) -> FormatError:
        """Return an error that names the settings file."""
        return FormatError(code, message, path=self.settings.path)


def n_groups(source: Source, module: str, n_in: int, group_size: int, *, partial: bool = False) -> tuple[int, int]:
    """Return (columns per group, groups per row); `group_size` -1 is one group; `partial` allows a short last group."""
    if group_size == -1:
        return n_in, 1
    if group_size < 1:
        raise source.error("OutOfRange", f"group_size: expected -1 or at least 1, got {group_size}")
    if n_in % group_size and not partial:
        message = f"group_size: expected a divisor of the {n_in} columns of {module}, got {group_size}"
        raise source.error("Inconsistent", message)
    return group_size, -(-n_in // group_size)


def two_sizes(settings: Fields, key: str, expected: str = "two sizes") -> tuple[int, int]:
    """Read a list of two positive integers; FormatError Malformed."""
    value = settings.values.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise settings.error("Malformed", key, expected, value)
    return value[0], value[1]


def matches_part(pattern: str, module: str) -> bool:
    """Check if a name equals a module's path or consecutive parts of it, as in transformers."""
    return re.search(rf"(^|\.){re.escape(pattern)}($|\.)", module) is not None


def matches_module(pattern: str, module: str) -> bool:
    """Check for a match as in compressed-tensors: a regular expression after `re:`, else the whole name.

    Different spellings of one module match, see `plain_path`.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return pattern == module or plain_path(pattern) == plain_path(module)


@lru_cache(1 << 16)
def plain_path(name: str) -> str:
    """Return the path of a module without optional parts: `model.`, `language_model.`, `.weight`."""
    return to_text_only(name.removesuffix(".weight")).removeprefix("model.")


def names_in(source: Source, key: str) -> list[str]:
    """Return a list of names in the settings, empty if the key is absent."""
    value = source.settings.values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise source.settings.error("Malformed", key, "a list of names", value)
    return value
