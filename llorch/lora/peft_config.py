"""Read and write PEFT's `adapter_config.json`; refuse fields that change the computation and that llorch lacks.

Source: peft/tuners/lora/config.py of PEFT 0.21 (41 fields), peft/config.py.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.strict_json import read_json
from llorch.lora.config import ALL_LINEAR, LoraConfig, modules, modules_regex, value_patterns
from llorch.lora.targets import OF_EXPERTS, LoraTarget
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
_LIMIT = 1 << 20  # bytes

_TYING, _TIED = "ensure_weight_tying", ("embed_tokens", "lm_head")  # PEFT's field; modules that a model may tie
_READ = (  # fields that llorch reads
    "peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "exclude_modules",
    "layers_to_transform", "layers_pattern", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
    "init_lora_weights", _TYING,
)  # fmt: skip
_BOOKKEEPING = (  # fields without effect on a trained adapter: bookkeeping, initialisation, memory savings of training
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
    "megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "eva_config", "velora_config",
    "corda_config", "loftq_config", "lora_ga_config",
)  # fmt: skip
_REFUSED: Mapping[str, str] = {  # fields that change the computation -> reason why llorch cannot use the adapter
    "bias": "biases of the base were trained",
    "lora_bias": "lora_B has a bias",
    "modules_to_save": "these modules were trained in full and replace the base's modules",
    "fan_in_fan_out": "weights are stored transposed",
    "trainable_token_indices": "single rows of the embedding were trained",
    "layer_replication": "layers are repeated",
    "alora_invocation_tokens": "the adapter is active only after an invocation token (aLoRA)",
    "use_qalora": "the input is pooled",
    "use_bdlora": "the matrices are block-diagonal",
    "arrow_config": "a router chooses adapters",
    "kasa_config": "the base weights are changed",
    "monteclora_config": "the matrices are drawn at random",
}
_OFF: tuple[object, ...] = (None, False, "none", [], {})  # values of fields that are not in use
# Initialisations that subtract from the base: the saved adapter is useless with the original weights.
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
REMEDY = "merge it with PEFT first (merge_and_unload, save_pretrained)"
_IF_TIED = "; if embedding and output are tied, first give lm_head a copy of its weight: PEFT 0.21 merges them wrongly"


def read_config(folder: Path) -> tuple[LoraConfig, str | None]:
    """Read `adapter_config.json`: the adapter's configuration and its base's name; FormatError names a bad field."""
    path = folder / CONFIG_FILE
    fields = Fields(read_json(path, limit=_LIMIT), path)
    _refuse_mlx(fields, path)
    if fields.text("peft_type") != "LORA":
        raise fields.error("Unsupported", "peft_type", "LORA", fields.values["peft_type"])
    _refuse(fields, path)
    try:
        config = LoraConfig(
            r=fields.integer("r"),
            lora_alpha=fields.number("lora_alpha"),
            target_modules=_read_modules(fields, "target_modules"),
            target_parameters=_read_parameters(fields),
            exclude_modules=_read_modules(fields, "exclude_modules") if fields.has("exclude_modules") else (),
            layers_to_transform=_read_layers(fields),
            lora_dropout=fields.number("lora_dropout", default=0.0),
            use_rslora=fields.boolean("use_rslora", default=False),
            use_dora=fields.boolean("use_dora", default=False),
            rank_pattern=_read_pattern(fields, "rank_pattern", Fields.integer),
            alpha_pattern=_read_pattern(fields, "alpha_pattern", Fields.number),
        )
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError("OutOfRange", str(error), path=path) from None
    return config, fields.text("base_model_name_or_path") if fields.has("base_model_name_or_path") else None


def config_json(config: LoraConfig, targets: Mapping[str, LoraTarget], *, base: str) -> str:
    """Write a configuration in PEFT's format; the text does not depend on the order of modules in the arguments."""
    values = {
        "alpha_pattern": {key: _integer_if_whole(alpha) for key, alpha in config.alpha_pattern.items()},
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": _module_names(config.exclude_modules, targets) or None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None if config.layers_to_transform is None else sorted(config.layers_to_transform),
        "lora_alpha": _integer_if_whole(config.lora_alpha),
        "lora_bias": False,
        "lora_dropout": config.lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": dict(config.rank_pattern),
        "revision": None,
        "target_modules": _module_names(config.target_modules, targets),
        **({"target_parameters": sorted(config.target_parameters)} if config.target_parameters else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
    }
    values |= _replace_regex(config, targets) | _multimodal_names(config, targets)
    values = dict(sorted(values.items()))  # patterns keep their order, because the first match wins
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _refuse_mlx(fields: Fields, path: Path) -> None:
    """Refuse a configuration of mlx-lm: equal file name, other tensor names, A and B transposed."""
    mlx_keys = [key for key in ("fine_tune_type", "lora_parameters", "num_layers") if key in fields.values]
    if mlx_keys and "peft_type" not in fields.values:
        message = f"expected an adapter of PEFT, got one of MLX (it has {', '.join(mlx_keys)}, no peft_type)"
        message += "; fuse it with its model (mlx_lm.fuse) and give the fused model"
        raise FormatError("Unsupported", message, path=path)


def _refuse(fields: Fields, path: Path) -> None:
    """Refuse settings that may change the result and that llorch lacks; warn of unknown settings that are off."""
    active = {key: value for key, value in fields.values.items() if value not in _OFF}
    for key, reason in _REFUSED.items():
        if key in active:
            raise FormatError("Unsupported", f"{key}: {active[key]!r:.60}: {reason}; {_remedy(fields)}", path=path)
    unknown = sorted(fields.values.keys() - {*_READ, *_BOOKKEEPING, *_REFUSED})
    if any(key in active for key in unknown):
        settings = ", ".join(f"{key}: {active[key]!r:.60}" for key in unknown if key in active)
        message = f"{settings}: llorch does not know this setting, which may change the result; {_remedy(fields)}"
        raise FormatError("Unsupported", message, path=path)
    if unknown:
        logger.warning(
            "%s: %s: ignored, because llorch does not know this setting and it is off", path, ", ".join(unknown)
        )
    start = fields.values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGE_THE_BASE):
        fix = "save it from PEFT with path_initial_model_for_weight_conversion"
        message = f"init_lora_weights: {start!r} changed the base weights, so the adapter fits no published base; {fix}"
        raise FormatError("Unsupported", message, path=path)
    if fields.has("layers_pattern") and fields.values["layers_pattern"] not in ("layers", ["layers"], []):
        raise fields.error("Unsupported", "layers_pattern", "layers", fields.values["layers_pattern"])


