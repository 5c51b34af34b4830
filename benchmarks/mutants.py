"""Inject bugs, one at a time, and count how many the tests detect.

    python benchmarks/mutants.py                           20 in each area (hours)
    python benchmarks/mutants.py --area ops --n 50 --seed 3
    python benchmarks/mutants.py --area ops --area lora --jobs 4 --json

A bug is one place of a source file changed by a rule of `mutations.py`; `mutation_areas.py` lists the tests that
guard a file. Everything happens in a copy of the working tree. The tests run there, those that name the
module first, until one fails. A run much longer than without the bug has detected it too, by time. A bug that
keeps its module from being imported does not test the tests: another is drawn.

The draw depends on the seed and on the text of each line, not on its position, so that a change of one function does
not change the other bugs of a sample. A survivor is a missing test, unless the bug
changes no result: judge it by hand.
"""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.mutation_areas import AREAS, ROOT, Area
from benchmarks.mutations import Edit, edits

# Hidden files stay behind, except .ci, which tests import.
LEFT_OUT = shutil.ignore_patterns(".[!c]*", "__pycache__", "*.egg-info", "node_modules", "build", "dist")
PATIENCE = 5.0  # factor on the time of the tests without a bug; a minute is added
LARGEST_FILE = 4 << 30  # bytes that a bug may write; a test of large files needs a little over 2 GB


@dataclass(frozen=True)
class Mutant:
    """Injected bug and its fate."""

    file: Path
    edit: Edit
    fate: str = ""  # `caught`, `timed out`, `survived`, or `invalid` if the import fails; empty before the run

    def __str__(self) -> str:
        old_text, new_text = (re.sub(r"\s+", " ", text)[:150] for text in (self.edit.old_lines, self.edit.new_lines))
        return f"{self.file}:{self.edit.line}  {self.edit.rule}: {old_text}  ->  {new_text}"


@dataclass(frozen=True)
class Result:
    """Fates of the bugs injected in an area."""

    area: str
    n_injected: int  # number of bugs
    caught: int
    timed_out: int  # number of the caught bugs that timed out
    survivors: list[str]

    @property
    def share(self) -> float:
        """Share of the injected bugs that were caught."""
        return self.caught / max(self.n_injected, 1)

    def __str__(self) -> str:
        by_time = f" ({self.timed_out} by time)" if self.timed_out else ""
        heading = f"{self.area}: {self.caught} of {self.n_injected} caught{by_time}, {self.share:.0%}"
        return "\n".join([heading, *(f"  survived  {line}" for line in self.survivors)])


def drawn(area: Area, seed: int) -> Iterator[Mutant]:
    """Draw bugs of an area in random order: a line, then one of its possible bugs; one bug a line."""

    def rank(*parts: object) -> bytes:
        return hashlib.sha256(repr((seed, *parts)).encode()).digest()

    best: dict[bytes, tuple[bytes, Mutant]] = {}
    for file in area.files():
        source = (ROOT / file).read_text(encoding="utf-8")
        lines, counts = source.splitlines(), Counter[str]()
        occurrences = [counts.update([text]) or counts[text] for text in lines]  # distinguishes equal lines
        for edit in edits(source):
            text = lines[edit.line - 1]
            line = rank(file.as_posix(), text, occurrences[edit.line - 1])
            order = rank(text, edit.rule, edit.new_lines)
            if (line not in best or order < best[line][0]) and edit.parses(source):
                best[line] = order, Mutant(file, edit)
    yield from (best[line][1] for line in sorted(best))


