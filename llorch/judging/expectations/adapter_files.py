"""A LoRA adapter exported in every format that engines load, read again and run (validation point 20).

The reference engines ran files of the same exports when the goldens were computed. The tensors of the adapter folder
must equal PEFT's bytes. No other tool writes the LoRA GGUF correctly, so its golden is llorch's own file (`ours`), from
which llama.cpp computed its logits. Merged files hold sums whose last bit depends on the machine, so only their logits
are compared.
"""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from llorch.files import GGUFFile, Weights, open_weights
from llorch.judging.compare import compare_exact
from llorch.judging.expectations.files import differing, format_wrong_tensors, library_tensors
from llorch.judging.expectations.training_refs import PEFT, Arrays, at
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.runners.training_numpy import logits_of
from llorch.judging.types import Comparison
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import ALPHA, read_lora_gguf, write_lora_gguf
from llorch.lora.peft_format import TENSOR_FILE, read_peft, write_peft
from llorch.training.merge_files import merge

Table = Mapping[str, str]  # tensor name -> "dtype shape sha256"
EXPORTS: Mapping[str, str] = {  # kind -> file name
    "peft_folder": "adapter",
    "lora_gguf": "adapter.gguf",
    "merged_folder": "merged",
    "merged_gguf": "merged.gguf",
}
OURS = "ours"  # engine name in comparisons of files that only llorch writes
WRITTEN_BY = {"peft_folder": PEFT, "lora_gguf": OURS}  # kind of adapter file -> tool that wrote its golden


def exported(weights: Weights, golden: TrainingGolden) -> tuple[Arrays, dict[str, Table]]:
    """Export a golden's adapter in all formats, and run the files; return logits, and tables of the adapter files."""
    adapter, documents = golden.adapter_for(weights.config), [ids for ids, _ in golden.batches[0].each_document()]
    with tempfile.TemporaryDirectory(prefix="llorch-") as temporary:
        folder = Path(temporary)
        export_all(weights, adapter, folder)
        logits = {
            at("exported_logits", part=kind): logits_of(read(folder / EXPORTS[kind], weights), documents)
            for kind, read in READERS.items()
        }
        return logits, file_tables(folder)


def export_all(weights: Weights, adapter: Adapter, folder: Path) -> None:
    """Write an adapter in every format of `EXPORTS`."""
    write_peft(adapter, folder / EXPORTS["peft_folder"], base=identity_of(weights))
    write_lora_gguf(adapter, folder / EXPORTS["lora_gguf"], weights.config)
    for kind in ("merged_folder", "merged_gguf"):
        merge(weights.path, folder / EXPORTS["peft_folder"], folder / EXPORTS[kind], logits=False)


def file_tables(folder: Path) -> dict[str, Table]:
    """Build the tensor tables of the adapter files, read by the packages of their formats."""
    return {
        "peft_folder": safetensors_table(folder / EXPORTS["peft_folder"] / TENSOR_FILE),
        "lora_gguf": gguf_table(folder / EXPORTS["lora_gguf"]),
    }


def safetensors_table(path: Path) -> Table:
    """Build the tensor table of a safetensors file with the safetensors package."""
    from safetensors.numpy import load_file

    return {
        name: f"{a.dtype} {'x'.join(map(str, a.shape))} {hashlib.sha256(np.ascontiguousarray(a).data).hexdigest()}"
        for name, a in load_file(path).items()
    }


def gguf_table(path: Path) -> Table:
    """Build the tensor table of a LoRA GGUF with the gguf package; add `lora_alpha`, which gives the scaling."""
    with GGUFFile(path) as file:
        alpha = file.metadata.get(ALPHA)
    return {**library_tensors(path), ALPHA: "none" if alpha is None else f"{alpha:g}"}


READERS: Mapping[str, Callable[[Path, Weights], Weights]] = {
    "peft_folder": lambda path, weights: AdaptedWeights(weights, read_peft(path, weights.config)),
    "lora_gguf": lambda path, weights: AdaptedWeights(weights, read_lora_gguf(path, weights.config)),
    "merged_folder": lambda path, _: open_weights(path),
    "merged_gguf": lambda path, _: open_weights(path),
}


def compare_file(model: str, kind: str, actual: Table, expected: Table) -> Comparison:
    """Compare the tensor table of an adapter file with the golden's; all tensors must be equal."""
    wrong = differing(actual, expected)
    share = len(wrong) / len(actual.keys() | expected.keys())
    stage_ref = at("adapter_file", part=kind, case="near")
    return compare_exact(stage_ref, WRITTEN_BY[kind], share, format_wrong_tensors(wrong, actual, expected), model=model)
