"""`check`: a lesson beside an implementation, in this process."""

from collections.abc import Callable

from llorch.learn.checks.forward import ForwardCheck
from llorch.learn.guard import LearnerFault
from llorch.learn.implementation import Implementation
from llorch.learn.judging import Check, Judged, Mode
from llorch.learn.lessons import BY_NUMBER, Lesson
from llorch.learn.part import Call
from llorch.learn.verdict import Verdict, word_for

FORWARD = ("00", "01", "01b", "02", "03", "04", "05", "06", "07", "08")


def check_of(lesson: Lesson) -> Check:
    """How a lesson is judged."""
    makers: dict[str, Callable[[], Check]] = dict.fromkeys(FORWARD, ForwardCheck)
    return makers[lesson.number]()


def check(lesson: Lesson, implementation: Implementation, mode: Mode = "isolated") -> Verdict:
    """Judge what is written of one lesson.

    Args:
        lesson: Which.
        implementation: Whose.
        mode: Whether its parts are fed the goldens' own numbers, or all that is written runs on its own results.

    Returns:
        The verdict; what the learner's code raises is in it.
    """
    borrowed, how, fault = implementation.borrowed(lesson.parts), check_of(lesson), ""
    judged: list[Judged] = []
    try:
        judged.extend(how.judged(lesson, implementation, mode))
    except LearnerFault as error:
        fault = str(error)
    found = Verdict(lesson.number, word_for(judged, borrowed, fault), judged, borrowed, fault)
    suspects = how.suspects(lesson, implementation, mode, found.wrong) if found.wrong else ()
    return Verdict(lesson.number, found.word, judged, borrowed, fault, suspects)


def check_functions(number: str, **functions: Call) -> Verdict:
    """Judge some functions by the names of their parts; lesson pages show verdicts with it.

    Args:
        number: Of the lesson.
        functions: What is written of it.

    Returns:
        The verdict.
    """
    return check(BY_NUMBER[number], Implementation("this page", functions))
