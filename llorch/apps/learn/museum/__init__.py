"""The bug museum: reports about wrong engines, as exercises. The learner gets a dump and names the cause.

`reports.toml` holds the reports, by thread. `exhibit` reads it, injects the cause into llorch's forward pass of a
built-in model and writes the dump of that run. `compare` judges a learner's answer.
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

RUNS = {"whole": (12,), "steps": (9, 1, 1, 1), "chunks": (7, 6), "far": (9, 1)}  # tokens of the passes
FAR = 4003  # where `far` begins; no multiple of a power of two


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A report; for its fields see `reports.toml`."""

    number: int  # from 1 on
    thread: str
    symptom: str
    model: str
    injected: Sequence[str]
    words: Sequence[str]
    cause: str
    run: str = "steps"
    stages: Sequence[str] = ()
    fix: str = ""

    @property
    def link(self) -> str:
        """The address of the thread; GitHub sends issues on to pull requests."""
        return "https://github.com/" + self.thread.replace("#", "/issues/")

    @property
    def passes(self) -> list[Tokens]:
        """The tokens that the engine gets; all differ."""
        first, passes = FAR if self.run == "far" else 0, []
        ids = np.random.default_rng(14 + self.number).permutation(300)[: sum(RUNS[self.run])].tolist()
        for n in RUNS[self.run]:
            passes.append(Tokens(tuple(ids[:n]), first))
            ids, first = ids[n:], first + n
        return passes

    def dump(self) -> StageDump:
        """Record every stage of a run of llorch with the cause in it."""
        weights = open_weights(find(self.model))
        replay = Replay(weights, StageDump.of_arrays(self.passes))
        past, change, traces = Past(replay.config, weights.dtype), self._change(replay), []
        for number in range(len(self.passes)):
            traces.append({})
            with np.errstate(all="ignore"):
                replay.run(number, traces[-1].__setitem__, past, change, fed=False)
            past = past.next()
        return StageDump.of_arrays(self.passes, *traces, source=self.thread, engine="theirs", dtype="float32")

    def _change(self, replay: Replay) -> Change:
        known = {each.name: each for each in known_mistakes(replay.config)}
        places = [name for name, (stage, _) in replay.stages.items() if not self.stages or stage.name in self.stages]
        made = []
        for name, _, value in (injected.partition("=") for injected in self.injected):
            if name == "overflow":
                made.append(Change({places[-1]: StageChange(lambda inputs, stage, array: _overflowing(array))}))
                continue
            family = next((each for each in setting_families(replay.config) if each.name == name), None)
            hypothesis = family.hypothesis(float(value or 1)) if family else known[name]
            made.append(hypothesis.change(hypothesis.at(places)))
        return together(made)

    @cached_property
    def findings(self) -> Sequence[Finding]:
        """The findings of a diagnosis of the dump."""
        return list(findings(_wide(self.model), self.dump()))


def _overflowing(array: np.ndarray) -> np.ndarray:
    return np.where(np.abs(array) == np.abs(array).max(), np.inf, array)


@cache
def _wide(model: str) -> Weights:
    """Open a built-in model with float64 weights."""
    return open_weights(find(model)).astype(np.float64, keep=True)


@cache
def exhibits() -> Sequence[Exhibit]:
    """Read all exhibits, in the order of the file."""
    text = files("llorch.apps.learn.museum").joinpath("reports.toml").read_text(encoding="utf-8")
    return [Exhibit(number=at, **report) for at, report in enumerate(tomllib.loads(text)["report"], 1)]


def exhibit(number: int) -> Exhibit:
    """Return the exhibit of a number, from 1 on; UserError if no exhibit has it."""
    if not 1 <= number <= len(exhibits()):
        raise UserError(f"museum: expected a number from 1 to {len(exhibits())}, got {number}; see llorch learn museum")
    return exhibits()[number - 1]


def write(shown: Exhibit, folder: Path) -> None:
    """Write the dump of an exhibit, and a README in the same folder; a dump in it is replaced."""
    dump = shown.dump()
    with DumpWriter(folder, engine="theirs", dtype="float32") as writer:
        for number, tokens in enumerate(shown.passes):
            writer.begin(tokens.ids, tokens.first_position)
            for key, seen in dump.of_pass(number):
                layer, _, stage = key.rpartition(".")
                writer.add(stage, seen.read(), layer=int(layer[1:]) if layer else None)
    (folder / "README.md").write_text(_readme(shown, folder), encoding="utf-8")


