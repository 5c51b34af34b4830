"""Make the goldens of long contexts: run the engines and the float64 reference on random texts.

llorch computes nothing here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llorch.engines import ReferenceEngine, open_engine
from llorch.engines.interface import unsupported_reason
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.judging.goldens.long_contexts import LongGolden, Trace, compared_stages, last_tokens, long_cases
from llorch.runtime.errors import UserError
from llorch.stages.comparison import Difference, measure
from llorch.stages.stage_ref import Pass
from llorch.stages.table import key

_MARGIN = 2e-5  # of router logits, between the last expert that is chosen and the next one; float32 is off by 1e-6
_TRIES = 200
_FARTHEST = 5e-3  # of an engine from float64; float32 angles at position 131,080 cost 1.3e-3


def unable_for_long(engine: str, config: ModelConfig, case: Pass) -> str:
    """Return the reason why an engine is no reference for a case; empty if it is one."""
    return unsupported_reason(engine, config, int(case.positions[-1]) + 1 if case.first_position else len(case.ids))


def make_long(path: Path, engines: Sequence[str], weights_sha256: str) -> LongGolden:
    """Run the engines and the float64 reference.

    Args:
        path: A built-in model.
        engines: Names of reference engines.
        weights_sha256: Hash of the model.

    Returns:
        The goldens; no expert is chosen by rounding in them.

    Raises:
        ValueError: No random text has clear choices of experts.
    """
    weights = open_weights(path)
    with open_engine("transformers", path, dtype="float64") as engine:
        cases, reference = _with_clear_choices(engine, weights)
    reference_rows = {case: _last_rows(weights.config, trace) for case, trace in reference.items()}
    distances: dict[str, dict[str, dict[str, Difference]]] = {}
    for name in engines:
        able = {case: run for case, run in cases.items() if not unable_for_long(name, weights.config, run)}
        if not able:
            continue
        with open_engine(name, path, n_threads=2) as engine:  # type: ignore[arg-type] (a name of an engine)
            rows = {case: _last_rows(weights.config, _trace(engine, run)) for case, run in able.items()}
        distances[name] = {case: _distances(reference_rows[case], trace) for case, trace in rows.items()}
        refuse_far(path, name, distances[name])
    return LongGolden(cases, reference_rows, distances, weights_sha256)


def refuse_far(path: Path, engine: str, distances: Mapping[str, Mapping[str, Difference]]) -> None:
    """Refuse (ValueError) an engine that is no reference: a tolerance derived from its distance could never fail."""
    for case, by_tensor in distances.items():
        for name, diff in by_tensor.items():
            if not diff.error <= _FARTHEST:
                message = f"{engine}, {case} {name}: expected at most {_FARTHEST} from float64, got {diff.describe()}"
                raise UserError(f"{path}: {message}")


def _with_clear_choices(engine: ReferenceEngine, weights: Weights) -> tuple[dict[str, Pass], dict[str, Trace]]:
    """Return the first random texts in which no expert is chosen by a narrow margin, and their traces."""
    for seed in range(_TRIES):
        cases = long_cases(weights.config, seed=seed)
        reference = {case: _trace(engine, run) for case, run in cases.items()}
        if all(_smallest_margin(weights.config, trace) >= _MARGIN for trace in reference.values()):
            return cases, reference
    raise UserError(f"{weights.path}: expected a text without ties of experts, got none in {_TRIES} random texts")


def _smallest_margin(config: ModelConfig, trace: Trace) -> float:
    """Measure the smallest gap between the last chosen router logit and the next, as a share of the largest logit."""
    margins = [np.inf]
    for layer in range(config.n_layers):
        logits = trace.get(key("router_logits", layer))
        if logits is not None and config.experts is not None:
            n = config.experts.n_experts_per_token
            ranked = -np.sort(-logits, axis=-1)
            margins.append(float((ranked[:, n - 1] - ranked[:, n]).min() / np.abs(logits).max()))
    return min(margins)


def _trace(engine: ReferenceEngine, case: Pass) -> Trace:
    return engine.trace(case.ids, first_position=case.first_position)


def _last_rows(config: ModelConfig, trace: Trace) -> dict[str, np.ndarray]:
    return {name: last_tokens(stage, trace[name]).copy() for name, stage, _ in compared_stages(config)}


def _distances(reference: Trace, engine_rows: Trace) -> dict[str, Difference]:
    return {name: measure(array.astype(np.float64), reference[name]) for name, array in engine_rows.items()}
