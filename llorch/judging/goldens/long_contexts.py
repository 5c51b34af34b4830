"""Goldens of long contexts: the last tokens of a long text, and a few tokens at far positions.

The float64 reference alone is stored, of the last `LAST` tokens. Each engine's float32 run is kept as its distance from
that reference, of which tolerances are made. Scores and probabilities of attention are left out: they grow with the
context, and whatever is wrong with them shows in the context vectors that are made of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.goldens.store import Distances, GoldenStore, plain_distances, read_distances, refused
from llorch.judging.tolerances.forward import SCORES
from llorch.stages.stage_ref import Pass, token_axis
from llorch.stages.table import Stage, keys

N_LONG = 1200  # tokens: more than any window, chunk or first growth of a cache
LAST = 16  # tokens that are stored and judged
N_FAR = 8
FAR_POSITIONS = (16_390, 131_080)  # beyond 2**14 and 2**17
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
    return (row for row in keys(config) if row[1].name not in SCORES and not row[1].is_choice)


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
    positions = [first for first in FAR_POSITIONS if first + N_FAR <= context]
    return cases | {f"position {first}": Pass(ids[:N_FAR], first) for first in positions}


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
    """Read what `save_long` wrote. A missing golden is a failure, never a pass.

    Raises:
        FileNotFoundError: A file is missing.
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
