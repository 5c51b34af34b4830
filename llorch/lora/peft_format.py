"""Read and write PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<path>.lora_A.weight (r, in)        base_model.model.<path>.lora_B.weight (out, r)
    embedding: .lora_embedding_A (r, vocab)              .lora_embedding_B (hidden, r)
    DoRA: .lora_magnitude_vector (out,)                  ignored: PEFT's .base_layer.weight of embedding and output
    parameters (experts, routers) and multimodal models: see `llorch.lora.targets`

Equal adapters are written as equal bytes. The identity of the base goes into a separate file, because PEFT warns of
unknown fields in its configuration.

Source: peft/utils/save_and_load.py of PEFT 0.21; safetensors README (layout).
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files.folder import PICKLE_SUFFIXES, file_inside
from llorch.files.new_file import new_file
from llorch.files.safetensors import SafetensorsFile, tensor_bytes
from llorch.files.strict_json import read_json
from llorch.files.tensor_names import form_of, to_text_only
from llorch.files.zeros import require_adapter_written
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter, assembled, require_targets, shorten
from llorch.lora.base import BaseIdentity
from llorch.lora.config import LoraConfig, text_only_config
from llorch.lora.peft_config import CONFIG_FILE, REMEDY, add_tied, config_json, from_version_4, read_config
from llorch.lora.targets import LoraTarget, alone
from llorch.runtime.errors import FormatError

logger = logging.getLogger(__name__)

TENSOR_FILE, BASE_FILE = "adapter_model.safetensors", "llorch_base.json"
_PREFIX = "base_model.model."
_COPY = "base_layer.weight"  # suffix of a base matrix that PEFT stores with its adapter
OF_WHOLE = "its module names are those of the multimodal model: for PEFT load AutoModelForImageTextToText"
_VISION = re.compile(r"(model\.visual|vision_model|multi_modal_projector)\.")  # modules outside the text model
_DEFAULT = re.compile(  # adapter name in a tensor name, after the kind of tensor
    r"(\.lora_(?:embedding_)?[AB])\.default(?=\.weight$|$)|(\.lora_magnitude_vector)\.default\.weight$"
)
_LINEAR = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_EMBEDDING = {LORA_A: "lora_embedding_A", LORA_B: "lora_embedding_B", MAGNITUDE: "lora_magnitude_vector"}
_UNSUPPORTED = {  # tensors that an accepted configuration does not mention -> their meaning
    r"\.lora_[AB]\.bias$": "a bias of the adapter (lora_bias)",
    r"trainable_tokens": "trained rows of the embedding (trainable_token_indices)",
    r"modules_to_save": "a module that was trained in full (modules_to_save)",
    r"(embed_tokens|lm_head)\.weight$": "a whole matrix, trained or resized (save_embedding_layers)",
    r"\.experts\.\d+\.": "an adapter of one expert, the form of transformers 4 (load and save it with PEFT 0.21)",
    r"\.conv1d\.": "an adapter of a convolution, which transformers ignores",
}
_LIMIT = 1 << 20  # bytes of a JSON file


def read_peft(folder: str | Path, model: ModelConfig) -> Adapter:
    """Read an adapter directory that PEFT or llorch wrote, as float32.

    FormatError names the tensors or the field: Unsupported if they change the computation; Unsafe for a pickle.
    """
    folder = Path(folder)
    config = read_config(folder)[0]
    with SafetensorsFile(tensor_file(folder)) as file:
        require_adapter_written(file)
        config, targets = _read_targets(config, file, folder, model)
        names = {file_name: name for name, file_name in _stored_names(config, targets).items()}
        file_names = _names_without_copies(file, folder)
        extra = sorted(name for name in file_names if name not in names)
        _refuse_unsupported(extra, folder)
        arrays = {names.get(name, name): file.array(file_name) for name, file_name in file_names.items()}
        return assembled(config, arrays, model, where=folder)


def write_peft(adapter: Adapter, folder: str | Path, *, base: BaseIdentity) -> None:
    """Write an adapter in PEFT's format, into a folder that may exist.

    Each file is complete or absent. The configuration is written last: without it the folder is no adapter.
    """
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    stored_names = _stored_names(adapter.config, adapter.targets)
    arrays = {stored_names[name]: array for name, array in adapter.flat().items()}
    config = config_json(adapter.config, adapter.targets, base=base.name)
    if (folder / CONFIG_FILE).exists() and (folder / CONFIG_FILE).read_text(encoding="utf-8") != config:
        (folder / CONFIG_FILE).unlink()  # an old configuration must never describe new tensors
    with new_file(folder / TENSOR_FILE) as path:
        with path.open("wb") as file:
            file.writelines(tensor_bytes(arrays, metadata={"format": "pt"}))  # PEFT requires this metadata
    with new_file(folder / BASE_FILE) as path:
        path.write_text(base.to_json(), encoding="utf-8")
    with new_file(folder / CONFIG_FILE) as path:
        path.write_text(config, encoding="utf-8")


def read_peft_base(folder: str | Path) -> BaseIdentity | str | None:
    """Read the base of an adapter folder: llorch's record, else the name that PEFT wrote, else None."""
    record = Path(folder) / BASE_FILE
    if record.exists():
        return BaseIdentity.from_fields(read_json(record, limit=_LIMIT), record)
    return read_config(Path(folder))[1]


