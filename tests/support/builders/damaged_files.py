"""Damage to finished GGUF files, byte by byte, and adapters merged into a folder with and without known mistakes.

Each function on a GGUF file changes it in place. Blocks are those of ggml: 32 or 256 neighbouring elements of a row.

Source: ggml-common.h (places of the float16 scales in a block); PEFT `save_pretrained` (names of files and tensors).
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from safetensors.numpy import load_file, save_file

from builders.source_folders import read_tensors, write_model

_START, _START_OF_TWO = (0,), (0, 2)
# Byte offsets of the float16 scales and minima of a block; IQ1_M and MXFP4 have other scales.
_SCALES = {
    "Q4_0": _START, "Q5_0": _START, "Q8_0": _START, "Q4_1": _START_OF_TWO, "Q5_1": _START_OF_TWO, "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": _START_OF_TWO, "Q5_K": _START_OF_TWO, "Q6_K": (208,), "IQ4_NL": _START, "IQ4_XS": _START,
    "IQ3_XXS": _START, "IQ3_S": _START, "IQ2_XXS": _START, "IQ2_XS": _START, "IQ2_S": _START, "IQ1_S": _START,
}  # fmt: skip


@contextmanager
def _blocks(path: Path, tensor: str) -> Iterator[tuple[np.ndarray, GGMLQuantizationType]]:
    """Map the bytes of a tensor, (rows, blocks of a row, bytes of a block), and its type; write changes on exit."""
    info = next(info for info in GGUFReader(path).tensors if info.name == tensor)
    block_size, n_bytes = GGML_QUANT_SIZES[info.tensor_type]
    shape = (int(np.prod(info.shape[1:])), int(info.shape[0]) // block_size, n_bytes)
    blocks = np.memmap(path, np.uint8, "r+", offset=int(info.data_offset), shape=shape)
    yield blocks, info.tensor_type
    blocks.flush()


def exchange_rows(path: Path, tensor: str, first: int, second: int) -> None:
    """Exchange two rows; those of a stack of matrices are counted through all matrices."""
    with _blocks(path, tensor) as (blocks, _):
        blocks[[first, second]] = blocks[[second, first]]


def damage_block(path: Path, tensor: str, block_index: int, *, seed: int = 0) -> None:
    """Replace all bytes of a block but its float16 scales by random bytes; the values stay finite.

    Raises:
        KeyError: `_SCALES` lacks the type.
    """
    with _blocks(path, tensor) as (blocks, ggml_type):
        block = blocks.reshape(-1, blocks.shape[-1])[block_index]
        is_scale = np.zeros(len(block), bool)
        for offset in _SCALES[ggml_type.name]:
            is_scale[offset : offset + 2] = True
        block[~is_scale] = np.random.default_rng(seed).integers(0, 256, np.count_nonzero(~is_scale), np.uint8)


def scale_block(path: Path, tensor: str, block_index: int, factor: float) -> None:
    """Multiply the float16 scales and minima of a block.

    Raises:
        KeyError: `_SCALES` lacks the type.
    """
    with _blocks(path, tensor) as (blocks, ggml_type):
        block = blocks.reshape(-1, blocks.shape[-1])[block_index]
        for offset in _SCALES[ggml_type.name]:
            scale = block[offset : offset + 2].view(np.float16)
            scale[:] = scale.astype(np.float32) * np.float32(factor)


def cut_tensor(path: Path, tensor: str, n_rows: int) -> None:
    """Replace all rows from `n_rows` on by zero bytes, as an interrupted download leaves them."""
    with _blocks(path, tensor) as (blocks, _):
        blocks[n_rows:] = 0


def write_adapter(
    base: Path,
    folder: Path,
    rank: int = 4,
    *,
    alpha: float = 8.0,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    seed: int = 0,
) -> Path:
    """Write a random LoRA adapter for the modules of a folder with these names, in the format of PEFT.

    B has no zeros. Each product of B and A has about a tenth of the size of its weight.
    """
    rng, tensors = np.random.default_rng(seed), {}
    arrays, _ = read_tensors(base)
    weights = _adapted_weights(arrays, modules)
    for name in weights:
        n_out, n_in = arrays[name].shape
        size = np.sqrt(0.1 * arrays[name].std() * rank / (alpha * np.sqrt(rank)))
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = (size * rng.standard_normal((rank, n_in))).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = (size * rng.standard_normal((n_out, rank))).astype(np.float32)
    target_modules = [module for module in modules if any(f".{module}.weight" in name for name in weights)]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": target_modules, "bias": "none",
        "inference_mode": True, "fan_in_fan_out": False, "modules_to_save": None, "use_rslora": False,
        "use_dora": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def _adapted_weights(arrays: Mapping[str, np.ndarray], modules: Sequence[str]) -> list[str]:
    """List the matrices of these modules; not of experts, whose adapters have another form."""
    ends = tuple(f".{module}.weight" for module in modules)
    return [name for name in arrays if name.endswith(ends) and ".experts." not in name]


@dataclass(frozen=True, kw_only=True)
class MergeMistake:
    """Mistake of a merge.

    Attributes:
        effect: Description of the wrong folder.
        factor: Factor of the adapter's product, by the name of the weight and the rank; 1 is right.
        changes_base: All matrices of the base have other values, 5 % of their size away.
    """

    effect: str
    factor: Callable[[str, int], float] = lambda name, rank: 1.0
    changes_base: bool = False

    def tensors(self, base: Path, adapter: Path) -> list[str]:
        """List the tensors of the wrong folder that differ from the right folder's."""
        if self.changes_base:
            return [name for name, array in read_tensors(base)[0].items() if array.ndim > 1]
        products, rank = _products(adapter)
        return [name for name in products if self.factor(name, rank) != 1]