class Tree:
    """Copy of the working tree that contains one bug at a time."""

    def __init__(self, folder: Path, area: Area) -> None:
        """Copy the working tree to a new folder, which tests may enter as another user."""
        self.root, self.area, self.output = folder / "tree", area, folder / "output"
        self.limit: float | None = None
        shutil.copytree(ROOT, self.root, ignore=LEFT_OUT)
        folder.parent.chmod(0o755)

    def baseline(self) -> None:
        """Run all tests without a bug, which must pass; set the time limit of a bug."""
        start = time.monotonic()
        if self._pytest(self.area.tests()) != "survived":
            lines = self.output.read_text(encoding="utf-8").splitlines()
            failed_lines = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            message = f"mutants: the tests of area {self.area.name} are red without a bug"
            raise click.ClickException("\n  ".join([message, *failed_lines]))
        self.limit = 60 + PATIENCE * (time.monotonic() - start)

    def judge(self, mutant: Mutant) -> Mutant:
        """Inject a bug, run the tests that guard its file, and restore the file."""
        file = self.root / mutant.file
        original = file.read_text(encoding="utf-8")
        file.write_text(mutant.edit.apply(original), encoding="utf-8")
        try:
            return replace(mutant, fate=self._fate(mutant))
        finally:
            file.write_text(original, encoding="utf-8")

    def _fate(self, mutant: Mutant) -> str:
        module = ".".join(mutant.file.with_suffix("").parts).removesuffix(".__init__")
        if mutant.edit.at_import and self._run([sys.executable, "-c", f"import {module}"]) != 0:
            return "invalid"
        naming_tests = self._tests_of_module(module) or self._tests_of_module(module.rpartition(".")[0])
        fate = self._pytest(naming_tests) if naming_tests else "survived"
        other_tests = [test for test in self.area.tests() if test not in naming_tests]
        return self._pytest(other_tests) if fate == "survived" and other_tests else fate

    def _tests_of_module(self, module: str) -> list[Path]:
        """List the tests of the area that name a module."""
        return [test for test in self.area.tests() if _is_about(self.root / test, module)]

    def _pytest(self, tests: Iterable[Path]) -> str:
        """Run some tests and return the fate of the mutant; tests that run engines only if the area asks for them."""
        marks = "not gpu and not weights" + ("" if self.area.live else " and not live and not slow")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
        code = self._run([*command, *map(str, tests)])
        return "timed out" if code is None else "survived" if code in (0, 5) else "caught"  # 5: no test selected

    def _run(self, command: list[str]) -> int | None:
        """Run a command in the copy, with a new home and temporary folder; return its exit code, None at the limit."""
        with (
            tempfile.TemporaryDirectory(dir=self.root.parent, ignore_cleanup_errors=True) as home,
            self.output.open("w") as output,
        ):
            Path(home).chmod(0o777)
            variables = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "HOME": home, "TMPDIR": home}
            variables["RUSTUP_HOME"] = os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))  # else rustc fails
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE)),
            )
            try:
                return process.wait(self.limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _is_about(test: Path, module: str) -> bool:
    """Check whether a test file is about a module, by its name or by its imports."""
    words = set(module.rpartition(".")[2].split("_"))
    package, _, name = module.rpartition(".")
    imports = rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b"
    return words <= set(test.stem.split("_")) or re.search(imports, test.read_text(encoding="utf-8")) is not None


def measure(area: Area, *, n: int, seed: int, jobs: int) -> Result:
    """Inject `n` bugs in an area, `jobs` at the same time, each in its own copy."""
    with tempfile.TemporaryDirectory(prefix="llorch-mutants-") as folder:
        trees = SimpleQueue[Tree]()
        first_tree = Tree(Path(folder, "0"), area)
        first_tree.baseline()
        for index in range(jobs):
            tree = Tree(Path(folder, str(index)), area) if index else first_tree
            tree.limit = first_tree.limit
            trees.put(tree)

        def judge(mutant: Mutant) -> Mutant:
            tree = trees.get()
            try:
                return tree.judge(mutant)
            finally:
                trees.put(tree)

        bugs, valid_mutants = drawn(area, seed), []
        with ThreadPoolExecutor(jobs) as pool:
            while batch := list(islice(bugs, n - len(valid_mutants))):
                for mutant in pool.map(judge, batch):
                    click.echo(f"  {mutant.fate:9} {mutant}", err=True)
                    valid_mutants += [mutant] if mutant.fate != "invalid" else []
    fates = Counter(mutant.fate for mutant in valid_mutants)
    survivors = [str(mutant) for mutant in valid_mutants if mutant.fate == "survived"]
    return Result(area.name, len(valid_mutants), len(valid_mutants) - len(survivors), fates["timed out"], survivors)


@click.command()
@click.option("--area", "names", multiple=True, type=click.Choice([area.name for area in AREAS]), help="All if none.")
@click.option("--n", default=20, show_default=True, help="Bugs in each area.")
@click.option("--seed", default=0, show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Bugs at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead.")
@click.option("--at-least", default=0.0, help="Share that must be caught, over all areas; exit code 1 below it.")
def main(names: tuple[str, ...], n: int, seed: int, jobs: int, as_json: bool, at_least: float) -> None:
    """Print how many planted bugs the tests of each area catch, and those that they do not."""
    results = []
    for area in AREAS:
        if not names or area.name in names:
            results.append(measure(area, n=n, seed=seed, jobs=jobs))
            if not as_json:
                click.echo(str(results[-1]))
    n_injected, caught = (sum(getattr(result, name) for result in results) for name in ("n_injected", "caught"))
    if as_json:
        click.echo(json.dumps([asdict(result) | {"share": result.share} for result in results], indent=2))
    else:
        click.echo(f"{caught} of {n_injected} caught, {caught / max(n_injected, 1):.0%}")
    raise click.exceptions.Exit(caught < at_least * n_injected)


if __name__ == "__main__":
    main()
