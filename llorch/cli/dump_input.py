"""Functions that several verbs use on dumps (tensors that an engine wrote): plan the comparison, write a report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.options import PATH, WholeNumber, group, page_option

if TYPE_CHECKING:
    from llorch.engines.dumps.stage_dump import StageDump
    from llorch.files import Weights
    from llorch.ops.numerics import Numerics

map_option = group(
    "Input", page_option("--map", "mapping", type=PATH, help="TOML file that maps the dump's names to stages.")
)
first_position_option = group(
    "Input", page_option("--first-position", type=WholeNumber(min=0), help="Position of the first token.  [default: 0]")
)


@dataclass(frozen=True)
class DumpPlan:
    """Dump to judge and the model to judge it by, resolved once, before a stage is judged; see `plan_dump`."""

    path: Path
    spec: str  # name of the model, as the user typed it
    weights: "Weights"  # in the dtype of the computation
    rows: "Sequence[StageDump]"  # checked to be comparable with the model; several for a batch
    threads: str  # line of the report

    @property
    def dump(self) -> "StageDump":
        """The dump; UsageError if it is a batch."""
        if len(self.rows) > 1:
            message = f"{self.path}: expected a dump of one row, got a batch of {len(self.rows)}; use llorch diagnose"
            raise click.UsageError(message)
        return self.rows[0]


def plan_dump(
    path: Path, spec: str, *, mapping: Path | None, prompt: str | None, tokens: Sequence[int] | None,
    first_position: int | None = None, numerics: "Numerics | None" = None,
) -> DumpPlan:  # fmt: skip
    """Open the model of a dump, choose the number of threads, encode the prompt, and read the dump as stages.

    With exact `numerics`, or None, llorch computes in float64, else with these numerics.
    """
    import numpy as np

    from llorch.cli.inputs import model_path
    from llorch.cli.output import progress
    from llorch.cli.threads import use_threads
    from llorch.diagnosis.guards import read_rows
    from llorch.files import open_weights
    from llorch.model.model import Model
    from llorch.ops.numerics import EXACT

    opened = open_weights(model_path(spec))
    threads = use_threads(opened.config)
    ids = tokens if prompt is None else Model(opened).prompt_ids(prompt)
    with progress(f"reading {path}"):
        rows = read_rows(path, opened, mapping=mapping, ids=ids, first_position=first_position)
    weights = opened.astype(np.float64) if numerics in (None, EXACT) else opened.using(numerics)
    return DumpPlan(path, spec, weights, rows, threads)


def require_folders(paths: Iterable[Path | None]) -> None:
    """Raise before the work, not after it, if the folder of an output is missing."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist; make it first")


def write_text(path: Path | None, text: Callable[[], str]) -> None:
    """Write a report, if a path is given."""
    from llorch.files.new_file import new_file

    if path is not None:
        with new_file(path) as temporary:
            temporary.write_text(text(), encoding="utf-8")
