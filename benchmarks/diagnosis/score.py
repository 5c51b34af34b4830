"""Score of the diagnosis, and of other tools' rules, on dumps with a known cause.

    python -m benchmarks.diagnosis.score                all of them, some minutes
    python -m benchmarks.diagnosis.score --quick        a few dozen that lie far apart
    python -m benchmarks.diagnosis.score --only rope    those whose name has this in it
    python -m benchmarks.diagnosis.score --json FILE    every answer beside what was expected

Every dump is written to a folder and read by the code of `llorch diagnose`. What counts is the *first* finding that is
not rounding. A dump that is refused before it is judged got a wrong answer, unless a guard says just what is wrong.

    place    it shows first where the bug first changes the dump, in pass, layer and stage; and of the stages in which
             it must have been made the bug was made in one
    layer    the same where only outputs of blocks are shown: pass and layer of the first that the bug changes
    name     the first suspect is a known mistake, or a setting, that the bug is
    value    the recovered value is the planted one, to three digits
    unknown  of a bug that no list of known mistakes has: "none of the known", and no suspect
    second   of two bugs, the second is found behind the first, where it was made, under its name
    silent   of right engines: no finding but rounding

Dumps of training are of an independent trainer of adapters, and those of folders of engines that read a quantised
Hugging Face folder, most of them wrongly; the rules of others have nothing to say of either.
The rules of others are marked alike; where one gives a class of causes, `name` says whether that class could be meant.

A run of all dumps also prints the table of checkpoints/guide/diagnosis.md, and fails if that page shows other figures.
"""

import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from benchmarks.diagnosis.asking import Answer, of_case, of_control, of_engine_run, of_folder, of_report
from benchmarks.diagnosis.cases import Case, cases, correct_diagnosis_of
from benchmarks.diagnosis.controls import CONTROLS
from benchmarks.diagnosis.engine_runs import engine_runs
from benchmarks.diagnosis.folders import FOLDER_CASES
from benchmarks.diagnosis.reenacted import REPORTS

if TYPE_CHECKING:
    from benchmarks.diagnosis.training_cases import TrainingCase

GOALS = {"place": 0.98, "layer": 0.95, "name": 0.92, "silent": 1.0}
SECONDS = 5.0  # processor seconds for each dump
RULES = ("skill", "fixed", "cosine")
CRITERIA = ("place", "name", "value", "unknown", "second", "layer", "silent")
SHOWN = {  # row titles of the page
    "place": "first wrong stage and layer",
    "name": "the mistake's name",
    "unknown": '"none of the known", where that is true',
    "second": "second bug behind the first",
    "layer": "outputs of blocks only: layer",
    "silent": "right engines not accused",
}
COLUMNS = {"": "llorch", "skill": "rules of size and name", "fixed": "first over 1e-3", "cosine": "cosine under 0.99"}
PAGE = Path(__file__).parents[2] / "checkpoints/guide/diagnosis.md"
QUICK = {"planted": 30, "reports": 6, "control": 23, "engines": 7, "folders": 12, "training": 18}  # step of the sample
Job = tuple[str, str, Callable[[], Answer]]  # group, name, and the function that asks


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A few dozen dumps.")
@click.option("--only", default="", help="Those whose name has this in it.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every answer to this file.")
def main(quick: bool, only: str, jobs: int, file: Path | None) -> None:
    """Entry point; exit code 1 when a goal is missed."""
    jobs_to_ask = chosen(quick=quick, only=only)
    if not jobs_to_ask:
        raise click.UsageError(f"--only: expected a part of the name of a dump, got {only!r}")
    answers = ask_all(jobs_to_ask, jobs, click.echo)
    if file:
        file.write_text(json.dumps([asdict(answer) for answer in answers], indent=1))
    click.echo(table(answers))
    is_stale = False
    if not quick and (absent := [engine_run.name for engine_run in engine_runs() if not engine_run.is_here]):
        click.echo(f"NOT RUN: {', '.join(dict.fromkeys(absent))}: pip install -e '.[golden]'")
    elif not quick and not only:
        click.echo(f"\n{figures(answers)}")
        if is_stale := figures(answers) != extract_table(PAGE.read_text(encoding="utf-8")):
            click.echo(f"{PAGE}: expected this table, got other figures; replace it")
    sys.exit(1 if missed(answers) or is_stale else 0)


def every_job() -> list[Job]:
    """List every dump that can be judged."""
    injected = [("planted", case.name, partial(_ask_injected, case)) for case in cases()]
    reports = [("reports", report.bug.name, partial(of_report, report)) for report in REPORTS]
    pairs = [(variant, model) for variant in CONTROLS for model in variant.models]
    controls = [("control", f"{variant.name}/{model}", partial(of_control, variant, model)) for variant, model in pairs]
    engines = [
        ("live" if run.needs else "engines", f"{run.name}/{run.model}", partial(of_engine_run, run))
        for run in engine_runs()
        if run.is_here
    ]
    folders = [("folders", f"folders/{case.name}/{case.folder}", partial(of_folder, case)) for case in FOLDER_CASES]
    training = [("training", case.name, partial(_ask_training, case)) for case in _training_cases()]
    return [*injected, *reports, *controls, *engines, *folders, *training]


