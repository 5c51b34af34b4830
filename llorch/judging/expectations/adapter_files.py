"""Checkpoint 20's files: an adapter written in every form that others load, read again and run.

The reference engines ran these very files when the goldens were made. The adapter folder must be PEFT's own to the byte
of every tensor. Of the LoRA GGUF, which nobody else writes rightly, the golden is our own file, named so: the very one
that llama.cpp made its logits from. Merged files hold sums whose last bit depends on the machine, so logits are
compared.
"""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from llorch.files import GGUFFile, Weights, open_weights
from llorch.judging.compare import compare_exact
from llorch.judging.expectations.files import differing, foreign_tensors, format_wrong_tensors
from llorch.judging.expectations.training_places import PEFT, Arrays, at
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.runners.training_numpy import logits_of
from llorch.judging.types import Comparison
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import ALPHA, read_lora_gguf, write_lora_gguf
from llorch.lora.peft_format import TENSOR_FILE, read_peft, write_peft
from llorch.training.merge_files import merge

Table = Mapping[str, str]
EXPORTS: Mapping[str, str] = {  # kind -> name in the folder
    "peft_folder": "adapter",
    "lora_gguf": "adapter.gguf",
    "merged_folder": "merged",
    "merged_gguf": "merged.gguf",
}
OURS = "ours"
WRITTEN_BY = {"peft_folder": PEFT, "lora_gguf": OURS}  # the golden of an adapter file


def exported(weights: Weights, golden: TrainingGolden) -> tuple[Arrays, dict[str, Table]]:
    """Write all files of a golden's adapter, read them again and run them: logits, and the tables of adapter files."""
    adapter, documents = golden.adapter_for(weights.config), [ids for ids, _ in golden.batches[0].each_document()]
    with tempfile.TemporaryDirectory(prefix="llorch-") as made:
        folder = Path(made)
        export_all(weights, adapter, folder)
        logits = {
            at("exported_logits", part=kind): logits_of(read(folder / EXPORTS[kind], weights), documents)
            for kind, read in READERS.items()
        }
        return logits, file_tables(folder)


def export_all(weights: Weights, adapter: Adapter, folder: Path) -> None:
    """Write an adapter in every form of `EXPORTS`."""
    write_peft(adapter, folder / EXPORTS["peft_folder"], base=identity_of(weights))
    write_lora_gguf(adapter, folder / EXPORTS["lora_gguf"], weights.config)
    for kind in ("merged_folder", "merged_gguf"):
        merge(weights.path, folder / EXPORTS["peft_folder"], folder / EXPORTS[kind], logits=False)


def file_tables(folder: Path) -> dict[str, Table]:
    """List every tensor of the adapter files, and the alpha of a GGUF file, read by the packages of their formats."""
    return {
        "peft_folder": safetensors_table(folder / EXPORTS["peft_folder"] / TENSOR_FILE),
        "lora_gguf": gguf_table(folder / EXPORTS["lora_gguf"]),
    }


def safetensors_table(path: Path) -> Table:
    """List every tensor of a safetensors file by the safetensors package."""
    from safetensors.numpy import load_file

    return {
        name: f"{a.dtype} {'x'.join(map(str, a.shape))} {hashlib.sha256(np.ascontiguousarray(a).data).hexdigest()}"
        for name, a in load_file(path).items()
    }


def gguf_table(path: Path) -> Table:
    """List every tensor of a GGUF file by the gguf package, and the alpha of an adapter, which decides all scales."""
    with GGUFFile(path) as file:
        alpha = file.metadata.get(ALPHA)
    return {**foreign_tensors(path), ALPHA: "none" if alpha is None else f"{alpha:g}"}


READERS: Mapping[str, Callable[[Path, Weights], Weights]] = {
    "peft_folder": lambda path, weights: AdaptedWeights(weights, read_peft(path, weights.config)),
    "lora_gguf": lambda path, weights: AdaptedWeights(weights, read_lora_gguf(path, weights.config)),
    "merged_folder": lambda path, _: open_weights(path),
    "merged_gguf": lambda path, _: open_weights(path),
}


def file_row(model: str, kind: str, own: Table, golden: Table) -> Comparison:
    """Compare an adapter file with the golden; all tensors must be equal."""
    wrong = differing(own, golden)
    share = len(wrong) / len(own.keys() | golden.keys())
    stage_ref = at("adapter_file", part=kind, case="near")
    return compare_exact(stage_ref, WRITTEN_BY[kind], share, format_wrong_tensors(wrong, own, golden), model=model)
