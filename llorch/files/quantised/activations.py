"""Rounding of activations by the settings of a quantised folder: inputs of matrices, keys and values.

    compressed-tensors   input_activations of each group of modules; kv_cache_scheme with k_scale and v_scale
    fp8                  activation_scheme: per token and block of columns, or one activation_scale for each matrix
    torchao              quant_type: Int8DynamicActivationInt8WeightConfig, symmetric and per token

Only scheme numerics use it, which round as an engine with kernels for the scheme does. Weight-only methods round
nothing. A scheme that no library can run on a CPU as a reference raises an error.

Source: compressed-tensors 0.20 `quantization/quant_args.py` and `modeling/kvcache.py`; transformers
`integrations/finegrained_fp8.py`; torchao 0.18 `quantization/quant_api.py`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from llorch.files.quantised.compressed_tensors import group_of, groups_of
from llorch.files.quantised.source import Found, Source
from llorch.ops.scheme_rounding import CodesName, SchemeRounding
from llorch.runtime.fields import Fields

_FLOATS = ("F32", "BF16", "F16")  # dtypes of scales
_ATTENTION = re.compile(r"(.*\blayers\.(\d+)\.self_attn)\.[qk]_proj\.weight")  # module and layer
_CODES: Mapping[tuple[str, int], CodesName] = MappingProxyType(
    {("int", 4): "int4", ("int", 8): "int8", ("float", 4): "E2M1", ("float", 8): "E4M3"}
)
_INT8_DYNAMIC = "Int8DynamicActivationInt8WeightConfig"
_TORCHAO_CODES = {  # of activations, by the prefix of the config's name
    "int8dynamicactivation": "int8", "int8staticactivation": "int8", "float8dynamicactivation": "E4M3",
}  # fmt: skip
_TORCHAO_WEIGHT_ONLY = (
    "Int8WeightOnlyConfig", "Int4WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig",
    "int8_weight_only", "int4_weight_only", "float8_weight_only",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Activations:
    """Rounding of activations by a scheme; empty for weight-only schemes."""

    inputs: dict[str, SchemeRounding] = field(default_factory=dict)  # by the name of the weight
    caches: dict[int, tuple[SchemeRounding, SchemeRounding]] = field(default_factory=dict)  # keys, values; by layer


def read_activations(method: str, source: Source) -> Activations:
    """Read the rounding of activations of every matrix and layer; `method` is `quant_method`.

    FormatError: Unsupported for a scheme that llorch lacks; Missing, Shape, OutOfRange, Inconsistent for invalid data.
    """
    activations = Activations()
    if method in _READERS:
        _READERS[method](source, activations)
    elif not _WEIGHT_ONLY.get(method, lambda settings: False)(source.settings):
        expected = "compressed-tensors, fp8, torchao, or a method that quantises weights alone, for scheme numerics"
        raise source.settings.error("Unsupported", "quant_method", f"{expected} (use exact numerics)", method)
    return activations


def codes_of_engine(method: str, settings: Fields) -> str | None:
    """Return the codes to which engines round activations, for schemes that llorch lacks; None if unknown."""
    match method:
        case "bitsandbytes" if not _WEIGHT_ONLY[method](settings):
            return "int8"
        case "bitnet":
            return "int8"
        case "fbgemm_fp8" | "mxfp8":
            return "E4M3"
        case "modelopt":
            return {"F": "E4M3", "N": "E2M1"}.get(str(settings.values.get("quant_algo"))[:1])
        case "torchao":
            configs = _torchao_configs(settings.values.get("quant_type"))
            names = [_class_name(config).lower().replace("_", "") for config in configs]
            matching = [codes for name in names for start, codes in _TORCHAO_CODES.items() if name.startswith(start)]
            return " and ".join(dict.fromkeys(matching)) or None
    return None


_WEIGHT_ONLY: Mapping[str, Callable[[Fields], bool]] = {  # method -> check of the settings
    **dict.fromkeys(("gptq", "awq", "mlx"), lambda settings: True),
    "auto-round": lambda settings: settings.integer("act_bits", default=16) >= 16,  # 16: activations stay floats
    "intel/auto-round": lambda settings: settings.integer("act_bits", default=16) >= 16,
    "bitsandbytes": lambda settings: settings.boolean("load_in_4bit", default=False),
}


def _read_compressed_tensors(source: Source, activations: Activations) -> None:
    groups = groups_of(source.settings)
    for name, matrix in source.found.items():
        module = name.removesuffix(".weight")
        group = group_of(source, groups, module)
        if group.settings.has("output_activations"):
            raise group.settings.error("Unsupported", "output_activations", "null", group.settings.values)
        if (settings := group.settings.section("input_activations")) is not None:
            activations.inputs[name] = _input_rounding(source, settings, module, matrix)
    _read_caches(source, activations)


def _input_rounding(source: Source, settings: Fields, module: str, matrix: Found) -> SchemeRounding:
    """Read the rounding of a module from its `input_activations`."""
    codes, strategy = _read_codes(settings), settings.text("strategy", default="tensor")
    size = settings.integer("group_size", default=None) if strategy in ("group", "tensor_group") else None
    if size is not None:
        _require_groups(source, module, matrix, size)
    match strategy, settings.values.get("dynamic"), str(settings.values.get("scale_dtype")).removeprefix("torch."):
        case "tensor", False | None, "None":
            return SchemeRounding(codes, "static", number=_read_scale(source, module, "input_scale"))
        case "token", True, "None":
            return SchemeRounding(codes, "dynamic")
        case "group", True, "None":
            return SchemeRounding(codes, "dynamic", size)
        case "group", True, "uint8" if size == 32 and codes in ("E2M1", "E4M3"):
            return SchemeRounding(codes, "e8m0", size)
        case "tensor_group", "local", "float8_e4m3fn" if codes == "E2M1":
            return SchemeRounding(codes, "e4m3", size, _read_scale(source, module, "input_global_scale"))
    expected = "a static scale, dynamic scales of tokens or groups, or those of MXFP4, MXFP8 and NVFP4"
    raise settings.error("Unsupported", "input_activations", expected, settings.values)


def _read_codes(settings: Fields) -> CodesName:
    """Read the number format of a rounding: int4, int8, E2M1 or E4M3, by default int8; Unsupported for others."""
    key = settings.text("type", default="int"), settings.integer("num_bits", default=8)
    if key not in _CODES or not settings.boolean("symmetric", default=True):
        raise settings.error("Unsupported", "num_bits", "symmetric int or float of 4 or 8 bits", settings.values)
    return _CODES[key]


def _read_caches(source: Source, activations: Activations) -> None:
    """Add the static rounding of keys and values of each layer, if the settings have it."""
    settings = source.settings.section("kv_cache_scheme")
    if settings is None:
        return
    codes = _read_codes(settings)
    settings.refuse("strategy", unless=("tensor",), default="tensor")
    settings.refuse("dynamic", unless=(False,), default=False)
    for name in source.found.keys() | source.tensors.keys():
        if match := _ATTENTION.fullmatch(name):
            k_scale, v_scale = (_read_scale(source, match[1], suffix) for suffix in ("k_scale", "v_scale"))
            key, value = (SchemeRounding(codes, "static", number=number) for number in (k_scale, v_scale))
            activations.caches[int(match[2])] = key, value


def _read_fp8(source: Source, activations: Activations) -> None:
    settings = source.settings
    kind, block = settings.text("activation_scheme", default="dynamic"), settings.values.get("weight_block_size")
    if kind not in ("dynamic", "static") or (kind == "dynamic" and not isinstance(block, list)):
        expected = "'static', or 'dynamic' with a weight_block_size, for scheme numerics (use exact numerics)"
        raise settings.error("Unsupported", "activation_scheme", expected, kind)
    for name, matrix in source.found.items():
        module = name.removesuffix(".weight")
        if kind == "static":
            suffix = "activation_scale" if source.has(module, "activation_scale") else "input_scale"
            activations.inputs[name] = SchemeRounding("E4M3", "static", number=_read_scale(source, module, suffix))
        elif isinstance(block, list):
            _require_groups(source, module, matrix, block[1])
            activations.inputs[name] = SchemeRounding("E4M3", "dynamic", block[1])


def _read_torchao(source: Source, activations: Activations) -> None:
    """Read the rounding of every matrix from torchao's config; Unsupported if llorch lacks it."""
    configs = [*_torchao_configs(source.settings.values.get("quant_type"))]
    if configs and all(_class_name(config) in _TORCHAO_WEIGHT_ONLY for config in configs):
        return
    if len(configs) != 1 or not _is_int8_per_token(configs[0]):
        expected = f"{_INT8_DYNAMIC} of version 2, symmetric and PerRow, for all modules, or configs that quantise"
        expected += " weights alone, for scheme numerics (use exact numerics)"
        raise source.settings.error("Unsupported", "quant_type", expected, [_class_name(config) for config in configs])
    activations.inputs.update(dict.fromkeys(source.found, SchemeRounding("int8", "dynamic", by_reciprocal=True)))


