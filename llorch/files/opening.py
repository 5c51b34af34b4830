"""Opening a model: a GGUF file or a Hugging Face folder, checked against its configuration, no tensor read."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llorch.families.config import ModelConfig
from llorch.families.read_gguf import config_from_gguf
from llorch.families.read_huggingface import config_from_huggingface
from llorch.families.table import BY_WHOLE, FAMILIES
from llorch.files.folder import PICKLE_SUFFIXES, SafetensorsFolder, file_inside
from llorch.files.gguf import GGUFFile, StringArray, open_gguf
from llorch.files.mapped import on_error
from llorch.files.quantised import QuantisedFolder, is_quantised
from llorch.files.strict_json import read_json
from llorch.files.tensor_names import Weight, found_in, path_alone
from llorch.files.weights import Slot, Weights
from llorch.files.zeros import require_folder_written
from llorch.runtime.errors import ErrorCode, FormatError
from llorch.runtime.fields import Recorded

logger = logging.getLogger(__name__)

_MAX_CONFIG = 1 << 20
_ROPE_FACTORS = "rope_freqs.weight"
_EYES = ("model.visual.", "visual.", "vision_model.", "vision_tower.", "model.vision_tower.", "multi_modal_projector.")
_IMAGE_KEYS = ("image_token_id", "image_token_index", "video_token_id")
_READ_ELSEWHERE = {  # keys of config.json: by readers of the tokenizer, of quantised folders and of this module
    "bos_token_id", "eos_token_id", "pad_token_id", "quantization", "quantization_config", "auto_map", *_IMAGE_KEYS,
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
_PREDICTING = ("mtp.", "model.mtp.")  # further tokens
_PARTS_LEFT_OUT = {
    "draft head": re.compile("|".join([*map(re.escape, _PREDICTING), r"blk\.\d+\."])),
    "image part": re.compile("|".join(map(re.escape, _EYES))),
}
_BASE = ("embed_tokens.", "layers.", "norm.")  # what a base model consists of
_SHOWN = 3  # names of one fault
_OF_QUANTISED = (  # ends of the names of tensors that only quantised folders have
    "SCB", "absmax", "qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_2",
    "weight_scale_inv", "_weight_qdata",
)  # fmt: skip


def open_weights(path: str | Path) -> Weights:
    """Open a GGUF file or a Hugging Face folder; check configuration, set of tensors, and the last bytes of each file.

    No other tensor is read yet.
    """
    weights = open_table(path)
    with on_error(weights.source.close):
        weights.require_written()
    return weights


def open_table(path: str | Path) -> Weights:
    """Open a model as `open_weights` does, whatever the bytes of its tensors are."""
    path = Path(path)
    if path.is_dir():
        return _open_huggingface(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise FormatError("Unsafe", "a pickle can run code; convert the model to safetensors first", path=path)
    if path.suffix == ".safetensors":
        message = "expected the folder that holds config.json, got a single file; give the folder"
        raise FormatError("Unsupported", message, path=path)
    return _open_gguf(path)


def _open_gguf(path: Path) -> Weights:
    file = open_gguf(path)
    with on_error(file.close):
        config = _gguf_config(file)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        slots = {name: _in_gguf(weight, file) for name, weight in found_in(shapes, config).items()}
        ignored = {_ROPE_FACTORS} | _predicting(file, config)
        _check_tensors(slots, file, ignored=ignored, family=config.family)
    return Weights(config=config, path=path, source=file, slots=slots, left_out=_left_out(ignored))


def _in_gguf(weight: Weight, file: GGUFFile) -> Slot:
    """Return the place of a weight in the file, whose tensor may have other axes of length 1."""
    layout = weight.in_gguf
    found = file.tensors.get(weight.gguf)
    wanted = layout.shape or weight.shape
    # Writers put axes of length 1 before the others, or leave them out (the gate of a shared expert).
    if found is not None and found.shape != wanted and _without_ones(found.shape) == _without_ones(wanted):
        layout = replace(layout, shape=found.shape)
    return Slot(weight.gguf, weight.shape, weight.interleaved_heads, is_matrix=weight.is_matrix, layout=layout)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out axes of length 1 before the others."""
    first = next((axis for axis, length in enumerate(shape) if length != 1), len(shape))
    return shape[first:]