def _remedy(fields: Fields) -> str:
    """Advise how to merge with PEFT; an adapter of a tied embedding or output needs one more step."""
    return REMEDY + (_IF_TIED if any(name in str(fields.values.get("target_modules")) for name in _TIED) else "")


def _read_modules(fields: Fields, key: str) -> tuple[str, ...] | str:
    value = fields.values.get(key)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise fields.error("Malformed" if fields.has(key) else "Missing", key, "a list of module names", value)
    return tuple(sorted(value))


def _read_layers(fields: Fields) -> tuple[int, ...] | None:
    value = fields.values.get("layers_to_transform")
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    numbers = tuple(layer for layer in layers if isinstance(layer, int) and layer is not True and layer is not False)
    if len(numbers) != len(layers):
        raise fields.error("Malformed", "layers_to_transform", "layer numbers", value)
    return numbers


def _read_pattern(fields: Fields, key: str, read) -> dict:
    section = fields.section(key)
    return {} if section is None else {name: read(section, name) for name in section.values}


def _read_parameters(fields: Fields) -> tuple[str, ...]:
    names = _read_modules(fields, "target_parameters") if fields.values.get("target_parameters") else ()
    if isinstance(names, str):
        raise fields.error("Malformed", "target_parameters", "a list of parameter names", names)
    return names


