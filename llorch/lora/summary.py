"""Summarise an adapter, with or without its base: ranks, scalings, and the size of each matrix's change."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from llorch.files import Weights
from llorch.files.gguf import GGUFFile
from llorch.files.safetensors import SafetensorsFile
from llorch.files.tensor_names import to_text_only
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
    """Adapter of one matrix."""

    path: str  # module path; in a GGUF file the name of the base tensor
    rank: int
    scaling: float
    n_parameters: int  # without DoRA magnitudes
    norm: float  # Frobenius norm of scaling * B A; NaN for wrong shapes
    relative: float | None  # norm divided by the norm of the base matrix; None without a base


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Adapter as stored on disk."""

    path: Path
    format: str
    config: LoraConfig | None  # None for a GGUF file, which has only ranks and one alpha
    base: str | None  # recorded name of the base
    dtypes: list[str]  # stored dtypes of the tensors
    n_parameters: int
    matrices: list[MatrixSummary]
    problems: list[str]  # reasons to refuse the adapter that show without a base


def summarise(path: str | Path, weights: Weights | None = None) -> Summary:
    """Summarise an adapter; with a base, add norms relative to the base's."""
    recorded, path = recorded_base(path), Path(path)
    config = read_config(path)[0] if path.is_dir() else None
    with SafetensorsFile(tensor_file(path)) if path.is_dir() else GGUFFile(path) as file:
        halves = _read_pairs(file)
        alpha = Fields(file.metadata, path).number(ALPHA, default=0.0) if isinstance(file, GGUFFile) else 0.0
        pairs = {name: pair for name, pair in halves.items() if pair.keys() == {"A", "B"}}
        matrices = [_summarise_matrix(name, pair, config, alpha, weights) for name, pair in sorted(pairs.items())]
        kinds = _list_types(file)
        trained = [info for name, info in file.tensors.items() if "lora" in name]
    problems = [f"{name}: expected lora_A and lora_B, got one of them" for name in sorted(halves.keys() - pairs.keys())]
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
    """Return the stored dtypes of an adapter's tensors: `F32` and so on."""
    path = Path(path)
    with SafetensorsFile(tensor_file(path)) if path.is_dir() else GGUFFile(path) as file:
        return _list_types(file)


def product_norm(lora_A: Float[np.ndarray, "r in"], lora_B: Float[np.ndarray, "out r"]) -> float:
    """Compute the Frobenius norm of B A without computing B A."""
    a, b = lora_A.astype(np.float64), lora_B.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.sqrt(np.maximum(0, np.sum((a @ a.T) * (b.T @ b)))))  # trace of A^T B^T B A


def _list_types(file: SafetensorsFile | GGUFFile) -> list[str]:
    return sorted({file.packed(name).ggml_type.name for name in file.tensors if "lora" in name})


def _read_pairs(file: SafetensorsFile | GGUFFile) -> dict[str, dict[str, np.ndarray]]:
    pattern = _PEFT if isinstance(file, SafetensorsFile) else _GGUF
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name in file.tensors:
        match = pattern.match(name)
        if match:
            array = file.array(name)
            transposed = match["path"] == "token_embd" and match["half"] == "a"
            halves.setdefault(match["path"], {})[match["half"].upper()] = array.T if transposed else array
    return halves


def _summarise_matrix(
    path: str, pair: dict[str, np.ndarray], config: LoraConfig | None, alpha: float, weights: Weights | None
) -> MatrixSummary:
    """Summarise lora_A and lora_B of one path; a PEFT adapter has a `config`, a GGUF file an `alpha` (0: none)."""
    lora_A, lora_B = pair["A"], pair["B"]
    rank, parameter_path = lora_B.shape[-1], _find_parameter(path, config)
    if config is not None:
        target = LoraTarget(path, parameter_path, lora_A.shape[-1], len(lora_B), (), ())
        scaling = config.scaling_of(target)
        if ".experts" in path and rank % config.rank_of(target) == 0 and lora_A.ndim == lora_B.ndim == 2:
            target = replace(target, n_experts=rank // config.rank_of(target))
            rank, (lora_A, lora_B) = config.rank_of(target), target.by_expert(lora_A, lora_B)
    else:
        scaling = alpha / rank if alpha else 1.0
    has_valid_shapes = lora_A.ndim == lora_B.ndim in (2, 3) and lora_A.shape[-2] == rank
    pairs = zip(lora_A, lora_B, strict=True) if lora_A.ndim == 3 else [(lora_A, lora_B)]
    norm = scaling * math.hypot(*(product_norm(a, b) for a, b in pairs)) if has_valid_shapes else float("nan")
    base = _base_norm(parameter_path, weights)
    size, relative = lora_A.size + lora_B.size, None if base is None else norm / base
    return MatrixSummary(path=path, rank=rank, scaling=scaling, n_parameters=size, norm=norm, relative=relative)


def _find_parameter(path: str, config: LoraConfig | None) -> str:
    """Return the path of the module or parameter that an adapter changes; see `targets` for names of experts."""
    if config is None:
        return path
    owner, names = path.removesuffix(".base_layer"), config.target_parameters
    ends = {name.rpartition(".")[2] for name in names if f"{owner}.".endswith(f"{name.rpartition('.')[0]}.")}
    ends |= {name for name in names if "." not in name and owner.endswith("experts")}
    if path != owner:
        return f"{owner}.gate_up_proj"
    return f"{owner}.{max(ends, key='down_proj'.__eq__)}" if ends else path


def _base_norm(path: str, weights: Weights | None) -> float | None:
    """Return the norm of a base matrix, or of all matrices of a fused target, by PEFT or GGUF name; None if unknown."""
    if weights is None:
        return None
    path, names = to_text_only(path), list[str]()
    for target in targets_of(weights.config).values():
        gguf_parts = target.gguf if len(target.gguf) == len(target.parts) else target.gguf * len(target.parts)
        names += [part.name for part, g in zip(target.parts, gguf_parts, strict=True) if path in (target.path, g.name)]
    return math.hypot(*(float(np.linalg.norm(weights.read(name))) for name in names)) if names else None
