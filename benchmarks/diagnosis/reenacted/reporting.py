"""Bug report of another engine, and its registration."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.diagnosis.bugs.planting import Bug
from benchmarks.diagnosis.port import Port

HEADS = ("q_rope", "k_rope")


@dataclass(frozen=True)
class Report:
    """Bug report of another engine.

    Attributes:
        thread: `owner/repository#number`.
        symptom: Symptom, in llorch's words.
        bug: Injected cause.
        names: Known mistakes that are a right name; empty: no known mistake.
        value: Value to recover, if there is one.
    """

    thread: str
    symptom: str
    bug: Bug
    names: tuple[str, ...]
    value: str = ""

    @property
    def link(self) -> str:
        """Address of the thread; GitHub redirects issues to pull requests."""
        return "https://github.com/" + self.thread.replace("#", "/issues/")


REPORTS: list[Report] = []


def report(
    thread: str, symptom: str, starts_in: tuple[str, ...], names: str, *, model: str, plan: str = "steps",
    first_pass: int = 0, value: str = "", layer: int | None = None,
) -> Callable[[Callable[[Port], None]], Callable[[Port], None]]:  # fmt: skip
    """Register a report with the function that injects its cause; the docstring's first line describes the cause."""

    def enter(inject: Callable[[Port], None]) -> Callable[[Port], None]:
        name, is_known = f"{inject.__name__.replace('_', '-')} ({thread})", bool(names)
        sentence, layers = (inject.__doc__ or "").strip(), None if layer is None else (layer,)
        bug = Bug(name, sentence, inject, starts_in, layers, (model,), plan, first_pass, shapes=True, is_known=is_known)
        REPORTS.append(Report(thread, symptom, bug, tuple(names.split()), value))
        return inject

    return enter