def add_tied(config: LoraConfig, model: ModelConfig, folder: Path) -> LoraConfig:
    """Target both embedding and output if they are tied and share an adapter in PEFT (ensure_weight_tying).

    PEFT stores this adapter twice, once transposed. Its `merge_and_unload` adds both to the one matrix, wrongly.
    """
    path = folder / CONFIG_FILE
    if not model.tie_word_embeddings or not Fields(read_json(path, limit=_LIMIT), path).boolean(_TYING, default=False):
        return config
    tied_names = {target.name for target in config.targets(model).values()} & {*_TIED}
    if not tied_names:
        return config
    if isinstance(config.target_modules, str):
        return replace(config, target_modules=f"(?:{config.target_modules})|(?:.*\\.)?(?:{'|'.join(_TIED)})")
    return replace(config, target_modules=tuple(sorted({*config.target_modules, *_TIED})))


def from_version_4(config: LoraConfig, model: ModelConfig, folder: Path) -> LoraConfig:
    """Translate names of transformers 4's modules like PEFT: experts and routers are parameters of transformers 5.

    Gate and up became one parameter. Its rank is the sum of both ranks; its alpha is doubled to keep the scaling.
    """
    if "old_expert_names" not in FAMILIES[model.family].transformers.habits:
        return config
    if isinstance(config.target_modules, str):
        message = f"target_modules: expected a list of names for {model.family}, got {config.target_modules!r:.60}"
        raise FormatError("Unsupported", f"{message}; PEFT would match it to other modules", path=folder / CONFIG_FILE)
    old_ends = {name: name.rpartition(".")[2] for name in config.target_modules}
    translated = {end for end in old_ends.values() if end in (*OF_EXPERTS, "gate")}
    if len(translated & {"gate_proj", "up_proj"}) == 1:
        message = "target_modules: gate_proj and up_proj are one parameter in transformers 5, expected both or none"
        raise FormatError("Unsupported", message, path=folder / CONFIG_FILE)
    if not translated:
        return config
    has_gate_up, pattern = "gate_proj" in translated, r".*\.gate_up_proj"
    names = {"gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    return replace(
        config,
        target_modules=tuple(name for name, end in old_ends.items() if end not in translated),
        target_parameters=tuple(sorted({*config.target_parameters, *(names[end] for end in translated)})),
        rank_pattern=dict(config.rank_pattern) | ({pattern: 2 * config.r} if has_gate_up else {}),
        alpha_pattern=dict(config.alpha_pattern) | ({pattern: 2 * config.lora_alpha} if has_gate_up else {}),
    )


def _module_names(names: tuple[str, ...] | str, targets: Mapping[str, LoraTarget]) -> list[str] | str:
    """List module names sorted, because the order of PEFT's set changes from run to run."""
    if names == ALL_LINEAR:
        return sorted({target.path.rpartition(".")[2] for target in modules(targets.values())})
    return names if isinstance(names, str) else sorted(names)


def _integer_if_whole(alpha: float) -> float | int:
    return int(alpha) if alpha == int(alpha) else alpha


def _replace_regex(config: LoraConfig, targets: Mapping[str, LoraTarget]) -> dict[str, object]:
    """List every module instead of a regular expression combined with layers, which PEFT does not accept."""
    if config.layers_to_transform is None or not isinstance(_module_names(config.target_modules, targets), str):
        return {}
    paths = sorted(target.path for target in modules(targets.values()))
    return {"target_modules": paths, "layers_to_transform": None}


def _multimodal_names(config: LoraConfig, targets: Mapping[str, LoraTarget]) -> dict[str, object]:
    """Name each module of a multimodal base by its full path, because suffixes are ambiguous there."""
    if not any(target.multimodal_path for target in targets.values()):
        return {}
    patterns = value_patterns(config, {target.stored_path: target for target in targets.values()})
    alphas = {path: _integer_if_whole(alpha) for path, alpha in patterns["alpha_pattern"].items()}
    parameters = sorted(target.stored_path for target in targets.values() if target.is_parameter)
    return {
        **patterns,
        "alpha_pattern": alphas,
        "exclude_modules": None,
        "layers_to_transform": None,
        "target_modules": modules_regex(target.stored_path for target in modules(targets.values())) or [],
        **({"target_parameters": parameters} if parameters else {}),
    }
