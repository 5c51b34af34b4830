"""Memory of the torch path: predicted from shapes, refused before loading, with a way out that fits."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders.quantised_folders import FOLDERS
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses
from helpers.split_runs import write_random_model

from llorch.files import Weights, open_weights
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import write_model
from llorch.ops.compiled.library import library
from llorch.pytorch import memory, model
from llorch.pytorch.device import target
from llorch.pytorch.distributed.sharding_plan import cut_axis
from llorch.pytorch.load import path_of
from llorch.pytorch.memory import free_memory, predict, require_memory, room_of_pages
from llorch.pytorch.model import load_torch
from llorch.pytorch.serving.paged_cache import PagedCache
from llorch.pytorch.stored_kinds import packed_bytes
from llorch.runtime.builtin import builtin_path


@pytest.fixture
def story() -> Weights:
    return open_weights(builtin_path("story"))


@pytest.fixture
def packed(tmp_path: Path) -> Weights:
    return open_weights(write_model("Q4_K", tmp_path))


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: float(n_bytes))


def predicted_peak(
    weights: Weights, dtype: str = "float32", residency: str = "decoded", batch: int = 1, n: int = 512
) -> int:
    return predict(weights, target("cpu", dtype), residency, batch, n).peak  # type: ignore[arg-type]


def refusal_message(weights: Weights, dtype: str, residency: str, batch: int, n_tokens: int) -> str:
    with pytest.raises(MemoryError) as caught:
        require_memory(weights, target("cpu", dtype), residency, batch=batch, n_tokens=n_tokens)  # type: ignore[arg-type]
    return str(caught.value)


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


def remedy(text: str) -> str:
    """Cut the advice after the last semicolon out of a refusal."""
    return text.rpartition(";")[2]


def test_predicted_parts_follow_from_the_shapes(story: Weights):
    config = story.config
    n_weights = sum(story.read(name).size for name in story)
    for dtype, width in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        need = predict(story, target("cpu", dtype), "decoded", 1, 256)
        assert need.weights == width * n_weights
        assert need.cache == 2 * config.n_layers * config.n_kv_heads * 257 * config.head_dim * width
        assert predict(story, target("cpu", dtype), "decoded", 2, 256).cache == 3 * need.cache  # one may end and move
        assert need.peak >= need.weights + need.cache + need.activations + need.logits


def test_packed_matrices_count_as_the_file_packs_them(packed: Weights):
    at = target("cpu", "float32")
    file = sum(packed.stored_bytes(name) for name in packed)
    assert predict(packed, at, "packed", 1, 64).weights == file
    assert predict(packed, at, "decoded", 1, 64).weights > 5 * file


def test_matrices_in_half_precision_count_as_the_file_has_them():
    weights = open_weights(FOLDERS / "gptq-4bit")  # embedding and head in F16
    size = {name: math.prod(weights.shape(name)) for name in weights}
    wide = sum(4 * n for name, n in size.items() if len(weights.shape(name)) == 1)
    coded = sum(packed_bytes(weights, name) for name in weights)
    at = target("cpu", "float32")
    assert predict(weights, at, "packed", 1, 64).weights == coded + wide + 2 * (size["embed_tokens"] + size["lm_head"])


@pytest.mark.parametrize(("n_ranks", "width"), [(1, 2), (2, 2), (4, 4)])
def test_part_of_a_matrix_without_whole_runs_of_columns_counts_as_float32(n_ranks: int, width: int, tmp_path: Path):
    # a rank of 4 has 48 columns
    weights = open_weights(write_random_model(tmp_path, GGMLType.F16, n_kv_heads=4, intermediate_size=192))
    size = {name: math.prod(weights.shape(name)) for name in weights}
    expected = 0
    for name, n in size.items():
        n_bytes = 4 if len(weights.shape(name)) == 1 else width if name.endswith("down_proj") else 2
        expected += n_bytes * n // (1 if cut_axis(path_of(name)) is None else n_ranks)
    assert predict(weights, target("cpu", "float32"), "packed", 1, 64, n_ranks).weights == expected


def test_more_tokens_and_sequences_need_more(story: Weights):
    assert predicted_peak(story, n=100) < predicted_peak(story, n=512) < predicted_peak(story, n=512, batch=4)


def test_model_loads_at_its_exact_size_and_not_with_one_byte_less(story: Weights, monkeypatch: pytest.MonkeyPatch):
    set_free_bytes(monkeypatch, predicted_peak(story))
    assert require_memory(story, target(), n_tokens=512) == "decoded"
    set_free_bytes(monkeypatch, predicted_peak(story) - 1)
    assert_tells(refusal_message(story, "float32", "auto", 1, 512), gb(predicted_peak(story)), where="story.gguf")


def test_refusal_names_every_size(story: Weights, monkeypatch: pytest.MonkeyPatch):
    set_free_bytes(monkeypatch, 0)
    text, need = refusal_message(story, "float32", "decoded", 2, 512), predict(story, target("cpu"), "decoded", 2, 512)
    parts = {"weights": need.weights, "cache": need.cache, "activations": need.activations + need.logits}
    assert_tells(text, gb(need.peak), *(f"{name} {gb(n_bytes)}" for name, n_bytes in parts.items()), "0.00 GB")
    assert_tells(text, "cpu", "float32", "decoded", "batch 2", "512 tokens", "smaller", where="story.gguf")


@pytest.mark.parametrize(
    ("smaller", "words"),
    [
        ({"batch": 4}, "a batch of 4"),
        ({"batch": 1}, "a batch of 1"),
        ({"dtype": "bfloat16", "batch": 8}, "a batch of 2"),  # the least painful change comes first
    ],
)
def test_a_smaller_batch_is_suggested_where_it_fits(
    story: Weights, monkeypatch: pytest.MonkeyPatch, smaller: dict, words: str
):
    room = predicted_peak(story, **smaller)
    set_free_bytes(monkeypatch, room)
    assert_tells(remedy(refusal_message(story, "float32", "decoded", 8, 512)), words, gb(room))


def test_fewer_tokens_then_bfloat16_are_suggested(story: Weights, monkeypatch: pytest.MonkeyPatch):
    set_free_bytes(monkeypatch, predicted_peak(story, n=256))
    fewer = remedy(refusal_message(story, "float32", "decoded", 1, 512))
    assert_tells(fewer, "256 tokens", gb(predicted_peak(story, n=256)))
    assert "--dtype" not in fewer
    set_free_bytes(monkeypatch, predicted_peak(story, dtype="bfloat16"))
    half = remedy(refusal_message(story, "float32", "decoded", 1, 512))
    assert_tells(half, "--dtype bfloat16", gb(predicted_peak(story, dtype="bfloat16")))
    assert "256" not in half
    set_free_bytes(monkeypatch, predicted_peak(story, dtype="bfloat16", n=256))
    both = remedy(refusal_message(story, "float32", "decoded", 1, 512))
    assert_tells(both, "--dtype bfloat16", "256 tokens", gb(predicted_peak(story, dtype="bfloat16", n=256)))


def test_packed_weights_are_suggested_where_the_file_has_them(packed: Weights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_TILE", 1)  # of so small a model the tile would be most
    set_free_bytes(monkeypatch, predicted_peak(packed, "float64", "packed", n=64))
    assert predicted_peak(packed, "float64", n=64) > predicted_peak(packed, "float64", "packed", n=64)
    said = remedy(refusal_message(packed, "float64", "decoded", 1, 64))
    assert_tells(said, "--weights packed", gb(predicted_peak(packed, "float64", "packed", n=64)))
    assert "--dtype" not in said


def test_auto_keeps_matrices_packed_where_kernels_multiply_from_blocks(
    packed: Weights, story: Weights, monkeypatch: pytest.MonkeyPatch
):
    assert require_memory(packed, target("cpu", "float32")) == ("decoded" if library() is None else "packed")
    assert require_memory(packed, target("cpu", "float64")) == "decoded"
    assert require_memory(story, target("cpu", "float32")) == "decoded"
    assert require_memory(packed, target("cpu", "float32"), "decoded") == "decoded"


def test_refused_load_reads_no_weights(monkeypatch: pytest.MonkeyPatch):
    set_free_bytes(monkeypatch, 1000)
    monkeypatch.setattr(model, "load_dense", None)  # calling it would be a TypeError
    result = invoke("run", "story", "Once", "--backend", "torch")
    assert_cli_refuses(result, 4, "smaller", "0.00 GB", where="story.gguf")
    assert result.stderr.count("\n") == 1


MEASURE = """
import os, sys, threading
from pathlib import Path
from llorch.ops.compiled.library import library
from llorch.pytorch.device import target
from llorch.pytorch.memory import predict
from llorch.pytorch.model import load_torch
from llorch.files import open_weights
from llorch.runtime.memory import return_freed_memory

