"""`llorch diagnose` and `llorch diff` as users call them, on dumps in files, and what a terminal shows."""

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from builders import diagnoses
from builders.batches import PROMPTS, STEPS, write_padded
from builders.quantised_folders import FOLDERS, Tensors, changed
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells

from benchmarks.diagnosis.training_bugs import BUGS
from benchmarks.diagnosis.training_cases import TrainingCase
from llorch.cli.diagnose_table import print_diagnosis
from llorch.cli.tables import Stdout
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.raw import digest
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import open_weights
from llorch.files.tensor_names import inventory
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.judging.runners.numpy import run
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.ops.rounding import round_activations
from llorch.runtime.builtin import builtin_path
from llorch.stages.stage_ref import Pass

IDS = (3, 1, 4, 15, 9, 2, 6, 5, 33, 17)
SHORT = (3, 11, 7, 20, 5, 9)  # for a vocabulary of 24
MODEL = ("--model", "micro-llama")


def write(
    folder: Path, trace: Mapping[str, np.ndarray], *, ids: Sequence[int] = IDS, first_position: int = 0, **about: Any
) -> Path:
    with DumpWriter(folder, engine="mine", **about) as writer:
        writer.begin(ids, first_position)
        for name, array in trace.items():
            writer.add(name, array)
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dumps") / "right", run(open_weights(builtin_path("micro-llama")), Pass(IDS)))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump of an engine that counts positions from 1."""
    trace = run(open_weights(builtin_path("micro-llama")), Pass(IDS, 1))
    return write(tmp_path_factory.mktemp("dumps") / "wrong", trace)


def test_a_right_dump_ends_well(right: Path):
    result = invoke("diagnose", str(right), *MODEL)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("PASS: nothing is wrong; ")
    assert result.stderr == ""


def test_wrong_dump_is_reported_in_every_format(wrong: Path, tmp_path: Path):
    page, xml = tmp_path / "page.html", tmp_path / "cases.xml"
    result = invoke("diagnose", str(wrong), *MODEL, "--html", str(page), "--junit", str(xml))
    assert result.exit_code == 1
    assert "FAIL  l0.q_rope" in result.stdout
    assert "l0.v_proj" not in result.stdout.split("FAIL  l0.q_rope")[1].split("known mistakes")[0]
    said = json.loads(invoke("diagnose", str(wrong), *MODEL, "--json").stdout)
    assert (said["right"], said["findings"][0]["key"]) == (False, "l0.q_rope")
    assert "First cause: l0.q_rope" in page.read_text()
    failures = [case.get("name") for case in ElementTree.parse(xml).iterfind(".//testcase[failure]")]
    assert failures[:2] == ["l0.q_rope", "l0.k_rope"]


def test_every_stage_is_printed_where_that_is_asked_for(wrong: Path):
    lines = invoke("diagnose", str(wrong), *MODEL, "--all").stdout.splitlines()
    assert any(line.startswith("logits ") for line in lines)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("diagnose {}/right --model nowhere", 3, ("'nowhere'", "micro-llama")),
        ("diagnose {}/right --model micro-llama --html {}/no/page.html", 3, ("{}/no/page.html", "folder {}/no")),
        ("diagnose {}/right --model micro-llama --tokens 1,2", 10, ("{}/right: ids: ", "2 tokens", "10 tokens")),
        (
            "diagnose {}/right --model micro-llama --tokens 3,1,4,15,9,2,6,5,33,17 --first-position 4", 11,
            ("{}/right: positions: ", 4, 0),
        ),
        ("diagnose {}/right --model micro-qwen2", 13, ("layout: l0.q_proj", "q_width=96", "(10, 192)")),
        ("diagnose {}/right --model micro-llama --map {}/none.toml", 3, ("{}/none.toml",)),
        ("diagnose {}/right --model micro-llama --tokens 1 --prompt x", 2, ("prompt", "--tokens")),
        ("diff {}/right {}/right --map {}/none.toml", 2, ("--map, --map-b and --tokens", "--model")),
        ("diff --suggest {}/right", 2, ("--suggest", "--model")),
        ("verify micro-llama --against {}/nothing", 2, ("--against", "golden, llamacpp, transformers", "{}/nothing")),
        ("verify micro-llama --against {}/right --against golden", 2, ("--against", "golden", "dump", "alone")),
        ("verify --against {}/right", 2, ("dump", "one MODEL")),
        ("verify micro-llama --against {}/right --backend torch", 2, ("dump", "--backend")),
        ("verify micro-llama --map {}/names.toml", 2, ("--map", "--against path/to/dump")),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(words: str, code: int, expected: tuple[object, ...], right: Path):
    result = invoke(*words.replace("{}", str(right.parent)).split())
    assert_cli_refuses(result, code)
    assert_tells(result.stderr.splitlines()[-1], *(str(fact).replace("{}", str(right.parent)) for fact in expected))


