"""Memory and time of a 7B-shaped Q4_K_M file whose matrices stay packed; writes 4.1 GB of random blocks and runs it.

    python benchmarks/large_model.py
    python benchmarks/large_model.py -- verify                                     against llama.cpp running it
    python benchmarks/large_model.py -- verify --numerics exact --against transformers
    python benchmarks/large_model.py --shape 0.5B -- verify --numerics exact       in BF16, against both engines
    python benchmarks/large_model.py --shape 30B-A3B                               128 experts, a file of 18.6 GB

Printed are the file's size, the plan, the peak of the process (the mapped file counts) and the seconds of each token;
or the report of `llorch verify`, its seconds and its peak.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from rounds import machine, set_threads

EXPERTS = "30B-A3B"


@click.command(help=__doc__)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", default=8, show_default=True, help="Tokens of the prompt.")
@click.option("--decode", default=3, show_default=True, help="Tokens decoded.")
@click.option("--shape", type=click.Choice(["7B", "0.5B", EXPERTS]), default="7B", show_default=True)
@click.argument("verify", nargs=-1)
def main(threads: int, prompt: int, decode: int, shape: str, verify: tuple[str, ...]) -> None:
    """Entry point."""
    import llorch
    from llorch.model.cache import KVCache

    print(f"{machine()}; {threads} threads")
    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as folder:
        path = Path(folder) / f"{shape}.gguf"
        write(path, shape)
        if verify:
            sys.exit(judge(path, prompt, verify))
        start = time.perf_counter()
        model = llorch.load(path, residency="packed", n_tokens=prompt + decode)
        print(f"opened in {time.perf_counter() - start:.2f} s, {peak():.2f} GB")
        assert model.plan is not None
        print(f"file {path.stat().st_size / 1e9:.2f} GB; {model.plan.describe()}")
        cache = KVCache.of(model.weights)
        for token_ids in (list(range(100, 100 + prompt)), *([7] for _ in range(decode))):
            start = time.perf_counter()
            model.forward(token_ids, cache=cache, last_only=True)
            print(f"{len(token_ids)} tokens in {time.perf_counter() - start:.2f} s")
        print(f"peak {peak():.2f} GB")


def peak() -> float:
    """Measure the largest memory of the process in gigabytes; includes pages of the mapped file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def judge(path: Path, n_tokens: int, verify: tuple[str, ...]) -> int:
    """Run `llorch verify` on the file and return its exit code."""
    tokens, start = ",".join(str(100 + i) for i in range(n_tokens)), time.perf_counter()
    status = subprocess.run([sys.executable, "-m", "llorch", *verify, path, "--tokens", tokens]).returncode
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    size = path.stat().st_size / 1e9
    print(f"{time.perf_counter() - start:.0f} s, peak {peak:.2f} GB with the mapped file of {size:.2f}")
    return status


def write(path: Path, shape: str) -> None:
    """Write the file, one tensor after the other."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    from llorch.families.table import FAMILIES
    from llorch.files.export import add_hyperparameters
    from llorch.files.tensor_names import inventory

    config = SHAPES[shape]()
    typed_weights = [
        (weight, None if weight.stays_f32 else type_of(weight.name, shape, config.n_layers))
        for weight in inventory(config).values()
    ]
    writer = GGUFWriter(path, FAMILIES[config.family].gguf)
    writer.add_tokenizer_model("no_vocab")
    add_hyperparameters(writer, config)
    for weight, ggml_type in typed_weights:
        n_bytes = size_of(weight.shape, ggml_type)
        raw_dtype = GGMLQuantizationType(ggml_type) if ggml_type is not None else None
        writer.add_tensor_info(weight.gguf, weight.shape, np.dtype(np.float32), n_bytes, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for i, (weight, ggml_type) in enumerate(typed_weights):
        print(f"writing {weight.name}", file=sys.stderr)
        writer.write_tensor_data(
            make_float_tensor(weight.shape, i) if ggml_type is None else blocks(weight.shape, ggml_type, i)
        )
    writer.close()


def llama_7b():
    """Make a configuration with the shape of Llama 2 7B."""
    from dataclasses import replace

    from llorch.judging.expectations.quantised_models import MODELS

    return replace(
        MODELS["Q4_K"].config,
        hidden_size=4096, intermediate_size=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128,
        vocab_size=32000, max_position_embeddings=4096,
    )  # fmt: skip


def qwen_05b():
    """Make a configuration with the shape of Qwen2.5-0.5B."""
    from llorch.families.read_huggingface import config_from_huggingface

    values = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    }  # fmt: skip
    return config_from_huggingface(values, path=Path("config.json"))


def qwen3_30b_a3b():
    """Make a configuration with the shape of Qwen3-30B-A3B."""
    from llorch.families.read_huggingface import config_from_huggingface

    values = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    }  # fmt: skip
    return config_from_huggingface(values, path=Path("config.json"))


SHAPES = {"7B": llama_7b, "0.5B": qwen_05b, EXPERTS: qwen3_30b_a3b}


def type_of(name: str, shape: str, n_layers: int):
    """Choose the type of a matrix in a Q4_K_M file, or BF16."""
    from llorch.files.quant import GGMLType

    if shape == "0.5B":
        return GGMLType.BF16
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    six_bit = {*range(n_layers // 8), *range(n_layers * 7 // 8, n_layers), *range(2, n_layers, 3)}  # as llama-quantize
    is_six_bit = name == "lm_head" or (layer in six_bit and name.endswith(("v_proj", "down_proj")))
    return GGMLType.Q6_K if is_six_bit else GGMLType.Q4_K


def size_of(shape: tuple[int, ...], kind) -> int:
    """Count the bytes of a tensor; None is F32."""
    import math

    from llorch.files.quant import BLOCK_SIZES

    n_elements, (size, n_bytes) = math.prod(shape), (1, 4) if kind is None else BLOCK_SIZES[kind]
    return n_elements // size * n_bytes


def make_float_tensor(shape: tuple[int, ...], seed: int):
    """Make norm gains of one, or router weights, which must not be equal."""
    import numpy as np

    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / 16


def blocks(shape: tuple[int, ...], kind, shift: int):
    """Make random blocks and repeat them; their contents do not matter here."""
    import numpy as np

    from llorch.files.quant import BLOCK_SIZES
    from llorch.judging.expectations.quantised_models import random_blocks

    n_bytes = BLOCK_SIZES[kind][1]
    rolled = np.roll(random_blocks(kind, 1 << 12, key=kind.name), shift, axis=0)
    return np.resize(rolled, (size_of(shape, kind) // n_bytes, n_bytes)).reshape(-1).view(np.int8)


if __name__ == "__main__":
    set_threads()
    main()