def read_peft_copies(folder: str | Path, model: ModelConfig) -> Mapping[str, np.ndarray]:
    """Read the copies of base matrices, `embed_tokens` or `lm_head`, in an adapter folder; errors as `read_peft`."""
    folder = Path(folder)
    with SafetensorsFile(tensor_file(folder)) as file:
        names = [name for name in file.tensors if name.endswith(_COPY)]
        if names:
            _read_targets(read_config(folder)[0], file, folder, model)
        return {name.split(".")[-3]: np.array(file.array(name)) for name in names}


def has_multimodal_names(folder: str | Path) -> bool:
    """Tell if the tensors of an adapter folder have names of a multimodal model."""
    with SafetensorsFile(tensor_file(Path(folder))) as file:
        return any(map(_form, file.tensors))


def tensor_file(folder: Path) -> Path:
    """Find the tensor file of an adapter; FormatError Unsafe for a pickle, or a link out of the folder."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles and not (folder / TENSOR_FILE).exists():
        message = f"{pickles[0]} is a pickle, which can run code; save the adapter with PEFT as safetensors"
        raise FormatError("Unsafe", message, path=folder)
    return file_inside(folder, TENSOR_FILE)


def _form(name: str) -> tuple[str, str] | None:
    """Return the multimodal prefixes in the name of a tensor; None if it has none."""
    form = form_of(name.removeprefix(_PREFIX))
    return form if name.startswith(_PREFIX) and any(form) else None


def _name_in_text_model(name: str) -> str:
    """Return the name of a tensor in the text model."""
    return _PREFIX + to_text_only(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else name


def _names_without_copies(file: SafetensorsFile, folder: Path) -> dict[str, str]:
    """Map PEFT's tensor names to names in the file, without copies of base matrices.

    A state saved without `save_pretrained` has the adapter's name, `default`, in its names; PEFT reads it too.
    """
    names: dict[str, str] = {}
    for file_name in file.tensors:
        if file_name.endswith(_COPY):
            continue
        name = _DEFAULT.sub(lambda match: match[1] or match[2], _name_in_text_model(file_name))
        if name in names:
            raise FormatError("Duplicate", f"{file_name} and {names[name]} are the same tensor", path=folder)
        names[name] = file_name
    return names


def _text_config(config: LoraConfig, model: ModelConfig, file: SafetensorsFile, folder: Path) -> LoraConfig:
    """Translate to names of the text model; FormatError Unsupported if the vision model was trained."""
    vision_names = sorted(name for name in file.tensors if _VISION.match(name.removeprefix(_PREFIX)))
    if vision_names:
        message = f"adapter: expected tensors of the text model only, got {len(vision_names)} of the vision part, "
        message += f"{shorten(vision_names)}; {REMEDY}: llorch reads the text part of the merged folder"
        raise FormatError("Unsupported", message, path=folder)
    form = next(filter(None, map(_form, file.tensors)), None)
    if form is None:
        return config
    try:
        return text_only_config(config, model, form)
    except ValueError as error:
        raise FormatError("Missing", str(error), path=folder) from None


def _stored_names(config: LoraConfig, targets: Mapping[str, LoraTarget]) -> dict[str, str]:
    """Map llorch's names to names in the file."""
    names = {}
    for target in targets.values():
        kinds = _EMBEDDING if target.is_embedding else _LINEAR
        for kind in (LORA_A, LORA_B, *([MAGNITUDE] if config.use_dora else [])):
            names[f"{target.name}.{kind}"] = f"{_PREFIX}{_module_of(target, targets)}.{kinds[kind]}"
    return names


def _module_of(target: LoraTarget, targets: Mapping[str, LoraTarget]) -> str:
    """Return the path of a target in tensor names; of two parameters of one module, PEFT nests the first."""
    if not target.is_parameter:
        return target.stored_path
    owner, _, name = target.stored_path.rpartition(".")
    is_nested = name == "gate_up_proj" and any(t.stored_path == f"{owner}.down_proj" for t in targets.values())
    return f"{owner}.base_layer" if is_nested else owner


def _read_targets(
    config: LoraConfig, file: SafetensorsFile, folder: Path, model: ModelConfig
) -> tuple[LoraConfig, dict[str, LoraTarget]]:
    """Return configuration and targets of an adapter by names of the text model; check copies of base matrices."""
    config = add_tied(_text_config(from_version_4(config, model, folder), model, file, folder), model, folder)
    targets = alone(require_targets(config, model, str(folder)))
    _check_copies(file, targets)
    return config, targets


def _check_copies(file: SafetensorsFile, targets: Mapping[str, LoraTarget]) -> None:
    """Check that a base matrix stored with an adapter is the embedding or output and has its shape."""
    for name, info in file.tensors.items():
        if not name.endswith(_COPY):
            continue
        target = next((t for t in targets.values() if f"{_PREFIX}{t.path}.{_COPY}" == _name_in_text_model(name)), None)
        if target is None or target.name not in ("embed_tokens", "lm_head"):
            message = f"expected adapter tensors only, got the base matrix {name}"
            raise FormatError("Unexpected", message, path=file.path)
        shape = (target.n_in, target.n_out) if target.is_embedding else (target.n_out, target.n_in)
        if info.shape != shape:
            message = f"{name} expected {shape}, got {info.shape}: the vocabulary was resized"
            raise FormatError("Shape", message, path=file.path)


def _refuse_unsupported(names: list[str], folder: Path) -> None:
    for pattern, meaning in _UNSUPPORTED.items():
        matching = [name for name in names if re.search(pattern, name)]
        if matching:
            message = f"{shorten(matching)}: {meaning}; merge the adapter with PEFT first"
            raise FormatError("Unsupported", message, path=folder)
