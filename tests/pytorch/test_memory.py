"""Memory of the torch path: predicted from shapes, refused before loading, with a way out that fits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY, invoke

from llorch.builtin import builtin_path
from llorch.files import Weights, open_weights
from llorch.pytorch import memory, model
from llorch.pytorch.cpu.library import library
from llorch.pytorch.device import target
from llorch.pytorch.memory import free_memory, predict, require_memory, room_of_pages
from llorch.pytorch.model import load_torch
from llorch.pytorch.serving.paged_cache import PagedCache
from llorch.verify.suites.quantised_models import write_model


@pytest.fixture
def story() -> Weights:
    return open_weights(builtin_path("story"))


@pytest.fixture
def packed(tmp_path: Path) -> Weights:
    return open_weights(write_model("Q4_K", tmp_path))


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: float(n_bytes))


def peak(weights: Weights, dtype: str = "float32", residency: str = "decoded", batch: int = 1, n: int = 512) -> int:
    return predict(weights, target("cpu", dtype), residency, batch, n).peak  # type: ignore[arg-type]


def refusal(weights: Weights, dtype: str, residency: str, batch: int, n_tokens: int) -> str:
    with pytest.raises(MemoryError) as caught:
        require_memory(weights, target("cpu", dtype), residency, batch=batch, n_tokens=n_tokens)  # type: ignore[arg-type]
    return str(caught.value)


def test_the_parts_are_those_of_the_shapes(story: Weights):
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


def test_more_tokens_and_sequences_need_more(story: Weights):
    assert peak(story, n=100) < peak(story, n=512) < peak(story, n=512, batch=4)


def test_what_just_fits_is_loaded_and_a_byte_less_is_not(story: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, peak(story))
    assert require_memory(story, target(), n_tokens=512) == "decoded"
    free(monkeypatch, peak(story) - 1)
    assert "story.gguf: needs about 0.0" in refusal(story, "float32", "auto", 1, 512)


def test_the_refusal_has_every_figure(story: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, 0)
    text = refusal(story, "float32", "decoded", 2, 512)
    figure = r"\d+\.\d\d GB"
    parts = f"weights {figure}, cache {figure}, activations {figure}"
    pattern = rf".*story\.gguf: needs about {figure} on cpu \(float32, decoded, batch 2, 512 tokens: {parts}\)"
    assert re.fullmatch(rf"{pattern}, 0\.00 GB are free; use a smaller model or a smaller type", text)


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
    room = peak(story, **smaller)
    free(monkeypatch, room)
    assert f"; {words} would need " in refusal(story, "float32", "decoded", 8, 512)


def test_fewer_tokens_then_bfloat16_are_suggested(story: Weights, monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, peak(story, n=256))
    assert "; 256 tokens of context would need " in refusal(story, "float32", "decoded", 1, 512)
    free(monkeypatch, peak(story, dtype="bfloat16"))
    assert "; --dtype bfloat16 would need " in refusal(story, "float32", "decoded", 1, 512)
    free(monkeypatch, peak(story, dtype="bfloat16", n=256))
    assert "; --dtype bfloat16 with 256 tokens of context would need " in refusal(story, "float32", "decoded", 1, 512)


def test_packed_weights_are_suggested_where_the_file_has_them(packed: Weights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_TILE", 1)  # of so small a model the tile would be most
    free(monkeypatch, peak(packed, "float64", "packed", n=64))
    assert peak(packed, "float64", n=64) > peak(packed, "float64", "packed", n=64)
    assert "; --weights packed would need " in refusal(packed, "float64", "decoded", 1, 64)


def test_auto_keeps_matrices_packed_where_kernels_multiply_from_blocks(
    packed: Weights, story: Weights, monkeypatch: pytest.MonkeyPatch
):
    assert require_memory(packed, target("cpu", "float32")) == ("decoded" if library() is None else "packed")
    assert require_memory(packed, target("cpu", "float64")) == "decoded"
    assert require_memory(story, target("cpu", "float32")) == "decoded"
    assert require_memory(packed, target("cpu", "float32"), "decoded") == "decoded"


def test_nothing_is_loaded_when_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    free(monkeypatch, 1000)
    monkeypatch.setattr(model, "load_dense", None)  # calling it would be a TypeError
    result = invoke("run", "story", "Once", "--backend", "torch")
    assert result.exit_code == 4
    assert result.stdout == ""
    assert re.fullmatch(r"llorch: \S+story\.gguf: needs about .* are free; use a smaller model .*\n", result.stderr)


MEASURE = """
import sys, threading, time
from pathlib import Path
from llorch.builtin import builtin_path
from llorch.pytorch.cpu.library import library
from llorch.pytorch.device import target
from llorch.pytorch.memory import predict
from llorch.pytorch.model import load_torch
from llorch.pytorch.serving.paged_cache import PagedCache
from llorch.files import open_weights

