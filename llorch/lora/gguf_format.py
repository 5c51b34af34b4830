"""A LoRA GGUF file in and out, as llama.cpp loads it beside a base.

    <base tensor>.weight.lora_a (r, in)    <base tensor>.weight.lora_b (out, r)    token_embd: lora_a (vocab, r)
    scale = alpha / r, the r of each lora_b; no alpha, or alpha 0: scale = 1

Rows of lora_b of q and k have the pair order of the base's rows in files of the llama family. One alpha serves all
matrices: where it cannot say what rank-stabilised LoRA or alpha patterns mean, each scale is multiplied into its B.

Source: llama.cpp src/llama-adapter.cpp (`llama_adapter_lora_init_impl`, `get_scale`), convert_lora_to_gguf.py.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from llorch.config import ModelConfig
from llorch.errors import FormatError
from llorch.fields import Fields
from llorch.files.export import Entry, write_entries
from llorch.files.gguf import GGUFFile
from llorch.files.names import interleave, undo_interleave
from llorch.files.new_file import new_file
from llorch.files.quant import GGMLType
from llorch.files.strict_json import parse_json
from llorch.lora.adapter import LORA_A, LORA_B, Adapter, assembled, some
from llorch.lora.base import BaseIdentity
from llorch.lora.config import LoraConfig, Target, module_names, targets_of

ALPHA, BASE_KEY = "adapter.lora.alpha", "llorch.base"
_SUFFIXES = {LORA_A: ".weight.lora_a", LORA_B: ".weight.lora_b"}


def write_lora_gguf(
    adapter: Adapter, path: str | Path, model: ModelConfig, *, base: BaseIdentity | None = None
) -> None:
    """Write an adapter for llama.cpp in F32, complete or absent.

    Unsupported: what llama.cpp cannot load or would compute wrongly, which is DoRA, and adapters of the output or the
    embedding where these are tied.
    """
    path = Path(path)
    _refuse(adapter, model, path)
    alpha = common_alpha(adapter)
    stored = _stored(adapter, folded=alpha is None)
    entries = [
        Entry(name, array.shape, GGMLType.F32, lambda array=array: iter([array])) for name, array in stored.items()
    ]

    def add_metadata(writer: GGUFWriter) -> None:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        if base is not None:
            writer.add_string(BASE_KEY, base.to_json())
        if alpha is not None:
            writer.add_float32(ALPHA, alpha)

    with new_file(path) as temporary:
        write_entries(temporary, model.family, entries, add_metadata)


def read_lora_gguf(path: str | Path, model: ModelConfig) -> Adapter:
    """Read what llama.cpp's converter or llorch wrote, as float32; a folded scale is 1 in its configuration."""
    with GGUFFile(path) as file:
        _check_header(file, model)
        targets = _targets_in(file, model)
        arrays = _arrays(file, targets)
        config = _config_of(file, targets, arrays, model)
        return assembled(config, arrays, model, where=path)


def base_of_gguf(path: str | Path) -> BaseIdentity | None:
    """Our record of the base in a LoRA GGUF file, or None; FormatError where it is damaged."""
    with GGUFFile(path) as file:
        text = file.metadata.get(BASE_KEY)
    if not isinstance(text, str):
        return None
    values = parse_json(text.encode(), what=BASE_KEY, path=path)
    return BaseIdentity.from_fields(values if isinstance(values, dict) else {}, Path(path))


def common_alpha(adapter: Adapter) -> float | None:
    """The one alpha (a float32) that gives every matrix its scale by alpha / r, or None where they need several."""
    ranks = {name: adapter.config.rank_of(target) for name, target in adapter.targets.items()}
    alphas = {float(np.float32(adapter.scaling(name) * rank)) for name, rank in ranks.items()}
    return alphas.pop() if len(alphas) == 1 else None


