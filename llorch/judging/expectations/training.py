"""Expected arrays of LoRA training and comparisons with llorch's run (validation points 15 to 20).

Every expected array comes from PEFT on torch, or from the engine that loads an exported file, and has a float64
reference: unmodified PEFT and torch in float64. llorch in float64 is compared with this reference, so any wrong formula
or constant fails on any processor. A stage runs isolated, on the golden's inputs, or chained, in a complete run.
`tolerances.training` derives the tolerances. Differences of parameters are in learning rates: see
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
from llorch.judging.expectations.adapter_files import compare_file, exported
from llorch.judging.expectations.training_refs import CHAINED, ISOLATED, Arrays, stage_refs
from llorch.judging.goldens.forward import require_weights
from llorch.judging.goldens.training import PEFT_FLOAT64, TrainingGolden, engine_of, missing_arrays_error, read
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

ToleranceFunction = Callable[[StageRef, str], Tolerance]  # (stage reference, mode) -> tolerance


def verify_training_stored(name: str) -> Iterator[Comparison]:
    """Compare NumPy's training of a built-in model with its stored goldens; UserError if they lack an array."""
    yield from compare_numpy(name, *stored(name))


def stored(name: str) -> tuple[Weights, TrainingGolden]:
    """Open a model and its training goldens; raise UserError if they were computed with other weights."""
    golden = read(goldens_folder() / name)
    return open_weights(require_weights(name, golden.provenance["weights_sha256"])), golden


def compare_numpy(name: str, weights: Weights, golden: TrainingGolden) -> Iterator[Comparison]:
    """Compare NumPy's training in each of `BACKENDS` (in float32) and in float64 with goldens."""
    in_float32 = list(make_expectations(golden, weights.config, "float32"))  # equal for all backends
    for backend in BACKENDS:
        yield from _backend_rows(name, weights.astype(np.float32, keep=True), golden, backend, in_float32)
    in_float64 = make_expectations(golden, weights.config, "float64")
    yield from _backend_rows(name, weights.astype(np.float64, keep=True), golden, FLOAT64, in_float64)


def _backend_rows(
    name: str, weights: Weights, golden: TrainingGolden, backend: str, expectations: Iterable[Expectation]
) -> Iterator[Comparison]:
    """Yield the comparisons of one backend; only the backend `numpy` writes and reads files."""
    files = {}
    with BACKENDS.get(backend, nullcontext)():
        runner = NumpyTrainingRunner(weights, golden)
        arrays = {ISOLATED: dict(runner.isolated()), CHAINED: dict(runner.chained())}
        if backend == "numpy":
            logits, files = exported(weights, golden)
            arrays[CHAINED].update(logits)
    left_out = () if files else limits.FROM_FILES
    yield from with_load_paths(comparisons(name, expectations, arrays, backend, left_out=left_out), golden)
    yield from (compare_file(name, kind, table, golden.files[kind]) for kind, table in files.items())


def comparisons(
    name: str,
    expectations: Iterable[Expectation],
    arrays: Mapping[str, Arrays],
    backend: str,
    *,
    left_out: Collection[str] = (),
) -> Iterator[Comparison]:
    """Compare the arrays of a run, by mode; skip the groups of stages in `left_out`. Other missing arrays fail."""
    for expectation in expectations:
        if expectation.stage_ref.stage not in left_out:
            yield judge(expectation, arrays[expectation.mode].get(expectation.stage_ref), model=name, backend=backend)


def with_load_paths(comparisons: Iterator[Comparison], golden: TrainingGolden) -> Iterator[Comparison]:
    """Add the engine's load path to each comparison; it notes that llorch wrote exported adapters and merged models."""
    for comparison in comparisons:
        load_path = stored_load_path(golden.provenance, comparison.engine)
        is_exported = comparison.stage_ref.stage in limits.FROM_FILES and comparison.engine != PEFT_FLOAT64
        yield replace(comparison, load_path=replace(load_path, written=OURS) if is_exported else load_path)


def make_expectations(
    golden: TrainingGolden, config: ModelConfig, dtype: DtypeName, tolerance: ToleranceFunction | None = None
) -> Iterator[Expectation]:
    """Yield the expectations of a run in a dtype; `tolerance`, if given, replaces `derive_tolerance`."""
    golden.require_all(config.n_layers)
    tolerance = tolerance or (lambda stage_ref, mode: derive_tolerance(golden, config, stage_ref, mode, dtype))
    for stage_ref, modes in stage_refs(config.n_layers).items():
        for mode in modes:
            if limits.can_show_mistakes(stage_ref, mode, dtype):
                reference = golden.reference(mode, stage_ref)
                is_float64 = dtype == "float64"
                yield Expectation(
                    stage_ref=stage_ref,
                    mode=mode,
                    engine=PEFT_FLOAT64 if is_float64 else engine_of(stage_ref),
                    expected=reference if is_float64 else golden.shown(stage_ref),
                    tolerance=tolerance(stage_ref, mode),
                    reference=reference,
                    unit=unit(stage_ref),
                )


def unit(stage_ref: StageRef) -> float | None:
    """Return the unit of differences: the learning rate, or None for relative differences."""
    group = BY_GROUP.get(stage_ref.stage)
    return OPTIMIZER.learning_rate if group and group.in_rates else None


def derive_tolerance(
    golden: TrainingGolden, config: ModelConfig, stage_ref: StageRef, mode: str, dtype: DtypeName
) -> Tolerance:
    """Return the tolerance of an array of a run in a dtype; UserError if the golden has none."""
    if dtype == "float64":
        return limits.tolerance_in_float64(golden.amplification(stage_ref) if mode == CHAINED else None)
    tolerance_dtype = limits.tolerance_dtype(stage_ref, mode, dtype)
    tolerance = golden.tolerances[tolerance_dtype][mode].get(stage_ref.stage)
    if tolerance is None:
        raise missing_arrays_error([f"tolerance of {tolerance_dtype} {mode} {stage_ref.stage}"])
    return tolerance.at_most(limits.ceiling(config, stage_ref.stage, mode, tolerance_dtype))