def _torchao_configs(quant_type: object) -> Iterator[object]:
    """Yield the configs of a torchao folder, given one for all modules or a mapping of modules to configs."""
    if not isinstance(quant_type, Mapping):
        yield from [] if quant_type is None else [quant_type]
    elif "_type" not in quant_type:
        for nested_config in quant_type.values():
            yield from _torchao_configs(nested_config)
    elif quant_type["_type"] in ("FqnToConfig", "ModuleFqnToConfig"):
        yield from _torchao_configs(quant_type.get("_data"))
    else:
        yield quant_type


def _class_name(config: object) -> str:
    """Return the name of a config's class; older versions of transformers write only a name."""
    return str(config["_type"] if isinstance(config, Mapping) else config)


def _is_int8_per_token(config: object) -> bool:
    """Check if a config has symmetric int8 codes with a dynamic scale per token."""
    if not isinstance(config, Mapping) or (_class_name(config), config.get("_version")) != (_INT8_DYNAMIC, 2):
        return False
    values = config.get("_data")
    if not isinstance(values, Mapping) or values.get("reduce_range") or values.get("weight_only_decode"):
        return False
    sizes, mapping = values.get("granularity"), values.get("act_mapping_type")
    size = sizes[0] if isinstance(sizes, list) and sizes else sizes  # the first of two is for activations
    return _is_default(size, "_type", "PerRow") and _is_default(mapping, "_data", "SYMMETRIC")


