"""Run the blind corpus: dump each case, diagnose it as a user would, and count the answers.

    python -m benchmarks.diagnosis.blind.run OUT                        about 15 minutes, models in /tmp/blindmodels
    python -m benchmarks.diagnosis.blind.run OUT --only graph-window

OUT gets a folder for each case, with its dump and the text of `llorch diagnose`. Two graders judged whether a text
leads to the line of the bug. They saw the text and one sentence on the bug, and not the code. `grades.json` has their
marks of the first run. A bug counts if both agree. Intervals are Wilson's, of 95 %.
"""

import json
import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
IS_BUG = {"A": "bool(case.flag)", "B": "case.bug"}  # in the code of each half
RIGHT, WRONG = 0, 1  # exit codes of `llorch diagnose`
SECONDS = 300  # time limit of one command
Z = 1.96  # standard deviations of an interval of 95 %


@dataclass(frozen=True)
class Case:
    """Case of the corpus: a bug, or a right variant."""

    half: str
    name: str
    is_bug: bool


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--only", default="", help="Cases whose name has this in it.")
@click.option("--jobs", default=2, show_default=True)
def main(out: Path, only: str, jobs: int) -> None:
    """Unpack the corpus, run the cases, and print the counts."""
    out = out.resolve()
    corpus = out / "corpus"
    if not corpus.exists():
        with tarfile.open(HERE / "2026-11.tar.xz") as archive:
            archive.extractall(corpus, filter="data")
        run_in(corpus / "B", [sys.executable, "prepare_models.py"])
    cases = [case for half in IS_BUG for case in list_cases(corpus / half) if only in case.name]
    with ThreadPoolExecutor(jobs) as pool:
        codes = dict(zip(cases, pool.map(lambda case: run_case(case, corpus, out), cases), strict=True))
    print_counts(codes, json.loads((HERE / "grades.json").read_text()))


def run_in(folder: Path, command: Sequence[str] | str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder of the corpus, with this checkout of llorch."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "BLIND_LLORCH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=env, shell=isinstance(command, str), timeout=SECONDS, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def list_cases(half: Path) -> list[Case]:
    """List the cases of one half of the corpus."""
    program = f"import cases\nfor case in cases.BY_NAME.values(): print(case.name, {IS_BUG[half.name]})"
    lines = run_in(half, [sys.executable, "-c", program]).stdout.splitlines()
    return [Case(half.name, name, is_bug == "True") for name, is_bug in map(str.split, lines)]


def run_case(case: Case, corpus: Path, out: Path) -> int:
    """Write the dump of a case, run the commands that its author gives, and return the highest exit code."""
    folder = out / case.half / case.name
    folder.mkdir(parents=True, exist_ok=True)
    printed = run_in(corpus / case.half, [sys.executable, "make_dump.py", case.name, str(folder / "run")]).stdout
    commands = [line.strip() for line in printed.splitlines() if line.strip().startswith("llorch ")]
    runs = [(command, run_in(folder / "run", command)) for command in commands]
    (folder / "verdict.txt").write_text("\n".join(f"$ {command}\n{run.stdout}" for command, run in runs))
    return max((run.returncode for _, run in runs), default=-1)


def print_counts(codes: Mapping[Case, int], grades: Mapping[str, Mapping[str, Sequence[bool]]]) -> None:
    """Print how many right variants were accused, and what the texts of the bugs were worth."""
    right = [code for case, code in codes.items() if not case.is_bug]
    bugs = {case.name: code for case, code in codes.items() if case.is_bug}
    print_share("right variants accused", [code == WRONG for code in right])
    print_share("right variants refused", [code not in (RIGHT, WRONG) for code in right])
    print_share("bugs reported as wrong", [code == WRONG for code in bugs.values()])
    for mark in next(iter(grades.values())):
        print_share(f"first run, {mark}", [all(grades[name][mark]) for name in bugs])


def print_share(title: str, values: Sequence[bool]) -> None:
    """Print a share with its interval."""
    n, share = len(values), sum(values) / max(1, len(values))
    if n:
        center, spread = share + Z * Z / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
        low, high = ((center + sign * spread) / (1 + Z * Z / n) for sign in (-1, 1))
        click.echo(f"{title}: {sum(values)} of {n} ({share:.0%}, {low:.0%} to {high:.0%})")


if __name__ == "__main__":
    main()
