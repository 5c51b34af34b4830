"""Passes that an engine ran before its dump: their caches, and the stages that cannot be checked without them.

A dump of one decode step has the keys and values of the whole context, so attention can be checked. No dump has the
earlier state of a delta net. A stage computed from that state has the verdict NOT RUN, and so have all stages after
it, up to the next dumped stage.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from llorch.diagnosis.replay import Past, Replay
from llorch.diagnosis.verdict import StageCheck
from llorch.judging.tolerances.forward import CACHES, STATES
from llorch.judging.tolerances.rounding import CHAINED
from llorch.stages.comparison import FAIL
from llorch.stages.table import Stage, input_keys, key

N_RUNS = CHAINED + 1  # runs of which variances are propagated: on the engine's inputs, and llorch's own


def first_past(replay: Replay, *, from_dump: bool = True) -> Past:
    """Read the caches before the first pass from the dumped caches of that pass; zeros where it has none.

    For `from_dump` see `Past`: it concerns later passes.
    """
    cached = {layer: _cached_before(replay, layer) for layer in range(replay.config.n_layers)}
    rounding = replay.weights.cache_rounding
    return Past(replay.config, replay.weights.dtype, cached=cached, from_dump=from_dump, rounding=rounding)


def count_unchecked(replay: Replay) -> int:
    """Count the tokens before the dump whose keys or values it has; 0 if its caches show no earlier tokens."""
    caches = (name for name, (stage, _) in replay.stages.items() if stage.name in CACHES)
    return replay.n_before if any((0, name) in replay.dump.dumped for name in caches) else 0


def first_variances(replay: Replay, past: Past) -> dict[str, np.ndarray]:
    """Return zero variances, by stage key, for the cached keys and values that come from the engine."""
    if not replay.n_before:
        return {}
    n_runs = N_RUNS + replay.weights.numerics.rounds_activations  # a third run counts flips to other integer codes
    caches = {key(f"{x}_cache", i): past.caches(i)[f"past_{x}"] for i in range(replay.config.n_layers) for x in "kv"}
    return {name: np.zeros((n_runs, *array.shape), np.float32) for name, array in caches.items()}


def _cached_before(replay: Replay, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the keys and values in a layer's cache before the first pass; zeros if the dump lacks them."""
    config, n = replay.config, replay.n_before
    empty = np.zeros((config.n_kv_heads, n, config.head_dim), replay.weights.dtype)
    if not n:
        return empty, empty
    dumped = (replay.fed(0, key(stage, layer)) if key(stage, layer) in replay.stages else None for stage in _CACHES)
    keys, values = (empty if array is None else np.nan_to_num(array[:, :n], nan=0.0) for array in dumped)
    return keys, values


_CACHES = ("k_cache", "v_cache")  # `CACHES` is a set without an order


def memory_stage(stage: Stage) -> str:
    """Return the stage whose array carries values of earlier passes into `stage`; empty if there is none."""
    return STATES.get(stage.name, stage.name if stage.name in CACHES else "")


def unknown_stages(replay: Replay, *, fed: bool = True) -> Iterator[frozenset[str]]:
    """Yield, for each pass, the stage keys that cannot be computed without the passes before the dump.

    If `fed`, dumped stages replace computed ones.
    """
    memories = {key(memory, layer) for stage, layer in replay.stages.values() if (memory := memory_stage(stage))}
    lost = {name for name in memories if replay.n_before and not _shows_past(replay, name)}  # unknown caches, states
    for n_pass in range(len(replay.dump.passes)):
        unknown: set[str] = set()
        for name, (stage, layer) in replay.stages.items():
            inputs = input_keys(stage, layer, replay.config)
            hidden = (input_name for input_name in inputs if not fed or replay.fed(n_pass, input_name) is None)
            if key(memory_stage(stage), layer) in lost and not _is_filled(replay, n_pass, stage):
                unknown.add(name)
            elif not unknown.isdisjoint(hidden):
                unknown.add(name)
        lost = {name for name in memories & unknown if not fed or replay.fed(n_pass, name) is None}
        yield frozenset(unknown)


def _shows_past(replay: Replay, name: str) -> bool:
    """Tell if `name` is a cache that the first pass of the dump shows completely."""
    return replay.stages[name][0].name in CACHES and replay.fed(0, name) is not None


def _is_filled(replay: Replay, n_pass: int, stage: Stage) -> bool:
    """Tell if a stage is the state of a convolution, and the pass has enough tokens to replace all of it."""
    net = replay.config.delta_net
    return stage.name == "conv_state" and net is not None and len(replay.tokens(n_pass).ids) >= net.conv_kernel - 1


def reads_past(replay: Replay, stage_keys: Sequence[str]) -> bool:
    """Tell if one of the stages reads caches or states of earlier passes."""
    return any(memory_stage(replay.stages[stage_key][0]) for stage_key in stage_keys)


def has_no_past(checks: Sequence[StageCheck], replay: Replay) -> bool:
    """Tell if a wrong stage of the first pass proves that no token comes before the dump.

    The pass's first token also reads the caches. Earlier tokens would change its row, so a right row disproves them.
    """
    wrong_checks = (check for check in checks if check.n_pass == 0 and check.verdict == FAIL)
    return any(_first_token_is_right(check) for check in wrong_checks if reads_past(replay, check.ran_since))


def _first_token_is_right(check: StageCheck) -> bool:
    """Tell if the first token's error is within its tolerance; False without errors by token."""
    errors, tolerances = check.isolated.difference.tokens, check.isolated.tolerance.tokens
    if errors is None or tolerances is None:
        return False
    return bool(errors[0] <= np.broadcast_to(tolerances, errors.shape)[0])
