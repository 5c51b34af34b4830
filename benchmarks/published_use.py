"""SmolLM2 in use: a LoRA adapter trained as by PEFT, and the model served to a client."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from published_lines import PROMPT, ROOT, Line, decoded_folder, progress, smollm2, work

STEPS, MAX_LENGTH, N_NEW = 20, 64, 32


def lora(n_threads: int) -> Iterator[Line]:
    """Train an adapter with llorch and PEFT, from the same initial adapter on the same batches."""
    import torch

    from llorch.files import open_weights
    from llorch.judging.tolerances.training import of_dump
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training
    from llorch.training.settings import TrainSettings

    torch.set_num_threads(n_threads)
    base, run = decoded_folder(), work("run")
    settings_values: dict[str, Any] = {
        "steps": STEPS,
        "batch_size": 1,
        "max_length": MAX_LENGTH,
        "schedule": "constant",
        "lr": 1e-3,
    }
    data = str(ROOT / "llorch" / "examples" / "pirate" / "train.jsonl")  # a single file has no validation split
    settings = TrainSettings(model=str(base), data=data, warmup_steps=0, eval_every=0, **settings_values)
    progress("lora: PEFT")
    expected = list(train_by_peft(base, Training(plan_training(settings))))
    progress("lora: llorch lora train")
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings_values.items()]
    options += ["--warmup-steps=0", "--eval-every=0", f"--threads={n_threads}"]
    command("lora", "train", str(base), "--data", data, "-o", str(run), *options)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    actual = [line["loss"] for line in lines if "loss" in line]
    tolerance = of_dump(open_weights(base).config, "loss_curve", "chained", "float32", MAX_LENGTH).error
    errors = [abs(llorch_loss - peft_loss) / peft_loss for llorch_loss, peft_loss in zip(actual, expected, strict=True)]
    note = f"loss {expected[0]:.4f} to {expected[-1]:.4f}, largest difference {max(errors):.1e} of it, "
    note += f"tolerance {tolerance:.1e}"
    yield Line(
        f"SmolLM2, losses of {STEPS} LoRA steps", "PEFT", STEPS, sum(not error <= tolerance for error in errors), note
    )
    yield adapter_line(base, run)


def train_by_peft(base: Path, training: Any) -> Iterator[float]:
    """Train with PEFT and torch on the batches of a training; yield the loss of every step."""
    import torch
    from helpers.training_passes import peft_name
    from peft import LoraConfig, get_peft_model
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    adapter, settings = training.adapter, training.settings
    module_names = sorted({target.path.rpartition(".")[2] for target in adapter.targets.values()})
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=settings.r, lora_alpha=settings.alpha, target_modules=module_names)
    model = get_peft_model(model, config).train()
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    initial_arrays = {peft_name(flat, adapter.targets): array for flat, array in adapter.flat().items()}
    if initial_arrays.keys() != trainable.keys():
        raise RuntimeError(f"peft: trains other tensors: {sorted(initial_arrays.keys() ^ trainable.keys())[:3]}")
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(torch.from_numpy(initial_arrays[name]))
    optimizer = torch.optim.AdamW(trainable.values(), lr=settings.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for step in range(STEPS):
        (batch,) = training.plan.order.step(step)
        ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
        logits = model(input_ids=ids, attention_mask=torch.from_numpy(batch.positions >= 0).long()).logits
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = cross_entropy(*flat, ignore_index=-100, reduction="sum") / batch.n_trained
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable.values(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress(f"lora: PEFT, step {step + 1} of {STEPS}")
        yield loss.item()


def adapter_line(base: Path, run: Path) -> Line:
    """Compare logits with the adapter loaded by PEFT and by llorch."""
    from llorch.engines.peft import peft_logits
    from llorch.judging.tolerances.training import of_dump
    from llorch.model.model import load

    model = load(base)
    ids = model.tokenizer.encode(PROMPT)
    base_logits = model.forward(ids)
    model.add_adapter("run", run)
    actual, expected = model.forward(ids, adapter="run"), peft_logits(base, run, ids)
    error, effect = (float(np.linalg.norm(x - expected) / np.linalg.norm(expected)) for x in (actual, base_logits))
    tolerance = of_dump(model.config, "logits", "chained", "float32", len(ids)).error
    note = f"logits {error:.1e} apart, limit {tolerance:.1e}; the adapter moves them by {effect:.1e}"
    return Line("SmolLM2, adapter loaded", "PEFT", 1, int(not error <= tolerance < effect), note)


def served(n_threads: int) -> Iterator[Line]:
    """Ask a server with the openai client, and compare with `llorch run`."""
    from openai import OpenAI

    path, threads = str(smollm2()), ("--threads", str(n_threads))
    options = ("-n", str(N_NEW), *threads)
    progress("served: llorch run")
    completion, chat = command("run", path, PROMPT, *options), command("run", path, "--chat", PROMPT, *options)
    words = [sys.executable, "-m", "llorch", "serve", path, "--port", "0", "--ctx", "256", *threads]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stderr is not None
            address = next(match[0] for line in server.stderr if (match := re.search(r"http://[\d.:]+", line)))
            progress(f"served: {address}")
            client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
            name = client.models.list().data[0].id
            request: dict[str, Any] = {"model": name, "max_tokens": N_NEW, "temperature": 0}
            message: Any = [{"role": "user", "content": PROMPT}]
            text = client.completions.create(prompt=PROMPT, **request).choices[0].text
            answer = client.chat.completions.create(messages=message, **request).choices[0].message.content
            stream = client.completions.create(prompt=PROMPT, stream=True, **request)
            streamed = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        finally:
            server.terminate()
    for part, actual, expected in (
        ("text", text, completion),
        ("streamed text", streamed, completion),
        ("chat", answer, chat),
    ):
        is_equal = (actual or "").rstrip("\n") == expected.rstrip("\n")
        yield Line(
            f"SmolLM2 served, {part}",
            "openai client, llorch run",
            1,
            int(not is_equal),
            "" if is_equal else repr((actual, expected)),
        )


def command(*words: str) -> str:
    """Run a verb in a child process; return its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "llorch", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"llorch {' '.join(words[:2])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
