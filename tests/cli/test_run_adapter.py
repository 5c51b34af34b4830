"""`llorch run --adapter`: both backends, both kinds of files, another base refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import invoke
from random_adapters import random_adapter

from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.model import load

START = "Once upon a time"
BACKENDS = pytest.mark.parametrize("backend", ["numpy", "torch"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT directory, one that names another base, and a GGUF file, all of one adapter for `story`."""
    made, model = tmp_path_factory.mktemp("adapters"), load("story")
    adapter, base = random_adapter(model.config, lora_alpha=1.0), identity_of(model.weights)
    write_peft(adapter, made / "peft", base=base)
    write_peft(adapter, made / "foreign", base=replace(base, vectors="0" * 64))
    write_lora_gguf(adapter, made / "lora.gguf", model.config)
    return made


@BACKENDS
def test_the_text_is_that_of_the_adapter_and_stderr_says_what_is_known_of_its_base(backend: str, folder: Path):
    model = load("story")
    model.add_adapter("mine", folder / "peft")
    want = "".join(token.text for token in model.generate(START, max_tokens=12, adapter="mine"))
    result = invoke("run", "story", START, "-n", "12", "--backend", backend, "--adapter", str(folder / "peft"))
    assert (result.stdout, result.exit_code) == (want + "\n", 0)
    assert result.stderr == f"{folder / 'peft'}: base: the same, number by number\n"
    assert result.stdout != invoke("run", "story", START, "-n", "12").stdout


@BACKENDS
def test_a_gguf_adapter_makes_the_same_text(backend: str, folder: Path):
    both = [
        invoke("run", "story", START, "-n", "12", "--backend", backend, "--adapter", str(folder / name))
        for name in ("peft", "lora.gguf")
    ]
    assert both[0].stdout == both[1].stdout
    assert "base: unknown" in both[1].stderr


@BACKENDS
def test_an_adapter_of_another_base_is_refused_until_any_will_do(backend: str, folder: Path):
    how = ("run", "story", START, "-n", "3", "--backend", backend, "--adapter", str(folder / "foreign"))
    refused, taken = invoke(*how), invoke(*how, "--any-base")
    assert (refused.stdout, refused.exit_code) == ("", 2)
    assert "BaseMismatch" in refused.stderr
    assert taken.exit_code == 0
    assert "base: another one" in taken.stderr


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (["--adapter", "nowhere"], 3, "nowhere: no such adapter"),
        (["--any-base"], 2, "--any-base goes with --adapter"),
    ],
)
def test_mistakes_are_named(options: list[str], code: int, problem: str):
    result = invoke("run", "story", START, "-n", "1", *options)
    assert (result.stdout, result.exit_code) == ("", code)
    assert problem in " ".join(result.stderr.split())


def test_an_adapter_of_a_model_of_other_shapes_is_refused(folder: Path):
    result = invoke("run", "micro-llama", START, "--adapter", str(folder / "peft"))
    assert (result.stdout, result.exit_code) == ("", 2)
    assert str(folder / "peft") in result.stderr
