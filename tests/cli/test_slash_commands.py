"""The commands inside of `llorch chat`, as a script types them."""

import json
from pathlib import Path

import numpy as np
import pytest
from builders.chat_models import LLAMA_3, chat_folder
from builders.random_adapters import random_adapter
from helpers.command_line import invoke
from helpers.refusals import assert_tells

from llorch.cli.slash_commands import COMMANDS
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.model import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models") / "story", "story", LLAMA_3)


def typed(folder: Path, *lines: object, options: tuple[str, ...] = ()) -> tuple[list[str], str, int]:
    """Lines of stdout, stderr and the exit code."""
    done = invoke("chat", str(folder), "-n", "8", *options, stdin="".join(f"{line}\n" for line in lines))
    return done.stdout.splitlines(), done.stderr, done.exit_code


def test_save_and_load_keep_the_messages(folder: Path, tmp_path: Path):
    file = tmp_path / "talk.json"
    (answer, said), _, code = typed(folder, "Hello <|eot_id|>", f"/save {file}")
    assert (said, code) == (f"wrote 2 messages to {file}", 0)
    messages = [{"role": "user", "content": "Hello <|eot_id|>"}, {"role": "assistant", "content": answer}]
    assert json.loads(file.read_text()) == messages
    out, _, _ = typed(folder, f"/load {file}", "/history")
    assert out == ["2 messages", "1 user: Hello <|eot_id|>", f"2 assistant: {answer}"]
    file.write_text(json.dumps(messages[:1]))
    assert typed(folder, f"/load {file}")[0] == [answer]  # the user has the last word: it is answered
    assert typed(folder, "/retry", options=("--history", str(file)))[0] == [answer]


def test_an_earlier_message_is_written_anew_and_what_came_after_is_gone(folder: Path):
    (_, _, third, *rest), _, _ = typed(folder, "Once upon", "The fox", "/edit 1 The dog", "/history")
    assert rest == ["1 user: The dog", f"2 assistant: {third}"]
    assert typed(folder, "The dog")[0] == [third]
    out, _, _ = typed(folder, "Once upon", "/edit 2 Yes.", "/history", "The fox")
    assert out[1:4] == ["2 messages", "1 user: Once upon", "2 assistant: Yes."]


def test_undo_takes_the_last_turn_and_retry_the_last_answer(folder: Path):
    out, _, _ = typed(folder, "Once upon", "The fox", "/undo", "/history")
    assert out[2:] == ["2 messages", "1 user: Once upon", f"2 assistant: {out[0]}"]
    same, other = (typed(folder, "Once upon", "/retry", options=how)[0] for how in ((), ("-t", "1.5")))
    assert same[0] == same[1]
    assert other[0] != other[1]


def test_the_system_message_comes_first_and_can_go(folder: Path):
    out, _, _ = typed(
        folder, "Hi", "/system Be brief.", "/history", "/system Be kind.", "/history", "/system", "/history"
    )
    assert out[2] == "1 system: Be brief."
    assert out[3] == "2 user: Hi"
    assert [line for line in out if "system:" in line] == ["1 system: Be brief.", "1 system: Be kind."]
    with_option, _, _ = typed(folder, "/history", options=("--system", "Be brief."))
    assert with_option == ["1 system: Be brief."]


def test_settings_are_shown_and_changed(folder: Path):
    out, _, _ = typed(folder, "/set", "/set temperature 0.8", "/set top_k 5", "/set max_tokens 3", "Once")
    assert "temperature=0.0 top_k=0" in out[0]
    assert "temperature=0.8 top_k=5" in out[3]
    assert out[3].endswith("max_tokens=3")
    assert load(folder).tokenizer.encode(out[4]) != []


def test_stats_tell_rates_and_the_context(folder: Path):
    out, _, _ = typed(folder, "/stats", "Once upon", "/stats", "The fox", "/stats")
    assert_tells(out[0], "0 of 512")
    assert_tells(out[2], "(0 of", "wrote 8, 7")
    words = out[4].replace("(", "").split()
    assert 0 < int(words[3]) < int(words[1])


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_a_trace_has_every_stage_of_the_conversation(folder: Path, tmp_path: Path, ending: str):
    file = tmp_path / f"talk{ending}"
    out, _, _ = typed(folder, "Once upon", f"/trace {file}")
    assert out[1].startswith("wrote 98 stages of ")
    assert file.is_file()
    if ending == ".npz":
        model, arrays = load(folder), np.load(file)
        messages = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": out[0]}]
        text, _ = model.chats.conversation(messages).text(2)
        expected = model.forward(model.tokenizer.encode(text, add_special=False, parse_special=True))
        np.testing.assert_array_equal(arrays["logits"], expected)


def test_an_adapter_can_be_put_on_and_off(folder: Path, tmp_path: Path):
    model = load(folder)
    write_peft(random_adapter(model.config, lora_alpha=1.0), tmp_path / "peft", base=identity_of(model.weights))
    out, _, _ = typed(folder, "Once", f"/adapter {tmp_path / 'peft'}", "/retry", "/adapter none", "/retry")
    assert out[1].startswith(f"{tmp_path / 'peft'}: base: the same ")
    assert out[3].startswith("none: ")
    assert out[0] == out[4] != out[2]
    assert typed(folder, "Once", options=("--adapter", str(tmp_path / "peft")))[0] == [out[2]]


def test_help_names_every_command(folder: Path):
    out, _, _ = typed(folder, "/help")
    assert [line.split()[0] for line in out] == [f"/{name}" for name in COMMANDS]


def test_quit_ends(folder: Path):
    assert typed(folder, "/quit", "/nonsense") == ([], typed(folder)[1], 0)


MISTAKES: dict[str, tuple[object, ...]] = {
    "/sav x": ("/sav;", "'save'", "/help"), "/": ("/;", "/help"),
    "/save": ("file", "none"), "/save nowhere/x": ("nowhere/x",), "/load nowhere.json": ("nowhere.json",),
    "/trace x.txt": (".npz", ".safetensors", "'x.txt'"), "/trace x.npz": ("trace", "message"),
    "/edit 1 x": ("chat", "message"), "/edit": ("chat", "message"),
    "/undo": ("message", "none"), "/retry": ("message", "none"),
    "/set temperat 1": ("'temperat'", "'temperature'"),
    "/set temperature hot": ("temperature", "number", "'hot'"), "/set top_p 2": ("sampling: top_p", "2.0"),
    "/set max_tokens 0": ("max_tokens", 1, 0), "/set top_k 1.5": ("top_k", "integer", "'1.5'"),
    "/adapter nowhere": ("nowhere: ", "adapter"), "/adapter": ("file", "none"),
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_the_end_of_a_script(folder: Path, line: str):
    out, err, code = typed(folder, line, "/help")
    assert (out, code in (2, 3)) == ([], True)
    _, mistake = err.splitlines()  # behind what the model is
    assert_tells(mistake, *MISTAKES[line])
