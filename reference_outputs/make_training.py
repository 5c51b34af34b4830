"""Make the goldens of checkpoints 15 to 20: ask PEFT, torch and llama.cpp about one adapter and a few batches.

Runs on a base in bfloat16 are not stored, only the tolerances and distances that follow from them.
"""

import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import made_again
import numpy as np
from training_tolerances import errors, refuse_far_engines, tolerances

from llorch.engines import EngineName, open_engine
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.judging.expectations.adapter_files import EXPORTS, export_all, file_tables, safetensors_table
from llorch.judging.expectations.training import unit
from llorch.judging.expectations.training_refs import (
    CHAINED,
    ISOLATED,
    LLAMACPP,
    PEFT,
    TOLERANCE_GROUP,
    TRANSFORMERS,
    Arrays,
    at,
    of_tensors,
    stage_refs,
)
from llorch.judging.goldens.forward import sha256
from llorch.judging.goldens.training import (
    HALF_DTYPES,
    PEFT_FLOAT64,
    Tolerances,
    TrainingGolden,
    adapter_name,
    amplification_name,
    engine_of,
    golden_name,
    reference_name,
    text,
)
from llorch.judging.goldens.training_recipe import (
    OPTIMIZER,
    RSLORA,
    STEPS_SHOWN,
    StoredBatch,
    make_adapter,
    step_batches,
    with_zero_b,
)
from llorch.judging.tolerances.training import FROM_FILES, amplification, tolerance_in_float64
from llorch.lora.adapter import Adapter
from llorch.model.model import Model
from llorch.ops.numerics import DtypeName
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import EXACT, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import Batch

if TYPE_CHECKING:
    from reference_outputs.peft_reference import Peft

TEXTS = (  # beginning and number of tokens, number of masked ones
    (("Once upon a time, Mia the little fox", 10, 4), ("The fox ran home to the river.", 7, 3)),
    (("Tom asked: Where is my blue kite?", 8, 2), ("In the forest the owl sang a slow song.", 12, 5)),
    (("Anna and Ben built a boat.", 6, 1), ("One day the sun was very warm.", 9, 6)),
)


