"""Runners compute llorch's stages exactly as users run them. Nothing here knows of tolerances or verdicts.

`numpy` is the forward pass in float32, with every sum in float32, in float64 and under ggml numerics; `torch` the
modules in each way they run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np

from llorch.judging.expert_selection import StageOverride, as_made
from llorch.ops.numerics import DtypeName
from llorch.stages.stage_ref import Pass

Trace = Mapping[str, np.ndarray]


@runtime_checkable
class StageObserver(Protocol):
    """What a pass calls with every stage."""

    def __call__(self, name: str, array: np.ndarray, /, *, flips: int = 0, refused: int = 0) -> None:
        """Look at a stage as it was computed, before anything is replaced.

        Under ggml numerics `flips` values round to another number and are replaced; `refused` do so though they are
        farther off than rounding explains, and stay.
        """
        ...


@runtime_checkable
class Runner(Protocol):
    """One way in which llorch runs a model."""

    name: str  # the backend, in rows
    dtype: DtypeName
    hidden: frozenset[str]  # stages that it does not show

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return the context that all computation must run under."""
        ...

    def isolated(self, this: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass in which the golden replaces each stage as soon as `observe` has received it."""
        ...

    def chained(
        self, case: str, this: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = as_made
    ) -> None:
        """Run a pass on its own results, or the second of two passes, of which only the second is shown to `observe`.

        The pass continues with the values that `override` returns.
        """
        ...

    def in_parts(self, this: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        """Run a pass cut at `bounds`, 0 and its length included.

        `observe` gets each stage and the end of its part. Only parts that reach into the last tokens need to be shown.
        """
        ...

    def last_row(self, this: Pass, override: StageOverride = as_made) -> np.ndarray:
        """Return the logits of the last token, the row that sampling sees."""
        ...

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Compute the distribution for every setting of `SAMPLINGS`."""
        ...

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the greedy text after a prompt."""
        ...