def anonymous():  # memory of this process that is no mapped file
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

dtype, done = sys.argv[1], threading.Event()
library()  # building kernels is no part of a run
predicted = predict(open_weights(builtin_path("story")), target("cpu", dtype), "decoded", 1, 256).peak
most = before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
model = load_torch("story", dtype=dtype, n_tokens=256)
list(model.generate([i % 1000 for i in range(240)], max_tokens=16, ignore_eos=True))
done.set()
thread.join()
print(predicted, max(most, anonymous()) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells what is no mapped file")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_takes_no_more_than_was_predicted_and_not_much_less(dtype: str):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, dtype], capture_output=True, text=True, timeout=120, check=True, cwd=REPOSITORY
    )
    predicted, measured = map(int, done.stdout.split())
    assert measured <= predicted <= 1.5 * measured


def test_experts_need_room_for_the_products_of_every_number_of_rows():
    moe = open_weights(builtin_path("micro-qwen3-moe"))
    layers, experts = moe.config.n_layers, 7
    assert moe.config.experts is not None
    assert moe.config.experts.n_experts == experts
    one, many, most = (predict(moe, target("cpu", "float32"), "decoded", 1, n).runtime for n in (512, 1024, 1 << 20))
    assert many - one == 2 * layers * experts << 19  # a second pass: two products of each expert
    assert most - (one - (2 * layers * experts << 19)) == 1024 << 19


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch):
    model = load_torch("micro-llama")
    free(monkeypatch, 16e6)
    with pytest.raises(MemoryError, match=r"^generate: 64 sequences of 256 tokens need 0\.\d\d GB on cpu") as caught:
        list(model.generate_batch([[1, 2, 3]] * 64, max_tokens=4))
    (fits,) = re.findall(r"(\d+) sequences at once would fit", str(caught.value))
    assert list(model.generate_batch([[1, 2, 3]] * int(fits), max_tokens=1))
    with pytest.raises(MemoryError):
        list(model.generate_batch([[1, 2, 3]] * (int(fits) + 1), max_tokens=1))
    free(monkeypatch, 1)
    with pytest.raises(MemoryError, match="use fewer tokens"):
        list(model.generate([1, 2, 3], max_tokens=300))


def test_blocks_that_torch_keeps_for_itself_are_free(monkeypatch: pytest.MonkeyPatch):
    import torch

    for name, value in {"mem_get_info": (10, 100), "memory_reserved": 7, "memory_allocated": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda", 0)) == 13


def test_a_pool_has_as_many_pages_as_the_jobs_can_fill_or_as_half_of_the_memory_holds(
    story: Weights, monkeypatch: pytest.MonkeyPatch
):
    at, pages = target("cpu", "float32"), {"n_jobs": 4, "page": 64}
    free(monkeypatch, 1e12)
    assert room_of_pages(story, at, **pages) == 4 * story.config.max_position_embeddings // 64
    free(monkeypatch, 40e6)
    fewer = room_of_pages(story, at, **pages)
    assert 1 < fewer < 32
    monkeypatch.setattr(memory, "_gb", str)
    free(monkeypatch, 20e6)
    assert room_of_pages(story, at, **pages, n_tokens=fewer * 64) == fewer
    with pytest.raises(MemoryError, match=rf"batch: .* of 4 jobs need .* 20000000.0 are free; {fewer * 64} tokens"):
        room_of_pages(story, at, **pages, n_tokens=fewer * 64 + 1)
    free(monkeypatch, 1e3)
    with pytest.raises(MemoryError, match="use fewer jobs"):
        room_of_pages(story, at, **pages, n_tokens=64)
    assert room_of_pages(story, at, **pages) == 1


def test_a_page_is_counted_as_the_cache_has_it():
    for name in ("micro-qwen2", "micro-qwen3.5"):
        weights, at = open_weights(builtin_path(name)), target("cpu", "bfloat16")
        kind = {"n_states": 2, "n_positions": 64, "dtype": at.dtype, "device": at.device}
        one, more = (PagedCache(weights.config, n_pages=n, **kind) for n in (1, 3))
        added = sum(tensor.nbytes for tensor in more.tensors) - sum(tensor.nbytes for tensor in one.tensors)
        assert added == 2 * 64 * memory._slot(weights.config, at.dtype)
