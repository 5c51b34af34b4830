"""Random models of all families, judged live as `llorch verify` judges them: a right run must not fail.

    python benchmarks/false_alarms.py --n 50                           NumPy, folders and their GGUF twins
    python benchmarks/false_alarms.py --n 20 --torch float32           and the torch path
    python benchmarks/false_alarms.py --n 50 --quantised               files that llama.cpp quantised, as it runs them
    OPENBLAS_CORETYPE=Haswell python benchmarks/false_alarms.py        with other kernels

Families, dimensions, biases, ties, frequency scaling, epsilon, stored dtype and positions are drawn; a number names its
model, so that one can be judged again (`--first 17 --n 1`). Every row that fails is a false alarm, or a mistake of
llorch that both engines and the float64 reference show. The closing line counts these rows, and near-ties, and has the
farthest row of float64.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from llorch.engines.process import in_child
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.convert import convert
from llorch.files.tensor_names import inventory
from llorch.judging.goldens.float64_reference import WITNESS
from llorch.judging.judge import Comparison
from llorch.judging.runners import Runner
from llorch.judging.runners.numpy import numpy_runners
from llorch.judging.verify import plan_live, verify_as_stored, verify_live
from llorch.model.model import load
from llorch.ops.numerics import GGML
from llorch.stages.comparison import FAIL, TIE

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
)  # fmt: skip
FILE_TYPES = {  # LLAMA_FTYPE_* of llama.h; where a row is no multiple of 256, llama.cpp takes a smaller block
    "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
N_TOKENS = 12


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--n", default=20, show_default=True, help="Models.")
@click.option("--first", default=0, show_default=True, help="Number of the first one.")
@click.option("--torch", "dtypes", multiple=True, help="Judge the torch path too, in this dtype; may be repeated.")
@click.option("--quantised", is_flag=True, help="Judge a file that llama.cpp quantised under ggml numerics instead.")
def main(n: int, first: int, dtypes: tuple[str, ...], quantised: bool) -> None:
    """Entry point; exit code 1 when a row failed or an engine did not run."""
    every: list[Comparison] = []
    absent = 0
    for number in range(first, first + n):
        failed: dict[str, str] = {}
        with tempfile.TemporaryDirectory(prefix="llorch-random-") as place:
            folder = Path(place) / f"m{number}"
            config = write_random(folder, np.random.default_rng(number), wide=quantised and number % 2 == 0)
            judge = judged_quantised if quantised else partial(judged, dtypes=dtypes)
            rows = list(judge(folder, config, number, failed=failed))
        bad = [row for row in rows if row.verdict == FAIL]
        every += rows
        absent += len(failed)
        family, scaling = config["model_type"], (config.get("rope_scaling") or {}).get("rope_type", "plain")
        click.echo(f"{number:4d} {family:6} {scaling:7} {len(rows):6d} rows, {len(bad)} fail {failed or ''}", err=True)
        for row in bad[:5]:
            click.echo(f"     {row}")
    wide = [row.error for row in every if row.producer == WITNESS and row.mode != "exact"]
    n_failed, ties = (sum(row.verdict == verdict for row in every) for verdict in (FAIL, TIE))
    click.echo(
        f"{n} models, {len(every)} rows: {n_failed} fail, {ties} near-ties, {absent} runs of engines missing"
        + (f"; float64 within {max(wide):.1e} of the float64 reference" if wide else "")
    )
    sys.exit(1 if n_failed or absent else 0)


def prompt(config: dict[str, Any], number: int) -> list[int]:
    """Draw tokens for the model with this number."""
    return np.random.default_rng(number).integers(0, config["vocab_size"], N_TOKENS).tolist()


def judged_quantised(
    folder: Path, config: dict[str, Any], number: int, *, failed: dict[str, str]
) -> Iterator[Comparison]:
    """Judge a file in one of the types that llama.cpp writes, row by row."""
    twin, kind = folder.with_suffix(".gguf"), list(FILE_TYPES)[number % len(FILE_TYPES)]
    convert(folder, twin)
    path = twin.with_name(f"{folder.name}-{kind}.gguf")
    in_child("llamacpp", twin, "llorch.engines.f32_copy:write_by_llamacpp", twin, path, FILE_TYPES[kind])
    numerics = replace(GGML, kv_cache="f16" if number % 3 == 0 else "f32")
    model = load(path, numerics=numerics, residency="packed" if number % 5 < 2 else "decoded")
    yield from verify_as_stored(model, prompt(config, number), failed=failed)


def judged(
    folder: Path, config: dict[str, Any], number: int, *, dtypes: tuple[str, ...], failed: dict[str, str]
) -> Iterator[Comparison]:
    """Judge a folder and its GGUF twin, row by row."""
    ids, twin = prompt(config, number), folder.with_suffix(".gguf")
    convert(folder, twin)
    for path in (folder, twin):
        plan = plan_live(open_weights(path), ids, ["llamacpp", "transformers"])
        yield from verify_live(plan, partial(runners, dtypes), failed=failed)


def runners(dtypes: tuple[str, ...], weights: Weights, *, wide: bool) -> Iterator[Runner]:
    """Yield all ways of NumPy to run, and of torch in some dtypes."""
    yield from numpy_runners(weights, wide=wide)
    for dtype in dtypes:
        from llorch.judging.runners.torch import torch_runners
        from llorch.pytorch.device import target

        yield from torch_runners(target("cpu", dtype))(weights, wide=wide)


def write_random(folder: Path, rng: np.random.Generator, *, wide: bool = False) -> dict[str, Any]:
    """Write a Hugging Face folder with a drawn configuration and weights; `wide` has rows of whole super-blocks."""
    import torch
    from safetensors.torch import save_file

    config = draw(rng)
    if wide:
        heads, rows = 4 * config["num_key_value_heads"], 256 * int(rng.integers(1, 5))
        config |= {"num_attention_heads": heads, "hidden_size": 64 * heads, "intermediate_size": rows}
        config |= {"head_dim": 64} if "head_dim" in config else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    size = 10 ** rng.uniform(-2, -0.7)  # of the weights: from nearly linear to saturated attention
    tensors = {}
    for weight in inventory(ModelConfig.from_huggingface(config, path=folder)).values():
        array = size * rng.standard_normal(weight.shape, dtype=np.float32)
        tensors[weight.huggingface] = torch.from_numpy(1 + array if weight.name.endswith("norm") else array)
    dtype = torch.bfloat16 if rng.random() < 0.3 else torch.float32
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return config


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """Draw a configuration that both engines load."""
    family = str(rng.choice([*FAMILIES]))
    kv_heads, group, head_dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 8 * int(rng.integers(1, 9))
    hidden = kv_heads * group * head_dim if family != "qwen3" else kv_heads * group * 8 * int(rng.integers(1, 7))
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "hidden_size": hidden,
        "intermediate_size": 8 * int(rng.integers(2, 60)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "vocab_size": int(rng.integers(40, 3000)),
        "rms_norm_eps": float(rng.choice([1e-5, 1e-6])),
        "rope_theta": float(rng.choice([1e4, 5e5, 1e6])),
        "max_position_embeddings": int(rng.choice([64, 2048, 8192])),
        "tie_word_embeddings": bool(rng.random() < 0.5),
        "hidden_act": "silu",
    }
    if family != "qwen2":
        biased = family == "llama" and rng.random() < 0.3  # of attn_output llama.cpp has it there only
        config |= {"head_dim": head_dim, "attention_bias": bool(biased)}
    scaling = SCALINGS[int(rng.integers(len(SCALINGS) - (family != "llama")))]  # llama.cpp has llama3's for llama only
    return config | ({"rope_scaling": scaling} if scaling and rng.random() < 0.6 else {})


if __name__ == "__main__":
    main()
