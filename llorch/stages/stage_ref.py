"""Where an array stands in a run: the tokens of a pass, and the place of a stage in it. Data, never parsed."""

from dataclasses import dataclass

import numpy as np

from llorch.stages.table import Stage, key


@dataclass(frozen=True)
class Tokens:
    """The tokens of one pass of an engine; those of earlier passes are in its cache.

    Attributes:
        ids: Token ids.
        first_position: Position of the first one.
    """

    ids: tuple[int, ...]
    first_position: int = 0


@dataclass(frozen=True)
class Pass(Tokens):
    """The tokens of one forward pass, and where it may be cut in two."""

    @property
    def positions(self) -> np.ndarray:
        """Absolute positions of the tokens."""
        return np.arange(self.first_position, self.first_position + len(self.ids))

    @property
    def splits(self) -> list[int]:
        """Positions at which the pass is cut in two to judge a cache: numbers of tokens in the first of two passes."""
        return sorted({1, len(self.ids) // 2, len(self.ids) - 1} - {0, len(self.ids)})

    def after(self, n_cached: int) -> "Pass":
        """Return the pass that remains when the first `n_cached` tokens are in the cache."""
        return Pass(self.ids[n_cached:], self.first_position + n_cached)


@dataclass(frozen=True)
class StageRef:
    """What one row compares.

    Attributes:
        checkpoint: Its number.
        stage: Of the stage table or that of training, or a step after the logits, of a file, of a product.
        layer: None outside the layers.
        case: Of which run: `near` and `far`, `plain`, `step 2`.
        part: Of the stage: a tensor, a setting of the sampler, a type of blocks.
        n_cached: Tokens that another pass put into the cache before.
        n_pass: Pass of a dump, or step of a dump of training.
    """

    checkpoint: str
    stage: str
    layer: int | None = None
    case: str = "near"
    part: str = ""
    n_cached: int = 0
    n_pass: int = 0

    @property
    def name(self) -> str:
        """The stage and its part, as rows show it: `gradient.q_proj.lora_A`."""
        return f"{self.stage}.{self.part}" if self.part else self.stage

    @property
    def run(self) -> str:
        """The case, as rows show it: `near, 6 cached`."""
        return f"{self.case}, {self.n_cached} cached" if self.n_cached else self.case

    @property
    def key(self) -> str:
        """Trace key of the stage: `l0.q_rope`."""
        return key(self.name, self.layer)


_ALL = slice(None)


def part_of(stage: Stage, array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Cut a stage of a whole pass to the tokens from `start` to `stop`; caches hold all earlier tokens too."""
    cuts = {"seq": slice(start, stop), "ctx": slice(0, stop)}
    return array[tuple([cuts.get(axis, _ALL) for axis in stage.axes.split()])]


def has_tokens(stage: Stage) -> bool:
    """Check if tokens stand along an axis. A state has none; it holds the value after the last token of a pass."""
    return not {"seq", "ctx"}.isdisjoint(stage.axes.split())


def token_axis(stage: Stage) -> int | None:
    """Find the axis of a stage's array along which tokens stand; None for a state of a delta net."""
    axes = stage.axes.split()
    return next((axes.index(axis) for axis in ("seq", "ctx") if axis in axes), None)
