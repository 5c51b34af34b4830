"""Write folders with the libraries of the formats, each from the float folder of `base`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from quantised_writers.base import VOCAB, Tensors, config, float_tensors, write

Library = Callable[[Path, Path], None]  # float folder, folder to write
EVERY_LINEAR = ["Linear"]
CALIBRATION = [[(7 * i + 11 * j + i * j) % VOCAB for i in range(24)] for j in range(4)]


def make(size: str, library: Library, target: Path) -> None:
    """Write a float folder, let the library quantise it, and keep config.json and model.safetensors."""
    with TemporaryDirectory() as temporary:
        source, output = Path(temporary) / "float", Path(temporary) / "made"
        write(source, config(size), float_tensors(size))
        library(source, output)
        target.mkdir(parents=True, exist_ok=True)
        settings = json.loads((output / "config.json").read_text(encoding="utf-8"))
        text = json.dumps(settings, indent=1) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8", newline="\n")
        shutil.copyfile(output / "model.safetensors", target / "model.safetensors")


def llmcompressor(groups: object, *, kv_scheme: dict[str, object] | None = None, calibrate: bool = False) -> Library:
    """Quantise by a preset's name or by config groups; static activations need calibration."""

    def run(source: Path, output: Path) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from torch.utils.data import DataLoader
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        scheme = {"scheme": groups, "targets": "Linear"} if isinstance(groups, str) else {"config_groups": groups}
        recipe = QuantizationModifier(ignore=["lm_head"], kv_cache_scheme=kv_scheme, **scheme)
        rows = [
            {"input_ids": torch.tensor(row), "attention_mask": torch.ones(24, dtype=torch.int64)} for row in CALIBRATION
        ]
        loader = DataLoader(rows, batch_size=1)  # pyright: ignore[reportArgumentType]  # a list has what it needs
        no_tokenizer = SimpleNamespace()  # llmcompressor asks for one before it looks at the data, and never uses it
        calibration = {"dataset": loader, "processor": no_tokenizer, "num_calibration_samples": 4} if calibrate else {}
        oneshot(model=model, recipe=recipe, **calibration)
        model.save_pretrained(output, save_compressed=True)

    return run


def integers(bits: int, targets: list[str] = EVERY_LINEAR, **overrides: object) -> dict[str, object]:
    """Return a config group of weights only, with integers in groups of 32."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | overrides
    return {"targets": targets, "weights": weights}


EVERY_WIDTH = {
    f"group_{i}": integers(bits, [f"re:.*{name}_proj"], symmetric=symmetric)
    for i, (bits, name, symmetric) in enumerate((
        (2, "q", True), (3, "k", False), (5, "v", True), (6, "o", False), (7, "gate", True), (2, "up", False),
        (8, "down", False),
    ))
}  # fmt: skip
MIXED = {
    "group_0": integers(4, ["re:.*self_attn.[qkv]_proj"]),
    "group_1": {
        "targets": ["re:.*mlp.*_proj$"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    },
}
FP8_CACHE: dict[str, object] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def autoawq(group: int) -> Library:
    """Quantise with AutoAWQ to its gemv layout."""
    return lambda source, output: autoawq_model(source, group)[0].save_quantized(str(output))


def autoawq_model(source: Path, group: int) -> tuple[Any, Tensors]:
    """Return the model that AutoAWQ quantised, and the float16 weights that its quantiser gave to its packer.

    AutoAWQ only quantises and packs here. Its search for scales would depend on the order of sums.
    """
    from awq import AutoAWQForCausalLM  # pyright: ignore[reportMissingImports]
    from awq.quantize.quantizer import AwqQuantizer  # pyright: ignore[reportMissingImports]

    class WithoutSearch(AwqQuantizer):
        def init_quant(self, **_: object) -> tuple[Any, dict[str, Any], list[Any]]:
            return self.awq_model.get_model_layers(self.model), {}, []

        quantize = AwqQuantizer.pack

    awq_model = AutoAWQForCausalLM.from_pretrained(str(source), torch_dtype=torch.float16, device_map="cpu")
    linears = {name: linear for name, linear in awq_model.model.named_modules() if name.endswith("_proj")}
    settings = {"zero_point": True, "q_group_size": group, "w_bit": 4, "version": "GEMV"}
    awq_model.quantize(None, quant_config=settings, quantizer_cls=WithoutSearch)
    return awq_model, {f"{name}.weight": linear.weight.data for name, linear in linears.items()}


def autoround(bits: int) -> Library:
    """Quantise with AutoRound to asymmetric integers, without its search for rounding."""

    def run(source: Path, output: Path) -> None:
        from auto_round import AutoRound  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
        no_tokenizer = SimpleNamespace(save_pretrained=lambda *_, **__: ())
        method = {"bits": bits, "group_size": 32, "sym": False, "iters": 0, "disable_opt_rtn": True}
        AutoRound(model, no_tokenizer, device_map="cpu", **method).quantize_and_save(str(output), format="auto_round")
        shutil.copytree(next(output.iterdir()), output, dirs_exist_ok=True)  # AutoRound adds a folder level

    return run


def bitsandbytes(**settings: Any) -> Library:
    """Quantise with bitsandbytes through transformers."""

    def run(source: Path, output: Path) -> None:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        quantisation = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, quantization_config=quantisation, device_map={"": "cpu"}
        )
        model.save_pretrained(output)

    return run


def mlx(
    bits: int, group: int, mode: str = "affine", overrides: dict[str, dict[str, object] | bool] | None = None
) -> Library:
    """Quantise with mlx-lm; `overrides` choose by a part of the module's name."""

    def predicate(path: str, module: object) -> dict[str, object] | bool:
        return next((choice for part, choice in (overrides or {}).items() if part in path), True)

    def run(source: Path, output: Path) -> None:
        from mlx_lm.utils import load_model, quantize_model, save_config, save_model

        model, settings = load_model(source, lazy=True)
        layer_settings = predicate if overrides else None
        model, settings = quantize_model(model, settings, group, bits, mode=mode, quant_predicate=layer_settings)
        save_model(output, model, donate_model=True)
        save_config(settings, output / "config.json")

    return run


