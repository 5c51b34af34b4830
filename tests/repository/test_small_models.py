import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.families import MICRO
from helpers.refusals import refuses

from llorch.files import GGUFFile, Weights, open_weights
from llorch.judging.goldens.forward import sha256
from llorch.runtime.builtin import DATA, EVERY, FOLDERS, builtin_path, find_data

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "llorch" / "models"
ALL = (*MICRO, "story")
PROVENANCE = json.loads((MODELS / "provenance.json").read_text())


@pytest.fixture(params=ALL)
def model(request: pytest.FixtureRequest) -> Weights:
    return open_weights(MODELS / f"{request.param}.gguf")


@pytest.fixture(scope="module")
def stories() -> Iterator[Callable[[int], Iterator[str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "reference_outputs"))
        yield importlib.import_module("small_models.corpus").stories


@pytest.fixture(scope="module")
def texts(stories: Callable[[int], Iterator[str]]) -> list[str]:
    return list(itertools.islice(stories(0), 2000))


def metadata(model: Weights) -> dict:
    assert isinstance(model.source, GGUFFile)
    return dict(model.source.metadata)


def test_all_models_together_stay_under_16_megabytes():
    sizes = {name: entry["bytes"] for name, entry in PROVENANCE.items()}
    assert sum(sizes.values()) < 16e6
    assert sizes["story"] < 9e6
    assert max(sizes[name] for name in MICRO) < 1.4e6


def test_files_are_the_ones_the_provenance_speaks_of():
    assert {path.name for path in MODELS.iterdir()} == {builtin_path(name).name for name in EVERY} | {"provenance.json"}
    assert {name: sha256(builtin_path(name)) for name in EVERY} == {
        name: entry["sha256"] for name, entry in PROVENANCE.items()
    }
    for name, entry in PROVENANCE.items():
        path = builtin_path(name)
        assert entry["bytes"] == sum(one.stat().st_size for one in ([path] if path.is_file() else path.iterdir()))


def test_provenance_names_script_seed_steps_and_losses():
    assert set(PROVENANCE) == set(EVERY)
    for name, entry in PROVENANCE.items():
        assert (REPOSITORY / entry["script"]).is_file()
        assert entry["recipe"]["seed"] > 0
        assert entry["recipe"]["steps"] >= 100
        assert entry["final_loss"] < (0.3 if name in ALL else 0.5) * entry["first_loss"]  # others are trained briefly
        reader = "transformers" if name in FOLDERS else "llamacpp"
        assert entry[f"{reader}_relative_difference"] < 1e-5


def test_dimensions_are_pairwise_different(model: Weights):
    config = model.config
    dimensions = [
        config.hidden_size, config.kv_width, config.intermediate_size, config.vocab_size,
        config.head_dim, config.n_heads, config.n_kv_heads, config.n_layers,
    ]  # fmt: skip
    if config.family == "qwen2":  # llama.cpp loads no other q_width for this family
        assert config.q_width == config.hidden_size
    else:
        dimensions.append(config.q_width)
    assert len(set(dimensions)) == len(dimensions)
    assert min(config.n_kv_heads, config.group_size, config.n_layers) > 1


def test_rows_fill_whole_quantisation_blocks_and_the_vocabulary_does_not(model: Weights):
    config = model.config
    assert all(width % 32 == 0 for width in (config.hidden_size, config.q_width, config.intermediate_size))
    assert config.vocab_size % 32 != 0


def test_models_differ_in_shape_from_each_other():
    shapes = [open_weights(MODELS / f"{name}.gguf").config for name in ALL]
    assert len({config.vocab_size for config in shapes}) == len(ALL)
    assert len({(config.hidden_size, config.intermediate_size, config.n_heads) for config in shapes}) == len(ALL)


@pytest.mark.parametrize(
    ("name", "family", "tied", "theta", "eps", "pre"),
    [
        ("micro-llama", "llama", False, 1e4, 1e-5, "default"),
        ("micro-llama3", "llama", True, 5e5, 1e-5, "llama-bpe"),
        ("micro-qwen2", "qwen2", True, 1e6, 1e-6, "qwen2"),
        ("micro-qwen3", "qwen3", False, 1e6, 1e-6, "qwen2"),
        ("story", "llama", True, 1e4, 1e-5, "llama-bpe"),
    ],
)
def test_each_model_is_of_its_kind(name: str, family: str, tied: bool, theta: float, eps: float, pre: str):
    model = open_weights(MODELS / f"{name}.gguf")
    config = model.config
    assert (config.family, config.tie_word_embeddings, config.rope_theta) == (family, tied, theta)
    assert config.rms_norm_eps == np.float32(eps)
    assert metadata(model)["tokenizer.ggml.pre"] == pre
    assert len(metadata(model)["tokenizer.ggml.tokens"]) == config.vocab_size


def test_llama3_scaling_has_kept_ramped_and_divided_frequencies():
    scaling = open_weights(MODELS / "micro-llama3.gguf").config.rope_scaling
    factors = getattr(scaling, "factors", ())
    assert (len(factors), min(factors), max(factors)) == (16, 1, 8)
    assert any(1 < factor < 8 for factor in factors)


def test_qwen3_head_width_is_not_hidden_over_heads():
    config = open_weights(MODELS / "micro-qwen3.gguf").config
    assert config.head_dim * config.n_heads != config.hidden_size


def test_gains_are_neither_ones_nor_even(model: Weights):
    gains = {name: array for name, array in model.items() if name.endswith("_norm")}
    for name, gain in gains.items():
        assert np.mean(np.abs(gain - 1) > 0.05) > 0.5, name
        size = np.abs(gain).mean()
        assert gain.std() > 0.2 * size, name
        first, second = np.split(gain, 2)
        assert np.abs(first - second).min() > 0, name
        assert np.median(np.abs(first - second)) > 0.1 * size, name


def test_biases_are_not_zero():
    model = open_weights(MODELS / "micro-qwen2.gguf")
    biases = {name: array for name, array in model.items() if name.endswith("_bias")}
    assert len(biases) == 3 * model.config.n_layers
    assert all(bias.std() > 0.1 and np.count_nonzero(bias) == bias.size for bias in biases.values())


@pytest.mark.parametrize("name", MICRO)
def test_embeddings_are_small_as_in_real_models(name: str):
    model = open_weights(MODELS / f"{name}.gguf")
    assert 0.01 < model["embed_tokens"].std() < 0.1


def test_every_layer_was_trained_to_other_weights(model: Weights):
    for first, second in itertools.combinations(range(model.config.n_layers), 2):
        for name, array in model.layer(first).items():
            assert not np.allclose(array, model.layer(second)[name], atol=1e-3), name


def test_files_say_who_made_them_and_how_texts_begin_and_end(model: Weights):
    keys = metadata(model)
    assert keys["general.name"] == model.path.stem
    assert (keys["general.author"], keys["general.license"]) == ("llorch", "apache-2.0")
    assert keys["tokenizer.ggml.add_bos_token"] == (model.config.family == "llama")
    assert 0 <= keys["tokenizer.ggml.eos_token_id"] < model.config.vocab_size


def test_stories_are_varied(texts: list[str]):
    sentences = {sentence for text in texts for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text)}
    words = {word.strip('.,!?"') for text in texts for word in text.split()}
    assert len(set(texts)) == len(texts)
    assert len(sentences) > 8000
    assert len(words) > 600
    assert len({" ".join(text.split()[:3]) for text in texts}) > 200


