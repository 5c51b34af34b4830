"""An adapter as validated arrays, which every file format is read into and written from.

lora_A (r, in)   lora_B (out, r)   embedding: in = vocabulary size, out = hidden_size; experts: see `targets`
Canonical names are llorch's names of the adapted matrices: `layers.3.q_proj`.
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
_SHOWN = 5  # names listed for one fault in a message


@dataclass(frozen=True)
class LoraTensors:
    """Trained tensors of one matrix, float32 for any dtype of the base."""

    lora_A: Float32[np.ndarray, "r in"]
    lora_B: Float32[np.ndarray, "out r"]
    magnitude: Float32[np.ndarray, " out"] | None = None  # DoRA only

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the existing tensors by name."""
        arrays = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.magnitude}
        return {name: array for name, array in arrays.items() if array is not None}


@dataclass(frozen=True)
class Adapter:
    """Adapter with validated tensors; make it with `checked` or `assembled`."""

    config: LoraConfig
    targets: Mapping[str, LoraTarget]  # by canonical name, in the order of the forward pass
    tensors: Mapping[str, LoraTensors]  # by the same names

    @property
    def n_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(array.size for array in self.flat().values())

    @property
    def is_multimodal(self) -> bool:
        """True if a PEFT directory uses the module names of the multimodal model."""
        return any(target.multimodal_path for target in self.targets.values())

    def scaling(self, name: str) -> float:
        """Return the scaling of one matrix's adapter, the factor s in W + s B A."""
        return self._scalings[name]

    @cached_property
    def _scalings(self) -> dict[str, float]:
        return {name: self.config.scaling_of(target) for name, target in self.targets.items()}

    def flat(self) -> dict[str, np.ndarray]:
        """Return every trained tensor by flat name: `layers.3.q_proj.lora_A`."""
        return _flat(self.tensors)


def checked(
    config: LoraConfig, tensors: Mapping[str, LoraTensors], model: ModelConfig, *, where: object = None
) -> Adapter:
    """Make an adapter from tensors by canonical name; errors as `assembled`, with the path `where` in messages."""
    return assembled(config, _flat(tensors), model, where=where, copy=False)


def assembled(
    config: LoraConfig, arrays: Mapping[str, np.ndarray], model: ModelConfig, *, where: object, copy: bool = True
) -> Adapter:
    """Make a float32 adapter from arrays named as in `Adapter.flat`, in any floating-point dtype.

    With `copy`, the file may be closed and training may write into them. FormatError (path `where`) if they are wrong.
    """
    path = None if where is None else str(where)
    targets = require_targets(config, model, path)
    _require_shapes(arrays, expected_shapes(config, model), path)
    flat = {name: np.array(array, np.float32, copy=copy or None) for name, array in arrays.items()}
    bad = [name for name, array in flat.items() if not np.isfinite(array).all()]
    if bad:
        message = f"adapter: expected finite numbers, got NaN or infinity in {shorten(sorted(bad))}"
        raise FormatError("NonFinite", message, path=path)
    tensors = {
        name: LoraTensors(flat[f"{name}.{LORA_A}"], flat[f"{name}.{LORA_B}"], flat.get(f"{name}.{MAGNITUDE}"))
        for name in targets
    }
    return Adapter(config, targets, tensors)


def require_targets(config: LoraConfig, model: ModelConfig, path: str | None) -> Mapping[str, LoraTarget]:
    """Return the matrices that an adapter changes; FormatError Missing if it names one that the model lacks."""
    try:
        return config.targets(model)
    except ValueError as error:
        raise FormatError("Missing", str(error), path=path) from None


def expected_shapes(config: LoraConfig, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the required shapes of an adapter's tensors by flat name; UserError for an unknown module."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, target in config.targets(model).items():
        rank = config.rank_of(target)
        shapes |= {f"{name}.{LORA_A}": target.shape_A(rank), f"{name}.{LORA_B}": target.shape_B(rank)}
        shapes |= {f"{name}.{MAGNITUDE}": (target.n_out,)} if config.use_dora else {}
    return shapes


def shorten(names: list[str]) -> str:
    """Shorten a list of names to the first ones, for a message."""
    rest_count = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest_count


def require_free(name: str, used_names: list[str]) -> None:
    """Refuse (UserError) a name that is in use, or has other characters than letters, digits, _ and -."""
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"adapter: expected a name of letters, digits, _ and -, got {name!r}")
    if name in used_names:
        raise UserError(f"adapter: the name {name!r} is in use already; remove that adapter or choose another name")


def require_known(name: str | None, loaded_names: list[str]) -> None:
    """Refuse (UserError) the name of an adapter that is not loaded; None means no adapter."""
    if name is not None and name not in loaded_names:
        raise UserError(f"adapter: expected one of {', '.join(loaded_names) or 'none'}, got {name!r}")


def require_fits(name: str, adapter: Adapter, model: ModelConfig) -> None:
    """Refuse (UserError) an adapter whose matrices differ from this model's in name or shape."""
    model_targets = targets_of(model)
    mismatched = [target.name for target in adapter.targets.values() if model_targets.get(target.name) != target]
    if mismatched:
        message = f"adapter {name!r}: expected names and shapes of this model, got others for {', '.join(mismatched)}"
        raise UserError(f"{message}; give the right base")


def _require_shapes(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], path: str | None) -> None:
    faults: dict[ErrorCode, list[str]] = {
        "Missing": [name for name in shapes if name not in arrays],
        "Unexpected": [name for name in arrays if name not in shapes],
        "Shape": [
            f"{name} expected {shapes[name]}, got {array.shape}"
            for name, array in arrays.items()
            if name in shapes and array.shape != shapes[name]
        ],
    }
    fault_lists: list[tuple[ErrorCode, str]] = [(code, shorten(names)) for code, names in faults.items() if names]
    if fault_lists:
        lists = "; ".join(f"{code}: {names}" for code, names in fault_lists)
        raise FormatError(fault_lists[0][0], f"adapter: expected {len(shapes)} tensors; {lists}", path=path)


def _flat(tensors: Mapping[str, LoraTensors]) -> dict[str, np.ndarray]:
    return {f"{name}.{kind}": array for name, lora in tensors.items() for kind, array in lora.arrays().items()}
