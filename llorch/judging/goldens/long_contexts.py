"""Goldens of long contexts: the last tokens of a long text, and a few tokens at far positions.

The float64 reference alone is stored, of the last `LAST` tokens. Each engine's float32 run is kept as its distance from
that reference, of which tolerances are made. Scores and probabilities of attention are left out: they grow with the
context, and whatever is wrong with them shows in the context vectors that are made of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.engines import ReferenceEngine, open_engine
from llorch.engines.interface import unsupported_reason
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.judging.goldens.store import Distances, GoldenStore, plain_distances, read_distances, refused
from llorch.judging.tolerances.forward import SCORES
from llorch.runtime.errors import UserError
from llorch.stages.comparison import Difference, measure
from llorch.stages.stage_ref import Pass, token_axis
from llorch.stages.table import Stage, key, keys

N_LONG = 1200  # tokens: more than any window, chunk or first growth of a cache
LAST = 16  # tokens that are stored and judged
N_FAR = 8
FAR_POSITIONS = (16_390, 131_080)  # beyond 2**14 and 2**17
_MARGIN = 2e-5  # of router logits, between the last expert that is chosen and the next one; float32 is off by 1e-6
_TRIES = 200
_FARTHEST = 5e-3  # of an engine from float64; float32 angles at position 131,080 cost 1.3e-3
_NAME, _RECORD = "long", "long.json"

Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LongGolden:
    """Stored goldens of long contexts.

    Attributes:
        cases: The inputs by name.
        reference: Case to stage key to the float64 reference, of the last tokens.
        distances: How far each engine's float32 run is from the reference.
        weights_sha256: Hash of the model.
    """

    cases: Mapping[str, Pass]
    reference: Mapping[str, Trace]
    distances: Distances
    weights_sha256: str


def compared_stages(config: ModelConfig) -> Iterator[tuple[str, Stage, int | None]]:
    """List the stages that are judged: key, stage and layer. Choices follow from the logits of the router."""
    return (one for one in keys(config) if one[1].name not in SCORES and not one[1].is_choice)


def last_tokens(stage: Stage, array: np.ndarray, n: int = LAST) -> np.ndarray:
    """Cut the last tokens out of a stage; a state has no tokens and stays whole."""
    axis = token_axis(stage)
    return array if axis is None else array[(slice(None),) * axis + (slice(-n, None),)]


def long_cases(config: ModelConfig, *, seed: int = 0) -> dict[str, Pass]:
    """Make the inputs that the context of a model holds, from random tokens."""
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(0, config.vocab_size, N_LONG).tolist())
    context = config.max_position_embeddings
    cases = {_NAME: Pass(ids)} if context >= N_LONG else {}
    return cases | {
        f"position {first}": Pass(ids[:N_FAR], first) for first in FAR_POSITIONS if first + N_FAR <= context
    }


def unable_for_long(engine: str, config: ModelConfig, this: Pass) -> str:
    """Say why an engine is no reference for a case; empty where it is one."""
    return unsupported_reason(engine, config, int(this.positions[-1]) + 1 if this.first_position else len(this.ids))


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
    kept = {case: _last_rows(weights.config, trace) for case, trace in reference.items()}
    distances: dict[str, dict[str, dict[str, Difference]]] = {}
    for name in engines:
        able = {case: this for case, this in cases.items() if not unable_for_long(name, weights.config, this)}
        if not able:
            continue
        with open_engine(name, path, n_threads=2) as engine:  # type: ignore[arg-type] (a name of an engine)
            shown = {case: _last_rows(weights.config, _trace(engine, this)) for case, this in able.items()}
        distances[name] = {case: _distances(kept[case], trace) for case, trace in shown.items()}
        _refuse_far(path, name, distances[name])
    return LongGolden(cases, kept, distances, weights_sha256)


def _refuse_far(path: Path, engine: str, distances: Mapping[str, Mapping[str, Difference]]) -> None:
    """Refuse (ValueError) an engine that is no reference: a tolerance made of its distance could not fail."""
    for case, found in distances.items():
        for name, each in found.items():
            if not each.error <= _FARTHEST:
                message = f"{engine}, {case} {name}: expected at most {_FARTHEST} from float64, got {each.describe()}"
                raise UserError(f"{path}: {message}")


def _with_clear_choices(engine: ReferenceEngine, weights: Weights) -> tuple[dict[str, Pass], dict[str, Trace]]:
    """Return the first random texts in which no expert is chosen by a narrow margin, and their traces."""
    for seed in range(_TRIES):
        cases = long_cases(weights.config, seed=seed)
        reference = {case: _trace(engine, this) for case, this in cases.items()}
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


def _trace(engine: ReferenceEngine, this: Pass) -> Trace:
    return engine.trace(this.ids, first_position=this.first_position)


def _last_rows(config: ModelConfig, trace: Trace) -> dict[str, np.ndarray]:
    return {name: last_tokens(stage, trace[name]).copy() for name, stage, _ in compared_stages(config)}


def _distances(reference: Trace, shown: Trace) -> dict[str, Difference]:
    return {name: measure(array.astype(np.float64), reference[name]) for name, array in shown.items()}


def save_long(folder: Path, golden: LongGolden) -> None:
    """Write goldens of long contexts; the same content gives the same bytes."""
    arrays = {f"{case}/{name}": array for case, trace in golden.reference.items() for name, array in trace.items()}
    record = {
        "cases": {name: asdict(case) for name, case in golden.cases.items()},
        "distances": plain_distances(golden.distances),
        "weights_sha256": golden.weights_sha256,
    }
    GoldenStore(folder, _RECORD).write(record, {_NAME: arrays}, indent=None)


def read_long(folder: Path) -> LongGolden:
    """Read goldens of long contexts.

    Args:
        folder: Written by `save_long`.

    Returns:
        The goldens.

    Raises:
        FileNotFoundError: A file is missing; a missing golden is a failure, never a pass.
        ValueError: A case has no engine's distance, of which its tolerances are made.
    """
    store = GoldenStore(folder, _RECORD)
    record, arrays = store.record(), store.arrays([_NAME])[_NAME]
    reference: dict[str, dict[str, np.ndarray]] = {}
    for full, array in arrays.items():
        case, name = full.split("/")
        reference.setdefault(case, {})[name] = array
    distances = read_distances(record["distances"])
    cases = {name: Pass(tuple(case["ids"]), case["first_position"]) for name, case in record["cases"].items()}
    for case in cases:
        if not any(case in found for found in distances.values()):
            raise refused(folder, f"expected an engine's distance for {case}, got no engine")
    return LongGolden(cases, reference, distances, record["weights_sha256"])
