"""The generated parts of the checkpoint pages: the text between `<!-- generated: NAME -->` and `<!-- end -->`.

Numbers marked with `~` belong to the machine that wrote them: a page that differs in these only is current. The command
that writes pages is `checkpoints/build.py`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from checkpoints.generated.half import CHECKPOINT as TORCH
from checkpoints.generated.half import torch_blocks
from checkpoints.generated.lessons import lesson_tables, route
from checkpoints.generated.quantised import exact_errors, quantised_blocks
from checkpoints.generated.tables import Blocks, index_blocks, models_with_goldens, page_blocks
from checkpoints.generated.training import trainers, training_blocks
from llorch.files import Weights
from llorch.judging.expectations.quantised import CHECKPOINT as QUANTISED
from llorch.judging.expectations.quantised import verify_quantised_stored
from llorch.judging.expectations.training import verify_training_stored
from llorch.judging.goldens.forward import Golden, read
from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.judging.runners.numpy import FLOAT64, NumpyRunner, numpy_runners
from llorch.judging.tolerances.rounding import ARITHMETICS
from llorch.judging.types import Comparison
from llorch.judging.verify import verify_stored
from llorch.runtime.builtin import BUILTIN, goldens_folder
from llorch.stages.table import CHECKPOINTS
from llorch.stages.training import CHECKPOINTS as TRAINING

FOLDER = Path(__file__).resolve().parents[1]
START, END = "<!-- generated: ", "<!-- end -->"
BLOCK = re.compile(f"(?P<start>{START}(?P<name>[a-z]+) -->\n)(?P<body>.*?){END}", re.DOTALL)
SHOWN = ("numpy", FLOAT64)  # backends whose rows the pages show
OF_THIS_MACHINE = re.compile(r"~[0-9][0-9.e+-]*")


def generated(
    folder: Path, numbers: Sequence[str] = tuple(CHECKPOINTS), *, index: bool = True
) -> Mapping[Path, Blocks]:
    """Compute the generated blocks of the pages from the goldens.

    Args:
        folder: Folder with both indexes and one folder per checkpoint.
        numbers: Numbers of the checkpoints whose pages are wanted.
        index: Make the blocks of both indexes, too.

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
    pages: dict[Path, Blocks] = {porting_page(folder, number): _blocks_of(number, goldens) for number in numbers}
    pages |= {page(folder, number): {} for number in numbers}
    if index:
        comparisons = [*_forward_rows(goldens), *quantised_rows(), *training_rows()]
        lessons, porting = indexes(folder)
        pages[lessons] = {"route": route(), "path": lesson_tables()}
        pages[porting] = index_blocks(comparisons, goldens, CHECKPOINTS, trainers())
    return pages


def _blocks_of(number: str, goldens: Mapping[str, Golden]) -> Blocks:
    if number == QUANTISED:
        return quantised_blocks(quantised_rows(), exact_errors())
    if number == TORCH:
        dense = {name: goldens[name] for name in BUILTIN if name in goldens}  # they show the cost of half precision
        return torch_blocks(dense, [c for name in dense for c in torch_rows(name)])
    if number in TRAINING:
        return training_blocks(number, training_rows())
    return page_blocks(number, _forward_rows(goldens))


def _forward_rows(models: Iterable[str]) -> list[Comparison]:
    return [c for name in models for c in rows_of(name)]


@cache  # the slow part, and goldens do not change under a running command
def rows_of(model: str) -> Sequence[Comparison]:
    """List all comparisons of one built-in model with its goldens, as it runs and in float64."""
    return list(verify_stored(model, _runners, long=False))


def _runners(weights: Weights, *, has_reference: bool) -> Iterator[NumpyRunner]:
    return (runner for runner in numpy_runners(weights, has_reference=has_reference) if runner.name in SHOWN)


@cache
def torch_rows(model: str) -> Sequence[Comparison]:
    """List all comparisons of one built-in model on the torch page as it is written, on the CPU."""
    from llorch.judging.runners.torch import torch_runners
    from llorch.pytorch.device import target

    targets = [target("cpu", dtype) for dtype in ARITHMETICS]
    by_target = (verify_stored(model, torch_runners(on, only=[""]), backend=str(on), long=False) for on in targets)
    return [c for comparisons in by_target for c in comparisons]


@cache
def quantised_rows() -> Sequence[Comparison]:
    """List all comparisons of checkpoint 13."""
    return list(verify_quantised_stored())


@cache
def training_rows() -> Sequence[Comparison]:
    """List all comparisons of checkpoints 15 to 20, as NumPy runs and in float64."""
    return [c for name in TRAINED for c in verify_training_stored(name) if c.backend in SHOWN]


def indexes(folder: Path) -> tuple[Path, Path]:
    """Return the paths of the index of the lessons and of the index for people who port a model."""
    return folder / "README.md", folder / "PORTING.md"


def page(folder: Path, number: str) -> Path:
    """Return the path of the lesson of one checkpoint."""
    return folder / f"{number}_{CHECKPOINTS[number]}" / "README.md"


def porting_page(folder: Path, number: str) -> Path:
    """Return the path of the tables of one checkpoint for people who port a model."""
    return page(folder, number).with_name("PORTING.md")


def render(text: str, blocks: Blocks, *, label: str) -> str:
    """Fill the generated blocks of a page.

    Args:
        text: The page.
        blocks: Text of each block.
        label: Names the page in errors.

    Returns:
        The page with these blocks and with everything else as it was.

    Raises:
        ValueError: The page does not have exactly these blocks, each once and each closed.
    """
    names = sorted(match["name"] for match in BLOCK.finditer(text))
    is_complete = len(names) == text.count(START) == text.count(END)
    if not is_complete or names != sorted(blocks):
        raise ValueError(f"{label}: expected the generated blocks {sorted(blocks)}, each closed by {END}, got {names}")
    return BLOCK.sub(lambda match: f"{match['start']}{blocks[match['name']]}\n{END}", text)


def same(old: str, new: str) -> bool:
    """Compare two pages except for the numbers that depend on the machine."""
    return OF_THIS_MACHINE.sub("~", old) == OF_THIS_MACHINE.sub("~", new)
