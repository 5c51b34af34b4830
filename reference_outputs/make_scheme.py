"""Make the goldens of scheme numerics: compressed-tensors in transformers, both unmodified, computed in float64.

    python reference_outputs/make_scheme.py            write quantised_folders/scheme.npz and scheme.json
    python reference_outputs/make_scheme.py --check    compare with the stored ones

Needs transformers and compressed-tensors of the extra golden, and torchao, which it lacks: pip install torchao. The
forward pass of compressed-tensors quantises and dequantises inputs of products, keys and values. `scheme.json` has
hashes of what its functions make of the array `inputs`, for every kind of rounding, and of what torchao makes of it in
float32, its widest dtype.

Three formats have no float64 weights there. The library decodes MXFP4 and MXFP8 in bfloat16, which is exact. It rounds
weights of NVFP4 to bfloat16, so that folder gets the weights that llorch decodes. The copy of the block FP8 folder gets
groups of 32 columns, because 128 divides no width of its matrices.

Inputs of the int8 products are stored too. With s = amax / 127.5, the largest number of a row lies at a tie where it is
negative (x / s = -127.5). There the last bit of a sum decides between the codes -127 and -128.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers import AutoModelForCausalLM

from llorch.engines.transformers_capture import captured, float64_everywhere
from llorch.files import open_weights

FOLDER = Path(__file__).resolve().parent / "quantised_folders"
ARRAYS, RECORD = FOLDER / "scheme.npz", FOLDER / "scheme.json"
IDS = [(5 + 7 * i + i * i) % 24 for i in range(24)]
FOLDERS = (
    "ct-w8a8",
    "ct-fp8-dynamic",
    "ct-fp8-static-kv",
    "ct-mixed",
    "ct-fp8-block",
    "ct-mxfp4",
    "ct-mxfp8",
    "ct-nvfp4",
)
ALSO = {  # further stages of a folder
    "ct-fp8-static-kv": ["l0.k_cache", "l0.v_cache"],
    "ct-w8a8": ["l0.attn_norm", "l0.attn_context", "l0.ffn_norm", "l0.ffn_act"],
}
GROUP_OF = {"ct-fp8-block": 32}  # columns, in place of 128
WEIGHTS_OF_LLORCH = ("ct-nvfp4",)
INT8, FP8, FP4 = ({"num_bits": bits, "type": kind} for bits, kind in ((8, "int"), (8, "float"), (4, "float")))
STATIC, TOKEN = {"strategy": "tensor", "dynamic": False}, {"strategy": "token", "dynamic": True}
GROUP, LOCAL = {"strategy": "group", "dynamic": True}, {"strategy": "tensor_group", "dynamic": "local"}
MX = {**GROUP, "group_size": 32, "scale_dtype": torch.uint8}
FUNCTIONS: Mapping[str, tuple[Mapping[str, Any], float | None]] = {  # settings; static or global scale
    "int8 token": (INT8 | TOKEN, None),
    "int4 token": (INT8 | TOKEN | {"num_bits": 4}, None),
    "int8 static": (INT8 | STATIC, 0.02099609375),
    "fp8 token": (FP8 | TOKEN, None),
    "fp8 static": (FP8 | STATIC, 0.00592041015625),
    "fp8 groups of 128": (FP8 | GROUP | {"group_size": 128}, None),
    "nvfp4": (FP4 | LOCAL | {"group_size": 16, "scale_dtype": torch.float8_e4m3fn}, 612.3455810546875),
    "mxfp4": (FP4 | MX, None),
    "mxfp8": (FP8 | MX, None),
}


def inputs() -> np.ndarray:
    """Make numbers of many magnitudes, zeros, ties, and rows whose largest is at the edge of two powers of two."""
    rng = np.random.default_rng(38)
    x = np.ldexp(rng.random((12, 256)) - 0.5, rng.integers(-12, 8, (12, 256)))
    x[2], x[3, :32] = 0, 0
    x[4] = np.round(x[4] * 8) / 8
    x[5] = [127.5, *(np.arange(255) - 127 + 0.5)]  # int8: s = 1, every number but the first is a tie
    x[6, :32], x[6, 32:64] = 1.75, np.nextafter(1.75, 0)
    x[7] *= 1e-30
    x[8] = np.tile([-6, -5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], 16)
    x[9, 0] = -3e4  # clipped by a static scale
    return x


def rounded(x: np.ndarray, settings: Mapping[str, Any], number: float | None) -> np.ndarray:
    """Quantise and dequantise as a module with these `input_activations` does."""
    args, tensor = QuantizationArgs(symmetric=True, **settings), torch.from_numpy(x)[None]
    scale_tensor = None if number is None else torch.tensor([number], dtype=tensor.dtype)
    if args.dynamic is False:
        return fake_quantize(tensor, scale_tensor, None, args)[0].numpy()  # pyright: ignore[reportArgumentType]
    scale, zero = compute_dynamic_scales_and_zp(tensor, args, None, global_scale=scale_tensor)  # pyright: ignore
    return fake_quantize(tensor, scale, zero, args, global_scale=scale_tensor)[0].numpy()


def traced(name: str) -> dict[str, np.ndarray]:
    """Compute the stages of one folder by transformers with compressed-tensors in float64."""
    with TemporaryDirectory() as temporary:
        path = shutil.copytree(FOLDER / name, Path(temporary) / name)
        if name in GROUP_OF:
            settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
            groups = settings["quantization_config"]["config_groups"]
            groups["group_0"]["input_activations"]["group_size"] = GROUP_OF[name]
            (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        weights = open_weights(path)
        with torch.no_grad(), float64_everywhere(refuse=False):
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
            _decompress(model)
            model.double().eval()
            for module, linear in model.named_modules() if name in WEIGHTS_OF_LLORCH else ():
                if isinstance(linear, torch.nn.Linear) and hasattr(linear, "quantization_scheme"):
                    linear.weight.data = torch.from_numpy(weights.source.array(f"{module}.weight")).double()
        with torch.no_grad(), float64_everywhere(), captured(model, weights.config) as stages:
            model(torch.tensor([IDS]))
        weights.source.close()
    stage_names = ["l0.attn_out", "logits", *ALSO.get(name, [])]
    return {stage: stages[stage].astype(np.float64, casting="no") for stage in stage_names}


def _decompress(model: Any) -> None:
    """Let the library decode its weights, which it does before the first forward pass; that pass may fail."""
    with suppress(RuntimeError):
        model(torch.tensor([IDS]))


def record_of(x: np.ndarray) -> dict[str, Any]:
    """Record hashes of the rounded inputs in both dtypes, with the sign of zeros removed, and some of the numbers."""
    record: dict[str, Any] = {}
    for name, (settings, number) in FUNCTIONS.items():
        arrays = {str(dtype): rounded(x.astype(dtype), settings, number) + 0 for dtype in ("float64", "float32")}
        record[name] = {dtype: sha256(array.tobytes()).hexdigest() for dtype, array in arrays.items()}
        record[name]["samples"] = arrays["float64"].reshape(-1)[::193].tolist()
    return record


def record_of_torchao(x: np.ndarray) -> dict[str, Any]:
    """Record the hash and some numbers of the inputs as torchao rounds them: int8 codes with a scale for each row."""
    from torchao.quantization import Int8Tensor, PerRow  # pyright: ignore[reportMissingImports]

    rounded_rows = Int8Tensor.from_hp(torch.from_numpy(x.astype(np.float32)), PerRow()).dequantize().numpy() + 0
    return {"float32": sha256(rounded_rows.tobytes()).hexdigest(), "samples": rounded_rows.reshape(-1)[::193].tolist()}


def main() -> None:
    """Write the goldens, or compare them."""
    arrays = {"inputs": inputs()}
    for name in FOLDERS:
        arrays |= {f"{name}/{stage}": array for stage, array in traced(name).items()}
    packages = ("compressed-tensors", "torchao", "transformers", "torch")
    record = {"made_by": {name: version(name) for name in packages}, "ids": IDS, "rounded": record_of(arrays["inputs"])}
    record["rounded_by_torchao"] = record_of_torchao(arrays["inputs"])
    if "--check" in sys.argv[1:]:
        with np.load(ARRAYS) as golden:
            gaps = {name: float(np.abs(array - golden[name]).max()) for name, array in arrays.items()}
        same = json.loads(RECORD.read_text(encoding="utf-8")) == record
        print(
            f"{RECORD.name}: {'same' if same else 'differs'}; largest difference of {ARRAYS.name}: {max(gaps.values())}"
        )
        raise SystemExit(not same or max(gaps.values()) > 1e-12)
    np.savez_compressed(ARRAYS, allow_pickle=False, **arrays)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
