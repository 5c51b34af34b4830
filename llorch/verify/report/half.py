"""The generated parts of the page of checkpoint 14: how far engines in half precision are from the truth."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from llorch.builtin import builtin_path
from llorch.files import open_weights
from llorch.stages import BY_NAME, STAGES, key
from llorch.verify.compare import Tolerance, measure
from llorch.verify.diagnose import VISIBLE, variants
from llorch.verify.goldens import HALF_DTYPES, PRODUCERS, Golden
from llorch.verify.mistakes import STAGE_MISTAKES
from llorch.verify.replay import cut
from llorch.verify.report.tables import ENGINES, Blocks, short, table
from llorch.verify.verifier import Row

CHECKPOINT = "14"
LADDER = "story"  # the built-in model with the most layers


def torch_blocks(goldens: Mapping[str, Golden], rows: Sequence[Row]) -> Blocks:
    """The generated parts of the page.

    Args:
        goldens: Model to goldens, those of `LADDER` among them.
        rows: Of all checkpoints and models, from which the errors of float32 engines are read.

    Returns:
        Name to Markdown.
    """
    return {
        "isolated": distances(goldens, "isolated"),
        "chained": distances(goldens, "chained"),
        "ladder": ladder(goldens[LADDER], [row for row in rows if row.model == LADDER]),
        "teeth": teeth(goldens),
    }


def distances(goldens: Mapping[str, Golden], mode: str) -> str:
    """How far the engines are from the truth in each dtype, and what is allowed.

    Args:
        goldens: Model to goldens.
        mode: `isolated` or `chained`.

    Returns:
        One line per stage: the largest numbers of all models, layers and cases.
    """
    columns = ["stage"]
    for dtype in HALF_DTYPES:
        columns += [f"{dtype}: {ENGINES[PRODUCERS[0]]}", *(ENGINES[p] for p in PRODUCERS[1:]), "tolerance"]
    judged = {stage for g in goldens.values() for stage in g.tolerances["near"][mode]} - {"probabilities"}
    names = [stage.name for stage in STAGES if stage.name in judged] + sorted(judged - BY_NAME.keys())
    lines = ([f"`{name}`", *_cells(list(goldens.values()), mode, name)] for name in names)
    return f"Models: {', '.join(goldens)}.\n\n{table(columns, lines, right=len(columns) - 1)}"


def ladder(golden: Golden, rows: Sequence[Row]) -> str:
    """How the error grows from layer to layer in each dtype.

    Args:
        golden: Of one model.
        rows: Of the same model.

    Returns:
        One line per place, chained, in the case `near`.
    """
    found = {
        (key(row.stage, row.layer), row.producer): row.producer_error
        for row in rows
        if (row.mode, row.case) == ("chained", "near") and row.stage in ("embed", "block_out", "logits")
    }
    places = list(dict.fromkeys(place for place, _ in found))
    columns = [f"{dtype}: {ENGINES[p]}" if p == PRODUCERS[0] else ENGINES[p] for dtype, p in _columns()]
    lines = []
    for place in places:
        numbers = [
            found[place, p] if dtype == "float32" else golden.half_errors[dtype][p]["near"]["chained"][place]
            for dtype, p in _columns()
        ]
        lines.append([f"`{place}`", *(short(number, 2) for number in numbers)])
    return table(["after", *columns], lines, right=len(columns))


def teeth(goldens: Mapping[str, Golden]) -> str:
    """How many known mistakes of stages go red at the tolerances of each dtype, with some model and input.

    Args:
        goldens: Model to goldens, on whose inputs the mistakes are made.

    Returns:
        One line per dtype.
    """
    largest: dict[tuple[str, str], float] = {}
    for name, golden in goldens.items():
        for dtype, mistake, over in _plant(name, golden):
            largest[dtype, mistake] = max(over, largest.get((dtype, mistake), 0.0))
    columns = ("dtype", "mistakes", f"red by {VISIBLE:.0f} times", "red", "not seen")
    lines = []
    for dtype in ("float32", *HALF_DTYPES):
        mine = {m.name: largest[dtype, m.name] for m in STAGE_MISTAKES if (dtype, m.name) in largest}
        counts = [str(sum(over >= limit for over in mine.values())) for limit in (VISIBLE, 1)]
        unseen = ", ".join(f"`{mistake}`" for mistake, over in mine.items() if over < 1)
        lines.append([dtype, str(len(mine)), *counts, unseen or "none"])
    return table(columns, lines)


def _plant(name: str, golden: Golden) -> Iterator[tuple[str, str, float]]:
    """Dtype, mistake, and by what factor it is over the tolerance: in the first layer, with and without a cache."""
    weights = open_weights(builtin_path(name))
    trace_of = golden.evidence[PRODUCERS[0]].traces
    for case, whole in golden.cases.items():
        allowed = {dtype: _isolated(golden, dtype, case) for dtype in ("float32", *HALF_DTYPES)}
        for stage in (stage for stage in STAGES if stage.applies_to(weights.config)):
            layer = 0 if stage.in_layer else None
            for n_cached in (0, len(whole.ids) // 2):
                want = cut(stage, trace_of[case][key(stage.name, layer)], n_cached)
                made = variants(stage, layer, trace_of[case], weights, whole, n_cached=n_cached)
                for mistake, wrong in made.wrong:
                    difference = measure(wrong, want, masked=stage.masked)
                    for dtype, tolerances in allowed.items():
                        yield dtype, mistake.name, difference.over(tolerances[stage.name])


def _isolated(golden: Golden, dtype: str, case: str) -> Mapping[str, Tolerance]:
    made = golden.tolerances if dtype == "float32" else golden.half_tolerances[dtype]
    return made[case]["isolated"]


def _columns() -> Iterator[tuple[str, str]]:
    for dtype in ("float32", *HALF_DTYPES):
        for producer in PRODUCERS:
            yield dtype, producer


def _cells(goldens: Collection[Golden], mode: str, stage: str) -> Iterator[str]:
    for dtype in HALF_DTYPES:
        for producer in PRODUCERS:
            errors = [e[mode].get(stage, 0.0) for g in goldens for e in g.half_errors[dtype][producer].values()]
            yield short(max(errors), 2)
        allowed = [t[mode][stage].error for g in goldens for t in g.half_tolerances[dtype].values() if stage in t[mode]]
        yield short(max(allowed), 2)
