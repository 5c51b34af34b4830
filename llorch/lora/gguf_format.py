"""A LoRA GGUF file in and out, as llama.cpp loads it beside a base.

    <base tensor>.weight.lora_a (r, in)    <base tensor>.weight.lora_b (out, r)    token_embd: lora_a (vocab, r)
    scale = alpha / r, the r of each lora_b; no alpha, or alpha 0: scale = 1

Rows of lora_b and columns of lora_a have the order that the base's have in such files: pairs of q and k in the llama
family, tiled value heads in Qwen3.5. Of experts there is one pair for all, (experts, r, in) and (experts, out, r), and
what PEFT joins, gate and up, are two tensors with the same lora_a; read from two, they need both ranks where these
differ. One alpha serves all matrices: where it cannot say what rank-stabilised LoRA or alpha patterns mean, each scale
is multiplied into its B.

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
from llorch.lora.adapter import LORA_A, LORA_B, Adapter, assembled, some
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
    """Write an adapter for llama.cpp in F32, complete or absent.

    Unsupported is what llama.cpp lacks or computes wrongly: DoRA, adapters of a tied output or embedding.
    """
    path = Path(path)
    _refuse(adapter, model, path)
    alpha = common_alpha(adapter)
    stored = _stored(adapter, folded=alpha is None)
    entries = [
        TensorToWrite(name, array.shape, GGMLType.F32, lambda array=array: iter([array]))
        for name, array in stored.items()
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
    """Read what llama.cpp's converter or llorch wrote, as float32; a folded scale is 1 in its configuration."""
    with GGUFFile(path) as file:
        _check_header(file, model)
        require_adapter_written(file)
        targets = _targets_in(file, model)
        arrays = _arrays(file, targets, Fields(file.metadata, file.path).number(ALPHA, default=0.0))
        config = _config_of(file, targets, arrays, model)
        return assembled(config, arrays, model, where=path)


def base_of_gguf(path: str | Path) -> BaseIdentity | None:
    """Read llorch's record of the base from a LoRA GGUF file, or None; FormatError if it is damaged."""
    with GGUFFile(path) as file:
        text = file.metadata.get(BASE_KEY)
    if not isinstance(text, str):
        return None
    values = parse_json(text.encode(), what=BASE_KEY, path=path)
    return BaseIdentity.from_fields(values if isinstance(values, dict) else {}, Path(path))


def common_alpha(adapter: Adapter) -> float | None:
    """Find the one alpha (a float32) that gives every matrix its scale by alpha / r; None if they need several."""
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


def _stored(adapter: Adapter, *, folded: bool) -> dict[str, np.ndarray]:
    """Return the tensors of the file by name; `folded`: lora_B is multiplied by the scaling."""
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
    for key, wanted in {"general.type": "adapter", "adapter.type": "lora"}.items():
        if fields.text(key, default="nothing") != wanted:
            raise fields.error("Unsupported", key, wanted, fields.values.get(key))
    if fields.has("adapter.alora.invocation_tokens"):
        message = "adapter.alora.invocation_tokens: llorch does not support adapters that start at a token (aLoRA)"
        raise FormatError("Unsupported", message, path=file.path)
    family = fields.text("general.architecture")
    if family != FAMILIES[model.family].gguf:
        raise fields.error("BaseMismatch", "general.architecture", FAMILIES[model.family].gguf, family)


def _targets_in(file: GGUFFile, model: ModelConfig) -> dict[str, LoraTarget]:
    """Return the matrices that have both halves. FormatError for other tensors or for a half alone."""
    known = {part.name: target for target in targets_of(model).values() for part in target.gguf}
    halves = {
        suffix: {n.removesuffix(suffix) for n in file.tensors if n.endswith(suffix)} for suffix in _SUFFIXES.values()
    }
    foreign = [name for name in file.tensors if not name.endswith(tuple(_SUFFIXES.values()))]
    if foreign:
        code = "Unsupported" if all(name.endswith("_norm.weight") for name in foreign) else "Unexpected"
        message = f"expected tensors that end in .lora_a and .lora_b, got {some(sorted(foreign))}"
        raise FormatError(code, message, path=file.path)
    one, other = halves.values()
    if one ^ other:
        message = f"expected .lora_a and .lora_b for each matrix, got one of them for {some(sorted(one ^ other))}"
        raise FormatError("Missing", message, path=file.path)
    outside = sorted(one - known.keys())
    if outside or not one:
        message = f"expected adapters of this model's matrices, got {some(outside) or 'no tensors'}"
        raise FormatError("Unexpected" if outside else "Missing", message, path=file.path)
    return {known[name].name: known[name] for name in known if name in one}


