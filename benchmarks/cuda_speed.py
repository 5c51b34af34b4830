"""CUDA path in one command: its tests, its checkpoints and its speed, written to one JSON file.

    python benchmarks/cuda_speed.py          on a machine with a CUDA device; needs the golden and dev extras

Speed is that of 7B and 8B shapes with random weights: decode of one prompt behind a context of 512 tokens in bfloat16,
in types of GGUF files and in kinds of quantised folders, and prefill of 4096 tokens. Each is beside the copy and the
product of the device measured in the same run, and beside transformers with static cache and compile on the same
bfloat16 weights. Without a CUDA device nothing is measured and the exit code is 3.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from llorch.apps.bench.measure import Load, measure, prompts, speeds
from llorch.apps.bench.torch import MeasuredModel, TorchEngine, random, torch_subject
from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES
from llorch.files.tensor_names import inventory
from llorch.pytorch.device import target

SHAPE_NAMES = ("llama-2-7b", "llama-3-8b")
TYPES = (None, "Q8_0", "Q4_K", "Q4_0")  # types of the matrices; None is bfloat16
TABLES = {"TABLE_4": "Q4_0", "NF4": "Q4_0", "TABLE_8": "Q8_0", "INT8": "Q8_0"}  # folder kind: GGUF type to compare
DECODE = Load(prompt=512, decode=64, batch=1, rounds=5)
PREFILL = Load(prompt=4096, decode=1, batch=1, rounds=5)
NOT_RUN, FAILED = 3, 1


@dataclass(frozen=True)
class Goal:
    """Figure and the least value that it must reach."""

    name: str
    actual: float
    least: float

    @property
    def met(self) -> bool:
        """True if the figure reaches its goal."""
        return self.actual >= self.least


def prefill_load(config: ModelConfig) -> Load:
    """Choose a prefill of 4096 tokens, or of one less than the context if the context is no longer."""
    return Load(min(PREFILL.prompt, config.max_position_embeddings - 1), 1, 1, PREFILL.rounds)


def measure_llorch(model: MeasuredModel, load: Load) -> dict:
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
def measure_transformers(model: Any, load: Load, device: torch.device) -> dict[str, dict[str, float]]:
    """Measure tokens/s of transformers with a static cache, which `generate` compiles for decoding on CUDA.

    Decoding is what a generation takes beyond its first token.
    """
    ids = torch.from_numpy(prompts(load, model.config.vocab_size)).to(device)
    short, full = ([_generate(model, ids, n, device) for _ in range(load.rounds + 2)][2:] for n in (1, load.decode + 1))
    decode = [max(total - first, 1e-9) for total, first in zip(full, short, strict=True)]
    return {
        "prefill": speeds([load.batch * load.prompt / seconds for seconds in short]),
        "decode": speeds([load.batch * load.decode / seconds for seconds in decode]),
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


def goals(decode: Mapping[str, dict], prefill: dict, reference: Mapping[str, dict]) -> list[Goal]:
    """List the goals of one shape from llorch's decode runs by type of weights, its prefill run, and transformers."""

    def speed(run: dict, part: str) -> float:
        return run[part]["tokens_per_s"]["median"]

    dense = speed(decode["bfloat16"], "decode")
    tables = {f"{name} decode / {ggml} decode": (decode[name], decode[ggml]) for name, ggml in TABLES.items()}
    return [
        Goal("bfloat16 decode, share of the copy", decode["bfloat16"]["decode"]["share_of_copy"], 0.85),
        Goal("Q8_0 decode / bfloat16 decode", speed(decode["Q8_0"], "decode") / dense, 1.6),
        Goal("Q4_K decode / bfloat16 decode", speed(decode["Q4_K"], "decode") / dense, 2.5),
        *(Goal(name, speed(a, "decode") / speed(b, "decode"), 0.9) for name, (a, b) in tables.items()),
        Goal("prefill, share of the product", prefill["prefill"]["share_of_matmul"], 0.65),
        Goal("decode / transformers", dense / reference["decode"]["decode"]["median"], 1.0),
        Goal("prefill / transformers", speed(prefill, "prefill") / reference["prefill"]["prefill"]["median"], 1.0),
    ]


def one_shape(name: str, device: str) -> dict:
    """Measure everything about one shape, with one model at a time on the device."""
    decode, prefill, reference = {}, {}, {}
    for kind in (*TYPES, *TABLES):
        measured = random(name, target(device, "bfloat16", "own"), kind, DECODE, compiled=False)
        decode[measured.weights] = measure_llorch(measured, DECODE)
        if kind is None:
            load = prefill_load(SHAPES[name])
            prefill = measure_llorch(measured, load)
            hf_model = same_in_transformers(measured.module, SHAPES[name])
            reference = {
                "decode": measure_transformers(hf_model, DECODE, measured.target.device),
                "prefill": measure_transformers(hf_model, load, measured.target.device),
            }
            del hf_model
        del measured
        gc.collect()
        torch.cuda.empty_cache()
    shape_goals = goals(decode, prefill, reference)
    records = [{"goal": goal.name, "got": goal.actual, "least": goal.least, "met": goal.met} for goal in shape_goals]
    return {"shape": name, "goals": records, "decode": decode, "prefill": prefill, "transformers": reference}


def run(command: Sequence[str], cwd: Path) -> dict:
    """Run a command; return its words, its exit code and the last lines of its output."""
    click.echo(" ".join(command), err=True)
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return {
        "command": list(command),
        "exit_code": process.returncode,
        "tail": (process.stdout + process.stderr).splitlines()[-20:],
    }


def print_goals(shapes: Sequence[dict]) -> None:
    """Print one line per goal."""
    for shape in shapes:
        for goal in shape["goals"]:
            verdict = "met" if goal["met"] else "NOT MET"
            print(f"{shape['shape']}: {goal['goal']}: {goal['got']:.3f}, goal {goal['least']}: {verdict}")


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option("--shape", "names", multiple=True, type=click.Choice(SHAPE_NAMES), default=SHAPE_NAMES)
@click.option("--json", "output", type=click.Path(path_type=Path), default=Path("cuda_speed.json"), show_default=True)
def main(device: str, names: tuple[str, ...], output: Path) -> None:
    """Entry point."""
    if not torch.cuda.is_available():
        print(f"NOT RUN: torch {torch.__version__} finds no CUDA device")
        sys.exit(NOT_RUN)
    root, python = Path(__file__).parents[1], sys.executable
    checks = [
        run([python, "-m", "pytest", "-n", "0", "-m", "gpu", "-q"], root),
        run([python, "-m", "llorch", "verify", "--device", device, "--kernels", "own"], root),
    ]
    shapes = [one_shape(name, device) for name in names]
    first = shapes[0]["prefill"]
    head = {key: first[key] for key in ("device_name", "versions", "date")}
    output.write_text(json.dumps({**head, "checks": checks, "shapes": shapes}, indent=1))
    print_goals(shapes)
    for check in checks:
        print(f"{' '.join(check['command'][1:])}: exit code {check['exit_code']}")
    all_met = all(goal["met"] for shape in shapes for goal in shape["goals"])
    sys.exit(0 if all_met and not any(check["exit_code"] for check in checks) else FAILED)


if __name__ == "__main__":
    main()
