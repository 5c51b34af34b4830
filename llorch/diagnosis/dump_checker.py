"""Compare every stage (named array) of a dump with llorch's, with the tolerances of a right engine.

The local error is the difference from llorch's result on the engine's inputs, the total error that from llorch's own
run. `profile` locates a local error by token, head and channel, and counts its sizes in float32 ulps.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from jaxtyping import Float

from llorch.diagnosis.earlier_passes import first_past, first_variances, unknown_stages
from llorch.diagnosis.expected import EngineArithmetic, Expectations, Expected, rows
from llorch.diagnosis.replay import EMBED, Arrays, Past, Replay
from llorch.diagnosis.verdict import Profile, StageCheck
from llorch.engines.dumps.stage_dump import DumpedArray
from llorch.families.config import ModelConfig
from llorch.judging.compare import judge_difference
from llorch.judging.expert_selection import ExpertSelection
from llorch.judging.runners.numpy import FLOAT64, GGML
from llorch.stages.comparison import FAIL, PASS, ROUNDING, Difference, measure
from llorch.stages.stage_ref import StageRef, token_axis
from llorch.stages.table import Stage

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ArrayPair:
    """Array of the engine, and llorch's array of the same stage and tokens."""

    actual: np.ndarray
    expected: np.ndarray
    masked: bool
    token_axis: int | None

    @property
    def difference(self) -> Difference:
        """Difference between the engine's array and llorch's, for each token too."""
        return measure(self.actual, self.expected, masked=self.masked, token_axis=self.token_axis)

    @property
    def sizes(self) -> np.ndarray | None:
        """Norm of each token's row in llorch's array, the divisor of the row's error."""
        if self.token_axis is None:
            return None
        row_axes = tuple(axis for axis in range(self.expected.ndim) if axis != self.token_axis)
        return np.sqrt(np.square(np.where(np.isfinite(self.expected), self.expected, 0)).sum(axis=row_axes))

    @property
    def has_numbers(self) -> bool:
        """Tell if both arrays are finite at some entry: two arrays of NaN are equal whatever the cause."""
        if self.actual.shape != self.expected.shape:
            return True
        return bool((np.isfinite(self.actual) & np.isfinite(self.expected)).any())

    @property
    def finite_part(self) -> Difference:
        """Difference of the entries that are finite in both arrays, the others set to 0."""
        if self.actual.shape != self.expected.shape:
            return self.difference
        is_finite = np.isfinite(self.actual) & np.isfinite(self.expected)
        actual, expected = (np.where(is_finite, array, 0) for array in (self.actual, self.expected))
        return replace(self, actual=actual, expected=expected, masked=False).difference

    def where_finite(self) -> "ArrayPair":
        """Set entries to 0 where neither array is finite: a mistake may produce exactly these values."""
        if self.masked or self.actual.shape != self.expected.shape:
            return self
        unknown = ~np.isfinite(self.actual) & ~np.isfinite(self.expected)
        return replace(self, actual=np.where(unknown, 0, self.actual), expected=np.where(unknown, 0, self.expected))


def pair_of(
    replay: Replay,
    dumped: DumpedArray,
    name: str,
    expected: np.ndarray,
    scores: tuple[np.ndarray, np.ndarray] | None = None,
) -> ArrayPair:
    """Pair a dumped stage with llorch's; with `scores` (and their variances), experts that rounding may swap match."""
    stage, _ = replay.stages[name]
    actual, expected = dumped.read().astype(expected.dtype), rows(expected, stage, dumped)
    if scores is not None:
        actual = ExpertSelection(expected, *(rows(array, stage, dumped) for array in scores)).settled(actual)
    if stage.is_selection:  # selected experts have no order
        actual, expected = np.sort(actual, axis=-1), np.sort(expected, axis=-1)
    return ArrayPair(actual, expected, stage.masked, token_axis(stage))


@dataclass
class _ReplayRun:
    """llorch's run over the passes of a dump, part by part; a part is the embedding, a layer, or norm and logits."""

    replay: Replay
    past: Past  # caches before the pass
    engine_fed: bool = True  # the dump's arrays replace llorch's; False for a run of llorch alone
    computed: dict[str, np.ndarray] = field(default_factory=dict)  # arrays of the last part, as llorch computed them
    passed: Arrays = field(default_factory=dict)  # arrays of the last part, as later stages get them

    def compute(self, n_pass: int, part: int) -> None:
        """Run a part of the model on the output of the previous part."""
        x = np.empty(0) if part == EMBED else self.passed[self.replay.input_of(part)]
        self.computed = {}
        record = self.computed.__setitem__
        with np.errstate(all="ignore"):  # wrong numbers of an engine may overflow
            self.passed = self.replay.run(n_pass, record, self.past, first=part, last=part, x=x, fed=self.engine_fed)

    def end_pass(self) -> None:
        """Move the caches to the next pass, and drop the arrays."""
        self.past, self.computed, self.passed = self.past.next(), {}, {}


