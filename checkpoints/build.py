"""Write the pages of the checkpoints: run their lessons, draw their figures.

    python checkpoints/build.py                 all pages and figures
    python checkpoints/build.py 01 01b          pages and figures of two lessons
    python checkpoints/build.py 01 --figures    only figures
    python checkpoints/build.py --check         write nothing; list outdated files (exit code 1)
    python checkpoints/build.py --site OUT      the web site, from the current pages

The source of a lesson is its `lesson.py`, and of its second page, for people who port a model, `porting.py`, both in
jupytext's percent format. Jupyter runs the code cells. A line
`<!-- source: llorch.ops.rope.rope -->` becomes that source code, folded. A block `<!-- generated: NAME -->` becomes a
table that is computed now. Numbers marked with `~` depend on the machine. A page that differs only in these is current.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees its own folder only

from checkpoints.drawing import draw, same_figure
from checkpoints.executing import executed
from checkpoints.generated.pages import FOLDER, generated, indexes, page, porting_page, render, same
from checkpoints.maps import path_map
from llorch.diagnosis.mistakes.planting import find_owner
from llorch.stages.table import CHECKPOINTS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = re.compile(r"^<!-- source: ([\w.]+) -->$", re.MULTILINE)
FOLDED = """[`{file}`](../../{file}):

<details>
<summary>Reference code of <code>{name}</code> (open it after the exercise)</summary>

```python
{code}
```

</details>"""  # GitHub folds this HTML, and so does the web site
MOST_AT_ONCE = 2  # pages that run side by side


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("numbers", nargs=-1, type=click.Choice(list(CHECKPOINTS)))
@click.option("--check", is_flag=True, help="Write nothing; fail if a file is outdated.")
@click.option("--figures", "only_figures", is_flag=True, help="Only figures.")
@click.option("--site", type=click.Path(path_type=Path), help="Only build the web site, into this folder.")
def main(numbers: Sequence[str], check: bool, only_figures: bool, site: Path | None) -> None:
    """Entry point."""
    if site:
        from checkpoints.website import build_site

        build_site(site)
        return
    lessons = numbers or list(CHECKPOINTS)
    stale = [path for path, new in figures(FOLDER, lessons, index=not numbers) if settle(path, new, check)]
    if not only_figures:
        stale += [path for path, new in pages(FOLDER, lessons, index=not numbers) if settle(path, new, check)]
    for path in stale:
        click.echo(f"{path}: not current; write it with: python checkpoints/build.py" if check else f"{path}: written")
    sys.exit(1 if check and stale else 0)


def settle(path: Path, new: str, check: bool) -> bool:
    """Return True if a file is outdated, and write it unless `check`."""
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (same_figure if path.suffix == ".svg" else same)(old, new):
        return False
    if not check:
        path.parent.mkdir(exist_ok=True)
        path.write_text(new, encoding="utf-8", newline="\n")
    return True


def figures(folder: Path, numbers: Sequence[str], *, index: bool) -> Iterator[tuple[Path, str]]:
    """Draw every figure of some lessons, and of the index if requested."""
    if index:
        yield folder / "lessons.svg", path_map()
    for number in numbers:
        lesson = page(folder, number).parent
        yield from ((lesson / "fig" / f"{name}.svg", svg) for name, svg in draw(number, lesson).items())


def pages(folder: Path, numbers: Sequence[str], *, index: bool) -> Iterator[tuple[Path, str]]:
    """Make every page of some lessons, and both indexes if requested.

    Args:
        folder: Folder of the checkpoints.
        numbers: Numbers of the lessons.
        index: Make both indexes, too.

    Yields:
        The path of a page, and its text.

    Raises:
        click.ClickException: A cell failed, or a source does not exist.
        ValueError: A page has wrong generated blocks.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # of threads that wait for Jupyter's processes
        paths = [path for number in numbers for path in (page(folder, number), porting_page(folder, number))]
        written = list(pool.map(page_of, paths))
    if index:
        written += [(path, path.read_text(encoding="utf-8")) for path in indexes(folder)]
    blocks = generated(folder, numbers, index=index)
    for path, text in written:
        yield path, render(text, blocks[path], label=str(path))


def page_of(path: Path) -> tuple[Path, str]:
    """Run the cells of a page and include its sources; generated blocks stay empty."""
    lesson = path.with_name("lesson.py" if path.name == "README.md" else "porting.py")
    return path, SOURCE.sub(lambda match: source_of(match[1], label=str(lesson)), executed(lesson, ROOT))


def source_of(name: str, *, label: str) -> str:
    """Link to the file of `llorch.ops.rope.rope` and fold its source, since the exercise comes later on the page."""
    owner, short = find_owner(name)  # a module may have the name of a function in it
    definition = getattr(owner, short, None)
    if definition is None or not (inspect.isroutine(definition) or inspect.isclass(definition)):
        raise click.ClickException(f"{label}: expected the name of a function or class, got {name}")
    definition = inspect.unwrap(definition)
    file = Path(inspect.getsourcefile(definition) or "").resolve().relative_to(ROOT).as_posix()
    return FOLDED.format(file=file, name=short, code=inspect.getsource(definition).rstrip())


if __name__ == "__main__":
    main()
