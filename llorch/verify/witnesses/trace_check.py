"""The checks at both ends of a producer: token ids of the model, and exactly its stages, each in its shape."""

from collections.abc import Mapping, Sequence

import numpy as np

from llorch import stages
from llorch.config import ModelConfig

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
    faults = [f"{name} is missing" for name in shapes if name not in captured]
    faults += [f"{name} is unexpected" for name in captured if name not in shapes]
    for name, array in captured.items():
        if name in shapes and (array.shape != shapes[name] or array.dtype != dtype):
            faults.append(f"{name} must be {np.dtype(dtype)} {shapes[name]}, got {array.dtype} {array.shape}")
    if faults:
        raise RuntimeError(f"{engine}: the capture is not the expected set of stages: {'; '.join(faults)}")
    return {name: np.ascontiguousarray(captured[name]) for name in shapes}


def check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    """Refuse token ids that the model does not have."""
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < config.vocab_size), None)
    if not ids or wrong is not None:
        got = "none" if wrong is None else f"{ids[wrong]} at index {wrong}"
        raise ValueError(f"ids: expected one or more from 0 to {config.vocab_size - 1}, got {got}")