class DumpChecker:
    """Checker of all passes of a dump, in order.

    Three runs advance together. Two are fed with the engine's arrays: one reads the dumped caches, the other caches to
    which it appends rows. The third run uses llorch's arrays only.
    """

    def __init__(self, replay: Replay, progress: Progress = lambda line: None, *, model: str = "") -> None:
        """Prepare the runs without computing anything; `model` is the name of the model, for reports."""
        backend = GGML if replay.weights.numerics.rounds_activations else FLOAT64
        engine = replay.dump.features.engine or "dump"
        self._compare = partial(judge_difference, engine=engine, model=model, backend=backend)
        self.replay, self.pasts = replay, list[tuple[Past, ...]]()  # caches of the fed runs before each pass
        self.not_run: list[tuple[int, str]] = []  # pass and key of stages that cannot be checked
        self._progress, self._engine = progress, EngineArithmetic(replay.dump)
        dumped, appended, free = (first_past(replay, from_dump=from_dump) for from_dump in (True, False, True))
        self._fed = _ReplayRun(replay, dumped), _ReplayRun(replay, appended)
        self._llorch_run = _ReplayRun(replay, free, engine_fed=False)
        self._memory = (
            first_variances(replay, dumped),
            dict[str, np.ndarray](),
        )  # variances of caches and states; the states themselves

    def results(self) -> Iterator[StageCheck]:
        """Yield the check of every dumped stage of every pass, in the order of the run."""
        unknown = zip(unknown_stages(self.replay), unknown_stages(self.replay, fed=False), strict=True)
        for n_pass, (unknown_keys, unknown_alone) in enumerate(unknown):
            self.pasts.append(tuple(run.past for run in self._fed))
            for check in self._checks_of_pass(n_pass):
                if check.key in unknown_keys:
                    self.not_run.append((n_pass, check.key))
                else:
                    yield replace(check, chained=None) if check.key in unknown_alone else check
            for run in (*self._fed, self._llorch_run):
                run.end_pass()

    def _checks_of_pass(self, n_pass: int) -> Iterator[StageCheck]:
        """Yield the checks of one pass, part by part of the model."""
        expectations = Expectations(self.replay, n_pass, self._engine, *self._memory)
        for part in range(EMBED, self.replay.config.n_layers + 1):
            self._progress(f"pass {n_pass + 1} of {len(self.replay.dump.passes)}, {self._part(part)}")
            for run in (*self._fed, self._llorch_run):
                run.compute(n_pass, part)
            for name, expected_for in expectations.of_part(part, self._fed[0].computed, self._fed[0].passed):
                dumped = self.replay.dump.dumped.get((n_pass, name))
                if dumped is not None:
                    yield self._check(n_pass, name, dumped, expectations, expected_for(dumped))

    def _part(self, part: int) -> str:
        n_layers = self.replay.config.n_layers
        return f"layer {part + 1} of {n_layers}" if 0 <= part < n_layers else "outside the layers"

    def _check(
        self, n_pass: int, name: str, dumped: DumpedArray, expectations: Expectations, tolerances: Expected
    ) -> StageCheck:
        """Check a stage; of the two fed runs, the one nearer to the engine's array counts."""
        (stage, layer), mode = self.replay.stages[name], self._engine.mode_at(n_pass, name)
        pairs = [
            pair_of(self.replay, dumped, name, run.computed[name], expectations.selection_scores(name, run.passed))
            for run in self._fed
        ]
        differences = [(pair if np.isfinite(pair.expected).all() else pair.where_finite()).difference for pair in pairs]
        local, pair = min(zip(differences, pairs, strict=True), key=lambda pair: pair[0].over(tolerances.local))
        total = pair_of(self.replay, dumped, name, self._llorch_run.computed[name]).difference
        stage_ref = StageRef(stage.checkpoint, stage.name, layer, f"pass {n_pass}", n_pass=n_pass)
        isolated = self._compare(local, tolerances.local, stage_ref, "isolated")
        is_located = isolated.verdict == FAIL and not local.fault and not stage.is_selection
        check = StageCheck(
            isolated,
            self._compare(total, tolerances.total, stage_ref, "chained"),
            self.replay.ran_since(n_pass, name),
            dumped.name,
            mode.name or "float32",
            profile(pair.actual, pair.expected, stage, self.replay.config) if is_located else None,
        )
        # A mode with a name has a larger tolerance than float32.
        return check.with_verdict(ROUNDING) if mode.name and check.verdict == PASS else check


