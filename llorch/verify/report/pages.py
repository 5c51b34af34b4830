"""Keep the generated parts of the checkpoint pages current.

    python -m llorch.verify.report.pages             write them
    python -m llorch.verify.report.pages --check     only say which pages are not current (exit code 1)

A page is written by hand except for the blocks between `<!-- generated: NAME -->` and `<!-- end -->`. Numbers marked
with `~` belong to the machine that wrote them: a page that differs in these only is current.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import click

from llorch.builtin import goldens_folder
from llorch.stages import CHECKPOINTS
from llorch.verify.goldens import read
from llorch.verify.judge import Row
from llorch.verify.limits import ARITHMETICS
from llorch.verify.models import verify_stored
from llorch.verify.report.half import CHECKPOINT as TORCH
from llorch.verify.report.half import torch_blocks
from llorch.verify.report.quantised import exact_errors, quantised_blocks
from llorch.verify.report.tables import Blocks, index_blocks, models_with_goldens, page_blocks
from llorch.verify.report.training import trainers, training_blocks
from llorch.verify.runners.numpy import FLOAT64
from llorch.verify.suites.quantised import CHECKPOINT as QUANTISED
from llorch.verify.suites.quantised import verify_quantised_stored
from llorch.verify.training.claims import verify_training_stored
from llorch.verify.training.goldens import MODELS as TRAINED
from llorch.verify.training.stages import CHECKPOINTS as TRAINING

FOLDER = Path(__file__).resolve().parents[3] / "checkpoints"
START, END = "<!-- generated: ", "<!-- end -->"
BLOCK = re.compile(f"(?P<start>{START}(?P<name>[a-z]+) -->\n)(?P<body>.*?){END}", re.DOTALL)
OF_THIS_MACHINE = re.compile(r"~[0-9][0-9.e+-]*")


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; fail when a page is not current.")
def main(check: bool) -> None:
    """Entry point."""
    if not FOLDER.is_dir():
        raise click.ClickException(f"{FOLDER} is missing; the pages are in a clone of the repository only")
    stale = 0
    for path, blocks in generated(FOLDER).items():
        old = path.read_text(encoding="utf-8")
        new = render(old, blocks, label=str(path))
        if check and not same(old, new):
            click.echo(f"{path}: not current; write it with: python -m llorch.verify.report.pages")
            stale += 1
        if not check and old != new:
            path.write_text(new, encoding="utf-8", newline="\n")
            click.echo(f"{path}: written")
    sys.exit(1 if stale else 0)


def generated(folder: Path) -> Mapping[Path, Blocks]:
    """What every page has to say, computed from the goldens now.

    Args:
        folder: With the index and one folder per checkpoint.

    Returns:
        Page to its blocks.

    Raises:
        ValueError: Goldens were made for other weights, or there are none.
    """
    goldens = {name: read(goldens_folder() / name) for name in models_with_goldens()}
    if not goldens:
        raise ValueError(
            f"pages: expected goldens in {goldens_folder()}, got none; run reference_outputs/regenerate.py"
        )
    rows = [*(row for name in goldens for row in rows_of(name)), *quantised_rows(), *training_rows()]
    alike = [number for number in CHECKPOINTS if number not in (QUANTISED, TORCH, *TRAINING)]
    pages = {page(folder, number): page_blocks(number, rows) for number in alike}
    pages[page(folder, QUANTISED)] = quantised_blocks(quantised_rows(), exact_errors())
    pages[page(folder, TORCH)] = torch_blocks(goldens, [row for name in goldens for row in torch_rows(name)])
    pages |= {page(folder, number): training_blocks(number, training_rows()) for number in TRAINING}
    return {folder / "README.md": index_blocks(rows, goldens, CHECKPOINTS, trainers())} | pages


@cache  # the slow part, and goldens do not change under a running command
def rows_of(model: str) -> Sequence[Row]:
    """All comparisons of one built-in model with its goldens, as it runs and in float64."""
    return [row for row in verify_stored(model) if row.backend in ("numpy", FLOAT64)]


@cache
def torch_rows(model: str) -> Sequence[Row]:
    """All comparisons of one built-in model on the torch page as it is written, on the CPU."""
    from llorch.pytorch.device import target
    from llorch.verify.runners.torch import torch_runners

    targets = [target("cpu", dtype) for dtype in ARITHMETICS]
    return [row for on in targets for row in verify_stored(model, torch_runners(on, only=[""]), backend=str(on))]


@cache
def quantised_rows() -> Sequence[Row]:
    """All comparisons of checkpoint 13."""
    return list(verify_quantised_stored())


@cache
def training_rows() -> Sequence[Row]:
    """All comparisons of checkpoints 15 to 20, as NumPy runs and in float64."""
    return [row for name in TRAINED for row in verify_training_stored(name) if row.backend in ("numpy", FLOAT64)]


def page(folder: Path, number: str) -> Path:
    """The page of one checkpoint."""
    return folder / f"{number}_{CHECKPOINTS[number]}" / "README.md"


def render(text: str, blocks: Blocks, *, label: str) -> str:
    """Fill the generated blocks of a page.

    Args:
        text: The page.
        blocks: What belongs into each block.
        label: Names the page in errors.

    Returns:
        The page with these blocks and with everything else as it was.

    Raises:
        ValueError: The page does not have exactly these blocks, each once and each closed.
    """
    found = sorted(match["name"] for match in BLOCK.finditer(text))
    whole = len(found) == text.count(START) == text.count(END)
    if not whole or found != sorted(blocks):
        raise ValueError(f"{label}: expected the generated blocks {sorted(blocks)}, each closed by {END}, got {found}")
    return BLOCK.sub(lambda match: f"{match['start']}{blocks[match['name']]}\n{END}", text)


def same(old: str, new: str) -> bool:
    """Whether two pages are equal but for the numbers of a machine."""
    return OF_THIS_MACHINE.sub("~", old) == OF_THIS_MACHINE.sub("~", new)


if __name__ == "__main__":
    main()