def test_suggest_drafts_a_mapping_with_which_the_dump_is_read(wrong: Path, tmp_path: Path):
    mine = tmp_path / "mine"
    shutil.copytree(wrong, mine)
    index = (mine / "index.jsonl").read_text()
    (mine / "index.jsonl").write_text(re.sub(r'"l(\d)\.(\w+)"', r'"h\1/z_\2"', index).replace('"logits"', '"z_out"'))
    draft = invoke("diff", "--suggest", str(mine), *MODEL)
    assert draft.exit_code == 0, draft.stderr
    assert re.search(r'"h\{i\}/z_q_rope" = "q_rope"', draft.stdout)
    (tmp_path / "names.toml").write_text(draft.stdout)
    result = invoke("diagnose", str(mine), *MODEL, "--map", str(tmp_path / "names.toml"))
    assert (result.exit_code, "FAIL  l0.q_rope" in result.stdout) == (1, True)


@pytest.mark.parametrize("words", ["diagnose", "verify micro-llama --against"])
def test_a_dump_of_unknown_names_is_an_error_that_shows_how_to_name_them(words: str, tmp_path: Path):
    unread = write(tmp_path / "unread", {"h.0.mine": np.zeros((len(IDS), 64), np.float32)})
    result = invoke(*words.split(), str(unread), *(MODEL if words == "diagnose" else ()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert_tells(result.stderr.splitlines()[-1], unread, "h.{i}.mine", "diff --suggest", "--map names.toml")


@pytest.mark.parametrize("model", [(), MODEL])
def test_diff_names_the_first_divergence(model: tuple[str, ...], right: Path, wrong: Path):
    result = invoke("diff", str(wrong), str(right), *model)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("first divergence: l0.q_rope: error ")
    said = json.loads(invoke("diff", str(wrong), str(right), *model, "--json").stdout)
    assert said["first_divergence"] == {"pass": 0, "stage": "l0.q_rope"}
    assert invoke("diff", str(right), str(right), *model).stdout.splitlines()[-1].endswith(" stages agree")


def test_diff_aligns_chunks_with_the_whole_text(right: Path, tmp_path: Path):
    weights, passes = open_weights(builtin_path("micro-llama")), (IDS[:6], IDS[6:])
    with DumpWriter(tmp_path / "chunks", engine="mine") as writer:
        for start, ids in zip((0, 6), passes, strict=True):
            writer.begin(ids, start)
            for name, array in run(weights, Pass(IDS[: start + len(ids)]), n_cached=start).items():
                writer.add(name, array * np.float32(1.01) if (start, name) == (6, "l1.v_proj") else array)
    result = invoke("diff", str(tmp_path / "chunks"), str(right), *MODEL)
    assert result.exit_code == 1
    expected = "first divergence: l1.v_proj at position 6 (pass 1 of A, pass 0 of B): error "
    assert result.stdout.splitlines()[-1].startswith(expected)
    record = json.loads(invoke("diff", str(right), str(tmp_path / "chunks"), *MODEL, "--json").stdout)
    assert record["first_divergence"] == {"pass": 0, "stage": "l1.v_proj", "position": 6, "pass_b": 1}


def test_rows_of_a_batch_are_diagnosed_and_match_their_runs_alone(tmp_path: Path):
    def change(row: int, number: int, name: str, array: np.ndarray) -> np.ndarray:
        return array * np.float32(1.5) if (row, number, name) == (1, 0, "logits") else array

    batch = write_padded(tmp_path / "batch", on_the_left=True, change=change)
    result = invoke("diagnose", str(batch), *MODEL)
    assert (result.exit_code, "FAIL  row 2 of 3 only: logits: " in result.stdout) == (1, True)
    for row in (0, 1):
        ids = (*PROMPTS[row], STEPS[row])
        alone = write(tmp_path / f"alone{row}", run(open_weights(builtin_path("micro-llama")), Pass(ids)), ids=ids)
        result = invoke("diff", str(batch), str(alone), *MODEL)
        assert result.stdout.startswith(f"{batch}, row {row + 1} of 3 and {alone}; 1 row with equal ids\n")
        expected = "first divergence: logits at position 0 (pass 0 of A, pass 0 of B)" if row == 1 else "stages agree"
        assert (result.exit_code, expected in result.stdout.splitlines()[-1]) == (row, True)
    assert_cli_refuses(invoke("verify", "micro-llama", "--against", str(batch)), 2)


def test_diff_reads_traces_and_lists_stages_of_one_side_only(right: Path, tmp_path: Path):
    trace = tmp_path / "trace.safetensors"
    invoke("trace", "micro-llama", "--tokens", ",".join(map(str, IDS)), "-o", str(trace))
    assert invoke("diff", str(trace), str(right)).exit_code == 0
    few = write(tmp_path / "few", {"logits": np.zeros((10, 7), np.float32), "mine": np.zeros(3, np.float32)})
    result = invoke("diff", str(few), str(right))
    assert f"only in {few}: mine" in result.stdout
    assert f"only in {right}: embed, l0.attn_norm" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("first divergence: logits: shape: expected ")


QUERIES = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        ({"embed": np.roll(np.arange(len(IDS)), 1)}, 10, ("ids", "10 tokens (3 1 4 ", 17)),
        ({"first_position": 9000}, 11, ("positions", 8192, 9010)),
        ({"l2.block_out": "final_norm"}, 12, ("norm", "l2.block_out")),
        ({"production_logits": "l0.ffn_gate"}, 13, ("layout", "production_logits", "seq=10 vocab=401", "(10, 128)")),
        ({"weights": {QUERIES: "0" * 64}}, 14, ("weights", builtin_path("micro-llama"), "1 of 1", QUERIES)),
        ({"production_logits": "logits"}, 15, ("run", "token 0", "pass 0")),
    ],
)
def test_what_says_nothing_of_the_engine_is_refused_each_with_its_code(
    change: dict[str, Any], code: int, expected: tuple[object, ...], tmp_path: Path
):
    trace = run(open_weights(builtin_path("micro-llama")), Pass(IDS))
    ((name, what),) = change.items()
    if isinstance(what, str):
        trace[name] = 1.5 * trace[what] if name == "production_logits" else trace[what]
    if isinstance(what, np.ndarray):
        trace[name] = trace[name][what]
    write(tmp_path / "d", trace, **(change if name in ("weights", "first_position") else {}))
    result = invoke("diagnose", str(tmp_path / "d"), *MODEL)
    assert_cli_refuses(result, code, *expected)
    assert result.stderr.startswith(f"llorch: {tmp_path / 'd'}: {expected[0]}: ")
    assert result.stderr.count("\n") == 1


