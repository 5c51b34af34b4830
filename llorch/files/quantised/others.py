"""MLX, ModelOpt, AutoRound, BitNet and torchao.

    MLX        affine codes with scale and bias, also for embeddings; settings per module; mxfp4, nvfp4, mxfp8;
               the experts of a layer in one tensor (`switch_mlp`)
    ModelOpt   NVFP4 with scales multiplied by a global scale; FP8
    AutoRound  the tensors of GPTQ or AWQ; the packing `auto_round` is the second version of GPTQ
    BitNet     codes -1, 0, 1; the first quarter of the rows is in the lowest two bits
    torchao    signed bytes or E4M3 with a scale per row

Source: mlx `mlx/ops.cpp` (`affine_quantize`) and mlx-lm `utils.py`; ModelOpt `torch/export/quant_utils.py`; auto-round
`export/`; transformers `integrations/bitnet.py`; torchao `quantization/quantize_/workflows`.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

import numpy as np

from llorch.files.packed import Rows
from llorch.files.quantised.codes import E2M1, E4M3, INT8, integers
from llorch.files.quantised.compressed_tensors import add_fp4
from llorch.files.quantised.float8 import add_scaled, eight_bit_modules, exponents_of
from llorch.files.quantised.gptq import read_awq, read_gptq
from llorch.files.quantised.matrix import Parts, Recipe, Unpacker, floats_of
from llorch.files.quantised.source import Source, matches_module, matches_part, n_groups, names_in, plain_path
from llorch.runtime.fields import Fields

_STACK = ".switch_mlp."  # of all experts of a layer
_FLOATS = ("BF16", "F16", "F32")  # dtypes of scales


def read_mlx(source: Source) -> None:
    """Find the matrices of an MLX folder, whose settings are under `quantization`."""
    overrides = _overrides(source)
    for module in source.modules("scales", "biases", dtypes=["U32"]):
        settings = _module_settings(source.settings, overrides, module)
        mode = settings.text("mode", default="affine")
        if mode not in _MODES:
            raise settings.error("Unsupported", "mode", " or ".join(sorted(_MODES)), mode)
        add = partial(_MODES[mode], settings=settings)
        if _STACK in module:
            source.add_experts(module, module.replace(_STACK, ".experts.{e}."), add)
        else:
            add(source, module)


def _overrides(source: Source) -> dict[str, object]:
    """Return the settings of single modules by `plain_path`, for any spelling of the keys; False: not quantised.

    FormatError Inconsistent for settings of an unknown module, or different settings of one module.
    """
    paths, overrides = {plain_path(name.rpartition(".")[0]) for name in source.tensors}, dict[str, object]()
    for key, value in source.settings.values.items():
        if not isinstance(value, Mapping) and value is not False:
            continue
        if isinstance(value, Mapping) and plain_path(key) not in {*paths, "lm_head"}:  # tied: no lm_head
            raise source.settings.error("Inconsistent", key, "the name of a module of this folder", value)
        if overrides.setdefault(plain_path(key), value) != value:
            raise source.settings.error("Inconsistent", key, f"{overrides[plain_path(key)]}, as for this module", value)
    excluded = (key for key, value in source.settings.values.items() if value is False)
    source.note_unmatched("quantization", excluded, matches_module)
    return overrides


def _module_settings(settings: Fields, overrides: Mapping[str, object], module: str) -> Fields:
    """Return the settings of a module: its overrides, else those of the folder."""
    override = overrides.get(plain_path(module))
    if override is False:
        raise settings.error("Inconsistent", module, "a quantised module, because it has quantised tensors", override)
    return Fields({**settings.values, **override}, settings.path) if isinstance(override, Mapping) else settings


def _add_affine(source: Source, module: str, settings: Fields) -> None:
    bits = settings.integer("bits")
    if bits not in (2, 3, 4, 5, 6, 8):
        raise settings.error("Unsupported", "bits", "2, 3, 4, 5, 6 or 8", bits)
    n_out, n_words = source.shape(module, "weight")
    n_in = n_words * 32 // bits
    size, groups = n_groups(source, module, n_in, settings.integer("group_size"))
    reason = f"bits {bits}, group_size {size}"
    parts = {
        "codes": source.take(module, "weight", ["U32"]),
        "scale": source.take(module, "scales", _FLOATS, (n_out, groups), reason),
        "bias": source.take(module, "biases", _FLOATS, (n_out, groups), reason),
    }
    codes, scale, minimum = Unpacker("codes", bits, (n_out, n_in)), floats_of("scale"), floats_of("bias")
    recipe = Recipe(codes=codes, values=integers(bits), scale=scale, minimum=minimum, group=size, zero_scales=True)
    source.add(module, f"MLX {bits}-bit, groups of {size}", (n_out, n_in), parts, recipe)


def _add_mlx_float(bits: int, size: int, name: str) -> Callable[..., None]:
    values = E2M1 if bits == 4 else E4M3

    def add(source: Source, module: str, settings: Fields) -> None:
        for key, expected in (("bits", bits), ("group_size", size)):
            settings.refuse(key, unless=(expected,), default=expected)
        n_out, n_words = source.shape(module, "weight")
        n_in = n_words * 32 // bits
        n_groups(source, module, n_in, size)
        parts = {
            "codes": source.take(module, "weight", ["U32"]),
            "scale": source.take(module, "scales", ["U8"], (n_out, n_in // size), f"mode {name.lower()}"),
        }
        codes = Unpacker("codes", bits, (n_out, n_in))
        # Groups of 16 are NVFP4, with E4M3 scales; MXFP4 and MXFP8 have exponents.
        scale = (lambda parts, rows: E4M3[parts["scale"].array[rows]]) if size == 16 else exponents_of("scale")
        recipe = Recipe(codes=codes, values=values, scale=scale, group=size, zero_scales=True)
        source.add(module, f"MLX {name}, groups of {size}", (n_out, n_in), parts, recipe)

    return add


_MODES: Mapping[str, Callable[..., None]] = {
    "affine": _add_affine,
    "mxfp4": _add_mlx_float(4, 32, "MXFP4"),
    "nvfp4": _add_mlx_float(4, 16, "NVFP4"),
    "mxfp8": _add_mlx_float(8, 32, "MXFP8"),
}


def read_modelopt(source: Source) -> None:
    """Find the matrices of a ModelOpt folder of NVFP4 or FP8."""
    settings = source.settings
    kind = settings.text("quant_algo")
    if kind not in ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise settings.error("Unsupported", "quant_algo", "'NVFP4', 'W4A16_NVFP4', 'FP8' or FP8 a row", kind)
    if kind.startswith("FP8"):
        by_row = kind != "FP8"
        for module in eight_bit_modules(source, "weight_scale"):
            add_scaled(
                source, module, "weight_scale", "FP8, one scale a row" if by_row else "FP8, one scale",
                lambda shape: [(shape[0],), (shape[0], 1)] if by_row else [(), (1,)],
            )  # fmt: skip
    else:
        for module in source.modules("weight_scale_2", "weight_scale", dtypes=["U8"]):
            _add_modelopt_nvfp4(source, module)
    for key in ("ignore", "exclude_modules"):
        source.require_not_quantised(key, names_in(source, key), lambda pattern, module: fnmatchcase(module, pattern))
    source.leave_out("input_scale", "k_scale", "v_scale", "k_bias", "v_bias")


def _add_modelopt_nvfp4(source: Source, module: str) -> None:
    """Add a ModelOpt NVFP4 matrix, whose block scales are multiplied by a global scale."""
    n_out, half = source.shape(module, "weight")
    parts = {
        "codes": source.take(module, "weight", ["U8"]),
        "scale": source.take(module, "weight_scale", ["F8_E4M3"], (n_out, half // 8), "quant_algo NVFP4"),
        "global": source.take(module, "weight_scale_2", ["F32"]),
    }
    blocks = floats_of("scale")

    def scale(parts: Parts, rows: Rows) -> np.ndarray:
        return blocks(parts, rows) * parts["global"].floats().reshape(-1)[:1]

    add_fp4(source, module, parts, scale, 16, "NVFP4")


def read_auto_round(source: Source) -> None:
    """Find the matrices of an AutoRound folder, in the format of GPTQ or AWQ."""
    packing = source.settings.text("packing_format", default="auto_round:auto_gptq")
    match packing.removeprefix("auto_round:"):
        case "auto_gptq" | "gptq" | "auto":
            read_gptq(source)
        case "auto_round" | "gptqmodel":
            read_gptq(source, default="gptq_v2")
        case "auto_awq" | "awq":
            read_awq(source)
        case _:
            expected = "'auto_round', 'auto_round:auto_gptq', 'auto_round:gptqmodel' or 'auto_round:auto_awq'"
            raise source.settings.error("Unsupported", "packing_format", expected, packing)


def read_bitnet(source: Source) -> None:
    """Find the matrices of a BitNet folder of a Llama model."""
    settings = source.settings
    kind = settings.text("linear_class", default="bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise settings.error("Unsupported", "linear_class", "'bitlinear' or 'autobitlinear'", kind)
    settings.refuse("use_rms_norm", unless=(False,), default=False)
    for module in source.modules("weight_scale", dtypes=["U8"]):
        _add_ternary(source, module, divided=kind == "bitlinear")
    source.require_not_quantised("modules_to_not_convert", names_in(source, "modules_to_not_convert"), matches_part)


def _add_ternary(source: Source, module: str, *, divided: bool) -> None:
    """Add a BitNet matrix of -1, 0 and 1; `divided`: values are divided by the stored scale."""
    quarter, n_in = source.shape(module, "weight")
    parts = {
        "codes": source.take(module, "weight", ["U8"]),
        "scale": source.take(module, "weight_scale", _FLOATS, (1,)),
    }

    def codes(parts: Parts, rows: Rows) -> np.ndarray:
        ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        shifts = (ids // quarter * 2).astype(np.uint8)
        return parts["codes"].array[ids % quarter] >> shifts[:, None] & 3

    def scale(parts: Parts, rows: Rows) -> np.ndarray:
        number = parts["scale"].floats().reshape(1, 1)
        return np.float32(1) / number if divided else number

    recipe = Recipe(codes=codes, values=integers(2, offset=1), scale=scale, group=n_in)
    source.add(module, "BitNet, one scale", (quarter * 4, n_in), parts, recipe)


def read_torchao(source: Source) -> None:
    """Find the matrices of a torchao folder of signed bytes or E4M3 with a scale per row."""
    for module in source.modules("_weight_qdata", "_weight_scale", "_weight_zero_point"):
        name, (n_out, n_in) = f"{module}._weight_qdata", source.shape(module, "_weight_qdata")
        if source.tensors[name].dtype not in ("I8", "F8_E4M3"):
            raise source.error("Unsupported", f"{name}: expected I8 or F8_E4M3, got {source.tensors[name].dtype}")
        parts = {
            "codes": source.take(module, "_weight_qdata", ["I8", "F8_E4M3"]),
            "scale": source.take(module, "_weight_scale", _FLOATS, (n_out, 1)),
        }
        if source.has(module, "_weight_zero_point"):
            parts["zero"] = source.take(module, "_weight_zero_point", ["I8", *_FLOATS], (n_out, 1))
        is_float = source.tensors[name].dtype == "F8_E4M3"
        codes, values = Unpacker("codes", 8, (n_out, n_in)), E4M3 if is_float else INT8
        zero = floats_of("zero") if "zero" in parts else None
        recipe = Recipe(codes=codes, values=values, zero=zero, scale=floats_of("scale"), group=n_in)
        kind = "float8" if is_float else "int8"
        source.add(module, f"torchao {kind}, one scale a row", (n_out, n_in), parts, recipe)
