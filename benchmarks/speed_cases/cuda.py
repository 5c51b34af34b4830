"""Case `cuda`: speed of 7B and 8B shapes with random weights on a CUDA device, and of single products.

Decode of one prompt behind a context of 512 tokens in bfloat16, in types of GGUF files and in kinds of quantised
folders, and prefill of 4096 tokens. Each is beside the copy and the product of the device measured in the same run, and
beside transformers with static cache and compile on the same bfloat16 weights.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
import torch

from llorch.apps.bench.measure import Load, measure, prompts, speeds
from llorch.apps.bench.torch import MeasuredModel, TorchEngine, random, torch_subject
from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES
from llorch.files.tensor_names import inventory
from llorch.pytorch.device import target

from .rounds import Results

TYPES = (None, "Q8_0", "Q4_K", "Q4_0")  # types of the matrices; None is bfloat16
TABLES = {"TABLE_4": "Q4_0", "NF4": "Q4_0", "TABLE_8": "Q8_0", "INT8": "Q8_0"}  # folder kind: GGUF type to compare
DECODE = Load(prompt=512, decode=64, batch=1, rounds=5)
PREFILL = Load(prompt=4096, decode=1, batch=1, rounds=5)
ROWS, MATRIX = (1, 2, 4, 8, 16, 32, 64), (14336, 4096)  # of single products: rows of the input; outputs and inputs
Report = Mapping[str, Any]


def prefill_load(config: ModelConfig) -> Load:
    """Choose a prefill of 4096 tokens, or of one less than the context if the context is no longer."""
    return Load(min(PREFILL.prompt, config.max_position_embeddings - 1), 1, 1, PREFILL.rounds)


def measure_llorch(model: MeasuredModel, load: Load) -> dict[str, Any]:
    """Measure llorch's CUDA path; see `llorch.apps.bench.measure.measure`."""
    engine = TorchEngine(model.module, model.target, load)
    subject = torch_subject(model.module, model.target, model.name, model.weights)
    return measure(engine, subject, load, lambda line: click.echo(f"{model.name}, {model.weights}: {line}", err=True))


def same_in_transformers(module: Any, config: ModelConfig) -> Any:
    """Build the model of transformers on the same weights as llorch's; Llama family, equal names of tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama_config = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )  # fmt: skip
    state = {row.huggingface: module.get_parameter(row.huggingface) for row in inventory(config).values()}
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config)
    model.load_state_dict(state, assign=True)
    with torch.device(module.model.norm.weight.device):  # its table is not in the state dict
        model.model.rotary_emb = LlamaRotaryEmbedding(llama_config)
    return model.eval()


@torch.no_grad()
def measure_transformers(model: Any, load: Load, device: torch.device) -> Report:
    """Measure tokens/s of transformers with a static cache, which `generate` compiles for decoding on CUDA.

    Decoding is what a generation takes beyond its first token.
    """
    ids = torch.from_numpy(prompts(load, model.config.vocab_size)).to(device)
    short, full = ([_generate(model, ids, n, device) for _ in range(load.rounds + 2)][2:] for n in (1, load.decode + 1))
    decode = [max(total - first, 1e-9) for total, first in zip(full, short, strict=True)]
    return {
        "prefill": {"tokens_per_s": speeds([load.batch * load.prompt / seconds for seconds in short])},
        "decode": {"tokens_per_s": speeds([load.batch * load.decode / seconds for seconds in decode])},
    }


def _generate(model: Any, ids: torch.Tensor, n: int, device: torch.device) -> float:
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False,
        cache_implementation="static", pad_token_id=0,
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert output.shape[1] == ids.shape[1] + n
    return time.perf_counter() - start


def run(results: Results, part: str, names: Sequence[str], kinds: Sequence[str]) -> None:
    """Measure whole models or single products; nothing without a CUDA device."""
    results.model = part
    if not torch.cuda.is_available():
        results.skip("", f"torch {torch.__version__} finds no CUDA device")
    elif part == "models":
        for name in names:
            add_shape(results, name, "cuda")
    else:
        from .cuda_products import KINDS, add_products

        add_products(results, kinds or list(KINDS), ROWS, MATRIX)


def add_shape(results: Results, name: str, device: str) -> None:
    """Measure everything about one shape, with one model at a time on the device."""
    reports: dict[tuple[str, str], Report] = {}
    for kind in (*TYPES, *TABLES):
        model = random(name, target(device, "bfloat16", "own"), kind, DECODE, compiled=False)
        reports[f"llorch {model.weights}", "decode"] = measure_llorch(model, DECODE)
        if kind is None:
            loads = {"decode": DECODE, "prefill": prefill_load(SHAPES[name])}
            reports["llorch bfloat16", "prefill"] = measure_llorch(model, loads["prefill"])
            hf_model = same_in_transformers(model.module, SHAPES[name])
            for part, load in loads.items():
                reports["transformers", part] = measure_transformers(hf_model, load, model.target.device)
            del hf_model
        del model
        gc.collect()
        torch.cuda.empty_cache()
    add_rows(results, name, reports)


def add_rows(results: Results, name: str, reports: Mapping[tuple[str, str], Report]) -> None:
    """Add speeds, their shares of the device's, and the ratios that have goals."""

    def speed(engine: str, part: str = "decode") -> float:
        return reports[engine, part][part]["tokens_per_s"]["median"]

    for (engine, part), report in reports.items():
        span = report[part]["tokens_per_s"]
        row = {"value": span["median"], "low": span["min"], "high": span["max"], "rounds": 5, "quiet": 5}
        row |= {"bandwidth": report[part]["bytes_per_s"] / 1e9} if "bytes_per_s" in report[part] else {}
        results.rows.append({"model": name, "engine": engine, "variant": "", "what": part, "unit": "tokens/s"} | row)
    dense, prefill = (reports["llorch bfloat16", part][part] for part in ("decode", "prefill"))
    goals = {
        "bfloat16 decode, share of the copy": (dense["share_of_copy"], 0.85),
        "Q8_0 decode / bfloat16 decode": (speed("llorch Q8_0") / speed("llorch bfloat16"), 1.6),
        "Q4_K decode / bfloat16 decode": (speed("llorch Q4_K") / speed("llorch bfloat16"), 2.5),
        **{f"{a} decode / {b} decode": (speed(f"llorch {a}") / speed(f"llorch {b}"), 0.9) for a, b in TABLES.items()},
        "prefill, share of the product": (prefill["share_of_matmul"], 0.65),
        "decode / transformers": (speed("llorch bfloat16") / speed("transformers"), 1.0),
        "prefill / transformers": (speed("llorch bfloat16", "prefill") / speed("transformers", "prefill"), 1.0),
    }
    for title, (value, least) in goals.items():
        row = {"model": name, "engine": title, "variant": "", "unit": ""}
        results.rows += [row | {"what": "ratio", "value": value}, row | {"what": "goal", "value": least}]
