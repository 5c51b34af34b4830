"""SmolLM2 in use: a LoRA adapter trained beside PEFT, and the model served to a client."""

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
    """Train an adapter beside PEFT, from the same first adapter on the same batches."""
    import torch

    from llorch.files import open_weights
    from llorch.judging.tolerances.training import of_dump
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training
    from llorch.training.settings import TrainSettings

    torch.set_num_threads(n_threads)
    base, run = decoded_folder(), work("run")
    chosen: dict[str, Any] = {
        "steps": STEPS,
        "batch_size": 1,
        "max_length": MAX_LENGTH,
        "schedule": "constant",
        "lr": 1e-3,
    }
    data = str(ROOT / "llorch" / "examples" / "pirate" / "train.jsonl")  # alone it has no validation set
    settings = TrainSettings(model=str(base), data=data, warmup_steps=0, eval_every=0, **chosen)
    progress("lora: PEFT")
    expected = list(train_by_peft(base, Training(plan_training(settings))))
    progress("lora: llorch lora train")
    words = [f"--{key.replace('_', '-')}={value}" for key, value in chosen.items()]
    words += ["--warmup-steps=0", "--eval-every=0", f"--threads={n_threads}"]
    command("lora", "train", str(base), "--data", data, "-o", str(run), *words)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    actual = [line["loss"] for line in lines if "loss" in line]
    tolerance = of_dump(open_weights(base).config, "loss_curve", "chained", "float32", MAX_LENGTH).error
    errors = [abs(ours - theirs) / theirs for ours, theirs in zip(actual, expected, strict=True)]
    note = f"loss {expected[0]:.4f} to {expected[-1]:.4f}, largest difference {max(errors):.1e} of it, "
    note += f"tolerance {tolerance:.1e}"
    yield Line(
        f"SmolLM2, losses of {STEPS} LoRA steps", "PEFT", STEPS, sum(not error <= tolerance for error in errors), note
    )
    yield adapter_line(base, run)


def train_by_peft(base: Path, training: Any) -> Iterator[float]:
    """Train by PEFT and torch on the batches of a training; the loss of every step."""
    import torch
    from helpers.training_passes import peft_name
    from peft import LoraConfig, get_peft_model
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    adapter, settings = training.adapter, training.settings
    ends = sorted({target.path.rpartition(".")[2] for target in adapter.targets.values()})
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    kind = LoraConfig(task_type="CAUSAL_LM", r=settings.r, lora_alpha=settings.alpha, target_modules=ends)
    model = get_peft_model(model, kind).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {peft_name(flat, adapter.targets): array for flat, array in adapter.flat().items()}
    if first.keys() != trained.keys():
        raise RuntimeError(f"peft: trains other tensors: {sorted(first.keys() ^ trained.keys())[:3]}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(first[name]))
    optimizer = torch.optim.AdamW(trained.values(), lr=settings.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for step in range(STEPS):
        (batch,) = training.plan.order.step(step)
        ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
        logits = model(input_ids=ids, attention_mask=torch.from_numpy(batch.positions >= 0).long()).logits
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = cross_entropy(*flat, ignore_index=-100, reduction="sum") / batch.n_trained
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress(f"lora: PEFT, step {step + 1} of {STEPS}")
        yield loss.item()


def adapter_line(base: Path, run: Path) -> Line:
    """Compare logits with the adapter, loaded by PEFT and by llorch."""
    from llorch.engines.peft import peft_logits
    from llorch.judging.tolerances.training import of_dump
    from llorch.model.model import load

    model = load(base)
    ids = model.tokenizer.encode(PROMPT)
    without = model.forward(ids)
    model.add_adapter("run", run)
    actual, expected = model.forward(ids, adapter="run"), peft_logits(base, run, ids)
    error, moved = (float(np.linalg.norm(one - expected) / np.linalg.norm(expected)) for one in (actual, without))
    tolerance = of_dump(model.config, "logits", "chained", "float32", len(ids)).error
    note = f"logits {error:.1e} apart, limit {tolerance:.1e}; the adapter moves them by {moved:.1e}"
    return Line("SmolLM2, adapter loaded", "PEFT", 1, int(not error <= tolerance < moved), note)


def served(n_threads: int) -> Iterator[Line]:
    """Ask a server by the openai client, and compare with `llorch run`."""
    from openai import OpenAI

    path, threads = str(smollm2()), ("--threads", str(n_threads))
    more = ("-n", str(N_NEW), *threads)
    progress("served: llorch run")
    plain, chat = command("run", path, PROMPT, *more), command("run", path, "--chat", PROMPT, *more)
    words = [sys.executable, "-m", "llorch", "serve", path, "--port", "0", "--ctx", "256", *threads]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
            progress(f"served: {address}")
            client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
            name = client.models.list().data[0].id
            how: dict[str, Any] = {"model": name, "max_tokens": N_NEW, "temperature": 0}
            message: Any = [{"role": "user", "content": PROMPT}]
            made = client.completions.create(prompt=PROMPT, **how).choices[0].text
            answer = client.chat.completions.create(messages=message, **how).choices[0].message.content
            stream = client.completions.create(prompt=PROMPT, stream=True, **how)
            streamed = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        finally:
            server.terminate()
    for what, actual, expected in (("text", made, plain), ("streamed text", streamed, plain), ("chat", answer, chat)):
        same = (actual or "").rstrip("\n") == expected.rstrip("\n")
        yield Line(
            f"SmolLM2 served, {what}",
            "openai client, llorch run",
            1,
            int(not same),
            "" if same else repr((actual, expected)),
        )


def command(*words: str) -> str:
    """Run a verb in a process of its own; its text."""
    done = subprocess.run(
        [sys.executable, "-m", "llorch", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"llorch {' '.join(words[:2])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
