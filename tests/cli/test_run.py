"""`llorch run`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders.random_adapters import random_adapter
from helpers.command_line import REPOSITORY, invoke, spawn
from helpers.refusals import assert_cli_refuses, assert_tells

import llorch
from llorch.apps.learn.choice import opened
from llorch.apps.learn.lessons import LESSONS
from llorch.cli.outcome import DIFFERS, MISSING, USAGE
from llorch.judging.verify import stored
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.model.model import load

START = "Once upon a time"


def test_the_text_is_that_of_the_python_interface():
    text = "".join(token.text for token in llorch.load("story").generate(START, max_tokens=12))
    assert invoke("run", "story", START, "-n", "12").stdout == text + "\n"


def test_a_prompt_on_stdin_loses_only_its_last_line_end():
    by_argument = invoke("run", "story", START, "-n", "8").stdout
    assert invoke("run", "-n", "8", stdin=START + "\n").stdout == by_argument
    with_line_end = invoke("run", "story", START + "\n", "-n", "8").stdout
    assert invoke("run", "-n", "8", stdin=START + "\n\n").stdout == with_line_end


def test_stdin_is_left_to_the_caller_where_there_is_a_prompt():
    loop = f"printf 'one\\ntwo\\n' | while read line; do {sys.executable} -m llorch run story \"$line\" -n 1; done"
    done = subprocess.run(["sh", "-c", loop], capture_output=True, check=True, cwd=REPOSITORY, text=True)
    assert len(done.stdout.splitlines()) == 2
    assert invoke("run", "story", "-", "-n", "8", stdin=START).stdout == invoke("run", "story", START, "-n", "8").stdout


def test_json_is_one_line_per_token_and_the_last_says_why():
    tokens = [json.loads(line) for line in invoke("run", "story", START, "-n", "6", "--json").stdout.splitlines()]
    assert [token["finish"] for token in tokens] == [None] * 5 + ["length"]
    assert tokens[-1].pop("numerics") == "exact"
    assert all(token.keys() == {"id", "text", "logprob", "finish"} and token["logprob"] <= 0 for token in tokens)
    assert "".join(token["text"] for token in tokens) + "\n" == invoke("run", "story", START, "-n", "6").stdout


def test_the_same_seed_draws_the_same_text_and_another_seed_another():
    def text(seed: str) -> str:
        return invoke("run", "story", START, "-n", "20", "-t", "1.5", "--seed", seed).stdout

    assert text("3") == text("3") != text("4")


def test_text_ends_before_a_stop_string():
    whole = invoke("run", "story", START, "-n", "30").stdout
    assert "." in whole
    stopped = invoke("run", "story", START, "-n", "30", "--stop", "nowhere", "--stop", ".").stdout
    assert stopped == whole[: whole.index(".")] + "\n"


def test_filters_without_a_temperature_are_remarked_upon():
    result = invoke("run", "story", START, "-n", "2", "--top-k", "5")
    assert_tells(result.stderr, "temperature 0")
    assert invoke("run", "story", START, "-n", "2", "--top-k", "5", "-t", "1").stderr == ""


def test_a_full_context_is_remarked_upon():
    result = invoke("run", "story", "fox " * 500, "-n", "100", "--ignore-eos")
    assert result.exit_code == 0
    assert_tells(result.stderr, "context", 512, "full")


def test_verbose_tells_the_rates():
    result = invoke("run", "story", START, "-n", "3", "-v")
    assert result.stdout == invoke("run", "story", START, "-n", "3").stdout
    assert "tokens/s" in result.stderr
    assert "story, kernels: llorch's, numerics exact: prompt 5 tokens in" in result.stderr
    assert "; 2 more tokens in" in result.stderr
    assert "end: length" in result.stderr


def test_text_that_is_not_utf8_is_refused_in_one_line():
    done = spawn("tokenize", "story", "caf\udce9")
    assert_cli_refuses(done, 2)
    assert done.stderr.startswith("llorch: ")


def test_a_prompt_without_a_model_is_named_as_an_unknown_model():
    result = invoke("run", START)
    assert_cli_refuses(result, 3, "model", "story")
    assert repr(START) in result.stderr


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
    expected = "".join(token.text for token in model.generate(START, max_tokens=12, adapter="mine"))
    result = invoke("run", "story", START, "-n", "12", "--backend", backend, "--adapter", str(folder / "peft"))
    assert (result.stdout, result.exit_code) == (expected + "\n", 0)
    assert result.stderr.startswith(f"{folder / 'peft'}: base: the same ")
    assert result.stderr.count("\n") == 1
    assert result.stdout != invoke("run", "story", START, "-n", "12").stdout


@BACKENDS
def test_a_gguf_adapter_makes_the_same_text(backend: str, folder: Path):
    how = ("run", "story", START, "-n", "12", "--backend", backend, "--adapter")
    peft, gguf = (invoke(*how, str(folder / name)) for name in ("peft", "lora.gguf"))
    assert peft.stdout == gguf.stdout
    assert "base: unknown" in gguf.stderr


@BACKENDS
def test_an_adapter_of_another_base_is_refused_until_any_will_do(backend: str, folder: Path):
    how = ("run", "story", START, "-n", "3", "--backend", backend, "--adapter", str(folder / "foreign"))
    refused, taken = invoke(*how), invoke(*how, "--any-base")
    assert_cli_refuses(refused, 2, folder / "foreign", "BaseMismatch")
    assert taken.exit_code == 0
    assert "base: another base" in taken.stderr


def test_an_adapter_of_a_model_of_other_shapes_is_refused(folder: Path):
    result = invoke("run", "micro-llama", START, "--adapter", str(folder / "peft"))
    assert_cli_refuses(result, 2, folder / "peft", "BaseMismatch", "micro-llama.gguf")


TORCH = ("--backend", "torch")


def test_the_text_is_that_of_the_numpy_path():
    plain = invoke("run", "story", START, "-n", "12")
    on_torch = invoke("run", "story", START, "-n", "12", *TORCH)
    assert (on_torch.stdout, on_torch.stderr, on_torch.exit_code) == (plain.stdout, "", 0)


def test_a_seed_draws_the_same_text_on_both_backends():
    how = ("run", "story", START, "-n", "20", "-t", "1.2", "--top-p", "0.9", "--seed", "4")
    assert invoke(*how, *TORCH).stdout == invoke(*how).stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_dtype_can_be_asked_for(dtype: str):
    result = invoke("run", "story", START, "-n", "5", *TORCH, "--device", "cpu", "--dtype", dtype, "-v")
    assert (result.stdout, result.exit_code) == (", there was a little\n", 0)
    assert result.stderr.startswith(f"story, torch-cpu-{dtype}: prompt 5 tokens")


def test_json_and_stop_strings_work_as_in_numpy():
    how = ("run", "story", START, "-n", "12", "--stop", " boy", "--json")
    ours, theirs = ([json.loads(line) for line in invoke(*how, *more).stdout.splitlines()] for more in (TORCH, ()))
    assert [(t["id"], t["text"], t["finish"]) for t in ours] == [(t["id"], t["text"], t["finish"]) for t in theirs]
    assert ours[-1]["finish"] == "stop"


@pytest.mark.slow_cases("torch")  # which it imports
@pytest.mark.parametrize("backend", [(), TORCH], ids=["numpy", "torch"])
def test_it_runs_as_a_program_and_prints_nothing_else(backend: tuple[str, ...]):
    done = spawn("run", "story", START, "-n", "5", *backend)
    assert (done.stdout, done.stderr, done.returncode) == (", there was a little\n", "", 0)


LIVE = [lesson for lesson in LESSONS if lesson.number <= "12"]
OURS = "from llorch.apps.learn.lessons import PARTS\ndef {0}(**given):\n    return PARTS['{0}'].reference(**given)\n"


@pytest.fixture
def lessons_folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def write(lessons_folder: Path, but: str = "") -> None:
    for lesson in LIVE:
        parts = [exercise.name for exercise in lesson.parts if exercise.name != but]
        (lessons_folder / f"{lesson.module}.py").write_text("".join(OURS.format(name) for name in parts))


@pytest.mark.slow_cases("without the block")
@pytest.mark.parametrize("but", ["", "block"], ids=["all", "without the block"])  # which hides what it is made of
def test_reference_as_implementation_gives_the_same_text(lessons_folder: Path, but: str):
    write(lessons_folder, but)
    how = ("run", "story", START, "-n", "8")
    result = invoke(*how, "--impl", str(lessons_folder))
    assert result.stdout == invoke(*how, "--impl", "reference").stdout
    assert result.stderr.startswith(f"{lessons_folder}: ")
    assert result.stderr.strip().endswith(f": {but or 'none'}")
    drawn = (*how, "-t", "1.1", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2")
    assert invoke(*drawn, "--impl", str(lessons_folder)).stdout == invoke(*drawn).stdout


@pytest.mark.nightly_cases("block")
@pytest.mark.parametrize("but", ["", "block"])
def test_implementation_gives_the_text_of_both_engines(lessons_folder: Path, but: str):
    write(lessons_folder, but)
    implementation, (_, golden) = opened(str(lessons_folder)), stored("story")
    with implementation.installed(live=True):
        tokens = list(load("story").generate(golden.cases["near"].ids, max_tokens=24, ignore_eos=True))
    for engine_output in golden.engine_outputs.values():
        n = min(len(tokens), len(engine_output.greedy))
        assert [token.id for token in tokens][:n] == engine_output.greedy.tolist()[:n]


def test_packed_matrices_are_decoded_for_it(lessons_folder: Path, tmp_path: Path):
    write(lessons_folder, "block")
    packed = tmp_path / "packed.gguf"
    assert invoke("convert", "story", str(packed), "--type", "Q8_0").exit_code == 0
    how = ("run", str(packed), START, "-n", "4", "--weights", "packed")
    assert invoke(*how, "--impl", str(lessons_folder)).stdout == invoke(*how).stdout


def test_the_choice_is_that_of_every_command(lessons_folder: Path, monkeypatch: pytest.MonkeyPatch):
    (lessons_folder / "l06_swiglu.py").write_text(OURS.format("swiglu"))
    (lessons_folder.parent / "pyproject.toml").write_text('[tool.llorch]\nimpl = "mine"\n')
    monkeypatch.chdir(lessons_folder.parent)
    assert_tells(invoke("run", "story", START, "-n", "1").stderr, "mine", "swiglu; borrowed", "bfloat16_to_float32")
    assert "swiglu" not in invoke("run", "story", START, "-n", "1", "--impl", "reference").stderr
    assert "swiglu" not in invoke("run", "story", START, "-n", "1", "--numerics", "ggml").stderr
    result = invoke("run", "story", START, "-n", "1", "--numerics", "ggml", "--impl", "mine")
    assert (result.exit_code, "--impl goes with" in result.stderr) == (USAGE, True)
    result = invoke("run", "story", START, "-n", "1", "--impl", "yours")
    assert (result.exit_code, "llorch learn init yours" in result.stderr) == (MISSING, True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return gate / None * up", "swiglu: raised TypeError: unsupported operand"),
        ("return (gate * up)[:, :3]", "swiglu: expected y of shape (5, 448), got (5, 3)"),
        ("return gate * np.nan", "swiglu: y has "),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_and_the_frames(lessons_folder: Path, body: str, message: str):
    (lessons_folder / "l06_swiglu.py").write_text(f"import numpy as np\ndef swiglu(gate, up):\n    {body}\n")
    result = invoke("run", "story", START, "-n", "4", "--impl", str(lessons_folder))
    *_, last = result.stderr.splitlines()
    assert result.exit_code == DIFFERS
    assert last.startswith(f"llorch: {message}")
    assert ("l06_swiglu.py:3  " in result.stderr) == ("raised" in message)
    assert "Traceback" not in result.stderr
