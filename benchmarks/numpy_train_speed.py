"""Time of one NumPy training step in float64: forward, loss, hand-written backward and AdamW.

python benchmarks/numpy_train_speed.py        every built-in model, 2 x 128 tokens, r = 8 on all matrices of the layers
"""

import os
import statistics
import time

import click
from rounds import machine, set_threads


@click.command(help=__doc__)
@click.option("--tokens", default=128, show_default=True, help="In each of two rows.")
@click.option("--rounds", default=7, show_default=True, help="After one that warms up.")
@click.option("--threads", default=2, show_default=True)
def main(tokens: int, rounds: int, threads: int) -> None:
    """Entry point."""
    from llorch.runtime.builtin import BUILTIN

    print(f"{machine()}; {os.environ['OMP_NUM_THREADS']} threads; 2 x {tokens} tokens")
    for name in BUILTIN:
        seconds = [step_time(name, tokens) for _ in range(rounds + 1)][1:]
        print(f"{name:<13} {statistics.median(seconds):.3f} s ({min(seconds):.3f}-{max(seconds):.3f})")


def step_time(name: str, tokens: int) -> float:
    """Time the first step of a new adapter, in seconds."""
    import numpy as np

    from llorch.files import open_weights
    from llorch.lora.config import LoraConfig
    from llorch.lora.initial import initial_adapter
    from llorch.runtime.builtin import builtin_path
    from llorch.training.adamw import adamw_step, clip_by_norm
    from llorch.training.batch import IGNORED, Batch
    from llorch.training.numpy_step import loss_and_gradients

    weights = open_weights(builtin_path(name)).astype(np.float64)
    adapter = initial_adapter(LoraConfig(r=8), weights, init="default", seed=0)
    ids = np.random.default_rng(0).integers(0, weights.config.vocab_size, (2, tokens))
    labels = np.where(np.arange(tokens) == 0, IGNORED, ids)
    batch = Batch(ids, labels, np.tile(np.arange(tokens), (2, 1)), np.zeros_like(ids), np.arange(2))
    flat = {key: array.astype(np.float64) for key, array in adapter.flat().items()}
    start = time.perf_counter()
    _, grads = loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0, parameters=flat)
    clipped, _ = clip_by_norm(grads, max_norm=1.0)
    for key, gradient in clipped.items():
        zero = np.zeros_like(gradient)
        adamw_step(
            flat[key], gradient, zero, zero, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        )  # fmt: skip
    return time.perf_counter() - start


if __name__ == "__main__":
    set_threads()
    main()
