import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.ggml_kernels import NEEDS_GGML
from helpers.refusals import assert_tells, refuses

import llorch
from llorch.files import Weights, open_weights, residency
from llorch.files.layerwise import LayerwiseJobs
from llorch.files.residency import count_cached_numbers, plan, working_bytes
from llorch.judging.expectations.quantised_models import write_model
from llorch.ops.numerics import EXACT, GGML, GGML_KERNELS, Numerics
from llorch.runtime.builtin import builtin_path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("Q4_K_M", tmp_path_factory.mktemp("model"))


@pytest.fixture
def weights(path: Path) -> Weights:
    return open_weights(path)


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    monkeypatch.setattr(residency, "available_memory", lambda: n_bytes)


def taken_by_a_pass(model: llorch.Model, ids: np.ndarray) -> int:
    """Bytes at most, behind a first pass."""
    model.forward(ids[:4])
    tracemalloc.start()
    model.forward(ids)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken


def test_matrices_are_decoded_where_that_fits_and_else_stay_packed(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, 1e12)
    made = plan(weights)
    assert made.needed == made.decoded > made.packed
    assert "decoded at load" in made.describe()
    for n_bytes, residency_then in ((made.decoded, "decoded"), (made.decoded - 1, "packed"), (made.packed, "packed")):
        free(monkeypatch, float(n_bytes))
        assert plan(weights).residency == residency_then
    assert_tells(plan(weights).describe(), "packed", "0.3 GB", "decoded at load")


