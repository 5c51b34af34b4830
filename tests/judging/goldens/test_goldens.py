"""Goldens as files: the store, and checkpoint 13: saved, read, refused without a part, made again the same."""

import importlib
import lzma
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.stored_goldens import quantised_golden
from safetensors.numpy import load

from llorch.engines import LoadPath
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.goldens.quantised import FOLDER, ROUNDED_TO, QuantisedGolden, read, save, types
from llorch.judging.goldens.store import SUFFIX, GoldenStore, read_arrays, read_distances, write_arrays, write_distances
from llorch.ops.rounding import VARIANTS, round_activations
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import Difference
from llorch.stages.stage_ref import Pass
from llorch.stages.table import input_keys, keys


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(goldens_folder()))
        yield importlib.import_module("make_quantised")


def test_what_is_saved_is_read_and_gives_the_same_bytes(tmp_path: Path):
    some = {name: quantised_golden().traces[name] for name in ("F16", "IQ4_NL", "Q4_K_M")}  # one of each family
    save(tmp_path, replace(quantised_golden(), traces=some))
    stored = goldens_folder() / FOLDER
    written = {"golden.json", *(f"{name}{SUFFIX}" for name in ("blocks", "rounding", *some))}
    assert {file.name for file in tmp_path.iterdir()} == written
    traces = {f"{name}{SUFFIX}" for name in quantised_golden().traces}
    assert {file.name for file in stored.iterdir()} == written | traces
    for name in written:
        assert (tmp_path / name).read_bytes() == (stored / name).read_bytes()


def test_goldens_say_where_they_come_from():
    provenance = quantised_golden().provenance
    engine = provenance["engines"]["llamacpp"]  # pyright: ignore[reportIndexIssue]
    assert engine["knobs"]["weights"].endswith("file")  # and not decoded to a type
    assert quantised_golden().engine_outputs("Q8_0")["llamacpp"].load_path == LoadPath("llamacpp", "llamacpp")
    assert engine["knobs"]["type_k"] == engine["knobs"]["type_v"] == "F32"
    assert {"command", "rounding", "numpy", "machine"} <= provenance.keys()


def test_goldens_take_less_than_12_megabytes():
    assert sum(file.stat().st_size for file in (goldens_folder() / FOLDER).iterdir()) < 12e6


@pytest.mark.parametrize(
    ("part", "missing"),
    [("blocks", ("BF16.blocks", "BF16.values")), ("rounding", ("BF16.rows",)), ("files", ("BF16", "F16"))],
    ids=["blocks", "rounding", "files"],
)
def test_goldens_without_one_of_their_parts_are_refused(part: str, missing: tuple[str, ...], tmp_path: Path):
    whole = replace(quantised_golden(), traces={name: {"logits": np.zeros(1)} for name in MODELS})  # written quickly
    less = dict(list(getattr(whole, part).items())[2:])
    save(tmp_path, replace(whole, **{part: less}))
    with refuses(ValueError, ", ".join(missing), where=tmp_path):
        read(tmp_path)


def test_blocks_of_every_type_hold_ordinary_and_edge_cases():
    for kind in types():
        blocks, values = (quantised_golden().blocks[f"{kind.name}.{part}"] for part in ("blocks", "values"))
        assert blocks.shape[1] == BLOCK_SIZES[kind][1]
        assert values.shape == (len(blocks), BLOCK_SIZES[kind][0])
        assert np.isfinite(values[:4]).all()
        assert len(blocks) >= 14
        assert (np.abs(values[np.isfinite(values)]) < 1e-4).any()


def test_rows_hold_halves_ties_denormals_and_scales_out_of_range():
    for kind in ("Q8_0", "Q8_1", "Q8_K"):
        rows = quantised_golden().rounding[f"{kind}.rows"]
        assert (rows == 0).all(axis=1).any()
        assert ((np.abs(rows) > 0) & (np.abs(rows) < 1e-38)).any()
        largest = np.abs(rows).max(axis=1, keepdims=True)
        assert ((rows == largest).any(axis=1) & (rows == -largest).any(axis=1) & (largest[:, 0] > 0)).any()
        codes = rows / np.where(largest > 0, largest, 1) * 127
        assert (np.abs(codes % 1 - 0.5) < 1e-6).sum() > 100


def test_variants_differ_on_the_stored_rows_and_agree_on_the_inputs_of_the_stored_products():
    rows = quantised_golden().rounding["Q8_0.rows"]
    rows = rows[np.abs(rows).max(axis=1) < 1e6]
    rounded = [round_activations(rows, "Q8_0", variant) for variant in VARIANTS]
    assert all((one != other).any() for i, one in enumerate(rounded) for other in rounded[:i])
    for name, trace in quantised_golden().traces.items():
        kind = ACTIVATION_TYPE[MODELS[name].ggml_type]
        config = MODELS[name].config
        for key in {input_keys(stage, i, config)[0] for _, stage, i in keys(config) if stage.matrix}:
            first, *others = (round_activations(trace[key], kind, variant) for variant in VARIANTS)
            assert all(np.array_equal(first, other) for other in others), f"{name} {key}"


def test_goldens_made_again_without_a_change_have_no_differences(maker: ModuleType):
    assert maker.differences(quantised_golden(), quantised_golden()) == []


def with_array(golden: QuantisedGolden, part: str, name: str, index: tuple[int, ...]) -> QuantisedGolden:
    arrays = dict(getattr(golden, part))
    arrays[name] = arrays[name].copy()
    arrays[name][index] += 1
    return replace(golden, **{part: arrays})


