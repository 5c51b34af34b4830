"""Open a model, a GGUF file or a Hugging Face folder, and check its tensors' names and shapes without reading them."""

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
from llorch.files.mapped import note_once, on_error
from llorch.files.quantised import QuantisedFolder, is_quantised
from llorch.files.strict_json import read_json
from llorch.files.tensor_names import Weight, found_in, to_text_only
from llorch.files.weights import Slot, Weights
from llorch.files.zeros import require_folder_written
from llorch.runtime.errors import ErrorCode, FormatError
from llorch.runtime.fields import ReadTrackingDict

logger = logging.getLogger(__name__)

_MAX_CONFIG = 1 << 20  # bytes of config.json
_ROPE_FACTORS = "rope_freqs.weight"
_IMAGE = ("model.visual.", "visual.", "vision_model.", "vision_tower.", "model.vision_tower.", "multi_modal_projector.")
_IMAGE_KEYS = ("image_token_id", "image_token_index", "video_token_id")  # placeholder tokens
_READ_ELSEWHERE = {  # keys of config.json that the tokenizer, quantised folders and this module read
    "bos_token_id", "eos_token_id", "pad_token_id", "quantization", "quantization_config", "auto_map", *_IMAGE_KEYS,
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
_MTP = ("mtp.", "model.mtp.")  # multi-token prediction
_LEFT_OUT_PARTS = {
    "draft head": re.compile("|".join([*map(re.escape, _MTP), r"blk\.\d+\."])),  # only MTP blocks are ignored tensors
    "image part": re.compile("|".join(map(re.escape, _IMAGE))),
}
_BASE_PREFIXES = ("embed_tokens.", "layers.", "norm.")  # prefixes of a base model's names
_MAX_NAMES = 3  # names listed per fault
_QUANTISED_SUFFIXES = (  # suffixes of tensor names that only quantised folders have
    "SCB", "absmax", "qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_2",
    "weight_scale_inv", "_weight_qdata",
)  # fmt: skip


def open_weights(path: str | Path) -> Weights:
    """Open a GGUF file or a Hugging Face folder; check configuration, set of tensors, and the last bytes of each file.

    Tensors are read later.
    """
    weights = open_table(path)
    with on_error(weights.source.close):
        weights.require_written()
    return weights


def open_table(path: str | Path, *, is_complete: bool = True) -> Weights:
    """Open a model like `open_weights`, without the check of the last bytes.

    With `is_complete=False`, tensors may be missing, additional or of another shape; reading such a weight fails.
    """
    path = Path(path)
    if path.is_dir():
        return _open_huggingface(path, is_complete=is_complete)
    if path.suffix in PICKLE_SUFFIXES:
        raise FormatError("Unsafe", "a pickle can run code; convert the model to safetensors first", path=path)
    if path.suffix == ".safetensors":
        message = "expected the folder that holds config.json, got a single file; give the folder"
        raise FormatError("Unsupported", message, path=path)
    return _open_gguf(path, is_complete=is_complete)


def _open_gguf(path: Path, *, is_complete: bool) -> Weights:
    file = open_gguf(path)
    with on_error(file.close):
        config = _gguf_config(file)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        slots = {name: _gguf_slot(weight, file) for name, weight in found_in(shapes, config).items()}
        ignored = {_ROPE_FACTORS} | _mtp_tensors(file, config)
        if is_complete:
            _check_tensors(slots, file, ignored=ignored, family=config.family)
    return Weights(config=config, path=path, source=file, slots=slots, left_out=_count_left_out(ignored))


def _gguf_slot(weight: Weight, file: GGUFFile) -> Slot:
    """Return the slot of a weight in the file."""
    layout = weight.in_gguf
    tensor = file.tensors.get(weight.gguf)
    shape = layout.shape or weight.shape
    # Some writers add leading axes of length 1 or drop them (the gate of a shared expert).
    if tensor is not None and tensor.shape != shape and _drop_ones(tensor.shape) == _drop_ones(shape):
        layout = replace(layout, shape=tensor.shape)
    return Slot(weight.gguf, weight.shape, weight.interleaved_heads, is_matrix=weight.is_matrix, layout=layout)


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((axis for axis, length in enumerate(shape) if length != 1), len(shape))
    return shape[first:]


def _mtp_tensors(file: GGUFFile, config: ModelConfig) -> set[str]:
    """Return the names of multi-token prediction tensors, in blocks after the last layer."""
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


def _open_huggingface(path: Path, *, is_complete: bool) -> Weights:
    values = _read_config(path)
    if "auto_map" in values:
        logger.warning("%s: config.json names custom code (auto_map), which llorch does not run", path)
    config = config_from_huggingface(values, path=path / "config.json")
    folder = _quantised_folder(path, values) if is_quantised(values, path) else SafetensorsFolder(path)
    unused: set[str] = set()
    if isinstance(folder, QuantisedFolder):
        unused = folder.source.unused
        for note in folder.source.notes:
            note_once(folder.source.settings.path, note)
    with on_error(folder.close):
        name_by_path = _names_by_path(folder)
        shapes = {module_path: folder.tensors[name].shape for module_path, name in name_by_path.items()}
        slots = {name: _folder_slot(weight, name_by_path) for name, weight in found_in(shapes, config).items()}
        ignored = _outside_text(folder, config, has_images="text_config" in values or values["model_type"] in BY_WHOLE)
        folder.require_listed(ignored | unused)
        head = name_by_path.get("lm_head.weight")
        if config.tie_word_embeddings and head is not None:
            embedding = slots["embed_tokens"]
            field = "must_equal" if embedding.source_name in folder.tensors else "source_name"
            slots["embed_tokens"] = replace(embedding, **{field: head})
            ignored.add(head)  # tied: no weight of its own, also where the embedding is read from it
        _refuse_mlx(config, slots, folder)
        if is_complete:
            _check_tensors(slots, folder, ignored=ignored, family=config.family)
    return Weights(config=config, path=path, source=folder, slots=slots, left_out=_count_left_out(ignored))


def _quantised_folder(path: Path, values: Mapping[str, object]) -> QuantisedFolder:
    """Open a quantised folder; after an error, first check for zeros at the end of a file, which may be its cause."""
    try:
        return QuantisedFolder(path, values)
    except FormatError:
        require_folder_written(path)
        raise


def _read_config(folder: Path) -> dict[str, object]:
    return read_json(file_inside(folder, "config.json"), limit=_MAX_CONFIG)


def unread_settings(path: Path) -> dict[str, object]:
    """Return the configuration values that llorch does not read: of config.json, or of a GGUF file's architecture."""
    if path.is_dir():
        values = ReadTrackingDict(_read_config(path))
        config_from_huggingface(values, path=path / "config.json")
        unread = values.unread().items()
        return {key: value for key, value in unread if key.removeprefix("text_config.") not in _READ_ELSEWHERE}
    with open_gguf(path) as file:
        metadata: Any = ReadTrackingDict(file.metadata)
        file.metadata = metadata
        _gguf_config(file)
        prefix = f"{metadata['general.architecture']}."
        return {key: value for key, value in metadata.unread().items() if key.startswith(prefix)}


def image_token_ids(weights: Weights) -> dict[int, str]:
    """Map the placeholder token ids of images and videos to their keys in config.json; empty for GGUF files."""
    if not isinstance(weights.source, SafetensorsFolder):
        return {}
    values = _read_config(weights.source.path)
    image_ids = ((values.get(key), key) for key in _IMAGE_KEYS)
    return {token_id: key for token_id, key in image_ids if isinstance(token_id, int)}


def _names_by_path(folder: SafetensorsFolder) -> dict[str, str]:
    """Map paths in the text model to tensor names; paths of a model saved without head get the prefix `model.`."""
    names = {to_text_only(name): name for name in folder.tensors}
    if not any(path.startswith("model.") for path in names):
        names = {f"model.{path}" if path.startswith(_BASE_PREFIXES) else path: name for path, name in names.items()}
    return names


def _folder_slot(weight: Weight, name_by_path: Mapping[str, str]) -> Slot:
    """Return the slot of a weight in the folder, with the prefix of the folder's names."""
    name, first_name = weight.huggingface, name_by_path.get(weight.huggingface.format(e=0))
    if first_name is not None:
        prefix = first_name.removesuffix(name.format(e=0).removeprefix("model."))
        name = prefix + name.removeprefix("model.")
    return Slot(name, weight.shape, is_matrix=weight.is_matrix, layout=weight.in_huggingface)


def _outside_text(folder: SafetensorsFolder, config: ModelConfig, *, has_images: bool) -> set[str]:
    """Return the tensors outside the text model; log how many have parameters (not RoPE frequencies)."""
    ignored = {name for name in folder.tensors if name.endswith(".rotary_emb.inv_freq")}
    prefixes = (*(_IMAGE if has_images else ()), *(_MTP if FAMILIES[config.family].layout.has_mtp_layers else ()))
    outside = {name for name in folder.tensors if name.startswith(prefixes)}
    if outside:
        logger.info("%s: ignored %d tensors outside the text part", folder.path, len(outside))
    return ignored | outside


def _count_left_out(ignored: Iterable[str]) -> dict[str, dict[str, int]]:
    """Count the ignored tensors with parameters, by part of the model and name prefix."""
    left_out: dict[str, Counter[str]] = {}
    for name in sorted(ignored):
        for part, pattern in _LEFT_OUT_PARTS.items():
            if match := pattern.match(name):
                left_out.setdefault(part, Counter())[match[0]] += 1
    return {part: dict(counts) for part, counts in left_out.items()}


def _refuse_mlx(config: ModelConfig, slots: Mapping[str, Slot], folder: SafetensorsFolder) -> None:
    """Raise Unsupported for a folder of MLX, known by transposed convolutions: its norm weights have no offset."""
    for name, slot in slots.items():
        tensor = folder.tensors.get(slot.source_name)
        if name.endswith(".conv") and tensor is not None and tensor.shape == (*slot.shape, 1) and slot.shape[1] != 1:
            message = f"{slot.source_name} has shape {tensor.shape}, as in folders of MLX, which changes norm weights"
            remedy = "use the folder before its conversion to MLX"
            raise FormatError("Unsupported", f"{message}, too; {remedy}", path=folder.path)


def _check_tensors(
    slots: Mapping[str, Slot], source: GGUFFile | SafetensorsFolder, *, ignored: set[str], family: str
) -> None:
    """Raise one FormatError for all missing and unexpected tensors, and wrong shapes and dtypes."""
    expected = {name: shape for slot in slots.values() for name, shape in slot.tensors.items()}
    actual = source.tensors
    common = sorted(expected.keys() & actual.keys())
    faults: dict[ErrorCode, list[str]] = {
        "Missing": sorted(expected.keys() - actual.keys()),
        "Unexpected": sorted(actual.keys() - expected.keys() - ignored),
        "Shape": [
            f"{name} expected {expected[name]} got {actual[name].shape}"
            for name in common
            if expected[name] != actual[name].shape
        ],
        "DType": [f"{name} holds integers" for name in common if not actual[name].holds_floats],
    }
    present_faults: list[tuple[ErrorCode, list[str]]] = [(code, names) for code, names in faults.items() if names]
    if present_faults:
        lists = "; ".join(f"{len(names)} {code}: {_format_names(names)}" for code, names in present_faults)
        message = f"weights: expected the {len(expected)} tensors of this {family} configuration, got {lists}"
        hint = _quantisation_hint(source, faults["Unexpected"]) + _tie_hint(faults["Missing"])
        raise FormatError(present_faults[0][0], message + hint, path=source.path)


def _quantisation_hint(source: GGUFFile | SafetensorsFolder, unexpected: list[str]) -> str:
    """Return a hint that quantisation settings are missing, if unexpected tensors look quantised; else empty."""
    suffixes = {name.rpartition(".")[2] for name in unexpected}
    patterns = [f"*.{suffix}" for suffix in _QUANTISED_SUFFIXES if suffix in suffixes]
    if not patterns or isinstance(source, GGUFFile | QuantisedFolder):
        return ""
    missing = f"no quantization_config, which quantised tensors ({', '.join(patterns)}) need"
    return f"; config.json has {missing}: restore the config.json that the quantiser wrote"


def _tie_hint(missing: list[str]) -> str:
    if not any(name.endswith("lm_head.weight") for name in missing):
        return ""
    return "; if the output matrix is the embedding, set tie_word_embeddings to true in config.json"


def _format_names(names: list[str]) -> str:
    ending = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + ending