class NoText:
    eos_token_ids = frozenset()

    def token_bytes(self, token_id):
        return b""

def anonymous():  # memory of this process that is no mapped file
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

def measure(path, dtype, residency, n_tokens):
    global most, done
    done = threading.Event()
    predicted = predict(open_weights(path), target("cpu", dtype), residency, 1, n_tokens).peak
    return_freed_memory()  # else memory that imports have freed would not be counted
    most = before = anonymous()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    model = load_torch(path, dtype=dtype, residency=residency, n_tokens=n_tokens)
    vars(model)["tokenizer"] = NoText()
    list(model.generate([i % 90 for i in range(n_tokens - 16)], max_tokens=16, ignore_eos=True))
    done.set()
    thread.join()
    print(predicted, max(most, anonymous()) - before, flush=True)

library()  # building kernels is no part of a run
path, dtypes, residency, n_tokens = sys.argv[1:]
for dtype in dtypes.split(","):  # each begins with the same memory
    if not (child := os.fork()):
        measure(path, dtype, residency, int(n_tokens))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def measure_peak(path: Path, dtypes: str, residency: str, n_tokens: int) -> list[tuple[int, int]]:
    """Predicted and used memory of a run in each dtype."""
    command = [sys.executable, "-c", MEASURE, str(path), dtypes, residency, str(n_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, cwd=REPOSITORY)
    return [(int(predicted), int(taken)) for predicted, taken in map(str.split, done.stdout.splitlines())]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux tells what is no mapped file")
def test_measured_memory_is_at_most_and_close_to_the_prediction():
    for predicted, taken in measure_peak(builtin_path("story"), "float32,bfloat16", "decoded", 256):
        assert taken <= predicted <= 1.5 * taken


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux tells what is no mapped file")
def test_measured_memory_of_packed_matrices_is_at_most_and_close_to_the_prediction(tmp_path: Path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "n_heads": 32, "n_kv_heads": 4, "n_layers": 14}
    ((predicted, taken),) = measure_peak(write_random_model(tmp_path, GGMLType.Q8_0, **sizes), "float32", "packed", 32)
    assert taken <= predicted <= 1.5 * taken


def test_experts_need_memory_for_products_of_any_number_of_rows():
    moe = open_weights(builtin_path("micro-qwen3-moe"))
    layers, experts = moe.config.n_layers, 7
    assert moe.config.experts is not None
    assert moe.config.experts.n_experts == experts
    one, many, most = (predict(moe, target("cpu", "float32"), "decoded", 1, n).runtime for n in (512, 1024, 1 << 20))
    assert many - one == 2 * layers * experts << 19  # a second pass: two products of each expert
    assert most - (one - (2 * layers * experts << 19)) == 1024 << 19


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch):
    model = load_torch("micro-llama")
    set_free_bytes(monkeypatch, 16e6)
    with refuses(MemoryError, "64", "256 tokens", "cpu", "0.02 GB", where="generate") as caught:
        list(model.generate_batch([[1, 2, 3]] * 64, max_tokens=4))
    (fits,) = re.findall(r"\d+", remedy(str(caught.value)))
    assert list(model.generate_batch([[1, 2, 3]] * int(fits), max_tokens=1))
    with pytest.raises(MemoryError):
        list(model.generate_batch([[1, 2, 3]] * (int(fits) + 1), max_tokens=1))
    set_free_bytes(monkeypatch, 1)
    with refuses(MemoryError, "fewer tokens", where="generate"):
        list(model.generate([1, 2, 3], max_tokens=300))