def test_arrays_of_another_width_are_left_out_or_read_and_the_rest_is_compared(tmp_path: Path):
    whole = run(open_weights(builtin_path("micro-llama")), Pass(IDS))
    trace = {name: whole[name] for name in ("embed", "l2.block_out", "final_norm", "logits", "l0.ffn_gate")}
    logits = np.concatenate([trace["logits"], np.full((10, 7), -99)], axis=1)
    right = write(tmp_path / "right", trace | {"final_norm": trace["l0.ffn_gate"], "logits": logits})
    logits[3, 404] = 99
    wrong = write(tmp_path / "wrong", trace | {"logits": logits})
    for command, code in (
        (("diagnose", str(right), *MODEL), 0),
        (("verify", "micro-llama", "--against", str(right)), 3),
    ):
        result = invoke(*command)
        assert result.exit_code == code, result.stdout
        assert_tells(result.stdout, "NOT RUN", "final_norm")
        assert_tells(result.stdout + result.stderr, "final_norm", "(10, 128)", "408 columns", "401")
    for command in (("diagnose", str(wrong), *MODEL), ("verify", "micro-llama", "--against", str(wrong))):
        result = invoke(*command)
        assert result.exit_code == 1
        assert_tells(result.stdout, "row 3", "padding column 404")


