"""Read and write LoRA GGUF files, which llama.cpp loads with a base.

    <base tensor>.weight.lora_a (r, in)    <base tensor>.weight.lora_b (out, r)    token_embd: lora_a (vocab, r)
    scale = alpha / r, the r of each lora_b; no alpha, or alpha 0: scale = 1

Rows of lora_b and columns of lora_a have the order of the base's rows and columns in GGUF files: interleaved q and k in
the llama family, tiled value heads in Qwen3.5. All experts share one pair, (experts, r, in) and (experts, out, r). Gate
and up, which PEFT fuses, are two pairs with equal lora_a; if their lora_a differ, the fused adapter needs both ranks.
One alpha applies to all matrices: if it cannot express rank-stabilised LoRA or alpha patterns, each scaling is
multiplied into its B ("folded").

Source: llama.cpp src/llama-adapter.cpp (`llama_adapter_lora_init_impl`, `get_scale`), convert_lora_to_gguf.py.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.export import TensorToWrite, write_entries
from llorch.files.gguf import GGUFFile
from llorch.files.new_file import new_file
from llorch.files.quant import GGMLType
from llorch.files.strict_json import parse_json
from llorch.files.zeros import require_adapter_written
from llorch.lora.adapter import LORA_A, LORA_B, Adapter, assembled, shorten
from llorch.lora.base import BaseIdentity
from llorch.lora.config import LoraConfig, names_of
from llorch.lora.targets import LoraTarget, MatrixPart, targets_of
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

ALPHA, BASE_KEY = "adapter.lora.alpha", "llorch.base"
_SUFFIXES = {LORA_A: ".weight.lora_a", LORA_B: ".weight.lora_b"}


def write_lora_gguf(
    adapter: Adapter, path: str | Path, model: ModelConfig, *, base: BaseIdentity | None = None
) -> None:
    """Write an adapter for llama.cpp in F32, with the identity of its base; the file is complete or absent.

    FormatError Unsupported if llama.cpp lacks a feature or computes it wrongly: DoRA, adapters of tied matrices.
    """
    path = Path(path)
    _refuse(adapter, model, path)
    alpha = common_alpha(adapter)
    arrays = _tensors_in_file(adapter, folded=alpha is None)
    entries = [
        TensorToWrite(name, array.shape, GGMLType.F32, lambda array=array: iter([array]))
        for name, array in arrays.items()
    ]

    def add_metadata(writer: GGUFWriter) -> None:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        if base is not None:
            writer.add_string(BASE_KEY, base.to_json())
        if alpha is not None:
            writer.add_float32(ALPHA, alpha)

    with new_file(path) as temporary:
        write_entries(temporary, FAMILIES[model.family].gguf, entries, add_metadata)


def read_lora_gguf(path: str | Path, model: ModelConfig) -> Adapter:
    """Read a file of llama.cpp's converter or of llorch, as float32; a scaling folded into B reads as 1."""
    with GGUFFile(path) as file:
        _check_header(file, model)
        require_adapter_written(file)
        targets = _find_targets(file, model)
        arrays = _read_arrays(file, targets, Fields(file.metadata, file.path).number(ALPHA, default=0.0))
        config = _make_config(file, targets, arrays, model)
        return assembled(config, arrays, model, where=path)


def read_gguf_base(path: str | Path) -> BaseIdentity | None:
    """Read llorch's record of the base from a LoRA GGUF file, or None; FormatError if it is damaged."""
    with GGUFFile(path) as file:
        text = file.metadata.get(BASE_KEY)
    if not isinstance(text, str):
        return None
    values = parse_json(text.encode(), what=BASE_KEY, path=path)
    return BaseIdentity.from_fields(values if isinstance(values, dict) else {}, Path(path))


def common_alpha(adapter: Adapter) -> float | None:
    """Find the alpha (a float32) with which alpha / r is every matrix's scaling; None if there is no such alpha."""
    ranks = {name: adapter.config.rank_of(target) for name, target in adapter.targets.items()}
    alphas = {float(np.float32(adapter.scaling(name) * rank)) for name, rank in ranks.items()}
    return alphas.pop() if len(alphas) == 1 else None


