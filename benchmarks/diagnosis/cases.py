"""Cases of the corpus: a bug in a model, run by a plan and written in a style, and the correct diagnosis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.diagnosis.bugs import BUGS, Bug, together
from benchmarks.diagnosis.expected import ALIKE, NAMES, VALUES
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import STYLES, Tape, WrittenDump, in_memory, list_dumped_keys, stage_keys, write
from llorch.engines.dumps.stage_dump import StageDump
from llorch.stages.stage_ref import Tokens, token_axis
from llorch.stages.table import BY_NAME, forward_order, key

PLANS = {  # number of tokens of each pass
    "whole": (12,), "steps": (9, 1, 1, 1), "chunks": (7, 6), "long": (14, 12, 1), "far": (9, 1),
}  # fmt: skip
FAR = 4003  # first position of the plan `far`; not a power of two
ROUNDED = 1e-6  # share of a token's norm: ten times the float32 rounding of a stage
NOTICED = 1e-5  # the same, if one dumped stage covers several


@dataclass(frozen=True)
class Case:
    """Dump of the corpus.

    Attributes:
        bugs: One bug, or two of which the second shows after the first.
        model: Model with the bugs.
        style: Style of the dump.
    """

    bugs: tuple[Bug, ...]
    model: str
    style: str

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"{'+'.join(bug.name for bug in self.bugs)}/{self.model}/{self.style}"

    @property
    def plan(self) -> str:
        """Name of the plan of the passes."""
        return next((bug.plan for bug in self.bugs if bug.plan != "steps"), "steps")


@dataclass(frozen=True)
class CorrectDiagnosis:
    """Correct diagnosis of one bug in a dump.

    Attributes:
        shows: First places of the error: pass and stage key; several if they differ by little more than rounding.
        starts_in: Stage keys where the bug acts.
        layer: First layer where it acts; None outside the layers.
        names: Known mistakes, any of which is a right name; empty: no known mistake.
        value: Value of a setting, if one is to be recovered.
    """

    shows: tuple[tuple[int, str], ...]
    starts_in: tuple[str, ...]
    layer: int | None
    names: tuple[str, ...]
    value: str = ""


def passes_of(model: str, plan: str) -> list[Tokens]:
    """List the tokens of each pass of a plan; all tokens differ."""
    first, passes = FAR if plan == "far" else 0, []
    ids = np.random.default_rng(14).permutation(300)[: sum(PLANS[plan])].tolist()
    for n in PLANS[plan]:
        passes.append(Tokens(tuple(ids[:n]), first))
        ids, first = ids[n:], first + n
    return passes


def run(model: str, plan: str, *bugs: Bug) -> Sequence[Tape]:
    """Run a port with some bugs and return its tape, a dict for each pass."""
    passes = passes_of(model, plan)
    port = Port(model, passes[0].first_position)
    for bug in bugs:
        bug.inject(port)
    with np.errstate(over="ignore"):  # the exponential of a gate may overflow, as in C
        for tokens in passes:
            port.run(tokens.ids)
    return port.tape


@cache
def right_run(model: str, plan: str) -> Sequence[Tape]:
    """Run the port without bugs, once for each model and plan."""
    return run(model, plan)


def run_case(case: Case, folder: Path) -> WrittenDump:
    """Write the dump of a case into an empty folder."""
    tapes = run(case.model, case.plan, *case.bugs)
    return write(case.style, folder, case.model, passes_of(case.model, case.plan), tapes)


def whole_dump(case: Case) -> StageDump:
    """Make a dump of every tensor of a case, without a file."""
    return in_memory(passes_of(case.model, case.plan), run(case.model, case.plan, *case.bugs))


def correct_diagnosis_of(case: Case, bug: Bug) -> CorrectDiagnosis:
    """Derive from a run the correct diagnosis of one bug of a case."""
    threshold = ROUNDED if case.style == "all" else NOTICED
    shows = first_shown(case.model, case.plan, case.style, run(case.model, case.plan, bug), threshold)
    first = 0 if bug.layers is None else bug.layers[0]
    extra_stages, other_names = ALIKE.get(bug.name, ("", ())) if case.style != "all" else ("", ())
    stages = [BY_NAME[name] for name in (*bug.starts_in, *extra_stages.split())]
    n_layers = sum(name.endswith(".out") for name in right_run(case.model, case.plan)[0])
    layers = range(n_layers) if bug.layers is None else bug.layers
    stage_refs = [key(stage.name, layer) for stage in stages for layer in (layers if stage.in_layer else (None,))]
    layer, names = first if stages[0].in_layer else None, (*NAMES.get(bug.name, ()), *other_names)
    return CorrectDiagnosis(
        tuple(shows), tuple(stage_refs), layer, names, f"{VALUES[bug.name]:g}" if bug.name in VALUES else ""
    )


def first_shown(model: str, plan: str, style: str, actual: Sequence[Tape], noticed: float) -> list[tuple[int, str]]:
    """List stages from the first that differs at all to the first that differs noticeably; empty if none does."""
    places: list[tuple[int, str]] = []
    for n_pass, (tape, right) in enumerate(zip(actual, right_run(model, plan), strict=True)):
        right_arrays, arrays = stage_keys(right), stage_keys(tape)
        for name in forward_order(list_dumped_keys(style, model, n_pass, tape)):
            distance = farthest_token(name, arrays[name], right_arrays[name])
            places += [(n_pass, name)] if distance else []
            if distance > noticed:
                return places
    return []


def farthest_token(name: str, actual: np.ndarray, expected: np.ndarray) -> float:
    """Measure the error of the worst token; infinite if shapes or the positions of finite numbers differ."""
    if actual.shape != expected.shape or not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return np.inf
    axis = token_axis(BY_NAME[name.rpartition(".")[2]])
    rows = [np.moveaxis(np.where(np.isfinite(x), x, 0), axis, 0).reshape(x.shape[axis], -1) for x in (actual, expected)]  # pyright: ignore
    distances, size = np.linalg.norm(rows[0] - rows[1], axis=1), np.linalg.norm(rows[1], axis=1)
    return float(np.max(distances / np.maximum(size, 1e-30)))


def cases() -> Iterator[Case]:
    """Yield every bug with all tensors and in one more style that can show it, on models by turns, then pairs."""
    for number, bug in enumerate(BUGS.values()):
        models = [bug.models[(number + offset) % len(bug.models)] for offset in range(len(bug.models))]
        if bug.shapes:
            yield Case((bug,), models[0], "all")
        styles = [STYLES[1 + (number + offset) % 4] for offset in range(4)]
        candidates = (Case((bug,), model, style) for style in styles for model in (*models[1:], models[0]))
        yield from islice((case for case in candidates if _is_visible(case, bug)), 1)
    yield from (Case(pair, model, "all") for pair, model in together.pairs())


def unseen() -> Iterator[Case]:
    """Yield bugs whose effect is after the end of a dump: the dump shows no error and could not show the mistake."""
    for bug in BUGS.values():
        if bug.first_pass and bug.name in NAMES:
            yield Case((bug,), bug.models[0], "modules")


def _is_visible(case: Case, bug: Bug) -> bool:
    if not bug.shapes and case.style not in ("blocks", "modules"):
        return False
    return bool(correct_diagnosis_of(case, bug).shows)
