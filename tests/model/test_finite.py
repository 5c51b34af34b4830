"""Finite weights whose products are not: no token comes of them, and the first stage is named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.random_adapters import random_adapter
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses
from safetensors.numpy import load_file, save_file

import llorch
from llorch.files.convert import convert
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.finite import name_first_stage
from llorch.ops.numerics import GGML
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import NonFiniteRun

GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
DRAWN = SamplingSettings(temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gate and up projections of layer 1 are finite and large; what SwiGLU makes of them is not."""
    made = tmp_path_factory.mktemp("large") / "model"
    convert(builtin_path("micro-llama"), made)
    tensors = load_file(made / "model.safetensors")
    tensors |= {name: tensors[name] * np.float32(1e30) for name in (GATE, UP)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def one_of_a_batch(folder: Path) -> Iterator[Any]:
    return llorch.load_torch(folder).generate_batch([[5, 6], [7]], settings=[SamplingSettings(), DRAWN])


@pytest.mark.parametrize("settings", [SamplingSettings(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "start",
    [
        lambda folder, how: llorch.load(folder).generate([5, 6], settings=how),
        lambda folder, how: llorch.load(folder, numerics=GGML).generate([5, 6], settings=how),
        lambda folder, how: llorch.load_torch(folder).generate([5, 6], settings=how),
        lambda folder, how: one_of_a_batch(folder),
    ],
    ids=["numpy", "ggml", "torch", "batch"],
)
def test_a_run_that_overflows_ends_at_once_and_names_the_stage(start: Any, settings: SamplingSettings, folder: Path):
    with refuses(NonFiniteRun, "l1.ffn_act", "float32", where=folder) as caught:
        next(start(folder, settings))
    assert caught.value.stage == "l1.ffn_act"


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_command_ends_with_one_line_and_no_token(backend: str, folder: Path):
    result = invoke("run", str(folder), "Once", "-n", "5", "--backend", backend)
    assert_cli_refuses(result, 2, "l1.ffn_act", where=folder)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_alpha_of_an_adapter_may_overflow_too(backend: str, tmp_path: Path):
    model = llorch.load("micro-llama")
    write_peft(random_adapter(model.config, lora_alpha=1e60), tmp_path / "adapter", base=identity_of(model.weights))
    how = ("--backend", backend, "--adapter", str(tmp_path / "adapter"))
    result = invoke("run", "micro-llama", "Once", "-n", "5", *how)
    assert (result.stdout, result.exit_code) == ("", 2)
    assert_tells(result.stderr.splitlines()[-1], "llorch:", "l0.q_proj", where=builtin_path("micro-llama"))


def test_the_stage_is_named_where_it_begins_after_some_tokens(monkeypatch: pytest.MonkeyPatch):
    tokens = llorch.load("micro-llama").generate([5, 6, 7], ignore_eos=True)
    next(tokens)
    monkeypatch.setattr("llorch.model.forward.swiglu", lambda gate, up: gate * np.float32(np.inf))
    with refuses(NonFiniteRun, "l0.ffn_act") as caught:
        next(tokens)
    assert caught.value.stage == "l0.ffn_act"


def test_hidden_scores_are_no_fault_and_a_second_pass_that_is_finite_blames_the_logits():
    def run(look: Any) -> None:
        look("l0.attn_scores", np.array([1.0, -np.inf]))

    with refuses(NonFiniteRun, "only", where=("x:", "logits")):
        name_first_stage(run, where="x", dtype="float32")
    for wrong in (np.inf, np.nan):
        with refuses(NonFiniteRun, "1 of 2", where="l0.attn_scores"):
            name_first_stage(lambda look, one=wrong: look("l0.attn_scores", np.array([1.0, one])), where="", dtype="")