def _predicting(file: GGUFFile, config: ModelConfig) -> set[str]:
    """Return the names of tensors in blocks after the last layer, which predict further tokens."""
    names = {name for name in file.tensors if re.match(r"blk\.(\d+)\.", name)}
    extra = {name for name in names if int(name.split(".")[1]) >= config.n_layers}
    if extra and FAMILIES[config.family].layout.has_mtp_layers:
        logger.info("%s: ignored %d tensors for the prediction of further tokens", file.path, len(extra))
        return extra
    return set()


def _gguf_config(file: GGUFFile) -> ModelConfig:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        message = "expected a tensor token_embd.weight, got none; the file holds no model"
        raise FormatError("Missing", message, path=file.path)
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and len(tokens) != rows:
        message = f"the vocabulary has {len(tokens)} tokens, token_embd.weight has {rows} rows"
        raise FormatError("Inconsistent", message, path=file.path)
    factors = file.array(_ROPE_FACTORS).reshape(-1) if _ROPE_FACTORS in file.tensors else None
    names = file.tensors.keys()
    return config_from_gguf(file.metadata, tensor_names=names, vocab_size=rows, rope_factors=factors, path=file.path)


def _open_huggingface(path: Path) -> Weights:
    values = _read_config(path)
    if "auto_map" in values:
        logger.warning("%s: config.json names custom code (auto_map), which llorch does not run", path)
    config = config_from_huggingface(values, path=path / "config.json")
    folder = _quantised_folder(path, values) if is_quantised(values, path) else SafetensorsFolder(path)
    unused: set[str] = set()
    if isinstance(folder, QuantisedFolder):
        unused = folder.source.unused
        for note in folder.source.notes:
            logger.warning("note: %s: %s", folder.source.settings.path, note)
    with on_error(folder.close):
        plain = _by_path(folder)
        shapes = {path: folder.tensors[name].shape for path, name in plain.items()}
        slots = {name: _in_folder(weight, plain) for name, weight in found_in(shapes, config).items()}
        ignored = _not_text(folder, config, sees="text_config" in values or values["model_type"] in BY_WHOLE)
        folder.require_listed(ignored | unused)
        head = plain.get("lm_head.weight")
        if config.tie_word_embeddings and head is not None:
            embedding = slots["embed_tokens"]
            found = "must_equal" if embedding.source_name in folder.tensors else "source_name"
            slots["embed_tokens"] = replace(embedding, **{found: head})
            ignored.add(head)
        _refuse_mlx(config, slots, folder)
        _check_tensors(slots, folder, ignored=ignored, family=config.family)
    return Weights(config=config, path=path, source=folder, slots=slots, left_out=_left_out(ignored))


def _quantised_folder(path: Path, values: Mapping[str, object]) -> QuantisedFolder:
    """Open a quantised folder; zeros at the end of a file are the cause if what they say of a matrix is refused."""
    try:
        return QuantisedFolder(path, values)
    except FormatError:
        require_folder_written(path)
        raise


def _read_config(folder: Path) -> dict[str, object]:
    return read_json(file_inside(folder, "config.json"), limit=_MAX_CONFIG)


def unread_settings(path: Path) -> dict[str, object]:
    """Return what no rule of llorch reads, by key: of a folder, or of the architecture in a GGUF file."""
    if path.is_dir():
        values = Recorded(_read_config(path))
        config_from_huggingface(values, path=path / "config.json")
        unread = values.unread().items()
        return {key: value for key, value in unread if key.removeprefix("text_config.") not in _READ_ELSEWHERE}
    with open_gguf(path) as file:
        metadata: Any = Recorded(file.metadata)
        file.metadata = metadata
        _gguf_config(file)
        prefix = f"{metadata['general.architecture']}."
        return {key: value for key, value in metadata.unread().items() if key.startswith(prefix)}


def ids_of_images(weights: Weights) -> dict[int, str]:
    """Map the token ids that a multimodal model replaces by image features to their keys; GGUF files name none."""
    if not isinstance(weights.source, SafetensorsFolder):
        return {}
    values = _read_config(weights.source.path)
    found = ((values.get(key), key) for key in _IMAGE_KEYS)
    return {token_id: key for token_id, key in found if isinstance(token_id, int)}


def _by_path(folder: SafetensorsFolder) -> dict[str, str]:
    """Map paths in the text model to names of tensors; `model.` is added to names of a file of the base model alone."""
    plain = {path_alone(name): name for name in folder.tensors}
    if not any(path.startswith("model.") for path in plain):
        plain = {f"model.{path}" if path.startswith(_BASE) else path: name for path, name in plain.items()}
    return plain


