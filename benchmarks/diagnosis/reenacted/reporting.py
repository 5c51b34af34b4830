"""A report of others and how it is entered."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.diagnosis.bugs.planting import Bug
from benchmarks.diagnosis.port import Port

HEADS = ("q_rope", "k_rope")


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        thread: `owner/repository#number`.
        seen: The symptom, in our words.
        bug: The cause, planted.
        names: Known mistakes it may be named as; empty: none of them.
        value: The value that is to be recovered, where there is one.
    """

    thread: str
    seen: str
    bug: Bug
    names: tuple[str, ...]
    value: str = ""

    @property
    def link(self) -> str:
        """The address of the thread; GitHub sends issues on to pull requests."""
        return "https://github.com/" + self.thread.replace("#", "/issues/")


REPORTS: list[Report] = []


def report(
    thread: str, seen: str, made: tuple[str, ...], names: str, *, model: str, plan: str = "steps", first_pass: int = 0,
    value: str = "", layer: int | None = None,
) -> Callable[[Callable[[Port], None]], Callable[[Port], None]]:  # fmt: skip
    """Enter a report with the function that plants its cause; the first line of its docstring says the cause."""

    def enter(inject: Callable[[Port], None]) -> Callable[[Port], None]:
        name = f"{inject.__name__.replace('_', '-')} ({thread})"
        said, layers = (inject.__doc__ or "").strip(), None if layer is None else (layer,)
        bug = Bug(name, said, inject, made, layers, (model,), plan, first_pass, shapes=True, known=bool(names))
        REPORTS.append(Report(thread, seen, bug, tuple(names.split()), value))
        return inject

    return enter
