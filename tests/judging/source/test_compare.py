"""Right files pass, and the first finding about a wrong file is the mistake of its converter."""

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from builders.conversion_mistakes import MISTAKES
from builders.converter import Plan, SourceConfig, convert, plan_conversion, quantise, random_importances, write_plan
from builders.damaged_files import cut_tensor, damage_block, exchange_rows, scale_block
from builders.source_folders import FAMILIES, read_tensors, to_bfloat16, write_model
from helpers.refusals import assert_tells, refuses

from llorch.files import convert as conversion
from llorch.files import open_weights
from llorch.files.opening import open_table
from llorch.files.packed import has_codes
from llorch.files.quant import GGMLType
from llorch.judging.source.compare import SourceReport, compare_with_source
from llorch.judging.source.tensors import ModelTensors
from llorch.runtime.builtin import EVERY, builtin_path
from llorch.runtime.errors import UserError

Folders = Mapping[str, Path]
CONVERTED = [name for name in EVERY if name != "micro-mistral"]  # llama.cpp has no sliding windows for Mistral


def compare(file_path: Path, source_path: Path) -> SourceReport:
    file, source = open_table(file_path, is_complete=False), open_weights(source_path)
    with closing(file.source), closing(source.source):
        return compare_with_source(file, source, model="file")


class Finding(NamedTuple):
    """First finding about a wrong file: part, name and explanation of the cause, and its weights or key."""

    part: str
    name: str
    sentence: str
    subjects: frozenset[str]


def findings_of(report: SourceReport) -> list[Finding]:
    """List the findings in the order in which the command prints them: causes, then failures without one."""
    findings = [Finding("weights", cause.name, cause.sentence, frozenset(cause.stages)) for cause in report.causes]
    explained = {name for cause in report.causes for name in cause.stages}
    for failure in report.failures:
        ref = failure.stage_ref
        if ref.part not in explained:
            findings.append(Finding(ref.stage, ref.part, failure.note, frozenset([ref.part])))
    return findings