def _in_folder(weight: Weight, plain: Mapping[str, str]) -> Slot:
    """Return the place of a weight in the folder, with the prefix that the folder's names have."""
    name, first = weight.huggingface, plain.get(weight.huggingface.format(e=0))
    if first is not None:
        prefix = first.removesuffix(name.format(e=0).removeprefix("model."))
        name = prefix + name.removeprefix("model.")
    return Slot(name, weight.shape, is_matrix=weight.is_matrix, layout=weight.in_huggingface)


def _not_text(folder: SafetensorsFolder, config: ModelConfig, *, sees: bool) -> set[str]:
    """Find tensors that do not belong to the text model; log how many of them hold trained numbers."""
    ignored = {name for name in folder.tensors if name.endswith(".rotary_emb.inv_freq")}
    prefixes = (*(_EYES if sees else ()), *(_PREDICTING if FAMILIES[config.family].layout.has_mtp_layers else ()))
    others = {name for name in folder.tensors if name.startswith(prefixes)}
    if others:
        logger.info("%s: ignored %d tensors outside the text part", folder.path, len(others))
    return ignored | others


def _left_out(ignored: Iterable[str]) -> dict[str, dict[str, int]]:
    """Count ignored tensors that hold trained numbers, by the part of the model and the prefix of their names."""
    left_out: dict[str, Counter[str]] = {}
    for name in sorted(ignored):
        for part, pattern in _PARTS_LEFT_OUT.items():
            if match := pattern.match(name):
                left_out.setdefault(part, Counter())[match[0]] += 1
    return {part: dict(counts) for part, counts in left_out.items()}


def _refuse_mlx(config: ModelConfig, slots: Mapping[str, Slot], folder: SafetensorsFolder) -> None:
    """Refuse a folder of MLX: its convolutions lie the other way round, and its gains are no longer less one."""
    for name, slot in slots.items():
        found = folder.tensors.get(slot.source_name)
        if name.endswith(".conv") and found is not None and found.shape == (*slot.shape, 1) and slot.shape[1] != 1:
            message = f"{slot.source_name} has shape {found.shape}, as in folders of MLX, which changes norm weights"
            remedy = "use the folder before its conversion to MLX"
            raise FormatError("Unsupported", f"{message}, too; {remedy}", path=folder.path)


def _check_tensors(
    slots: Mapping[str, Slot], source: GGUFFile | SafetensorsFolder, *, ignored: set[str], family: str
) -> None:
    wanted = {name: shape for slot in slots.values() for name, shape in slot.tensors.items()}
    found = source.tensors
    both = sorted(wanted.keys() & found.keys())
    faults: dict[ErrorCode, list[str]] = {
        "Missing": sorted(wanted.keys() - found.keys()),
        "Unexpected": sorted(found.keys() - wanted.keys() - ignored),
        "Shape": [
            f"{name} expected {wanted[name]} got {found[name].shape}"
            for name in both
            if wanted[name] != found[name].shape
        ],
        "DType": [f"{name} holds integers" for name in both if not found[name].holds_floats],
    }
    bad: list[tuple[ErrorCode, list[str]]] = [(code, names) for code, names in faults.items() if names]
    if bad:
        lists = "; ".join(f"{len(names)} {code}: {_format_names(names)}" for code, names in bad)
        message = f"weights: expected the {len(wanted)} tensors of this {family} configuration, got {lists}"
        hint = _hint(source, faults["Unexpected"]) + _untied(faults["Missing"])
        raise FormatError(bad[0][0], message + hint, path=source.path)


def _hint(source: GGUFFile | SafetensorsFolder, unexpected: list[str]) -> str:
    """Say that the settings of a quantised folder are missing, if unexpected tensors look like those of one."""
    ends = {name.rpartition(".")[2] for name in unexpected}
    found = [f"*.{end}" for end in _OF_QUANTISED if end in ends]
    if not found or isinstance(source, GGUFFile | QuantisedFolder):
        return ""
    missing = f"no quantization_config, which quantised tensors ({', '.join(found)}) need"
    return f"; config.json has {missing}: restore the config.json that the quantiser wrote"


def _untied(missing: list[str]) -> str:
    """Say how a folder without an output matrix can be meant, if that is missing."""
    if not any(name.endswith("lm_head.weight") for name in missing):
        return ""
    return "; if the output matrix is the embedding, set tie_word_embeddings to true in config.json"


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