def _refuse(adapter: Adapter, model: ModelConfig, path: Path) -> None:
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if adapter.config.use_dora:
        message = "llama.cpp has no magnitude vectors (DoRA); merge instead: llorch lora merge BASE ADAPTER x.gguf"
        raise FormatError("Unsupported", message, path=path)
    if model.tie_word_embeddings and outer:
        message = (
            f"{', '.join(outer)}: embedding and output are one tensor in the GGUF file of a tied base, an adapter of"
        )
        message += " one of them cannot be told apart; merge instead: llorch lora merge BASE ADAPTER x.gguf"
        raise FormatError("Unsupported", message, path=path)


def _stored(adapter: Adapter, *, folded: bool) -> dict[str, np.ndarray]:
    arrays = {}
    for name, target in adapter.targets.items():
        tensors = adapter.tensors[name]
        lora_b = tensors.lora_B
        if folded:
            lora_b = (lora_b * np.float64(adapter.scaling(name))).astype(np.float32)
        if target.interleaved_heads:
            lora_b = interleave(lora_b, target.interleaved_heads)
        lora_a = tensors.lora_A.T if target.is_embedding else tensors.lora_A
        arrays[target.gguf + _SUFFIXES[LORA_A]] = np.ascontiguousarray(lora_a)
        arrays[target.gguf + _SUFFIXES[LORA_B]] = np.ascontiguousarray(lora_b)
    return arrays


def _check_header(file: GGUFFile, model: ModelConfig) -> None:
    fields = Fields(file.metadata, file.path)
    for key, wanted in {"general.type": "adapter", "adapter.type": "lora"}.items():
        if fields.text(key, default="nothing") != wanted:
            raise fields.error("Unsupported", key, wanted, fields.values.get(key))
    if fields.has("adapter.alora.invocation_tokens"):
        message = "adapter.alora.invocation_tokens: the adapter acts from a token on, which llorch does not do"
        raise FormatError("Unsupported", message, path=file.path)
    family = fields.text("general.architecture")
    if family != model.family:
        raise fields.error("BaseMismatch", "general.architecture", model.family, family)


def _targets_in(file: GGUFFile, model: ModelConfig) -> dict[str, Target]:
    """The matrices that have both halves."""
    known = {target.gguf: target for target in targets_of(model).values()}
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
        raise FormatError("Missing", f"one half is missing: {some(sorted(one ^ other))}", path=file.path)
    outside = sorted(one - known.keys())
    if outside or not one:
        message = f"expected adapters of this model's matrices, got {some(outside) or 'no tensors'}"
        raise FormatError("Unexpected" if outside else "Missing", message, path=file.path)
    return {known[name].name: known[name] for name in known if name in one}


def _arrays(file: GGUFFile, targets: Mapping[str, Target]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, target in targets.items():
        for kind, suffix in _SUFFIXES.items():
            array = file.array(target.gguf + suffix)
            if array.ndim != 2:
                message = f"{target.gguf}{suffix} expected a matrix, got shape {array.shape}"
                raise FormatError("Shape", message, path=file.path)
            arrays[f"{name}.{kind}"] = array.T if target.is_embedding and kind == LORA_A else array
        rows = arrays[f"{name}.{LORA_B}"]
        if target.interleaved_heads and len(rows) == target.n_out:
            arrays[f"{name}.{LORA_B}"] = undo_interleave(rows, target.interleaved_heads)
    return arrays


def _config_of(
    file: GGUFFile, targets: Mapping[str, Target], arrays: Mapping[str, np.ndarray], model: ModelConfig
) -> LoraConfig:
    """Rank by rank as the tensors have them; alpha as the file says, or each matrix's rank where it says none."""
    ranks = {target.path: arrays[f"{name}.{LORA_B}"].shape[1] for name, target in targets.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
    alpha = Fields(file.metadata, file.path).number(ALPHA, default=0.0)
    try:
        return LoraConfig(
            r=usual,
            rank_pattern=others,
            lora_alpha=alpha or float(usual),
            alpha_pattern={} if alpha else {path: float(rank) for path, rank in others.items()},
            target_modules=module_names(targets, model),
        )
    except ValueError as error:
        raise FormatError("OutOfRange", str(error), path=file.path) from None