def _refuse(adapter: Adapter, model: ModelConfig, path: Path) -> None:
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    remedy = "merge instead: llorch lora merge BASE ADAPTER x.gguf"
    if adapter.config.use_dora:
        message = "llama.cpp does not support magnitude vectors (DoRA)"
        raise FormatError("Unsupported", f"{message}; {remedy}", path=path)
    if model.tie_word_embeddings and outer:
        message = f"{', '.join(outer)}: a tied base has one GGUF tensor for embedding and output, so a GGUF adapter"
        raise FormatError("Unsupported", f"{message} cannot adapt one of them; {remedy}", path=path)


def _tensors_in_file(adapter: Adapter, *, folded: bool) -> dict[str, np.ndarray]:
    """Return the tensors of the file by name; if `folded`, multiply lora_B by the scaling."""
    arrays = {}
    for name, target in adapter.targets.items():
        tensors = adapter.tensors[name]
        for part in target.gguf:
            lora_a, lora_b = target.pair_of(part, tensors.lora_A, tensors.lora_B)
            if folded:
                lora_b = (lora_b * np.float64(adapter.scaling(name))).astype(np.float32)
            lora_a = lora_a.T if target.is_embedding else lora_a
            arrays[part.name + _SUFFIXES[LORA_A]] = np.ascontiguousarray(lora_a)
            arrays[part.name + _SUFFIXES[LORA_B]] = np.ascontiguousarray(lora_b)
    return arrays


def _check_header(file: GGUFFile, model: ModelConfig) -> None:
    fields = Fields(file.metadata, file.path)
    for key, expected in {"general.type": "adapter", "adapter.type": "lora"}.items():
        if fields.text(key, default="nothing") != expected:
            raise fields.error("Unsupported", key, expected, fields.values.get(key))
    if fields.has("adapter.alora.invocation_tokens"):
        message = "adapter.alora.invocation_tokens: llorch does not support adapters that start at a token (aLoRA)"
        raise FormatError("Unsupported", message, path=file.path)
    family = fields.text("general.architecture")
    if family != FAMILIES[model.family].gguf:
        raise fields.error("BaseMismatch", "general.architecture", FAMILIES[model.family].gguf, family)


def _find_targets(file: GGUFFile, model: ModelConfig) -> dict[str, LoraTarget]:
    """Return the targets (matrices with an adapter) of a file; FormatError for other tensors, or half a pair."""
    target_by_tensor = {part.name: target for target in targets_of(model).values() for part in target.gguf}
    halves = {
        suffix: {n.removesuffix(suffix) for n in file.tensors if n.endswith(suffix)} for suffix in _SUFFIXES.values()
    }
    other_tensors = [name for name in file.tensors if not name.endswith(tuple(_SUFFIXES.values()))]
    if other_tensors:
        # llama.cpp's converter writes trained norms, which llorch does not support.
        code = "Unsupported" if all(name.endswith("_norm.weight") for name in other_tensors) else "Unexpected"
        message = f"expected tensors that end in .lora_a and .lora_b, got {shorten(sorted(other_tensors))}"
        raise FormatError(code, message, path=file.path)
    names_A, names_B = halves.values()
    if names_A ^ names_B:
        single_names = shorten(sorted(names_A ^ names_B))
        message = f"expected .lora_a and .lora_b for each matrix, got one of them for {single_names}"
        raise FormatError("Missing", message, path=file.path)
    unknown_names = sorted(names_A - target_by_tensor.keys())
    if unknown_names or not names_A:
        message = f"expected adapters of this model's matrices, got {shorten(unknown_names) or 'no tensors'}"
        raise FormatError("Unexpected" if unknown_names else "Missing", message, path=file.path)
    return {target_by_tensor[name].name: target_by_tensor[name] for name in target_by_tensor if name in names_A}


