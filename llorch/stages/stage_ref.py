"""Identity of an array of a run: the tokens of a forward pass, and the stage (named array) of it."""

from dataclasses import dataclass

import numpy as np

from llorch.stages.table import Stage, key


@dataclass(frozen=True)
class Tokens:
    """Tokens of one pass of an engine; the tokens of earlier passes are in its cache.

    Attributes:
        ids: Token ids.
        first_position: Position of the first token.
    """

    ids: tuple[int, ...]
    first_position: int = 0


@dataclass(frozen=True)
class Pass(Tokens):
    """Tokens of one forward pass, with their positions and the splits into prefill and decode pass."""

    @property
    def positions(self) -> np.ndarray:
        """Absolute positions of the tokens."""
        return np.arange(self.first_position, self.first_position + len(self.ids))

    @property
    def splits(self) -> list[int]:
        """Numbers of tokens in the first of two passes, for checks of the KV cache."""
        return sorted({1, len(self.ids) // 2, len(self.ids) - 1} - {0, len(self.ids)})

    def after(self, n_cached: int) -> "Pass":
        """Return the pass that remains when the first `n_cached` tokens are in the cache."""
        return Pass(self.ids[n_cached:], self.first_position + n_cached)


@dataclass(frozen=True)
class StageRef:
    """Reference to the array that one comparison compares.

    Attributes:
        checkpoint: Number of the validation point, a key of `table.CHECKPOINTS`; no weights file.
        stage: Name of a stage of the forward or training table, or of a sampling step, a file or a kernel.
        layer: Layer index; None outside the layers.
        case: Name of the input or training run: `near` position 0, `far` from it, `plain`, `step 2`.
        part: Item of the stage: a tensor, a sampler setting, a block type, a kind of file; empty if there is only one.
        n_cached: Number of tokens in the cache before the pass.
        n_pass: Index of the pass in a dump (arrays that another program wrote), or of the step in a training dump.
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
        """Stage and part, as in tables: `gradient.q_proj.lora_A`."""
        return f"{self.stage}.{self.part}" if self.part else self.stage

    @property
    def run(self) -> str:
        """Case, as in tables: `near, 6 cached`."""
        return f"{self.case}, {self.n_cached} cached" if self.n_cached else self.case

    @property
    def key(self) -> str:
        """Trace key of the stage: `l0.q_rope`."""
        return key(self.name, self.layer)


_ALL = slice(None)
_HEADS = ("heads", "kv_heads", "q_width", "kv_width", "q_and_gate")  # axes of heads in attention


def part_of(stage: Stage, array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Slice the tokens from `start` to `stop` of a stage; `ctx` (keys or cache) always starts at the first token."""
    cuts = {"seq": slice(start, stop), "ctx": slice(0, stop)}
    return array[tuple([cuts.get(axis, _ALL) for axis in stage.axes.split()])]


def has_tokens(stage: Stage) -> bool:
    """Check if the array has a token axis. A recurrent state has none; it is the state after the last token."""
    return not {"seq", "ctx"}.isdisjoint(stage.axes.split())


def token_axis(stage: Stage) -> int | None:
    """Return the token axis of a stage's array; None for a recurrent state."""
    axes = stage.axes.split()
    return next((axes.index(axis) for axis in ("seq", "ctx") if axis in axes), None)


def heads_axis(stage: Stage) -> int | None:
    """Return the axis of attention heads, alone or joined with their dimensions; None for a stage without heads."""
    return next((index for index, axis in enumerate(stage.axes.split()) if axis in _HEADS), None)
