"""`llorch learn open`: show the page of a lesson on the terminal, or in a browser."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import find_source, impl_option, learners_folder, near, one_lesson
from llorch.cli.learn.next import next_step
from llorch.cli.options import group, page_option, verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson

PAGE = "README.md"


@verb(
    "Show the page of a lesson.",
    "llorch learn open",
    "llorch learn open 01b",
    "llorch learn open 01 --site path/to/site",
)
@click.argument("lesson", required=False)
@impl_option
@group(
    "Output",
    page_option("--site", envvar="LLORCH_SITE", help="Address or folder of the built site.  [default: LLORCH_SITE]"),
)
def command(*, lesson: str | None, impl: str | None, site: str | None) -> None:
    """Show the page of LESSON (default: the next one) on the terminal; with --site, in a browser.

    The address or path of the page is printed on stderr.
    """
    from llorch.apps.learn.lessons import LESSONS

    if lesson is not None:
        show_page(learners_folder(impl) if find_source(impl) else None, one_lesson(lesson), site)
        return
    step = next_step(folder := learners_folder(impl))
    show_page(folder, LESSONS[-1] if step is None else step.lesson, site)


def show_page(folder: Path | None, lesson: "Lesson", site: str | None = None) -> None:
    """Show the page of a lesson; if there is a folder, record in it that the page was opened."""
    from llorch.apps.learn.progress import LearnerProgress

    page = next(path for path in (lesson.folder / PAGE, lesson.folder.parent / PAGE) if path.exists())
    if site is None:
        _print_page(page)
        say(f"{near(page)}")
    else:
        _browse(f"checkpoints/{page.parent.name}/README.html", site)
    if folder is not None:
        with LearnerProgress(folder, say).changed(lesson) as standing:
            standing.opened = True


def _print_page(page: Path) -> None:
    """Print Markdown, rendered if stdout is a terminal."""
    from rich.markdown import Markdown

    from llorch.cli.tables import console

    out, text = console(), page.read_text(encoding="utf-8")
    if out.is_terminal:
        out.print(Markdown(text), soft_wrap=False)
    else:
        click.echo(text)


def _browse(path: str, site: str) -> None:
    """Open a page of the site, at an address or in a folder, in the browser."""
    import webbrowser

    local = Path(site)
    address = (local / path).resolve().as_uri() if local.is_dir() else f"{site.rstrip('/')}/{path}"
    webbrowser.open(address)
    say(address)
