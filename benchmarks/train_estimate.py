"""The memory that `llorch lora train` prints before its first step, against the resident memory of that run.

    python benchmarks/train_estimate.py                  three shapes of random weights, on the CPU
    python benchmarks/train_estimate.py --tokens 1024 --threads 2

Each run is a process of its own, which makes two steps. The peak of its resident memory (VmHWM) is set back when the
model is loaded. The command ends with 1 where an estimate is more than 15 % off.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from random_models import QWEN_05B, random_model
from rounds import processor

SHAPES: dict[str, dict[str, object]] = {
    "wide head": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 151936},
    "deep": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 8192},
    "even": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 32768},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "all logits": {"chunk": 0},
    "DoRA, dropout": {"dora": True, "dropout": 0.1},
}
TOLERANCES = 0.15  # largest error, as a share of the measured memory


@click.command(help=__doc__)
@click.option("--tokens", default=384, show_default=True, help="In each row.")
@click.option("--rows", default=2, show_default=True, help="Of a forward pass.")
@click.option("--threads", default=1, show_default=True)
@click.option("--run", hidden=True, help="Settings of one run, as JSON.")
def main(tokens: int, rows: int, threads: int, run: str | None) -> None:
    """Entry point."""
    if run is not None:
        print(json.dumps(measured(json.loads(run), threads)))
        return
    print(f"{processor()}, {threads} threads; {rows} x {tokens} tokens, r=8 on all matrices, float32\n")
    print("| shape | run | estimated, GB | measured, GB | ratio |\n|---|---|---|---|---|")
    worst = max(abs(ratio - 1) for name in SHAPES for ratio in ratios(name, tokens, rows, threads))
    print(f"\nlargest error {worst:.0%}")
    sys.exit(worst > TOLERANCES)


def ratios(name: str, tokens: int, rows: int, threads: int) -> list[float]:
    """Run a shape with all settings, and print a row for each."""
    config, memory_ratios = QWEN_05B | {"num_attention_heads": 4} | SHAPES[name], list[float]()
    with random_model(config) as folder, tempfile.TemporaryDirectory() as data_folder:
        data = Path(data_folder) / "data.jsonl"
        draws = random.Random(0)
        lines = (json.dumps({"input_ids": [draws.randrange(1000) for _ in range(tokens)]}) for _ in range(2 * rows))
        data.write_text("\n".join(lines))
        for setting_name, options in SETTINGS.items():
            settings = {"model": str(folder), "data": str(data), "batch_size": rows, "steps": 2, "r": 8, **options}
            command = [sys.executable, __file__, "--threads", str(threads), "--run", json.dumps(settings)]
            sizes = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            memory_ratios.append(sizes["estimated"] / sizes["measured"])
            figures = " | ".join(f"{sizes[key] / 1e9:.2f}" for key in ("estimated", "measured"))
            print(f"| {name} | {setting_name} | {figures} | {memory_ratios[-1]:.2f} |", flush=True)
    return memory_ratios


def measured(settings: dict[str, Any], threads: int) -> dict[str, int]:
    """Train in this process; return estimated and measured peak bytes."""
    import torch

    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training
    from llorch.training.settings import TrainSettings

    torch.set_num_threads(threads)
    training = Training(plan_training(TrainSettings(**settings)))
    estimate = training.memory
    assert estimate is not None
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    for _ in range(settings["steps"]):
        training.run_step()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return {"estimated": estimate.peak, "measured": peak}


if __name__ == "__main__":
    main()