def _readme(shown: Exhibit, folder: Path) -> str:
    """Write the README.md of an exhibit: its symptom, its files, and the commands to start with."""
    ids = ",".join(str(token) for tokens in shown.passes for token in tokens.ids)
    sizes = " + ".join(str(len(tokens.ids)) for tokens in shown.passes)
    first = shown.passes[0].first_position
    return f"""# Bug museum, number {shown.number}

> {shown.symptom}

A user reported this about an engine. llorch injected the cause into a run of `{shown.model}`. This folder holds every
stage of the run in float32: `{sizes}` tokens, one pass after the other into the same cache, from position {first} on.
Each line of `index.jsonl` describes an array: its name, its layer, its shape, and its offset in `data.bin`.

To get the right stages for the same tokens, in one pass:

    llorch trace {shown.model} --tokens {ids} --first-position {first} -o right.npz

Find the first wrong stage, then its cause:

    llorch verify {shown.model} --against {folder}
    llorch learn museum answer {shown.number} WORD      a mistake, a value or a stage
    llorch learn museum solution {shown.number}         the cause, and how it was repaired

`llorch diagnose {folder} --model {shown.model}` names the cause. Try it first by hand: look at the tokens, heads and
channels that are wrong.
"""


@dataclass(frozen=True)
class MuseumAnswer:
    """The verdict on an answer: whether it names the cause, and the text for the learner."""

    is_right: bool
    said: str


def compare(shown: Exhibit, answer: str) -> MuseumAnswer:
    """Judge an answer: the name of a mistake or a part of it, a recovered value, or a stage; add a hint if wrong."""
    findings, said = shown.findings, _plain_words(answer)
    causes = [each for finding in findings for each in (*finding.causes, *finding.alternatives)]
    names = {*(each.name for each in causes), *(name.partition("=")[0] for name in shown.injected)}
    values = {float(name.partition("=")[2]) for name in shown.injected if "=" in name}
    is_other = said in {_plain_words(name) for name in MISTAKES.keys() - names}
    meant = said in {_plain_words(name) for name in names} or any(_plain_words(word) in said for word in shown.words)
    if not is_other and (meant or any(_mistake_words(name) <= {*said.split()} for name in names)):
        return MuseumAnswer(True, f"Yes. {shown.cause}")
    if not is_other and _parse_number(answer) in values:
        return MuseumAnswer(True, f"Yes, that is the value. {shown.cause}")
    return MuseumAnswer(False, _nudge(findings[0], said.replace(" ", "-") if is_other else answer.strip()))


def _nudge(first: Finding, answer: str) -> str:
    where = {stage_of(place) for _, place in first.places}
    if answer in where:
        return f"{answer} is wrong, yes. What is the mistake there? Look at the wrong tokens, heads and channels."
    if answer in BY_NAME:
        return f"The error does not begin at {answer}. Which stage is the first wrong one?"
    if answer in MISTAKES:
        begins = MISTAKES[answer].stages
        if where & {*begins}:
            return f"The mistake is in the same stage, but {answer} would give other numbers."
        return f"{answer} would show in {begins[0]} first. Where does the error begin here?"
    return "No. Find the first wrong stage, then the tokens, heads or channels that are right in it."


def solution(shown: Exhibit) -> str:
    """Tell the cause, the diagnosis and the repair, in some lines."""
    said = [f"{shown.number}. {shown.thread}: {shown.symptom}", f"cause      {shown.cause}"]
    said += [f"diagnosis  {finding.sentence}" for finding in shown.findings[:2]]
    said.append(f"fix        {' '.join(shown.fix.split()) or 'not given here; see the thread'}")
    return "\n".join([*said, f"thread     {shown.link}"])


def _plain_words(text: str) -> str:
    """Lower the case of an answer, and replace hyphens, underscores and runs of spaces by one space."""
    return " ".join(re.sub(r"[-_]", " ", text.lower()).split())


def _mistake_words(name: str) -> set[str]:
    """Split off the words of a mistake's name after its subject: `interleaved pairs`."""
    return {*_plain_words(name).split()[1:]} or {name}


def _parse_number(text: str) -> float | None:
    found = re.search(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text.lower())
    return float(found[0]) if found else None
