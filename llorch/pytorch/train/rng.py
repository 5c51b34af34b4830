"""The state of every random generator that a training run can draw from, as arrays of bytes.

The global generators of Python and NumPy, and torch's of the CPU and, once CUDA is in use, of every CUDA device.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

ALWAYS = ("rng/python", "rng/numpy", "rng/torch")


def seed_rng(seed: int) -> None:
    """Put every generator into a state that depends on the seed, at least 0, only; NumPy takes its last 32 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def capture_rng() -> dict[str, UInt8[np.ndarray, " n_bytes"]]:
    """Read the states: those of `ALWAYS` and, where CUDA is in use, `rng/cuda:0` and so on."""
    states = {
        "rng/python": _bytes_of(random.getstate()),
        "rng/numpy": _bytes_of(np.random.get_state(legacy=False)),  # noqa: NPY002 (the global one is what is saved)
        "rng/torch": torch.get_rng_state().numpy().copy(),
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        states[f"rng/cuda:{index}"] = torch.cuda.get_rng_state(index).numpy().copy()
    return states


def restore_rng(tensors: Mapping[str, np.ndarray]) -> None:
    """Set captured states, after everything that draws at start-up; one without its device is refused."""
    cuda = [name for name in tensors if name.startswith("rng/cuda:")]
    there = [f"rng/cuda:{index}" for index in range(torch.cuda.device_count())]
    lacking = [*({*ALWAYS} - tensors.keys()), *({*cuda} - {*there})]
    if lacking:
        raise ValueError(f"snapshot: no generator for {', '.join(sorted(lacking))}; resume on the devices of the run")
    version, internal, gauss = _value_of(tensors["rng/python"])
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_value_of(tensors["rng/numpy"]))  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(tensors["rng/torch"].copy()))
    for name in cuda:
        torch.cuda.set_rng_state(torch.from_numpy(tensors[name].copy()), int(name.partition(":")[2]))


def _bytes_of(state: object) -> UInt8[np.ndarray, " n_bytes"]:
    return np.frombuffer(json.dumps(state, default=lambda array: array.tolist()).encode(), np.uint8)


def _value_of(state: np.ndarray) -> Any:
    return json.loads(state.tobytes())