def test_blocks_cached_by_torch_count_as_free(monkeypatch: pytest.MonkeyPatch):
    import torch

    for name, value in {"mem_get_info": (10, 100), "memory_reserved": 7, "memory_allocated": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda", 0)) == 13


def test_a_pool_has_as_many_pages_as_the_jobs_can_fill_or_as_half_of_the_memory_holds(
    story: Weights, monkeypatch: pytest.MonkeyPatch
):
    at, pages = target("cpu", "float32"), {"n_jobs": 4, "page": 64}
    set_free_bytes(monkeypatch, 1e12)
    assert room_of_pages(story, at, **pages) == 4 * story.config.max_position_embeddings // 64
    set_free_bytes(monkeypatch, 40e6)
    fewer = room_of_pages(story, at, **pages)
    assert 1 < fewer < 32
    monkeypatch.setattr(memory, "_gb", str)
    set_free_bytes(monkeypatch, 20e6)
    assert room_of_pages(story, at, **pages, n_tokens=fewer * 64) == fewer
    with refuses(MemoryError, "4 jobs", "20000000.0", f"{fewer * 64} tokens", where="batch"):
        room_of_pages(story, at, **pages, n_tokens=fewer * 64 + 1)
    set_free_bytes(monkeypatch, 1e3)
    with refuses(MemoryError, "fewer jobs", where="batch"):
        room_of_pages(story, at, **pages, n_tokens=64)
    assert room_of_pages(story, at, **pages) == 1


def test_predicted_page_size_equals_that_of_the_cache():
    for name in ("micro-qwen2", "micro-qwen3.5"):
        weights, at = open_weights(builtin_path(name)), target("cpu", "bfloat16")
        kind = {"n_states": 2, "n_positions": 64, "dtype": at.dtype, "device": at.device}
        one, more = (PagedCache(weights.config, n_pages=n, **kind) for n in (1, 3))
        added = sum(tensor.nbytes for tensor in more.tensors) - sum(tensor.nbytes for tensor in one.tensors)
        assert added == 2 * 64 * memory._slot_bytes(weights.config, at.dtype)
