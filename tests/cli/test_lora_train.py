"""`llorch lora train`: one command from data to an adapter."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from builders.chat_models import CHATML, chat_folder, with_token_beyond_rows
from builders.random_adapters import random_adapter, tiny_base
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses

from llorch.cli.lora import training_progress
from llorch.cli.lora.train import command
from llorch.cli.lora.training_progress import TrainingProgress, try_it
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.runtime.builtin import builtin_path
from llorch.training.settings import TrainSettings
from llorch.training.settings_file import FOREIGN, settings_from

SMALL = ("--r", "2", "--batch-size", "2", "--steps", "3", "--lr", "0.005")


def train(output: Path, *options: str, model: str = "micro-qwen3", data: str = "pirate"):
    return invoke("lora", "train", model, "--data", data, "-o", str(output), *SMALL, "--max-length", "24", *options)


def saved(output: Path) -> dict:
    return json.loads((output / "run.json").read_text())["settings"]


def test_the_built_in_example_trains_and_its_adapter_runs(tmp_path: Path):
    result = train(tmp_path / "mine", model="story")
    assert result.exit_code == 0, result.stderr
    assert re.match(r"3 steps in \d+\.\d s, loss \d+\.\d{4}\nvalidation loss ", result.stdout)
    assert "try it with: llorch run story 'Once upon a time," in result.stdout
    assert invoke("run", "story", "Once", "-n", "3", "--adapter", str(tmp_path / "mine")).exit_code == 0


def test_plan_is_printed_before_training(tmp_path: Path):
    lines = train(tmp_path / "mine").stderr.splitlines()
    assert lines[0].startswith("model: micro-qwen3, float32 on cpu, ")
    assert "(r 2, alpha 32, 14 matrices)" in lines[0]
    assert lines[1].startswith("data: pirate, ")
    assert lines[2] == "steps: 3 of 2 rows (2 x 1), rate 5.00e-03 cosine, 1 of them warm-up"
    assert re.match(r"memory: about \d\.\d\d GB at ", lines[3])
    assert " of 48 tokens " in lines[3]
    assert [line.split(":")[0] for line in lines if line.startswith("step ")] == [
        "step 0", "step 1 of 3", "step 2 of 3", "step 3 of 3", "step 3"
    ]  # fmt: skip


def test_json_is_one_object_and_stdout_holds_nothing_else(tmp_path: Path):
    found = json.loads(train(tmp_path / "mine", "--json").stdout)
    assert found.keys() == {"steps", "loss", "valid_loss", "seconds", "n_parameters", "adapter"}
    assert (found["steps"], found["adapter"]) == (3, str(tmp_path / "mine"))
    assert found["valid_loss"]["first"][0] == 0


def test_options_of_other_trainers_are_answered_with_one_of_llorch():
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, advice in FOREIGN.items():
        advised = set(re.findall(r"--[a-z-]+", advice))
        assert advised <= known
        assert f"--{name.replace('_', '-')}" not in known
        for option in (f"--{name}", f"--{name.replace('_', '-')}=x"):
            with refuses(click.UsageError, option.partition("=")[0], *advised):
                command.make_context("train", [option])
        with refuses(ValueError, name, *advised, where="a.yaml"):
            settings_from(("a.yaml", {name: 1}))


def test_every_setting_has_an_option_that_tells_its_default():
    options = {p.name: p for p in command.params if isinstance(p, click.Option)}
    assert {field.name for field in fields(TrainSettings)} - options.keys() == {"model"}
    for field in fields(TrainSettings):
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"[default: {field.default}]" in (options[field.name].help or ""), field.name


def test_help_lists_sixteen_options_and_the_number_of_others():
    short = invoke("lora", "train", "--help").stdout
    flags = {option.name: option.opts[-1] for option in command.params if isinstance(option, click.Option)}
    listed = {name for name, flag in flags.items() if re.search(rf"(?m)^  .*{flag}\b", short)} - {"help_all"}
    assert len(listed) == 16
    assert {"data", "output", "lr"} < listed
    assert short.splitlines()[-1].split()[0] == str(len(flags) - 17)
    assert_tells(short, "llorch lora train --help-all")


def test_an_option_missing_from_help_still_works():
    given = ["story", "--data", "pirate", "-o", "new", "--dora", "--weight-decay", "0.5"]
    params = command.make_context("train", given).params
    assert (params["dora"], params["weight_decay"]) == (True, 0.5)


def test_a_config_file_wins_over_defaults_and_options_over_the_file(tmp_path: Path):
    config = tmp_path / "settings.yaml"
    config.write_text("model: micro-qwen3\ndata: pirate\nr: 5\nalpha: 7\npacking: true\ndora: true\nlr: 1e-3\n")
    result = invoke(
        "lora", "train", "--config", str(config), "-o", str(tmp_path / "mine"), *SMALL, "--no-dora",
        "--target-modules", "q_proj,v_proj", "--max-length", "48",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = saved(tmp_path / "mine")
    expected = {"r": 2, "alpha": 7.0, "packing": True, "dora": False, "lr": 0.005}
    assert {name: found[name] for name in expected} == expected
    assert found["target_modules"] == ["q_proj", "v_proj"]


def test_a_resumed_run_needs_nothing_but_its_folder(tmp_path: Path):
    train(tmp_path / "mine", "--dropout", "0.1")
    before = (tmp_path / "mine" / "log.jsonl").read_bytes()
    result = invoke("lora", "train", "-o", str(tmp_path / "mine"), "--resume")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "mine" / "log.jsonl").read_bytes() == before
    assert saved(tmp_path / "mine")["dropout"] == 0.1


@pytest.mark.nightly_cases(but=["lora train*"])
@pytest.mark.parametrize(
    "words",
    [
        "lora train BASE --data DATA -o OUT", "lora eval BASE ADAPTER --data DATA", "data show BASE DATA",
        "run BASE <fox> -n 2", "run BASE <fox> -n 2 --backend torch", "run BASE --chat <fox> -n 2",
        "trace BASE <fox> -o OUT", "convert BASE OUT.gguf",
    ],
)  # fmt: skip
def test_a_token_without_a_row_in_the_embedding_is_one_line_of_each_command(tmp_path: Path, words: str):
    base, adapter, data = chat_folder(tmp_path / "base", "micro-qwen3", CHATML), tmp_path / "mine", tmp_path / "d.jsonl"
    token_id = with_token_beyond_rows(base, "<fox>")
    if "ADAPTER" in words:
        weights = open_weights(base)
        write_peft(random_adapter(weights.config), adapter, base=identity_of(weights))
    data.write_text('{"text": "a <fox>"}\n')
    for name, path in {"BASE": base, "ADAPTER": adapter, "DATA": data, "OUT": tmp_path / "new"}.items():
        words = words.replace(name, str(path))
    assert_cli_refuses(invoke(*words.split()), 2, token_id)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("stori --data pirate -o {}/new", 3, ("model 'stori'", "'story'")),
        ("story --data pirate -o {}/new --config {}/bad.yaml", 2, ("{}/bad.yaml", "'learning-rate'", "--lr")),
        ("story --data pirate -o {}/new --config {}/none.yaml", 3, ("{}/none.yaml",)),
        ("story --data pirate -o {}/new --device tpu", 2, ("device", "cuda:N", "'tpu'")),
    ],
)
def test_refusal_is_one_line_and_creates_no_folder(words: str, code: int, expected: tuple[object, ...], tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("learning-rate: 1\n")
    result = invoke("lora", "train", *words.replace("{}", str(tmp_path)).split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert_tells(result.stderr.splitlines()[-1], *(str(fact).replace("{}", str(tmp_path)) for fact in expected))
    assert not (tmp_path / "new").exists()


CHAT = [{"role": "user", "content": "Who's there?"}, {"role": "assistant", "content": "me"}]
SYSTEM = {"role": "system", "content": "Be brief."}
LONG = {"role": "user", "content": "x" * 500}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "a model", "micro-qwen2", CHATML)


def written(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"text": "One two three four five."}], ["One two three four"]),
        ([{"prompt": "Ask:\n", "completion": "x"}], ["Ask:\n"]),
        ([{"prompt": "", "completion": "one two"}], ["one two"]),
        ([{"messages": CHAT}], ["--chat=Who's there?"]),
        ([{"messages": [SYSTEM, *CHAT]}], ["--chat=Who's there?", "--system=Be brief."]),
        ([{"messages": [LONG, CHAT[1]]}, {"messages": CHAT}], ["--chat=Who's there?"]),
        ([{"instruction": "Say", "output": "it"}], ["--chat=Say"]),
        ([{"text": "\u001b[2J"}, {"text": "-n 5 six"}], ["Once upon a time"]),
    ],
)
def test_the_first_short_question_of_data_is_asked(rows: list[dict], expected: list[str], folder: Path, tmp_path: Path):
    words = shlex.split(try_it(str(folder), written(tmp_path / "rows.jsonl", *rows), tmp_path / "my adapter"))
    assert words == ["llorch", "run", str(folder), *expected, "--adapter", str(tmp_path / "my adapter")]


def test_token_ids_and_models_without_a_template_are_asked_in_plain_text(tmp_path: Path):
    ids = [998, 302, 401, 500]
    (asked,) = shlex.split(try_it("story", written(tmp_path / "a", {"input_ids": ids}), tmp_path))[3:-2]
    assert asked
    assert not asked.startswith("-")
    asked = shlex.split(try_it("story", written(tmp_path / "b", {"instruction": "Say", "output": "it"}), tmp_path))[3]
    assert "### Instruction:\nSay" in asked


@pytest.mark.slow
def test_the_command_that_training_on_chats_prints_says_what_was_learned(folder: Path, tmp_path: Path):
    data = written(tmp_path / "chats.jsonl", {"messages": [SYSTEM, *CHAT]})
    how = ("--steps", "40", "--lr", "0.02", "--r", "4", "--schedule", "constant")
    made = invoke("lora", "train", str(folder), "--data", data, "-o", str(tmp_path / "mine"), *how)
    assert made.exit_code == 0, made.stderr
    command = shlex.split(made.stdout.rpartition("try it with: ")[2])
    answer = invoke(*command[1:], "--json")
    tokens = [json.loads(line) for line in answer.stdout.splitlines()]
    assert ("".join(token["text"] for token in tokens), tokens[-1]["finish"]) == ("me", "eos")


def test_a_folder_without_a_tokenizer_is_trained_on_ids_and_nobody_is_told_to_ask_it(tmp_path: Path):
    base = tiny_base(tmp_path / "base")
    data = written(tmp_path / "ids.jsonl", {"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7]})
    result = train(tmp_path / "mine", model=str(base), data=data)
    assert result.exit_code == 0, result.stderr
    (told,) = [line.partition("try it with: llorch ")[2] for line in result.stdout.splitlines() if "try it" in line]
    assert invoke(*shlex.split(told)).exit_code == 0


@pytest.mark.parametrize("asked", [True, False])
def test_a_loss_that_is_not_trained_is_named_where_a_folder_asks_for_it(asked: bool, tmp_path: Path):
    convert(builtin_path("micro-qwen3-moe"), tmp_path / "moe")
    config = tmp_path / "moe" / "config.json"
    settings = {"output_router_logits": asked, "router_aux_loss_coef": 0.02}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    result = train(tmp_path / "mine", model=str(tmp_path / "moe"))
    assert result.exit_code == 0, result.stderr
    assert ("router_aux_loss_coef 0.02" in result.stderr) == asked


def test_training_progress_on_a_terminal_shows_a_bar_with_the_numbers_of_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(training_progress, "description", lambda training: [])
    with TrainingProgress() as progress:
        progress.begins(SimpleNamespace(total_steps=4, step=0))  # pyright: ignore[reportArgumentType]
        progress.made(SimpleNamespace(step=4, loss=0.5, norm=1.0, learning_rate=0.1))  # pyright: ignore[reportArgumentType]
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "loss 0.5000" in shown


END, TURN = 370, 372  # <|endoftext|> and <|im_end|> of `micro-qwen3`
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A base whose generation_config.json names <|endoftext|> alone, an adapter for it, and what training said."""
    folder = tmp_path_factory.mktemp("stopping")
    base = chat_folder(folder / "base", "micro-qwen3", CHATML)
    name_ends(base, END)
    (folder / "data.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    how = "--steps 25 --lr 0.02 --r 4 --schedule constant --save-every 0".split()
    words = ("--data", str(folder / "data.jsonl"), "-o", str(folder / "run"), *how)
    result = invoke("lora", "train", str(base), *words)
    assert result.exit_code == 0, result.stderr
    return base, folder / "run", result.stderr


def name_ends(base: Path, *ends: int) -> None:
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [*ends]}))


