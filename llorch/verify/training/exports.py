"""Checkpoint 20's files: an adapter written in every form that others load, read again and run.

Producers ran these very files when the goldens were made. The adapter folder must be PEFT's own to the byte of every
tensor. Of the LoRA GGUF, which nobody else writes rightly, the golden is our own file, named so: the very one that
llama.cpp made its logits from. Merged files hold sums whose last bit depends on the machine, so logits are compared.
"""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llorch.cache import KVCache
from llorch.files import GGUFFile, Weights, open_weights
from llorch.forward import forward
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import ALPHA, read_lora_gguf, write_lora_gguf
from llorch.lora.merge_files import merge
from llorch.lora.peft_format import TENSOR_FILE, read_peft, write_peft
from llorch.train.batch import Batch
from llorch.verify.foundation import differing, foreign_tensors
from llorch.verify.training.goldens import LLAMACPP, PEFT, TrainingGolden
from llorch.verify.training.stages import BY_GROUP
from llorch.verify.verifier import Row, exact_row

Table = Mapping[str, str]
EXPORTS: Mapping[str, str] = {  # kind -> name in the folder
    "peft_folder": "adapter",
    "lora_gguf": "adapter.gguf",
    "merged_folder": "merged",
    "merged_gguf": "merged.gguf",
}
OURS = "ours"
WRITTEN_BY = {"peft_folder": PEFT, "lora_gguf": OURS}  # the golden of an adapter file
LOADED_BY = {"peft_folder": PEFT, "merged_folder": PEFT, "lora_gguf": LLAMACPP, "merged_gguf": LLAMACPP}


@dataclass(frozen=True)
class Exports:
    """What came of the files.

    Attributes:
        logits: By key of the golden.
        rows: Those of adapter files, which must be equal.
    """

    logits: Mapping[str, np.ndarray]
    rows: list[Row]

    @classmethod
    def of(cls, name: str, weights: Weights, golden: TrainingGolden) -> "Exports":
        """Write all files of a model's golden adapter, read them again and run them.

        Args:
            name: The model.
            weights: The base.
            golden: Its goldens.

        Returns:
            Logits of every kind, and rows for the files.
        """
        adapter, batch = golden.adapter_for(weights.config), golden.batches[0]
        with tempfile.TemporaryDirectory(prefix="llorch-") as made:
            folder = Path(made)
            export_all(weights, adapter, folder)
            found = {kind: run(read(folder, weights), batch) for kind, read in READERS.items()}
            tables = file_tables(folder)
        logits = {f"plain/exported_logits.{kind}": array for kind, array in found.items()}
        return cls(logits, [_file_row(name, kind, tables[kind], golden.files[kind]) for kind in tables])


def export_all(weights: Weights, adapter: Adapter, folder: Path) -> None:
    """Write an adapter in every form of `EXPORTS`.

    Args:
        weights: The base.
        adapter: What is written.
        folder: Where.
    """
    write_peft(adapter, folder / EXPORTS["peft_folder"], base=identity_of(weights))
    write_lora_gguf(adapter, folder / EXPORTS["lora_gguf"], weights.config)
    for kind in ("merged_folder", "merged_gguf"):
        merge(weights.path, folder / EXPORTS["peft_folder"], folder / EXPORTS[kind], logits=False)


def file_tables(folder: Path) -> dict[str, Table]:
    """Every tensor of the adapter files, read by the packages of their formats, not by us.

    Args:
        folder: As `export_all` fills it.

    Returns:
        Kind to tensor name to type, shape and hash; of the GGUF file also its alpha.
    """
    return {
        "peft_folder": safetensors_table(folder / EXPORTS["peft_folder"] / TENSOR_FILE),
        "lora_gguf": gguf_table(folder / EXPORTS["lora_gguf"]),
    }


def safetensors_table(path: Path) -> Table:
    """Every tensor of a safetensors file by the safetensors package."""
    from safetensors.numpy import load_file

    return {
        name: f"{a.dtype} {'x'.join(map(str, a.shape))} {hashlib.sha256(np.ascontiguousarray(a).data).hexdigest()}"
        for name, a in load_file(path).items()
    }


def gguf_table(path: Path) -> Table:
    """Every tensor of a GGUF file by the gguf package, and the alpha of an adapter, which decides all scales."""
    with GGUFFile(path) as file:
        alpha = file.metadata.get(ALPHA)
    return {**foreign_tensors(path), ALPHA: "none" if alpha is None else f"{alpha:g}"}


def run(weights: Weights, batch: Batch) -> np.ndarray:
    """Logits of all documents of a batch, in a row."""
    caches = ((ids, KVCache(weights.config, weights.dtype)) for ids, _ in batch.each_document())
    return np.concatenate([forward(ids, weights, cache) for ids, cache in caches])


def _peft_folder(folder: Path, weights: Weights) -> Weights:
    return AdaptedWeights(weights, read_peft(folder / EXPORTS["peft_folder"], weights.config))


def _lora_gguf(folder: Path, weights: Weights) -> Weights:
    return AdaptedWeights(weights, read_lora_gguf(folder / EXPORTS["lora_gguf"], weights.config))


READERS: Mapping[str, Callable[[Path, Weights], Weights]] = {
    "peft_folder": _peft_folder,
    "lora_gguf": _lora_gguf,
    "merged_folder": lambda folder, _: open_weights(folder / EXPORTS["merged_folder"]),
    "merged_gguf": lambda folder, _: open_weights(folder / EXPORTS["merged_gguf"]),
}


def _file_row(model: str, kind: str, own: Table, golden: Table) -> Row:
    wrong = differing(own, golden)
    stage, share = f"adapter_file.{kind}", len(wrong) / len(own.keys() | golden.keys())
    checkpoint = BY_GROUP["adapter_file"].checkpoint
    return exact_row(model, checkpoint, stage, WRITTEN_BY[kind], share, ", ".join(wrong[:5]))
