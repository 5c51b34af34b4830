"""The verdict of one lesson: one of four words, and what a person needs to go on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llorch.learn.judging import Judged
from llorch.verify.diagnosis.verdict import Suspect
from llorch.verify.judge import FAIL, PASS

BORROWED, NOT_RUN = "BORROWED", "NOT RUN"


@dataclass(frozen=True)
class Verdict:
    """What is said of one lesson.

    Attributes:
        lesson: Its number.
        word: PASS, FAIL, BORROWED (a part is not written, and nothing written is wrong) or NOT RUN.
        judged: Every comparison.
        borrowed: Parts that are not written.
        fault: What the learner's code did that nothing can go on with, with its frames; empty if it ran.
        suspects: Known mistakes that make what failed.
        reason: Why it did not run.
        notes: What is harmless but worth knowing.
    """

    lesson: str
    word: str
    judged: Sequence[Judged] = field(default=(), repr=False)
    borrowed: Sequence[str] = ()
    fault: str = ""
    suspects: Sequence[Suspect] = ()
    reason: str = ""
    notes: Sequence[str] = ()

    @property
    def wrong(self) -> list[Judged]:
        """The comparisons that failed."""
        return [each for each in self.judged if each.row.verdict == FAIL]

    def __str__(self) -> str:
        """For a person."""
        return "\n".join([f"checkpoint_{self.lesson}  {self.word}", *self._said()])

    def _said(self) -> list[str]:
        said = [f"  {self.fault}"] if self.fault else []
        said += [f"  {suspect.name}: {suspect.sentence}" for suspect in self.suspects]
        if self.wrong:
            row = self.wrong[0].row
            said += [f"  first wrong  {row.model} {row.case} {row.stage} layer {row.layer}: {row.error:.1e}"]
        return said


def word_for(judged: Sequence[Judged], borrowed: Sequence[str], fault: str) -> str:
    """The word for what was found."""
    if fault or any(each.row.verdict == FAIL for each in judged):
        return FAIL
    return BORROWED if borrowed or not judged else PASS
