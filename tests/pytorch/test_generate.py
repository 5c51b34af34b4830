"""Loading and generating on the torch path: what a user calls, against the NumPy path."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses

import llorch
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.memory import CHUNK
from llorch.runtime.builtin import BUILTIN

IDS = [5, 260, 17, 33, 2, 91, 144, 78, 300]
START = "Once upon a time"


@pytest.fixture(scope="module", params=BUILTIN)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model() -> llorch.TorchModel:
    return llorch.load_torch("micro-qwen3")


def token_ids(tokens: list[llorch.Token]) -> list[int]:
    return [token.id for token in tokens]


def test_logits_equal_numpy(name: str):
    expected = llorch.load(name).forward(IDS)
    actual = llorch.load_torch(name).forward(IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max(), strict=True)


@pytest.mark.parametrize("sampling", ["greedy", *SAMPLINGS])
def test_tokens_of_a_seed_equal_numpy(name: str, sampling: str):
    settings = SAMPLINGS.get(sampling, SamplingSettings())
    expected = list(llorch.load(name).generate(START, max_tokens=12, settings=settings))
    actual = list(llorch.load_torch(name).generate(START, max_tokens=12, settings=settings))
    assert [(t.id, t.text, t.finish) for t in actual] == [(t.id, t.text, t.finish) for t in expected]
    np.testing.assert_allclose([t.logprob for t in actual], [t.logprob for t in expected], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_dtype_writes_the_same_story(dtype: str):
    expected = [t.text for t in llorch.load("story").generate(START, max_tokens=12)]
    assert [t.text for t in llorch.load_torch("story", dtype=dtype).generate(START, max_tokens=12)] == expected


def test_logits_are_float32_for_half_precision_and_float64_for_float64():
    assert llorch.load_torch("micro-llama", dtype="bfloat16").forward([1]).dtype == np.float32
    assert llorch.load_torch("micro-llama", dtype="float64").forward([1]).dtype == np.float64


def test_the_backend_is_named_by_device_and_dtype(model: llorch.TorchModel):
    assert str(model.target) == "torch-cpu-float32"
    assert model.name == "micro-qwen3"
    assert model.config is model.weights.config


@pytest.mark.parametrize(
    ("ids", "first_position", "facts"),
    [
        ([-1, 2], 0, (-1, "index 0", 372)), ([3, 10**6], 0, (10**6, "index 1", 372)), ([], 0, ("(0,)",)),
        ([1.5], 0, ("integer", "float64")), ([[1, 2]], 0, ("(1, 2)",)), ([1] * 2, -1, (2, -1, 40960)),
        ([1, 1], 10**6, (2, 10**6, 40960)), ([1] * 10**5, 0, (10**5, 0, 40960)),
    ],
    ids=range(8),
)  # fmt: skip
def test_bad_ids_and_positions_raise_the_errors_of_the_numpy_path(
    model: llorch.TorchModel, ids: list, first_position: int, facts: tuple
):
    messages = []
    for one in (model, llorch.load("micro-qwen3")):
        with refuses(ValueError, *facts, where="forward") as caught:
            one.forward(np.asarray(ids), first_position=first_position)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_long_prompt_runs_in_chunks_and_gives_the_same_logits():
    model = llorch.load_torch("micro-qwen3", attention="eager")
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, CHUNK["cpu"] + 100)
    trace: dict[str, np.ndarray] = {}
    whole = model.forward(ids, trace=trace)  # a traced run is one pass
    chunked = model.forward(ids)
    assert trace["l0.attn_scores"].shape[1:] == (len(ids), len(ids))
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)
    last = model.forward(ids, last_only=True)
    np.testing.assert_allclose(last, chunked[-1:], rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)


@pytest.mark.parametrize("n_tokens", [3, 4, 5, 8, 9])
def test_chunks_of_any_number_give_every_row_once(
    model: llorch.TorchModel, monkeypatch: pytest.MonkeyPatch, n_tokens: int
):
    ids = np.random.default_rng(n_tokens).integers(0, model.config.vocab_size, n_tokens)
    whole = model.forward(ids)
    first = next(iter(model.generate(ids.tolist(), max_tokens=1)))
    monkeypatch.setitem(CHUNK, "cpu", 4)
    np.testing.assert_allclose(model.forward(ids), whole, rtol=0, atol=2e-5 * np.abs(whole).max(), strict=True)
    chunked = next(iter(model.generate(ids.tolist(), max_tokens=1)))
    assert chunked.id == first.id
    assert chunked.logprob == pytest.approx(first.logprob, abs=1e-5)


def test_only_eager_attention_shows_scores_and_probabilities(model: llorch.TorchModel):
    eager, fused = ({}, {})
    llorch.load_torch("micro-qwen3", attention="eager").forward(IDS, trace=eager)
    model.forward(IDS, trace=fused)
    assert {key.rpartition(".")[2] for key in eager.keys() - fused.keys()} == {"attn_scores", "attn_probs"}
    assert not fused.keys() - eager.keys()


def test_trace_is_a_copy_unchanged_by_later_runs(model: llorch.TorchModel):
    trace: dict[str, np.ndarray] = {}
    model.forward(IDS, trace=trace)
    before = {key: array.copy() for key, array in trace.items()}
    model.forward(IDS[::-1])
    for key, array in before.items():
        np.testing.assert_array_equal(trace[key], array)


def test_a_second_answer_in_the_storage_of_the_first_is_the_same(model: llorch.TorchModel):
    settings = SamplingSettings(temperature=1.2, repetition_penalty=1.3, seed=3)
    first = list(model.generate(START, max_tokens=15, settings=settings, ignore_eos=True))
    list(model.generate("The little fox", max_tokens=20, settings=settings, ignore_eos=True))
    assert list(model.generate(START, max_tokens=15, settings=settings, ignore_eos=True)) == first


def test_concurrent_answers_are_independent(model: llorch.TorchModel):
    one, other = (list(model.generate(text, max_tokens=8, ignore_eos=True)) for text in (START, "The fox"))
    both = (model.generate(text, max_tokens=8, ignore_eos=True) for text in (START, "The fox"))
    assert list(zip(*both, strict=True)) == list(zip(one, other, strict=True))


def test_an_answer_ends_at_an_end_token_unless_that_is_ignored(monkeypatch: pytest.MonkeyPatch):
    model = llorch.load_torch("micro-qwen3")
    ids = token_ids(list(model.generate(START, max_tokens=8, ignore_eos=True)))
    monkeypatch.setattr(model.tokenizer, "eos_token_ids", frozenset({ids[3]}))
    tokens = list(model.generate(START, max_tokens=8))
    assert token_ids(tokens) == ids[: ids.index(ids[3]) + 1]
    assert (tokens[-1].finish, tokens[-1].text) == ("eos", "")
    assert token_ids(list(model.generate(START, max_tokens=8, ignore_eos=True))) == ids


def test_text_ends_before_a_stop_string():
    model = llorch.load_torch("story")
    whole = "".join(t.text for t in model.generate(START, max_tokens=40))
    assert "." in whole
    tokens = list(model.generate(START, max_tokens=40, stop=["nowhere", "."]))
    assert "".join(t.text for t in tokens) == whole[: whole.index(".")]
    assert tokens[-1].finish == "stop"


def test_generation_ends_where_the_context_ends():
    model = llorch.load_torch("story")
    tokens = list(model.generate([1] * (model.config.max_position_embeddings - 3), max_tokens=100, ignore_eos=True))
    assert len(tokens) == 4  # three more positions, and the token that the last one predicts
    assert tokens[-1].finish == "length"


def test_max_tokens_0_generates_nothing(model: llorch.TorchModel):
    assert list(model.generate(START, max_tokens=0)) == []


@pytest.mark.parametrize(
    ("prompt", "facts"), [([], ("one token", "none")), ([1] * 10**5, (10**5, 0, 40960))], ids=["empty", "too long"]
)
def test_a_prompt_that_cannot_be_continued_is_refused(model: llorch.TorchModel, prompt: list[int], facts: tuple):
    with refuses(ValueError, *facts, where="forward"):
        list(model.generate(prompt, max_tokens=3))


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"device": "gpu"}, ("device", "cpu", "cuda", "cuda:N", "'gpu'")),
        ({"dtype": "int8"}, ("dtype", "float32", "float64", "'int8'")),
        ({"mode": "reproducible", "compiled": True}, ("compiled=True", "'reproducible'")),
    ],
    ids=["device", "dtype", "mode"],
)
def test_invalid_settings_are_refused(wrong: dict, facts: tuple[str, ...]):
    with refuses(ValueError, *facts):
        llorch.load_torch("micro-llama", **wrong)


def test_missing_torch_names_the_install_command():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); sys.modules['torch'] = None\n"
        "import llorch\n"
        "try:\n    llorch.load_torch\nexcept llorch.MissingExtra as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert_tells(done.stdout, "torch", "pip install 'llorch[torch]'")
