"""A base that names one end token, trained on chats that end with another: said at once, examined, merged with both."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.chat_models import CHATML, chat_folder
from helpers.command_line import invoke
from helpers.refusals import assert_tells

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
    return {found["check"]: (found["verdict"], found["text"]) for found in json.loads(result.stdout)}


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