def _read_arrays(file: GGUFFile, targets: Mapping[str, LoraTarget], alpha: float) -> dict[str, np.ndarray]:
    """Collect tensors as in `Adapter.flat`; if parts of a fused target differ in rank, scale their rows of B."""
    arrays = {}
    for name, target in targets.items():
        pairs = {
            part: _pair(file, target, part) for part in target.gguf if part.name + _SUFFIXES[LORA_A] in file.tensors
        }
        arrays[f"{name}.{LORA_A}"], arrays[f"{name}.{LORA_B}"] = join_pairs(target, pairs, alpha=alpha)
    return arrays


def _pair(file: GGUFFile, target: LoraTarget, part: MatrixPart) -> tuple[np.ndarray, np.ndarray]:
    """Read lora_a and lora_b of a part of a target; FormatError for a wrong shape."""
    pair = []
    for suffix in _SUFFIXES.values():
        array = file.array(part.name + suffix)
        if array.ndim != (3 if target.n_experts else 2):
            kind = "one matrix for each expert" if target.n_experts else "a matrix"
            raise FormatError("Shape", f"{part.name}{suffix} expected {kind}, got shape {array.shape}", path=file.path)
        pair.append(array)
    lora_a, lora_b = pair
    rows = target.n_out if part.rows is None else len(part.rows)
    if len(target.gguf) > 1 and (lora_a.shape[-1], lora_b.shape[-2]) != (target.n_in, rows):
        message = f"{part.name} expected ({rows}, {target.n_in}), got ({lora_b.shape[-2]}, {lora_a.shape[-1]})"
        raise FormatError("Shape", message, path=file.path)
    return (lora_a.T if target.is_embedding else lora_a), lora_b


def join_pairs(
    target: LoraTarget, pairs: Mapping[MatrixPart, tuple[np.ndarray, np.ndarray]], *, alpha: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Join the adapters of a target's parts: with their lora_a if all are equal, else with the sum of their ranks.

    With an `alpha` above 0, each part has the scaling alpha / rank; B is multiplied so that the products stay equal.
    """
    (first_a, first_b), *later_pairs = pairs.values()
    if not later_pairs and (first_a.shape[-1], first_b.shape[-2]) != (target.n_in, target.n_out):
        return first_a, first_b  # adapter of another model: `assembled` reports all wrong shapes
    share_a = all(np.array_equal(lora_a, first_a) for lora_a, _ in later_pairs)
    ranks = [lora_a.shape[-2] for lora_a, _ in pairs.values()]
    rank = ranks[0] if share_a else sum(ranks)
    lora_A, lora_B = np.zeros(target.shape_A(rank), first_a.dtype), np.zeros(target.shape_B(rank), first_a.dtype)
    all_A, all_B = target.by_expert(lora_A, lora_B)
    start = 0
    for part, (lora_a, lora_b) in pairs.items():
        ranks_of_part = slice(0, rank) if share_a else slice(start, start := start + lora_a.shape[-2])
        columns, rows = (slice(None) if index is None else [*index] for index in (part.columns, part.rows))
        all_A[..., ranks_of_part, :][..., columns] = lora_a
        all_B[..., ranks_of_part][..., rows, :] = lora_b if share_a or not alpha else lora_b * (rank / lora_a.shape[-2])
    return lora_A, lora_B


def _make_config(
    file: GGUFFile, targets: Mapping[str, LoraTarget], arrays: Mapping[str, np.ndarray], model: ModelConfig
) -> LoraConfig:
    """Make the configuration: ranks from the tensors, alpha from the file; without it alpha = rank, a scaling of 1."""
    ranks = {
        target.path: arrays[f"{name}.{LORA_B}"].shape[1] // max(1, target.n_experts) for name, target in targets.items()
    }
    common_rank = Counter(ranks.values()).most_common(1)[0][0]
    other_ranks = {re.escape(path): rank for path, rank in ranks.items() if rank != common_rank}
    alpha = Fields(file.metadata, file.path).number(ALPHA, default=0.0)
    try:
        return LoraConfig(
            r=common_rank,
            rank_pattern=other_ranks,
            lora_alpha=alpha or float(common_rank),
            alpha_pattern={} if alpha else {path: float(rank) for path, rank in other_ranks.items()},
            **names_of(targets, model),
        )
    except ValueError as error:
        raise FormatError("OutOfRange", str(error), path=file.path) from None
