"""What somebody takes for the cause of an exhibit, judged; and the solution."""

import re
from dataclasses import dataclass

from llorch.learn.museum.exhibit import Exhibit
from llorch.stages import BY_NAME
from llorch.verify.diagnosis.trials import stage_of
from llorch.verify.diagnosis.verdict import Finding
from llorch.verify.mistakes import MISTAKES


@dataclass(frozen=True)
class Answer:
    """What is said of an answer.

    Attributes:
        is_right: Whether it names the cause.
        said: For a person.
    """

    is_right: bool
    said: str


def judged(shown: Exhibit, answer: str) -> Answer:
    """Judge an answer in free words.

    Args:
        shown: Of what.
        answer: The name of a mistake or a part of it, a recovered value, or a stage.

    Returns:
        Whether it is the cause; a nudge where it is not.
    """
    findings, said = shown.findings, _plain(answer)
    causes = [each for finding in findings for each in (*finding.suspects, *finding.alternatives)]
    names = {*(each.name for each in causes), *(name.partition("=")[0] for name in shown.planted)}
    values = {float(name.partition("=")[2]) for name in shown.planted if "=" in name}
    is_other = said in {_plain(name) for name in MISTAKES.keys() - names}
    meant = said in {_plain(name) for name in names} or any(_plain(word) in said for word in shown.words)
    if not is_other and (meant or any(_ends(name) <= {*said.split()} for name in names)):
        return Answer(True, f"Yes. {shown.cause}")
    if not is_other and _number(answer) in values:
        return Answer(True, f"Yes, that is the value. {shown.cause}")
    return Answer(False, _nudge(findings[0], said.replace(" ", "-") if is_other else answer.strip()))


def _nudge(first: Finding, answer: str) -> str:
    where = {stage_of(place) for _, place in first.places}
    if answer in where:
        return f"{answer} is wrong, yes. What was done there? Look at which tokens, heads and channels are off."
    if answer in BY_NAME:
        return f"{answer} is not where it begins. Which stage is the first that is wrong?"
    if answer in MISTAKES:
        begins = MISTAKES[answer].stages
        if where & {*begins}:
            return f"It is made in the same stage, but {answer} would look otherwise."
        return f"{answer} would show in {begins[0]} first. Where does it begin here?"
    return "No. Find the first stage that is wrong; then ask which tokens, heads or channels are right in it."


def solution(shown: Exhibit) -> str:
    """What it was, by the diagnosis and by those who had it.

    Args:
        shown: Of what.

    Returns:
        Some lines.
    """
    said = [f"{shown.number}. {shown.thread}: {shown.symptom}", f"cause      {shown.cause}"]
    said += [f"diagnosis  {finding.sentence}" for finding in shown.findings[:2]]
    said.append(f"fix        {' '.join(shown.fix.split()) or 'not said here; the thread has what there is'}")
    return "\n".join([*said, f"thread     {shown.link}"])


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[-_]", " ", text.lower()).split())


def _ends(name: str) -> set[str]:
    """The words of a mistake's name behind its subject: `interleaved pairs`."""
    return {*_plain(name).split()[1:]} or {name}


def _number(text: str) -> float | None:
    found = re.search(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text.lower())
    return float(found[0]) if found else None
