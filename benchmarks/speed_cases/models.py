"""Temporary models of a real shape with random weights, as files of every type and as quantised folders."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

_DENSE: dict[str, Any] = {  # what all shapes have in common
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "hidden_act": "silu", "num_hidden_layers": 24,
}  # fmt: skip
QWEN_05B = _DENSE | {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip
_EXPERTS = _DENSE | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_key_value_heads": 4,
}  # fmt: skip
_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "dense": QWEN_05B,
    "hybrid": _DENSE | {  # Qwen3.5-0.8B, with a smaller vocabulary
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "rope_parameters": _ROPE, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "experts": _EXPERTS | {  # 0.44 billion weights active per token, 2 billion in total
        "hidden_size": 1024, "intermediate_size": 3072, "num_experts": 32, "num_experts_per_tok": 4,
        "num_attention_heads": 16, "head_dim": 64,
    },
    "wide-vocabulary": QWEN_05B | {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 4,
        "vocab_size": 131072,
    },
    "deep": QWEN_05B | {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 4,
        "vocab_size": 8192,
    },
    "7B": _DENSE | {  # Llama 2 7B
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "rope_theta": 1e4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "30B-A3B": _EXPERTS | {  # Qwen3-30B-A3B
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip
LARGE = ("7B", "30B-A3B")  # written as random blocks, because the floats would fill the memory
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama.cpp's llama_ftype


class Models:
    """Files and folders of one configuration, each written at its first use."""

    def __init__(self, shape: str, config: dict[str, Any], folder: Path, threads: int) -> None:
        """Write the floats in both formats, as if just copied from elsewhere, except for large shapes."""
        from llorch.files import open_weights
        from llorch.files.export import write_gguf

        self.config, self.folder, self._large, self._threads = config, folder, shape in LARGE, threads
        if not self._large:
            write_floats(config, folder)
            write_gguf(open_weights(folder), folder / "model.gguf")
            for file in folder.iterdir():
                forget(file)

    def of(self, kind: str) -> Path:
        """Return the file of a type, or the folder of a kind of quantisation."""
        from .folders import KINDS, write_folder

        path = self.folder / ("model.gguf" if kind == "F32" and not self._large else f"{kind}.gguf")
        if kind in KINDS:
            folder = self.folder / kind.replace(" ", "-")
            return folder if folder.exists() else write_folder(kind, self.config, folder)
        if self._large and kind != "Q4_K_M":
            raise click.BadParameter(f"a model of this shape is written as Q4_K_M only, got {kind}")
        if not path.exists():
            click.echo(f"writing {kind}", err=True)
            write_blocks(path, self.config) if self._large else self._quantise(path, kind)
            forget(path)
        return path

    def _quantise(self, path: Path, kind: str) -> None:
        """Write a copy by llama.cpp's own quantiser."""
        from llorch.engines.process import in_child

        source = self.folder / "model.gguf"
        in_child("llama.cpp", source, "published_quantise:quantise", source, path, FILE_TYPES[kind], self._threads)


@contextmanager
def random_models(shape: str, threads: int = 1, **changes: Any) -> Iterator[Models]:
    """Make a temporary folder with models of a shape; `changes` are values of the configuration, None changes none."""
    config = SHAPES[shape] | {name: value for name, value in changes.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as folder:
        yield Models(shape, config, Path(folder), threads)


def write_floats(config: dict[str, Any], folder: Path) -> None:
    """Write random weights and their configuration as a Hugging Face folder."""
    import numpy as np
    from safetensors.numpy import save_file

    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.files.tensor_names import huggingface_tensors

    rng = np.random.default_rng(0)
    click.echo("writing random weights", err=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = huggingface_tensors(config_from_huggingface(config, path=folder))
    arrays = {tensor.name: 0.02 * rng.standard_normal(tensor.shape, dtype=np.float32) for tensor in tensors}
    arrays |= {name: 1 + array for name, array in arrays.items() if name.endswith("norm.weight")}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def write_blocks(path: Path, config: dict[str, Any]) -> None:
    """Write random blocks in the types of a Q4_K_M file, one tensor after the other."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.families.table import FAMILIES
    from llorch.files.export import add_hyperparameters
    from llorch.files.quant import BLOCK_SIZES
    from llorch.files.tensor_names import inventory
    from llorch.judging.expectations.quantised_models import random_blocks

    model = config_from_huggingface(config, path=path)
    writer = GGUFWriter(path, FAMILIES[model.family].gguf)
    writer.add_tokenizer_model("no_vocab")
    add_hyperparameters(writer, model)
    arrays = []
    for index, weight in enumerate(inventory(model).values()):
        if weight.stays_f32:  # norm gains of one, or router weights, which must not be equal
            rng = np.random.default_rng(index)
            is_gain = len(weight.shape) == 1
            array = np.ones(weight.shape, np.float32) if is_gain else rng.standard_normal(weight.shape, np.float32) / 16
            writer.add_tensor_info(weight.gguf, weight.shape, array.dtype, array.nbytes)
            arrays.append(lambda array=array: array)
            continue
        kind = block_type(weight.name, model.n_layers)
        size, n_bytes = BLOCK_SIZES[kind]
        shape = (int(np.prod(weight.shape)) // size, n_bytes)
        raw = GGMLQuantizationType(kind)
        writer.add_tensor_info(weight.gguf, weight.shape, np.dtype(np.float32), shape[0] * n_bytes, raw_dtype=raw)
        draws = np.roll(random_blocks(kind, 1 << 12, key=kind.name), index, axis=0)
        arrays.append(lambda draws=draws, shape=shape: np.resize(draws, shape).reshape(-1).view(np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make_array in arrays:
        writer.write_tensor_data(make_array())
    writer.close()


def block_type(name: str, n_layers: int) -> Any:
    """Choose the type of a matrix in a Q4_K_M file, as llama-quantize."""
    from llorch.files.quant import GGMLType

    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    six_bit = {*range(n_layers // 8), *range(n_layers * 7 // 8, n_layers), *range(2, n_layers, 3)}
    is_six_bit = name == "lm_head" or (layer in six_bit and name.endswith(("v_proj", "down_proj")))
    return GGMLType.Q6_K if is_six_bit else GGMLType.Q4_K


def bytes_per_token(path: Path) -> int:
    """Count the bytes of a file's weights that one token needs: one row of an untied embedding, a share of experts."""
    from llorch.files import open_weights

    weights = open_weights(path)
    config, total = weights.config, 0
    for name in weights:
        if name == "embed_tokens" and not config.tie_word_embeddings:
            continue
        size = weights.stored_bytes(name)
        if config.experts is not None and ".experts_" in name:
            size = size * config.experts.n_experts_per_token // config.experts.n_experts
        total += size
    return total


def forget(path: Path) -> None:
    """Drop a file from the page cache: just-written pages are small, and all engines read them slower."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
