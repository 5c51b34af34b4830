"""Arrays from a file to an adapter: every name and shape is looked at before anything is put together."""

from collections.abc import Mapping

import numpy as np

from llorch.config import ModelConfig
from llorch.errors import ErrorCode, FormatError
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig
from llorch.lora.targets import Target

SHOWN = 5  # names of one fault in a message


def assembled(config: LoraConfig, arrays: Mapping[str, np.ndarray], model: ModelConfig, *, where: object) -> Adapter:
    """Make a float32 adapter of the arrays of `Adapter.flat`; a FormatError names every tensor concerned."""
    try:
        wanted = wanted_shapes(config, model)
    except ValueError as error:
        raise FormatError("Missing", str(error), path=str(where)) from None
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
        raise FormatError(found[0][0], f"adapter: expected {len(wanted)} tensors; {lists}", path=str(where))
    tensors = {name: _tensors(arrays, name) for name in config.targets(model)}
    return checked(config, tensors, model, where=where)


def wanted_shapes(config: LoraConfig, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that such an adapter has, named and ordered as `Adapter.flat`; ValueError for an unknown module."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, target in config.targets(model).items():
        shapes |= {f"{name}.{kind}": shape for kind, shape in _shapes_of(config, target).items()}
    return shapes


def some(names: list[str]) -> str:
    """The first names of a list that may be long, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _shapes_of(config: LoraConfig, target: Target) -> dict[str, tuple[int, ...]]:
    rank = config.rank_of(target)
    shapes: dict[str, tuple[int, ...]] = {LORA_A: (rank, target.n_in), LORA_B: (target.n_out, rank)}
    return shapes | ({MAGNITUDE: (target.n_out,)} if config.use_dora else {})


def _tensors(arrays: Mapping[str, np.ndarray], name: str) -> LoraTensors:
    magnitude = arrays.get(f"{name}.{MAGNITUDE}")
    return LoraTensors(
        _float32(arrays[f"{name}.{LORA_A}"]),
        _float32(arrays[f"{name}.{LORA_B}"]),
        None if magnitude is None else _float32(magnitude),
    )


def _float32(array: np.ndarray) -> np.ndarray:
    return np.array(array, np.float32)  # a copy: the file may be closed, and training writes into it
