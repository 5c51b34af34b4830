"""`llorch verify FILE --source SOURCE`, and the same comparison after `llorch convert` and `llorch lora merge`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from builders.converter import Plan, convert, plan_conversion, quantise, write_plan
from builders.damaged_files import merge, write_adapter
from builders.source_folders import write_source
from click.testing import Result
from helpers.command_line import invoke, spawn
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.files import convert as conversion
from llorch.files import export
from llorch.files.tensor_names import undo_interleave
from llorch.files.tensor_storage import Layout
from llorch.runtime.builtin import builtin_path

KEYS = {"version", "comparisons", "causes", "smallest_errors", "quality", "summary"}
CAUSE_KEYS = {"name", "kind", "sentence", "stages", "explained_share", "remaining", "value"}
BASE = "someone/base-model"
BASE_URL = f"https://huggingface.co/{BASE}"
PARTS = ("settings", "tokenizer", "weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "source", "llama")


@pytest.fixture(scope="module")
def right(folder: Path) -> Path:
    return convert(folder, folder.parent / "right.gguf")


@pytest.fixture(scope="module")
def wrong(folder: Path) -> Path:
    """A file with a mistake in four weights, and one in a setting."""
    return convert(folder, folder.parent / "wrong.gguf", ["q and k not permuted", "another RoPE base"])


def verify(file: Path, source: Path | str, *options: str) -> Result:
    """Run the command without stages; no error of the program may escape."""
    result = invoke("verify", str(file), "--source", str(source), "--no-stages", *options)
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert "Traceback" not in result.stderr
    return result


def test_right_file_passes(folder: Path, right: Path):
    result = verify(right, folder)
    assert result.exit_code == 0, result.stdout
    assert_tells(result.stdout, right, folder, 21, "F32", "BF16", "47 of 47", "smallest error seen")
    lines = [line.split() for line in result.stdout.splitlines()]
    verdicts = {line[0]: line[1:] for line in lines if line and line[0] in PARTS and len(line) == 4}
    assert verdicts == {
        "settings": ["17", "0", "PASS"],
        "tokenizer": ["9", "0", "PASS"],
        "weights": ["21", "0", "PASS"],
    }


def test_wrong_file_fails_with_its_causes_first(folder: Path, wrong: Path):
    result = verify(wrong, folder)
    assert result.exit_code == 1
    failures = [line for line in result.stdout.splitlines() if line.startswith("FAIL ")]
    assert len(failures) == 2
    assert_tells(failures[0], "self_attn.q_proj", "self_attn.k_proj", "4 tensors")
    assert_tells(failures[1], "settings", "rope_theta", "10000.0", "500000.0")
    assert_tells(result.stdout.splitlines()[-1], wrong, folder, "42 of 47", "5 FAIL")


def test_detail_has_a_line_for_each_weight(folder: Path, wrong: Path):
    lines = verify(wrong, folder, "--detail").stdout.splitlines()
    by_name = {line.split()[0]: line.split()[-1] for line in lines if line.startswith(("model.", "lm_head."))}
    assert len(by_name) == 21
    failed = {name for name, verdict in by_name.items() if verdict == "FAIL"}
    assert failed == {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"}


def test_json_is_one_object(folder: Path, wrong: Path):
    result = verify(wrong, folder, "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record.keys()) == (1, KEYS)
    verdicts = [comparison["verdict"] for comparison in record["comparisons"]]
    assert (len(verdicts), verdicts.count("FAIL")) == (47, 5)
    assert {comparison["stage"].partition(".")[0] for comparison in record["comparisons"]} == {*PARTS}
    (cause,) = record["causes"]
    assert cause.keys() == CAUSE_KEYS
    assert (cause["name"], len(cause["stages"])) == ("not reordered", 4)
    assert record["quality"] is None
    assert record["smallest_errors"].keys() == {"F32"}


def test_junit_has_a_case_for_each_comparison(folder: Path, wrong: Path, tmp_path: Path):
    result = verify(wrong, folder, "--junit", str(tmp_path / "report.xml"))
    assert result.exit_code == 1
    suites = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert [suite.get("name") for suite in suites] == [*PARTS]
    assert sum(int(suite.get("tests", "")) for suite in suites) == len(suites.findall("testsuite/testcase")) == 47
    assert sum(int(suite.get("failures", "")) for suite in suites) == len(suites.findall(".//failure")) == 5
    names = [case.get("name") for case in suites.findall("testsuite/testcase")]
    assert len({*names}) == len(names)
    assert all(case.get("classname") == str(wrong) for case in suites.findall("testsuite/testcase"))


def change_right(folder: Path, target: Path, change: Callable[[Plan], object]) -> Path:
    plan = plan_conversion(folder)
    change(plan)
    write_plan(plan, target, "F32")
    return target


def test_another_model_is_a_usage_error_with_the_reason(right: Path, tmp_path: Path):
    other = write_source(tmp_path / "other", "llama", width=512, vocabulary=False)
    result = verify(right, other)
    assert_cli_refuses(result, 2, "hidden_size", 256, 512)


def test_model_of_another_family_fails(right: Path, tmp_path: Path):
    result = verify(right, write_source(tmp_path / "other", "qwen2"))
    assert result.exit_code == 1
    assert_tells(result.stdout, "rms_norm_eps", "rope_theta", "21 tensors")


def set_element(tensor: str, value: float) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        plan.tensors[tensor] = plan.tensors[tensor].copy()
        plan.tensors[tensor].flat[1000] = value

    return change


def set_all(tensor: str, value: float) -> Callable[[Plan], None]:
    return lambda plan: plan.tensors.update({tensor: np.full_like(plan.tensors[tensor], value)})


def remove(tensor: str) -> Callable[[Plan], object]:
    return lambda plan: plan.tensors.pop(tensor)


def add(tensor: str) -> Callable[[Plan], None]:
    return lambda plan: plan.tensors.update({tensor: np.ones((4, 4), np.float32)})


BAD_TENSORS: dict[str, tuple[Callable[[Plan], object], tuple[object, ...]]] = {  # change, facts of the report
    "NaN": (set_element("blk.0.ffn_up.weight", np.nan), ("model.layers.0.mlp.up_proj.weight", 1)),
    "infinite": (set_element("output.weight", -np.inf), ("lm_head.weight", 1)),
    "zero": (set_all("blk.1.ffn_gate.weight", 0), ("model.layers.1.mlp.gate_proj.weight", 0)),
    "constant": (set_all("output_norm.weight", 0.5), ("model.norm.weight", 0.5)),
    "missing": (remove("blk.0.attn_norm.weight"), ("model.layers.0.input_layernorm.weight", "missing")),
    "missing head": (remove("output.weight"), ("lm_head.weight",)),
    "additional": (add("blk.1.ffn_extra.weight"), ("blk.1.ffn_extra.weight", "additional")),
    "additional bias": (add("blk.1.attn_k.bias"), ("model.layers.1.self_attn.k_proj.bias", "additional")),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_bad_tensor_is_named(folder: Path, tmp_path: Path, fault: str):
    change, facts = BAD_TENSORS[fault]
    result = verify(change_right(folder, tmp_path / "bad.gguf", change), folder)
    assert result.exit_code == 1, result.stdout
    (failure,) = (line for line in result.stdout.replace("\n  ", " ").splitlines() if line.startswith("FAIL "))
    assert_tells(failure, *facts)


def test_file_without_an_embedding_is_refused(folder: Path, tmp_path: Path):
    path = change_right(folder, tmp_path / "bad.gguf", remove("token_embd.weight"))
    assert_cli_refuses(verify(path, folder), 2, path, "token_embd.weight")


def test_folder_passes_against_the_file_it_was_made_from(folder: Path, right: Path):
    assert verify(folder, right).exit_code == 0


@pytest.mark.parametrize("part", ["file", "source"])
def test_file_that_does_not_exist_is_refused(right: Path, folder: Path, tmp_path: Path, part: str):
    none = tmp_path / "none.gguf"
    result = verify(none, folder) if part == "file" else verify(right, none)
    assert_cli_refuses(result, 3, none)


@pytest.mark.parametrize("name", ["cut.gguf", "empty.gguf", "folder"])
def test_file_that_cannot_be_read_is_refused(right: Path, folder: Path, tmp_path: Path, name: str):
    (tmp_path / "cut.gguf").write_bytes(right.read_bytes()[: right.stat().st_size // 2])
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for pair in ((tmp_path / name, folder), (right, tmp_path / name)):
        assert_cli_refuses(verify(*pair), 2, tmp_path / name)


def test_options_of_the_comparison_need_a_source(right: Path, folder: Path, tmp_path: Path):
    for options in (["--no-stages"], ["--junit", str(tmp_path / "x.xml")], ["--adapter", str(folder)]):
        assert_cli_refuses(invoke("verify", str(right), *options), 2, "--source")
    for words in (["--against", "llamacpp"], ["--backend", "torch"]):
        assert_cli_refuses(invoke("verify", str(right), "--source", str(folder), *words), 2, "--source")
    assert_cli_refuses(invoke("verify", str(right), str(folder), "--source", str(folder)), 2, "--source")


def name_base(plan: Plan) -> None:
    plan.metadata["general.base_model.0.repo_url"] = BASE_URL


@pytest.fixture
def file_with_base(folder: Path, tmp_path: Path) -> Path:
    """A right file that names its base."""
    return change_right(folder, tmp_path / "named.gguf", name_base)


def verify_without_source(file: Path, stdin: str = "") -> Result:
    return invoke("verify", str(file), "--no-stages", "--source", stdin=stdin)


def test_source_without_a_value_needs_a_file_that_names_its_base(right: Path):
    assert_cli_refuses(verify_without_source(right), 2, right, "--source SOURCE")


def test_source_without_a_value_and_without_a_terminal_names_the_base(file_with_base: Path):
    assert_cli_refuses(verify_without_source(file_with_base), 2, file_with_base, f"--source {BASE}")


def test_source_without_a_value_names_the_base_of_a_model_card(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text(f"---\nlicense: mit\nbase_model:\n- {BASE}\n---\n# Model\n")
    assert_cli_refuses(verify_without_source(copy), 2, f"--source {BASE}")
    (copy / "README.md").write_text(f"---\nlicense: mit\n---\nbase_model: {BASE}\n")
    assert_cli_refuses(verify_without_source(copy), 2, "--source SOURCE")


@pytest.mark.parametrize("answer", ["y", "n"])
def test_source_without_a_value_is_the_base_after_asking(
    folder: Path, file_with_base: Path, monkeypatch: pytest.MonkeyPatch, answer: str
):
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("llorch.cli.verify_source.sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    specs: list[str] = []

    def find_path(spec: str) -> Path:
        specs.append(spec)
        return folder if spec == BASE else Path(spec)

    monkeypatch.setattr("llorch.cli.verify_source.model_path", find_path)
    result = verify_without_source(file_with_base, f"{answer}\n")
    assert_tells(result.stderr, BASE)
    assert (result.exit_code == 0) == (answer == "y")
    assert specs == [str(file_with_base), BASE][: 2 if answer == "y" else 1]


def test_adapter_belongs_to_the_source(folder: Path, tmp_path: Path):
    adapter = write_adapter(folder, tmp_path / "adapter")
    merged = convert(merge(folder, adapter, tmp_path / "merged"), tmp_path / "merged.gguf")
    assert verify(merged, folder, "--adapter", str(adapter)).exit_code == 0
    result = verify(merged, folder)
    assert result.exit_code == 1
    result = verify(convert(folder, tmp_path / "base.gguf"), folder, "--adapter", str(adapter))
    assert result.exit_code == 1
    assert_tells(result.stdout, "14 tensors", "adapter")
    (adapter / "adapter_config.json").write_text("{")
    assert_cli_refuses(verify(merged, folder, "--adapter", str(adapter)), 2, adapter / "adapter_config.json")


def fault_permutation(patch: pytest.MonkeyPatch) -> None:
    """Permute the rows of q and k in the opposite direction."""
    patch.setattr(export, "interleave", undo_interleave)


def fault_norms(patch: pytest.MonkeyPatch) -> None:
    """Store norms without the subtraction of 1."""
    to_stored = Layout._to_stored
    patch.setattr(
        Layout, "_to_stored", lambda layout, array: array if layout.form == "less_one" else to_stored(layout, array)
    )


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, tuple[object, ...]]] = {
    # fault: its function, built-in base, name of the target, facts of the message
    "permutation": (fault_permutation, "micro-llama", "target.gguf", ("self_attn.q_proj", "self_attn.k_proj")),
    "stored norms": (fault_norms, "micro-qwen3.5", "target", ("input_layernorm", "post_attention_layernorm", "gain")),
}


@pytest.fixture
def without_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the comparison in which llorch's reader would undo a fault of its writer, or see it first."""
    monkeypatch.setattr(conversion, "read_back", lambda *arguments: None)


