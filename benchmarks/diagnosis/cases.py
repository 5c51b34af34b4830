"""The cases of the corpus: a bug in a model, run by a plan and written in a style, and what is true of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.diagnosis.bugs import BUGS, Bug, together
from benchmarks.diagnosis.expected import ALIKE, NAMES, VALUES
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import STYLES, Tape, Written, in_memory, shown, stage_keys, write
from llorch.engines.dumps.stage_dump import StageDump
from llorch.stages.stage_ref import Tokens, token_axis
from llorch.stages.table import BY_NAME, forward_order, key

PLANS = {  # tokens of the passes
    "whole": (12,), "steps": (9, 1, 1, 1), "chunks": (7, 6), "long": (14, 12, 1), "far": (9, 1),
}  # fmt: skip
FAR = 4003  # the first position of that plan; no multiple of a power of two
ROUNDED = 1e-6  # of a token's norm: ten times what float32 rounds a stage
NOTICED = 1e-5  # the same, where several stages are in one


@dataclass(frozen=True)
class Case:
    """A dump of the corpus.

    Attributes:
        bugs: One, or two of which the second is behind the first.
        model: In which they are planted.
        style: How the run is written.
    """

    bugs: tuple[Bug, ...]
    model: str
    style: str

    @property
    def name(self) -> str:
        """For reports."""
        return f"{'+'.join(bug.name for bug in self.bugs)}/{self.model}/{self.style}"

    @property
    def plan(self) -> str:
        """Name of the plan by which the tokens are given."""
        return next((bug.plan for bug in self.bugs if bug.plan != "steps"), "steps")


@dataclass(frozen=True)
class CorrectDiagnosis:
    """Correct diagnosis of one bug in a dump.

    Attributes:
        shows: First places of the error: pass and stage key, several if the first differ by little more than rounding.
        made: Stage keys where it is made.
        layer: The first layer that it is made in; None outside the layers.
        names: Known mistakes, any of which is right; none: it is none of them.
        value: Value of a setting, if one is to be recovered.
    """

    shows: tuple[tuple[int, str], ...]
    made: tuple[str, ...]
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
    with np.errstate(over="ignore"):  # the exponential of a gate, as in C
        for tokens in passes:
            port.run(tokens.ids)
    return port.tape


@cache
def right_run(model: str, plan: str) -> Sequence[Tape]:
    """Run the port without bugs, once for each model and plan."""
    return run(model, plan)


def run_case(case: Case, folder: Path) -> Written:
    """Write the dump of a case into an empty folder."""
    tapes = run(case.model, case.plan, *case.bugs)
    return write(case.style, folder, case.model, passes_of(case.model, case.plan), tapes)


def whole_dump(case: Case) -> StageDump:
    """Make a dump of every tensor of a case, without a file."""
    return in_memory(passes_of(case.model, case.plan), run(case.model, case.plan, *case.bugs))


def correct_diagnosis_of(case: Case, bug: Bug) -> CorrectDiagnosis:
    """Derive from a run the correct diagnosis of one bug of a case."""
    noticed = ROUNDED if case.style == "all" else NOTICED
    shows = first_shown(case.model, case.plan, case.style, run(case.model, case.plan, bug), noticed)
    first = 0 if bug.layers is None else bug.layers[0]
    also, other_names = ALIKE.get(bug.name, ("", ())) if case.style != "all" else ("", ())
    stages = [BY_NAME[name] for name in (*bug.made, *also.split())]
    n_layers = sum(name.endswith(".out") for name in right_run(case.model, case.plan)[0])
    layers = range(n_layers) if bug.layers is None else bug.layers
    made = [key(stage.name, layer) for stage in stages for layer in (layers if stage.in_layer else (None,))]
    layer, names = first if stages[0].in_layer else None, (*NAMES.get(bug.name, ()), *other_names)
    return CorrectDiagnosis(
        tuple(shows), tuple(made), layer, names, f"{VALUES[bug.name]:g}" if bug.name in VALUES else ""
    )


def first_shown(model: str, plan: str, style: str, actual: Sequence[Tape], noticed: float) -> list[tuple[int, str]]:
    """List stages from the first that differs at all to the first that differs noticeably; none if none does."""
    between: list[tuple[int, str]] = []
    for n_pass, (tape, right) in enumerate(zip(actual, right_run(model, plan), strict=True)):
        ours, theirs = stage_keys(right), stage_keys(tape)
        for name in forward_order(shown(style, model, n_pass, tape)):
            distance = farthest_token(name, theirs[name], ours[name])
            between += [(n_pass, name)] if distance else []
            if distance > noticed:
                return between
    return []


def farthest_token(name: str, actual: np.ndarray, expected: np.ndarray) -> float:
    """Measure the error of the worst token; infinite if shapes or the positions of finite numbers differ."""
    if actual.shape != expected.shape or not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return np.inf
    axis = token_axis(BY_NAME[name.rpartition(".")[2]])
    rows = [np.moveaxis(np.where(np.isfinite(x), x, 0), axis, 0).reshape(x.shape[axis], -1) for x in (actual, expected)]  # pyright: ignore
    off, size = np.linalg.norm(rows[0] - rows[1], axis=1), np.linalg.norm(rows[1], axis=1)
    return float(np.max(off / np.maximum(size, 1e-30)))


def cases() -> Iterator[Case]:
    """Yield every bug with all tensors and in one more style that can show it, on models by turns, then pairs."""
    for number, bug in enumerate(BUGS.values()):
        models = [bug.models[(number + i) % len(bug.models)] for i in range(len(bug.models))]
        if bug.shapes:
            yield Case((bug,), models[0], "all")
        others = [STYLES[1 + (number + i) % 4] for i in range(4)]
        found = (Case((bug,), model, style) for style in others for model in (*models[1:], models[0]))
        yield from islice((case for case in found if _can_be_seen(case, bug)), 1)
    yield from (Case(both, model, "all") for both, model in together.pairs())


def unseen() -> Iterator[Case]:
    """Yield bugs after the end of a dump: nothing that it shows is wrong, and it could not have shown the mistake."""
    for bug in BUGS.values():
        if bug.first_pass and bug.name in NAMES:
            yield Case((bug,), bug.models[0], "modules")


def _can_be_seen(case: Case, bug: Bug) -> bool:
    if not bug.shapes and case.style not in ("blocks", "modules"):
        return False
    return bool(correct_diagnosis_of(case, bug).shows)
