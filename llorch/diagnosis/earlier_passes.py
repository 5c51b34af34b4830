"""Passes that an engine ran before those of its dump: the caches after them, and stages that need more than those.

A dump of one step shows the keys and values of the whole context, so that attention can be judged. No dump has
the state that a delta net had before. A stage made from that state is NOT RUN, and so is everything after it, up to
the next stage that the dump shows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from llorch.diagnosis.replay import Past, Replay
from llorch.diagnosis.verdict import StageCheck
from llorch.judging.tolerances.forward import CACHES, STATES
from llorch.judging.tolerances.rounding import CHAINED
from llorch.stages.comparison import FAIL
from llorch.stages.table import Stage, input_keys, key

N_RUNS = CHAINED + 1  # of variances


def first_past(replay: Replay, *, as_given: bool = True) -> Past:
    """Read the caches as they were before the first pass, from what that pass shows; zeros for the rest."""
    held = {layer: _cached_before(replay, layer) for layer in range(replay.config.n_layers)}
    rounding = replay.weights.cache_rounding
    return Past(replay.config, replay.weights.dtype, held=held, as_given=as_given, rounding=rounding)


def first_variances(replay: Replay, past: Past) -> dict[str, np.ndarray]:
    """Return zero variances, by trace key, for the cached keys and values that come from the engine."""
    if not replay.n_before:
        return {}
    n_runs = N_RUNS + replay.weights.numerics.rounds_activations
    held = {key(f"{x}_cache", i): past.before(i)[f"past_{x}"] for i in range(replay.config.n_layers) for x in "kv"}
    return {name: np.zeros((n_runs, *array.shape), np.float32) for name, array in held.items()}


def _cached_before(replay: Replay, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the keys and values that a layer's cache held before the first pass; zeros if the dump lacks them."""
    config, n = replay.config, replay.n_before
    empty = np.zeros((config.n_kv_heads, n, config.head_dim), replay.weights.dtype)
    if not n:
        return empty, empty
    shown = (replay.fed(0, key(stage, layer)) if key(stage, layer) in replay.stages else None for stage in _KV)
    keys, values = (empty if array is None else np.nan_to_num(array[:, :n], nan=0.0) for array in shown)
    return keys, values


_KV = ("k_cache", "v_cache")


def memory_of(stage: Stage) -> str:
    """Return the stage that holds the values of earlier passes that a stage reads; empty if it reads none."""
    return STATES.get(stage.name, stage.name if stage.name in CACHES else "")


def unknown_stages(replay: Replay, *, fed: bool = True) -> Iterator[frozenset[str]]:
    """Yield the trace keys of each pass that nobody can compute without the passes before the dump.

    If `fed`, stages of the dump replace the computed ones.
    """
    memories = {key(memory, layer) for stage, layer in replay.stages.values() if (memory := memory_of(stage))}
    lost = {name for name in memories if replay.n_before and not _shows_past(replay, name)}
    for n_pass in range(len(replay.dump.passes)):
        unknown: set[str] = set()
        for name, (stage, layer) in replay.stages.items():
            inputs = input_keys(stage, layer, replay.config)
            hidden = (each for each in inputs if not fed or replay.fed(n_pass, each) is None)
            if key(memory_of(stage), layer) in lost and not _is_filled(replay, n_pass, stage):
                unknown.add(name)
            elif not unknown.isdisjoint(hidden):
                unknown.add(name)
        lost = {name for name in memories & unknown if not fed or replay.fed(n_pass, name) is None}
        yield frozenset(unknown)


def _shows_past(replay: Replay, name: str) -> bool:
    """Tell if `name` is a cache that the first pass of the dump shows completely."""
    return replay.stages[name][0].name in CACHES and replay.fed(0, name) is not None


def _is_filled(replay: Replay, n_pass: int, stage: Stage) -> bool:
    """Tell if a pass replaces the whole state of a convolution."""
    net = replay.config.delta_net
    return stage.name == "conv_state" and net is not None and len(replay.tokens(n_pass).ids) >= net.conv_kernel - 1


def reads_past(replay: Replay, places: Sequence[str]) -> bool:
    """Tell if one of some stages reads the caches or states of earlier passes."""
    return any(memory_of(replay.stages[place][0]) for place in places)


def has_no_past(results: Sequence[StageCheck], replay: Replay) -> bool:
    """Tell if a wrong stage of the first pass shows that no token comes before the dump.

    The first token reads the caches too. A missing past would change its row, so a right row proves that there is none.
    """
    wrong = (result for result in results if result.n_pass == 0 and result.verdict == FAIL)
    return any(_first_token_is_right(result) for result in wrong if reads_past(replay, result.ran_since))


def _first_token_is_right(result: StageCheck) -> bool:
    """Tell if the first token's error is within its tolerance; False without errors by token."""
    errors, limits = result.isolated.difference.tokens, result.isolated.tolerance.tokens
    if errors is None or limits is None:
        return False
    return bool(errors[0] <= np.broadcast_to(limits, errors.shape)[0])
