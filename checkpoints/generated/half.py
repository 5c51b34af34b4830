"""The generated parts of the page of checkpoint 14: the error of half precision, and the mistakes it still detects."""

from collections.abc import Iterator, Mapping, Sequence

from checkpoints.generated.tables import Blocks, roughly, short, table
from llorch.diagnosis.mistakes import STAGE_MISTAKES
from llorch.diagnosis.mistakes.variants import VISIBLE, variants
from llorch.files import open_weights
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.goldens.forward import ENGINES, Golden
from llorch.judging.runners.numpy import run
from llorch.judging.tolerances.rounding import ARITHMETICS
from llorch.judging.types import Comparison
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import measure
from llorch.stages.stage_ref import part_of
from llorch.stages.table import STAGES, key

CHECKPOINT = "14"
LADDER = "story"  # the built-in model with the most layers
HALVES = ("bfloat16", "float16")


def torch_blocks(goldens: Mapping[str, Golden], comparisons: Sequence[Comparison]) -> Blocks:
    """Make the blocks of the page from rows of the torch path in float32 and both dtypes of half precision."""
    return {
        "isolated": distances(comparisons, "isolated"),
        "chained": distances(comparisons, "chained"),
        "ladder": ladder([c for c in comparisons if c.model == LADDER]),
        "injected": injected_mistakes(goldens),
    }


def distances(comparisons: Sequence[Comparison], mode: str) -> str:
    """List llorch's largest distance from the goldens in each dtype, of all models and layers, and the tolerance."""
    mine = [c for c in comparisons if c.mode == mode and c.stage_ref.stage != "probabilities"]
    columns = ["stage", *(f"{dtype}: {kind}" for dtype in HALVES for kind in ("llorch", "tolerance"))]
    lines = []
    for stage in dict.fromkeys(c.stage_ref.name for c in mine):
        rows = [[c for c in mine if c.stage_ref.name == stage and c.backend.endswith(f"-{dtype}")] for dtype in HALVES]
        errors = (roughly(max(c.difference.error for c in of_dtype)) for of_dtype in rows)
        tolerances = (f"~{short(max(c.tolerance.error for c in of_dtype), 2)}" for of_dtype in rows)
        cells = zip(errors, tolerances, strict=True)
        lines.append([f"`{stage}`", *(cell for pair in cells for cell in pair)])
    models = ", ".join(dict.fromkeys(c.model for c in mine))
    return f"Models: {models}.\n\n{table(columns, lines, right=len(columns) - 1)}"


def ladder(comparisons: Sequence[Comparison]) -> str:
    """List how the error of one model grows from layer to layer in each dtype, in the case `near`."""
    chained = [c for c in comparisons if (c.mode, c.stage_ref.run, c.engine) == ("chained", "near", ENGINES[0])]
    places = dict.fromkeys(c.stage_ref.key for c in chained if c.stage_ref.name in ("embed", "block_out", "logits"))
    errors = {(c.stage_ref.key, c.backend.rpartition("-")[2]): c.reference_error for c in chained}
    lines = ([f"`{place}`", *(roughly(errors[place, dtype]) for dtype in ARITHMETICS)] for place in places)
    return table(["after", *ARITHMETICS], lines, right=len(ARITHMETICS))


def injected_mistakes(goldens: Mapping[str, Golden]) -> str:
    """Count the known mistakes of stages that fail at the tolerances of each dtype, with some model and input."""
    largest: dict[tuple[str, str], float] = {}
    for name, golden in goldens.items():
        for dtype, mistake, over in _inject(name, golden):
            largest[dtype, mistake] = max(over, largest.get((dtype, mistake), 0.0))
    columns = ("dtype", "mistakes", f"fail by {VISIBLE:.0f} times", "fail", "not detected")
    lines = []
    for dtype in ARITHMETICS:
        mine = {m.name: largest[dtype, m.name] for m in STAGE_MISTAKES if (dtype, m.name) in largest}
        counts = [str(sum(over >= limit for over in mine.values())) for limit in (VISIBLE, 1)]
        unseen = ", ".join(f"`{mistake}`" for mistake, over in mine.items() if over < 1)
        lines.append([dtype, str(len(mine)), *counts, unseen or "none"])
    return table(columns, lines)


def _inject(name: str, golden: Golden) -> Iterator[tuple[str, str, float]]:
    """Yield dtype, mistake and the factor over the tolerance: in the first layer, with and without a cache."""
    weights = open_weights(builtin_path(name))
    suite = ForwardExpectations(name, weights, golden.cases, golden.engine_outputs, golden.reference)
    for case, case_pass in golden.cases.items():
        trace = golden.engine_outputs[ENGINES[0]].traces[case]
        for n_cached in (0, len(case_pass.ids) // 2):
            right = run(weights, case_pass, n_cached=n_cached, golden=trace)
            for stage in (stage for stage in STAGES if stage.applies_to(weights.config)):
                layer = stage.first_layer(weights.config)
                place = key(stage.name, layer)
                expected = part_of(stage, trace[place], n_cached, len(case_pass.ids))
                stage_variants = variants(stage, layer, trace, weights, case_pass, right[place], n_cached=n_cached)
                for mistake, wrong in stage_variants.wrong:
                    difference = measure(wrong, expected, masked=stage.masked)
                    for dtype in ARITHMETICS:
                        yield dtype, mistake.name, difference.over(suite.tolerances(case, dtype).isolated(place))