def test_one_difference_is_one_line_that_names_it(maker: ModuleType):
    whole = quantised_golden()
    traces = {**whole.traces, "Q4_0": {"logits": whole.traces["Q4_0"]["logits"] * 2}}
    others = {
        "Q4_K.values": with_array(whole, "blocks", "Q4_K.values", (0, 0)),
        "Q8_1.x86": with_array(whole, "rounding", "Q8_1.x86", (3, 5)),
        "case": replace(whole, case=Pass(whole.case.ids, 1)),
        "file IQ1_M": replace(whole, files={**whole.files, "IQ1_M": "0"}),
    }
    for name, other in others.items():
        assert maker.differences(other, whole) == [f"quantised {name}: not as stored"]
    lines = maker.differences(replace(whole, traces=traces), whole)
    assert len(lines) == len(whole.traces["Q4_0"])
    assert sum(line.endswith("got nothing") for line in lines) == len(lines) - 1


@pytest.mark.parametrize(
    ("model", "least", "greatest"), [("F16", 1e-3, 4e-3), ("Q8_0", 0.03, 0.1), ("Q4_K", 0.05, 0.2)]
)
def test_stages_are_held_to_what_flips_cost(maker: ModuleType, model: str, least: float, greatest: float):
    whole = quantised_golden()
    limit = maker.all_flipped(model, whole)["logits"].error
    assert least < limit < greatest  # 8 bits cost 1 or 2 % of each input, 11 bits some 1e-4
    for factor, n_lines in ((0.9, 0), (1.1, 1)):
        logits = whole.traces[model]["logits"] * np.float32(1 + factor * limit)
        traces = {**whole.traces, model: {**whole.traces[model], "logits": logits}}
        assert len(maker.differences(replace(whole, traces=traces), whole)) == n_lines


@pytest.mark.live
def test_ggml_gives_the_stored_blocks_and_roundings_again(maker: ModuleType):
    for kind in types():
        assert np.array_equal(maker.blocks_of(kind), quantised_golden().blocks[f"{kind.name}.blocks"])
    for kind in ROUNDED_TO:
        made = maker.rounding_of(kind)
        assert all(np.array_equal(array, quantised_golden().rounding[name]) for name, array in made.items())


@pytest.mark.live
def test_llamacpp_gives_the_stored_products_again(maker: ModuleType):
    assert maker.differences(maker.make_quantised(), quantised_golden()) == []


ARRAYS = {
    "near/l0.attn_scores": np.array([[1.5, -np.inf], [-0.0, 2.0**-149]], np.float32),
    "near/logits": np.arange(6, dtype=np.float64).reshape(2, 3).T / 3,
    "near/generation": np.array([7, -1]),
}


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path):
    write_arrays(tmp_path / f"a{SUFFIX}", ARRAYS)
    found = read_arrays(tmp_path / f"a{SUFFIX}")
    assert [*found] == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_a_stored_golden_is_safetensors_in_an_ordinary_xz_file():
    path = goldens_folder() / "micro-llama" / f"truth{SUFFIX}"
    with lzma.open(path, format=lzma.FORMAT_XZ) as file:
        assert load(file.read()).keys() == read_arrays(path).keys()


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:99] + b"\0" + b[100:], lambda b: b"", lzma.compress])
def test_a_damaged_file_is_refused(tmp_path: Path, damage):
    file = tmp_path / f"a{SUFFIX}"
    write_arrays(file, ARRAYS)
    file.write_bytes(damage(file.read_bytes()))
    with refuses(ValueError, "damaged", "reference_outputs/regenerate.py", where=file):
        read_arrays(file)


def test_write_arrays_failure_keeps_the_old_file(tmp_path: Path):
    file = tmp_path / f"a{SUFFIX}"
    write_arrays(file, ARRAYS)
    before = file.read_bytes()
    with pytest.raises(Exception, match="object"):
        write_arrays(file, {"x": np.array([object()])})
    assert (file.read_bytes(), [*tmp_path.iterdir()]) == (before, [file])


def test_a_store_gives_back_its_record_and_its_arrays(tmp_path: Path):
    store = GoldenStore(tmp_path / "new", "record.json")
    store.write({"b": 1, "a": "é"}, {"one": ARRAYS, "two": {"x": np.zeros(2)}}, indent=None)
    assert store.record() == {"a": "é", "b": 1}
    assert store.path.read_bytes() == b'{"a": "\\u00e9", "b": 1}\n'
    found = store.arrays(["two", "one"])
    assert {name: [*arrays] for name, arrays in found.items()} == {"two": ["x"], "one": sorted(ARRAYS)}


@pytest.mark.parametrize("missing", ["record.json", f"two{SUFFIX}"])
def test_a_store_without_one_of_its_files_is_a_missing_golden(missing: str, tmp_path: Path):
    store = GoldenStore(tmp_path, "record.json")
    store.write({}, {"one": {}, "two": {}})
    (tmp_path / missing).unlink()
    with refuses(FileNotFoundError, tmp_path / missing, "regenerate.py"):
        store.record()
        store.arrays(["one", "two"])


def test_distances_come_back_with_four_digits():
    plain = write_distances({"engine": {"near": {"l0.q_rope": Difference(1.23456e-7, 0.5)}}})
    assert plain == {"engine": {"near": {"l0.q_rope": [1.235e-7, 0.5]}}}
    assert write_distances(read_distances(plain)) == plain
