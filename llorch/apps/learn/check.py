"""`check`: a lesson beside an implementation, in this process."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llorch.apps.learn.calling import all_frames, own_frames
from llorch.apps.learn.checks.after_logits import ArgmaxCheck, FilterCheck, GenerationCheck, RowCheck
from llorch.apps.learn.checks.forward import ForwardCheck
from llorch.apps.learn.checks.foundation import BlocksCheck, FoundationCheck
from llorch.apps.learn.checks.training import TrainingCheck
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.edge_cases import require_edges
from llorch.apps.learn.exercise import Call
from llorch.apps.learn.judging import Check, Mode
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, WARM_UP, Lesson
from llorch.apps.learn.verdict import BORROWED, LessonReport
from llorch.judging.types import Comparison
from llorch.runtime.errors import LearnerFault, MissingExtra
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.table import CHECKPOINTS, STAGES
from llorch.stages.training import CHECKPOINTS as TRAINING

FORWARD = tuple(number for number in CHECKPOINTS if number in {stage.checkpoint for stage in STAGES} - {"00"})


def check_of(lesson: Lesson) -> Check:
    """Return the check that judges a lesson; MissingExtra for a lesson on torch where torch is not installed."""
    makers: dict[str, Callable[[], Check]] = dict.fromkeys(FORWARD, ForwardCheck)
    makers |= dict.fromkeys((WARM_UP, "00"), FoundationCheck)
    makers |= {"09": RowCheck, "10": ArgmaxCheck, "11": FilterCheck, "12": GenerationCheck}
    makers |= {"13": BlocksCheck, "14": _torch_check} | dict.fromkeys(TRAINING, TrainingCheck)
    return makers[lesson.number]()


def _torch_check() -> Check:
    try:
        from llorch.apps.learn.on_torch.check import TorchCheck
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch") from None
    return TorchCheck()


def check(lesson: Lesson, implementation: Implementation, mode: Mode = "isolated") -> LessonReport:
    """Judge what is written of one lesson; what the learner's code raises is in the verdict.

    Isolated, its parts are fed the goldens' own numbers; chained, all that is written runs on its own results.

    Raises:
        MissingExtra: The lesson is that on torch, which is not installed.
        LeftOut: The lesson needs goldens that a wheel leaves out.
    """
    found = _judge_lesson(lesson, implementation, mode)
    if mode == "isolated" or found.label != FAIL:
        return found
    before = [each for each in LESSONS[: LESSONS.index(lesson)] if not each.on_torch]
    for at, earlier in enumerate(before):  # what is wrong there is handed on
        if (first := _judge_lesson(earlier, implementation, mode)).label == FAIL:
            behind = ", ".join(each.number for each in (*before[at + 1 :], lesson))
            return replace(first, notes=[*first.notes, f"not checked: {behind}"])
    return found


def _judge_lesson(lesson: Lesson, implementation: Implementation, mode: Mode) -> LessonReport:
    """Compare what the learner's functions of a lesson make, and return the verdict."""
    unwritten, how, fault, traceback = implementation.unwritten(lesson.parts), check_of(lesson), "", ""
    implementation.notes.clear()
    by_part: dict[str, list[Comparison]] = {}
    renamed = [implementation.renamed[name] for name in unwritten if name in implementation.renamed]
    try:
        for part, comparison in how.comparisons(lesson, implementation, mode):
            by_part.setdefault(part, []).append(comparison)
        if not LessonReport(lesson.number, "", by_part).wrong:
            require_edges(implementation, lesson.parts)
    except LearnerFault as error:
        fault = "\n    ".join([str(error), *own_frames(error.__cause__ or error)])
        traceback = all_frames(error)
    found = LessonReport(
        lesson.number, "", by_part, unwritten, fault, traceback=traceback, notes=[*renamed, *implementation.notes]
    )
    if fault or found.wrong:
        found = replace(found, label=FAIL)
    else:
        found = replace(found, label=BORROWED if unwritten or not by_part else PASS)
    if not found.wrong:
        return found
    found = replace(found, where=_where(found.wrong_by_part[0][0], implementation))
    with suppress(LearnerFault):  # what was judged before a fault may have a name
        found = replace(found, causes=how.find_causes(lesson, implementation, mode, found.wrong_by_part))
    if fault:
        return _first_things_first(found)
    return replace(found, label=BORROWED if unwritten else PASS, where="") if found.is_rounding else found


def _first_things_first(found: LessonReport) -> LessonReport:
    """Make a fault a note where a known mistake was found before it: the fault may come of that."""
    is_named = any(each.kind != "near miss" for each in found.causes) and not found.is_rounding
    return replace(found, fault="", notes=[*found.notes, found.fault.splitlines()[0]]) if is_named else found


def _where(part: str, implementation: Implementation) -> str:
    """Return the file and line of an exercise's function, or only the source where no line is known."""
    if not part:
        return implementation.source
    code = getattr(inspect.unwrap(implementation.written[part]), "__code__", None)
    folder = Path(implementation.source)
    if code is None or folder.resolve() not in Path(code.co_filename).resolve().parents:
        return f"{part}() of {implementation.source}"
    return f"{folder / Path(code.co_filename).name}:{code.co_firstlineno} {part}()"


def check_functions(number: str, **functions: Call) -> LessonReport:
    """Judge the functions of a lesson by the names of their parts; lesson pages show verdicts with it."""
    return check(BY_NUMBER[number], Implementation("this page", functions))