def torchao(name: str) -> Library:
    """Quantise with torchao through transformers."""

    def run(source: Path, output: Path) -> None:
        import torchao.quantization
        from transformers import AutoModelForCausalLM, TorchAoConfig

        quantisation = TorchAoConfig(getattr(torchao.quantization, name)())
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=quantisation)
        model.save_pretrained(output)

    return run


AUTOAWQ = ("autoawq", "transformers==4.51.3")  # AutoAWQ was last tested with it
FOLDERS: dict[str, tuple[str, tuple[str, ...], Library]] = {  # size, packages, library
    **{f"awq-gemv{name}": (size, AUTOAWQ, autoawq(group)) for name, size, group in (
        ("", "long", 32), ("-g64", "even", 64),
    )},
    "auto-round-2bit-asym": ("tiny", ("auto-round", "transformers==4.51.3"), autoround(2)),
    **{f"ct-{name}": (size, ("llmcompressor", "compressed-tensors"), library) for name, size, library in (
        ("w4a16", "small", llmcompressor({"group_0": integers(4)})),
        ("w4a16-g128", "wide", llmcompressor("W4A16")),
        ("w4a16-asym", "small", llmcompressor({"group_0": integers(4, symmetric=False)})),
        ("w3a16", "small", llmcompressor({"group_0": integers(3)})),
        ("every-width", "small", llmcompressor(EVERY_WIDTH)),
        ("w8a16-channel", "small", llmcompressor({"group_0": integers(8, strategy="channel", group_size=None)})),
        ("w8a8", "small", llmcompressor("W8A8")),
        ("fp8-static-kv", "small", llmcompressor("FP8", kv_scheme=FP8_CACHE, calibrate=True)),
        ("fp8-dynamic", "small", llmcompressor("FP8_DYNAMIC")),
        ("fp8-block", "small", llmcompressor("FP8_BLOCK")),
        ("fp8-block-wide", "wide", llmcompressor("FP8_BLOCK")),
        ("nvfp4", "small", llmcompressor("NVFP4", calibrate=True)),
        ("mxfp4", "small", llmcompressor("MXFP4")),
        ("mxfp8", "small", llmcompressor("MXFP8")),
        ("mixed", "small", llmcompressor(MIXED)),
    )},
    **{f"bnb-{name}": (size, ("bitsandbytes", "transformers"), library) for name, size, library in (
        ("nf4", "small", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        ("nf4-double", "nested",
         bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)),
        ("fp4", "small", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
        ("int8", "small", bitsandbytes(load_in_8bit=True)),
    )},
    **{f"mlx-{name}": ("small", ("mlx-lm", "mlx"), library) for name, library in (
        ("2bit", mlx(2, 32)), ("3bit", mlx(3, 32)), ("4bit", mlx(4, 32)), ("5bit", mlx(5, 32)), ("6bit", mlx(6, 32)),
        ("8bit", mlx(8, 32)),
        ("4bit-g64-overrides", mlx(4, 64, overrides={"up_proj": {"bits": 6, "group_size": 32}, "v_proj": False})),
        ("mxfp4", mlx(4, 32, "mxfp4")), ("nvfp4", mlx(4, 16, "nvfp4")), ("mxfp8", mlx(8, 32, "mxfp8")),
    )},
    "mlx-4bit-experts": ("experts", ("mlx-lm", "mlx"), mlx(4, 32)),
    "torchao-int8": ("small", ("torchao", "transformers"), torchao("Int8WeightOnlyConfig")),
    "torchao-float8": ("small", ("torchao", "transformers"), torchao("Float8WeightOnlyConfig")),
}  # fmt: skip
