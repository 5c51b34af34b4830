"""The adapter directory of PEFT in and out: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<path>.lora_A.weight (r, in)        base_model.model.<path>.lora_B.weight (out, r)
    of an embedding: .lora_embedding_A (r, vocab)        .lora_embedding_B (hidden, r)
    of DoRA: .lora_magnitude_vector (out,)               of PEFT, ignored: .base_layer.weight of embedding and output
    of parameters (experts, routers), and of models that see, too: see `llorch.lora.targets`

What we write is the same bytes for the same adapter. The identity of the base goes into a file of its own, which PEFT
does not look at: it warns of unknown fields in its configuration.

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
from llorch.files.tensor_names import form_of, path_alone
from llorch.files.zeros import require_adapter_written
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter, assembled, some, targets_in
from llorch.lora.base import BaseIdentity
from llorch.lora.config import LoraConfig, from_whole
from llorch.lora.peft_config import CONFIG_FILE, REMEDY, config_json, in_version_5, read_config, with_tied
from llorch.lora.targets import LoraTarget, alone
from llorch.runtime.errors import FormatError

logger = logging.getLogger(__name__)

TENSOR_FILE, BASE_FILE = "adapter_model.safetensors", "llorch_base.json"
_PREFIX = "base_model.model."
_COPY = "base_layer.weight"
OF_WHOLE = "its module names are those of the multimodal model: for PEFT load AutoModelForImageTextToText"
_EYES = re.compile(r"(model\.visual|vision_model|multi_modal_projector)\.")  # paths of what is no part of the text
_DEFAULT = re.compile(
    r"(\.lora_(?:embedding_)?[AB])\.default(?=\.weight$|$)|(\.lora_magnitude_vector)\.default\.weight$"
)
_LINEAR = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_EMBEDDING = {LORA_A: "lora_embedding_A", LORA_B: "lora_embedding_B", MAGNITUDE: "lora_magnitude_vector"}
# Tensors that a configuration we accept does not announce, and what they are.
_FOREIGN = {
    r"\.lora_[AB]\.bias$": "a bias of the adapter (lora_bias)",
    r"trainable_tokens": "trained rows of the embedding (trainable_token_indices)",
    r"modules_to_save": "a module that was trained in full (modules_to_save)",
    r"(embed_tokens|lm_head)\.weight$": "a whole matrix, trained or resized (save_embedding_layers)",
    r"\.experts\.\d+\.": "an adapter of one expert, the form of transformers 4 (load and save it with PEFT 0.21)",
    r"\.conv1d\.": "an adapter of a convolution, which transformers ignores",
}
_LIMIT = 1 << 20  # bytes of a JSON file


def read_peft(folder: str | Path, model: ModelConfig) -> Adapter:
    """Read what PEFT or llorch wrote, as float32.

    FormatError: Missing, Unexpected, Shape, DType, NonFinite or OutOfRange with all tensors or the field concerned;
    Unsupported for a field or tensor that changes the maths; Unsafe for a pickle.
    """
    folder = Path(folder)
    config = read_config(folder)[0]
    with SafetensorsFile(tensor_file(folder)) as file:
        require_adapter_written(file)
        config, targets = _read_targets(config, file, folder, model)
        ours = {stored: name for name, stored in _stored_names(config, targets).items()}
        plain = _plain_names(file, folder)
        extra = sorted(name for name in plain if name not in ours)
        _refuse_foreign(extra, folder)
        arrays = {ours.get(name, name): file.array(stored) for name, stored in plain.items()}
        return assembled(config, arrays, model, where=folder)


def write_peft(adapter: Adapter, folder: str | Path, *, base: BaseIdentity) -> None:
    """Write an adapter as PEFT does, into a folder that may exist.

    Each file is complete or absent, the configuration last: without it nobody takes the folder for an adapter.
    """
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    stored = _stored_names(adapter.config, adapter.targets)
    arrays = {stored[name]: array for name, array in adapter.flat().items()}
    config = config_json(adapter.config, adapter.targets, base=base.name)
    if (folder / CONFIG_FILE).exists() and (folder / CONFIG_FILE).read_text(encoding="utf-8") != config:
        (folder / CONFIG_FILE).unlink()  # the old one must never stand beside the new tensors
    with new_file(folder / TENSOR_FILE) as path:
        with path.open("wb") as file:
            file.writelines(tensor_bytes(arrays, metadata={"format": "pt"}))  # PEFT wants to be told
    with new_file(folder / BASE_FILE) as path:
        path.write_text(base.to_json(), encoding="utf-8")
    with new_file(folder / CONFIG_FILE) as path:
        path.write_text(config, encoding="utf-8")


def base_of_peft(folder: str | Path) -> BaseIdentity | str | None:
    """Read the base that an adapter folder records: llorch's record, else the name that PEFT wrote, else None."""
    record = Path(folder) / BASE_FILE
    if record.exists():
        return BaseIdentity.from_fields(read_json(record, limit=_LIMIT), record)
    return read_config(Path(folder))[1]


