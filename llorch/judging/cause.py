"""Cause of an error: a known mistake, a setting or a rounding, and the share of the error that it explains."""

from dataclasses import dataclass
from typing import Literal

CauseKind = Literal["mistake", "setting", "rounding", "near miss"]


@dataclass(frozen=True)
class Cause:
    """Possible cause of an error, compared with the error.

    Attributes:
        name: Name of the mistake, setting or arithmetic: `rope-interleaved-pairs`, `norm-eps`.
        kind: What it is; `near miss`: it explains much of the error, but is not the cause.
        sentence: The mistake and the right way, with the recovered value: "eps is 1e-5 here, the file says 1e-6".
        stages: Keys of the stages in which it was injected.
        explained_share: Share of the error that it explains, 0 to 1.
        remaining: Factor by which the remaining error exceeds the tolerance; at most 1: all is explained.
        value: Recovered value of a setting: a number, or its name.
    """

    name: str
    kind: CauseKind
    sentence: str
    stages: tuple[str, ...]
    explained_share: float
    remaining: float
    value: str = ""
