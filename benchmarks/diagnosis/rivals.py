"""Rules that others use, on the same dumps: written anew here, and given all that this benchmark can give.

    skill    the localisation and classes of AWS Neuron's equivalence skill (aws-neuron/neuron-agentic-development,
             skills/neuron-framework-equivalence/scripts/run_stage3.py, seen in August 2026): the error over that of a
             bfloat16 run, and words in the name of the component
    fixed    the first stage whose relative error exceeds 1e-3
    cosine   the first stage whose cosine with the right one is below 0.99

All are shown the dump in our layout, under our names, beside a right run in float64 and one in bfloat16: what is told
here is the rules, not how a dump is read.
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

THRESHOLD = 1.2  # of the skill, above which a component fails
_WRONG, _PART, _ORDER = "missing_algorithm", "missing_multiplier", "precision_ordering"
Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Answer:
    """Answer of a rule: pass and stage, and a class of causes if it has any; no place: nothing is wrong."""

    place: tuple[int, str] | None
    cause: str = ""


@dataclass(frozen=True)
class Beside:
    """A stage of a dump, the right one, and that of a bfloat16 run."""

    place: tuple[int, str]
    actual: np.ndarray
    right: np.ndarray
    half: np.ndarray

    @property
    def error(self) -> float:
        """Relative error; infinite where shapes or masks differ or something is not finite."""
        return _distance(self.actual, self.right) / float(np.linalg.norm(_finite(self.right)) or 1.0)

    @property
    def ratio(self) -> float:
        """The error over that of bfloat16."""
        return _distance(self.actual, self.right) / (_distance(self.half, self.right) + 1e-12)

    @property
    def cosine(self) -> float:
        """Cosine of the whole arrays."""
        if not math.isfinite(self.error):
            return -1.0
        a, b = (_finite(x).ravel().astype(np.float64) for x in (self.actual, self.right))
        return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) or 1.0))


def meant(names: Sequence[str]) -> set[str]:
    """List the classes of causes that a mistake of one of these names could mean, in the widest sense of the words.

    A wrong formula is what every mistake is, unless it is one of precision; a multiplier is missing, or wrong, wherever
    something is scaled, added or forgotten.
    """
    if any(re.search("half|bfloat16|float16", name) for name in names):
        return {_ORDER, _PART}
    partial = any(re.search("scal|gain|eps|bias|base|theta|divid|twice|missing|not-|factor", name) for name in names)
    return {_WRONG, _PART, _ORDER} if partial or not names else {_WRONG}


def answers(model: str, dump: StageDump) -> dict[str, Answer]:
    """Judge a dump by each rule."""
    rows = list(_beside(model, dump))
    return {
        "skill": _skill(rows),
        "fixed": _first(rows, lambda row: row.error > 1e-3),
        "cosine": _first(rows, lambda row: row.cosine < 0.99),
    }


def _beside(model: str, dump: StageDump) -> Iterator[Beside]:
    right, half = (_run(model, dump.passes, change) for change in (how.wide, how.in_bfloat16))
    for n, _ in enumerate(dump.passes):
        dumped = dict(dump.of_pass(n))
        for key in forward_order(dumped):
            tokens = dumped[key].tokens
            pick = slice(None) if tokens is None else list(tokens)
            yield Beside((n, key), dumped[key].read(), right[n][key][pick], half[n][key][pick])


def _run(model: str, passes: tuple[Tokens, ...], change: how.Change) -> list[Trace]:
    port = Port(model, passes[0].first_position)
    change(port)
    for one in passes:
        port.run(one.ids)
    return [stage_keys(tape) for tape in port.tape]


def _first(rows: list[Beside], is_bad: Callable[[Beside], bool]) -> Answer:
    return Answer(next((row.place for row in rows if is_bad(row)), None))


def _skill(rows: list[Beside]) -> Answer:
    """Choose the worst component whose next two fail too, else the worst; class it by the size of its ratio."""
    bad = [row.ratio >= THRESHOLD for row in rows]
    failing = sorted((at for at, fails in enumerate(bad) if fails), key=lambda at: -rows[at].ratio)
    if not failing:
        return Answer(None)
    steps = (at for at in failing if sum(bad[at + 1 : at + 3]) == 2)
    row = rows[next(steps, failing[0])]
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
    off = float(np.linalg.norm(_finite(actual).astype(np.float64) - _finite(right)))
    return off if math.isfinite(off) else math.inf
