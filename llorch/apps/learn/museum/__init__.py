"""The bug museum: reports about wrong engines, as exercises. The learner gets a dump and names the cause.

`reports.toml` holds the reports, one per GitHub thread. An `Exhibit` injects the cause into llorch's forward pass of a
built-in model, and `write` stores the dump (every stage's array) of that run. `compare` judges a learner's answer.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from llorch.diagnosis.diagnose import findings
from llorch.diagnosis.mistakes import MISTAKES
from llorch.diagnosis.replay import Change, Past, Replay, StageChange
from llorch.diagnosis.search.cause_search import stage_of, together
from llorch.diagnosis.search.hypotheses import known_mistakes, setting_families
from llorch.diagnosis.verdict import Finding
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import Weights, open_weights
from llorch.files.hub import find
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME

RUNS = {"whole": (12,), "steps": (9, 1, 1, 1), "chunks": (7, 6), "far": (9, 1)}  # name -> tokens of each pass
FAR = 4003  # first position of the run `far`; odd, so that it is no multiple of a block size


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A user's report about a wrong engine; `reports.toml` describes the fields."""

    number: int  # from 1 on
    thread: str
    symptom: str
    model: str
    injected: Sequence[str]  # causes: known mistakes, `setting=value` or `overflow`
    words: Sequence[str]  # of right answers
    cause: str
    run: str = "steps"
    stages: Sequence[str] = ()
    fix: str = ""

    @property
    def link(self) -> str:
        """Address of the thread; GitHub redirects issues to pull requests."""
        return "https://github.com/" + self.thread.replace("#", "/issues/")

    @property
    def passes(self) -> list[Tokens]:
        """Tokens of each pass; no id occurs twice in the run."""
        position, passes = FAR if self.run == "far" else 0, []
        ids = np.random.default_rng(14 + self.number).permutation(300)[: sum(RUNS[self.run])].tolist()
        for n_tokens in RUNS[self.run]:
            passes.append(Tokens(tuple(ids[:n_tokens]), position))
            ids, position = ids[n_tokens:], position + n_tokens
        return passes

    def dump(self) -> StageDump:
        """Record every stage of a llorch run with the cause injected."""
        weights = open_weights(find(self.model))
        replay = Replay(weights, StageDump.of_arrays(self.passes))
        past, change, traces = Past(replay.config, weights.dtype), self._change(replay), []
        for index in range(len(self.passes)):
            traces.append({})
            with np.errstate(all="ignore"):
                replay.run(index, traces[-1].__setitem__, past, change, fed=False)  # no stages to feed in
            past = past.next()
        return StageDump.of_arrays(self.passes, *traces, source=self.thread, engine="theirs", dtype="float32")

    def _change(self, replay: Replay) -> Change:
        """Make the change of the run: every injected cause, in every stage that `stages` names (empty: in all)."""
        mistakes = {mistake.name: mistake for mistake in known_mistakes(replay.config)}
        keys = [name for name, (stage, _) in replay.stages.items() if not self.stages or stage.name in self.stages]
        changes = []
        for name, _, value in (injected.partition("=") for injected in self.injected):
            if name == "overflow":  # the largest numbers of the last stage become infinite
                changes.append(Change({keys[-1]: StageChange(lambda inputs, stage, array: _overflow(array))}))
                continue
            family = next((family for family in setting_families(replay.config) if family.name == name), None)
            hypothesis = family.hypothesis(float(value or 1)) if family else mistakes[name]
            changes.append(hypothesis.change(hypothesis.select_keys(keys)))
        return together(changes)

    @cached_property
    def findings(self) -> Sequence[Finding]:
        """Findings of a diagnosis of the dump."""
        return list(findings(_float64_weights(self.model), self.dump()))


def _overflow(array: np.ndarray) -> np.ndarray:
    return np.where(np.abs(array) == np.abs(array).max(), np.inf, array)


@cache
def _float64_weights(model: str) -> Weights:
    """Open a built-in model with float64 weights."""
    return open_weights(find(model)).astype(np.float64, keep=True)


@cache
def exhibits() -> Sequence[Exhibit]:
    """Read all exhibits, in the order of the file."""
    text = files("llorch.apps.learn.museum").joinpath("reports.toml").read_text(encoding="utf-8")
    return [Exhibit(number=number, **report) for number, report in enumerate(tomllib.loads(text)["report"], 1)]


def exhibit(number: int) -> Exhibit:
    """Return an exhibit by its number, from 1 on; raise UserError if no exhibit has it."""
    if not 1 <= number <= len(exhibits()):
        raise UserError(f"museum: expected a number from 1 to {len(exhibits())}, got {number}; see llorch learn museum")
    return exhibits()[number - 1]


