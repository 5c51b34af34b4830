"""A learner's implementation: what is written, by part; what is not is borrowed from the reference.

A folder of Python files (`l01_rms_norm.py` ...), or a program in any language (`cmd:./my-llama`) that is called with
the name of a part, reads its arguments from stdin as npz and writes its results to stdout as npz.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Adapt, Call, Exercise
from llorch.apps.learn.guard import guarded
from llorch.apps.learn.lessons import PARTS
from llorch.diagnosis.mistakes.planting import replaced


class Implementation:
    """Functions of a learner by the name of the part.

    Attributes:
        source: Names it in messages.
        written: What there is.
        renamed: What seems to be a part that is not written, under another name: a sentence by part.
        notes: What calls showed that is harmless but worth knowing, once each.
    """

    def __init__(self, source: str, written: Mapping[str, Call], renamed: Mapping[str, str] | None = None) -> None:
        """Hold the functions that a learner wrote, by name."""
        self.source, self.written, self.renamed = source, written, renamed or {}
        self.notes: dict[str, None] = {}

    def unwritten(self, parts: Iterable[Exercise]) -> list[str]:
        """Name the parts that are not written."""
        return [exercise.name for exercise in parts if exercise.name not in self.written]

    @contextmanager
    def installed(self, parts: Iterable[Exercise] | None = None, *, live: bool = False) -> Iterator[None]:
        """Run llorch with these parts (default: all) in place of its own functions, as far as they are written.

        The whole process has them meanwhile: nothing else may compute.

        Args:
            parts: Which.
            live: Nothing is judged: see `guard`.

        Raises:
            LearnerFault: Inside, where a part raises or returns what nothing can go on with.
        """
        with ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))  # numbers that are none are told by the verdict
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # torch, of arguments
            for exercise in PARTS.values() if parts is None else parts:
                if exercise.name in self.written:
                    call = guarded(exercise, self.written[exercise.name], note=self._note, live=live)
                    for place, adapt in exercise.places.items():
                        stack.enter_context(replaced(place, _adapter(adapt, call)))
            yield

    def _note(self, line: str) -> None:
        self.notes[line] = None


def _adapter(adapt: Adapt, call: Call) -> Callable[[Any], Any]:
    return lambda right: adapt(call, right)
