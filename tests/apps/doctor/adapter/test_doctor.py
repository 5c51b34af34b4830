"""The doctor: each silent fault, put into a sound adapter, is found by the check that is there for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as container
from builders.family_adapters import family_adapter
from builders.random_adapters import random_adapter, tiny_base
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.apps.doctor.adapter import examine
from llorch.apps.doctor.adapter.checks import NUMBER_CHECKS, READER_CHECKS, check_run
from llorch.apps.doctor.adapter.engines import _RUNS
from llorch.engines.process import in_child
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.merge import MergedWeights
from llorch.lora.peft_format import write_peft
from llorch.model.model import OpenModel
from llorch.runtime.builtin import builtin_path
from llorch.training.data import DataSettings, read_data
from llorch.training.merge_files import logits_by, probe_ids

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def write_adapter(folder: Path, *, tied: bool = False, **settings: Any) -> tuple[Path, Path, Adapter]:
    base = tiny_base(folder / "base", tied=tied)
    weights = open_weights(base)
    settings = {"lora_alpha": 0.3} | settings
    adapter = random_adapter(weights.config, **settings)
    write_peft(adapter, folder / "adapter", base=identity_of(weights))
    return folder / "adapter", base, adapter


def states(adapter: Path, base: Path, against: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    checks = examine(adapter, base, against=against)
    return {check.name: (check.state, f"{check.text}; {check.repair}") for check in checks}


def changed(folder: Path, change) -> None:
    tensors = container.load_file(folder / TENSORS)
    change(tensors)
    container.save_file(tensors, folder / TENSORS, {"format": "pt"})


def all_zero(tensors: dict) -> None:
    for name in tensors:
        if name.endswith("lora_B.weight"):
            tensors[name][:] = 0


@pytest.mark.live
def test_a_sound_adapter_is_found_sound_and_both_engines_agree(tmp_path):
    adapter, base, _ = write_adapter(tmp_path)
    found = states(adapter, base, ("peft", "llamacpp"))
    assert {state for state, _ in found.values()} == {"ok", "absent"}
    assert [name for name, (state, _) in found.items() if state == "absent"] == ["end token"]
    assert {"logits in PEFT", "logits in llama.cpp"} <= found.keys()


@pytest.mark.live
def test_a_gguf_adapter_is_compared_too(tmp_path):
    _, base, adapter = write_adapter(tmp_path)
    write_lora_gguf(adapter, tmp_path / "a.gguf", open_weights(base).config)
    found = states(tmp_path / "a.gguf", base, ("peft", "llamacpp"))
    assert found["logits in PEFT"][0] == found["logits in llama.cpp"][0] == "ok"
    assert found["base"][0] == "warning"  # it does not say which


@pytest.mark.live
def test_an_engine_that_computes_something_else_is_wrong(tmp_path, monkeypatch):
    in_order = lambda target, part, lora_A, lora_B: (lora_A, lora_B)  # noqa: E731 - a converter that forgot the pairs
    monkeypatch.setattr("llorch.lora.targets.LoraTarget.pair_of", in_order)
    adapter, base, _ = write_adapter(tmp_path, lora_alpha=5.0)
    state, text = states(adapter, base, ("llamacpp",))["logits in llama.cpp"]
    assert state == "broken"
    assert_tells(text, "differ", 0.037)


@pytest.mark.parametrize(
    ("change", "check", "facts"),
    [
        (lambda t: t.pop(Q_B), "all tensors", ("layers.0.q_proj.lora_B",)),
        (lambda t: t.update({"x": t.pop(Q_B)}), "all tensors", ("Unexpected: x",)),
        (lambda t: t.update({Q_B: t[Q_B][:, :2].copy()}), "shapes", ("q_proj.lora_B",)),
        (lambda t: t[Q_B].fill(np.nan), "finite numbers", ("q_proj.lora_B",)),
        (all_zero, "trained", ("every", "B A", " 0")),
        (all_zero, "logits", ("base",)),
        (lambda t: t[Q_B].fill(0), "trained", ("1 of 14", "B A", " 0", "layers.0.q_proj")),
        (lambda t: t.update({n: t[n].astype(np.float16) for n in t}), "stored dtype", ("F16",)),
        (lambda t: t.update({n: t[n] * 1e-3 for n in t}), "merged bfloat16", ("merge into F32",)),
        (lambda t: t.update({n: t[n] * 30 for n in t}), "size of the change", ("scale", "%", "layers.")),
    ],
    ids=lambda part: part[0] if isinstance(part, tuple) else None,
)
def test_faults_of_the_tensors_are_named(tmp_path, change, check, facts):
    adapter, base, _ = write_adapter(tmp_path)
    changed(adapter, change)
    state, actual = states(adapter, base)[check]
    assert state in ("broken", "warning")
    assert [fact for fact in facts if fact not in actual] == [], actual


@pytest.mark.parametrize(
    ("field", "value", "check"),
    [
        ("modules_to_save", ["lm_head"], "known features"),
        ("r", 0, "sound settings"),
        ("lora_alpha", 0, "sound settings"),
        ("target_modules", ["c_attn"], "all tensors"),
        ("lora_alpha", "many", "readable files"),
    ],
)
def test_faults_of_the_configuration_are_named(tmp_path, field, value, check):
    adapter, base, _ = write_adapter(tmp_path)
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert states(adapter, base)[check][0] == "broken"


@pytest.mark.parametrize(
    ("settings", "tied", "check", "text"),
    [
        ({"use_rslora": True}, False, "rsLoRA scale", "1.73 times"),
        ({"alpha_pattern": {"q_proj": 9.0}}, False, "patterns", "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}}, False, "patterns", "rank_pattern"),
        ({"use_dora": True}, False, "DoRA", "merge"),
        ({"target_modules": ("lm_head",)}, True, "embedding and output", "tied"),
        ({"target_modules": ("embed_tokens",)}, False, "embedding and output", "vLLM"),
    ],
)
def test_settings_that_other_programs_misread_are_warnings(tmp_path, settings, tied, check, text):
    adapter, base, _ = write_adapter(tmp_path, tied=tied, **settings)
    state, actual = states(adapter, base)[check]
    assert state == "warning"
    assert text in actual


def test_another_base_is_wrong(tmp_path):
    adapter, _, _ = write_adapter(tmp_path)
    other = tiny_base(tmp_path / "other")
    config = other / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    state, text = states(adapter, other)["base"]
    assert state == "broken"
    assert "BaseMismatch" in text


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_dropout_of_the_base_is_a_warning(tmp_path, share):
    adapter, base, _ = write_adapter(tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attention_dropout": share}))
    state, text = states(adapter, base)["base dropout"]
    assert state == ("warning" if share else "ok")
    if share:
        assert_tells(text, "attention_dropout", share)


@pytest.mark.live
def test_unsupported_adapter_is_not_run_with_the_reason(tmp_path):
    adapter, base, _ = write_adapter(tmp_path, use_dora=True)
    found = states(adapter, base, ("peft", "llamacpp"))
    assert found["logits in PEFT"][0] == "ok"
    assert found["logits in llama.cpp"][0] == "absent"
    assert "merge instead" in found["logits in llama.cpp"][1]


def test_an_engine_that_is_not_installed_is_not_run(tmp_path, monkeypatch):
    adapter, base, _ = write_adapter(tmp_path)
    monkeypatch.setattr("llorch.apps.doctor.adapter.engines.find_spec", lambda name: None)
    state, text = states(adapter, base, ("peft",))["logits in PEFT"]
    assert state == "absent"
    assert "llorch[golden]" in text


@pytest.mark.live
def test_an_engine_that_does_not_survive_is_not_run_and_the_other_goes_on(tmp_path, monkeypatch):
    adapter, base, _ = write_adapter(tmp_path)
    deadly = {"transformers": ("os:_exit", 7)}
    monkeypatch.setattr(
        "llorch.apps.doctor.adapter.engines.in_child",
        lambda engine, path, *arguments: in_child(engine, path, *deadly.get(engine, arguments)),
    )
    found = states(adapter, base, ("peft", "llamacpp"))
    assert found["logits in PEFT"][0] == "absent"
    assert_tells(found["logits in PEFT"][1], "status 7", "in _exit", where="transformers")
    assert found["logits in llama.cpp"][0] == "ok"


def test_one_wrong_logit_of_an_engine_is_found(tmp_path, monkeypatch):
    adapter, base, read = write_adapter(tmp_path)
    weights = open_weights(base)
    ours = logits_by(AdaptedWeights(weights, read), probe_ids(weights.config.vocab_size, read))
    monkeypatch.setattr("llorch.apps.doctor.adapter.engines.find_spec", lambda name: "installed")
    for wrong, state in ((0.0, "ok"), (1.0, "broken")):
        theirs = ours + wrong * (np.arange(ours.size).reshape(ours.shape) == 7)
        monkeypatch.setitem(_RUNS, "peft", lambda *_, engine_logits=theirs: engine_logits)
        assert states(adapter, base, ("peft",))["logits in PEFT"][0] == state


@pytest.mark.parametrize("form", [["BASE", "ADAPTER"], ["ADAPTER", "--base", "BASE"], ["--base", "BASE", "ADAPTER"]])
def test_doctor_takes_the_base_as_argument_or_as_option(tmp_path: Path, form: list[str]):
    adapter, base, _ = write_adapter(tmp_path)
    places = {"ADAPTER": str(adapter), "BASE": str(base)}
    result = invoke("lora", "doctor", *(places.get(word, word) for word in form), "--against", "none", "--json")
    assert result.exit_code == 0, result.stderr
    assert "base" in {check["name"] for check in json.loads(result.stdout)["findings"]}


@pytest.mark.parametrize("form", [["ADAPTER"], ["BASE", "ADAPTER", "--base", "BASE"], ["BASE", "BASE", "ADAPTER"]])
def test_doctor_refuses_no_base_and_two_bases(tmp_path: Path, form: list[str]):
    places = {"ADAPTER": str(tmp_path / "a"), "BASE": "story"}
    result = invoke("lora", "doctor", *(places.get(word, word) for word in form))
    assert_cli_refuses(result, 2, "--base", "BASE ADAPTER", got=0 if form == ["ADAPTER"] else 2)


def test_every_check_has_a_name_of_its_own(tmp_path):
    adapter, base, _ = write_adapter(tmp_path)
    names = [finding.name for finding in examine(adapter, base, against=())]
    assert len(names) == len(set(names)) >= len(READER_CHECKS) + len(NUMBER_CHECKS) + 4


def test_the_command_ends_with_1_when_something_is_wrong(tmp_path):
    adapter, base, _ = write_adapter(tmp_path)
    sound = invoke("lora", "doctor", str(adapter), "--base", str(base), "--against", "none")
    assert sound.exit_code == 0, sound.output
    changed(adapter, all_zero)
    broken = invoke("lora", "doctor", str(adapter), "--base", str(base), "--against", "none", "--json")
    assert broken.exit_code == 1
    report = json.loads(broken.stdout)
    assert (report["version"], report["broken"]) == (2, sum(c["state"] == "broken" for c in report["findings"]))
    assert {"area", "name", "state", "text", "repair"} == report["findings"][0].keys()
    assert invoke("lora", "doctor", str(adapter), "--base", str(base), "--against", "vllm").exit_code == 2
    assert invoke("lora", "doctor", str(tmp_path / "no"), "--base", str(base)).exit_code == 3


END = 999  # of `story`; see the first test


def run_folder(folder: Path, rows: list[dict], *, digest: str | None = None) -> Path:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = OpenModel(open_weights(builtin_path("story")))
    known = read_data(data, model, DataSettings(max_length=512)).digest
    record = {"settings": {"model": "story", "data": str(data)}, "identity": {"data": digest or known}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def of_run(folder: Path) -> dict[str, tuple[str, str]]:
    return {found.name: (found.state, found.text) for found in check_run(folder, open_weights(builtin_path("story")))}


def test_the_end_token_of_these_tests_is_that_of_the_model():
    assert END in OpenModel(open_weights(builtin_path("story"))).tokenizer.eos_token_ids


def test_data_that_ends_is_fine(tmp_path):
    found = of_run(run_folder(tmp_path, [{"prompt": "a", "completion": " b"}]))
    state, text = found["end token"]
    assert state == "ok"
    assert_tells(text, "1 of 1")
    assert found["training data"][0] == "ok"


@pytest.mark.parametrize("labels", [None, [-100, 9, 8, -100]])
def test_data_without_end_tokens_is_reported(tmp_path, labels):
    row = {"input_ids": [7, 9, 8, END if labels else 10]} | ({"labels": labels} if labels else {})
    state, text = of_run(run_folder(tmp_path, [row]))["end token"]
    assert state == "broken"
    assert_tells(text, "0 of 1")


def test_data_changed_after_training_is_reported(tmp_path):
    folder = run_folder(tmp_path, [{"text": "Once upon a time."}], digest="0" * 64)
    assert of_run(folder)["training data"][0] == "warning"


def test_data_that_is_gone_and_folders_without_a_run_are_not_run(tmp_path):
    assert of_run(tmp_path)["end token"][0] == "absent"
    folder = run_folder(tmp_path, [{"text": "Once upon a time."}])
    (folder / "data.jsonl").unlink()
    state, text = of_run(folder)["end token"]
    assert state == "absent"
    assert "data.jsonl" in text
    (folder / "run.json").write_text("{")
    assert of_run(folder)["end token"][0] == "absent"


@pytest.mark.parametrize("model", ["micro-qwen3-next", "micro-qwen3.5-moe", "micro-qwen2-moe"])
def test_what_an_adapter_adds_is_what_merging_adds(model: str, tmp_path: Path):
    weights = open_weights(builtin_path(model))
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path, base=identity_of(weights))
    found = {finding.name: finding for finding in examine(tmp_path, builtin_path(model), against=())}
    assert {finding.state for finding in found.values()} <= {"ok", "warning", "absent"}
    merged, largest = MergedWeights(weights, adapter), 0.0
    for target in adapter.targets.values():
        base, new = ([w.read(part.name).ravel() for part in target.parts] for w in (weights, merged))
        before, after = np.concatenate(base), np.concatenate(new)
        largest = max(largest, float(np.linalg.norm(after - before) / np.linalg.norm(before)))
    assert_tells(found["size of the change"].text, f"{largest:.2%}")


def test_a_run_on_a_model_without_a_tokenizer_is_examined_all_the_same(tmp_path: Path):
    base = tiny_base(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    settings = {"model": str(base), "data": str(tmp_path / "rows.jsonl")}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    end, data = check_run(tmp_path, open_weights(base))
    assert end.state == "absent"
    assert "tokenizer.json" in end.text
    assert data.name == "training data"


def test_an_engine_that_computes_the_base_otherwise_is_not_run(tmp_path: Path):
    convert(builtin_path("micro-qwen2"), tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    config.write_text(json.dumps(json.loads(config.read_text()) | window))
    weights = open_weights(tmp_path / "base")
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    last = examine(tmp_path / "adapter", tmp_path / "base", against=("llamacpp",))[-1]
    assert (last.name, last.state) == ("logits in llama.cpp", "absent")
    assert_tells(last.text, "llama.cpp", "sliding_window", "qwen2", 4)
