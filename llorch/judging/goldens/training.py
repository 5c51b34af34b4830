"""The goldens of checkpoints 15 to 20: what PEFT, torch and llama.cpp made of one adapter, its batches and settings.

The file `peft` holds the adapter as `adapter/<flat name>`, every array as `<engine>/<case>/<stage key>` and what
PEFT makes of the same in float64 as `truth/<mode>/<case>/<stage key>`; `training.json` the batches, the tensor tables
of adapter files, tolerances and where all this comes from. What PEFT made exactly zero is listed by name and stored
nowhere. Names are made from `expectations.training_places`, and there is one array for each of these, no other.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.expectations.training_places import LOADED_BY, PEFT, at, of_tensors, stage_refs
from llorch.judging.goldens.store import SUFFIX, GoldenStore, refused
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
PEFT_FLOAT64 = f"{PEFT}-float64"  # its name in rows
HALF_DTYPES: tuple[DtypeName, ...] = ("bfloat16",)  # that training runs in; float16 needs its loss scaled
WITH_TOLERANCES: tuple[DtypeName, ...] = ("float32", *HALF_DTYPES)
ADAPTER_FILES = ("peft_folder", "lora_gguf")

Tolerances = Mapping[str, Mapping[str, Tolerance]]  # mode -> group of stages -> tolerance
Errors = Mapping[str, Mapping[str, Mapping[str, float]]]  # mode -> group of stages -> case -> largest error


@dataclass(frozen=True)
class TrainingGolden:
    """The stored goldens of one model.

    Attributes:
        arrays: All of them, by their names in the file.
        rows: The batches; a step takes the next ones in turn.
        files: One of `ADAPTER_FILES` to tensor name to `dtype shape sha256`, as the engine wrote or loaded it.
        tolerances: Dtype of a run to mode to group of stages to tolerance.
        half_errors: Dtype to PEFT's distance from the float64 reference in it.
        provenance: Where all this comes from.
    """

    arrays: dict[str, np.ndarray]
    rows: Sequence[StoredBatch]
    files: Mapping[str, Mapping[str, str]]
    tolerances: Mapping[str, Tolerances]
    half_errors: Mapping[str, Errors]
    provenance: Mapping[str, object]

    @property
    def batches(self) -> list[Batch]:
        """Batches of all steps."""
        return [rows.batch() for rows in self.rows]

    def shown(self, stage_ref: StageRef) -> np.ndarray:
        """Return the array that the engine of a place showed there."""
        return self._array(golden_name(stage_ref))

    def reference(self, mode: str, stage_ref: StageRef) -> np.ndarray:
        """Return the float64 reference at a place.

        The reference of exported files is the logits of the adapter on the base.
        """
        return self._array(reference_name(mode, at("adapted_logits") if stage_ref.stage in FROM_FILES else stage_ref))

    def amplified(self, stage_ref: StageRef) -> np.ndarray | None:
        """Return the result of `tolerances.training.amplification` at a place; None where errors do not grow."""
        return self._array(amplified_name(stage_ref)) if stage_ref.stage == "parameters" else None

    def adapter_for(self, config: ModelConfig, lora: LoraConfig = LORA) -> Adapter:
        """Return the adapter that every run starts from, with a configuration of the same ranks."""
        kinds = LORA_A, LORA_B
        found = {n: [self._array(adapter_name(f"{n}.{kind}")) for kind in kinds] for n in lora.targets(config)}
        return checked(lora, {name: LoraTensors(*arrays) for name, arrays in found.items()}, config)

    def require_all(self, n_layers: int) -> None:
        """Refuse goldens that lack an array, or hold one that nothing is compared with."""
        wanted = {*names(n_layers)}
        if missing := wanted - self.arrays.keys():
            raise lacking(sorted(missing))
        if unknown := sorted(self.arrays.keys() - wanted):
            actual = f"{len(unknown)} arrays without: {_few(unknown)}"
            raise UserError(f"golden {FILES[0]}: expected a stage for all, got {actual}")

    def _array(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise lacking([name])
        return self.arrays[name]


def text(stage_ref: StageRef) -> str:
    """Format a place for names of arrays and for messages: `plain/l0.gradient.q_proj.lora_A`."""
    return f"{stage_ref.case}/{stage_ref.key}"


def engine_of(stage_ref: StageRef) -> str:
    """Name the reference engine that shows the array of a place."""
    return LOADED_BY[stage_ref.part] if stage_ref.stage in FROM_FILES else PEFT


def golden_name(stage_ref: StageRef) -> str:
    """Name the array that the engine of a place showed there."""
    return f"{engine_of(stage_ref)}/{text(stage_ref)}"


def reference_name(mode: str, stage_ref: StageRef) -> str:
    """Name the array that PEFT computes for a place in float64."""
    return f"truth/{mode}/{text(stage_ref)}"


def amplified_name(stage_ref: StageRef) -> str:
    """Name the array that holds the growth of errors at a place."""
    return f"truth/amplification/{text(stage_ref)}"


def adapter_name(flat: str) -> str:
    """Name a tensor of the adapter."""
    return f"adapter/{flat}"


def names(n_layers: int) -> Iterator[str]:
    """Yield the names of all arrays that a golden holds."""
    yield from map(adapter_name, of_tensors("parameters", n_layers))
    for stage_ref, modes in stage_refs(n_layers).items():
        yield golden_name(stage_ref)
        if stage_ref.stage == "parameters":
            yield amplified_name(stage_ref)
        if stage_ref.stage not in FROM_FILES:
            yield from (reference_name(mode, stage_ref) for mode in modes)


def lacking(missing: Collection[str]) -> UserError:
    """Build the error for arrays that are not among the goldens: a missing golden is a failure, never a pass."""
    return refused(FILES[0], f"{len(missing)} arrays missing: {_few(missing)}")


def _few(found: Collection[str]) -> str:
    return ", ".join([*found][:4]) + (", ..." if len(found) > 4 else "")


def save(folder: Path, golden: TrainingGolden) -> None:
    """Write goldens into the folder of a model; the same content gives the same bytes."""
    zero = {name: list(array.shape) for name, array in golden.arrays.items() if array.ndim and not array.any()}
    stored = {name: array for name, array in sorted(golden.arrays.items()) if name not in zero}
    tolerances = {dtype: _tolerances_as_json(made) for dtype, made in golden.tolerances.items()}
    record = {
        "exactly_zero": zero,
        "files": golden.files,
        "half_errors": golden.half_errors,
        "half_tolerances": {dtype: tolerances[dtype] for dtype in HALF_DTYPES},
        "provenance": golden.provenance,
        "rows": [asdict(rows) for rows in golden.rows],
        "tolerances": tolerances["float32"],
    }
    GoldenStore(folder, FILES[1]).write(record, {"peft": stored})


def read(folder: Path) -> TrainingGolden:
    """Read stored goldens; a missing file, or one without tolerances, batches or files, is a failure, never a pass."""
    store = GoldenStore(folder, FILES[1])
    arrays, record = store.arrays(["peft"])["peft"], store.record()
    for name, shape in record["exactly_zero"].items():
        arrays[name] = np.zeros(shape, np.float64 if name.startswith("truth/") else np.float32)
    plain = {"float32": record["tolerances"], **record["half_tolerances"]}
    missing = [f"tolerances in {dtype}" for dtype in WITH_TOLERANCES if not plain.get(dtype)]
    if missing or not record["rows"] or len(record["files"]) != len(ADAPTER_FILES):
        lacks = ", ".join(missing) or "batches or files"
        raise refused(store.path, f"expected batches, files and tolerances, missing: {lacks}")
    return TrainingGolden(
        arrays=arrays,
        rows=[StoredBatch(**rows) for rows in record["rows"]],
        files=record["files"],
        tolerances={dtype: _tolerances(made) for dtype, made in plain.items()},
        half_errors=record["half_errors"],
        provenance=record["provenance"],
    )


def _tolerances_as_json(tolerances: Tolerances) -> dict[str, dict[str, dict[str, float]]]:
    return {
        mode: {group: {"error": t.error, "worst": t.worst} for group, t in groups.items()}
        for mode, groups in tolerances.items()
    }


def _tolerances(plain: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Tolerances:
    return {mode: {group: Tolerance(**t) for group, t in groups.items()} for mode, groups in plain.items()}
