"""Judge a learner's answer to an exhibit, and give the solution."""

import re
from dataclasses import dataclass

from llorch.apps.learn.museum.exhibit import Exhibit
from llorch.diagnosis.mistakes import MISTAKES
from llorch.diagnosis.search.trials import stage_of
from llorch.diagnosis.verdict import Finding
from llorch.stages.table import BY_NAME


@dataclass(frozen=True)
class MuseumAnswer:
    """The verdict on an answer.

    Attributes:
        is_right: Whether it names the cause.
        said: Text for the learner.
    """

    is_right: bool
    said: str


def compare(shown: Exhibit, answer: str) -> MuseumAnswer:
    """Judge an answer in free words.

    Args:
        shown: The exhibit.
        answer: The name of a mistake or a part of it, a recovered value, or a stage.

    Returns:
        Whether it is the cause, with a hint if it is not.
    """
    findings, said = shown.findings, _plain_words(answer)
    causes = [each for finding in findings for each in (*finding.suspects, *finding.alternatives)]
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
    """Tell the cause, the diagnosis and the repair.

    Args:
        shown: The exhibit.

    Returns:
        Some lines.
    """
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