def examined(run: Path, base: Path) -> dict[str, tuple[str, str]]:
    result = invoke("lora", "doctor", str(run), "--base", str(base), "--against", "none", "--any-base", "--json")
    checks = json.loads(result.stdout)["findings"]
    return {check["name"]: (check["state"], check["text"]) for check in checks}


def test_training_names_the_end_token_that_transformers_does_not_know(trained):
    assert_tells(trained[2], "<|im_end|>", f"({TURN})", "generation_config.json")
    assert f"({END})" not in trained[2]


def test_the_doctor_lets_the_model_answer_until_it_stops(trained):
    base, run, _ = trained
    found = examined(run, base)
    for check in ("end token", "stops"):
        assert found[check][0] == "warning"
        assert_tells(found[check][1], f"({TURN})", "generation_config.json")
    assert_tells(found["stops"][1], "2 tokens", "data.jsonl:1")
    name_ends(base, END, TURN)
    found = examined(run, base)
    name_ends(base, END)
    assert [found[check][0] for check in ("end token", "stops")] == ["ok", "ok"]


def test_the_doctor_says_when_a_model_does_not_stop(trained, tmp_path: Path):
    base, run, _ = trained
    inits = ("--steps", "1", "--lr", "1e-9", "--save-every", "0")
    data = json.loads((run / "run.json").read_text())["settings"]["data"]
    assert invoke("lora", "train", str(base), "--data", data, "-o", str(tmp_path / "run"), *inits).exit_code == 0
    verdict, text = examined(tmp_path / "run", base)["stops"]
    assert verdict == "warning"
    assert_tells(text, f"{2 * 3 + 64} tokens", "data.jsonl:1")


def test_the_merged_folder_names_both(trained, tmp_path: Path):
    base, run, _ = trained
    result = invoke("lora", "merge", str(base), str(run), str(tmp_path / "merged"), "--no-logits")
    assert_tells(result.stderr, "generation_config.json", f"[{END}, {TURN}]")
    merged = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert merged == json.loads((base / "generation_config.json").read_text()) | {"eos_token_id": [END, TURN]}


@pytest.mark.live
def test_transformers_stops_in_the_merged_folder_and_not_beside_the_base(trained, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    base, run, _ = trained
    invoke("lora", "merge", str(base), str(run), str(tmp_path / "merged"), "--no-logits")
    asked = json.loads(invoke("tokenize", str(base), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
                              "--parse-special", "--json").stdout)  # fmt: skip
    ids = torch.tensor([asked["ids"]])
    lengths = []
    for given in (None, base / "generation_config.json"):
        if given is not None:
            (tmp_path / "merged" / given.name).write_bytes(given.read_bytes())
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        lengths.append(model.generate(ids, do_sample=False, max_new_tokens=20).shape[1] - ids.shape[1])
    assert lengths == [2, 20]
