"""Functions that several verbs use on a dump: plan its judging, read it as stages, write a report of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.options import WholeNumber, group, page_option

if TYPE_CHECKING:
    from llorch.dumps.stage_dump import StageDump
    from llorch.files import Weights
    from llorch.numerics import Numerics

dump_path = click.Path(path_type=Path)
map_option = group(
    "Input",
    page_option(
        "--map", "mapping", type=click.Path(path_type=Path), help="TOML file that maps the dump's names to stages."
    ),
)
first_position_option = group(
    "Input", page_option("--first-position", type=WholeNumber(min=0), help="Position of the first token.  [default: 0]")
)


@dataclass(frozen=True)
class DumpPlan:
    """A dump to judge and the model to judge it by, resolved once, before anything runs; see `plan_dump`."""

    path: Path
    spec: str  # name of the model, as the user gave it
    stored: "Weights"  # opened once, as the file has them
    mapping: Path | None
    ids: Sequence[int] | None  # tokens of all passes; None: the dump must have them
    first_position: int | None
    threads: str  # a line for the report
    numerics: "Numerics | None" = None  # None: exact

    def stages(self) -> "StageDump":
        """Read the dump as stages of the model; see `read_stages`."""
        return read_stages(self.path, self.stored, self.mapping, self.ids, self.first_position)

    def weights(self) -> "Weights":
        """Return the weights in the dtype to compute in: float64 for exact numerics."""
        import numpy as np

        from llorch.numerics import EXACT

        numerics = self.numerics or EXACT
        return self.stored.astype(np.float64) if numerics == EXACT else self.stored.using(numerics)


def plan_dump(
    path: Path, spec: str, *, mapping: Path | None, prompt: str | None, tokens: Sequence[int] | None,
    first_position: int | None = None, numerics: "Numerics | None" = None,
) -> DumpPlan:  # fmt: skip
    """Open the model of a dump, choose the number of threads, and encode the prompt; the dump is not read yet."""
    from llorch.cli.inputs import model_path
    from llorch.cli.options import use_threads
    from llorch.files import open_weights
    from llorch.model import Model

    stored = open_weights(model_path(spec))
    threads = use_threads(stored.config)
    ids = tokens if prompt is None else Model(stored).prompt_ids(prompt)
    return DumpPlan(path, spec, stored, mapping, ids, first_position, threads, numerics)


def read_stages(
    path: Path, weights: "Weights", mapping: Path | None, ids: Sequence[int] | None, first_position: int | None
) -> "StageDump":
    """Read a dump as stages of a model, after the guards allow the comparison; facts that the user gave must fit."""
    from llorch.diagnosis.guards import require_comparable
    from llorch.dumps.index import open_raw
    from llorch.dumps.mapping import read_mapping
    from llorch.dumps.raw import with_earlier
    from llorch.dumps.stage_mapping import stage_dump

    raw, names = with_earlier(open_raw(path), ids), None if mapping is None else read_mapping(mapping)
    missing = None if raw.passes else ids  # what the dump says the guards compare, with a message of their own
    dump = stage_dump(
        raw, weights.config, mapping=names, ids=missing, first_position=first_position or 0, weights=weights
    )
    notes = require_comparable(dump, weights, ids=ids, first_position=first_position, hashes=raw.weights)
    return replace(dump, notes=(*dump.notes, *notes))


def require_folders(paths: Iterable[Path | None]) -> None:
    """Refuse before the work, not after it."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist; make it first")


def write_text(path: Path | None, text: Callable[[], str]) -> None:
    """Write a report, if a path is given."""
    from llorch.files.new_file import new_file

    if path is not None:
        with new_file(path) as temporary:
            temporary.write_text(text(), encoding="utf-8")
