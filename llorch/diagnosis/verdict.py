"""Parts of a diagnosis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llorch.stages.comparison import Difference, Tolerance

RIGHT, HONEST, WRONG = "RIGHT", "HONEST", "WRONG"
EARLIER_PASSES = (
    "the dump does not have the passes that filled the cache; give the ids of the whole text with --tokens, and llorch "
    "computes these passes itself"
)
Kind = Literal["mistake", "honest", "unknown", "not finite"]


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
class StageResult:
    """Stage of the dump compared with llorch's.

    Attributes:
        n_pass: Number of the pass.
        key: Stage key, `l0.q_rope`.
        stage: Name in the stage table.
        layer: None outside the layers.
        name: Name in the engine.
        local: Difference from llorch's result on the engine's inputs.
        tolerance: Tolerance of `local` for a right engine of this arithmetic.
        total: Difference from llorch's run: local and inherited.
        total_limit: Tolerance of `total` for a right engine.
        arithmetic: Arithmetic in which it is judged: float32, bfloat16 ..., and the source of that knowledge.
        verdict: RIGHT, HONEST (explained by the arithmetic), WRONG.
        ran_since: Stages that ran since the last ones the dump shows, itself the last; one of them made an error.
        profile: Location of its error; None if it is right.
    """

    n_pass: int
    key: str
    stage: str
    layer: int | None
    name: str
    local: Difference
    tolerance: Tolerance
    total: Difference
    total_limit: Tolerance
    arithmetic: str
    verdict: str
    ran_since: tuple[str, ...]
    profile: Profile | None = None

    @property
    def over(self) -> float:
        """Factor by which the local error exceeds its tolerance."""
        return self.local.over(self.tolerance)


@dataclass(frozen=True)
class Suspect:
    """Hypothesis compared with the error.

    Attributes:
        name: Name of the mistake, setting or arithmetic: `rope-interleaved-pairs`, `norm-eps`.
        sentence: The mistake and the right way, with the recovered value: "eps is 1e-5 here, the file says 1e-6".
        stages: Keys of the stages in which it was injected.
        share: Share of the error that it explains, 0 to 1.
        left: Factor by which the remaining error exceeds the tolerance; at most 1: all is explained.
        value: Recovered value of a setting: a number, or its name.
    """

    name: str
    sentence: str
    stages: tuple[str, ...]
    share: float
    left: float
    value: str = ""


@dataclass(frozen=True)
class Finding:
    """Cause, and all stages of the dump that it explains.

    Attributes:
        kind: `mistake` when suspects explain it; `honest` when it is arithmetic; `unknown`: no known mistake matches.
        key: Stage key where it shows first; `weights` if the hashes of the engine's weights alone show it.
        n_pass: Pass in which it shows first.
        starts_in: Stage keys in which it must have been made: one if the dump has no gap, or if the cause is named.
        layers: Layers in which it shows, in order; empty outside the layers.
        suspects: The named ones, which together explain it; empty for `unknown`.
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
    suspects: tuple[Suspect, ...]
    near_misses: tuple[Suspect, ...]
    places: tuple[tuple[int, str], ...]
    sentence: str
    alternatives: tuple[Suspect, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis of one dump.

    Attributes:
        model: The model's name.
        source: Source of the dump.
        results: Every stage of it, in the order of passes and of the forward pass.
        findings: Causes, the first in the order of the run first; honest ones are among them.
        could_not_show: Known mistakes that no stage of this dump could have shown, by reason.
        notes: Facts about the dump that were found, not declared.
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


def percent(share: float) -> str:
    """Format a share of an error as per cent; below 1 it never reads 100."""
    return f"{100 * min(share, 0.9999):.2f} %"
