"""Goldens of long contexts: the last tokens of a long text, and a few tokens at far positions.

Only the float64 reference is stored, for the last `LAST` tokens. Of each engine's float32 run, only the distance from
this reference is stored; tolerances are derived from it. Scores and probabilities of attention are not stored, because
they grow with the context. Their errors show in the context vectors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.goldens.store import Distances, GoldenStore, golden_error, read_distances, write_distances
from llorch.judging.tolerances.forward import SCORES
from llorch.stages.stage_ref import Pass, token_axis
from llorch.stages.table import Stage, keys

N_LONG = 1200  # tokens: more than any window, chunk or first growth of a cache
LAST = 16  # number of tokens that are stored and compared
N_FAR = 8
FAR_POSITIONS = (16_390, 131_080)  # beyond 2**14 and 2**17
_NAME, _RECORD = "long", "long.json"

Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LongGolden:
    """Stored goldens of long contexts.

    Attributes:
        cases: Inputs by name: `long`, and `position 16390` for tokens that start there.
        reference: By case and stage key: float64 reference of the last tokens.
        distances: Distance of each engine's float32 run from the reference.
        weights_sha256: Hash of the model.
    """

    cases: Mapping[str, Pass]
    reference: Mapping[str, Trace]
    distances: Distances
    weights_sha256: str


def compared_stages(config: ModelConfig) -> Iterator[tuple[str, Stage, int | None]]:
    """Yield key, stage and layer of the compared stages; expert selections are left out: router logits decide them."""
    return (entry for entry in keys(config) if entry[1].name not in SCORES and not entry[1].is_selection)


def last_tokens(stage: Stage, array: np.ndarray, n_tokens: int = LAST) -> np.ndarray:
    """Return the last tokens of a stage; a state has no token axis and is returned unchanged."""
    axis = token_axis(stage)
    return array if axis is None else array[(slice(None),) * axis + (slice(-n_tokens, None),)]


def long_cases(config: ModelConfig, *, seed: int = 0) -> dict[str, Pass]:
    """Create inputs of random tokens, as far as the context of the model allows."""
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(0, config.vocab_size, N_LONG).tolist())
    context = config.max_position_embeddings
    cases = {_NAME: Pass(ids)} if context >= N_LONG else {}
    positions = [first for first in FAR_POSITIONS if first + N_FAR <= context]
    return cases | {f"position {first}": Pass(ids[:N_FAR], first) for first in positions}


def save_long(folder: Path, golden: LongGolden) -> None:
    """Write goldens of long contexts; the same content gives the same bytes."""
    arrays = {f"{case}/{name}": array for case, trace in golden.reference.items() for name, array in trace.items()}
    record = {
        "cases": {name: asdict(case) for name, case in golden.cases.items()},
        "distances": write_distances(golden.distances),
        "weights_sha256": golden.weights_sha256,
    }
    GoldenStore(folder, _RECORD).write(record, {_NAME: arrays}, indent=None)


def read_long(folder: Path) -> LongGolden:
    """Read the goldens that `save_long` wrote. A missing golden is a failure, never a pass.

    Raises:
        FileNotFoundError: A file is missing.
        UserError: A case has no engine's distance, so it has no tolerance.
    """
    store = GoldenStore(folder, _RECORD)
    record, arrays = store.record(), store.arrays([_NAME])[_NAME]
    reference: dict[str, dict[str, np.ndarray]] = {}
    for array_name, array in arrays.items():
        case, name = array_name.split("/")
        reference.setdefault(case, {})[name] = array
    distances = read_distances(record["distances"])
    cases = {name: Pass(tuple(case["ids"]), case["first_position"]) for name, case in record["cases"].items()}
    for case in cases:
        if not any(case in distance_by_case for distance_by_case in distances.values()):
            raise golden_error(folder, f"expected an engine's distance for {case}, got no engine")
    return LongGolden(cases, reference, distances, record["weights_sha256"])
