"""Whether the numbers of an adapter do what a trained adapter does.

Source: peft issues 1142 and 1388, open-unlearning 178 (untrained B), peft 2502, torchtune 1101 (merged bf16).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from llorch.files import Weights
from llorch.files.encode import encode
from llorch.files.quant import GGMLType, decode
from llorch.lora.adapter import Adapter
from llorch.lora.finding import OK, WARNING, WRONG, Finding
from llorch.lora.merge import merged_matrix
from llorch.lora.summary import product_norm, stored_types

_LARGE, _MOST = 1.0, 0.5  # of the base's norm; of the elements that the adapter moves


def trained(path: Path, adapter: Adapter, weights: Weights) -> Finding:
    """A product that is exactly 0 was never trained."""
    zero = [name for name, lora in adapter.tensors.items() if product_norm(lora.lora_A, lora.lora_B) == 0]
    if adapter.config.use_dora:
        zero = [name for name in zero if _magnitude_is_that_of_the_base(name, adapter, weights)]
    if not zero:
        return Finding("trained", OK, "every product B A is other than 0")
    if len(zero) == len(adapter.tensors):
        text = "every product B A is exactly 0: the adapter does nothing; was a gradient cut off (checkpointing)?"
        return Finding("trained", WRONG, text)
    text = f"{len(zero)} of {len(adapter.tensors)} products B A are exactly 0, {zero[0]} first: never trained"
    return Finding("trained", WARNING, text)


def size_of_change(path: Path, adapter: Adapter, weights: Weights) -> Finding:
    """A change as long as the matrix itself is a scale or a base gone wrong more often than a result."""
    relative = {}
    for name, lora in adapter.tensors.items():
        base = float(np.linalg.norm(weights.read(adapter.targets[name].weight)))
        relative[name] = abs(adapter.scaling(name)) * product_norm(lora.lora_A, lora.lora_B) / base
    name, largest = max(relative.items(), key=lambda item: item[1])
    text = f"at most {largest:.2%} of the base's norm, in {name}"
    if largest <= _LARGE:
        return Finding("size of the change", OK, text)
    return Finding("size of the change", WARNING, f"{text}: is the scale right, and the base?")


def merged_bfloat16(path: Path, adapter: Adapter, weights: Weights) -> Finding:
    """A small change of a bfloat16 weight rounds to no change."""
    vanished = {}
    for name in adapter.targets:
        before = weights.read(name if name in weights else "embed_tokens")
        exact = merged_matrix(before, adapter, name, where=path)
        moved = exact != before
        unseen = np.count_nonzero(moved & (_rounded(exact, path) == _rounded(before, path)))
        vanished[name] = unseen / max(1, np.count_nonzero(moved))
    name, worst = max(vanished.items(), key=lambda item: item[1])
    text = f"merged into bfloat16, up to {worst:.1%} of a matrix's changes vanish, in {name}"
    if worst <= _MOST:
        return Finding("merged bfloat16", OK, text)
    return Finding("merged bfloat16", WARNING, f"{text}: merge into F32, or keep the adapter beside the base")


def stored_dtype(path: Path, adapter: Adapter, weights: Weights) -> Finding:
    """Half precision costs an adapter some thousandths."""
    narrow = [kind for kind in stored_types(path) if kind not in ("F32", "F64")]
    if not narrow:
        return Finding("stored dtype", OK, "float32")
    text = f"tensors are stored as {', '.join(narrow)}: rounding moves logits by about a thousandth"
    return Finding("stored dtype", WARNING, f"{text}; training keeps float32")


def _rounded(array: np.ndarray, path: Path) -> np.ndarray:
    kind = GGMLType.BF16
    return decode(np.concatenate([*encode(array, kind, name="merged", path=path)]), kind, array.shape)


def _magnitude_is_that_of_the_base(name: str, adapter: Adapter, weights: Weights) -> bool:
    magnitude = adapter.tensors[name].magnitude
    axis = 0 if adapter.targets[name].is_embedding else 1
    lengths = np.linalg.norm(weights.read(adapter.targets[name].weight), axis=axis)
    return magnitude is not None and bool(np.allclose(magnitude, lengths, rtol=1e-5))


NUMBER_CHECKS: tuple[Callable[[Path, Adapter, Weights], Finding], ...] = (
    trained, size_of_change, merged_bfloat16, stored_dtype,
)  # fmt: skip