def base_of(model: str, folder: Path, target: str) -> Path:
    """Return a built-in model, as a folder if the target is a GGUF file."""
    if not target.endswith(".gguf"):
        return builtin_path(model)
    conversion.convert(builtin_path(model), folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_convert_with_a_fault_in_the_writer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_read_back: None, fault: str
):
    inject, model, target, facts = FAULTS[fault]
    words = ("convert", str(base_of(model, tmp_path / "base", target)), str(tmp_path / target))
    result = invoke(*words)
    assert (result.exit_code, "PASS" in result.stderr) == (0, True)
    inject(monkeypatch)
    result = invoke(*words, "--force")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert_tells(result.stderr, tmp_path / target, "FAIL", *facts)
    result = invoke(*words, "--force", "--no-check")
    assert (result.exit_code, "checked" in result.stderr) == (0, False)


@pytest.mark.parametrize("fault", FAULTS)
def test_merge_with_a_fault_in_the_writer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_read_back: None, fault: str
):
    from builders.random_adapters import random_adapter

    from llorch.files import open_weights
    from llorch.lora.base import identity_of
    from llorch.lora.peft_format import write_peft

    inject, model, target, facts = FAULTS[fault]
    base = base_of(model, tmp_path / "base", target)
    weights = open_weights(base)
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    words = ("lora", "merge", str(base), str(tmp_path / "adapter"), str(tmp_path / target), "--no-logits")
    result = invoke(*words)
    assert (result.exit_code, "PASS" in result.stderr) == (0, True), result.stderr
    inject(monkeypatch)
    result = invoke(*words, "--force")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert_tells(result.stderr, tmp_path / target, "FAIL", *facts)
    assert invoke(*words, "--force", "--no-check").exit_code == 0


