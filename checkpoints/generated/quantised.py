"""The generated parts of the page of checkpoint 13: a line per micro model, and the comparisons that must be equal."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from checkpoints.generated.tables import Blocks, mistakes, short, table
from llorch.files import open_weights
from llorch.files.quant import ACTIVATION_TYPE
from llorch.judging.expectations.quantised import BACKENDS
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.judging.goldens.quantised import FOLDER, read
from llorch.judging.runners.numpy import GGML as BACKEND
from llorch.judging.runners.numpy import run
from llorch.judging.types import Comparison
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import PASS, measure

MEANINGS = {
    "decode": "types decode to the bits of ggml's C",
    "rounding": "roundings of activations give the bytes of ggml's C",
    "file": "models are the ones that llama.cpp ran",
}


def quantised_blocks(comparisons: Sequence[Comparison], exact: Mapping[str, float]) -> Blocks:
    """Make the generated blocks of the page.

    Args:
        comparisons: Comparisons of checkpoint 13.
        exact: Model to the error of exact arithmetic, see `exact_errors`.

    Returns:
        Name to Markdown.
    """
    return {"mistakes": mistakes("13"), "equal": _equal(comparisons), "types": _types(comparisons, exact)}


def exact_errors() -> dict[str, float]:
    """Measure the distance of the logits of exact arithmetic from llama.cpp's, for every micro model."""
    golden = read(goldens_folder() / FOLDER)
    errors = {}
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        for name in MODELS:
            weights = open_weights(write_model(name, Path(folder)))
            with closing(weights.source):
                errors[name] = measure(run(weights, golden.case)["logits"], golden.traces[name]["logits"]).error
    return errors


def _equal(comparisons: Sequence[Comparison]) -> str:
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.mode == "exact":
            groups.setdefault(comparison.stage_ref.stage, []).append(comparison)
    lines = ([f"`{name}`", MEANINGS[name], f"{_passed(group)} of {len(group)}"] for name, group in groups.items())
    return table(("row", "compared", "equal"), lines)


def _types(comparisons: Sequence[Comparison], exact: Mapping[str, float]) -> str:
    columns = (
        "model",
        "family",
        "inputs rounded to",
        "isolated",
        "tolerance",
        "chained",
        "tolerance",
        "flips",
        "free",
        "tolerance",
        "exact arithmetic",
    )
    return table(columns, (_line(name, comparisons, exact[name]) for name in MODELS), right=8)


def _line(name: str, comparisons: Sequence[Comparison], exact: float) -> list[str]:
    mine = [c for c in comparisons if c.model == name and c.backend in BACKENDS["own"]]
    cells = []
    for modes in (("isolated",), ("chained", "decode"), ("free",)):
        group = [c for c in mine if c.mode in modes]
        largest = (max(c.difference.error for c in group), max(c.tolerance.error for c in group))
        cells += [f"~{short(number, 1)}" for number in largest]
    flips = sum(c.flips for c in mine if c.mode == "chained" and c.backend == BACKEND)
    recipe = MODELS[name]
    kinds = sorted({ACTIVATION_TYPE[kind] for kind in recipe.types})
    return [f"`{name}`", recipe.family, ", ".join(kinds), *cells[:4], f"~{flips}", *cells[4:], f"~{short(exact, 1)}"]


def _passed(comparisons: Sequence[Comparison]) -> int:
    return sum(c.verdict == PASS for c in comparisons)
