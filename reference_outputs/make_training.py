"""Make the goldens of checkpoints 15 to 20: ask PEFT, torch and llama.cpp about one adapter and a few batches.

Of runs on a base in bfloat16 only the tolerances and distances that follow from them are stored, as in `make_half`.
"""

import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import make_half
import numpy as np

from llorch.builtin import builtin_path
from llorch.files import Weights, open_weights
from llorch.lora.adapter import Adapter
from llorch.model import Model
from llorch.numerics import DtypeName
from llorch.train.batch import Batch
from llorch.verify.compare import EXACT, Tolerance, measure
from llorch.verify.goldens import Tolerances as HalfTolerances
from llorch.verify.goldens import sha256
from llorch.verify.training.exports import EXPORTS, LOADED_BY, export_all, file_tables, safetensors_table
from llorch.verify.training.goldens import AMPLIFICATION, HALF_DTYPES, LLAMACPP, PEFT, Rows, Tolerances, TrainingGolden
from llorch.verify.training.half import HalfTrainingJudge
from llorch.verify.training.judge import MODES, TrainingJudge, difference
from llorch.verify.training.limits import amplification, wide_limit
from llorch.verify.training.recipe import (
    CURVE,
    MERGED,
    OPTIMIZER,
    RSLORA,
    SHARED_INPUT,
    SMOOTHING,
    SMOOTHINGS,
    STEPS_SHOWN,
    make_adapter,
    step_batches,
    with_stage,
    with_zero_b,
)
from llorch.verify.training.stages import BY_GROUP, Key, TrainingStage
from llorch.verify.witnesses import ProducerName, open_producer

if TYPE_CHECKING:
    from llorch.verify.witnesses.peft import Peft

TEXTS = (  # beginning and number of tokens, number of those that are not learned
    (("Once upon a time, Mia the little fox", 10, 4), ("The fox ran home to the river.", 7, 3)),
    (("Tom asked: Where is my blue kite?", 8, 2), ("In the forest the owl sang a slow song.", 12, 5)),
    (("Anna and Ben built a boat.", 6, 1), ("One day the sun was very warm.", 9, 6)),
)

Arrays = dict[str, np.ndarray]
PARTS = ("given", "first_moment", "second_moment")  # of a step, that decide how far its parameters move


