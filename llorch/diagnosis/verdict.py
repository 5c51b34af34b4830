"""What a diagnosis consists of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llorch.comparison import Difference, Tolerance

RIGHT, HONEST, WRONG, NOT_RUN = "RIGHT", "HONEST", "WRONG", "NOT RUN"
EARLIER_PASSES = (
    "the dump does not have the passes that filled the cache; give the ids of the whole text with --tokens, and llorch "
    "computes these passes itself"
)
Kind = Literal["mistake", "honest", "unknown", "not finite"]


@dataclass(frozen=True)
class Profile:
    """Where the error of a wrong stage lies: norms of the difference over norms of what is right.

    Attributes:
        tokens: Of each token.
        heads: Of each head; None where the stage has none.
        channels: Of each channel: of head_dim where there are heads, else of the width (vocab in at most 512 bins).
        ulps: How many elements are off by 0, up to 1, 2, 4, 8 ... float32 ulps (of the element's own size); the last
            bin has all that are farther off.
    """

    tokens: np.ndarray
    heads: np.ndarray | None
    channels: np.ndarray
    ulps: np.ndarray


@dataclass(frozen=True)
class StageResult:
    """One stage of the dump beside ours.

    Attributes:
        n_pass: Number of the pass.
        key: Stage key, `l0.q_rope`.
        stage: Name in the stage table.
        layer: None outside the layers.
        name: What the engine calls it.
        local: How far it is from what ours makes of the engine's own inputs.
        limit: How far a right engine of its arithmetic may be.
        total: How far it is from our own run: local and inherited.
        total_limit: How far a right engine's run may be.
        arithmetic: What it is judged in: float32, bfloat16 ..., and how that is known.
        verdict: RIGHT, HONEST (what the arithmetic explains), WRONG.
        since: Stages that ran since the last ones the dump shows, itself the last; an error was made in one of them.
        profile: Where its error lies; None where it is right.
    """

    n_pass: int
    key: str
    stage: str
    layer: int | None
    name: str
    local: Difference
    limit: Tolerance
    total: Difference
    total_limit: Tolerance
    arithmetic: str
    verdict: str
    since: tuple[str, ...]
    profile: Profile | None = None

    @property
    def over(self) -> float:
        """By what factor the local error exceeds its limit."""
        return self.local.over(self.limit)


@dataclass(frozen=True)
class Suspect:
    """One hypothesis beside the error.

    Attributes:
        name: Of the mistake, or of the setting or arithmetic, `rope-interleaved-pairs`, `norm-eps`.
        sentence: What was done and what is right, with the recovered value: "eps is 1e-5 here, the file says 1e-6".
        stages: Where it was planted, stage keys.
        share: Of the error that it explains, 0 to 1.
        left: By what factor what is left exceeds the limit; at most 1: nothing is left.
        value: What was recovered, for settings: a number, or its name.
    """

    name: str
    sentence: str
    stages: tuple[str, ...]
    share: float
    left: float
    value: str = ""


@dataclass(frozen=True)
class Finding:
    """One cause, and all places of the dump that it explains.

    Attributes:
        kind: `mistake` when suspects explain it; `honest` when it is arithmetic; `unknown`: none of the known.
        key: Where it shows first.
        n_pass: In which pass.
        made_in: Stage keys in which it must have been made: one where the dump has no gap, or where it is named.
        layers: Layers in which it shows, in order; empty outside the layers.
        suspects: The named ones, which together explain it; empty for `unknown`.
        near_misses: What explains more than half of it, but leaves more than rounding does.
        alternatives: What explains it as well as the named ones do: this dump cannot tell them apart.
        places: Passes and stage keys of all results that it explains.
        sentence: The whole of it for a person.
    """

    kind: Kind
    key: str
    n_pass: int
    made_in: tuple[str, ...]
    layers: tuple[int, ...]
    suspects: tuple[Suspect, ...]
    near_misses: tuple[Suspect, ...]
    places: tuple[tuple[int, str], ...]
    sentence: str
    alternatives: tuple[Suspect, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What is said of a dump.

    Attributes:
        model: The model's name.
        source: Of the dump.
        results: Every stage of it, in the order of passes and of the forward pass.
        findings: Causes, the first in the order of the run first; honest ones are among them.
        could_not_show: Known mistakes that no stage of this dump could have shown, by reason.
        notes: What was found of the dump rather than declared.
        not_run: Passes and stage keys that could not be judged, by reason.
    """

    model: str
    source: str
    results: Sequence[StageResult]
    findings: Sequence[Finding]
    could_not_show: Mapping[str, Sequence[str]]
    notes: Sequence[str] = ()
    not_run: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """True if nothing is wrong: arithmetic explains every difference."""
        return not any(finding.kind != "honest" for finding in self.findings)
