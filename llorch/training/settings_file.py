"""Training settings from a YAML or TOML file, from flags and from a run that is resumed, in one order of precedence."""

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

SHORT = {"layers": "layers_to_transform"}  # names that are also understood, and flags have
_MAX_FILE = 1 << 20  # bytes
_MERGE = "llorch trains a new adapter; merge the old adapter first (llorch lora merge) and train on the merged model"
FOREIGN = {  # settings of other trainers, and what to use instead; of TRL, Axolotl, LLaMA-Factory, mlx-lm
    "full": "llorch trains adapters only; a large --r with all-linear is closest to full fine-tuning",
    "finetuning_type": "llorch trains LoRA adapters only; --dora is a variant",
    "fine_tune_type": "llorch trains LoRA adapters only; --dora is a variant",
    "report_to": "log.jsonl is always written, and --tensorboard writes events",
    "wandb": "log.jsonl is always written, and --tensorboard writes events",
    "adapter": f"{_MERGE}; --resume continues a stopped run",
    "adapter_name_or_path": f"{_MERGE}; --resume continues a stopped run",
    "resume_adapter_file": f"{_MERGE}; --resume continues a stopped run",
    "resume_from_checkpoint": "use --resume",
    "learning_rate": "use --lr",
    "num_train_epochs": "use --epochs",
    "num_epochs": "use --epochs",
    "max_steps": "use --steps",
    "iters": "use --steps",
    "per_device_train_batch_size": "use --batch-size",
    "micro_batch_size": "use --batch-size",
    "gradient_accumulation_steps": "use --accumulation",
    "grad_accumulation_steps": "use --accumulation",
    "lora_r": "use --r",
    "lora_rank": "use --r",
    "rank": "use --r",
    "lora_alpha": "use --alpha",
    "lora_dropout": "use --dropout",
    "lora_target": "use --target-modules",
    "lora_target_modules": "use --target-modules",
    "use_dora": "use --dora",
    "use_rslora": "use --rslora",
    "lr_scheduler": "use --schedule",
    "lr_scheduler_type": "use --schedule",
    "max_seq_length": "use --max-length",
    "sequence_len": "use --max-length",
    "cutoff_len": "use --max-length",
    "sample_packing": "use --packing",
    "mask_prompt": "llorch trains no prompt tokens unless --train-on all is given",
    "assistant_only_loss": "llorch trains only the assistant's turns unless --train-on all is given",
    "completion_only_loss": "llorch trains only completions unless --train-on all is given",
    "load_in_4bit": "give a quantised model and --weights packed",
    "load_in_8bit": "give a quantised model and --weights packed",
    "qlora": "give a quantised model and --weights packed",
    "quantization_bit": "give a quantised model and --weights packed",
    "modules_to_save": "llorch trains no whole matrices; --target-modules adapts lm_head and embed_tokens",
    "bf16": "use --dtype bfloat16",
    "fp16": "use --dtype bfloat16; llorch does not train in float16",
    "optim": "llorch trains with AdamW; --eight-bit keeps its moments in 8 bits",
    "optimizer": "llorch trains with AdamW; --eight-bit keeps its moments in 8 bits",
    "dataset": "use --data",
    "dataset_name": "use --data",
    "train_file": "use --data",
    "model_name_or_path": "give the model as the argument MODEL, or as model in a config file",
    "base_model": "give the model as the argument MODEL, or as model in a config file",
    "save_steps": "use --save-every",
    "save_total_limit": "use --keep",
    "eval_steps": "use --eval-every",
    "val_set_size": "use --valid",
    "deepspeed": "use --mesh, which splits a run with torch's FSDP2",
    "fsdp": "use --mesh, which splits a run with torch's FSDP2",
}
_NAMES = tuple(field.name for field in fields(TrainSettings))


def settings_from(*sources: tuple[str, Mapping[str, Any]]) -> TrainSettings:
    """Merge and validate settings by name (`-` counts as `_`), each source with what to call it; a later one wins.

    ValueError: an unknown name, a value of the wrong kind or out of its range, or no model or data.
    """
    merged: dict[str, Any] = {}
    for where, values in sources:
        merged |= {_known(name, where): _typed(_known(name, where), value, where) for name, value in values.items()}
    if missing := [name for name in ("model", "data") if name not in merged]:
        raise UserError(
            f"settings: {' and '.join(missing)}: expected a value, got none; "
            "give it on the command line or in a config file"
        )
    return TrainSettings(**merged)