RIGHT_TYPES = {  # file type of llama.cpp: types of the matrices in the files of all families
    "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0 Q6_K", "Q4_1": "Q4_1 Q6_K", "Q5_0": "Q5_0 Q6_K",
    "Q5_1": "Q5_1 Q6_K", "Q2_K": "Q2_K Q3_K Q6_K", "Q2_K_S": "Q2_K Q6_K", "Q3_K_S": "Q3_K Q6_K",
    "Q3_K_M": "Q3_K Q4_K Q5_K Q6_K", "Q3_K_L": "Q3_K Q5_K Q6_K", "Q4_K_S": "Q4_K Q5_K Q6_K", "Q4_K_M": "Q4_K Q6_K",
    "Q5_K_S": "Q5_K Q6_K", "Q5_K_M": "Q5_K Q6_K", "Q6_K": "Q6_K", "IQ4_NL": "IQ4_NL Q6_K", "IQ4_XS": "IQ4_XS Q6_K",
    "TQ1_0": "TQ1_0 Q4_K Q6_K", "TQ2_0": "TQ2_0 Q4_K Q6_K", "MXFP4_MOE": "MXFP4 Q8_0", "Q1_0": "Q1_0 Q6_K",
    "IQ3_S": "IQ3_S Q6_K", "IQ3_M": "IQ3_S Q4_K Q6_K", "IQ3_XS": "IQ3_S IQ3_XXS Q6_K",
    "IQ3_XXS": "IQ2_S IQ3_S IQ3_XXS Q5_K", "IQ2_S": "IQ2_XS IQ3_S Q4_K Q5_K", "IQ2_M": "IQ2_S IQ3_S Q4_K Q5_K",
    "IQ2_XS": "IQ2_XS Q2_K Q4_K Q5_K", "IQ2_XXS": "IQ2_XXS Q2_K Q4_K Q5_K", "IQ1_S": "IQ1_S IQ2_XXS Q2_K Q4_K Q5_K",
    "IQ1_M": "IQ1_M IQ2_XXS Q2_K Q4_K Q5_K",
}  # fmt: skip
NEED_IMPORTANCES = {"Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ2_S", "IQ2_M", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"}


@pytest.fixture(scope="module")
def right_files(source_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Right F32 files by family; read-only."""
    parent = tmp_path_factory.mktemp("right")
    return {family: convert(folder, parent / f"{family}.gguf") for family, folder in source_folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_right_float_file_passes_without_a_note_on_a_weight(source_folders: Folders, right_files: Folders, family: str):
    report = compare(right_files[family], source_folders[family])
    assert findings_of(report) == []
    assert [note.note for note in report.notes if note.stage_ref.stage == "weights"] == []
    assert max(weight.error for weight in report.weights) < 1e-6
    assert {ref.stage for ref in (comparison.stage_ref for comparison in report.comparisons)} == {
        "settings", "tokenizer", "weights",
    }  # fmt: skip
    assert report.smallest_errors.keys() == {"F32"}


def test_right_q8_0_file_of_the_gguf_package_passes(source_folders: Folders, tmp_path: Path):
    for family, folder in source_folders.items():
        assert_right(convert(folder, tmp_path / f"{family}.gguf", kind="Q8_0"), folder)


def assert_right(path: Path, folder: Path) -> set[str]:
    """Assert that a file passes, each weight judged in the type that it has in the file; return those of matrices."""
    report = compare(path, folder)
    assert findings_of(report) == [], path
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    file = open_table(path)
    forms = ModelTensors(file).forms
    assert {weight.name for weight in report.weights} == forms.keys()
    for weight in report.weights:
        assert weight.types[0].name == stored[forms[weight.name].tensors[0]].tensor_type.name, weight.name
        assert weight.blocks.n_blocks > 0
    file.source.close()
    is_float = {weight.name: not has_codes(weight.types[0]) for weight in report.weights}
    assert all(weight.error < 1e-2 for weight in report.weights if is_float[weight.name])
    kinds = {tensor.tensor_type.name for tensor in stored.values() if len(tensor.shape) > 1}
    return kinds - {"F32"}


@pytest.mark.live
@pytest.mark.nightly_cases(but=["Q4_K_M", "Q4_0"])
@pytest.mark.parametrize("kind", RIGHT_TYPES)
def test_right_file_of_llama_cpp_s_quantiser_passes(
    source_folders: Folders, right_files: Folders, tmp_path: Path, kind: str
):
    for has_importances in (True,) if kind in NEED_IMPORTANCES else (False, True):
        kinds: set[str] = set()
        for family, path in right_files.items():
            importances = random_importances(path) if has_importances else None
            file = quantise(path, tmp_path / "file.gguf", kind, importances=importances)
            kinds |= assert_right(file, source_folders[family])
        assert kinds == {*RIGHT_TYPES[kind].split()}


class Expected(NamedTuple):
    """Expected first finding: part, pattern of the name, and facts that the explanation names."""

    part: str
    name: str
    facts: tuple[object, ...] = ()


def _weights(name: str, *facts: object) -> Expected:
    return Expected("weights", name, facts)


NEXT = "model.layers.1"
EXPECTED: dict[str, Expected] = {
    "q and k not permuted": _weights("not reordered"),
    "q and k permuted twice": _weights("reordered twice"),
    "q and k permuted without need": _weights("reordered for RoPE"),
    "k permuted with the heads of q": _weights("reordered for RoPE", 4),
    "heads of q in another order": _weights("rows in another order", "heads"),
    "k and v exchanged": _weights("exchanged modules", "self_attn.k_proj", "self_attn.v_proj", "exchanged"),
    "norms without the 1": _weights("norm without 1"),
    "norms with the 1 twice": _weights("norm plus 1"),
    "norms with the 1 without need": _weights("norm plus 1"),
    "gated norm with the 1": _weights("norm plus 1"),
    "decay without exp": _weights("decay without exp"),
    "convolution reversed": _weights("columns reversed"),
    "value heads not reordered": _weights("not reordered"),
    "columns of the delta net's output not reordered": _weights("not reordered"),
    "rounded to FP8 first": _weights("near values"),
    "gate and up exchanged": _weights("exchanged modules", "mlp.gate_proj", "mlp.up_proj", "exchanged"),
    "gate and up of the experts exchanged": _weights(
        "exchanged modules", "mlp.experts.gate_proj", "mlp.experts.up_proj", "exchanged"
    ),
    "experts in another order": _weights("rows in another order", "experts"),
    "mixer output of another layer": _weights(f"holds {NEXT}.*.o*_proj.weight"),
    "down projection of another layer": _weights(f"holds {NEXT}.mlp*.down_proj.weight"),
    "router of another layer": _weights(f"holds {NEXT}.mlp.gate.weight"),
    "time step bias of another layer": _weights(f"holds {NEXT}.linear_attn.dt_bias"),
    "two layers exchanged": _weights("exchanged layers", "layer 0", "layer 1"),
    "v bias equal to the k bias": _weights("holds model.layers.0.self_attn.k_proj.bias"),
    "head of its own though tied": _weights("rows in another order"),
    "head equal to the embedding": _weights("holds model.embed_tokens.weight"),
    "head left out": _weights("head left out"),
    "embedding rows exchanged": _weights("rows in another order", "row 17", "row 42"),
    "vocabulary cut": Expected("tokenizer", "tokens"),
    "zeroed matrix": _weights("zeroed", 0),
    "biases of zeros": _weights("zeroed", 0),
    "transposed matrix": _weights("transposed"),
    "scaled by 2 %": _weights("scaled", 1.02),
    "scaled by the square root of 2": _weights("scaled", 1.41),
    "shard written twice": _weights("rows in another order", 128),
    "NaN in a tensor": _weights("non-finite", 1),
    "infinity in a tensor": _weights("non-finite", 1),
    "constant norm": _weights("constant", 1),
    "RoPE factors missing": Expected("settings", "rope_scaling"),
    "another RoPE base": Expected("settings", "rope_theta", ("10000.0",)),
    "RoPE over the whole head": Expected("settings", "partial_rotary_factor", ("1.0", "0.25")),
    "another epsilon": Expected("settings", "rms_norm_eps", ("1e-05", "1e-06")),
    "another number of key heads": Expected("refused", "num_key_value_heads", (4, 2)),
    "another number of experts": Expected("settings", "num_experts_per_tok", (3, 2)),
    "another end token": Expected("tokenizer", "end"),
    "begin token reversed": Expected("tokenizer", "add_bos", ("BOS",)),
    "another pre-tokenizer": Expected("tokenizer", "pre_tokenizer"),
    "control tokens as text": Expected("tokenizer", "types"),
    "two tokens exchanged": Expected("tokenizer", "tokens", ("token 70", "token 75")),
    "two merges exchanged": Expected("tokenizer", "merges", ("merge 0", "merge 1")),
    "another marker in the chat template": Expected("tokenizer", "chat_template", ("<|end|>",)),
}
NOT_QUANTISED = {"NaN in a tensor", "infinity in a tensor"}  # llama.cpp's quantiser refuses these


def test_every_mistake_has_an_expected_finding():
    assert EXPECTED.keys() == MISTAKES.keys()


def assert_first_finding(path: Path, folder: Path, mistake: str) -> None:
    """Assert that the only finding about a wrong file is the mistake, with its tensors."""
    expected, subjects = EXPECTED[mistake], subjects_of(folder, mistake)
    if expected.part == "refused":
        with refuses(UserError, expected.name, *expected.facts):
            compare(path, folder)
        return
    findings = findings_of(compare(path, folder))
    assert len(findings) == 1, (mistake, findings)
    first = findings[0]
    assert first.part == expected.part
    assert fnmatchcase(first.name, expected.name), (mistake, first)
    assert_tells(first.sentence, *expected.facts)
    assert first.subjects == (subjects if first.part == "weights" else {expected.name})


def subjects_of(folder: Path, mistake: str) -> set[str]:
    """Return the canonical names of the weights that a mistake changes."""
    tensors, weights = MISTAKES[mistake].tensors(SourceConfig.read(folder)), open_table(folder)
    mapping = gguf.get_tensor_name_map(SourceConfig.read(folder).architecture, weights.config.n_layers)
    names = [*ModelTensors(weights).forms, "lm_head.weight"]
    weights.source.close()

    def gguf_name(name: str) -> str | None:
        return mapping.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))

    return {name for name in names if gguf_name(name) in tensors}


def applies(family: str, mistake: str, folders: Folders) -> bool:
    return MISTAKES[mistake].applies(SourceConfig.read(folders[family]))


@pytest.mark.parametrize("mistake", EXPECTED)
def test_first_finding_about_a_wrong_float_file_is_its_mistake(source_folders: Folders, tmp_path: Path, mistake: str):
    family = next(family for family in FAMILIES if applies(family, mistake, source_folders))
    folder = source_folders[family]
    assert_first_finding(convert(folder, tmp_path / "wrong.gguf", mistake), folder, mistake)


@pytest.mark.live
@pytest.mark.nightly_cases(but=["llama-Q4_K_M"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_finding_about_each_wrong_file_is_its_mistake(
    source_folders: Folders, tmp_path: Path, family: str, kind: str
):
    folder, path = source_folders[family], tmp_path / "wrong.gguf"
    mistakes = [mistake for mistake in MISTAKES if applies(family, mistake, source_folders)]
    assert len(mistakes) >= 30
    for mistake in mistakes:
        convert(folder, path, mistake)
        if kind == "F32":
            assert_first_finding(path, folder, mistake)
        elif mistake not in NOT_QUANTISED:
            assert_first_finding(quantise(path, tmp_path / "quantised.gguf", kind), folder, mistake)


PAIRS = [  # family, two mistakes
    ("llama", "q and k not permuted", "gate and up exchanged"),
    ("llama", "scaled by 2 %", "another RoPE base"),
    ("qwen2", "biases of zeros", "two tokens exchanged"),
    ("qwen3", "embedding rows exchanged", "norms with the 1 without need"),
    ("qwen3_5", "decay without exp", "columns of the delta net's output not reordered"),
    ("qwen3_moe", "experts in another order", "router of another layer"),
]


@pytest.mark.parametrize(("family", "first", "second"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_two_mistakes_are_two_findings(source_folders: Folders, tmp_path: Path, family: str, first: str, second: str):
    folder = source_folders[family]
    findings = findings_of(compare(convert(folder, tmp_path / "wrong.gguf", [first, second]), folder))
    expected = {mistake: EXPECTED[mistake] for mistake in (first, second)}
    assert len(findings) == 2
    for mistake, finding in expected.items():
        subjects = subjects_of(folder, mistake) if finding.part == "weights" else {finding.name}
        assert (finding.part, subjects) in [(actual.part, actual.subjects) for actual in findings], findings


def test_mistake_with_more_tensors_is_the_first_finding(source_folders: Folders, tmp_path: Path):
    mistakes = ["zeroed matrix", "q and k not permuted"]
    report = compare(convert(source_folders["llama"], tmp_path / "wrong.gguf", mistakes), source_folders["llama"])
    assert [cause.name for cause in report.causes] == ["not reordered", "zeroed"]


TENSOR = "blk.1.ffn_up.weight"
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def damaged_finding(path: Path, folder: Path, rows: set[int]) -> Finding:
    """Return the only finding about a file with a damaged tensor, after a check of the wrong rows."""
    report = compare(path, folder)
    (finding,) = findings_of(report)
    assert finding.subjects == {WEIGHT}
    (wrong,) = (weight.wrong for weight in report.weights if weight.wrong)
    assert {row for row, _ in wrong} == rows
    return finding


@pytest.mark.live
def test_exchanged_pair_of_rows_in_q4_k_is_named(source_folders: Folders, right_files: Folders, tmp_path: Path):
    path = quantise(right_files["llama"], tmp_path / "damaged.gguf", "Q4_K_M")
    exchange_rows(path, TENSOR, 100, 311)
    finding = damaged_finding(path, source_folders["llama"], {100, 311})
    assert finding.name == "rows in another order"
    assert_tells(finding.sentence, "row 100", "row 311")


@pytest.fixture
def q8_0_file(source_folders: Folders, tmp_path: Path) -> Path:
    return convert(source_folders["llama"], tmp_path / "damaged.gguf", kind="Q8_0")


def test_damaged_block_in_q8_0_is_named(source_folders: Folders, q8_0_file: Path):
    damage_block(q8_0_file, TENSOR, 100 * 8 + 3)
    finding = damaged_finding(q8_0_file, source_folders["llama"], {100})
    assert finding.name == "damaged"
    assert_tells(finding.sentence, "block 3", "row 100", 1, 4096)


def test_scale_of_a_block_off_by_two_percent_in_q8_0_is_named(source_folders: Folders, q8_0_file: Path):
    scale_block(q8_0_file, TENSOR, 100 * 8 + 3, 1.02)
    finding = damaged_finding(q8_0_file, source_folders["llama"], {100})
    assert_tells(finding.sentence, "block 3", "row 100")


def test_scale_that_is_no_number_is_named(source_folders: Folders, q8_0_file: Path):
    scale_block(q8_0_file, TENSOR, 100 * 8 + 3, float("nan"))
    finding = damaged_finding(q8_0_file, source_folders["llama"], {100})
    assert finding.name == "non-finite"
    assert_tells(finding.sentence, 32)


def test_cut_tensor_is_seen_in_all_rows_that_are_missing(source_folders: Folders, q8_0_file: Path):
    cut_tensor(q8_0_file, TENSOR, 300)
    finding = damaged_finding(q8_0_file, source_folders["llama"], {*range(300, 512)})
    assert finding.name == "zeroed rows"
    assert_tells(finding.sentence, "row 300", 212)


def test_rows_scaled_by_another_factor_are_other_values(source_folders: Folders, tmp_path: Path):
    factors = np.where(np.arange(512) % 3 == 0, 3, 1).astype(np.float32)[:, None]
    path = write_changed(
        source_folders["llama"], tmp_path / "wrong.gguf", change_each(TENSOR, lambda array: array * factors)
    )
    finding = damaged_finding(path, source_folders["llama"], {*range(0, 512, 3)})
    assert finding.name == "other values"


def test_a_block_of_q8_0_in_each_tensor_is_seen(source_folders: Folders, tmp_path: Path):
    path = convert(source_folders["qwen3_moe"], tmp_path / "damaged.gguf", kind="Q8_0")
    tensors = [tensor.name for tensor in gguf.GGUFReader(path).tensors if tensor.tensor_type.name == "Q8_0"]
    for tensor in tensors:
        damage_block(path, tensor, 5)
    report = compare(path, source_folders["qwen3_moe"])
    assert sum(bool(weight.wrong) for weight in report.weights) == len(tensors) == 16
    assert all(weight.wrong == [(0, 5)] for weight in report.weights if weight.wrong)


def write_changed(folder: Path, target: Path, change: Callable[[Plan], object]) -> Path:
    """Write a right F32 file whose plan was changed."""
    plan = plan_conversion(folder)
    change(plan)
    write_plan(plan, target, "F32")
    return target


def test_factor_that_codes_cannot_tell_from_1_is_no_cause(source_folders: Folders, tmp_path: Path):
    plan = plan_conversion(source_folders["llama"])
    plan.tensors["blk.0.ffn_down.weight"] *= np.float32(1.002)
    write_plan(plan, tmp_path / "wrong.gguf", "Q8_0")
    (cause,) = compare(tmp_path / "wrong.gguf", source_folders["llama"]).causes
    assert cause.name == "near values"


def test_missing_and_additional_tensors_and_other_shapes_are_named(source_folders: Folders, tmp_path: Path):
    def change(plan: Plan) -> None:
        del plan.tensors["blk.0.ffn_up.weight"]
        plan.tensors["blk.1.attn_q.bias"] = np.zeros(256, np.float32)
        plan.tensors["blk.0.extra.weight"] = np.zeros((3, 5), np.float32)
        plan.tensors["blk.1.ffn_down.weight"] = plan.tensors["blk.1.ffn_down.weight"][:, :256]
        plan.tensors["output.weight"] = plan.tensors["output.weight"][:64]

    folder = source_folders["llama"]
    report = compare(write_changed(folder, tmp_path / "wrong.gguf", change), folder)
    notes = {failure.stage_ref.part: failure.note for failure in report.failures}
    assert notes.keys() == {
        "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias", "blk.0.extra.weight",
        "model.layers.1.mlp.down_proj.weight", "lm_head.weight",
    }  # fmt: skip
    assert notes.keys().isdisjoint(weight.name for weight in report.weights)  # their values are not compared
    assert_tells(notes["model.layers.0.mlp.up_proj.weight"], "missing")
    assert_tells(notes["model.layers.1.self_attn.q_proj.bias"], "additional")
    assert_tells(notes["blk.0.extra.weight"], "additional", "blk.0.extra.weight")
    assert_tells(notes["model.layers.1.mlp.down_proj.weight"], "(256, 256)", "(256, 512)")


def test_expert_that_is_missing_in_a_folder_is_named(source_folders: Folders, tmp_path: Path):
    folder = source_folders["qwen3_moe"]
    tensors, dtypes = read_tensors(folder)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[name]
    (target := tmp_path / "folder").mkdir()
    write_model(target, SourceConfig.read(folder).values, tensors, dtypes)
    failures = [failure for failure in compare(target, folder).failures if failure.stage_ref.stage == "weights"]
    assert [failure.stage_ref.part for failure in failures] == ["model.layers.1.mlp.experts.up_proj.weight"]
    assert_tells(failures[0].note, name, "missing")


def test_head_that_equals_the_tied_embedding_is_no_difference(source_folders: Folders, tmp_path: Path):
    def untie(plan: Plan) -> None:
        plan.tensors["output.weight"] = plan.tensors["token_embd.weight"]

    folder = source_folders["qwen3"]
    report = compare(write_changed(folder, tmp_path / "right.gguf", untie), folder)
    assert findings_of(report) == []
    assert "lm_head.weight" in {weight.name for weight in report.weights}


def test_padding_rows_of_the_embedding_are_no_difference(source_folders: Folders, tmp_path: Path):
    folder = source_folders["llama"]
    tensors, dtypes = read_tensors(folder)
    padded = {name: np.pad(tensors[name], [(0, 15), (0, 0)]) for name in tensors if len(tensors[name]) == 401}
    assert padded.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    (target := tmp_path / "folder").mkdir()
    write_model(target, dict(SourceConfig.read(folder).values) | {"vocab_size": 416}, tensors | padded, dtypes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    for pair in ((target, folder), (folder, target)):
        report = compare(*pair)
        assert findings_of(report) == []
        assert "vocab_size" in {note.stage_ref.part for note in report.notes}


def change_each(pattern: str, function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Plan], None]:
    """Return the change of a plan that replaces each tensor whose name fits a pattern."""

    def change(plan: Plan) -> None:
        for name in [name for name in plan.tensors if fnmatchcase(name, pattern)]:
            plan.tensors[name] = np.ascontiguousarray(function(plan.tensors[name]), np.float32)

    return change


def exchange(first: int, second: int) -> Callable[[np.ndarray], np.ndarray]:
    def exchanged(array: np.ndarray) -> np.ndarray:
        order = np.arange(len(array))
        order[[first, second]] = second, first
        return array[order]

    return exchanged


def reorder_back(plan: Plan) -> None:
    """Order the rows of q and k as the inverse of the right permutation does."""
    for name in [name for name in plan.tensors if ".attn_q." in name or ".attn_k." in name]:
        array = plan.untransformed[name]
        plan.tensors[name] = array.reshape(-1, 32, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def write_gate_twice(plan: Plan) -> None:
    plan.tensors |= {f"blk.{layer}.ffn_up.weight": plan.tensors[f"blk.{layer}.ffn_gate.weight"] for layer in (0, 1)}


def mix_layers(plan: Plan) -> None:
    """Exchange the norms of the layers 0 and 1, and write the down projection of layer 1 into both layers."""
    plan.tensors |= {
        f"blk.{layer}.ffn_norm.weight": plan.tensors[f"blk.{1 - layer}.ffn_norm.weight"] for layer in (0, 1)
    }
    plan.tensors["blk.0.ffn_down.weight"] = plan.tensors["blk.1.ffn_down.weight"]


def add_noise(array: np.ndarray) -> np.ndarray:
    return array * (1 + 0.05 * np.random.default_rng(0).random(array.shape))


OTHER_FORMS: dict[str, tuple[str, Callable[[Plan], None], list[Expected]]] = {  # family, change, findings
    "decay without sign": ("qwen3_5", change_each("*ssm_a", np.negative), [_weights("decay without sign", 2)]),
    "reordered back": ("llama", reorder_back, [_weights("reordered back", 4)]),
    "other sign": ("llama", change_each("blk.1.attn_v.weight", np.negative), [_weights("scaled", -1)]),
    "elements of a norm exchanged": (
        "llama", change_each("blk.1.attn_norm.weight", exchange(3, 200)),
        [_weights("rows in another order", "row 3", "row 200")],
    ),
    "values of a bias of other heads": (
        "qwen2", change_each("blk.1.attn_q.bias", lambda array: np.roll(array, 64)),
        [_weights("rows in another order", "heads")],
    ),
    "rows in reverse order": (
        "llama", change_each("blk.1.ffn_up.weight", lambda array: array[::-1]), [_weights("rows in another order")]
    ),
    "gate in place of up": ("llama", write_gate_twice, [_weights("exchanged modules", "mlp.gate_proj", "in place")]),
    "norms of exchanged layers": (
        "llama", mix_layers, [_weights("exchanged layers", "layer 0", "layer 1", 3)],
    ),
    "random values": (
        "llama", change_each("blk.1.ffn_up.weight", lambda array: np.random.default_rng(0).permuted(array)),
        [_weights("other values")],
    ),
    "noise": (
        "llama",
        change_each("blk.1.ffn_up.weight", add_noise),
        [_weights("near values", 10)],
    ),
    "gains without the 1": (
        "qwen3_5", change_each("blk.[01].attn_norm.weight", lambda gain: gain - 1), [_weights("norm without 1", 2)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_wrong_forms_are_named(source_folders: Folders, tmp_path: Path, form: str):
    family, change, expected = OTHER_FORMS[form]
    folder = source_folders[family]
    findings = findings_of(compare(write_changed(folder, tmp_path / "wrong.gguf", change), folder))
    assert [finding.name for finding in findings] == [finding.name for finding in expected]
    for actual, finding in zip(findings, expected, strict=True):
        assert_tells(actual.sentence, *finding.facts)


@pytest.mark.parametrize("part", ["gate", "down"])
def test_experts_in_another_order_are_named_if_their_matrices_are_not_square(tmp_path: Path, part: str):
    source, folder = builtin_path("micro-qwen3-moe"), tmp_path / "folder"
    conversion.convert(source, folder, ggml_type=GGMLType.F32)
    tensors, dtypes = read_tensors(folder)
    names = [f"model.layers.0.mlp.experts.{number}.{part}_proj.weight" for number in (1, 2, 3)]
    tensors |= dict(zip(names, [tensors[name] for name in (*names[1:], names[0])], strict=True))
    write_model(folder, SourceConfig.read(folder).values, tensors, dtypes)
    (finding,) = findings_of(compare(folder, source))
    assert finding.name == "rows in another order"
    assert_tells(finding.sentence, "experts")


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    return (to_bfloat16(array).astype(np.uint32) << 16).view(np.float32)


def test_logarithm_of_a_decay_may_be_rounded_twice(source_folders: Folders, tmp_path: Path):
    tensors, dtypes = read_tensors(source_folders["qwen3_5"])
    rounded = {name: np.log(np.exp(array)) if name.endswith("A_log") else array for name, array in tensors.items()}
    source = convert(source_folders["qwen3_5"], tmp_path / "source.gguf")
    (folder := tmp_path / "folder").mkdir()
    write_model(folder, SourceConfig.read(source_folders["qwen3_5"]).values, rounded, dtypes)
    report = compare(folder, source)
    assert [failure for failure in report.failures if failure.stage_ref.stage == "weights"] == []
    assert any(weight.error > 0 for weight in report.weights)


LAWFUL_ROUNDINGS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {  # tensors, rounding of a converter
    "1 added in the type of the source": ("*attn_norm.weight", round_to_bfloat16),
    "exp of another library": ("*ssm_a", lambda decay: np.nextafter(decay, np.float32(0))),
}


@pytest.mark.parametrize("rounding", LAWFUL_ROUNDINGS)
def test_lawful_rounding_of_a_converter_passes(source_folders: Folders, tmp_path: Path, rounding: str):
    pattern, function = LAWFUL_ROUNDINGS[rounding]
    folder = source_folders["qwen3_5"]
    path = write_changed(folder, tmp_path / "file.gguf", change_each(pattern, function))
    assert any(weight.error > 0 for weight in compare(path, folder).weights)
    assert findings_of(compare(path, folder)) == []
    path = write_changed(folder, tmp_path / "file.gguf", change_each(pattern, lambda array: array * np.float32(1.02)))
    assert [finding.part for finding in findings_of(compare(path, folder))] == ["weights"]


@pytest.mark.parametrize("name", CONVERTED)
def test_built_in_model_in_the_other_format_passes(name: str, tmp_path: Path):
    path = builtin_path(name)
    target = tmp_path / ("model.gguf" if path.is_dir() else "folder")
    conversion.convert(path, target, ggml_type=GGMLType.F32)
    for pair in ((target, path), (path, target)):
        report = compare(*pair)
        assert findings_of(report) == []
        assert len(report.weights) >= 12


def round_matrices(kind: str, *, only: str = "") -> Callable[[Plan], None]:
    """Return the change of a plan that rounds all matrices to a type of ggml."""

    def change(plan: Plan) -> None:
        ggml_type = gguf.GGMLQuantizationType[kind]
        for name, array in plan.tensors.items():
            if array.ndim > 1 and only in name:
                plan.tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(array, ggml_type), ggml_type)

    return change


def weight_notes(report: SourceReport) -> set[str]:
    return {note.note for note in report.notes if note.stage_ref.stage == "weights"}


@pytest.fixture(scope="module")
def precise_source(source_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source in F32 whose matrices no smaller float type holds."""
    tensors, _ = read_tensors(source_folders["llama"])
    rng = np.random.default_rng(0)
    tensors = {
        name: array * (1 + 1e-2 * rng.random(array.shape)).astype(np.float32) if array.ndim > 1 else array
        for name, array in tensors.items()
    }
    folder = tmp_path_factory.mktemp("precise") / "source"
    folder.mkdir()
    return write_model(folder, SourceConfig.read(source_folders["llama"]).values, tensors, {})


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0"])
def test_file_of_a_copy_in_another_type_is_a_note(precise_source: Path, tmp_path: Path, kind: str):
    report = compare(write_changed(precise_source, tmp_path / "file.gguf", round_matrices(kind)), precise_source)
    assert [failure for failure in report.failures if failure.stage_ref.stage == "weights"] == []
    (note,) = weight_notes(report)
    assert_tells(note, kind)
    assert {weight.copy.name for weight in report.weights if weight.copy is not None} == {kind}


def test_exchanged_rows_of_a_copy_in_another_type_are_fail(precise_source: Path, tmp_path: Path):
    def change(plan: Plan) -> None:
        round_matrices("BF16")(plan)
        plan.tensors[TENSOR] = exchange(101, 103)(plan.tensors[TENSOR])

    report = compare(write_changed(precise_source, tmp_path / "file.gguf", change), precise_source)
    assert [failure.stage_ref.part for failure in report.failures if failure.stage_ref.stage == "weights"] == [WEIGHT]


def test_values_rounded_to_the_nearest_pass_and_truncated_values_fail(precise_source: Path, tmp_path: Path):
    plan = plan_conversion(precise_source)
    write_plan(plan, tmp_path / "right.gguf", "BF16")
    report = compare(tmp_path / "right.gguf", precise_source)
    assert (weight_notes(report), report.causes) == (set(), [])
    plan.tensors[TENSOR] = (plan.tensors[TENSOR].view(np.uint32) & 0xFFFF0000).view(np.float32)
    write_plan(plan, tmp_path / "wrong.gguf", "BF16")
    (cause,) = compare(tmp_path / "wrong.gguf", precise_source).causes
    assert (cause.name, cause.stages) == ("near values", (WEIGHT,))


def test_rounding_that_no_copy_explains_is_fail(precise_source: Path, tmp_path: Path):
    path = write_changed(precise_source, tmp_path / "file.gguf", round_matrices("Q5_0", only="ffn_up"))
    (cause,) = compare(path, precise_source).causes
    assert (cause.name, len(cause.stages)) == ("near values", 2)


def test_quantised_file_of_a_quantised_source_is_a_note_with_both_types(source_folders: Folders, tmp_path: Path):
    source = convert(source_folders["llama"], tmp_path / "source.gguf", kind="Q8_0")
    plan = plan_conversion(source_folders["llama"])
    round_matrices("Q8_0")(plan)
    write_plan(plan, tmp_path / "file.gguf", "Q4_0")  # type: ignore[arg-type]
    report = compare(tmp_path / "file.gguf", source)
    assert findings_of(report) == []
    (note,) = weight_notes(report)
    assert_tells(note, "Q4_0", "Q8_0")


def test_smallest_errors_are_those_that_fail(source_folders: Folders, tmp_path: Path):
    path = convert(source_folders["llama"], tmp_path / "file.gguf", kind="Q8_0")
    smallest = compare(path, source_folders["llama"]).smallest_errors
    assert smallest.keys() == {"Q8_0"}
    percents = [float(number) for number in re.findall(r"([\d.]+)%", smallest["Q8_0"])]
    assert len(percents) == 3
    assert percents == sorted(percents)
    assert percents[0] <= 0.2
