"""Run the check of a lesson on an implementation, in this process."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llorch.apps.learn.calling import all_frames, own_frames
from llorch.apps.learn.checks.after_logits import ArgmaxCheck, FilterCheck, GenerationCheck, RowCheck
from llorch.apps.learn.checks.forward import ForwardCheck, exercises_so_far, list_written
from llorch.apps.learn.checks.foundation import BlocksCheck, FoundationCheck
from llorch.apps.learn.checks.training import TrainingCheck
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Call
from llorch.apps.learn.guard import guard_function
from llorch.apps.learn.judging import Check, Mode
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, WARM_UP, Lesson
from llorch.apps.learn.small_cases import find_small_error
from llorch.apps.learn.verdict import BORROWED, LessonReport
from llorch.apps.learn.wrong_functions import find_causes
from llorch.judging.goldens.quantised import FOLDER as QUANTISED
from llorch.judging.goldens.training import FILES, MODELS
from llorch.judging.types import Cause, Comparison
from llorch.runtime.builtin import goldens_folder, missing_golden
from llorch.runtime.errors import LearnerFault, MissingExtra
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.table import CHECKPOINTS, STAGES
from llorch.stages.training import CHECKPOINTS as TRAINING

FORWARD = tuple(number for number in CHECKPOINTS if number in {stage.checkpoint for stage in STAGES} - {"00"})


def make_check(lesson: Lesson) -> Check:
    """Make the check of a lesson; raise MissingExtra for the torch lesson if torch is not installed."""
    makers: dict[str, Callable[[], Check]] = dict.fromkeys(FORWARD, ForwardCheck)
    makers |= dict.fromkeys((WARM_UP, "00"), FoundationCheck)
    makers |= {"09": RowCheck, "10": ArgmaxCheck, "11": FilterCheck, "12": GenerationCheck}
    makers |= {"13": BlocksCheck, "14": _make_torch_check} | dict.fromkeys(TRAINING, TrainingCheck)
    return makers[lesson.number]()


def _make_torch_check() -> Check:
    try:
        from llorch.apps.learn.on_torch.check import TorchCheck
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch") from None  # extra, package
    return TorchCheck()


def check(lesson: Lesson, implementation: Implementation, mode: Mode = "isolated") -> LessonReport:
    """Judge the written exercises of one lesson; errors of the learner's code become part of the report.

    In isolated mode stages are computed from the goldens' arrays. In chained mode the first failing lesson is reported.

    Raises:
        MissingExtra: The lesson needs torch, and torch is not installed.
        NotInWheel: The lesson needs goldens that the wheel does not contain.
    """
    _require_goldens(lesson)
    report = _judge_lesson(lesson, implementation, mode)
    if mode == "isolated" or report.label != FAIL:
        return report
    earlier_lessons = [candidate for candidate in LESSONS[: LESSONS.index(lesson)] if not candidate.on_torch]
    for index, earlier in enumerate(earlier_lessons):  # errors of earlier lessons propagate
        if (first := _judge_lesson(earlier, implementation, mode)).label == FAIL:
            unchecked = ", ".join(later.number for later in (*earlier_lessons[index + 1 :], lesson))
            return replace(first, notes=[*first.notes, f"not checked: {unchecked}"])
    return report


def _require_goldens(lesson: Lesson) -> None:
    """Raise NotInWheel if goldens of a lesson are missing, before the learner has written anything."""
    names = {"13": (QUANTISED,)} | {number: tuple(f"{model}/{FILES[1]}" for model in MODELS) for number in TRAINING}
    for path in (goldens_folder() / name for name in names.get(lesson.number, ())):
        if not path.exists():
            raise missing_golden(path)


def _judge_lesson(lesson: Lesson, implementation: Implementation, mode: Mode) -> LessonReport:
    """Run and judge the written exercises of one lesson, and search the cause of a failure."""
    unwritten, lesson_check, fault, traceback = implementation.unwritten(lesson.parts), make_check(lesson), "", ""
    implementation.notes.clear()
    implementation.calls.clear()
    by_exercise: dict[str, list[Comparison]] = {}
    small_errors: dict[str, str] = {}
    renamed = [implementation.renamed[name] for name in unwritten if name in implementation.renamed]
    try:
        small_errors = dict(_run_small_cases(lesson, implementation))
        for exercise_name, comparison in lesson_check.comparisons(lesson, implementation, mode):
            by_exercise.setdefault(exercise_name, []).append(comparison)
    except LearnerFault as error:
        fault = "\n    ".join([str(error), *own_frames(error.__cause__ or error)])
        traceback = all_frames(error)
    report = LessonReport(
        lesson.number, "", by_exercise, unwritten, fault, traceback=traceback, notes=[*renamed, *implementation.notes],
        small_errors=small_errors,
    )  # fmt: skip
    if fault or report.wrong or small_errors:
        report = replace(report, label=FAIL)
    else:
        report = replace(report, label=BORROWED if unwritten or not by_exercise else PASS)
    if report.label != FAIL:
        return report
    return _explain(report, lesson_check, lesson, implementation, mode)


def _run_small_cases(lesson: Lesson, implementation: Implementation) -> Iterator[tuple[str, str]]:
    """Yield the name of each written exercise that is wrong in a small case, and the wrong result."""
    for exercise in list_written(lesson, implementation):
        function = guard_function(exercise, implementation.written[exercise.name], record=implementation.calls)
        with implementation.installed(()):  # without warnings
            error = find_small_error(exercise, function, implementation.calls)
        if error:
            yield exercise.name, error


def _explain(
    report: LessonReport, lesson_check: Check, lesson: Lesson, implementation: Implementation, mode: Mode
) -> LessonReport:
    """Name the wrong function, and the mistakes that return its numbers; a failure by rounding alone passes."""
    exercises = exercises_so_far(lesson, implementation) if mode == "chained" else list_written(lesson, implementation)
    wrong = next((e for e in exercises if any(call.is_wrong for call in implementation.calls.of(e.name))), None)
    causes: Sequence[Cause] = ()
    if wrong is not None:
        causes = find_causes(wrong, implementation.calls.of(wrong.name), implementation.written[wrong.name])
    if report.wrong and not causes:
        with suppress(LearnerFault):  # the comparisons before a fault may have a cause
            causes = lesson_check.find_causes(lesson, implementation, mode, report.failures)
    is_rounding = bool(causes) and causes[0].kind == "rounding"
    if is_rounding and not report.fault and not report.small_errors:
        return replace(report, causes=causes, label=BORROWED if report.unwritten else PASS)
    if wrong is not None or report.wrong:
        name = report.failures[0][0] if wrong is None else wrong.name
        report = replace(report, where=_where(name, implementation))
    if not causes or is_rounding:
        return report
    notes = [*report.notes, *report.fault.splitlines()[:1]]  # the mistake may have caused the fault
    return replace(report, causes=causes, fault="", notes=notes)


def _where(exercise_name: str, implementation: Implementation) -> str:
    """Return file, line and name of an exercise's function, without the line if unknown; for "" only the source."""
    if not exercise_name:
        return implementation.source
    code = getattr(inspect.unwrap(implementation.written[exercise_name]), "__code__", None)
    folder = Path(implementation.source)
    if code is None or folder.resolve() not in Path(code.co_filename).resolve().parents:
        return f"{exercise_name}() of {implementation.source}"
    return f"{folder / Path(code.co_filename).name}:{code.co_firstlineno} {exercise_name}()"


def check_functions(number: str, **functions: Call) -> LessonReport:
    """Judge functions of a lesson, given by exercise name; lesson pages print the report."""
    return check(BY_NUMBER[number], Implementation("this page", functions))
