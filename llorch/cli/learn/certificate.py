"""`llorch learn certificate`: write hashes and verdicts to a file that anyone can recompute."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import llorch
from llorch.cli.learn.folder import impl_option, learners_folder
from llorch.cli.options import PATH, group, page_option, verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.sandbox import Outcome


@verb(
    "Record which lessons pass, in a file that anyone can recompute.",
    "llorch learn certificate",
    "llorch learn certificate -o certificate.json --impl my_llama",
    "llorch learn certificate --check certificate.json --impl my_llama",
)
@impl_option
@group(
    "Input", page_option("--check", "given", type=PATH, help="Certificate to recompute and compare; writes nothing.")
)
@group(
    "Output",
    page_option("-o", "--output", type=PATH, help="File to write.  [default: certificate.json in your folder]"),
)
def command(*, impl: str | None, output: Path | None, given: Path | None) -> None:
    """Check every lesson and write verdicts, comparisons, versions, and hashes of your files and of the goldens.

    It says what you reached: complete blocks, and the models whose text your functions wrote, all together.

    Exit code 1, with --check: something other than a version differs.
    """
    from llorch.apps.learn.lessons import BY_NUMBER
    from llorch.apps.learn.progress import certificate, differences, with_untouched
    from llorch.apps.learn.sandbox import outcomes
    from llorch.cli.learn.shown import counted
    from llorch.files.new_file import new_file
    from llorch.files.strict_json import read_json

    folder = learners_folder(impl)
    recorded = read_json(given, limit=1 << 20) if given else None
    lesson_outcomes = list(with_untouched(folder, outcomes(str(folder), list(BY_NUMBER), progress=say)))
    text_models = _find_text_models(folder, lesson_outcomes)
    computed = certificate(folder, lesson_outcomes, llorch.__version__, text_models=text_models)
    if recorded is None:
        target = output or folder / "certificate.json"
        with new_file(target) as temporary:
            temporary.write_text(json.dumps(computed, indent=1) + "\n", encoding="utf-8")
        click.echo(f"{target}: {counted(lesson_outcomes)}")
        for line in _describe_reached(**computed["reached"]):
            click.echo(line)
        return
    if recorded.get("versions") != computed["versions"]:
        say(f"versions: the certificate has {recorded.get('versions')}, this installation has {computed['versions']}")
    differing = differences(recorded, computed)
    click.echo("\n".join(differing) or f"{given}: every hash and verdict matches: {counted(lesson_outcomes)}")
    click.get_current_context().exit(bool(differing))


def _find_text_models(folder: Path, lesson_outcomes: "Sequence[Outcome]") -> list[str]:
    """Return the models whose text the learner's functions write, all chained; empty if a lesson of it fails."""
    from llorch.apps.learn.lessons import RUN_LESSONS
    from llorch.apps.learn.sandbox import outcomes
    from llorch.runtime.builtin import BUILTIN, models_with_goldens
    from llorch.stages.comparison import PASS

    passed = {outcome.lesson for outcome in lesson_outcomes if outcome.label == PASS}
    if not passed.issuperset(lesson.number for lesson in RUN_LESSONS):
        return []
    (outcome,) = outcomes(str(folder), [RUN_LESSONS[-1].number], "chained", progress=say)
    return [*models_with_goldens(BUILTIN)] if outcome.label == PASS else []


def _describe_reached(blocks: Sequence[str], text: Sequence[str]) -> Iterator[str]:
    if blocks:
        yield f"complete: {'; '.join(blocks)}"
    if text:
        yield f"your functions, all together, wrote the text of both engines with {', '.join(text)}"