@pytest.mark.parametrize(
    ("name", "is_available", "expected"),
    [("Q4_K_M", True, "packed"), ("Q4_K_M", False, "decoded"), ("BF16", True, "packed"), ("IQ3_S", True, "decoded")],
)
def test_matrices_of_a_large_model_stay_packed_if_c_multiplies_all(
    name: str, is_available: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights, sizes = open_weights(write_model(name, tmp_path)), []
    monkeypatch.setattr(residency, "is_available", lambda: is_available)
    monkeypatch.setattr(residency, "is_small", lambda n_parameters: sizes.append(n_parameters) or len(sizes) == 1)
    free(monkeypatch, 1e12)
    assert [plan(weights).residency for _ in range(2)] == ["decoded", expected]  # small, large
    assert {*sizes} == {sum(weights[name].size for name in weights if len(weights.shape(name)) > 1)}
    assert [plan(weights, requested).residency for requested in ("decoded", "packed")] == ["decoded", "packed"]
    free(monkeypatch, float(plan(weights).decoded - 1))
    assert plan(weights).residency == "packed"  # decoded does not fit


def test_one_matrix_that_c_does_not_multiply_decides(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(residency, "is_available", lambda: True)
    monkeypatch.setattr(residency, "is_small", lambda n_parameters: False)
    monkeypatch.setattr(residency, "has_compiled_form", lambda packed: packed.name != "blk.1.ffn_down.weight")
    free(monkeypatch, 1e12)
    assert plan(weights).residency == "decoded"


@NEEDS_GGML
def test_matrices_stay_packed_for_ggml_s_kernels(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, 1e12)
    assert plan(weights.using(GGML)).residency == "decoded"
    by_ggml = plan(weights.using(GGML_KERNELS))
    assert by_ggml.residency == "packed"
    assert_tells(by_ggml.describe(), "packed", "ggml's kernels")
    assert plan(weights.using(GGML_KERNELS), "decoded").residency == "decoded"


def test_model_larger_than_memory_is_refused_with_sizes_and_remedy(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, 1e3)
    with refuses(MemoryError, "Q4_K_M.gguf", "0.3 GB", "(packed, 256 tokens)", "0.0 GB"):
        plan(weights)
    free(monkeypatch, 1e12)
    wide = plan(weights)
    free(monkeypatch, (wide.packed + wide.decoded) / 2)
    with refuses(MemoryError, f"{wide.packed / 1e9:.1f} GB", "--weights packed"):
        plan(weights, "decoded")
    free(monkeypatch, float(wide.packed - 1))
    with refuses(MemoryError, "(decoded, 256 tokens)", "smaller model") as caught:
        plan(weights, "decoded")
    assert "--weights" not in str(caught.value)  # packed would not fit either


def test_the_plan_counts_the_bytes_of_each_type(weights: Weights):
    made = plan(weights)
    matrices = [name for name in weights if len(weights.shape(name)) == 2]
    assert sum(made.types.values()) == sum(weights.stored_bytes(name) for name in matrices)
    assert made.types.keys() == {"Q4_K", "Q6_K"}
    n_elements = sum(int(np.prod(weights.shape(name))) for name in matrices)
    assert made.decoded - made.packed == 4 * n_elements - sum(made.types.values())


def test_a_longer_context_and_a_wider_cache_need_more(weights: Weights):
    assert working_bytes(weights, 200) > working_bytes(weights, 100)
    half = weights.using(Numerics("ggml", "f16"))
    config = weights.config
    assert working_bytes(weights, 100) - working_bytes(half, 100) == 2 * 2 * 100 * config.n_layers * config.kv_width * 2


def test_what_is_planned_for_a_pass_is_enough_and_not_twice_of_that():
    model = llorch.load("story")
    taken = taken_by_a_pass(model, np.arange(256))
    assert taken < working_bytes(model.weights, 256) < 2 * taken


@pytest.mark.parametrize(("part", "per_token"), [("hidden_size", 1), ("intermediate_size", 2), ("vocab_size", 1 / 100)])
def test_a_wider_model_needs_room_for_the_rows_that_are_wider(weights: Weights, part: str, per_token: float):
    wider = weights.using()
    wider.config = replace(weights.config, **{part: getattr(weights.config, part) + 4096})
    assert working_bytes(wider, 100) - working_bytes(weights, 100) >= 4 * 4096 * 100 * per_token


def test_a_pass_takes_512_tokens_at_most_however_long_the_context(weights: Weights):
    longer = [working_bytes(weights, n) for n in (512, 1024, 2048)]
    assert longer[2] - longer[1] == 2 * (longer[1] - longer[0])


def test_no_more_tokens_are_planned_than_the_context_holds(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, 1e12)
    assert plan(weights, n_tokens=10**9) == plan(weights, n_tokens=weights.config.max_position_embeddings)


def test_float32_files_have_nothing_to_choose(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(residency, "is_small", lambda n_parameters: False)
    made = plan(open_weights(builtin_path("story")))
    assert made.residency == "decoded"
    assert made.types.keys() == {"F32"}
    assert made.decoded == made.packed


@pytest.mark.parametrize("numerics", [EXACT, GGML], ids=str)
def test_both_residencies_compute_the_same(path: Path, numerics: Numerics):
    ids = [5, 17, 33, 60, 2, 42, 8, 90]
    one, other = (llorch.load(path, numerics=numerics, residency=where).forward(ids) for where in ("decoded", "packed"))
    assert np.abs(one - other).max() < 1e-5 * np.abs(one).max()


def test_a_packed_model_does_not_keep_what_it_decodes(path: Path):
    model = llorch.load(path, residency="packed")
    model.forward([1, 2, 3])
    assert all(array.ndim == 1 for array in model.weights._loaded.values())


@pytest.mark.live
def test_a_hybrid_needs_rows_of_its_attention_layers_alone_and_states_of_one_size(tmp_path: Path):
    from builders.families import random_folder

    wide = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
    net = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
    folder = random_folder("qwen3_5", tmp_path / "m", 0, **wide, **net, linear_value_head_dim=64)  # pyright: ignore
    model = llorch.load(folder)
    assert count_cached_numbers(model.config) == (2 * model.config.kv_width, 3 * (8 * 64 * 64 + 3 * (2 * 4 + 8) * 64))
    taken = taken_by_a_pass(model, np.arange(256) % 100)
    assert taken < working_bytes(model.weights, 256) < 3 * taken


def test_every_job_ends_a_layer_before_any_begins_the_next():
    seen = []

    def job(name, n_layers):
        def run(turn):
            for layer in range(n_layers):
                seen.append(f"{layer}{name}")
                turn()
                seen.append(f"{layer}{name} over")  # no other job runs now
            return name

        return run

    assert LayerwiseJobs([job("a", 1), job("b", 3), job("c", 2)]).run() == ["a", "b", "c"]
    assert seen == [
        *("0a", "0b", "0c"), "0a over", "0b over", "1b", "0c over", "1c", "1b over", "2b", "1c over", "2b over",
    ]  # fmt: skip


def test_the_first_that_fails_ends_all():
    ended = []

    def endless(turn):
        try:
            while True:
                turn()
        finally:
            ended.append("endless")

    def fails(turn):
        turn()
        raise ValueError("layer 1")

    with pytest.raises(ValueError, match="layer 1"):
        LayerwiseJobs([endless, fails, endless]).run()
    assert ended == ["endless"] * 2


def test_a_job_sees_what_was_set_around_it():
    with np.errstate(divide="raise"):
        assert LayerwiseJobs([lambda turn: np.geterr()["divide"]]).run() == ["raise"]


def test_no_jobs():
    assert LayerwiseJobs([]).run() == []
