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
from llorch.judging.expectations.training_places import (
    CHAINED,
    HELD_LIKE,
    ISOLATED,
    LLAMACPP,
    PEFT,
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
    amplified_name,
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
from llorch.judging.tolerances.training import FROM_FILES, amplification, wide_limit
from llorch.lora.adapter import Adapter
from llorch.model.model import Model
from llorch.ops.numerics import DtypeName
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import EXACT, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import Batch

if TYPE_CHECKING:
    from reference_outputs.peft_reference import Peft

TEXTS = (  # beginning and number of tokens, number of those that are not learned
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
        rows=rows,
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
    shown = {golden_name(stage_ref): array for stage_ref, array in (peft_arrays(engine, golden) | exported).items()}
    golden = replace(golden, arrays=golden.arrays | shown)
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
        shown = peft_arrays(engine, golden)
        steps = [step_batches(golden.batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
        taken = engine.steps(adapter, steps, OPTIMIZER, shown=range(1, len(steps) + 1))
    chained = [
        stage_ref for stage_ref, modes in stage_refs(config.n_layers).items() if CHAINED in modes and stage_ref in shown
    ]
    return (
        isolated_reference(weights, golden)
        | {reference_name(CHAINED, stage_ref): shown[stage_ref] for stage_ref in chained}
        | amplified(config.n_layers, taken, len(steps))
    )


def isolated_reference(weights: Weights, golden: TrainingGolden) -> dict[str, np.ndarray]:
    """Compute the part of `reference_of` that depends on the golden's inputs."""
    from llorch.engines.transformers_capture import float64_everywhere
    from reference_outputs.peft_isolated import Isolated
    from reference_outputs.peft_reference import Peft

    with float64_everywhere():
        made = Isolated(Peft(weights.path, dtype="float64"), golden).arrays()
    return {reference_name(ISOLATED, stage_ref): array for stage_ref, array in made.items()}


def amplified(n_layers: int, taken: Arrays, n_steps: int) -> dict[str, np.ndarray]:
    """Compute `limits.amplification` over all steps, and return it for the stored ones."""

    def of(stage: str, step: int) -> dict[str, np.ndarray]:
        return {name: taken[stage_ref] for name, stage_ref in of_tensors(stage, n_layers, f"step {step}").items()}

    every = range(1, n_steps + 1)
    parts = [tuple(of(stage, step) for stage in ("given", "first_moment", "second_moment")) for step in every]
    norms = [float(taken[at("grad_norm", case=f"step {step}")]) for step in every]
    found = amplification(parts, norms, OPTIMIZER)
    return {
        amplified_name(stage_ref): found[step - 1][name]
        for step in STEPS_SHOWN
        for name, stage_ref in of_tensors("parameters", n_layers, f"step {step}").items()
    }


def in_half(weights: Weights, golden: TrainingGolden, dtype: DtypeName) -> TrainingGolden:
    """Make the golden that PEFT shows on a base in half precision, with the float64 reference for the same inputs."""
    from reference_outputs.peft_reference import Peft

    made = peft_arrays(Peft(weights.path, dtype=dtype), golden)
    half = replace(golden, arrays=golden.arrays | {golden_name(stage_ref): array for stage_ref, array in made.items()})
    return replace(half, arrays=half.arrays | isolated_reference(weights, half))


def rows_of(weights: Weights) -> list[StoredBatch]:
    """Encode the batches for one model; the first needs at least 8 distinct tokens, or it would hide mistakes."""
    encode = Model(weights).tokenizer.encode
    made = [StoredBatch([encode(text)[:n] for text, n, _ in rows], [prompt for _, _, prompt in rows]) for rows in TEXTS]
    distinct = {token for row in made[0].ids for token in row}
    if len(distinct) < 8:
        raise ValueError(f"regenerate: expected at least 8 distinct tokens in a batch, got {sorted(distinct)}")
    return made


def peft_arrays(engine: "Peft", golden: TrainingGolden) -> Arrays:
    """Collect all that PEFT shows: deltas, logits, losses, gradients, optimizer steps, schedules and the curve."""
    adapter, batches = golden.adapter_for(engine.config), golden.batches
    stable = golden.adapter_for(engine.config, RSLORA)
    found = engine.forward(adapter, batches[0]) | engine.forward(stable, batches[0], case="rslora")
    found |= engine.losses(adapter, batches[0]) | engine.merged(adapter, batches[0])
    found |= engine.gradients(with_zero_b(adapter), batches[0], case="zero_b")
    found |= engine.gradients(adapter, batches[0]) | engine.schedules()
    steps = [step_batches(batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
    found |= engine.steps(adapter, steps, OPTIMIZER, shown=STEPS_SHOWN)
    found |= engine.curve(adapter, batches)
    return {stage_ref: found[stage_ref] for stage_ref in stage_refs(engine.config.n_layers) if stage_ref in found}


def export_arrays(
    engine: "Peft", weights: Weights, adapter: Adapter, batch: Batch, folder: Path
) -> tuple[Arrays, dict[str, Mapping[str, str]]]:
    """Compute logits of the engines that load llorch's exports, and the tables of adapter files.

    PEFT's own file of the adapter is what ours has to equal; of the GGUF file, which nobody else writes rightly, it is
    the one that llama.cpp made the right logits from.
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
    """Ask an engine for its own description."""
    with open_engine(engine, path, n_threads=2) as reference_engine:
        return reference_engine.provenance()


def checked(new: TrainingGolden, stored: TrainingGolden, weights: Weights) -> list[str]:
    """List the `differences` of goldens from the stored ones; PEFT recomputes the float64 reference and the spread."""
    from training_spread import training_spread

    spread = training_spread(weights.path, weights.config, stored)
    return differences(new, stored, weights.config, spread, reference_of(weights, stored))


def differences(
    new: TrainingGolden,
    stored: TrainingGolden,
    config: ModelConfig,
    spread: Mapping[StageRef, Tolerance],
    reference: Mapping[str, np.ndarray],
) -> list[str]:
    """List newly made goldens that differ from stored ones, and tolerances that do not follow from stored arrays.

    The adapter, the batches and the files of adapters must be equal; arrays are held to the stored tolerances or to
    `spread`, what rounding does to optimizer steps, the larger; `reference`, made now of the stored goldens, is held to
    the tolerances of float64; tolerances of half precision are what `made_again` wants of them.
    """
    pairs = [(what, getattr(new, what) == getattr(stored, what)) for what in ("rows", "files")]
    for name in of_tensors("parameters", config.n_layers):
        ours, theirs = (golden.arrays.get(adapter_name(name)) for golden in (new, stored))
        pairs.append((name, _same(ours, theirs)))
    lines = [f"training {name}: not as stored" for name, equal in pairs if not equal]
    for stage_ref, modes in stage_refs(config.n_layers).items():
        found = apart(stage_ref, new.arrays.get(golden_name(stage_ref)), stored.arrays.get(golden_name(stage_ref)))
        group = HELD_LIKE.get(stage_ref.stage, stage_ref.stage)
        group_tolerances = [made[group] for made in stored.tolerances["float32"].values() if group in made]
        if not any(found.within(tolerance) for tolerance in (*group_tolerances, spread.get(stage_ref, EXACT))):
            lines.append(f"training {engine_of(stage_ref)} {text(stage_ref)}: {found.describe()}")
        lines += [line for mode in modes for line in _reference_differs(reference, stored, mode, stage_ref)]
    again = {dtype: made for dtype, made in new.tolerances.items() if dtype != "float32"}
    kept = {dtype: made for dtype, made in stored.tolerances.items() if dtype != "float32"}
    lines += made_again.differences(_by_dtype(again), _by_dtype(kept))
    made = {"float32": tolerances(stored, config, "float32")}, {"float32": stored.tolerances["float32"]}
    return lines + made_again.differences(*map(_by_dtype, made), times=made_again.AGAIN)


def apart(stage_ref: StageRef, ours: np.ndarray | None, theirs: np.ndarray | None) -> Difference:
    """Measure the difference of two arrays of a stage."""
    size = unit(stage_ref)
    return measure(ours, theirs) if size is None else measure_in(ours, theirs, unit=size)


def _reference_differs(
    new: Mapping[str, np.ndarray], stored: TrainingGolden, mode: str, stage_ref: StageRef
) -> Iterator[str]:
    if stage_ref.stage in FROM_FILES:
        return  # what the adapter means

    def pair(name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        return new.get(name), stored.arrays.get(name)

    found, again = apart(stage_ref, *pair(reference_name(mode, stage_ref))), made_again.AGAIN - 1
    if not found.within(wide_limit(stored.amplified(stage_ref) if mode == CHAINED else None)):
        yield f"training truth {mode} {text(stage_ref)}: {found.describe()}"
    if stage_ref.stage == "parameters" and mode == CHAINED:
        found = measure(*pair(amplified_name(stage_ref)))
        if not found.within(Tolerance(again, again)):
            yield f"training truth amplification {text(stage_ref)}: {found.describe()}"


def _by_dtype(made: Mapping[str, Tolerances]) -> dict[str, made_again.Tolerances]:
    """Arrange tolerances like those of the forward pass, in one case."""
    return {
        dtype: {"training": {mode: dict(groups) for mode, groups in modes.items()}} for dtype, modes in made.items()
    }


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and np.array_equal(one, other)
