import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS
from builders.random_adapters import random_adapter
from helpers.refusals import assert_tells, refuses

import llorch
from llorch.files import open_weights, residency
from llorch.files.hub import find
from llorch.files.residency import plan
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.model.model import PREFILL_CHUNK, Model, load
from llorch.ops.numerics import EXACT, SCHEME, Numerics
from llorch.runtime.builtin import EVERY as EVERY_MODEL


@pytest.fixture(scope="module")
def model() -> llorch.Model:
    return llorch.load("micro-qwen3")


def test_an_unknown_name_lists_the_built_in_models():
    with refuses(FileNotFoundError, *EVERY_MODEL, where="'nope'"):
        llorch.load("nope")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="NOT RUN: the C library has no mallopt")
def test_load_keeps_freed_memory_for_the_next_pass():
    code = (
        "import llorch\nimport resource\nfrom pathlib import Path\nimport numpy as np\n"
        "def resident():\n"
        "    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()\n"
        "llorch.load('micro-qwen3')\n"
        "size = 1 << 26\n"
        "array = np.ones(size, np.uint8)\n"
        "peak = resident()\n"
        "del array\n"
        "assert peak - resident() < size / 2, (peak, resident())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # a process whose heap no other test has filled


def test_load_refuses_a_context_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch):
    sizes = {n_tokens: plan(open_weights(find("micro-qwen3")), n_tokens=n_tokens).packed for n_tokens in (8, 512)}
    monkeypatch.setattr(residency, "available_memory", lambda: sizes[8])
    assert load("micro-qwen3", residency="packed", n_tokens=8)
    with refuses(MemoryError, "512 tokens", where="micro-qwen3"):
        load("micro-qwen3", residency="packed", n_tokens=512)


@pytest.mark.parametrize("numerics", [EXACT, SCHEME], ids=lambda numerics: numerics.name)
def test_steps_of_a_folder_with_scales_for_the_cache_give_the_logits_of_a_whole_pass(numerics: Numerics):
    folder, ids = load(FOLDERS / "ct-fp8-static-kv", numerics=numerics), [1, 7, 3, 22, 11]
    step = folder.step()
    np.testing.assert_allclose([step([each]) for each in ids], folder.forward(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("numerics", ["scheme", "exact", SCHEME.__class__], ids=str)
def test_load_with_numerics_of_another_type_is_refused(numerics: Any):
    with refuses(TypeError, "numerics", "Numerics", "EXACT, GGML and SCHEME of llorch.ops.numerics", got=numerics):
        llorch.load("micro-qwen3", numerics=numerics)


@pytest.mark.parametrize("ids", [[-1, 2], [3, 10**6], [3, 2**40]])
def test_an_id_out_of_range_is_named_with_its_index(model: llorch.Model, ids: list[int]):
    wrong = next(i for i in ids if not 0 <= i < model.config.vocab_size)
    last = model.config.vocab_size - 1
    with refuses(ValueError, f"token id {wrong}", f"index {ids.index(wrong)}", f"0 to {last}", where="forward"):
        model.forward(ids)


def test_the_number_of_tokens_is_the_first_id_that_is_none(model: llorch.Model):
    n = model.config.vocab_size
    assert model.forward([n - 1]).shape == (1, n)
    with refuses(ValueError, f"token id {n}", "index 1", f"0 to {n - 1}"):
        model.forward([0, n])


@pytest.mark.parametrize(
    ("ids", "actual"),
    [(np.array([], int), "(0,)"), (np.array([[1, 2]]), "(1, 2)"), (np.array([1.5]), "float64")],
    ids=["ids0", "ids1", "ids2"],
)
def test_what_is_no_list_of_ids_is_refused(model: llorch.Model, ids: np.ndarray, actual: str):
    with refuses(ValueError, where="forward", got=actual):
        model.forward(ids)


def test_prompt_longer_than_context_is_refused_before_any_work(model: llorch.Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.model.model.forward", None)
    context = model.config.max_position_embeddings
    too_long = [1] * (context + 1)
    with refuses(ValueError, f"{context + 1} tokens", f"{context} tokens", where="forward"):
        model.forward(too_long)


@pytest.mark.parametrize("as_messages", [False, True])
def test_text_far_longer_than_context_is_refused_from_its_beginning(as_messages: bool, monkeypatch: pytest.MonkeyPatch):
    model, seen = llorch.load("story"), list[int]()
    encode = model.tokenizer.encode

    def counted(text: str, **kwargs: bool) -> list[int]:
        seen.append(len(text))
        return encode(text, **kwargs)

    monkeypatch.setattr(model.tokenizer, "encode", counted)
    monkeypatch.setattr(model.tokenizer, "encode_rendered", lambda text, **kwargs: (counted(text), []))
    if as_messages:
        monkeypatch.setattr(type(model), "chat_templates", {"default": "{{ messages[0]['content'] }}"})
    context, text = model.config.max_position_embeddings, "fox " * 100_000
    with refuses(ValueError, f"{len(text)} characters", f"{context} tokens"):
        model.generate(messages=[{"role": "user", "content": text}]) if as_messages else model.generate(text)
    assert 0 < sum(seen) < 32 * context


@pytest.mark.parametrize("word", [" was", " little"])  # a token of four characters, and one of more
def test_a_text_that_just_fits_the_context_runs_and_one_token_more_is_refused_with_the_number(word: str):
    model = llorch.load("story")
    context = model.config.max_position_embeddings
    text = word * (context + 9)
    while len(model.tokenizer.encode(text)) > context:
        text = text.removesuffix(word)
    assert len(model.job(text, max_tokens=1, settings=None, ignore_eos=False, adapter=None).ids) == context
    with refuses(ValueError, f"{context + 1} tokens", f"{context} tokens"):
        model.generate(text + word)


def test_positions_beyond_the_context_are_refused(model: llorch.Model):
    context = model.config.max_position_embeddings
    with refuses(ValueError, "2 tokens", f"position {context - 1}", f"{context} tokens", where="forward"):
        model.forward([1, 2], first_position=context - 1)


def test_a_long_prompt_runs_in_chunks_and_gives_the_same_logits(model: llorch.Model):
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, PREFILL_CHUNK + 100)
    trace: dict[str, np.ndarray] = {}
    whole = model.forward(ids, trace=trace)  # a traced run is one pass
    chunked = model.forward(ids)
    assert chunked.shape == (len(ids), model.config.vocab_size)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)
    np.testing.assert_array_equal(model.forward(ids, last_only=True), chunked[-1:])


@pytest.mark.parametrize("n_tokens", [3, 4, 5, 8, 11, 12, 13])
def test_chunks_of_any_size_give_every_row_once(model: llorch.Model, monkeypatch: pytest.MonkeyPatch, n_tokens: int):
    ids = np.random.default_rng(n_tokens).integers(0, model.config.vocab_size, n_tokens)
    whole = model.forward(ids)
    monkeypatch.setattr("llorch.model.model.PREFILL_CHUNK", 4)
    chunked = model.forward(ids)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)
    np.testing.assert_array_equal(model.forward(ids, last_only=True), chunked[-1:], strict=True)


