"""`llorch learn trace`: the learner's numbers beside llama.cpp's, stage by stage."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_source
from llorch.cli.options import FILE, MODEL, group, page_option, verb
from llorch.cli.outcome import DIFFERS
from llorch.cli.output import say

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from llorch.apps.learn.trace import TracedStage

_N_NUMBERS = 3  # of each array


@verb(
    "Show your numbers beside llama.cpp's, stage by stage.",
    "llorch learn trace",
    "llorch learn trace story --html trace.html",
    "llorch learn trace micro-qwen3 --impl my_llama",
)
@click.argument("model", type=MODEL, default="micro-llama")
@impl_option
@group("Output", page_option("--html", type=FILE, help="New page with the same table."))
def command(*, model: str, impl: str | None, html: Path | None) -> None:
    """Run a built-in MODEL (default: micro-llama) with your functions, and compare each stage with llama.cpp's.

    Each row has the first numbers of the last token, the distance of the whole array and the tolerance. Functions that
    you have not written are llorch's. Your block is left out, because nobody sees the stages inside it.

    Exit code 1: a stage is further from llama.cpp than the tolerance.
    """
    from llorch.apps.learn.choice import opened
    from llorch.apps.learn.trace import trace_beside
    from llorch.cli.tables import console, print_table
    from llorch.files.new_file import new_file
    from llorch.stages.comparison import FAIL

    source = learners_source(impl)
    stages = list(trace_beside(opened(source), model))
    rows = _make_table(stages)
    print_table(console(), rows)
    if html is not None:
        with new_file(html) as temporary:
            temporary.write_text(_make_page(rows, f"{source} beside llama.cpp on {model}"), encoding="utf-8")
        say(f"wrote {html}")
    if any(stage.comparison is not None and stage.comparison.verdict == FAIL for stage in stages):
        raise click.exceptions.Exit(DIFFERS)


def _make_table(stages: "list[TracedStage]") -> "Table":
    from llorch.cli.learn.shown import coloured
    from llorch.cli.tables import table

    rows = table("stage", "yours", "llama.cpp", ">distance", ">tolerance", "verdict")
    for stage in stages:
        comparison, expected = stage.comparison, _first_numbers(stage.expected)
        if comparison is None or comparison.actual is None:
            rows.add_row(stage.name, "inside your function", expected)
            continue
        distances = (f"{x.error:.1e}" for x in (comparison.difference, comparison.tolerance))
        rows.add_row(stage.name, _first_numbers(comparison.actual), expected, *distances, coloured(comparison.verdict))
    return rows


def _first_numbers(array: "np.ndarray") -> str:
    """Format the first numbers of the last row of an array."""
    return " ".join(f"{number:.6g}" for number in array.reshape(-1, array.shape[-1])[-1][:_N_NUMBERS].tolist())


def _make_page(rows: "Table", title: str) -> str:
    """Make an HTML page with a title and a table."""
    from io import StringIO

    from rich.console import Console

    from llorch.cli.tables import MIN_WIDTH

    page = Console(record=True, file=StringIO(), width=MIN_WIDTH)
    page.print(title, style="bold", markup=False)
    page.print(rows)
    return page.export_html()