MERGE_MISTAKES = {
    "left out in some modules": MergeMistake(
        effect="the output projections of attention as in the base",
        factor=lambda name, rank: 0.0 if name.endswith("o_proj.weight") else 1.0,
    ),
    "another scale": MergeMistake(effect="alpha in place of alpha / r", factor=lambda name, rank: float(rank)),
    "subtracted": MergeMistake(effect="the base minus the adapter", factor=lambda name, rank: -1.0),
    "applied twice": MergeMistake(effect="the base plus two times the adapter", factor=lambda name, rank: 2.0),
    "another base": MergeMistake(effect="another base plus the adapter", changes_base=True),
}


def merge(base: Path, adapter: Path, target: Path, mistake: str | None = None) -> Path:
    """Write the folder base + B A alpha / r, in the number types of the base, rounded once.

    Args:
        base: Folder of `write_source`.
        adapter: Folder of `write_adapter`.
        target: Folder to write; it must not exist.
        mistake: Key of `MERGE_MISTAKES`, or None.
    """
    rules = MERGE_MISTAKES[mistake] if mistake else MergeMistake(effect="the right merge")
    shutil.copytree(base, target)
    arrays, dtypes = read_tensors(base)
    if rules.changes_base:
        rng = np.random.default_rng(1)
        for name, array in arrays.items():
            if array.ndim > 1:
                noise = rng.standard_normal(array.shape).astype(np.float32)
                arrays[name] = array + np.float32(0.05) * array.std() * noise
    products, rank = _products(adapter)
    for name, product in products.items():
        arrays[name] = arrays[name] + np.float32(rules.factor(name, rank)) * product
    return write_model(target, json.loads((base / "config.json").read_text()), arrays, dtypes)


def _products(adapter: Path) -> tuple[dict[str, np.ndarray], int]:
    """Compute B A alpha / r in float32 by the names of the weights; return it with the rank."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, scale = load_file(adapter / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    products = {
        f"{name.removeprefix('base_model.model.')}.weight": np.float32(scale)
        * (tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"])
        for name in names
    }
    return products, config["r"]
