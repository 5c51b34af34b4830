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
    """Refuse a capture that is not exactly the expected set of stages.

    Args:
        captured: What the engine's hooks delivered.
        config: The model.
        n_tokens: Tokens of the run, which started with an empty cache.
        engine: Its name, for the error message.
        dtype: That every array must have.

    Returns:
        The trace in the order of the stage table, every array C-contiguous.

    Raises:
        RuntimeError: Stages are missing or unexpected, or have another shape or dtype; all are listed.
    """
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
    """Refuse token ids that the model does not have.

    Raises:
        ValueError: There are none, or one is out of range.
    """
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < config.vocab_size), None)
    if not ids or wrong is not None:
        got = "none" if wrong is None else f"{ids[wrong]} at index {wrong}"
        raise ValueError(f"ids: expected one or more from 0 to {config.vocab_size - 1}, got {got}")