def read_settings(path: Path) -> Mapping[str, Any]:
    """Read a .yaml, .yml or .toml file; FormatError where it is no flat list of names."""
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
    """Parse YAML, and refuse a mapping that has a name twice."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingExtra("train", "yaml") from None

    class Strict(yaml.SafeLoader):
        """YAML that does not let the last of two equal names win."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            names = [self.construct_object(key) for key, _ in node.value]
            if twice := [name for at, name in enumerate(names) if name in names[:at]]:
                raise UserError(f"expected each name once, got {twice[0]!r} twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Strict) or {}
    except yaml.YAMLError as error:
        raise UserError(str(error)) from None


def _known(name: str, where: str) -> str:
    plain = name.replace("-", "_")
    plain = SHORT.get(plain, plain)
    if plain in _NAMES:
        return plain
    if plain in FOREIGN:
        raise UserError(f"{where}: unknown setting {name!r}; {FOREIGN[plain]}")
    near = difflib.get_close_matches(plain, _NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the known settings are {', '.join(_NAMES)}"
    raise UserError(f"{where}: unknown setting {name!r}; {hint}")


def _typed(name: str, value: Any, where: str) -> Any:
    """Convert a value to the type of its field; YAML reads 1e-4 as text, and a whole number may stand for a rate."""
    if name in ("target_modules", "exclude_modules"):
        return _parse_modules(name, value, where)
    if name == "target_parameters":
        names = _parse_modules(name, value, where) or ()
        if isinstance(names, str):
            raise UserError(f"{where}: target_parameters must be a list of names, got {value!r}")
        return names
    if name == "layers_to_transform":
        return _parse_layers(value, where)
    if name == "chat_template_kwargs":
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise UserError(f"{where}: {name} must be names with values (enable_thinking: false), got {value!r}")
        return dict(value)
    if name in ("rank_pattern", "alpha_pattern"):
        return _pattern(name, value, where)
    wanted = get_type_hints(TrainSettings)[name]
    kinds = get_args(wanted) or (wanted,)
    if value is None and NoneType in kinds:
        return None
    return _require_kind(kinds[0], name, value, where)


def _require_kind(kind: type, name: str, value: Any, where: str) -> Any:
    """Return a value as the type of its setting; ValueError if it is of another type."""
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UserError(f"{where}: {name} must be {words[kind]}, got {value!r}")


def _parse_modules(name: str, value: Any, where: str) -> tuple[str, ...] | str:
    """Parse names, a list or text with commas; text with other characters is a regular expression, or `all-linear`."""
    if isinstance(value, str):
        names = [part.strip() for part in value.split(",")]
        plain = all(part.replace(".", "_").isidentifier() for part in names)
        return tuple(names) if plain else value
    if isinstance(value, list | tuple) and all(isinstance(part, str) and part for part in value):
        return tuple(value)
    raise UserError(f"{where}: {name} must be a list of module names or text, got {value!r}")


def _parse_layers(value: Any, where: str) -> tuple[int, ...] | None:
    """Parse layer numbers, a list or text with commas and ranges: `0,4-7`."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", value.replace(" ", "")):
        ends = [[int(number) for number in part.split("-")] for part in value.split(",")]
        layers: Any = [layer for first, *last in ends for layer in range(first, (last or [first])[0] + 1)]
    else:
        layers = value
    if layers is None or (isinstance(layers, list | tuple) and layers and all(_is_count(n) for n in layers)):
        return None if layers is None else tuple(sorted(set(layers)))
    raise UserError(f"{where}: layers_to_transform must be a list of layers or text such as 0,4-7, got {value!r}")


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _pattern(name: str, value: Any, where: str) -> Mapping[str, Any]:
    """Read a mapping of ends of module paths to numbers; where several ends fit a path, the first one counts."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise UserError(f"{where}: {name} must be names with numbers (q_proj: 8), got {value!r}")
    kind = int if name == "rank_pattern" else float
    return {key: _require_kind(kind, f"{name} {key}", number, where) for key, number in value.items()}