def without_offset(tensors: Tensors) -> None:
    """Set nested_offset to 0 in the state of each matrix."""
    for name, (dtype, _, data) in tensors.items():
        if name.endswith("quant_state.bitsandbytes__nf4"):
            state = json.dumps(json.loads(data) | {"nested_offset": 0.0}).encode()
            tensors[name] = (dtype, [len(state)], state)


def with_reversed_codes(tensors: Tensors, *modules: str) -> None:
    """Read the codes of some matrices of the first layer from the last byte to the first."""
    for module in modules or ("mlp.down_proj",):
        dtype, shape, data = tensors[name := f"model.layers.0.{module}.weight"]
        tensors[name] = (dtype, shape, data[::-1])


def misread(folder: Path, change: Callable[[Tensors], None], *, stages: Sequence[str] = ()) -> tuple[str, ...]:
    """The words of a diagnosis of an engine that read a folder wrongly; of the `stages`, or of all."""
    weights = open_weights(changed(folder, "bnb-nf4-double", tensors=change))
    hashes = {w.huggingface: digest(weights.array(w.name)) for w in inventory(weights.config).values()}
    trace = {name: array for name, array in run(weights, Pass(SHORT)).items() if not stages or name in stages}
    write(folder / "dump", trace, ids=SHORT, weights=hashes)
    return str(folder / "dump"), "--model", str(FOLDERS / "bnb-nf4-double")


def test_a_known_mistake_of_a_reader_is_named_from_hashes_and_from_stages(tmp_path: Path):
    result = invoke("diagnose", *misread(tmp_path, without_offset))
    assert (result.exit_code, result.stderr) == (1, "")
    (note,) = [line for line in result.stdout.splitlines() if line.startswith("note: weights: ")]
    assert_tells(note, "7 of 12 tensors", "and 4 more are read", "nested-offset-dropped", "mend the reader")
    assert "FAIL  l0.q_proj: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAIL: 1 cause ")


def test_a_mistake_that_the_dump_cannot_show_is_listed_once(tmp_path: Path):
    folder = FOLDERS / "gptq-4bit"
    dump = write(tmp_path / "dump", run(open_weights(folder), Pass(SHORT)), ids=SHORT)
    said = json.loads(invoke("diagnose", str(dump), "--model", str(folder), "--json").stdout)
    names = [name for each in said["could_not_show"].values() for name in each]
    assert "gptq-second-version-as-first" in names
    assert sorted(names) == sorted(set(names))


def test_an_unknown_mistake_of_a_reader_is_located_in_the_stages(tmp_path: Path):
    result = invoke("diagnose", *misread(tmp_path, with_reversed_codes))
    assert (result.exit_code, result.stderr) == (1, "")
    assert "FAIL  l0.ffn_out: " in result.stdout
    assert "nested-offset-dropped: explains" not in result.stdout
    (note,) = [line for line in result.stdout.splitlines() if line.startswith("note: weights: ")]
    facts = ("1 of 12 tensors", "model.layers.0.mlp.down_proj.weight has other", "only quantised", "reader")
    assert_tells(note, *facts)