def write(report: Exhibit, folder: Path) -> None:
    """Write the dump of an exhibit and a README into a folder; replace an earlier dump."""
    dump = report.dump()
    with DumpWriter(folder, engine="theirs", dtype="float32") as writer:
        for index, tokens in enumerate(report.passes):
            writer.begin(tokens.ids, tokens.first_position)
            for key, dumped in dump.of_pass(index):
                layer, _, stage = key.rpartition(".")
                writer.add(stage, dumped.read(), layer=int(layer[1:]) if layer else None)
    (folder / "README.md").write_text(_readme(report, folder), encoding="utf-8")


def _readme(report: Exhibit, folder: Path) -> str:
    """Format the README.md of an exhibit: its symptom, its files, and the commands to start with."""
    ids = ",".join(str(token) for tokens in report.passes for token in tokens.ids)
    sizes = " + ".join(str(len(tokens.ids)) for tokens in report.passes)
    first = report.passes[0].first_position
    return f"""# Bug museum, number {report.number}

> {report.symptom}

A user reported this about an engine. llorch injected the cause into a run of `{report.model}`. This folder holds every
stage of the run in float32: `{sizes}` tokens, one pass after the other into the same cache, from position {first} on.
Each line of `index.jsonl` describes an array: its name, its layer, its shape, and its offset in `data.bin`.

To get the right stages for the same tokens, in one pass:

    llorch trace {report.model} --tokens {ids} --first-position {first} -o right.npz

Find the first wrong stage, then its cause:

    llorch verify {report.model} --against {folder}
    llorch learn museum answer {report.number} WORD      a mistake, a value or a stage
    llorch learn museum solution {report.number}         the cause, and how it was repaired

`llorch diagnose {folder} --model {report.model}` names the cause. Try it first by hand: look at the tokens, heads and
channels that are wrong.
"""


@dataclass(frozen=True)
class MuseumAnswer:
    """Verdict on an answer, and the text for the learner."""

    is_right: bool
    said: str


def compare(report: Exhibit, answer: str) -> MuseumAnswer:
    """Judge an answer: a mistake's name or one of its words is right, or an injected value; else hint."""
    findings, words = report.findings, _normalise(answer)
    causes = [cause for finding in findings for cause in (*finding.causes, *finding.alternatives)]
    names = {*(cause.name for cause in causes), *(name.partition("=")[0] for name in report.injected)}
    values = {float(name.partition("=")[2]) for name in report.injected if "=" in name}
    is_other = words in {_normalise(name) for name in MISTAKES.keys() - names}
    is_named = words in {_normalise(name) for name in names} or any(_normalise(word) in words for word in report.words)
    if not is_other and (is_named or any(_kind_words(name) <= {*words.split()} for name in names)):
        return MuseumAnswer(True, f"Yes. {report.cause}")
    if not is_other and _parse_number(answer) in values:
        return MuseumAnswer(True, f"Yes, that is the value. {report.cause}")
    return MuseumAnswer(False, _nudge(findings[0], words.replace(" ", "-") if is_other else answer.strip()))


def _nudge(first: Finding, answer: str) -> str:
    wrong_stages = {stage_of(stage_key) for _, stage_key in first.places}
    if answer in wrong_stages:
        return f"{answer} is wrong, yes. What is the mistake there? Look at the wrong tokens, heads and channels."
    if answer in BY_NAME:
        return f"The error does not begin at {answer}. Which stage is the first wrong one?"
    if answer in MISTAKES:
        stages = MISTAKES[answer].stages
        if wrong_stages & {*stages}:
            return f"The mistake is in the same stage, but {answer} would give other numbers."
        return f"{answer} would show in {stages[0]} first. Where does the error begin here?"
    return "No. Find the first wrong stage, then the tokens, heads or channels that are right in it."


def solution(report: Exhibit) -> str:
    """Format the cause, the diagnosis and the repair, one line each."""
    lines = [f"{report.number}. {report.thread}: {report.symptom}", f"cause      {report.cause}"]
    lines += [f"diagnosis  {finding.sentence}" for finding in report.findings[:2]]
    lines.append(f"fix        {' '.join(report.fix.split()) or 'not given here; see the thread'}")
    return "\n".join([*lines, f"thread     {report.link}"])


def _normalise(text: str) -> str:
    """Lower the case of a text, and replace hyphens, underscores and runs of spaces by one space."""
    return " ".join(re.sub(r"[-_]", " ", text.lower()).split())


def _kind_words(name: str) -> set[str]:
    """Return the words of a mistake's name after the first, its subject: `rope-interleaved-pairs` without `rope`."""
    return {*_normalise(name).split()[1:]} or {name}


def _parse_number(text: str) -> float | None:
    match = re.search(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text.lower())
    return float(match[0]) if match else None
