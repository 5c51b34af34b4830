"""Runners: what computes stages of ours for the judge, as it runs for users. Nothing here knows of limits or verdicts.

`numpy` is the forward pass in float32, with every sum in float32, in float64 and under ggml numerics; `torch` the
modules in each way they run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from llorch.numerics import DtypeName
from llorch.verify.places import Pass

Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """A pass of ours on its own results.

    Attributes:
        trace: What it computed, before anything was replaced.
        flips: Under ggml numerics: stage key to values that round to another number, and were replaced.
        refused: Stage key to values that do so though they were farther off than rounding explains; they stay.
    """

    trace: Trace
    flips: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


@runtime_checkable
class Runner(Protocol):
    """One way of ours to run a model."""

    name: str  # the backend, in rows
    dtype: DtypeName
    hidden: frozenset[str]  # stages that it does not show

    def arithmetic(self) -> AbstractContextManager[None]:
        """What everything is to run under."""
        ...

    def isolated(self, this: Pass, golden: Trace) -> Trace:
        """One pass in which the golden takes the place of each stage as soon as that was recorded."""
        ...

    def chained(self, case: str, this: Pass, *, n_cached: int = 0) -> Run:
        """A pass, or the second of two."""
        ...

    def last_row(self, this: Pass) -> np.ndarray:
        """Logits of the last token, the row that sampling sees."""
        ...

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """The distribution of every setting of `SAMPLINGS`."""
        ...

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """The greedy text that follows a prompt."""
        ...