def test_an_unknown_mistake_in_several_matrices_is_one_cause(tmp_path: Path):
    modules = ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
    words = misread(tmp_path, lambda tensors: with_reversed_codes(tensors, *modules))
    result = invoke("diagnose", *words)
    (found,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL  ")]
    assert_tells(found, "l0.k_proj", "no known mistake", "engine's reader")
    assert "shows in layer 0: 3 stages" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAIL: 1 cause ")


@pytest.mark.parametrize(
    ("change", "cause"), [(without_offset, "nested-offset-dropped: explains"), (with_reversed_codes, "suspect")]
)
def test_a_misread_matrix_that_no_stage_shows_is_a_cause(change: Callable[[Tensors], None], cause: str, tmp_path: Path):
    page, xml = tmp_path / "page.html", tmp_path / "cases.xml"
    words = misread(tmp_path, change, stages=("embed", "l0.attn_norm"))
    result = invoke("diagnose", *words, "--html", str(page), "--junit", str(xml))
    assert (result.exit_code, result.stderr) == (1, "")
    assert "FAIL  weights: " in result.stdout
    assert cause in result.stdout
    assert "shows in" not in result.stdout
    assert "First cause: weights" in page.read_text()
    assert "visible in" not in page.read_text()
    cases = [case.get("name") for case in ElementTree.parse(xml).iterfind(".//testcase[failure]")]
    assert cases == ["weights"]


def test_matrices_rounded_after_decoding_are_a_note_and_no_mistake(tmp_path: Path):
    folder = FOLDERS / "bnb-nf4-double"
    weights = open_weights(folder)
    arrays = {w.huggingface: weights.array(w.name) for w in inventory(weights.config).values()}
    rounded = {k: round_activations(v, "BF16") if k.endswith("_proj.weight") else v for k, v in arrays.items()}
    hashes = {name: digest(array) for name, array in rounded.items()}
    dump = write(tmp_path / "dump", {"embed": run(weights, Pass(SHORT))["embed"]}, ids=SHORT, weights=hashes)
    result = invoke("diagnose", str(dump), "--model", str(folder))
    assert (result.exit_code, result.stderr) == (0, "")
    assert_tells(result.stdout, "7 of 12", "rounded to bfloat16")
    assert result.stdout.splitlines()[-1].startswith("PASS")


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_an_engine_that_misread_its_matrices_is_no_reference(verb: str, tmp_path: Path):
    dump, option, model = misread(tmp_path, without_offset)
    words = (model, "--against", dump) if verb == "verify" else (dump, dump, option, model)
    assert_cli_refuses(invoke(verb, *words), 14, "weights", "7 of 12", "nested-offset-dropped", "mend the reader")


def test_verify_accepts_a_dump_as_reference_engine(right: Path, wrong: Path):
    result = invoke("verify", "micro-llama", "--against", str(right))
    assert result.exit_code == 0, result.stderr
    assert "one reference engine: mine" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 model, ")
    said = json.loads(invoke("verify", "micro-llama", "--against", str(wrong), "--json").stdout)
    failing = [row for row in said["comparisons"] if row["verdict"] == "FAIL"]
    assert {row["stage"] for row in failing if row["mode"] == "isolated"} == {"q_rope", "k_rope"}
    assert {row["stage"] for row in failing if row["mode"] == "chained"} == {"q_rope", "k_rope", "k_cache"}
    assert said["summary"]["first_failures"][0]["engine"] == "mine"
    assert invoke("verify", "micro-llama", "--against", str(wrong)).exit_code == 1


def test_error_of_a_declared_arithmetic_is_rounding_and_passes_verify(tmp_path: Path):
    trace = run(open_weights(builtin_path("micro-llama")), Pass(IDS))
    shown = {name: trace[name] for name in ("embed", "l0.attn_norm", "l0.q_proj")}
    dump = str(write(tmp_path / "half", shown, dtype="bfloat16"))
    said = json.loads(invoke("diagnose", dump, *MODEL, "--json").stdout)
    assert {stage["verdict"] for stage in said["stages"]} == {"ROUNDING"}
    said = json.loads(invoke("verify", "micro-llama", "--against", dump, "--json").stdout)
    assert {comparison["verdict"] for comparison in said["comparisons"]} == {"PASS"}


@pytest.mark.slow
def test_an_adapter_folder_makes_it_a_dump_of_training(tmp_path: Path):
    weights = open_weights(builtin_path("micro-qwen3"))
    write_peft(make_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    dump = TrainingCase(next(bug for bug in BUGS if bug.name == "eps-inside"), "micro-qwen3", "usual").write(tmp_path)
    files = {name: tmp_path / f"report.{name}" for name in ("html", "junit")}
    options = [str(word) for name, path in files.items() for word in (f"--{name}", path)]
    result = invoke("diagnose", str(dump), "--model", "micro-qwen3", "--adapter", str(tmp_path / "adapter"), *options)
    assert result.exit_code == 1, result.stderr
    assert "adamw-eps-inside-root: explains" in result.stdout
    assert all(re.search(r"\beps\b.*\broot\b", path.read_text(encoding="utf-8")) for path in files.values())


def test_a_dump_of_experts_is_read_with_their_ids_as_integers(tmp_path: Path):
    model = ("--model", "micro-qwen3-moe")
    invoke("trace", "micro-qwen3-moe", "--tokens", ",".join(map(str, IDS)), "-o", str(tmp_path / "dump"))
    assert "PASS" in invoke("diagnose", str(tmp_path / "dump"), *model).stdout
    trace = run(open_weights(builtin_path("micro-qwen3-moe")), Pass(IDS))
    trace["l1.topk_ids"] = trace["l1.topk_ids"].astype(np.int32) + 100  # of no expert
    result = invoke("diagnose", str(write(tmp_path / "wrong", trace)), *model)
    assert result.exit_code == 1
    assert "FAIL  l1.topk_ids: " in result.stdout


def printed(diagnosis: Diagnosis, *, every: bool = False) -> list[str]:
    out = Stdout(file=io.StringIO(), markup=False, highlight=False, emoji=False, soft_wrap=True, width=200)
    print_diagnosis(out, diagnosis, every=every)
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


def stages(lines: list[str]) -> list[str]:
    """The first column of the table."""
    start = next(at for at, line in enumerate(lines) if "error/tolerance" in line)
    return [line.split("  ")[0] for line in lines[start + 1 : lines.index("", start)]]


def test_the_table_ends_with_the_first_cause():
    lines = printed(diagnoses.two_bugs())
    assert stages(lines)[:2] == ["embed", "layer 0"]
    assert [name.split()[0] for name in stages(lines)[2:]] == [
        f"l1.{stage}" for stage in ("attn_norm", "q_proj", "k_proj", "v_proj", "q_rope")
    ]


def test_causes_come_before_roundings_and_then_missing_stages():
    text = "\n".join(printed(diagnoses.two_bugs(), every=True))
    order = ("FAIL  l1.q_rope", "FAIL  l3.v_proj", "ROUNDING  l3.ffn_act", "cannot show", "2 causes in 79 stages")
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    (line,) = [line for line in text.splitlines() if "rope-interleaved-pairs: " in line and "found: " in line]
    assert_tells(line, "99.98 %", "interleaved")
    assert "near miss: rope-theta: theta is 10000 here, the file says 500000; explains 61.00 %" in text
    assert "them: rope-sine-sign" in text
    assert "shows in layers 1-2: 2 stages" in text
    assert "12 tokens: mask-window" in text


def test_many_right_layers_are_one_line():
    assert stages(printed(diagnoses.hundred_layers()))[1].startswith("layers 0-89")


def test_a_right_dump_has_a_line_for_each_stage_of_the_table():
    lines = printed(diagnoses.right())
    assert len(stages(lines)) == 22
    hint = "--all shows every stage and the 3 known mistakes that this dump cannot show"
    assert lines[-1] == f"PASS: nothing is wrong; 79 stages compared; {hint}"
    assert not any("cannot show:" in line for line in lines)


def test_near_miss_is_left_out_below_a_cause_that_explains_everything():
    diagnosis = diagnoses.two_bugs()
    first = diagnosis.findings[0]
    certain = replace(first, causes=tuple(replace(cause, explained_share=0.99995) for cause in first.causes))
    assert any("near miss" in line for line in printed(diagnosis))
    assert not any("near miss" in line for line in printed(replace(diagnosis, findings=[certain])))


@pytest.mark.nightly_cases("every_layer", "logits_only", "two_passes")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[pytest.mark.nightly] if make is diagnoses.hundred_layers else [])  # 1900 lines
        for make in diagnoses.ALL
    ],
)
def test_every_stage_is_shown_where_that_is_asked_for(make: Callable[[], Diagnosis]):
    made = make()
    lines = printed(made, every=True)
    if made.results:
        assert len(stages(lines)) == len(made.results)
        assert any("inherited" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_findings_without_end_are_counted():
    assert "and 47 more; --json and --html have all" in printed(diagnoses.every_layer())


def test_non_finite_stage_is_reported_in_its_place():
    (line,) = [line for line in printed(diagnoses.not_finite()) if line.startswith("l0.attn_scores")]
    assert line.split()[1:5] == ["non-finite", "4.8e-07", "infinity", "FAIL"]