def test_merge_with_another_scale_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from llorch.lora.adapter import Adapter

    adapter = write_adapter(folder, tmp_path / "adapter")
    words = ("lora", "merge", str(folder), str(adapter), str(tmp_path / "merged"), "--no-logits", "--any-base")
    scaling = Adapter.scaling
    checks: list[str] = []

    def wrong_scaling(self: Adapter, name: str) -> float:
        checks.append(name)
        return scaling(self, name) * (1.5 if len(checks) <= 28 else 1.0)

    monkeypatch.setattr(Adapter, "scaling", wrong_scaling)
    result = invoke(*words)
    assert result.exit_code == 1
    assert_tells(result.stderr, "14 tensors", "1.5 times")


@pytest.mark.live
def test_stages_run_after_the_comparison_and_point_to_it_without_a_source(folder: Path, right: Path, tmp_path: Path):
    path = quantise(right, tmp_path / "q4.gguf", "Q4_K_M")
    result = invoke("verify", str(path), "--source", str(folder), "--prompt", "A river")
    assert result.exit_code == 0, result.stdout
    assert_tells(result.stdout, "Q4_K", "Q6_K", "attention_scores", "perplexity", "KL")
    record = json.loads(invoke("verify", str(path), "--source", str(folder), "--tokens", "3,17,20", "--json").stdout)
    checkpoints = {comparison["checkpoint"] for comparison in record["comparisons"]}
    assert {"00", "04", "08"} <= checkpoints
    assert record["quality"].keys() >= {"kl", "perplexity"}
    result = invoke("verify", str(path), "--tokens", "3,17,20")
    assert result.exit_code == 0
    assert_tells(result.stdout, "--source SOURCE")


def test_stages_do_not_run_after_a_failure(folder: Path, wrong: Path):
    result = invoke("verify", str(wrong), "--source", str(folder), "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["quality"]) == (1, None)
    assert {comparison["checkpoint"] for comparison in record["comparisons"]} == {"00"}


def test_process_ends_with_the_exit_code(folder: Path, wrong: Path):
    result = spawn("verify", str(wrong), "--source", str(folder), "--no-stages")
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