def copies_in_peft(folder: str | Path, model: ModelConfig) -> Mapping[str, np.ndarray]:
    """Read the base's matrices, `embed_tokens` or `lm_head`, that lie next to their adapters, as `read_peft`."""
    folder = Path(folder)
    with SafetensorsFile(tensor_file(folder)) as file:
        names = [name for name in file.tensors if name.endswith(_COPY)]
        if names:
            _read_targets(read_config(folder)[0], file, folder, model)
        return {name.split(".")[-3]: np.array(file.array(name)) for name in names}


def is_of_whole(folder: str | Path) -> bool:
    """Tell if the tensors of an adapter folder are named as in a multimodal model."""
    with SafetensorsFile(tensor_file(Path(folder))) as file:
        return any(map(_form, file.tensors))


def tensor_file(folder: Path) -> Path:
    """Find the tensors of an adapter; Unsafe for a pickle, or a link that leads out of the folder."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles and not (folder / TENSOR_FILE).exists():
        message = f"{pickles[0]} is a pickle, which can run code; save the adapter with PEFT as safetensors"
        raise FormatError("Unsafe", message, path=folder)
    return file_inside(folder, TENSOR_FILE)


def _form(name: str) -> tuple[str, str] | None:
    """Return how a multimodal model writes the path of a tensor; None if the name has another form."""
    form = form_of(name.removeprefix(_PREFIX))
    return form if name.startswith(_PREFIX) and any(form) else None


def _name_in_text_model(name: str) -> str:
    """Return the name of a tensor for a model of the text part alone."""
    return _PREFIX + path_alone(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else name


def _plain_names(file: SafetensorsFile, folder: Path) -> dict[str, str]:
    """Map names as PEFT stores them to names in the file, without copies of base matrices.

    A state saved without `save_pretrained` has the name of the adapter inside, `default`, which PEFT reads, too.
    """
    names: dict[str, str] = {}
    for stored in file.tensors:
        if stored.endswith(_COPY):
            continue
        name = _DEFAULT.sub(lambda match: match[1] or match[2], _name_in_text_model(stored))
        if name in names:
            raise FormatError("Duplicate", f"{stored} and {names[name]} are the same tensor", path=folder)
        names[name] = stored
    return names


def _of_text(config: LoraConfig, model: ModelConfig, file: SafetensorsFile, folder: Path) -> LoraConfig:
    """Translate to names of the text part alone; FormatError Unsupported if the vision part was trained."""
    eyes = sorted(name for name in file.tensors if _EYES.match(name.removeprefix(_PREFIX)))
    if eyes:
        message = f"adapter: expected tensors of the text model only, got {len(eyes)} of the vision part, "
        message += f"{some(eyes)}; {REMEDY}: llorch reads the text part of the merged folder"
        raise FormatError("Unsupported", message, path=folder)
    form = next(filter(None, map(_form, file.tensors)), None)
    if form is None:
        return config
    try:
        return from_whole(config, model, form)
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
    """Return the module that PEFT puts an adapter on; of two parameters of one, the first is inside."""
    if not target.is_parameter:
        return target.stored_path
    owner, _, name = target.stored_path.rpartition(".")
    inside = name == "gate_up_proj" and any(other.stored_path == f"{owner}.down_proj" for other in targets.values())
    return f"{owner}.base_layer" if inside else owner


def _read_targets(
    config: LoraConfig, file: SafetensorsFile, folder: Path, model: ModelConfig
) -> tuple[LoraConfig, dict[str, LoraTarget]]:
    """Return the configuration and the matrices of an adapter in llorch's names; check the copies of base matrices."""
    config = with_tied(_of_text(in_version_5(config, model, folder), model, file, folder), model, folder)
    targets = alone(targets_in(config, model, str(folder)))
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


def _refuse_foreign(names: list[str], folder: Path) -> None:
    for pattern, what in _FOREIGN.items():
        found = [name for name in names if re.search(pattern, name)]
        if found:
            message = f"{some(found)}: {what}; merge the adapter with PEFT first"
            raise FormatError("Unsupported", message, path=folder)
