"""Stages run one by one from the stage table: alone on a golden's input, or one after the other.

*Isolated*: a stage is fed what the golden was fed, so an error is its own. A golden may be cut at a token: the rows
before it become the cache, the rows from it on are what a second pass has to reproduce.
*Chained*: every stage is fed our own results. The chain makes the numbers of `forward`, and lets one stage be replaced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.files import Weights
from llorch.stages import Compute, Stage, StageInputs, input_key, key, keys


@dataclass(frozen=True)
class Pass:
    """The tokens of one forward pass.

    Attributes:
        ids: Token ids.
        first_position: Position of the first one.
    """

    ids: tuple[int, ...]
    first_position: int = 0

    @property
    def positions(self) -> np.ndarray:
        """Absolute positions of the tokens."""
        return np.arange(self.first_position, self.first_position + len(self.ids))

    def after(self, n_cached: int) -> "Pass":
        """The pass that remains when the first `n_cached` tokens are in the cache."""
        return Pass(self.ids[n_cached:], self.first_position + n_cached)


def isolated(
    stage: Stage,
    layer: int | None,
    golden: Mapping[str, np.ndarray],
    weights: Weights,
    whole: Pass,
    *,
    n_cached: int = 0,
    compute: Compute | None = None,
    reads: Sequence[str] = (),
) -> np.ndarray:
    """Compute one stage from the golden's own inputs.

    Args:
        stage: The stage.
        layer: Its layer, or None.
        golden: The trace that the inputs are taken from.
        weights: The model; its dtype is the dtype of the computation.
        whole: The pass that the golden recorded.
        n_cached: Tokens that count as cached already.
        compute: Used in place of the stage's own op.
        reads: Stages that it is given beside the stage's own inputs.

    Returns:
        The stage's array for the tokens after the cached ones.
    """
    config = weights.config
    arrays = {
        name: _rows(golden[input_key(name, layer, config)], name, n_cached).astype(_dtype(name, weights))
        for name in (*stage.input_names(config), *reads)
    }
    if layer is not None:
        for past, cache in (("past_k", "k_cache"), ("past_v", "v_cache")):
            if key(cache, layer) in golden:  # a golden of the products alone has no caches
                arrays[past] = golden[key(cache, layer)][:, :n_cached].astype(weights.cache_dtype)
    return (compute or stage.compute)(_inputs(weights, layer, arrays, whole.after(n_cached)))


def chained(
    weights: Weights,
    this: Pass,
    *,
    past: Mapping[str, np.ndarray] | None = None,
    replace: Mapping[str, Compute] | None = None,
    reads: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Run the whole table on our own results.

    Args:
        weights: The model.
        this: The tokens of this pass.
        past: Trace of the pass before it, whose caches are continued; None starts empty.
        replace: Stage name to the op used in its place.
        reads: Stages that replaced ops are given beside the stage's own inputs.

    Returns:
        The trace.
    """
    config = weights.config
    empty = np.empty((config.n_kv_heads, 0, config.head_dim), weights.cache_dtype)
    trace: dict[str, np.ndarray] = {}
    for trace_key, stage, layer in keys(config):
        names = (*stage.input_names(config), *(reads if stage.name in (replace or {}) else ()))
        arrays = {name: trace[input_key(name, layer, config)] for name in names}
        if layer is not None:
            arrays["past_k"] = past[key("k_cache", layer)] if past is not None else empty
            arrays["past_v"] = past[key("v_cache", layer)] if past is not None else empty
        compute = (replace or {}).get(stage.name, stage.compute)
        trace[trace_key] = compute(_inputs(weights, layer, arrays, this))
    return trace


def cut(stage: Stage, array: np.ndarray, n_cached: int) -> np.ndarray:
    """The part of a whole pass's stage that a pass after `n_cached` cached tokens has to reproduce."""
    return _rows(array, stage.name, n_cached)


def _dtype(name: str, weights: Weights) -> type[np.floating]:
    return weights.cache_dtype if name in ("k_cache", "v_cache") else weights.dtype


def _rows(array: np.ndarray, name: str, n_cached: int) -> np.ndarray:
    if name in ("k_cache", "v_cache"):
        return array  # the whole context
    if name in ("attn_scores", "attn_probs"):
        return array[:, n_cached:]  # (heads, seq, ctx)
    return array[n_cached:]


def _inputs(weights: Weights, layer: int | None, arrays: Mapping[str, np.ndarray], this: Pass) -> StageInputs:
    return StageInputs(
        config=weights.config,
        weights=weights if layer is None else weights.layer(layer),
        arrays=arrays,
        ids=np.asarray(this.ids),
        positions=this.positions,
        dtype=weights.dtype,
        cache_dtype=weights.cache_dtype,
    )
