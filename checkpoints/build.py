"""Write the pages of the checkpoints: run their lessons, draw their figures.

    python checkpoints/build.py                 all pages and figures
    python checkpoints/build.py 01 01b          of two lessons
    python checkpoints/build.py 01 --figures    figures alone
    python checkpoints/build.py --check         write nothing; say what is not current (exit code 1)
    python checkpoints/build.py --site OUT      the web site, of the pages as they are

The source of a page is its `lesson.py`, in jupytext's percent format. Its code cells are run by Jupyter; a line
`<!-- source: llorch.ops.rope.rope -->` becomes that source, a block `<!-- generated: NAME -->` a table that is computed
now. Numbers marked with `~` belong to the machine that wrote them: a page that differs in these only is current.
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
from llorch.stages import CHECKPOINTS
from llorch.verify.mistakes.planting import owner_of
from llorch.verify.report.pages import FOLDER, generated, page, render, same

ROOT = Path(__file__).resolve().parents[1]
SOURCE = re.compile(r"^<!-- source: ([\w.]+) -->$", re.MULTILINE)
FOLDED = """From [`{file}`](../../{file}):

<details>
<summary>Reference code of <code>{name}</code> (open it after the exercise)</summary>

```python
{code}
```

</details>"""  # GitHub folds this HTML, and so does the web site
MOST_AT_ONCE = 2  # lessons that run side by side


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("numbers", nargs=-1, type=click.Choice(list(CHECKPOINTS)))
@click.option("--check", is_flag=True, help="Write nothing; fail when something is not current.")
@click.option("--figures", "only_figures", is_flag=True, help="Figures alone.")
@click.option("--site", type=click.Path(path_type=Path), help="Build the web site into this folder, and nothing else.")
def main(numbers: Sequence[str], check: bool, only_figures: bool, site: Path | None) -> None:
    """Entry point."""
    if site:
        from checkpoints.website import build_site

        build_site(site)
        return
    wanted = numbers or list(CHECKPOINTS)
    stale = [path for path, new in figures(FOLDER, wanted) if settle(path, new, check)]
    if not only_figures:
        stale += [path for path, new in pages(FOLDER, wanted, index=not numbers) if settle(path, new, check)]
    for path in stale:
        click.echo(f"{path}: not current; write it with: python checkpoints/build.py" if check else f"{path}: written")
    sys.exit(1 if check and stale else 0)


def settle(path: Path, new: str, check: bool) -> bool:
    """Whether a file was not what it should be; if it is not only looked at, now it is."""
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (same_figure if path.suffix == ".svg" else same)(old, new):
        return False
    if not check:
        path.parent.mkdir(exist_ok=True)
        path.write_text(new, encoding="utf-8", newline="\n")
    return True


def figures(folder: Path, numbers: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Every figure of some lessons, as it should be."""
    for number in numbers:
        lesson = page(folder, number).parent
        yield from ((lesson / "fig" / f"{name}.svg", svg) for name, svg in draw(number, lesson).items())


def pages(folder: Path, numbers: Sequence[str], *, index: bool) -> Iterator[tuple[Path, str]]:
    """Every page of some lessons, and the index if wanted, as they should be.

    Args:
        folder: Of the checkpoints.
        numbers: Of the lessons.
        index: Whether the index belongs to them.

    Yields:
        The path of a page, and its text.

    Raises:
        click.ClickException: A cell failed, or a name stands for nothing.
        ValueError: A page has other generated blocks than it should.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # of threads that wait for Jupyter's processes
        written = list(pool.map(page_of, [page(folder, number) for number in numbers]))
    if index:
        written.append((folder / "README.md", (folder / "README.md").read_text(encoding="utf-8")))
    blocks = generated(folder, numbers, index=index)
    for path, text in written:
        yield path, render(text, blocks[path], label=str(path))


def page_of(path: Path) -> tuple[Path, str]:
    """A page with its cells run and its sources included; generated blocks are not filled yet."""
    lesson = path.with_name("lesson.py")
    return path, SOURCE.sub(lambda found: source_of(found[1], label=str(lesson)), executed(lesson, ROOT))


def source_of(name: str, *, label: str) -> str:
    """A link to the file of `llorch.ops.rope.rope`, then its source, folded: the exercise comes later on the page."""
    owner, short = owner_of(name)  # a module may have the name of a function in it
    found = getattr(owner, short, None)
    if found is None or not (inspect.isroutine(found) or inspect.isclass(found)):
        raise click.ClickException(f"{label}: expected the name of a function or class, got {name}")
    found = inspect.unwrap(found)
    file = Path(inspect.getsourcefile(found) or "").resolve().relative_to(ROOT).as_posix()
    return FOLDED.format(file=file, name=short, code=inspect.getsource(found).rstrip())


if __name__ == "__main__":
    main()
