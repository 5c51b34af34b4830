"""Time of one LoRA training step, llorch's against PEFT's, interleaved on the same weights.

    python benchmarks/train_speed.py                                       Qwen2.5-0.5B shape, CPU, 2 threads
    python benchmarks/train_speed.py --device cuda --shape llama-3-8b --dtype bfloat16 --tokens 1024 --packed NF4

Random weights, one copy in memory that both sides read. Both start from PEFT's adapter and take the whole step:
forward, loss over all tokens, backward, clipping, AdamW. Their first losses are printed: sides that compute different
things cannot be compared. PEFT runs as it comes, with transformers' default attention.
"""

import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
from rounds import OTHERS, busy_seconds, processor, set_threads

SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-3-8b")
Step = Callable[[], float]  # takes one step and returns its loss


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(SHAPES), default=SHAPES[0], show_default=True)
@click.option("--layers", type=int, help="Fewer layers than the shape has.")
@click.option("--dtype", "dtypes", multiple=True, default=["float32", "bfloat16"], show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--batch", default=2, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="In each row.")
@click.option("--r", "rank", default=8, show_default=True)
@click.option("--modules", default="q_proj,v_proj", show_default=True)
@click.option("--chunk", default=256, show_default=True, help="Rows of logits at a time on our side; 0: all at once.")
@click.option("--packed", multiple=True, metavar="KIND", help="llorch over packed matrices too: NF4, Q4_0 or others.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
def main(
    shape: str, layers: int | None, dtypes: tuple[str, ...], device: str, batch: int, tokens: int, rank: int,
    modules: str, chunk: int, packed: tuple[str, ...], rounds: int, threads: int, output: Path | None,
) -> None:  # fmt: skip
    """Entry point."""
    import torch

    torch.set_num_threads(threads)
    host = torch.cuda.get_device_name() if device.startswith("cuda") else processor()
    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    print(f"{host}, {threads} threads, {packages}; {shape}, {batch} x {tokens} tokens, r={rank} on {modules}")
    samples = {}
    for dtype in dtypes:
        module_names = tuple(modules.split(","))
        sides = build_sides(shape, layers, dtype, device, (batch, tokens), rank, module_names, chunk or None, packed)
        print(f"{dtype}: first loss " + ", ".join(f"{name} {step():.6f}" for name, step in sides.items()))
        samples[dtype] = interleaved(sides, rounds, device)
        report(dtype, samples[dtype])
    if output is not None:
        output.write_text(json.dumps({"machine": host, "threads": threads, **packages, "samples": samples}, indent=1))


def build_sides(
    shape: str, layers: int | None, dtype: str, device: str, size: tuple[int, int], rank: int,
    modules: tuple[str, ...], chunk: int | None, packed: tuple[str, ...] = (),
) -> dict[str, Step]:  # fmt: skip
    """Build both sides on the same weights, and llorch over packed ones, with the same adapter and tokens."""
    from dataclasses import replace

    import torch

    from llorch.families.real_shapes import SHAPES as CONFIGS
    from llorch.pytorch.device import target
    from llorch.pytorch.random_weights import kind_named, random_model

    config = CONFIGS[shape]
    config = config if layers is None else replace(config, n_layers=layers)
    place = target(device, dtype)
    module = random_model(config, place)
    ids = torch.randint(0, config.vocab_size, size, generator=torch.Generator().manual_seed(0))
    peft, adapter = peft_side(module, rank, modules, ids.to(place.device))
    models = {"llorch": module} | {f"llorch {name}": random_model(config, place, kind_named(name)) for name in packed}
    return {name: our_side(model, adapter, ids, place, chunk) for name, model in models.items()} | {"peft": peft}


def peft_side(module, rank: int, modules: tuple[str, ...], ids):
    """Make PEFT's step over transformers with llorch's weights, and its adapter, B not zero, for llorch."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from llorch.files.export_huggingface import huggingface_config
    from llorch.files.quant import GGMLType

    values = huggingface_config(module.config, GGMLType.F32, path=Path("shape"))
    config = AutoConfig.for_model(str(values["model_type"]), **{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(module.state_dict(), assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(ids.device)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(modules), task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, lora).train()
    trainable = {name: parameter for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    torch.manual_seed(0)
    for name, parameter in trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-4)

    def step() -> float:
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, {name: parameter.detach().float().cpu().numpy().copy() for name, parameter in trainable.items()}


def our_side(module, arrays: dict, ids, place, chunk: int | None) -> Step:
    """Make llorch's step, as `llorch lora train` takes it."""
    import numpy as np
    import torch

    from llorch.lora.adapter import LoraTensors, checked
    from llorch.lora.config import LoraConfig
    from llorch.pytorch.lora.adapters import attach, trainable_parameters
    from llorch.pytorch.train.adamw import AdamW
    from llorch.pytorch.train.forward import hidden_states
    from llorch.pytorch.train.loading import prepare
    from llorch.pytorch.train.loss import loss_sum
    from llorch.training.batch import Batch

    module_names = tuple(sorted({name.split(".")[-4] for name in arrays}))
    rank = next(iter(arrays.values())).shape[0]
    lora = LoraConfig(r=rank, lora_alpha=2.0 * rank, target_modules=module_names)
    key = "base_model.model.{}.lora_{}.default.weight"
    tensors = {
        name: LoraTensors(arrays[key.format(target.path, "A")], arrays[key.format(target.path, "B")])
        for name, target in lora.targets(module.config).items()
    }
    prepare(module, place)
    attach(module, checked(lora, tensors, module.config), trainable=True)
    optimizer = AdamW(
        trainable_parameters(module), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, lr_ratio=1.0, eight_bit=False
    )
    rows = ids.numpy()
    labels = rows.copy()
    labels[:, 0] = -100
    positions = np.tile(np.arange(rows.shape[1]), (len(rows), 1))
    batch = Batch(rows, labels, positions, np.zeros_like(rows), np.arange(len(rows)))

    def step() -> float:
        hidden = hidden_states(module.train(), batch, place.device)
        loss_total = loss_sum(hidden, module.lm_head, torch.from_numpy(labels), label_smoothing=0.0, chunk=chunk)
        loss = loss_total / batch.n_trained
        loss.backward()
        optimizer.clip(1.0)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        return loss.item()

    return step


def interleaved(sides: dict[str, Step], rounds: int, device: str) -> dict[str, list[tuple[float, float]]]:
    """Time every side in every round: seconds, and the share of the processors that other programs had."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            busy, cpu_start, start = busy_seconds(), time.process_time(), time.perf_counter()
            step()
            if device.startswith("cuda"):
                import torch

                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            other_share = max(0.0, busy_seconds() - busy - (time.process_time() - cpu_start)) / seconds / 2
            samples[name].append((seconds, other_share))
    return samples


def report(dtype: str, samples: dict[str, list[tuple[float, float]]]) -> None:
    """Print medians, ranges and the ratio."""
    medians = {}
    for name, measured in samples.items():
        quiet = [seconds for seconds, share in measured if share <= OTHERS] or [seconds for seconds, _ in measured]
        medians[name] = statistics.median(quiet)
        n_quiet = sum(share <= OTHERS for _, share in measured)
        spread = f"({min(quiet):.3f}-{max(quiet):.3f})"
        print(f"{dtype:<9} {name:<11} {medians[name]:.3f} s a step {spread}, {n_quiet} of {len(measured)} rounds quiet")
    print(f"{dtype:<9} llorch / peft: {medians['llorch'] / medians['peft']:.2f}")
    for name in medians.keys() - {"llorch", "peft"}:
        print(f"{dtype:<9} {name} / llorch: {medians[name] / medians['llorch']:.2f}")


if __name__ == "__main__":
    set_threads()
    main()
