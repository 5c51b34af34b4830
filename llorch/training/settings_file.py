"""Merge training settings from a YAML or TOML file, from options and from a resumed run, in order of precedence."""

import difflib
import re
import tomllib
from collections.abc import Hashable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError, MissingExtra, UserError
from llorch.training.settings import TrainSettings

SHORT = {"layers": "layers_to_transform"}  # short name -> name of the field; options use it, too
_MAX_FILE = 1 << 20  # bytes
_MERGE = "llorch trains a new adapter; merge the old adapter first (llorch lora merge) and train on the merged model"
_ADVICE = {  # advice -> settings of other trainers: TRL, Axolotl, LLaMA-Factory, mlx-lm
    "llorch trains adapters only; a large --r with all-linear is closest to full fine-tuning": "full",
    "llorch trains LoRA adapters only; --dora is a variant": "finetuning_type fine_tune_type",
    "log.jsonl is always written, and --tensorboard writes events": "report_to wandb",
    f"{_MERGE}; --resume continues a stopped run": "adapter adapter_name_or_path resume_adapter_file",
    "use --resume": "resume_from_checkpoint",
    "use --lr": "learning_rate",
    "use --epochs": "num_train_epochs num_epochs",
    "use --steps": "max_steps iters",
    "use --batch-size": "per_device_train_batch_size micro_batch_size",
    "use --accumulation": "gradient_accumulation_steps grad_accumulation_steps",
    "use --r": "lora_r lora_rank rank",
    "use --alpha": "lora_alpha",
    "use --dropout": "lora_dropout",
    "use --target-modules": "lora_target lora_target_modules",
    "use --dora": "use_dora",
    "use --rslora": "use_rslora",
    "use --schedule": "lr_scheduler lr_scheduler_type",
    "use --max-length": "max_seq_length sequence_len cutoff_len",
    "use --packing": "sample_packing",
    "llorch trains no prompt tokens unless --train-on all is given": "mask_prompt",
    "llorch trains only the assistant's turns unless --train-on all is given": "assistant_only_loss",
    "llorch trains only completions unless --train-on all is given": "completion_only_loss",
    "give a quantised model and --weights packed": "load_in_4bit load_in_8bit qlora quantization_bit",
    "llorch trains no whole matrices; --target-modules adapts lm_head and embed_tokens": "modules_to_save",
    "use --dtype bfloat16": "bf16",
    "use --dtype bfloat16; llorch does not train in float16": "fp16",
    "llorch trains with AdamW; --eight-bit keeps its moments in 8 bits": "optim optimizer",
    "use --data": "dataset dataset_name train_file",
    "give the model as the argument MODEL, or as model in a config file": "model_name_or_path base_model",
    "use --save-every": "save_steps",
    "use --keep": "save_total_limit",
    "use --eval-every": "eval_steps",
    "use --valid": "val_set_size",
    "use --mesh, which splits a run with torch's FSDP2": "deepspeed fsdp",
}
FOREIGN = {name: advice for advice, names in _ADVICE.items() for name in names.split()}
_NAMES = tuple(field.name for field in fields(TrainSettings))


def settings_from(*sources: tuple[str, Mapping[str, Any]]) -> TrainSettings:
    """Merge and validate settings by name (`-` counts as `_`); a source has a label for messages; later sources win.

    UserError: an unknown name, a value of a wrong type or out of range, or no model or data.
    """
    merged: dict[str, Any] = {}
    for label, values in sources:
        merged |= {_field(name, label): _parse(_field(name, label), value, label) for name, value in values.items()}
    if missing := [name for name in ("model", "data") if name not in merged]:
        message = f"settings: {' and '.join(missing)}: expected a value, got none"
        raise UserError(f"{message}; give it on the command line or in a config file")
    return TrainSettings(**merged)


def read_settings(path: Path) -> Mapping[str, Any]:
    """Read a .yaml, .yml or .toml file; FormatError if it is no mapping of names to values."""
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise FormatError("Unsupported", f"config: expected .yaml, .yml or .toml, got {path.suffix!r}", path=path)
    try:
        text = read_regular(path, limit=_MAX_FILE).decode()
        values = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError("Malformed", f"config: {error}", path=path) from None
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError("Malformed", f"config: {' '.join(str(error).split())}", path=path) from None
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise FormatError("Malformed", "config: expected names with values, one per line (lr: 0.001)", path=path)
    return values


