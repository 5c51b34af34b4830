"""Parts of a diagnosis."""

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
    """Location of a wrong stage's error: norms of the difference over norms of the right values.

    Attributes:
        tokens: Ratio for each token.
        heads: Ratio for each head; None if the stage has none.
        channels: Ratio for each channel: of head_dim if there are heads, else of the width (vocab: at most 512 bins).
        ulps: Number of elements with an error of 0, up to 1, 2, 4, 8 ... float32 ulps (of the element's size); the
            last bin counts all larger errors.
    """

    tokens: np.ndarray
    heads: np.ndarray | None
    channels: np.ndarray
    ulps: np.ndarray


@dataclass(frozen=True)
class StageCheck:
    """Stage of a dump, or quantity of a training step, compared with llorch's.

    Attributes:
        isolated: Difference from llorch's result on the engine's inputs; the verdict is ROUNDING if the arithmetic
            explains it.
        chained: Difference from llorch's own run: local and inherited; None if the dump lacks what it starts from.
        ran_since: Stages that ran since the last ones the dump shows, itself the last; one of them made an error.
        engine_name: Name in the engine.
        arithmetic: Arithmetic in which it is judged: float32, bfloat16 ..., and the source of that knowledge.
        profile: Location of its error; None if it is right.
    """

    isolated: Comparison
    chained: Comparison | None
    ran_since: tuple[str, ...]
    engine_name: str
    arithmetic: str
    profile: Profile | None = None

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
        """Factor by which the local error exceeds its tolerance."""
        return self.isolated.difference.over(self.isolated.tolerance)

    def with_verdict(self, verdict: str) -> "StageCheck":
        """Return the check with another verdict."""
        return replace(self, isolated=replace(self.isolated, verdict=verdict))


@dataclass(frozen=True)
class Finding:
    """Cause, and all stages of the dump that it explains.

    Attributes:
        kind: `mistake` when causes explain it; `rounding` when it is arithmetic; `unknown`: no known mistake matches.
        key: Stage key where it shows first; `weights` if the hashes of the engine's weights alone show it.
        n_pass: Pass in which it shows first.
        starts_in: Stage keys in which it must have been made: one if the dump has no gap, or if the cause is named.
        layers: Layers in which it shows, in order; empty outside the layers.
        causes: The named ones, which together explain it; empty for `unknown`.
        near_misses: Hypotheses that explain more than half of it, but leave more than rounding does.
        alternatives: Hypotheses that explain it as well as the named ones: this dump cannot tell them apart.
        places: Passes and stage keys of all results that it explains.
        sentence: The finding in one text for a person.
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

    @classmethod
    def of(
        cls, kind: Kind, results: Sequence[StageCheck], sentence: str, starts_in: tuple[str, ...],
        causes: tuple[Cause, ...] = (), near_misses: tuple[Cause, ...] = (), alternatives: tuple[Cause, ...] = (),
    ) -> "Finding":  # fmt: skip
        """Make the finding that explains some results; the first of them is where it shows first."""
        layers = tuple(sorted({result.layer for result in results if result.layer is not None}))
        places = tuple((result.n_pass, result.key) for result in results)
        return cls(
            kind, results[0].key, results[0].n_pass, starts_in, layers, causes, near_misses, places, sentence,
            alternatives,
        )  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis of one dump.

    Attributes:
        model: The model's name.
        source: Source of the dump.
        results: Every stage of it, in the order of passes and of the forward pass.
        findings: Causes, the first in the order of the run first; roundings are among them.
        could_not_show: Known mistakes that no stage of this dump could have shown, by reason.
        notes: Facts about the dump that were found, not declared.
        not_run: Passes and stage keys that could not be judged, by reason.
    """

    model: str
    source: str
    results: Sequence[StageCheck]
    findings: Sequence[Finding]
    could_not_show: Mapping[str, Sequence[str]]
    notes: Sequence[str] = ()
    not_run: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """True if nothing is wrong: arithmetic explains every difference."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """The findings that no arithmetic explains, the first of the run first."""
        return [finding for finding in self.findings if finding.kind != "rounding"]


def percent(share: float) -> str:
    """Format a share of an error as per cent; below 1 it never reads 100."""
    return f"{100 * min(share, 0.9999):.2f} %"
