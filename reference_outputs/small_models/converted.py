"""Write a trained transformers model of any family as GGUF, with llama.cpp's converter and llorch's vocabulary.

The converter is in llama.cpp's source tree, not in a package: LLORCH_LLAMACPP is that folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import transformers

_CONVERT = """
import json, sys
from pathlib import Path
tree, folder, target = sys.argv[1:]
sys.path[:0] = [tree + "/gguf-py", tree]
import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
metadata = json.loads((Path(folder) / "gguf.json").read_text())
def set_vocab(self):
    adders = {bool: "add_bool", int: "add_uint32", str: "add_string", list: "add_array"}
    for key, value in metadata.items():
        getattr(self.gguf_writer, adders[type(value)])(key, value)
found = get_model_class(get_model_architecture(ModelBase.load_hparams(Path(folder), False), ModelType.TEXT))
for one in (found, getattr(found, "Ministral3Model", found)):  # which is that converter's own
    one.set_vocab, one.no_mtp = set_vocab, True
found(Path(folder), gguf.LlamaFileType.ALL_F32, Path(target), eager=True, model_name=Path(target).stem).write()
"""


def write(path: Path, model: transformers.PreTrainedModel, tokenizer_metadata: Mapping[str, object]) -> None:
    """Write one model.

    Args:
        path: The file to write.
        model: The trained model.
        tokenizer_metadata: `tokenizer.ggml.*` keys and values.

    Raises:
        ValueError: LLORCH_LLAMACPP is not set, or the converter failed.
    """
    if not (tree := os.environ.get("LLORCH_LLAMACPP")):
        raise ValueError(
            f"{path.name}: expected the folder of llama.cpp's converter in LLORCH_LLAMACPP, got nothing "
            "(tests/support/fetch_vocabularies.py gets it)"
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (Path(folder) / "gguf.json").write_text(json.dumps(tokenizer_metadata))
        command = [sys.executable, "-c", _CONVERT, tree, folder, str(path)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0 or not path.exists():
        raise ValueError(f"{path.name}: llama.cpp's converter failed: {process.stderr[-500:]}")
