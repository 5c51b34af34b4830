"""Result types of a diagnosis: checks of stages, findings, and the whole diagnosis.

A *stage* is a named array of the forward pass; for a training dump, a quantity of a step (n_pass is the step's number).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from llorch.judging.types import Cause, Comparison

EARLIER_PASSES = (
    "the dump does not have the passes that filled the cache; give the ids of the whole text with --tokens, and llorch "
    "computes these passes itself"
)
Kind = Literal["mistake", "rounding", "unknown", "not finite"]


@dataclass(frozen=True)
class Profile:
    """Location of a wrong stage's error: norms of the difference over norms of the right values."""

    tokens: np.ndarray  # ratio for each token
    heads: np.ndarray | None  # ratio for each head; None if the stage has none
    channels: np.ndarray  # ratio for each channel, of head_dim if there are heads; for logits, at most 512 bins
    ulps: np.ndarray  # number of elements with an error of 0, up to 1, 2, 4 ... float32 ulps; last bin: all larger


@dataclass(frozen=True)
class StageCheck:
    """Stage of a dump, or quantity of a training step, compared with llorch's."""

    isolated: Comparison  # difference from llorch's result on the engine's inputs; ROUNDING if arithmetic explains it
    chained: Comparison | None  # difference from llorch's own run; None if the dump lacks the start of that run
    ran_since: tuple[str, ...]  # stages since the last dumped ones, this one last; the error starts in one of them
    engine_name: str  # the engine's name of the stage
    arithmetic: str  # dtype that sets the tolerance (float32, bfloat16 ...), and how llorch knows it
    profile: Profile | None = None  # location of its error; None if it is right

    @property
    def n_pass(self) -> int:
        """Number of the pass."""
        return self.isolated.stage_ref.n_pass

    @property
    def stage(self) -> str:
        """Name in the stage table."""
        return self.isolated.stage_ref.stage

    @property
    def layer(self) -> int | None:
        """Layer, None outside the layers."""
        return self.isolated.stage_ref.layer

    @property
    def key(self) -> str:
        """Stage key, `l0.q_rope`."""
        return self.isolated.stage_ref.key

    @property
    def verdict(self) -> str:
        """PASS, ROUNDING (explained by the arithmetic) or FAIL."""
        return self.isolated.verdict

    @property
    def over(self) -> float:
        """Local error as a multiple of its tolerance."""
        return self.isolated.difference.over(self.isolated.tolerance)

    def with_verdict(self, verdict: str) -> "StageCheck":
        """Return the check with another verdict."""
        return replace(self, isolated=replace(self.isolated, verdict=verdict))


@dataclass(frozen=True)
class Finding:
    """One cause of errors, and all stages of the dump that it explains.

    Attributes:
        kind: `mistake` if causes explain it, `rounding` if arithmetic does; `not finite` or `unknown` without a cause.
        key: Stage key where it shows first; `weights` if the hashes of the engine's weights alone show it.
        n_pass: Pass in which it shows first.
        starts_in: Stage keys where the error starts: one if the dump has no gap or the cause is named.
        layers: Layers in which it shows, in order; empty outside the layers.
        causes: Named causes that together explain it; empty for `unknown`.
        near_misses: Hypotheses that explain at least half of it, but leave more than rounding.
        alternatives: Hypotheses that explain it equally well: this dump cannot distinguish them from `causes`.
        places: Pass and stage key of every check that it explains.
        sentence: Message for a person.
        pattern: Part of the array that is wrong and its values, in words; empty with a cause, or if there is none.
    """

    kind: Kind
    key: str
    n_pass: int
    starts_in: tuple[str, ...]
    layers: tuple[int, ...]
    causes: tuple[Cause, ...]
    near_misses: tuple[Cause, ...]
    places: tuple[tuple[int, str], ...]
    sentence: str
    alternatives: tuple[Cause, ...] = ()
    pattern: str = ""

    @classmethod
    def of(
        cls, kind: Kind, checks: Sequence[StageCheck], sentence: str, starts_in: tuple[str, ...],
        causes: tuple[Cause, ...] = (), near_misses: tuple[Cause, ...] = (), alternatives: tuple[Cause, ...] = (),
        pattern: str = "",
    ) -> "Finding":  # fmt: skip
        """Make the finding that explains `checks`; it shows first in the first of them."""
        layers = tuple(sorted({check.layer for check in checks if check.layer is not None}))
        stage_refs = tuple((check.n_pass, check.key) for check in checks)
        return cls(
            kind, checks[0].key, checks[0].n_pass, starts_in, layers, causes, near_misses, stage_refs, sentence,
            alternatives, pattern,
        )  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis of one dump."""

    model: str  # name of the model
    source: str  # source of the dump
    results: Sequence[StageCheck]  # check of every dumped stage, in the order of the run
    findings: Sequence[Finding]  # in the order of the run, roundings included
    could_not_show: Mapping[str, Sequence[str]]  # known mistakes that no stage of this dump can reveal, by reason
    notes: Sequence[str] = ()  # facts about the dump that llorch inferred
    not_run: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)  # pass and stage key, by reason
    n_unchecked: int = 0  # cached tokens before the dump, whose keys and values come from its caches, unchecked

    @property
    def unchecked_rows(self) -> str:
        """Describe the rows of the caches that were not checked; empty if all were."""
        if not self.n_unchecked:
            return ""
        rows = "row 0" if self.n_unchecked == 1 else f"rows 0 to {self.n_unchecked - 1}"
        return f"{rows} of the caches {'was' if self.n_unchecked == 1 else 'were'} taken as given"

    @property
    def is_right(self) -> bool:
        """True if arithmetic explains every difference."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """Findings that arithmetic does not explain, in the order of the run."""
        return [finding for finding in self.findings if finding.kind != "rounding"]


def percent(share: float) -> str:
    """Format a share in percent; a share below 1 is never rounded up to 100 %."""
    return "100 %" if share >= 1 else f"{100 * min(share, 0.9999):.2f} %" if math.isfinite(share) else "-"


def count(n: int, singular: str, plural: str = "") -> str:
    """Format a number with its noun, in the singular or the plural."""
    return f"{n} {singular if n == 1 else plural or f'{singular}s'}"
