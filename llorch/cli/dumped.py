"""What several verbs do with a dump: read it under the names of the table, write a report of it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.options import WholeNumber

if TYPE_CHECKING:
    from llorch.dumps.mapping import NameMap
    from llorch.dumps.raw import RawDump
    from llorch.dumps.stage_dump import StageDump
    from llorch.files import Weights

dump_path = click.Path(path_type=Path)
map_option = click.option(
    "--map", "mapping", type=click.Path(path_type=Path), help="A TOML file that says what names stand for."
)
first_position_option = click.option(
    "--first-position", type=WholeNumber(min=0), default=0, show_default=True, help="Of the first of these tokens."
)


def read_map(path: Path | None) -> "NameMap | None":
    """A mapping, where one is given."""
    from llorch.dumps.mapping import read_mapping

    return None if path is None else read_mapping(path)


def read_stages(
    path: Path, weights: "Weights", mapping: Path | None, ids: Sequence[int] | None, first_position: int
) -> "tuple[RawDump, StageDump]":
    """A dump as it lies in files, and as stages of a model."""
    from llorch.dumps.index import open_raw
    from llorch.dumps.names import stage_dump

    raw = open_raw(path)
    stages = stage_dump(
        raw, weights.config, mapping=read_map(mapping), ids=ids, first_position=first_position, weights=weights
    )
    return raw, stages


def require_folders(paths: Iterable[Path | None]) -> None:
    """Refuse before the work, not after it."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist; make it first")


def write_text(path: Path | None, text: Callable[[], str]) -> None:
    """A report, where one is wanted."""
    from llorch.files.new_file import new_file

    if path is not None:
        with new_file(path) as temporary:
            temporary.write_text(text(), encoding="utf-8")