def make_training(name: str) -> TrainingGolden:
    """Run the producers on one model.

    Args:
        name: One of `MODELS`.

    Returns:
        The goldens, with tolerances made from their distances from the truth.

    Raises:
        ValueError: A producer is further from the truth than is ever granted.
    """
    from llorch.verify.witnesses.peft import Peft

    path = builtin_path(name)
    weights = open_weights(path)
    rows, adapter, producer = rows_of(weights), make_adapter(weights.config), Peft(path)
    batches = [each.batch() for each in rows]
    of_peft = forward_arrays(producer, weights, adapter, batches[0]) | training_arrays(producer, adapter, batches)
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        exported, files = export_arrays(producer, weights, adapter, batches[0], Path(folder))
    golden = TrainingGolden(
        adapter=adapter.flat(),
        arrays={PEFT: of_peft | exported[PEFT], LLAMACPP: exported[LLAMACPP]},
        truth={},
        rows=rows,
        files=files,
        tolerances={},
        half_tolerances={},
        half_errors={},
        provenance={
            "command": f"python reference_outputs/regenerate.py {name}",
            "weights_sha256": sha256(path),
            "engines": {PEFT: producer.provenance(), LLAMACPP: llamacpp_provenance(path)},
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    )
    golden = replace(golden, truth=truth_of(weights, golden))
    judge = TrainingJudge(name, weights, golden)
    judge.refuse_far_witnesses()
    halves = {dtype: half_judge(name, weights, golden, dtype) for dtype in HALF_DTYPES}
    return replace(
        golden,
        tolerances=judge.tolerances(),
        half_tolerances={dtype: half.tolerances() for dtype, half in halves.items()},
        half_errors={dtype: half.errors() for dtype, half in halves.items()},
    )


def truth_of(weights: Weights, golden: TrainingGolden) -> dict[str, Arrays]:
    """Run PEFT, unmodified, in pure float64: each stage on what the golden was fed, and all from the beginning.

    Args:
        weights: Of the model.
        golden: Adapter, rows, and inputs of isolated stages.

    Returns:
        What `TrainingGolden.truth` holds.
    """
    from llorch.verify.witnesses.float64_everywhere import float64_everywhere
    from llorch.verify.witnesses.peft import Peft

    adapter, batches = golden.adapter_for(weights.config), golden.batches
    with float64_everywhere():
        producer = Peft(weights.path, dtype="float64")
        shown = forward_arrays(producer, weights, adapter, batches[0]) | training_arrays(producer, adapter, batches)
        steps = [step_batches(batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
        taken = producer.steps(adapter, steps, OPTIMIZER, shown=range(1, len(steps) + 1))
    return {
        "isolated": isolated_truth(weights, golden),
        "chained": {text: array for text, array in shown.items() if has_chain(Key.of(text))},
        AMPLIFICATION: amplified(adapter, taken),
    }


def isolated_truth(weights: Weights, golden: TrainingGolden) -> Arrays:
    """The part of `truth_of` that depends on what the golden was fed."""
    from llorch.verify.witnesses.float64_everywhere import float64_everywhere
    from llorch.verify.witnesses.peft import Peft
    from llorch.verify.witnesses.peft_isolated import Isolated

    with float64_everywhere():
        return Isolated(Peft(weights.path, dtype="float64"), golden).arrays()


def has_chain(key: Key) -> bool:
    """Whether an array is a stage of a run from its beginning."""
    if not key.in_table or key.group.name in ("learning_rate", "merged_weight"):
        return False
    return (key.case, key.group.name) != ("rslora", "lora_delta")


def amplified(adapter: Adapter, taken: Mapping[int, Arrays]) -> Arrays:
    """What `training_limits` makes of all steps, for those that are stored."""
    parts = [tuple({n: taken[step][with_stage(n, s)] for n in adapter.flat()} for s in PARTS) for step in sorted(taken)]
    found = amplification(parts, [float(taken[step]["grad_norm"]) for step in sorted(taken)], OPTIMIZER)
    return {
        f"step {step}/{with_stage(name, 'parameters')}": pair
        for step in STEPS_SHOWN
        for name, pair in found[step - 1].items()
    }


def half_judge(name: str, weights: Weights, golden: TrainingGolden, dtype: DtypeName) -> HalfTrainingJudge:
    """Run PEFT once more, on a base in half precision.

    Args:
        name: One of `MODELS`.
        weights: Of the model.
        golden: Adapter and rows.
        dtype: Of the base.

    Returns:
        What knows how far PEFT is from the truth then.

    Raises:
        ValueError: It is further than roundings explain.
    """
    from llorch.verify.witnesses.peft import Peft

    producer, adapter, batches = Peft(weights.path, dtype=dtype), golden.adapter_for(weights.config), golden.batches
    shown = forward_arrays(producer, weights, adapter, batches[0]) | training_arrays(producer, adapter, batches)
    own = replace(golden, arrays={PEFT: shown})
    own = replace(own, truth={**golden.truth, "isolated": isolated_truth(weights, own)})
    judge = HalfTrainingJudge(name, weights, own, dtype)
    judge.refuse_far_witnesses()
    return judge


def rows_of(weights: Weights) -> list[Rows]:
    """The batches, in tokens of one model.

    Raises:
        ValueError: Fewer than 8 distinct tokens in the first batch; such an input hides mistakes.
    """
    encode = Model(weights).tokenizer.encode
    made = [Rows([encode(text)[:n] for text, n, _ in rows], [prompt for _, _, prompt in rows]) for rows in TEXTS]
    distinct = {token for row in made[0].ids for token in row}
    if len(distinct) < 8:
        raise ValueError(f"regenerate: expected at least 8 distinct tokens in a batch, got {sorted(distinct)}")
    return made


def forward_arrays(producer: "Peft", weights: Weights, adapter: Adapter, batch: Batch) -> Arrays:
    """Deltas, logits and losses; with rank-stabilised scales what cannot be told from the other deltas."""
    found = {f"plain/{key}": array for key, array in producer.forward(adapter, batch).items()}
    stable = producer.forward(replace(adapter, config=RSLORA), batch)
    wanted = ["adapted_logits", *(f"l0.lora_delta.{name}" for name in SHARED_INPUT)]
    found |= {f"rslora/{key}": stable[key] for key in wanted}
    for case, smoothing in SMOOTHINGS.items():
        losses = producer.losses(adapter, batch, smoothing=smoothing)
        found |= {f"{case}/{key}": array for key, array in losses.items()}
    return found | {f"plain/{key}": array for key, array in producer.merged(adapter, batch, [MERGED]).items()}


def training_arrays(producer: "Peft", adapter: Adapter, batches: Sequence[Batch]) -> Arrays:
    """Gradients, optimizer steps, schedules and the curve."""
    from llorch.verify.witnesses.peft import schedules

    found = {f"plain/{key}": array for key, array in producer.gradients(adapter, batches[0]).items()}
    of_zero_b = producer.gradients(with_zero_b(adapter), batches[0])
    found |= {f"zero_b/{key}": array for key, array in of_zero_b.items() if "lora_" in key}
    steps = [step_batches(batches, step, 1) for step in range(1, max(STEPS_SHOWN) + 1)]
    for step, arrays in producer.steps(adapter, steps, OPTIMIZER, shown=STEPS_SHOWN).items():
        found |= {f"step {step}/{key}": a for key, a in arrays.items() if ".given." not in key or step == 2}
    found |= schedules()
    steps = [step_batches(batches, step, CURVE.accumulation) for step in range(1, CURVE.n_steps + 1)]
    curve = producer.curve(
        adapter, steps, CURVE.optimizer, smoothing=SMOOTHING, warmup_steps=CURVE.warmup_steps
    )  # fmt: skip
    return found | {f"curve/{key}": array for key, array in curve.items()}


def export_arrays(
    producer: "Peft", weights: Weights, adapter: Adapter, batch: Batch, folder: Path
) -> tuple[dict[str, Arrays], dict[str, Mapping[str, str]]]:
    """Logits of the engines that load what we write, and the tables of adapter files.

    PEFT's own file of the adapter is what ours has to equal; of the GGUF file, which nobody else writes rightly, it is
    the one that llama.cpp made the right logits from.
    """
    from llorch.verify.witnesses.llamacpp import logits_with_adapter

    export_all(weights, adapter, folder)
    ids = [document for document, _ in batch.each_document()]
    path = Path(weights.path)
    logits = {
        "peft_folder": producer.loaded(folder / EXPORTS["peft_folder"], batch),
        "lora_gguf": np.concatenate(
            [logits_with_adapter(path, folder / EXPORTS["lora_gguf"], row.tolist()) for row in ids]
        ),
        "merged_folder": logits_of("transformers", folder / EXPORTS["merged_folder"], ids),
        "merged_gguf": logits_of("llamacpp", folder / EXPORTS["merged_gguf"], ids),
    }
    arrays: dict[str, Arrays] = {PEFT: {}, LLAMACPP: {}}
    for kind, array in logits.items():
        arrays[LOADED_BY[kind]][f"plain/exported_logits.{kind}"] = array
    files = file_tables(folder) | {"peft_folder": safetensors_table(producer.saved(adapter, folder / "by_peft"))}
    return arrays, files


def logits_of(engine: ProducerName, path: Path, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Logits of an engine that runs a model as it is."""
    with open_producer(engine, path, n_threads=2) as producer:
        return np.concatenate([producer.logits(row.tolist()) for row in ids])


def llamacpp_provenance(path: Path) -> dict[str, object]:
    """What llama.cpp says about itself."""
    with open_producer("llamacpp", path, n_threads=2) as engine:
        return engine.provenance()


def checked(new: TrainingGolden, judge: TrainingJudge) -> list[str]:
    """The `differences` of goldens from the stored ones; PEFT makes the truth and the spread again."""
    from training_spread import training_spread

    return differences(new, judge, training_spread(judge), truth_of(judge.weights, judge.golden))


def differences(
    new: TrainingGolden, judge: TrainingJudge, spread: Mapping[str, Tolerance], truth: Mapping[str, Arrays]
) -> list[str]:
    """Where newly made goldens are not the stored ones, and where stored tolerances do not follow from stored arrays.

    The adapter, the batches and the files of adapters must be equal; arrays are held to the stored tolerances or to
    what rounding does to optimizer steps, the larger; the truth is held to the limits of float64; tolerances of half
    precision are what `make_half` wants of them.

    Args:
        new: Made now.
        judge: Of the goldens that are read from the repository.
        spread: What rounding can do to them, see `training_spread`.
        truth: Of these goldens, made now.

    Returns:
        One line for each difference.
    """
    stored = judge.golden
    pairs = [(what, getattr(new, what) == getattr(stored, what)) for what in ("rows", "files")]
    names = sorted(new.adapter.keys() | stored.adapter.keys())
    pairs += [(name, _same(new.adapter.get(name), stored.adapter.get(name))) for name in names]
    lines = [f"training {name}: not as stored" for name, equal in pairs if not equal]
    for producer, arrays in stored.arrays.items():
        for text in sorted(arrays.keys() | new.arrays[producer].keys()):
            stage, ours, theirs = stage_of(text), new.arrays[producer].get(text), arrays.get(text)
            apart = measure(ours, theirs) if theirs is None else difference(ours, theirs, stage)
            granted = [stored.tolerances[mode][stage.name] for mode in MODES if stage.name in stored.tolerances[mode]]
            if not any(apart.within(tolerance) for tolerance in (*granted, spread.get(text, EXACT))):
                lines.append(f"training {producer} {text}: {apart.describe()}")
    lines += truth_differences(truth, stored.truth)
    lines += make_half.differences(_by_dtype(new.half_tolerances), _by_dtype(stored.half_tolerances))
    float32 = ({"float32": tolerances} for tolerances in (judge.tolerances(), stored.tolerances))
    return lines + make_half.differences(*map(_by_dtype, float32), times=make_half.AGAIN)


def truth_differences(new: Mapping[str, Arrays], stored: Mapping[str, Mapping[str, np.ndarray]]) -> list[str]:
    """Where a truth of the same goldens is not the stored one; one line for each."""
    lines = []
    for mode, text in sorted({(m, text) for truth in (new, stored) for m, found in truth.items() for text in found}):
        ours, theirs = new.get(mode, {}).get(text), stored.get(mode, {}).get(text)
        if mode == AMPLIFICATION:
            apart, allowed = measure(ours, theirs), Tolerance(make_half.AGAIN - 1, make_half.AGAIN - 1)
        else:
            apart = difference(ours, theirs, Key.of(text).group)
            allowed = wide_limit(stored[AMPLIFICATION].get(text) if mode == "chained" else None)
        if not apart.within(allowed):
            lines.append(f"training truth {mode} {text}: {apart.describe()}")
    return lines


def stage_of(text: str) -> TrainingStage:
    """The group that an array is measured like; what goes into a step is a gradient, other inputs go into a delta."""
    key = Key.of(text)
    if key.in_table:
        return key.group
    return BY_GROUP["gradient" if key.stage.startswith(("given.", "gradient.")) else "lora_delta"]


def _by_dtype(tolerances: Mapping[str, Tolerances]) -> dict[str, HalfTolerances]:
    """As those of the forward pass, in one case."""
    made = tolerances.items()
    return {dtype: {"training": {mode: dict(groups) for mode, groups in modes.items()}} for dtype, modes in made}


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and np.array_equal(one, other)