def _is_default(value: object, key: str, default: str) -> bool:
    """Check if a setting is absent, or has the default value under `key`."""
    return value is None or (isinstance(value, Mapping) and value.get(key) == default)


def _require_groups(source: Source, module: str, entry: Found, size: int) -> None:
    """Raise Unsupported if the columns are not a multiple of the group size: engines do not run them."""
    if size < 1 or entry.shape[1] % size:
        message = f"{module}: expected a multiple of {size} columns, the group of its activations, got {entry.shape[1]}"
        raise source.error("Unsupported", f"{message}; use exact numerics")


def _read_scale(source: Source, module: str, suffix: str) -> float:
    """Read a scale of the folder, one positive number."""
    part = source.part(source.take(module, suffix, _FLOATS))
    if math.prod(part.shape) != 1:
        raise source.error("Shape", f"{part.name}: expected one number, got {part.shape}")
    number = float(part.floats().reshape(-1)[0])
    if not (math.isfinite(number) and number > 0):
        raise source.error("OutOfRange", f"{part.name}: expected a positive finite scale, got {number}")
    return number


_READERS: Mapping[str, Callable[[Source, Activations], None]] = MappingProxyType(
    {"compressed-tensors": _read_compressed_tensors, "fp8": _read_fp8, "torchao": _read_torchao}
)
