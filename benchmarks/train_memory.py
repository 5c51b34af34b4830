"""Peak memory of a LoRA training step, llorch's against PEFT's: loss in chunks, recomputed blocks, 8-bit Adam.

    python benchmarks/train_memory.py                             a vocabulary of 131072, 2 x 512 tokens, CPU
    python benchmarks/train_memory.py --shape qwen2.5-0.5b --dtype bfloat16 --rounds 1

Every side runs in processes of its own, in turn, on the same file of random weights, with a fresh adapter (B = 0, so
both have the loss of the base). A step is forward, loss over all tokens, backward, clipping, AdamW. After one that
warms up, the peak of the resident memory (VmHWM) is set back, and read after the next ones. What lay there before them,
which is weights, optimizer and libraries, is taken off for "of the step". PEFT has transformers' own loss.
Recomputing lets torch import its compiler, once, some 110 MB that count as there before.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
from random_models import QWEN_05B, random_model
from rounds import processor, set_threads

WIDE_VOCABULARY = QWEN_05B | {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 4,
    "vocab_size": 131072,
}  # fmt: skip
SHAPES = {"wide-vocabulary": WIDE_VOCABULARY, "qwen2.5-0.5b": QWEN_05B}
SIDES = {  # name -> (chunk, recomputed blocks); no chunk: all logits at once
    "peft": (None, False),
    "llorch, all logits": (None, False),
    "llorch, chunks": (128, False),
    "llorch, chunks, recomputed": (128, True),
}
Step = Callable[[], float]


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="wide-vocabulary", show_default=True)
@click.option("--layers", type=int, help="Another number than the shape has.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--batch", default=2, show_default=True)
@click.option("--tokens", default=512, show_default=True, help="In each row.")
@click.option("--rounds", default=5, show_default=True, help="Processes of each side.")
@click.option("--steps", default=2, show_default=True, help="Measured in each process.")
@click.option("--threads", default=2, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
@click.option("--side", type=click.Choice(list(SIDES)), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(
    shape: str, layers: int | None, dtype: str, batch: int, tokens: int, rounds: int, steps: int, threads: int,
    output: Path | None, side: str | None, folder: Path | None,
) -> None:  # fmt: skip
    """Entry point."""
    if side is not None and folder is not None:
        print(json.dumps(measured(side, folder, dtype, (batch, tokens), steps, threads)))
        return
    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    print(f"{processor()}, {threads} threads, {packages}; {shape}, {dtype}, {batch} x {tokens} tokens, r=8 on q,v")
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    config = SHAPES[shape] if layers is None else SHAPES[shape] | {"num_hidden_layers": layers}
    with random_model(config) as folder_of_model:
        for round_number in range(rounds):
            for name in SIDES:
                click.echo(f"round {round_number + 1} of {rounds}: {name}", err=True)
                samples[name].append(in_a_process(name, folder_of_model))
    report(samples)
    print(eight_bit())
    if output is not None:
        output.write_text(json.dumps({"machine": processor(), "threads": threads, **packages, "samples": samples}))


def in_a_process(side: str, folder: Path) -> dict[str, float]:
    """Run one side in a child process, with the options of this process."""
    command = [sys.executable, *sys.argv, "--side", side, "--folder", str(folder)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}  # glibc returns large arrays at once, so peaks are exact
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True, env=env)
    if process.returncode:
        print(f"NOT RUN: {side}: its process ended with status {process.returncode}")
        sys.exit(3)
    return json.loads(process.stdout.splitlines()[-1])


def measured(side: str, folder: Path, dtype: str, size: tuple[int, int], steps: int, threads: int) -> dict[str, float]:
    """Load one side and measure its steps: loss of the first, bytes before and at the peak, seconds of the fastest."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, size)
    make = peft_side if side == "peft" else our_side
    step = make(folder, getattr(torch, dtype), ids, *SIDES[side])
    loss = step()
    bytes_before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    seconds, cpu = [], []
    for _ in range(steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {"loss": loss, "before": bytes_before, "peak": resident("VmHWM"), "seconds": min(seconds), "cpu": min(cpu)}


def resident(field: str) -> int:
    """Count the bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peft_side(folder: Path, dtype, ids, chunk: int | None, recomputed: bool) -> Step:
    """Make the step of PEFT over transformers, which computes the loss itself."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_side(folder: Path, dtype, ids, chunk: int | None, recomputed: bool) -> Step:
    """Make llorch's step, as `llorch lora train` takes it."""
    import numpy as np
    import torch

    from llorch.pytorch.lora.adapters import trainable_parameters
    from llorch.pytorch.train.adamw import AdamW
    from llorch.pytorch.train.forward import hidden_states
    from llorch.pytorch.train.loss import loss_sum
    from llorch.training.batch import IGNORED, Batch

    module, kwargs = our_module(folder, dtype, recomputed), {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    optimizer = AdamW(trainable_parameters(module), lr_ratio=1.0, eight_bit=False, **kwargs)
    positions, labels = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(), ids.clone()
    labels[:, 0] = IGNORED
    batch = Batch(ids.numpy(), labels.numpy(), positions, np.zeros_like(positions), np.arange(len(ids)))

    def step() -> float:
        hidden = hidden_states(module, batch, torch.device("cpu"))
        loss = loss_sum(hidden, module.lm_head, labels, label_smoothing=0.0, chunk=chunk) / batch.n_trained
        loss.backward()
        optimizer.clip(1.0)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        return loss.item()

    return step


def our_module(folder: Path, dtype, recomputed: bool):
    """Make llorch's model with a fresh adapter."""
    import torch

    from llorch.files import open_weights
    from llorch.lora.config import LoraConfig
    from llorch.lora.initial import initial_adapter
    from llorch.pytorch.device import Target
    from llorch.pytorch.load import load_dense
    from llorch.pytorch.lora.adapters import attach
    from llorch.pytorch.train.forward import checkpoint_gradients
    from llorch.pytorch.train.loading import prepare

    weights = open_weights(folder)
    module = load_dense(weights, dtype=dtype, device=torch.device("cpu")).train()
    prepare(module, Target(torch.device("cpu"), dtype))
    if recomputed:
        checkpoint_gradients(module)
    lora = LoraConfig(target_modules=("q_proj", "v_proj"))
    attach(module, initial_adapter(lora, weights, init="default", seed=0), trainable=True)
    return module


def report(samples: dict[str, list[dict[str, float]]]) -> None:
    """Print medians of all rounds, as Markdown, and their ratios."""
    medians = {
        name: {quantity: statistics.median(sample[quantity] for sample in side_samples) for quantity in side_samples[0]}
        for name, side_samples in samples.items()
    }
    columns = ["", "loss", "before, MB", "peak, MB", "of the step, MB", "s per step", "of processors"]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, side in medians.items():
        sizes = [f"{size / 1e6:.0f}" for size in (side["before"], side["peak"], side["peak"] - side["before"])]
        print(f"| {name} | {side['loss']:.7f} | {' | '.join(sizes)} | {side['seconds']:.2f} | {side['cpu']:.2f} |")
    peft, chunks, rerun = medians["peft"], medians["llorch, chunks"], medians["llorch, chunks, recomputed"]
    print(f"\npeak of chunks / peft: {chunks['peak'] / peft['peak']:.2f}", end="; ")
    print(f"losses differ by {abs(chunks['loss'] - peft['loss']) / peft['loss']:.1e} of peft's")
    step_sizes = [side["peak"] - side["before"] for side in (rerun, chunks)]
    print(f"recomputed / kept: memory of the step {step_sizes[0] / step_sizes[1]:.2f}", end=", ")
    print(f"time {rerun['seconds'] / chunks['seconds']:.2f}, of processors {rerun['cpu'] / chunks['cpu']:.2f}")


def eight_bit() -> str:
    """Count the bytes per parameter of AdamW's state, for adapters of the Qwen2.5-0.5B shape."""
    import torch

    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.lora.adapter import expected_shapes
    from llorch.lora.config import ALL_LINEAR, LoraConfig
    from llorch.pytorch.train.adamw import AdamW

    model, lines = config_from_huggingface(QWEN_05B, path=Path("config.json")), []
    for name, modules in (("all matrices", ALL_LINEAR), ("q and v", ("q_proj", "v_proj"))):
        shapes = expected_shapes(LoraConfig(target_modules=modules), model)
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        n, sizes = sum(parameter.numel() for parameter in params.values()), []
        for flag in (False, True):
            adamw = AdamW(params, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, lr_ratio=1.0, eight_bit=flag)
            sizes.append(sum(tensor.nbytes for tensor in adamw.state().values()) / n)
        lines.append(f"AdamW, r=8 on {name}, {n} parameters: {sizes[0]:.2f} bytes each, in 8 bits {sizes[1]:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    set_threads()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
