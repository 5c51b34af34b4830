"""Generation with a model split over ranks: the tokens of one process, from parts that are loaded one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import spawn
from helpers.refusals import assert_tells, refuses
from helpers.split_runs import NoText, answer_batch, generate_on_ranks, peak_of_loading, sizes_of, write_random_model

from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.ops.compiled.library import library
from llorch.pytorch import memory
from llorch.pytorch.device import target
from llorch.pytorch.distributed.launch import on_ranks
from llorch.pytorch.distributed.parallel_model import ParallelModel
from llorch.pytorch.distributed.sharding_plan import torn_blocks
from llorch.pytorch.memory import predict, require_memory
from llorch.pytorch.model import load_torch
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.usefixtures("warm_ranks")

DIVISIBLE = {"n_heads": 16, "n_kv_heads": 2}  # of two blocks of 256 columns each, o and down


def run_one_process(path: str | Path, **load_options: Any) -> tuple[list[tuple[int, int]], np.ndarray]:
    model = load_torch(path, **load_options)
    vars(model)["tokenizer"] = NoText()
    return answer_batch(model), model.forward([30, 20, 10, 40, 50, 60, 70, 80, 90])


def test_every_rank_generates_the_tokens_of_one_process_from_equal_logits():
    made = on_ranks(2, generate_on_ranks, "micro-qwen2", 2, {})
    tokens, logits = run_one_process("micro-qwen2")
    assert made["tokens"] == [tokens, tokens]
    np.testing.assert_array_equal(*made["logits"])
    np.testing.assert_allclose(made["logits"][0], logits, rtol=1e-6, atol=1e-5, strict=True, equal_nan=False)
    assert "CpuBlock" not in made["leaves"]
    assert library() is None or {"CpuLinear", "CpuRMSNorm"}.issubset(made["leaves"])


@pytest.mark.slow
def test_ranks_with_different_logits_use_the_tokens_of_rank_0():
    first, second = on_ranks(2, generate_on_ranks, "micro-llama", 2, {"kernels": "torch"}, True)["tokens"]
    assert first == second == run_one_process("micro-llama", kernels="torch")[0]


@pytest.mark.parametrize("kind", [GGMLType.Q8_0, pytest.param(GGMLType.Q4_K, marks=pytest.mark.slow)])
def test_packed_matrices_are_sharded_between_blocks(kind: GGMLType, tmp_path: Path):
    path = write_random_model(tmp_path, kind, **DIVISIBLE)
    how = {"residency": "packed", "dtype": "float64"}
    logits = on_ranks(2, generate_on_ranks, path, 2, how)["logits"]
    np.testing.assert_array_equal(*logits)
    np.testing.assert_allclose(
        logits[0], run_one_process(path, **how)[1], rtol=1e-12, atol=1e-12, strict=True, equal_nan=False
    )


def test_blocks_that_ranks_do_not_divide_are_named(tmp_path: Path):
    weights = open_weights(write_random_model(tmp_path, GGMLType.Q4_K, n_heads=24))
    assert torn_blocks(weights, 1) is None
    assert_tells(str(torn_blocks(weights, 2)), "layers.0.o_proj", expected="2 ranks", got=("3 blocks", 256, "Q4_K"))
    assert torn_blocks(open_weights(write_random_model(tmp_path, GGMLType.Q8_0, n_heads=24)), 2) is None


@pytest.mark.slow  # the refusal of a command; the plain test of each fact is the one before
def test_the_command_refuses_blocks_that_ranks_do_not_divide(tmp_path: Path):
    weights = open_weights(write_random_model(tmp_path, GGMLType.Q4_K, n_heads=24))
    torn = str(torn_blocks(weights, 2))
    done = spawn("run", str(weights.path), "x", "--mesh", "tp=2", "--weights", "packed")
    assert (done.returncode, done.stdout) == (2, "")
    assert_tells(done.stderr, torn.partition(":")[0], "3 blocks", "--weights decoded")


SMALL = {"hidden_size": 512, "intermediate_size": 2048, "n_heads": 16, "n_layers": 6}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "n_heads": 32, "n_layers": 4}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux tells what is no mapped file")
@pytest.mark.parametrize(
    ("kind", "residency", "n_ranks", "sizes"),
    [
        (GGMLType.F16, "decoded", 2, SMALL),
        pytest.param(GGMLType.F16, "decoded", 2, LARGE, marks=pytest.mark.nightly),
        pytest.param(GGMLType.Q8_0, "packed", 4, LARGE | {"n_layers": 14, "n_kv_heads": 4}, marks=pytest.mark.nightly),
    ],
)
def test_no_rank_ever_holds_the_full_model(
    kind: GGMLType, residency: Any, n_ranks: int, sizes: dict[str, int], tmp_path: Path
):
    path = write_random_model(tmp_path, kind, **sizes)
    weights = open_weights(path)
    whole, cut = sizes_of(weights.config, 4 if residency == "decoded" else 34 / 32)
    peaks = on_ranks(n_ranks, peak_of_loading, path, n_ranks, residency)
    assert len(peaks) == n_ranks
    assert max(peaks) < 0.8 * (whole + cut)
    predicted = predict(weights, target("cpu", "float32", "torch"), residency, 1, 64, n_ranks)
    assert whole + cut / n_ranks < max(peaks) <= predicted.peak


def test_predicted_memory_sums_the_shards_of_all_ranks(monkeypatch: pytest.MonkeyPatch):
    story, at = open_weights(builtin_path("story")), target()
    one, half = (predict(story, at, "decoded", 1, 512, n) for n in (1, 2))
    whole, cut = sizes_of(story.config, 4)
    assert (one.weights, half.weights) == (whole + cut, whole + cut / 2)
    assert half.cache == one.cache / 2
    monkeypatch.setattr(memory, "available_memory", lambda: 2.0 * half.peak)
    assert require_memory(story, at, n_tokens=512, n_ranks=2, n_here=2) == "decoded"
    monkeypatch.setattr(memory, "available_memory", lambda: 2.0 * half.peak - 2)
    with refuses(MemoryError, "each of 2 ranks"):
        require_memory(story, at, n_tokens=512, n_ranks=2, n_here=2)


def test_an_adapter_is_refused():
    model: Any = object.__new__(ParallelModel)
    with refuses(ValueError, "adapter", "generation"):
        model.add_adapter("a", "nowhere")