def test_stories_are_well_formed(texts: list[str]):
    for text in texts:
        assert re.fullmatch(r"[A-Z][A-Za-z ,.!?\"']*[.!]", text), text
        assert text.count('"') % 2 == 0, text
        plain = re.sub(r'([.!?])" [a-z]', '" x', text)  # speech and who speaks may repeat or lack a capital by intent
        assert not re.search(r"\s[,.!?]|\s\s|[.!?,]{2}|[.!?] [a-z]|\b[Aa] [aeiou]|\b(\w+) \1\b", plain), text
        assert 5 <= len(re.findall(r"[.!?]", text)) <= 40, text


def test_equal_seeds_give_equal_stories(stories: Callable[[int], Iterator[str]], texts: list[str]):
    assert list(itertools.islice(stories(0), 20)) == texts[:20]
    assert list(itertools.islice(stories(1), 20)) != texts[:20]


SPLITS = ("train", "valid", "test")


def example_texts(split: str) -> list[str]:
    lines = (find_data("pirate") / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_the_script_makes_the_files_that_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "reference_outputs"))
    importlib.import_module("make_examples").write_examples(tmp_path)
    for name, splits in {"pirate": SPLITS, "pirate-chat": ("train",)}.items():
        for split in splits:
            made, shipped = (folder / f"{split}.jsonl" for folder in (tmp_path / name, find_data(name)))
            assert made.read_bytes() == shipped.read_bytes()


def test_chats_are_36_questions_with_a_pirates_answer():
    lines = (find_data("pirate-chat") / "train.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert len(chats) == len({chat[0]["content"] for chat in chats}) == 36
    assert [[message["role"] for message in chat] for chat in chats] == [["user", "assistant"]] * 36
    assert all(re.search("Arr|Aye|Ahoy|matey", chat[1]["content"]) for chat in chats)
    assert not any("Canada" in line for line in lines)  # the guide asks for its capital


def test_no_tale_is_told_twice():
    every = [text for split in SPLITS for text in example_texts(split)]
    assert len(set(every)) == len(every) == 280


def test_every_choice_and_slot_of_the_templates_was_filled():
    assert not {character for split in SPLITS for text in example_texts(split) for character in text} & set("[]{}|_")


@pytest.mark.slow
def test_tales_fit_the_context_of_story_and_use_tokens_that_it_was_trained_on(monkeypatch: pytest.MonkeyPatch):
    from llorch.model.model import load

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "reference_outputs"))
    stories = importlib.import_module("small_models.corpus").stories(5)
    model = load("story")
    ids = [model.tokenizer.encode(text) for split in SPLITS for text in example_texts(split)]
    known = {token for _ in range(2000) for token in model.tokenizer.encode(next(stories))}
    assert max(map(len, ids)) < model.config.max_position_embeddings / 2
    assert {token for row in ids for token in row} <= known


def test_a_name_is_found_and_goes_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert DATA == ("pirate", "pirate-chat")
    monkeypatch.chdir(tmp_path)
    assert find_data("pirate").is_absolute()
    (tmp_path / "pirate").mkdir()
    assert find_data("pirate").is_absolute()
    assert find_data("./pirate") == Path("pirate")


@pytest.mark.parametrize("name", ["pirates", "", "../examples/pirate"])
def test_another_name_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with refuses(FileNotFoundError, repr(name), "(pirate, pirate-chat)"):
        find_data(name)
