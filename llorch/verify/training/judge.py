"""Checkpoints 15 to 20 against their stored goldens: deltas, losses, gradients, optimizer steps, curves, exports.

Each row compares ours with what PEFT, torch or llama.cpp made, and shows how far both are from the truth: PEFT and
torch, unmodified, in float64. The tolerance is 4 times their distance from it, of a group of stages, never above a
ceiling. Ours in float64 is compared with the truth itself, at the limits of `training_limits`. Parameters are measured
in learning rates: see `checkpoints/18_optimizer_step`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np

from llorch.builtin import builtin_path, goldens_folder
from llorch.files import Weights, open_weights
from llorch.verify.compare import FACTOR, Difference, Tolerance, measure, measure_in
from llorch.verify.goldens import sha256
from llorch.verify.training.exports import EXPORTS, Exports
from llorch.verify.training.goldens import AMPLIFICATION, TRUTH, Tolerances, TrainingGolden, lacking, read
from llorch.verify.training.limits import ceiling, wide_limit
from llorch.verify.training.path import NumpyPath
from llorch.verify.training.recipe import OPTIMIZER
from llorch.verify.training.stages import TRAINING_STAGES, Key, TrainingStage
from llorch.verify.verifier import BACKENDS, FAIL, FLOAT64, PASS, Row

Arrays = dict[str, np.ndarray]
MODES = ("isolated", "chained")
OF_EXPORTS = ("exported_logits",)  # groups that are made from files


def verify_training_stored(name: str) -> Iterator[Row]:
    """Judge NumPy on a model against its stored training goldens.

    Args:
        name: In `training_goldens.MODELS`.

    Yields:
        Rows of checkpoints 15 to 20.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: The goldens were made for other weights, or a part is missing.
    """
    judge = TrainingJudge(name, *stored(name))
    for backend, arithmetic in BACKENDS.items():
        yield from judge.numpy_rows(backend, arithmetic)
    yield from WideTrainingJudge(name, judge.weights, judge.golden).numpy_rows(FLOAT64, nullcontext)


def stored(name: str) -> tuple[Weights, TrainingGolden]:
    """Open a model and its training goldens; for the exceptions see `verify_training_stored`."""
    path = builtin_path(name)
    golden = read(goldens_folder() / name)
    if golden.provenance["weights_sha256"] != sha256(path):
        raise ValueError(f"golden {name}: made for other weights than {path}; run reference_outputs/regenerate.py")
    return open_weights(path), golden


class TrainingJudge:
    """Judges training paths on one model."""

    def __init__(self, name: str, weights: Weights, golden: TrainingGolden) -> None:
        """Prepare; nothing is computed yet.

        Args:
            name: Name of the model in the rows.
            weights: The base in float32.
            golden: Its training goldens.
        """
        self.name, self.weights, self.golden = name, weights, golden

    @cached_property
    def truth(self) -> Mapping[str, Arrays]:
        """Float64 arrays by mode and key; what was exported means what the adapter means beside the base."""
        chained = {mode: dict(self.golden.truth[mode]) for mode in MODES}
        exported = {f"plain/exported_logits.{kind}": chained["chained"]["plain/adapted_logits"] for kind in EXPORTS}
        chained["chained"] |= exported
        return chained

    def numpy_rows(self, backend: str, arithmetic: Callable[[], AbstractContextManager[None]]) -> Iterator[Row]:
        """Judge NumPy in one of `BACKENDS`, or in float64; files are written and read once, as it runs."""
        with arithmetic():
            path = NumpyPath(self.weights, self.golden)
            exports = Exports.of(self.name, self.weights, self.golden) if backend == "numpy" else None
            ours = {"isolated": dict(path.isolated()), "chained": dict(path.chained())}
        if exports:
            ours["chained"].update(exports.logits)
        yield from self.rows(backend, ours, left_out=() if exports else OF_EXPORTS)
        if exports:
            yield from exports.rows

    def rows(self, backend: str, ours: Mapping[str, Arrays], *, left_out: Collection[str] = ()) -> Iterator[Row]:
        """Compare arrays with all goldens.

        Args:
            backend: Its name in the rows.
            ours: Mode to key to array.
            left_out: Groups of stages that the backend does not have; any other that is missing fails.

        Yields:
            One row for each array and producer.

        Raises:
            ValueError: A golden is missing.
        """
        shown = {text for arrays in self.golden.arrays.values() for text in arrays if Key.of(text).in_table}
        if missing := sorted({text for mode in MODES for text in self.truth[mode]} ^ shown):
            raise lacking(missing)
        for mode, text, producer, golden in self._comparisons():
            key = Key.of(text)
            if key.group.name not in left_out:
                yield self._row(backend, mode, text, producer, ours[mode].get(text), golden)

    def tolerances(self) -> Tolerances:
        """Made from the distances of the producers from the truth."""
        made: dict[str, dict[str, Tolerance]] = {mode: {} for mode in MODES}
        for mode, text, _, golden in self._comparisons():
            stage = Key.of(text).group
            distance, floor = self._distance(mode, text, golden), self.floor_of(stage)
            old = made[mode].get(stage.name, Tolerance(floor, floor))
            new = Tolerance(max(old.error, FACTOR * distance.error), max(old.worst, FACTOR * distance.worst))
            made[mode][stage.name] = new.at_most(self.ceiling_of(mode, stage))
        return made

    def shows(self, mode: str, key: Key) -> bool:
        """Whether a stage can be judged in the dtype of the run."""
        return True

    def floor_of(self, stage: TrainingStage) -> float:
        """The smallest tolerance of a stage."""
        return stage.floor

    def ceiling_of(self, mode: str, stage: TrainingStage) -> Tolerance:
        """The largest tolerance that is ever granted to a stage."""
        return ceiling(mode, stage)

    def stored_tolerance(self, mode: str, stage: TrainingStage) -> Tolerance:
        """What the golden grants."""
        return self.golden.tolerances[mode][stage.name]

    def limit(self, mode: str, text: str) -> Tolerance:
        """What an array of ours is granted."""
        stage = Key.of(text).group
        return self.stored_tolerance(mode, stage).at_most(self.ceiling_of(mode, stage))

    def compared_with(self, producer: str, golden: np.ndarray, truth: np.ndarray) -> tuple[str, np.ndarray]:
        """Whose array a row compares with, and that array."""
        return producer, golden

    def refuse_far_witnesses(self) -> None:
        """Refuse goldens that are not the truth to rounding, and such that nothing is compared with.

        Raises:
            ValueError: A producer is further from the truth than is ever granted, or an array is left over.
        """
        far, judged = [], set()
        for mode, text, producer, golden in self._comparisons():
            judged.add((producer, text))
            distance = self._distance(mode, text, golden)
            if not distance.within(self.ceiling_of(mode, Key.of(text).group)):
                far.append(f"{producer} {mode} {text}: {distance.describe()}")
        every = {(p, text) for p, arrays in self.golden.arrays.items() for text in arrays if self._wanted(text)}
        far += [f"{producer} {text}: compared with nothing" for producer, text in sorted(every - judged)]
        if far:
            raise ValueError(f"training goldens of {self.name}: {len(far)} too far from the truth:\n" + "\n".join(far))

    def _wanted(self, text: str) -> bool:
        """Whether an array is there to be compared; what no run of ours has is one of these."""
        key, modes = Key.of(text), [mode for mode in MODES if text in self.truth[mode]]
        return key.in_table and (not modes or any(self.shows(mode, key) for mode in modes))

    def _distance(self, mode: str, text: str, golden: np.ndarray) -> Difference:
        """Of a producer from the truth."""
        truth = self.truth[mode][text]
        return difference(golden.astype(truth.dtype), truth, Key.of(text).group)

    def _comparisons(self) -> Iterator[tuple[str, str, str, np.ndarray]]:
        """Mode, key, producer and golden of all that is compared, in the order of the table."""
        places = {stage.name: place for place, stage in enumerate(TRAINING_STAGES)}

        def place(entry: tuple[str, str]) -> tuple[int, int, str]:
            key = Key.of(entry[1])
            return places[key.group.name], len(key.case), key.case  # step 2 comes before step 10

        every = [(mode, text) for mode in MODES for text in self.truth[mode]]
        for mode, text in sorted(every, key=place):
            for producer, arrays in self.golden.arrays.items():
                if text in arrays and self.shows(mode, Key.of(text)):
                    yield mode, text, producer, arrays[text]

    def _row(
        self, backend: str, mode: str, text: str, producer: str, ours: np.ndarray | None, golden: np.ndarray
    ) -> Row:
        key, truth, allowed = Key.of(text), self.truth[mode][text], self.limit(mode, text)
        producer, wanted = self.compared_with(producer, golden, truth)
        found = difference(ours, wanted, key.group)
        return Row(
            model=self.name,
            checkpoint=key.group.checkpoint,
            stage=key.stage,
            layer=key.layer,
            case=key.case,
            producer=producer,
            backend=backend,
            mode=mode,
            error=found.error,
            worst=found.worst,
            truth_error=difference(None if ours is None else ours.astype(truth.dtype), truth, key.group).error,
            producer_error=self._distance(mode, text, wanted).error,
            tolerance=allowed.error,
            tolerance_worst=allowed.worst,
            verdict=PASS if found.within(allowed) else FAIL,
            note=found.fault or "",
        )


class WideTrainingJudge(TrainingJudge):
    """Judges ours in float64 against the truth itself: any wrong formula or constant shows, on any processor."""

    def __init__(self, name: str, weights: Weights, golden: TrainingGolden) -> None:
        """Prepare; for the arguments see `TrainingJudge`."""
        super().__init__(name, weights.astype(np.float64), golden)

    def shows(self, mode: str, key: Key) -> bool:
        """Whether it is float64; exported files hold float32."""
        return key.group.name not in OF_EXPORTS

    def limit(self, mode: str, text: str) -> Tolerance:
        """See `training_limits`."""
        return wide_limit(self.golden.truth[AMPLIFICATION].get(text) if mode == "chained" else None)

    def compared_with(self, producer: str, golden: np.ndarray, truth: np.ndarray) -> tuple[str, np.ndarray]:
        """The truth."""
        return TRUTH, truth


def difference(got: np.ndarray | None, want: np.ndarray | None, stage: TrainingStage) -> Difference:
    """How far one array of a stage is from another: as a share of the tensor, or in learning rates."""
    return measure_in(got, want, unit=OPTIMIZER.learning_rate) if stage.in_rates else measure(got, want)
