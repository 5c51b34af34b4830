"""Goldens of LoRA training and adapter export for one model (validation points 15 to 20 of the project).

PEFT, on torch, computed all stages of training; the engine that loads an exported file computed its logits. The file
`peft` holds

    adapter/<tensor>                       the initial adapter
    <engine>/<case>/<stage key>            the output of the engine, see `engine_of`
    truth/<mode>/<case>/<stage key>        PEFT's float64 output: of one stage for the golden's inputs (`isolated`), or
                                           of a complete run (`chained`)
    truth/amplification/<case>/<stage key> growth of errors, see `TrainingGolden.amplification`

`training.json` holds the batches, the tensor tables of adapter files, tolerances, the provenance, and the shapes of
arrays that are exactly zero. `expectations.training_refs` gives the names; there is exactly one array for each.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_refs import LOADED_BY, PEFT, at, of_tensors, stage_refs
from llorch.judging.goldens.store import SUFFIX, GoldenStore, golden_error
from llorch.judging.goldens.training_recipe import LORA, StoredBatch
from llorch.judging.tolerances.training import FROM_FILES
from llorch.lora.adapter import LORA_A, LORA_B, Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig
from llorch.ops.numerics import DtypeName
from llorch.runtime.errors import UserError
from llorch.stages.comparison import Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.training.batch import Batch

MODELS = ("micro-llama", "micro-qwen3")
FILES = (f"peft{SUFFIX}", "training.json")
PEFT_FLOAT64 = f"{PEFT}-float64"  # engine name in comparisons
HALF_DTYPES: tuple[DtypeName, ...] = ("bfloat16",)  # half precisions of training; float16 would need loss scaling
WITH_TOLERANCES: tuple[DtypeName, ...] = ("float32", *HALF_DTYPES)
ADAPTER_FILES = ("peft_folder", "lora_gguf")

Tolerances = Mapping[str, Mapping[str, Tolerance]]  # mode -> group of stages -> tolerance
Errors = Mapping[str, Mapping[str, Mapping[str, float]]]  # mode -> group of stages -> case -> largest error


@dataclass(frozen=True)
class TrainingGolden:
    """Stored training goldens of one model.

    Attributes:
        arrays: All arrays, by their names in the file.
        stored_batches: Micro-batches, fewer than all steps need: see `training_recipe.step_batches`.
        files: By one of `ADAPTER_FILES` and tensor name: `dtype shape sha256`, as the engine wrote or loaded it.
        tolerances: By dtype of the run, mode and group of stages.
        half_errors: By dtype: PEFT's distance from the float64 reference.
        provenance: Versions of the engines, and hash of the weights.
    """

    arrays: dict[str, np.ndarray]
    stored_batches: Sequence[StoredBatch]
    files: Mapping[str, Mapping[str, str]]
    tolerances: Mapping[str, Tolerances]
    half_errors: Mapping[str, Errors]
    provenance: Mapping[str, object]

    @property
    def batches(self) -> list[Batch]:
        """Micro-batches with labels and padding."""
        return [stored_batch.batch() for stored_batch in self.stored_batches]

    def shown(self, stage_ref: StageRef) -> np.ndarray:
        """Return the golden of a stage: the array of the engine `engine_of`, in its dtype, not in float64."""
        return self._array(golden_name(stage_ref))

    def reference(self, mode: str, stage_ref: StageRef) -> np.ndarray:
        """Return PEFT's float64 array of a stage; for exported files, the logits of the base model with the adapter."""
        return self._array(reference_name(mode, at("adapted_logits") if stage_ref.stage in FROM_FILES else stage_ref))

    def amplification(self, stage_ref: StageRef) -> np.ndarray | None:
        """Return the factors by which Adam's division makes errors of gradients grow in parameters; None elsewhere."""
        return self._array(amplification_name(stage_ref)) if stage_ref.stage == "parameters" else None

    def adapter_for(self, config: ModelConfig, lora: LoraConfig = LORA) -> Adapter:
        """Return the initial adapter of every run; `lora` must have the ranks of `LORA`, but may scale differently."""
        kinds = LORA_A, LORA_B
        arrays_by_name = {n: [self._array(adapter_name(f"{n}.{kind}")) for kind in kinds] for n in lora.targets(config)}
        return checked(lora, {name: LoraTensors(*arrays) for name, arrays in arrays_by_name.items()}, config)

    def require_all(self, n_layers: int) -> None:
        """Raise UserError if an array is missing, or if there is an array of no known name."""
        expected = {*names(n_layers)}
        if missing := expected - self.arrays.keys():
            raise missing_arrays_error(sorted(missing))
        if unknown := sorted(self.arrays.keys() - expected):
            actual = f"{len(unknown)} arrays without: {_format_names(unknown)}"
            raise UserError(f"golden {FILES[0]}: expected a stage for all, got {actual}")

    def _array(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise missing_arrays_error([name])
        return self.arrays[name]


def text(stage_ref: StageRef) -> str:
    """Format a stage reference for array names and messages: `plain/l0.gradient.q_proj.lora_A`."""
    return f"{stage_ref.case}/{stage_ref.key}"


def engine_of(stage_ref: StageRef) -> str:
    """Return the reference engine that computed the golden of a stage; `part` is the kind of an exported file."""
    return LOADED_BY[stage_ref.part] if stage_ref.stage in FROM_FILES else PEFT


def golden_name(stage_ref: StageRef) -> str:
    """Return the name of the reference engine's array of a stage."""
    return f"{engine_of(stage_ref)}/{text(stage_ref)}"


def reference_name(mode: str, stage_ref: StageRef) -> str:
    """Return the name of PEFT's float64 array of a stage."""
    return f"truth/{mode}/{text(stage_ref)}"


def amplification_name(stage_ref: StageRef) -> str:
    """Return the name of the array of `TrainingGolden.amplification`."""
    return f"truth/amplification/{text(stage_ref)}"


def adapter_name(flat: str) -> str:
    """Return the name of the array of an adapter tensor."""
    return f"adapter/{flat}"


def names(n_layers: int) -> Iterator[str]:
    """Yield the names of all arrays that a golden holds."""
    yield from map(adapter_name, of_tensors("parameters", n_layers))
    for stage_ref, modes in stage_refs(n_layers).items():
        yield golden_name(stage_ref)
        if stage_ref.stage == "parameters":
            yield amplification_name(stage_ref)
        if stage_ref.stage not in FROM_FILES:
            yield from (reference_name(mode, stage_ref) for mode in modes)


def missing_arrays_error(missing: Collection[str]) -> UserError:
    """Create the error for missing arrays: a missing golden is a failure, never a pass."""
    return golden_error(FILES[0], f"{len(missing)} arrays missing: {_format_names(missing)}")


def _format_names(array_names: Collection[str]) -> str:
    return ", ".join([*array_names][:4]) + (", ..." if len(array_names) > 4 else "")


def save(folder: Path, golden: TrainingGolden) -> None:
    """Write goldens into the folder of a model; the same content gives the same bytes."""
    zero = {name: list(array.shape) for name, array in golden.arrays.items() if array.ndim and not array.any()}
    nonzero_arrays = {name: array for name, array in sorted(golden.arrays.items()) if name not in zero}
    tolerances = {dtype: _tolerances_as_json(by_mode) for dtype, by_mode in golden.tolerances.items()}
    record = {
        "exactly_zero": zero,
        "files": golden.files,
        "half_errors": golden.half_errors,
        "half_tolerances": {dtype: tolerances[dtype] for dtype in HALF_DTYPES},
        "provenance": golden.provenance,
        "rows": [asdict(stored_batch) for stored_batch in golden.stored_batches],
        "tolerances": tolerances["float32"],
    }
    GoldenStore(folder, FILES[1]).write(record, {"peft": nonzero_arrays})


def read(folder: Path) -> TrainingGolden:
    """Read stored goldens; raise FileNotFoundError for a missing file, UserError for a missing part of the record."""
    store = GoldenStore(folder, FILES[1])
    arrays, record = store.arrays(["peft"])["peft"], store.record()
    for name, shape in record["exactly_zero"].items():
        arrays[name] = np.zeros(shape, np.float64 if name.startswith("truth/") else np.float32)
    tolerances = {"float32": record["tolerances"], **record["half_tolerances"]}
    missing = [f"tolerances in {dtype}" for dtype in WITH_TOLERANCES if not tolerances.get(dtype)]
    if missing or not record["rows"] or len(record["files"]) != len(ADAPTER_FILES):
        missing_parts = ", ".join(missing) or "batches or files"
        raise golden_error(store.path, f"expected batches, files and tolerances, missing: {missing_parts}")
    return TrainingGolden(
        arrays=arrays,
        stored_batches=[StoredBatch(**stored_batch) for stored_batch in record["rows"]],
        files=record["files"],
        tolerances={dtype: _tolerances(by_mode) for dtype, by_mode in tolerances.items()},
        half_errors=record["half_errors"],
        provenance=record["provenance"],
    )


def _tolerances_as_json(tolerances: Tolerances) -> dict[str, dict[str, dict[str, float]]]:
    return {
        mode: {group: {"error": tolerance.error, "worst": tolerance.worst} for group, tolerance in groups.items()}
        for mode, groups in tolerances.items()
    }


def _tolerances(record: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Tolerances:
    return {mode: {group: Tolerance(**t) for group, t in groups.items()} for mode, groups in record.items()}