def test_a_traced_run_gives_the_last_row_only_when_asked(model: llorch.Model):
    trace: dict[str, np.ndarray] = {}
    last = model.forward([5, 9, 2, 7], trace=trace, last_only=True)
    assert last.shape == trace["logits"].shape == (1, model.config.vocab_size)
    np.testing.assert_array_equal(last, model.forward([5, 9, 2, 7], last_only=True))


def test_generation_streams_tokens_whose_text_joins_to_the_decoded_ids(model: llorch.Model):
    tokens = list(model.generate("Once", max_tokens=12, ignore_eos=True))
    assert [t.finish for t in tokens] == [None] * 11 + ["length"]
    assert "".join(t.text for t in tokens) == model.tokenizer.decode([t.id for t in tokens], skip_special=False)
    assert all(t.logprob <= 0 for t in tokens)


def test_generation_ends_at_an_end_token_unless_it_is_ignored(model: llorch.Model, monkeypatch: pytest.MonkeyPatch):
    ids = [token.id for token in model.generate("Once", max_tokens=8, ignore_eos=True)]
    first = ids.index(ids[3])
    monkeypatch.setattr(model.tokenizer, "eos_token_ids", frozenset({ids[3]}))
    tokens = list(model.generate("Once", max_tokens=8))
    assert [token.id for token in tokens] == ids[: first + 1]
    assert (tokens[-1].finish, tokens[-1].text) == ("eos", "")
    assert [token.id for token in model.generate("Once", max_tokens=8, ignore_eos=True)] == ids


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: llorch.Model):
    def text(seed: int) -> list[int]:
        settings = llorch.SamplingSettings(temperature=1.5, seed=seed)
        return [t.id for t in model.generate("Once", max_tokens=12, settings=settings, ignore_eos=True)]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_generation_ends_where_the_context_ends():
    model = llorch.load("story")
    tokens = list(model.generate([1] * (model.config.max_position_embeddings - 3), max_tokens=100, ignore_eos=True))
    assert len(tokens) == 4  # three more positions, and the token that the last one predicts
    assert tokens[-1].finish == "length"


IDS = [3, 17, 8, 39, 0, 25]
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
START = "Once upon a time"


def small(model: Model, seed: int, **settings) -> Adapter:
    return random_adapter(model.config, seed=seed, **{"lora_alpha": 0.5} | settings)


def text(model: Model, adapter: str | None) -> list[int]:
    return [token.id for token in model.generate(START, max_tokens=8, ignore_eos=True, adapter=adapter)]


def merged_logits(model: Model, adapter: Adapter) -> np.ndarray:
    """Of the same model with the products added to its arrays."""
    other = load(model.weights.path)
    for name, target in adapter.targets.items():
        tensors = adapter.tensors[name]
        product = adapter.scaling(name) * (tensors.lora_B.astype(np.float64) @ tensors.lora_A)
        whole = other.weights.array(target.weight) + (product.T if target.is_embedding else product)
        other.weights._loaded[target.weight] = whole.astype(np.float32)
    return other.forward(IDS)


