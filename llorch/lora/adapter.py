"""An adapter as arrays: what every file format is read into and written from, and by which name it is used.

lora_A (r, in)   lora_B (out, r)   of an embedding: in = vocabulary, out = hidden_size; of experts see `targets`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32

from llorch.families.config import ModelConfig
from llorch.lora.config import LoraConfig
from llorch.lora.targets import LoraTarget, targets_of
from llorch.runtime.errors import ErrorCode, FormatError, UserError

LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "magnitude"
_SHOWN = 5  # names of one fault in a message


@dataclass(frozen=True)
class LoraTensors:
    """The trained tensors of one matrix; always float32, whatever the base is."""

    lora_A: Float32[np.ndarray, "r in"]
    lora_B: Float32[np.ndarray, "out r"]
    magnitude: Float32[np.ndarray, " out"] | None = None  # of DoRA

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensors that exist, by name."""
        found = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.magnitude}
        return {name: array for name, array in found.items() if array is not None}


@dataclass(frozen=True)
class Adapter:
    """One adapter; see `checked`."""

    config: LoraConfig
    targets: Mapping[str, LoraTarget]  # by canonical name, in the order of the forward pass
    tensors: Mapping[str, LoraTensors]  # the same names

    @property
    def n_parameters(self) -> int:
        """Number of trained numbers."""
        return sum(array.size for array in self.flat().values())

    @property
    def of_whole(self) -> bool:
        """True if a PEFT directory names its modules as in the whole multimodal model."""
        return any(target.whole_path for target in self.targets.values())

    def scaling(self, name: str) -> float:
        """Return the factor of the product of one matrix's adapter."""
        return self._scalings[name]

    @cached_property
    def _scalings(self) -> dict[str, float]:
        return {name: self.config.scaling_of(target) for name, target in self.targets.items()}

    def flat(self) -> dict[str, np.ndarray]:
        """Return every trained tensor under one name: `layers.3.q_proj.lora_A`."""
        return _flat(self.tensors)


def checked(
    config: LoraConfig, tensors: Mapping[str, LoraTensors], model: ModelConfig, *, where: object = None
) -> Adapter:
    """Put an adapter together if its tensors, by canonical name, are those its configuration asks for."""
    return assembled(config, _flat(tensors), model, where=where, copy=False)


def assembled(
    config: LoraConfig, arrays: Mapping[str, np.ndarray], model: ModelConfig, *, where: object, copy: bool = True
) -> Adapter:
    """Make a float32 adapter of the arrays of `Adapter.flat`, in any float dtype.

    Copied: the file may be closed, and training writes into them. FormatError Missing, Unexpected, Shape or NonFinite.
    """
    path = None if where is None else str(where)
    targets = targets_in(config, model, path)
    _require_shapes(arrays, wanted_shapes(config, model), path)
    flat = {name: np.array(array, np.float32, copy=copy or None) for name, array in arrays.items()}
    bad = [name for name, array in flat.items() if not np.isfinite(array).all()]
    if bad:
        message = f"adapter: expected finite numbers, got NaN or infinity in {some(sorted(bad))}"
        raise FormatError("NonFinite", message, path=path)
    found = {
        name: LoraTensors(flat[f"{name}.{LORA_A}"], flat[f"{name}.{LORA_B}"], flat.get(f"{name}.{MAGNITUDE}"))
        for name in targets
    }
    return Adapter(config, targets, found)


def targets_in(config: LoraConfig, model: ModelConfig, path: str | None) -> Mapping[str, LoraTarget]:
    """Return the matrices that an adapter changes; FormatError Missing if it names one that the model lacks."""
    try:
        return config.targets(model)
    except ValueError as error:
        raise FormatError("Missing", str(error), path=path) from None


def wanted_shapes(config: LoraConfig, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by flat name; ValueError for an unknown module."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, target in config.targets(model).items():
        rank = config.rank_of(target)
        shapes |= {f"{name}.{LORA_A}": target.shape_A(rank), f"{name}.{LORA_B}": target.shape_B(rank)}
        shapes |= {f"{name}.{MAGNITUDE}": (target.n_out,)} if config.use_dora else {}
    return shapes


def some(names: list[str]) -> str:
    """Shorten a list of names that may be long to its first names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def require_free(name: str, known: list[str]) -> None:
    """Refuse (ValueError) a name that is in use, or has other signs than letters, digits, _ and -."""
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"adapter: expected a name of letters, digits, _ and -, got {name!r}")
    if name in known:
        raise UserError(f"adapter: the name {name!r} is in use already; remove that adapter or choose another name")


def require_known(name: str | None, known: list[str]) -> None:
    """Refuse (ValueError) the name of an adapter that is not there; None wants none."""
    if name is not None and name not in known:
        raise UserError(f"adapter: expected one of {', '.join(known) or 'none'}, got {name!r}")


def require_fits(name: str, adapter: Adapter, model: ModelConfig) -> None:
    """Refuse (ValueError) an adapter of which a matrix has another name or shape in this model."""
    every = targets_of(model)
    foreign = [target.name for target in adapter.targets.values() if every.get(target.name) != target]
    if foreign:
        message = f"adapter {name!r}: expected names and shapes of this model, got others for {', '.join(foreign)}"
        raise UserError(f"{message}; give the right base")


def _require_shapes(arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]], path: str | None) -> None:
    faults: dict[ErrorCode, list[str]] = {
        "Missing": [name for name in wanted if name not in arrays],
        "Unexpected": [name for name in arrays if name not in wanted],
        "Shape": [
            f"{name} expected {wanted[name]}, got {array.shape}"
            for name, array in arrays.items()
            if name in wanted and array.shape != wanted[name]
        ],
    }
    found: list[tuple[ErrorCode, str]] = [(code, some(names)) for code, names in faults.items() if names]
    if found:
        lists = "; ".join(f"{code}: {names}" for code, names in found)
        raise FormatError(found[0][0], f"adapter: expected {len(wanted)} tensors; {lists}", path=path)


def _flat(tensors: Mapping[str, LoraTensors]) -> dict[str, np.ndarray]:
    return {f"{name}.{kind}": array for name, own in tensors.items() for kind, array in own.arrays().items()}