def _training_cases() -> list["TrainingCase"]:
    from benchmarks.diagnosis.training_cases import training_cases  # imports torch

    return list(training_cases()) if find_spec("torch") and find_spec("peft") else []


def _ask_training(case: "TrainingCase") -> Answer:
    from benchmarks.diagnosis.training_cases import score

    scored = score(case)
    findings = "; ".join(f"{finding.key} {finding.kind}" for finding in scored.wrong) or "nothing is wrong"
    if case.bug is None:
        right = {"silent": not scored.wrong}
    else:
        right = {"place": scored.stage, "name" if case.bug.names else "unknown": scored.is_named}
    expected = f"{case.bug.stage}: {', '.join(case.bug.names) or 'none of the known'}" if case.bug else "nothing"
    return Answer(case.name, "training", right, findings, expected, scored.seconds)


def _ask_injected(case: Case) -> Answer:
    return of_case(case, "planted", correct_diagnosis_of(case, case.bugs[0]))


def chosen(*, quick: bool = False, only: str = "") -> list[Job]:
    """List the dumps to judge; with `quick`, a sample spread over each group."""
    groups: dict[str, list[Job]] = defaultdict(list)
    for job in every_job():
        if only in job[1]:
            groups[job[0]].append(job)
    if quick:
        return [job for group, step in QUICK.items() for job in groups[group][::step]]
    return [job for group in groups.values() for job in group]


def ask_all(
    requested: Sequence[Job], n_jobs: int = 1, progress: Callable[[str], None] = lambda line: None
) -> list[Answer]:
    """Ask all jobs, in several forked processes if requested, because an injected bug cannot be pickled."""
    _jobs[:] = requested
    answers: list[Answer] = []
    with multiprocessing.get_context("fork").Pool(n_jobs) if n_jobs > 1 else nullcontext() as pool:
        answers_in_order = pool.imap(_ask, range(len(requested))) if pool else map(_ask, range(len(requested)))
        for answer in answers_in_order:
            answers.append(answer)
            for criterion in (name for name, right in answer.right.items() if not right):
                progress(
                    f"{criterion:8} {answer.group}: {answer.name}\n    said {answer.said}\n    true {answer.expected}"
                )
    return answers


_jobs: list[Job] = []


def _ask(index: int) -> Answer:
    return _jobs[index][2]()


def marks(answers: Sequence[Answer], criterion: str, rule: str = "") -> list[bool]:
    """Mark each answer that a criterion applies to as right or wrong, by llorch's rule or by the named other rule."""
    rights = [answer.rivals.get(rule, {}) if rule else answer.right for answer in answers if criterion in answer.right]
    is_compared = any(criterion in right for right in rights)  # a rule without names is not judged on names
    return [right.get(criterion, False) for right in rights] if is_compared else []


def missed(answers: Sequence[Answer]) -> list[str]:
    """List the goals that are missed."""
    shares = {criterion: marks(answers, criterion) for criterion in GOALS}
    return [f"{name}: {_share(shares[name])}" for name, goal in GOALS.items() if _mean(shares[name]) < goal]


def _mean(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 1.0


def _share(right: Sequence[bool]) -> str:
    return f"{sum(right)}/{len(right)} {100 * _mean(right):.1f} %" if right else "-"


def table(answers: Sequence[Answer]) -> str:
    """Write the shares by group and criterion, with those of other rules and the time."""
    lines = [f"{'':24}{'llorch':>18}" + "".join(f"{rule:>18}" for rule in RULES)]
    for group in dict.fromkeys(answer.group for answer in answers):
        of_group = [answer for answer in answers if answer.group == group]
        for criterion in (name for name in CRITERIA if marks(of_group, name)):
            shares = [_share(marks(of_group, criterion, rule)) for rule in ("", *RULES)]
            lines.append(f"{group:15}{criterion:9}" + "".join(f"{share:>18}" for share in shares))
    seconds = [answer.seconds for answer in answers]
    slow = sum(s > SECONDS for s in seconds)
    lines.append(
        f"{len(answers)} dumps; seconds each: median {median(seconds):.2f}, at most {max(seconds):.2f}; "
        f"more than {SECONDS:.0f}: {slow}"
    )
    return "\n".join([*lines, *(f"goal missed: {line}" for line in missed(answers))])


def figures(answers: Sequence[Answer]) -> str:
    """Write the table of the page, without training and folders; rules are judged on dumps that they could read."""
    dump_answers = [answer for answer in answers if answer.group not in ("training", "folders")]
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for criterion, title in SHOWN.items():
        columns = (marks([a for a in dump_answers if a.rivals or not rule], criterion, rule) for rule in COLUMNS)
        cells = [f"{sum(x)} of {len(x)} ({100 * _mean(x):.1f} %)" if x else "-" for x in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def extract_table(page: str) -> str:
    """Extract the table of diagnoses from the page."""
    return page.partition("<!-- diagnosis -->\n")[2].partition("\n<!-- end -->")[0]


if __name__ == "__main__":
    main()