MAX_STRETCHES = 512  # bins of the vocabulary
N_ULPS = 26  # bins of errors: 0, up to 1, 2, 4 ... 2^23 ulps (as large as the number), and all larger errors
AT_ONCE = 2**22  # elements compared in one chunk, to bound memory


def profile(
    actual: Float[np.ndarray, "*shape"], expected: Float[np.ndarray, "*shape"], stage: Stage, config: ModelConfig
) -> Profile:
    """Locate the differences of two arrays of the same tokens by token, head and channel.

    Return relative errors: the norm of the differences over the norm of the expected values, infinite if only the
    latter is 0. Stages without heads have none for heads; logits have at most `MAX_STRETCHES` bins for channels. Also
    count the elements by error in float32 ulps. Entries that both arrays mask with -inf are equal.
    """
    engine_rows, llorch_rows = (by_token(array, stage, config) for array in (actual, expected))
    n_tokens, n_heads, width = llorch_rows.shape
    stretches = np.arange(width) * min(width, MAX_STRETCHES) // width if stage.name == "logits" else np.arange(width)
    tokens, heads, channels = np.zeros((2, n_tokens)), np.zeros((2, n_heads)), np.zeros((2, width))
    ulps = np.zeros(N_ULPS, np.int64)
    step = max(1, AT_ONCE // (n_heads * width))
    for start in range(0, n_tokens, step):
        chunk = slice(start, start + step)
        differences, sizes = _absolute_differences(engine_rows[chunk], llorch_rows[chunk])
        ulps += _ulps(differences, sizes)
        for side, squares in enumerate((np.square(differences), np.square(sizes))):
            tokens[side, chunk] = squares.sum(axis=(1, 2))
            heads[side] += squares.sum(axis=(0, 2))
            channels[side] += squares.sum(axis=(0, 1))
    shares = _share(np.stack([np.bincount(stretches, weights=channel_squares) for channel_squares in channels]))
    return Profile(_share(tokens), _share(heads) if has_heads(stage) else None, shares, ulps)


def has_heads(stage: Stage) -> bool:
    """Tell if a stage has an axis of heads, or a width that heads divide."""
    return bool({"heads", "kv_heads", "q_width", "kv_width"} & set(stage.axes.split()))


def by_token(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Reshape a stage to (token, head, channel); one head if the stage has none."""
    axes = stage.axes.split()
    if axes[-1] in ("q_width", "kv_width"):
        return array.reshape(len(array), -1, config.head_dim)
    if len(axes) == 2:
        return array[:, None]
    return array if axes[0] == "seq" else array.swapaxes(0, 1)


def _absolute_differences(actual: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return absolute differences and expected values in float64; 0 where both arrays mask."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    masked = np.isneginf(b)
    with np.errstate(invalid="ignore"):
        difference = np.where(masked & np.isneginf(a), 0.0, np.abs(a - b))
    return np.where(np.isnan(difference), math.inf, difference), np.where(masked, 0.0, b)


def _ulps(differences: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Count the errors by their number of float32 steps, in bins of powers of two; bin 0 counts errors of 0."""
    size = np.fmin(np.abs(expected), 2.0**127).astype(np.float32)  # so that the next larger float32 is finite
    step = np.spacing(size).astype(np.float64)
    with np.errstate(divide="ignore"):
        log_ulps = np.ceil(np.log2(differences / step))
    bins = np.where(differences == 0, 0, np.clip(log_ulps, 0, N_ULPS - 2) + 1)
    return np.bincount(bins.astype(np.int64).ravel(), minlength=N_ULPS)


def _share(squares: np.ndarray) -> np.ndarray:
    """Divide norms of differences by norms of expected values; `squares` has the squares of both norms."""
    difference, size = np.sqrt(squares)
    return np.where(size > 0, difference / np.where(size > 0, size, 1.0), np.where(difference > 0, math.inf, 0.0))
