"""Other tools' rules on the same dumps: reimplemented here, with all inputs that this benchmark can give.

    skill    the localisation and classes of AWS Neuron's equivalence skill (aws-neuron/neuron-agentic-development,
             skills/neuron-framework-equivalence/scripts/run_stage3.py, seen in August 2026): the error over that of a
             bfloat16 run, and words in the name of the component
    fixed    first stage whose relative error exceeds 1e-3
    cosine   first stage whose cosine with the right array is below 0.99

All rules get the dump in llorch's layout and names, with a right run in float64 and one in bfloat16: the benchmark
compares the rules, not how they read a dump.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.diagnosis import arithmetic as how
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import stage_keys
from llorch.engines.dumps.stage_dump import StageDump
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import forward_order

THRESHOLD = 1.2  # threshold of the skill; a component with a larger ratio fails
_WRONG, _PART, _ORDER = "missing_algorithm", "missing_multiplier", "precision_ordering"
Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Answer:
    """Answer of a rule: pass and stage, and a class of causes if the rule has any; no place: nothing is wrong."""

    place: tuple[int, str] | None
    cause: str = ""


@dataclass(frozen=True)
class StageTriple:
    """Stage of a dump, of the right run, and of the bfloat16 run."""

    place: tuple[int, str]
    actual: np.ndarray
    right: np.ndarray
    half: np.ndarray

    @property
    def error(self) -> float:
        """Relative error; infinite if shapes or masks differ or an element is not finite."""
        return _distance(self.actual, self.right) / float(np.linalg.norm(_finite(self.right)) or 1.0)

    @property
    def ratio(self) -> float:
        """Error as a multiple of the bfloat16 run's error."""
        return _distance(self.actual, self.right) / (_distance(self.half, self.right) + 1e-12)

    @property
    def cosine(self) -> float:
        """Cosine of the whole arrays."""
        if not math.isfinite(self.error):
            return -1.0
        a, b = (_finite(x).ravel().astype(np.float64) for x in (self.actual, self.right))
        return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) or 1.0))


def meant(names: Sequence[str]) -> set[str]:
    """List the classes of causes that a mistake with one of these names could mean, read generously.

    A wrong formula fits every mistake, unless it is one of precision. A missing or wrong multiplier fits all
    mistakes of scaling, of adding or of forgetting.
    """
    if any(re.search("half|bfloat16|float16", name) for name in names):
        return {_ORDER, _PART}
    partial = any(re.search("scal|gain|eps|bias|base|theta|divid|twice|missing|not-|factor", name) for name in names)
    return {_WRONG, _PART, _ORDER} if partial or not names else {_WRONG}


def answers(model: str, dump: StageDump) -> dict[str, Answer]:
    """Judge a dump by each rule."""
    rows = list(_stage_triples(model, dump))
    return {
        "skill": _apply_skill(rows),
        "fixed": _first_bad(rows, lambda row: row.error > 1e-3),
        "cosine": _first_bad(rows, lambda row: row.cosine < 0.99),
    }


def _stage_triples(model: str, dump: StageDump) -> Iterator[StageTriple]:
    right, half = (_run(model, dump.passes, change) for change in (how.float64_throughout, how.in_bfloat16))
    for n_pass, _ in enumerate(dump.passes):
        dumped = dict(dump.of_pass(n_pass))
        for key in forward_order(dumped):
            tokens = dumped[key].tokens
            index = slice(None) if tokens is None else list(tokens)
            yield StageTriple((n_pass, key), dumped[key].read(), right[n_pass][key][index], half[n_pass][key][index])


def _run(model: str, passes: tuple[Tokens, ...], change: how.Change) -> list[Trace]:
    port = Port(model, passes[0].first_position)
    change(port)
    for tokens in passes:
        port.run(tokens.ids)
    return [stage_keys(tape) for tape in port.tape]


def _first_bad(rows: list[StageTriple], is_bad: Callable[[StageTriple], bool]) -> Answer:
    return Answer(next((row.place for row in rows if is_bad(row)), None))


def _apply_skill(rows: list[StageTriple]) -> Answer:
    """Choose the worst component whose next two also fail, else the worst; classify it by the size of its ratio."""
    bad = [row.ratio >= THRESHOLD for row in rows]
    failing = sorted((index for index, fails in enumerate(bad) if fails), key=lambda index: -rows[index].ratio)
    if not failing:
        return Answer(None)
    runs_of_three = (index for index in failing if sum(bad[index + 1 : index + 3]) == 2)
    row = rows[next(runs_of_three, failing[0])]
    return Answer(row.place, _cause(row.ratio, row.place[1]))


def _cause(ratio: float, name: str) -> str:
    if not math.isfinite(ratio):
        return "test_error"
    if ratio > 10:
        return "routing_ignored" if "mlp" in name else _WRONG
    return _PART if ratio > 3 else _ORDER


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(x), 0, x)


def _distance(actual: np.ndarray, right: np.ndarray) -> float:
    if actual.shape != right.shape or not np.array_equal(np.isneginf(actual), np.isneginf(right)):
        return math.inf
    distance = float(np.linalg.norm(_finite(actual).astype(np.float64) - _finite(right)))
    return distance if math.isfinite(distance) else math.inf
