"""The interface of every reference engine, and the checks that all of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from llorch.families.config import ModelConfig
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError
from llorch.stages import table as stages

EngineName = Literal["llamacpp", "transformers"]
Call = tuple[str, Sequence, Mapping]  # a method, its arguments, and those that have names
OURS = "llorch"  # in routes


@dataclass(frozen=True)
class LoadPath:
    """Tools that read, decoded and rewrote the model before the engine loaded it.

    The engine does not check steps that llorch did.

    Attributes:
        read: Who found the tensors in the file, and the hyperparameters but those in `set_by_llorch`.
        decoded: Who made numbers of them.
        written: Who wrote what the engine loaded instead; empty where that was the file itself.
        set_by_llorch: Hyperparameters, by the engine's names, that it did not find in the file: llorch read them.
    """

    read: str
    decoded: str
    written: str = ""
    set_by_llorch: tuple[str, ...] = ()

    @property
    def is_direct(self) -> bool:
        """True if the engine itself read everything from the file."""
        return not self.written and not self.set_by_llorch and self.read == self.decoded != OURS

    def __str__(self) -> str:
        read = "read and decoded" if self.read == self.decoded else f"read by {self.read}, decoded"
        written = f", written by {self.written}" if self.written else ""
        from_llorch = f", {' and '.join(self.set_by_llorch)} read by {OURS}" if self.set_by_llorch else ""
        return f"{read} by {self.decoded}{written}{from_llorch}"

    def stored(self) -> dict[str, object]:
        """Return the values as goldens store them."""
        return {"read": self.read, "decoded": self.decoded, "written": self.written, "told": self.set_by_llorch}


def stored_load_path(provenance: Mapping[str, Any], engine: str) -> LoadPath:
    """Read the load path that goldens state for an engine; raise ValueError if they state none."""
    values = provenance["engines"].get(engine, {}).get("route")
    if values is None:
        raise UserError(f"golden: expected the load path of {engine}, got none; run reference_outputs/regenerate.py")
    return LoadPath(values["read"], values["decoded"], values["written"], tuple(values["told"]))


@runtime_checkable
class ReferenceEngine(Protocol):
    """What every engine can be asked; a context manager that frees the model."""

    name: str
    config: ModelConfig
    n_threads: int
    load_path: LoadPath

    def __enter__(self) -> "ReferenceEngine": ...

    def __exit__(self, *exception: object) -> None: ...

    def close(self) -> None:
        """Free the model."""
        ...

    def trace(self, ids: Sequence[int], *, first_position: int = 0) -> dict[str, np.ndarray]:
        """Run tokens from an empty cache and return every stage, float32 and C-contiguous."""
        ...

    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token, from a run without capture."""
        ...

    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the row of logits that the engine's own sampling sees for the last token."""
        ...

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Generate `n` tokens greedily by the engine's own code, with the engine's own cache."""
        ...

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution after the engine's own sampling filters; 0 for removed tokens."""
        ...

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Answer each of these calls.

        An engine that reads a model layer by layer reads each layer once for all of them.
        """
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of the engine's own tokenizer, None when the model comes without one."""
        ...

    def provenance(self) -> dict[str, object]:
        """Return the versions, build, CPU features and switches of the engine."""
        ...


def one_by_one(engine: object, calls: Sequence[Call]) -> list[Any]:
    """Run calls one after the other, for an engine that holds its whole model; see `call_batch`."""
    return [getattr(engine, method)(*args, **kwargs) for method, args, kwargs in calls]


Trace = dict[str, np.ndarray]


def checked_trace(
    captured: Mapping[str, np.ndarray],
    config: ModelConfig,
    n_tokens: int,
    engine: str,
    dtype: type[np.floating] = np.float32,
) -> Trace:
    """Refuse a capture, of a run from an empty cache, that is not exactly the expected set of stages."""
    shapes = {key: stage.shape(config, seq=n_tokens, ctx=n_tokens) for key, stage, _ in stages.keys(config)}
    dtypes = {key: np.int64 if stage.is_choice else dtype for key, stage, _ in stages.keys(config)}
    faults = [f"{name} is missing" for name in shapes if name not in captured]
    faults += [f"{name} is unexpected" for name in captured if name not in shapes]
    for name, array in captured.items():
        if name in shapes and (array.shape != shapes[name] or array.dtype != dtypes[name]):
            faults.append(f"{name} must be {np.dtype(dtypes[name])} {shapes[name]}, got {array.dtype} {array.shape}")
    if faults:
        raise RuntimeError(f"{engine}: the captured stages are not the expected stages: {'; '.join(faults)}")
    return {name: np.ascontiguousarray(captured[name]) for name in shapes}


def check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    """Refuse token ids that the model does not have."""
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < config.vocab_size), None)
    if not ids or wrong is not None:
        actual = "none" if wrong is None else f"{ids[wrong]} at index {wrong}"
        raise UserError(f"ids: expected at least one token id, each from 0 to {config.vocab_size - 1}, got {actual}")