def make_training(name: str) -> TrainingGolden:
    """Run the engines on one of `MODELS`: goldens, with tolerances made from their distances from float64.

    Refuse an engine that is further from the float64 reference than any tolerance allows.
    """
    from llorch.engines.transformers_capture import float64_everywhere
    from reference_outputs.peft_reference import Peft

    path = builtin_path(name)
    weights = open_weights(path)
    config, rows, adapter, engine = weights.config, rows_of(weights), make_adapter(weights.config), Peft(path)
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        exported, files = export_arrays(engine, weights, adapter, rows[0].batch(), Path(folder))
        of_merged = provenance_of(TRANSFORMERS, Path(folder) / EXPORTS["merged_folder"])
    with float64_everywhere():
        reference_arrays = Peft(path, dtype="float64").provenance()
    golden = TrainingGolden(
        arrays={adapter_name(flat): array for flat, array in adapter.flat().items()},
        stored_batches=rows,
        files=files,
        tolerances={},
        half_errors={},
        provenance={
            "command": f"python reference_outputs/regenerate.py {name}",
            "weights_sha256": sha256(path),
            "engines": {
                PEFT: engine.provenance(),
                LLAMACPP: provenance_of(LLAMACPP, path),
                TRANSFORMERS: of_merged,
                PEFT_FLOAT64: reference_arrays,
            },
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    )
    arrays = {golden_name(stage_ref): array for stage_ref, array in (peft_arrays(engine, golden) | exported).items()}
    golden = replace(golden, arrays=golden.arrays | arrays)
    golden = replace(golden, arrays=golden.arrays | reference_of(weights, golden))
    halves: dict[DtypeName, TrainingGolden] = {dtype: in_half(weights, golden, dtype) for dtype in HALF_DTYPES}
    runs: dict[DtypeName, TrainingGolden] = {"float32": golden, **halves}
    for dtype, run in runs.items():
        refuse_far_engines(name, run, config, dtype)
    return replace(
        golden,
        tolerances={dtype: tolerances(run, config, dtype) for dtype, run in runs.items()},
        half_errors={dtype: errors(run, config, dtype) for dtype, run in halves.items()},
    )


def reference_of(weights: Weights, golden: TrainingGolden) -> dict[str, np.ndarray]:
    """Run PEFT, unmodified, in pure float64: each stage on the golden's inputs, and all stages from the beginning."""
    from llorch.engines.transformers_capture import float64_everywhere
    from reference_outputs.peft_reference import Peft

    adapter, config = golden.adapter_for(weights.config), weights.config
    with float64_everywhere():
        engine = Peft(weights.path, dtype="float64")
        peft = peft_arrays(engine, golden)
        steps = [step_batches(golden.batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
        step_arrays = engine.steps(adapter, steps, OPTIMIZER, recorded_steps=range(1, len(steps) + 1))
    chained = [
        stage_ref for stage_ref, modes in stage_refs(config.n_layers).items() if CHAINED in modes and stage_ref in peft
    ]
    return (
        isolated_reference(weights, golden)
        | {reference_name(CHAINED, stage_ref): peft[stage_ref] for stage_ref in chained}
        | amplified(config.n_layers, step_arrays, len(steps))
    )


def isolated_reference(weights: Weights, golden: TrainingGolden) -> dict[str, np.ndarray]:
    """Compute the part of `reference_of` that depends on the golden's inputs."""
    from llorch.engines.transformers_capture import float64_everywhere
    from reference_outputs.peft_isolated import Isolated
    from reference_outputs.peft_reference import Peft

    with float64_everywhere():
        arrays = Isolated(Peft(weights.path, dtype="float64"), golden).arrays()
    return {reference_name(ISOLATED, stage_ref): array for stage_ref, array in arrays.items()}


def amplified(n_layers: int, step_arrays: Arrays, n_steps: int) -> dict[str, np.ndarray]:
    """Compute `limits.amplification` over all steps, and return the values of the stored steps."""

    def tensors(stage: str, step: int) -> dict[str, np.ndarray]:
        return {name: step_arrays[stage_ref] for name, stage_ref in of_tensors(stage, n_layers, f"step {step}").items()}

    steps = range(1, n_steps + 1)
    parts = [tuple(tensors(stage, step) for stage in ("given", "first_moment", "second_moment")) for step in steps]
    norms = [float(step_arrays[at("grad_norm", case=f"step {step}")]) for step in steps]
    amplifications = amplification(parts, norms, OPTIMIZER)
    return {
        amplification_name(stage_ref): amplifications[step - 1][name]
        for step in STEPS_SHOWN
        for name, stage_ref in of_tensors("parameters", n_layers, f"step {step}").items()
    }


def in_half(weights: Weights, golden: TrainingGolden, dtype: DtypeName) -> TrainingGolden:
    """Make the golden of PEFT on a base in half precision, with the float64 reference for the same inputs."""
    from reference_outputs.peft_reference import Peft

    peft = peft_arrays(Peft(weights.path, dtype=dtype), golden)
    half = replace(golden, arrays=golden.arrays | {golden_name(stage_ref): array for stage_ref, array in peft.items()})
    return replace(half, arrays=half.arrays | isolated_reference(weights, half))


def rows_of(weights: Weights) -> list[StoredBatch]:
    """Encode the batches for one model; the first has at least 8 distinct tokens, because fewer would hide mistakes."""
    encode = Model(weights).tokenizer.encode
    batches = [StoredBatch([encode(text)[:n] for text, n, _ in b], [prompt for _, _, prompt in b]) for b in TEXTS]
    distinct = {token for row in batches[0].ids for token in row}
    if len(distinct) < 8:
        raise ValueError(f"regenerate: expected at least 8 distinct tokens in a batch, got {sorted(distinct)}")
    return batches


def peft_arrays(engine: "Peft", golden: TrainingGolden) -> Arrays:
    """Collect all arrays of PEFT: deltas, logits, losses, gradients, optimizer steps, schedules and the curve."""
    adapter, batches = golden.adapter_for(engine.config), golden.batches
    rslora_adapter = golden.adapter_for(engine.config, RSLORA)
    arrays = engine.forward(adapter, batches[0]) | engine.forward(rslora_adapter, batches[0], case="rslora")
    arrays |= engine.losses(adapter, batches[0]) | engine.merged(adapter, batches[0])
    arrays |= engine.gradients(with_zero_b(adapter), batches[0], case="zero_b")
    arrays |= engine.gradients(adapter, batches[0]) | engine.schedules()
    steps = [step_batches(batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
    arrays |= engine.steps(adapter, steps, OPTIMIZER, recorded_steps=STEPS_SHOWN)
    arrays |= engine.curve(adapter, batches)
    return {stage_ref: arrays[stage_ref] for stage_ref in stage_refs(engine.config.n_layers) if stage_ref in arrays}


def export_arrays(
    engine: "Peft", weights: Weights, adapter: Adapter, batch: Batch, folder: Path
) -> tuple[Arrays, dict[str, Mapping[str, str]]]:
    """Compute logits of the engines that load llorch's exports, and the tables of adapter files.

    llorch's adapter file must equal PEFT's own. For GGUF no other library writes a correct file, so the table is that
    of the file with which llama.cpp computed the correct logits.
    """
    from llorch.engines.llamacpp import logits_with_adapter

    export_all(weights, adapter, folder)
    ids = [document for document, _ in batch.each_document()]
    path = Path(weights.path)
    logits = {
        "peft_folder": engine.loaded(folder / EXPORTS["peft_folder"], batch),
        "lora_gguf": np.concatenate(
            [logits_with_adapter(path, folder / EXPORTS["lora_gguf"], row.tolist()) for row in ids]
        ),
        "merged_folder": logits_of(TRANSFORMERS, folder / EXPORTS["merged_folder"], ids),
        "merged_gguf": logits_of(LLAMACPP, folder / EXPORTS["merged_gguf"], ids),
    }
    files = file_tables(folder) | {"peft_folder": safetensors_table(engine.saved(adapter, folder / "by_peft"))}
    return {at("exported_logits", part=kind): array for kind, array in logits.items()}, files


def logits_of(engine: EngineName, path: Path, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Compute logits with an engine that runs a model as it is."""
    with open_engine(engine, path, n_threads=2) as reference_engine:
        return np.concatenate([reference_engine.logits(row.tolist()) for row in ids])


def provenance_of(engine: EngineName, path: Path) -> dict[str, object]:
    """Return an engine's own description."""
    with open_engine(engine, path, n_threads=2) as reference_engine:
        return reference_engine.provenance()


def checked(new: TrainingGolden, old: TrainingGolden, weights: Weights) -> list[str]:
    """List the `differences` of goldens from the stored ones; PEFT recomputes the float64 reference and the spread."""
    from training_spread import training_spread

    spread = training_spread(weights.path, weights.config, old)
    return differences(new, old, weights.config, spread, reference_of(weights, old))


def differences(
    new: TrainingGolden,
    old: TrainingGolden,
    config: ModelConfig,
    spread: Mapping[StageRef, Tolerance],
    reference: Mapping[str, np.ndarray],
) -> list[str]:
    """List newly made goldens that differ from stored ones, and tolerances that do not follow from stored arrays.

    Adapter, batches and adapter files must be equal. Arrays must lie within the stored tolerance or `spread`, the
    effect of rounding on optimizer steps, whichever is larger. `reference`, recomputed from the stored goldens, must
    lie within the float64 tolerances; half-precision tolerances are compared by `made_again`.
    """
    pairs = [("rows", new.stored_batches == old.stored_batches), ("files", new.files == old.files)]
    for name in of_tensors("parameters", config.n_layers):
        new_array, old_array = (golden.arrays.get(adapter_name(name)) for golden in (new, old))
        pairs.append((name, _same(new_array, old_array)))
    lines = [f"training {name}: not as stored" for name, equal in pairs if not equal]
    for stage_ref, modes in stage_refs(config.n_layers).items():
        difference = compare(stage_ref, new.arrays.get(golden_name(stage_ref)), old.arrays.get(golden_name(stage_ref)))
        group = TOLERANCE_GROUP.get(stage_ref.stage, stage_ref.stage)
        group_tolerances = [by_group[group] for by_group in old.tolerances["float32"].values() if group in by_group]
        if not any(difference.within(tolerance) for tolerance in (*group_tolerances, spread.get(stage_ref, EXACT))):
            lines.append(f"training {engine_of(stage_ref)} {text(stage_ref)}: {difference.describe()}")
        lines += [line for mode in modes for line in _reference_differs(reference, old, mode, stage_ref)]
    new_half = {dtype: by_mode for dtype, by_mode in new.tolerances.items() if dtype != "float32"}
    old_half = {dtype: by_mode for dtype, by_mode in old.tolerances.items() if dtype != "float32"}
    lines += made_again.differences(_by_dtype(new_half), _by_dtype(old_half))
    float32_pair = {"float32": tolerances(old, config, "float32")}, {"float32": old.tolerances["float32"]}
    return lines + made_again.differences(*map(_by_dtype, float32_pair), times=made_again.AGAIN)


def compare(stage_ref: StageRef, actual: np.ndarray | None, expected: np.ndarray | None) -> Difference:
    """Measure the difference of two arrays of a stage."""
    size = unit(stage_ref)
    return measure(actual, expected) if size is None else measure_in(actual, expected, unit=size)


def _reference_differs(
    new: Mapping[str, np.ndarray], old: TrainingGolden, mode: str, stage_ref: StageRef
) -> Iterator[str]:
    if stage_ref.stage in FROM_FILES:
        return  # given by the adapter file

    def pair(name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        return new.get(name), old.arrays.get(name)

    difference, margin = compare(stage_ref, *pair(reference_name(mode, stage_ref))), made_again.AGAIN - 1
    if not difference.within(tolerance_in_float64(old.amplification(stage_ref) if mode == CHAINED else None)):
        yield f"training truth {mode} {text(stage_ref)}: {difference.describe()}"
    if stage_ref.stage == "parameters" and mode == CHAINED:
        difference = measure(*pair(amplification_name(stage_ref)))
        if not difference.within(Tolerance(margin, margin)):
            yield f"training truth amplification {text(stage_ref)}: {difference.describe()}"


def _by_dtype(by_dtype: Mapping[str, Tolerances]) -> dict[str, made_again.Tolerances]:
    """Arrange tolerances like those of the forward pass, in one case."""
    return {
        dtype: {"training": {mode: dict(groups) for mode, groups in modes.items()}} for dtype, modes in by_dtype.items()
    }


def _same(new: np.ndarray | None, old: np.ndarray | None) -> bool:
    return new is not None and old is not None and new.dtype == old.dtype and np.array_equal(new, old)