def test_logits_are_those_of_the_merged_weights_and_removal_gives_back_those_of_the_base():
    model = load("micro-qwen3")
    before, adapter = model.forward(IDS), small(model, 1, target_modules=EVERY, lora_alpha=3.0)
    model.add_adapter("one", adapter)
    actual = model.forward(IDS, adapter="one")
    np.testing.assert_allclose(actual, merged_logits(model, adapter), rtol=0, atol=1e-4 * np.abs(actual).max())
    assert np.abs(actual - before).max() > 0.1
    assert np.array_equal(model.forward(IDS), before)
    model.remove_adapter("one")
    assert model.adapters == []
    assert np.array_equal(model.forward(IDS), before)


@pytest.mark.parametrize("name", ["Q4_K_M", "Q8_0", "IQ2_S"])
def test_packed_weights_take_adapters_as_decoded_ones_do(name: str, tmp_path: Path):
    path = write_model(name, tmp_path)
    packed, decoded = (load(path, residency=kind) for kind in ("packed", "decoded"))
    for model in (packed, decoded):
        model.add_adapter("one", small(model, 1, target_modules=EVERY, use_dora=True))
    before = packed.forward(IDS)
    actual, expected = (model.forward(IDS, adapter="one") for model in (packed, decoded))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert np.abs(actual - before).max() > 0.01
    packed.remove_adapter("one")
    assert np.array_equal(packed.forward(IDS), before)


def test_answers_that_are_begun_together_keep_their_adapters():
    model = load("story")
    for seed, name in enumerate(("one", "two")):
        model.add_adapter(name, small(model, seed, lora_alpha=2.0))
    names = [None, "one", "two", "one"]
    expected = [text(model, name) for name in names]
    running = [model.generate(START, max_tokens=8, ignore_eos=True, adapter=name) for name in names]
    actual = [[next(answer).id for answer in running] for _ in range(8)]
    assert [list(row) for row in zip(*actual, strict=True)] == expected
    assert len({tuple(row) for row in expected}) == 3
    begun = model.generate(START, max_tokens=8, ignore_eos=True, adapter="one")
    first = next(begun).id
    model.remove_adapter("one")
    assert [first, *(token.id for token in begun)] == expected[1]


def test_a_trace_has_the_stages_of_the_adapted_pass():
    model, trace, plain = load("micro-qwen2"), {}, {}
    model.add_adapter("one", small(model, 1))
    logits = model.forward(IDS, trace=trace, adapter="one")
    model.forward(IDS, trace=plain)
    assert np.array_equal(trace["logits"], logits)
    assert not np.array_equal(trace["l0.q_proj"], plain["l0.q_proj"])


def test_adapters_come_from_both_kinds_of_files(tmp_path: Path):
    model = load("micro-llama")
    adapter = small(model, 1)
    write_peft(adapter, tmp_path / "peft", base=identity_of(model.weights))
    write_lora_gguf(adapter, tmp_path / "lora.gguf", model.config)
    model.add_adapter("memory", adapter)
    assert_tells(model.add_adapter("peft", tmp_path / "peft"), "base", "same")
    assert "unknown" in model.add_adapter("gguf", str(tmp_path / "lora.gguf"))
    expected = model.forward(IDS, adapter="memory")
    assert np.array_equal(model.forward(IDS, adapter="peft"), expected)
    np.testing.assert_allclose(model.forward(IDS, adapter="gguf"), expected, rtol=0, atol=1e-5)


def test_an_adapter_of_another_base_is_refused_unless_any_will_do(tmp_path: Path):
    model, folder = load("micro-qwen2"), tmp_path / "adapter"
    write_peft(small(model, 1), folder, base=replace(identity_of(model.weights), vectors="0" * 64))
    with refuses("BaseMismatch", where=folder):
        model.add_adapter("one", folder)
    assert model.adapters == []
    assert "another" in model.add_adapter("one", folder, any_base=True)
    assert model.adapters == ["one"]


def test_mistakes_are_named():
    model = load("micro-qwen2")
    model.add_adapter("one", small(model, 1))
    with refuses(ValueError, where="adapter", expected="one", got="'two'"):
        model.forward(IDS, adapter="two")
    with refuses(ValueError, where="adapter", expected="one", got="'three'"):
        model.remove_adapter("three")
    with refuses(ValueError, "'one'", "already", where="adapter"):
        model.add_adapter("one", small(model, 1))
    with refuses(ValueError, "letters", "digits", "_", "-", where="adapter", got="''"):
        model.add_adapter("", small(model, 1))
    with refuses(ValueError, "layers.0.q_proj", "layers.1.up_proj", where="adapter 'x'"):
        model.add_adapter("x", small(load("micro-qwen3"), 1))
    with refuses(FileNotFoundError, "adapter", where="nowhere"):
        model.add_adapter("x", "nowhere")