def _arrays(file: GGUFFile, targets: Mapping[str, LoraTarget], alpha: float) -> dict[str, np.ndarray]:
    """Collect tensors by flat name; if parts of a target have several scales, each is multiplied into its rows of B."""
    arrays = {}
    for name, target in targets.items():
        pairs = {
            part: _pair(file, target, part) for part in target.gguf if part.name + _SUFFIXES[LORA_A] in file.tensors
        }
        arrays[f"{name}.{LORA_A}"], arrays[f"{name}.{LORA_B}"] = joined_pairs(target, pairs, alpha=alpha)
    return arrays


def _pair(file: GGUFFile, target: LoraTarget, part: MatrixPart) -> tuple[np.ndarray, np.ndarray]:
    """Read the two LoRA factors of a part of a target from a GGUF file; FormatError for a wrong shape."""
    found = []
    for suffix in _SUFFIXES.values():
        array = file.array(part.name + suffix)
        if array.ndim != (3 if target.n_experts else 2):
            what = "one matrix for each expert" if target.n_experts else "a matrix"
            raise FormatError("Shape", f"{part.name}{suffix} expected {what}, got shape {array.shape}", path=file.path)
        found.append(array)
    lora_a, lora_b = found
    rows = target.n_out if part.rows is None else len(part.rows)
    if len(target.gguf) > 1 and (lora_a.shape[-1], lora_b.shape[-2]) != (target.n_in, rows):
        message = f"{part.name} expected ({rows}, {target.n_in}), got ({lora_b.shape[-2]}, {lora_a.shape[-1]})"
        raise FormatError("Shape", message, path=file.path)
    return (lora_a.T if target.is_embedding else lora_a), lora_b


def joined_pairs(
    target: LoraTarget, pairs: Mapping[MatrixPart, tuple[np.ndarray, np.ndarray]], *, alpha: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Join the adapters of parts of a target into one: with their lora_a if it is the same, else with all ranks.

    With an `alpha`, each part has the scale alpha / rank; B is multiplied so that the joined adapter has equal results.
    """
    (first, second), *others = pairs.values()
    if not others and (first.shape[-1], second.shape[-2]) != (target.n_in, target.n_out):
        return first, second  # of another model, which is told with all that does not fit
    same = all(np.array_equal(lora_a, first) for lora_a, _ in others)
    ranks = [lora_a.shape[-2] for lora_a, _ in pairs.values()]
    rank = ranks[0] if same else sum(ranks)
    lora_A, lora_B = np.zeros(target.shape_A(rank), first.dtype), np.zeros(target.shape_B(rank), first.dtype)
    all_A, all_B = target.by_expert(lora_A, lora_B)
    start = 0
    for part, (lora_a, lora_b) in pairs.items():
        own = slice(0, rank) if same else slice(start, start := start + lora_a.shape[-2])
        columns, rows = (slice(None) if at is None else [*at] for at in (part.columns, part.rows))
        all_A[..., own, :][..., columns] = lora_a
        all_B[..., own][..., rows, :] = lora_b if same or not alpha else lora_b * (rank / lora_a.shape[-2])
    return lora_A, lora_B


def _config_of(
    file: GGUFFile, targets: Mapping[str, LoraTarget], arrays: Mapping[str, np.ndarray], model: ModelConfig
) -> LoraConfig:
    """Rank by rank as the tensors have them; alpha as the file says, or each matrix's rank where it says none."""
    ranks = {
        target.path: arrays[f"{name}.{LORA_B}"].shape[1] // max(1, target.n_experts) for name, target in targets.items()
    }
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
    alpha = Fields(file.metadata, file.path).number(ALPHA, default=0.0)
    try:
        return LoraConfig(
            r=usual,
            rank_pattern=others,
            lora_alpha=alpha or float(usual),
            alpha_pattern={} if alpha else {path: float(rank) for path, rank in others.items()},
            **names_of(targets, model),
        )
    except ValueError as error:
        raise FormatError("OutOfRange", str(error), path=file.path) from None
