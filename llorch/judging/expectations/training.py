"""Checkpoints 15 to 20: expected arrays of a run in a dtype, from goldens, and comparisons with llorch's run.

Every expected array comes from PEFT, torch or llama.cpp, and has a float64 reference: unmodified PEFT and torch in
float64. llorch in float64 is compared with this reference itself: any wrong formula or constant shows, on any
processor. Tolerances are those of `tolerances.training`. Parameters are measured in learning rates: see
`checkpoints/18_optimizer_step`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from llorch.engines import OURS, stored_load_path
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.judging.compare import judge
from llorch.judging.expectations.adapter_files import exported, file_row
from llorch.judging.expectations.training_places import CHAINED, ISOLATED, Arrays, stage_refs
from llorch.judging.goldens.forward import require_weights
from llorch.judging.goldens.training import (
    PEFT_FLOAT64,
    TrainingGolden,
    engine_of,
    lacking,
    read,
)
from llorch.judging.goldens.training_recipe import OPTIMIZER
from llorch.judging.runners.numpy import BACKENDS, FLOAT64
from llorch.judging.runners.training_numpy import NumpyTrainingRunner
from llorch.judging.tolerances import training as limits
from llorch.judging.types import Comparison, Expectation
from llorch.ops.numerics import DtypeName
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.stages.training import BY_GROUP

ToleranceFunction = Callable[[StageRef, str], Tolerance]  # of a place and a mode


def verify_training_stored(name: str) -> Iterator[Comparison]:
    """Judge NumPy on one of `MODELS` against its stored training goldens; these must be whole, and of its weights."""
    yield from numpy_rows(name, *stored(name))


def stored(name: str) -> tuple[Weights, TrainingGolden]:
    """Open a model and its training goldens; those of other weights are refused."""
    golden = read(goldens_folder() / name)
    return open_weights(require_weights(name, golden.provenance["weights_sha256"])), golden


def numpy_rows(name: str, weights: Weights, golden: TrainingGolden) -> Iterator[Comparison]:
    """Judge NumPy in each of `BACKENDS` and in float64, of goldens that are at hand."""
    in_float32 = list(make_expectations(golden, weights.config, "float32"))  # the same of all backends
    for backend in BACKENDS:
        yield from _rows_of(name, weights.astype(np.float32, keep=True), golden, backend, in_float32)
    wide = make_expectations(golden, weights.config, "float64")
    yield from _rows_of(name, weights.astype(np.float64, keep=True), golden, FLOAT64, wide)


def _rows_of(
    name: str, weights: Weights, golden: TrainingGolden, backend: str, expectations: Iterable[Expectation]
) -> Iterator[Comparison]:
    """Yield the comparisons of one backend; only the backend `numpy` writes and reads files."""
    files = {}
    with BACKENDS.get(backend, nullcontext)():
        runner = NumpyTrainingRunner(weights, golden)
        ours = {ISOLATED: dict(runner.isolated()), CHAINED: dict(runner.chained())}
        if backend == "numpy":
            logits, files = exported(weights, golden)
            ours[CHAINED].update(logits)
    left_out = () if files else limits.FROM_FILES
    yield from with_load_paths(comparisons(name, expectations, ours, backend, left_out=left_out), golden)
    yield from (file_row(name, kind, table, golden.files[kind]) for kind, table in files.items())


def comparisons(
    name: str,
    expectations: Iterable[Expectation],
    ours: Mapping[str, Arrays],
    backend: str,
    *,
    left_out: Collection[str] = (),
) -> Iterator[Comparison]:
    """Judge a run; it lacks the groups of stages in `left_out`, anything else that is missing fails."""
    for expectation in expectations:
        if expectation.stage_ref.stage not in left_out:
            yield judge(expectation, ours[expectation.mode].get(expectation.stage_ref), model=name, backend=backend)


def with_load_paths(found: Iterator[Comparison], golden: TrainingGolden) -> Iterator[Comparison]:
    """Add the load path of its reference engine to each comparison. llorch wrote the adapters and the merged models."""
    for comparison in found:
        load_path = stored_load_path(golden.provenance, comparison.engine)
        ours = comparison.stage_ref.stage in limits.FROM_FILES and comparison.engine != PEFT_FLOAT64
        yield replace(comparison, load_path=replace(load_path, written=OURS) if ours else load_path)


def make_expectations(
    golden: TrainingGolden, config: ModelConfig, dtype: DtypeName, tolerance: ToleranceFunction | None = None
) -> Iterator[Expectation]:
    """Yield the expectations of a run in a dtype. The golden gives the tolerances, unless `tolerance` gives others."""
    golden.require_all(config.n_layers)
    tolerance = tolerance or (lambda stage_ref, mode: derive_tolerance(golden, config, stage_ref, mode, dtype))
    for stage_ref, modes in stage_refs(config.n_layers).items():
        for mode in modes:
            if limits.shows(stage_ref, mode, dtype):
                reference = golden.reference(mode, stage_ref)
                wide = dtype == "float64"
                yield Expectation(
                    stage_ref=stage_ref,
                    mode=mode,
                    engine=PEFT_FLOAT64 if wide else engine_of(stage_ref),
                    expected=reference if wide else golden.shown(stage_ref),
                    tolerance=tolerance(stage_ref, mode),
                    reference=reference,
                    unit=unit(stage_ref),
                )


def unit(stage_ref: StageRef) -> float | None:
    """Return the unit that differences are measured in: the learning rate, or None for the size of the array."""
    group = BY_GROUP.get(stage_ref.stage)
    return OPTIMIZER.learning_rate if group and group.in_rates else None


def derive_tolerance(
    golden: TrainingGolden, config: ModelConfig, stage_ref: StageRef, mode: str, dtype: DtypeName
) -> Tolerance:
    """Look up the tolerance of an array of a run in a dtype.

    Raises:
        ValueError: The golden has no tolerance for this array.
    """
    if dtype == "float64":
        return limits.wide_limit(golden.amplified(stage_ref) if mode == CHAINED else None)
    held = limits.held_to(stage_ref, mode, dtype)
    made = golden.tolerances[held][mode].get(stage_ref.stage)
    if made is None:
        raise lacking([f"tolerance of {held} {mode} {stage_ref.stage}"])
    return made.at_most(limits.ceiling(config, stage_ref.stage, mode, held))
