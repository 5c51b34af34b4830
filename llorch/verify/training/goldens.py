"""The goldens of checkpoints 15 to 20: what PEFT, torch and llama.cpp made of one adapter, its batches and settings.

`peft.safetensors` holds the adapter as `adapter/<flat name>`, every array as `<producer>/<case>/<stage key>` and what
PEFT makes of the same in float64 as `truth/<mode>/<case>/<stage key>`; `training.json` the batches, the tensor tables
of adapter files, tolerances and where all this comes from. What PEFT made exactly zero is listed by name and stored
nowhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.config import ModelConfig
from llorch.lora.adapter import LORA_A, LORA_B, Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig
from llorch.numerics import DtypeName
from llorch.train.batch import Batch
from llorch.verify.compare import Tolerance
from llorch.verify.training.recipe import LORA, batch_of

MODELS = ("micro-llama", "micro-qwen3")
FILES = ("peft.safetensors", "training.json")
PEFT, LLAMACPP = "peft", "llamacpp"
TRUTH = f"{PEFT}-float64"  # its name in rows
AMPLIFICATION = "amplification"  # beside the modes of the truth, see `training_limits`
HALF_DTYPES: tuple[DtypeName, ...] = ("bfloat16",)  # that training runs in; float16 needs its loss scaled
ADAPTER_FILES = ("peft_folder", "lora_gguf")

Arrays = Mapping[str, np.ndarray]
Tolerances = Mapping[str, Mapping[str, Tolerance]]  # mode -> group of stages -> tolerance
Errors = Mapping[str, Mapping[str, Mapping[str, float]]]  # mode -> group of stages -> case -> largest error


@dataclass(frozen=True)
class Rows:
    """One batch as it is stored.

    Attributes:
        ids: Of every row.
        prompts: How many tokens at the beginning of each row are not learned.
    """

    ids: Sequence[Sequence[int]]
    prompts: Sequence[int]

    def batch(self) -> Batch:
        """As it is run."""
        return batch_of(self.ids, self.prompts)


@dataclass(frozen=True)
class TrainingGolden:
    """The stored goldens of one model.

    Attributes:
        adapter: Tensors of the adapter that every run starts from, by flat name.
        arrays: Producer to `<case>/<stage key>` to array.
        truth: `isolated`, `chained` and `AMPLIFICATION` to the same of PEFT in float64.
        rows: The batches; a step takes the next ones in turn.
        files: One of `ADAPTER_FILES` to tensor name to `dtype shape sha256`, as the producer has or took it.
        tolerances: Mode to group of stages to tolerance.
        half_tolerances: Dtype of a run to the same, where half precision has tolerances of its own.
        half_errors: Dtype to how far PEFT is from the truth in it.
        provenance: Where all this comes from.
    """

    adapter: Arrays
    arrays: Mapping[str, Arrays]
    truth: Mapping[str, Arrays]
    rows: Sequence[Rows]
    files: Mapping[str, Mapping[str, str]]
    tolerances: Tolerances
    half_tolerances: Mapping[str, Tolerances]
    half_errors: Mapping[str, Errors]
    provenance: Mapping[str, object]

    @property
    def batches(self) -> list[Batch]:
        """All batches."""
        return [rows.batch() for rows in self.rows]

    def given(self, key: str) -> np.ndarray:
        """What PEFT showed, as the input of a stage that is judged alone.

        Args:
            key: Its name.

        Returns:
            The array.

        Raises:
            ValueError: It is missing.
        """
        if key not in self.arrays[PEFT]:
            raise lacking([key])
        return self.arrays[PEFT][key]

    def adapter_for(self, config: ModelConfig, lora: LoraConfig = LORA) -> Adapter:
        """The stored adapter.

        Args:
            config: The model.
            lora: Its configuration; the same ranks.

        Returns:
            It.
        """
        names = dict.fromkeys(name.rpartition(".")[0] for name in self.adapter)
        tensors = {n: LoraTensors(self.adapter[f"{n}.{LORA_A}"], self.adapter[f"{n}.{LORA_B}"]) for n in names}
        return checked(lora, tensors, config)


def lacking(keys: Sequence[str]) -> ValueError:
    """The error for arrays that are not among the goldens: a missing golden is a failure, never a pass."""
    shown = ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
    return ValueError(f"golden {FILES[0]}: {len(keys)} arrays missing: {shown}; run reference_outputs/regenerate.py")


def save(folder: Path, golden: TrainingGolden) -> None:
    """Write goldens; the same content gives the same bytes.

    Args:
        folder: Of the model.
        golden: What to store.
    """
    from safetensors.numpy import save as to_bytes

    flat = {f"adapter/{name}": array for name, array in golden.adapter.items()}
    flat |= {f"{producer}/{key}": a for producer, arrays in golden.arrays.items() for key, a in arrays.items()}
    flat |= {f"truth/{mode}/{key}": array for mode, arrays in golden.truth.items() for key, array in arrays.items()}
    zero = {name: list(array.shape) for name, array in flat.items() if array.ndim and not array.any()}
    stored = {name: np.array(array, order="C") for name, array in sorted(flat.items()) if name not in zero}
    record = {
        "exactly_zero": zero,
        "files": golden.files,
        "half_errors": golden.half_errors,
        "half_tolerances": {dtype: _plain(tolerances) for dtype, tolerances in golden.half_tolerances.items()},
        "provenance": golden.provenance,
        "rows": [asdict(rows) for rows in golden.rows],
        "tolerances": _plain(golden.tolerances),
    }
    (folder / FILES[0]).write_bytes(to_bytes(stored))
    (folder / FILES[1]).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read(folder: Path) -> TrainingGolden:
    """Read stored goldens.

    Args:
        folder: Of a model in `MODELS`.

    Returns:
        The goldens.

    Raises:
        FileNotFoundError: A file is missing; a missing golden is a failure, never a pass.
        ValueError: A part of one is missing.
    """
    from safetensors.numpy import load_file

    for name in FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"golden {folder / name} is missing; make it with reference_outputs/regenerate.py")
    record = json.loads((folder / FILES[1]).read_text(encoding="utf-8"))
    flat = load_file(folder / FILES[0])
    for name, shape in record["exactly_zero"].items():
        flat[name] = np.zeros(shape, np.float64 if name.startswith("truth/") else np.float32)
    parts: dict[str, dict[str, np.ndarray]] = {"adapter": {}, PEFT: {}, LLAMACPP: {}, "truth": {}}
    for name, array in flat.items():
        part, _, key = name.partition("/")
        parts.setdefault(part, {})[key] = array
    missing = [part for part, arrays in parts.items() if not arrays]
    halves = {dtype: _tolerances(made) for dtype, made in record.get("half_tolerances", {}).items()}
    missing += [f"tolerances in {dtype}" for dtype in HALF_DTYPES if not halves.get(dtype)]
    if missing or not record["rows"] or len(record["files"]) != len(ADAPTER_FILES):
        raise ValueError(
            f"golden {folder / FILES[0]}: expected an adapter, batches, files, the truth and arrays of {PEFT} and "
            f"{LLAMACPP}, missing: {', '.join(missing) or 'batches or files'}; run reference_outputs/regenerate.py"
        )
    return TrainingGolden(
        adapter=parts.pop("adapter"),
        truth=_by_mode(parts.pop("truth")),
        arrays=parts,
        rows=[Rows(**rows) for rows in record["rows"]],
        files=record["files"],
        tolerances=_tolerances(record["tolerances"]),
        half_tolerances=halves,
        half_errors=record["half_errors"],
        provenance=record["provenance"],
    )


def _by_mode(truth: Arrays) -> dict[str, dict[str, np.ndarray]]:
    made: dict[str, dict[str, np.ndarray]] = {}
    for name, array in truth.items():
        mode, _, key = name.partition("/")
        made.setdefault(mode, {})[key] = array
    return made


def _plain(tolerances: Tolerances) -> dict[str, dict[str, dict[str, float]]]:
    return {mode: {group: asdict(t) for group, t in groups.items()} for mode, groups in tolerances.items()}


def _tolerances(plain: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Tolerances:
    return {mode: {group: Tolerance(**t) for group, t in groups.items()} for mode, groups in plain.items()}