def _yaml(text: str) -> Any:
    """Parse YAML; UserError, which the caller converts, if it is malformed or a mapping has a name twice."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingExtra("train", "yaml") from None

    class Strict(yaml.SafeLoader):
        """Loader that refuses duplicate names, which PyYAML accepts."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            names = [self.construct_object(key) for key, _ in node.value]
            if duplicates := [name for index, name in enumerate(names) if name in names[:index]]:
                raise UserError(f"expected each name once, got {duplicates[0]!r} twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Strict) or {}
    except yaml.YAMLError as error:
        raise UserError(str(error)) from None


def _field(name: str, label: str) -> str:
    """Return the field's name for a setting's name; UserError, with advice, for names of other trainers and others."""
    canonical = name.replace("-", "_")
    canonical = SHORT.get(canonical, canonical)
    if canonical in _NAMES:
        return canonical
    if canonical in FOREIGN:
        raise UserError(f"{label}: unknown setting {name!r}; {FOREIGN[canonical]}")
    close_names = difflib.get_close_matches(canonical, _NAMES, n=1)
    hint = f"did you mean {close_names[0]}?" if close_names else f"the known settings are {', '.join(_NAMES)}"
    raise UserError(f"{label}: unknown setting {name!r}; {hint}")


def _parse(name: str, value: object, label: str) -> Any:
    """Convert a value to the type of its field: YAML reads 1e-4 as text, and an integer may be a valid float."""
    if name in ("target_modules", "exclude_modules"):
        return _parse_modules(name, value, label)
    if name == "target_parameters":
        names = _parse_modules(name, value, label) or ()
        if isinstance(names, str):
            raise UserError(f"{label}: target_parameters must be a list of names, got {value!r}")
        return names
    if name == "layers_to_transform":
        return _parse_layers(value, label)
    if name == "chat_template_kwargs":
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise UserError(f"{label}: {name} must be names with values (enable_thinking: false), got {value!r}")
        return dict(value)
    if name in ("rank_pattern", "alpha_pattern"):
        return _parse_pattern(name, value, label)
    field_type = get_type_hints(TrainSettings)[name]
    kinds = get_args(field_type) or (field_type,)
    if value is None and NoneType in kinds:
        return None
    return _require_kind(kinds[0], name, value, label)


def _require_kind(kind: type, name: str, value: object, label: str) -> Any:
    """Return a value in the type of its setting; UserError if it has another type (bool is no number)."""
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UserError(f"{label}: {name} must be {words[kind]}, got {value!r}")


def _parse_modules(name: str, value: object, label: str) -> tuple[str, ...] | str:
    """Parse a list of names, or names with commas in a text; any other text is a regular expression or `all-linear`."""
    if isinstance(value, str):
        names = [part.strip() for part in value.split(",")]
        is_name_list = all(part.replace(".", "_").isidentifier() for part in names)
        return tuple(names) if is_name_list else value
    if isinstance(value, list | tuple) and all(isinstance(part, str) and part for part in value):
        return tuple(value)
    raise UserError(f"{label}: {name} must be a list of module names or text, got {value!r}")


def _parse_layers(value: object, label: str) -> tuple[int, ...] | None:
    """Parse a list of layer numbers or text with commas and ranges: `0,4-7`."""
    layers = value
    if isinstance(value, str) and re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", value.replace(" ", "")):
        ends = [[int(number) for number in part.split("-")] for part in value.split(",")]
        layers = [layer for first, *last in ends for layer in range(first, (last or [first])[0] + 1)]
    if layers is None:
        return None
    if isinstance(layers, list | tuple) and layers and all(type(layer) is int and layer >= 0 for layer in layers):
        return tuple(sorted(set(layers)))
    raise UserError(f"{label}: layers_to_transform must be a list of layers or text such as 0,4-7, got {value!r}")


def _parse_pattern(name: str, value: object, label: str) -> Mapping[str, Any]:
    """Parse a mapping of module path suffixes to numbers; the first matching suffix counts."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise UserError(f"{label}: {name} must be names with numbers (q_proj: 8), got {value!r}")
    kind = int if name == "rank_pattern" else float
    return {key: _require_kind(kind, f"{name} {key}", number, label) for key, number in value.items()}
