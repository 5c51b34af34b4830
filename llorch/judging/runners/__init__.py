"""Runners compute llorch's stages exactly as users run them. They do not use tolerances or verdicts.

`numpy` runs the forward pass in float32, with every sum in float32, in float64 and under ggml numerics (activations
rounded as in llama.cpp). `torch` runs the modules in every execution mode, such as with a batch or compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np

from llorch.judging.expert_selection import StageOverride, identity
from llorch.ops.numerics import DtypeName
from llorch.stages.stage_ref import Pass

Trace = Mapping[str, np.ndarray]


@runtime_checkable
class StageObserver(Protocol):
    """Function that a pass calls with every stage."""

    def __call__(self, name: str, array: np.ndarray, /, *, flips: int = 0, refused: int = 0) -> None:
        """Receive a stage as llorch computed it, before any value is replaced.

        Under ggml numerics, products round their inputs. `flips` is the number of values that round to another number
        than the golden's and are replaced by it. `refused` values do so, too, but their error exceeds the tolerance, so
        they are not replaced and fail.
        """
        ...


@runtime_checkable
class Runner(Protocol):
    """One execution mode of llorch."""

    name: str  # backend in comparisons
    dtype: DtypeName
    hidden: frozenset[str]  # names of stages that the runner does not expose

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return the context that all computation must run under; it sets the dtype of sums."""
        ...

    def isolated(self, inputs: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass in which the golden replaces each stage as soon as `observe` has received it."""
        ...

    def chained(
        self, case: str, inputs: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = identity
    ) -> None:
        """Run a pass on llorch's results; with `n_cached`, observe only the pass after the prefill of so many tokens.

        `case` names the inputs. The pass continues with the values that `override` returns for each stage.
        """
        ...

    def in_chunks(self, inputs: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        """Run a pass in chunks with these `bounds`, from 0 to the number of tokens.

        `observe` gets each stage and the end of its chunk. Chunks without the last tokens need not be observed, see
        `goldens.long_contexts.LAST`.
        """
        ...

    def last_row(self, inputs: Pass, override: StageOverride = identity) -> np.ndarray:
        """Return the logits of the last token, which sampling reads."""
        ...

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Compute the sampling distribution for every setting of `goldens.forward.SAMPLINGS`."""
        ...

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the greedy text after a prompt."""
        ...
