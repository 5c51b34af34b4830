"""What is in an adapter, with or without its base at hand: ranks, scales, and how far each matrix is moved."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from llorch.files import Weights
from llorch.files.gguf import GGUFFile
from llorch.files.safetensors import SafetensorsFile
from llorch.files.tensor_names import path_alone
from llorch.lora.config import LoraConfig
from llorch.lora.files import recorded_base
from llorch.lora.gguf_format import ALPHA
from llorch.lora.peft_config import read_config
from llorch.lora.peft_format import tensor_file
from llorch.lora.targets import LoraTarget, targets_of
from llorch.runtime.fields import Fields

_PEFT = re.compile(r"^base_model\.model\.(?P<path>.+)\.lora_(?:embedding_)?(?P<half>[AB])(?:\.default)?(?:\.weight)?$")
_GGUF = re.compile(r"^(?P<path>.+)\.weight\.lora_(?P<half>[ab])$")


@dataclass(frozen=True, kw_only=True)
class MatrixSummary:
    """The adapter of one matrix."""

    path: str  # of the module; in a GGUF file the name of the base tensor
    rank: int
    scaling: float
    n_parameters: int  # magnitudes left out
    norm: float  # Frobenius norm of scaling * B A, which is added to the matrix
    relative: float | None  # to the norm of the base matrix; None without a base


@dataclass(frozen=True, kw_only=True)
class Summary:
    """An adapter as it lies on the disk."""

    path: Path
    format: str
    config: LoraConfig | None  # as far as the file says
    base: str | None  # that it records, by name
    dtypes: list[str]  # of its tensors
    n_parameters: int
    matrices: list[MatrixSummary]
    problems: list[str]  # what llorch would refuse it for, seen without a base


def summarise(path: str | Path, weights: Weights | None = None) -> Summary:
    """Look at an adapter; a base adds norms relative to its own."""
    recorded, path = recorded_base(path), Path(path)
    config = read_config(path)[0] if path.is_dir() else None
    with SafetensorsFile(tensor_file(path)) if path.is_dir() else GGUFFile(path) as file:
        halves = _halves_by_path(file)
        alpha = Fields(file.metadata, path).number(ALPHA, default=0.0) if isinstance(file, GGUFFile) else 0.0
        whole = {name: pair for name, pair in halves.items() if pair.keys() == {"A", "B"}}
        matrices = [_summary(name, pair, config, alpha, weights) for name, pair in sorted(whole.items())]
        kinds = _types(file)
        trained = [info for name, info in file.tensors.items() if "lora" in name]
    problems = [f"{name}: expected lora_A and lora_B, got one of them" for name in sorted(halves.keys() - whole.keys())]
    problems += [f"{matrix.path}: NaN or infinity" for matrix in matrices if not np.isfinite(matrix.norm)]
    return Summary(
        path=path,
        format="PEFT directory" if path.is_dir() else "LoRA GGUF",
        config=config,
        base=recorded if isinstance(recorded, str) or recorded is None else recorded.name,
        dtypes=kinds,
        n_parameters=sum(int(np.prod(info.shape)) for info in trained),
        matrices=matrices,
        problems=problems if halves else ["no LoRA tensors"],
    )


def stored_types(path: str | Path) -> list[str]:
    """Return the types in which an adapter stores its tensors: `F32` and so on."""
    path = Path(path)
    with SafetensorsFile(tensor_file(path)) if path.is_dir() else GGUFFile(path) as file:
        return _types(file)


def product_norm(lora_A: Float[np.ndarray, "r in"], lora_B: Float[np.ndarray, "out r"]) -> float:
    """Compute the Frobenius norm of B A without the product itself."""
    a, b = lora_A.astype(np.float64), lora_B.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.sqrt(np.maximum(0, np.sum((a @ a.T) * (b.T @ b)))))  # trace of A^T B^T B A


def _types(file: SafetensorsFile | GGUFFile) -> list[str]:
    return sorted({file.packed(name).ggml_type.name for name in file.tensors if "lora" in name})


def _halves_by_path(file: SafetensorsFile | GGUFFile) -> dict[str, dict[str, np.ndarray]]:
    pattern = _PEFT if isinstance(file, SafetensorsFile) else _GGUF
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in file.tensors:
        match = pattern.match(name)
        if match:
            array = file.array(name)
            transposed = match["path"] == "token_embd" and match["half"] == "a"
            found.setdefault(match["path"], {})[match["half"].upper()] = array.T if transposed else array
    return found


def _summary(
    path: str, pair: dict[str, np.ndarray], config: LoraConfig | None, alpha: float, weights: Weights | None
) -> MatrixSummary:
    """Summarise the matrices A and B of one path: shapes, rank, scaling, norms."""
    lora_A, lora_B = pair["A"], pair["B"]
    rank, whole = lora_B.shape[-1], _parameter(path, config)
    if config is not None:
        target = LoraTarget(path, whole, lora_A.shape[-1], len(lora_B), (), ())
        scaling = config.scaling_of(target)
        if ".experts" in path and rank % config.rank_of(target) == 0 and lora_A.ndim == lora_B.ndim == 2:
            target = replace(target, n_experts=rank // config.rank_of(target))
            rank, (lora_A, lora_B) = config.rank_of(target), target.by_expert(lora_A, lora_B)
    else:
        scaling = alpha / rank if alpha else 1.0
    fits = lora_A.ndim == lora_B.ndim in (2, 3) and lora_A.shape[-2] == rank
    each = zip(lora_A, lora_B, strict=True) if lora_A.ndim == 3 else [(lora_A, lora_B)]
    norm = scaling * math.hypot(*(product_norm(a, b) for a, b in each)) if fits else float("nan")
    base = _base_norm(whole, weights)
    size, relative = lora_A.size + lora_B.size, None if base is None else norm / base
    return MatrixSummary(path=path, rank=rank, scaling=scaling, n_parameters=size, norm=norm, relative=relative)


def _parameter(path: str, config: LoraConfig | None) -> str:
    """Return the path of the weight (for a parameter its own, not its module's) that an adapter changes."""
    if config is None:
        return path
    owner, names = path.removesuffix(".base_layer"), config.target_parameters
    ends = {name.rpartition(".")[2] for name in names if f"{owner}.".endswith(f"{name.rpartition('.')[0]}.")}
    ends |= {name for name in names if "." not in name and owner.endswith("experts")}
    if path != owner:
        return f"{owner}.gate_up_proj"
    return f"{owner}.{max(ends, key='down_proj'.__eq__)}" if ends else path


def _base_norm(path: str, weights: Weights | None) -> float | None:
    """Return the norm of a base matrix, or of all that a target joins; None if the model has no such name."""
    if weights is None:
        return None
    path, names = path_alone(path), list[str]()
    for target in targets_of(weights.config).values():
        of_file = target.gguf if len(target.gguf) == len(target.parts) else target.gguf * len(target.parts)
        names += [own.name for own, g in zip(target.parts, of_file, strict=True) if path in (target.path, g.name)]
    return math.hypot(*(float(np.linalg.norm(weights.read(name))) for name in names)) if names else None
