"""Conversion between formats, without the engines: round trips, refusals, and what is left after a failure."""

import json
from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, finish, gguf_tensors, random_tensors, with_biases, write_folder
from builders.whole_folders import VOCABULARIES, write_whole_folder
from gguf import GGUFValueType, GGUFWriter
from helpers.refusals import assert_tells, refuses

from llorch.files import Weights, open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import NO_VOCABULARY, write_gguf_content
from llorch.files.quant import GGMLType
from llorch.judging.expectations import quantised_models
from llorch.judging.expectations.quantised_models import ModelRecipe
from llorch.model.model import load
from llorch.runtime.builtin import EVERY, FOLDERS, builtin_path
from tests.files.test_convert_failures import names

TEXTS = ("", "hello  wor 12", "a<tool>b \u00e9\u4f60\U0001f600\n", "<s>aaab<|eot_id|>")


def assert_same_model(actual: Path, expected: Path) -> None:
    """Every bit of every tensor, the ids of some texts and the end tokens; the logits to the rounding of epsilon."""
    one, other = load(actual), load(expected)
    assert_same_tensors(one.weights, other.weights)
    ids = list(range(1, 20))
    np.testing.assert_allclose(one.forward(ids), other.forward(ids), rtol=0, atol=1e-5)
    for text in TEXTS:
        assert one.tokenizer.encode(text) == other.tokenizer.encode(text)
        assert one.tokenizer.encode(text, parse_special=True) == other.tokenizer.encode(text, parse_special=True)
    assert one.tokenizer.eos_token_ids == other.tokenizer.eos_token_ids


def assert_same_tensors(actual: Weights, expected: Weights) -> None:
    assert list(actual) == list(expected)
    assert all(actual.array(name).tobytes() == expected.array(name).tobytes() for name in expected)


def test_a_folder_with_windows_becomes_no_file(tmp_path: Path):
    with refuses("Unsupported", "llama.cpp", "sliding_window", "mistral", 19, where=builtin_path("micro-mistral")):
        convert(builtin_path("micro-mistral"), tmp_path / "a.gguf")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", [name for name in EVERY if name not in FOLDERS])
def test_a_file_becomes_a_folder_and_the_same_file_again(tmp_path: Path, name: str):
    source = builtin_path(name)
    convert(source, tmp_path / "folder")
    assert_same_model(tmp_path / "folder", source)
    convert(tmp_path / "folder", tmp_path / "back.gguf")
    assert_same_model(tmp_path / "back.gguf", source)
    assert names(tmp_path) == ["back.gguf", "folder"]


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
def test_the_temperature_of_ministral_goes_along_without_yarn(tmp_path: Path, scaling: dict[str, object]):
    convert(builtin_path("micro-ministral3"), tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    values = json.loads(config.read_text())
    values["rope_parameters"] = scaling | {
        "rope_theta": 1e5, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.5,
    }  # fmt: skip
    config.write_text(json.dumps(values))
    convert(tmp_path / "a", tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "b")
    first, *others = [open_weights(tmp_path / name).config.temperature for name in ("a", "m.gguf", "b")]
    assert others == [first, first]
    assert first is not None
    assert first.floor == 64


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_folder_becomes_a_file_and_the_same_folder_again(tmp_path: Path, kind: str):
    source = write_whole_folder(tmp_path / "source", kind)
    assert any("NFC" in note for note in convert(source, tmp_path / "m.gguf").notes) == kind.startswith("qwen")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    one, other = load(source), load(tmp_path / "back")
    assert_same_tensors(one.weights, other.weights)
    assert one.config == other.config
    for text in (*TEXTS, "e\u0301 <tool> hell"):
        assert one.tokenizer.encode(text) == other.tokenizer.encode(text)
    assert one.tokenizer.eos_token_ids == other.tokenizer.eos_token_ids
    old, new = (json.loads((folder / "generation_config.json").read_text()) for folder in (source, tmp_path / "back"))
    for key in ("temperature", "top_k", "repetition_penalty", "do_sample", "bos_token_id"):
        assert new[key] == pytest.approx(old[key], rel=1e-7)
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.metadata["general.sampling.temp"] == pytest.approx(0.7, rel=1e-7)
        assert file.metadata["general.sampling.penalty_repeat"] == pytest.approx(1.05, rel=1e-7)
        assert file.metadata["general.sampling.top_k"] == 20
        assert file.metadata["general.name"] == "source"


def test_a_file_becomes_a_smaller_file_with_the_same_vocabulary(tmp_path: Path):
    done = convert(builtin_path("story"), tmp_path / "m.gguf", ggml_type=GGMLType.Q8_0)
    assert (done.n_tensors, done.ggml_type, done.has_vocabulary) == (47, GGMLType.Q8_0, True)
    assert done.n_bytes == (tmp_path / "m.gguf").stat().st_size < 0.3 * builtin_path("story").stat().st_size
    assert not done.fallbacks
    with open_gguf(tmp_path / "m.gguf") as new, open_gguf(builtin_path("story")) as old:
        for key, value in old.metadata.items():
            if key.startswith("tokenizer."):
                assert list(np.atleast_1d(new.metadata[key])) == list(np.atleast_1d(value)), key  # type: ignore[arg-type]
        assert new.metadata["general.license"] == old.metadata["general.license"]
        assert new.metadata["general.file_type"] == 7


def test_metadata_with_every_kind_of_value_is_copied(tmp_path: Path):
    told: dict[str, object] = {
        "general.text": "\u4f60\nx", "general.yes": True, "general.large": 2**40, "general.below": -(2**40),
        "general.wide": 1e300, "general.tags": [b"a", b""], "general.bytes": np.array([1, -2], np.int8),
        "general.flags": np.array([True, False]), "llorch.kept": "yes",
    }  # fmt: skip
    weights = open_weights(write_folder(tmp_path / "a", random_tensors("llama")))
    write_gguf_content(weights, tmp_path / "m.gguf", ggml_type=GGMLType.F32, metadata={**told, **NO_VOCABULARY})
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf")
    with open_gguf(tmp_path / "n.gguf") as file:
        for key, value in told.items():
            actual = file.metadata[key]
            assert list(actual) == list(value) if isinstance(value, list | np.ndarray) else actual == value, key  # type: ignore


@pytest.mark.parametrize("ggml_type", [GGMLType.BF16, GGMLType.Q4_0], ids=lambda ggml_type: ggml_type.name)
def test_the_type_of_the_source_is_kept_where_the_target_can_hold_it(tmp_path: Path, ggml_type: GGMLType):
    convert(builtin_path("story"), tmp_path / "m.gguf", ggml_type=ggml_type)
    again = convert(tmp_path / "m.gguf", tmp_path / "again.gguf")
    assert (again.ggml_type, again.notes) == (ggml_type, [])
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert convert(tmp_path / "m.gguf", tmp_path / "folder").ggml_type is GGMLType.F32  # for the norms
    assert_same_tensors(open_weights(tmp_path / "folder"), open_weights(tmp_path / "m.gguf"))


def test_a_source_of_several_types_becomes_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mixed = ModelRecipe("llama", GGMLType.F16, {"lm_head": GGMLType.Q8_0, "layers.0.q_proj": GGMLType.Q4_0})
    monkeypatch.setattr(quantised_models, "MODELS", {"mixed": mixed})
    source = quantised_models.write_model("mixed", tmp_path)
    for target in ("m.gguf", "folder"):
        assert convert(source, tmp_path / target).ggml_type is GGMLType.F32
        assert_same_tensors(open_weights(tmp_path / target), open_weights(source))


def test_a_file_with_an_alignment_of_its_own_is_read_and_gets_the_usual_one(tmp_path: Path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    for key, value in GGUF_METADATA.items():
        writer.add_key_value(key, value, GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32)
    finish(writer, gguf_tensors())
    convert(tmp_path / "m.gguf", tmp_path / "n.gguf")
    assert_same_tensors(open_weights(tmp_path / "n.gguf"), open_weights(tmp_path / "m.gguf"))
    with open_gguf(tmp_path / "n.gguf") as file:
        assert file.metadata.get("general.alignment", 32) == 32


@pytest.mark.parametrize("ggml_type", [GGMLType.BF16, GGMLType.F16], ids=lambda ggml_type: ggml_type.name)
def test_half_precision_goes_round_without_being_asked_for(tmp_path: Path, ggml_type: GGMLType):
    convert(builtin_path("story"), tmp_path / "half", ggml_type=ggml_type)
    assert convert(tmp_path / "half", tmp_path / "m.gguf").ggml_type is ggml_type
    assert convert(tmp_path / "m.gguf", tmp_path / "back").ggml_type is ggml_type
    assert_same_tensors(open_weights(tmp_path / "back"), open_weights(tmp_path / "half"))


def test_a_second_rounding_is_noted(tmp_path: Path):
    convert(builtin_path("story"), tmp_path / "m.gguf", ggml_type=GGMLType.Q8_0)
    (note,) = convert(tmp_path / "m.gguf", tmp_path / "n.gguf", ggml_type=GGMLType.Q4_0).notes
    assert_tells(note, "Q8_0", "Q4_0", "rounding")
    assert not convert(tmp_path / "m.gguf", tmp_path / "o.gguf", ggml_type=GGMLType.F32).notes


def test_matrices_that_do_not_fit_the_type_are_named(tmp_path: Path):
    folder = write_folder(tmp_path / "a", random_tensors("llama"))
    done = convert(folder, tmp_path / "m.gguf", ggml_type=GGMLType.Q8_0)
    assert done.fallbacks == ["layers.0.down_proj", "layers.1.down_proj"]
    (note,) = done.notes
    assert_tells(note, "tokenizer.json", "vocabulary")
    assert not done.has_vocabulary
    biased = write_folder(tmp_path / "b", random_tensors("qwen2"), "qwen2")  # its biases of k and v have 16 numbers
    assert convert(biased, tmp_path / "n.gguf", ggml_type=GGMLType.Q8_0).fallbacks == done.fallbacks


def test_a_file_without_vocabulary_becomes_a_folder_without_tokenizer(tmp_path: Path):
    convert(write_folder(tmp_path / "a", random_tensors("qwen2"), "qwen2"), tmp_path / "m.gguf")
    done = convert(tmp_path / "m.gguf", tmp_path / "b")
    assert names(tmp_path / "b") == ["config.json", "model.safetensors"]
    (note,) = done.notes
    assert_tells(note, "vocabulary", "tokenizer")


def test_a_tokenizer_that_is_not_read_is_not_dropped(tmp_path: Path):
    folder = write_folder(tmp_path / "a", random_tensors("llama"))
    (folder / "tokenizer.model").touch()
    with refuses("Missing", "tokenizer.model", "tokenizer.json", where=folder):
        convert(folder, tmp_path / "m.gguf")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("target", ["m.gguf", "folder"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_left(tmp_path: Path, target: str, number: float):
    tensors = random_tensors("qwen3")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4] = number
    source = write_folder(tmp_path / "a", tensors, "qwen3")
    if target == "folder":
        clean = convert(write_folder(tmp_path / "c", random_tensors("qwen3"), "qwen3"), tmp_path / "c.gguf").target
        data = bytearray(clean.read_bytes())
        with open_gguf(clean) as file:
            start = file.tensors["blk.1.attn_output.weight"].offset
        data[start : start + 4] = np.float32(number).tobytes()
        (source := tmp_path / "bad.gguf").write_bytes(data)
    before = names(tmp_path)
    tensor = "blk.1.attn_output.weight" if target == "folder" else "model.layers.1.self_attn.o_proj.weight"
    with refuses("NonFinite", tensor, number, (0, 0) if target == "folder" else (3, 4), where=source):
        convert(source, tmp_path / target)
    assert names(tmp_path) == before


def test_a_bias_that_llamacpp_does_not_read_is_refused(tmp_path: Path):
    source = write_folder(tmp_path / "a", with_biases(random_tensors("qwen3")), "qwen3", attention_bias=True)
    with refuses("Unsupported", "bias", "attn_output", "llama", got="qwen3", where=source):
        convert(source, tmp_path / "m.gguf")


def test_bad_source_is_refused_before_anything_is_written(tmp_path: Path):
    tensors = random_tensors("llama")
    del tensors["model.norm.weight"]
    with refuses("Missing", "1 Missing: model.norm.weight"):
        convert(write_folder(tmp_path / "a", tensors), tmp_path / "m.gguf")
    assert names(tmp_path) == ["a"]


def test_an_existing_target_is_kept_unless_it_is_to_be_replaced(tmp_path: Path):
    for target in (tmp_path / "m.gguf", tmp_path / "folder"):
        convert(builtin_path("micro-llama"), target)
        with refuses(FileExistsError, "--force", where=target):
            convert(builtin_path("micro-qwen3"), target)
        assert open_weights(target).config.family == "llama"
        convert(builtin_path("micro-qwen3"), target, force=True)
        assert open_weights(target).config.family == "qwen3"
    assert names(tmp_path) == ["folder", "m.gguf"]


def test_a_folder_with_other_things_in_it_is_never_replaced(tmp_path: Path):
    convert(builtin_path("micro-llama"), tmp_path / "folder")
    (tmp_path / "folder" / "thesis.doc").touch()
    with refuses(FileExistsError, "thesis.doc", where=tmp_path / "folder"):
        convert(builtin_path("micro-qwen3"), tmp_path / "folder", force=True)
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "file").touch()
    for target, kind in (("folder.gguf", "a folder"), ("file", "a file")):
        with refuses(FileExistsError, kind, where=tmp_path / target):
            convert(builtin_path("micro-qwen3"), tmp_path / target, force=True)


def test_the_source_is_never_replaced(tmp_path: Path):
    source = tmp_path / "home" / "m.gguf"
    source.parent.mkdir()
    source.write_bytes(builtin_path("micro-llama").read_bytes())
    (tmp_path / "link.gguf").symlink_to(source)
    for target in (source, tmp_path / "link.gguf", tmp_path / "home"):
        with refuses(ValueError, f"source {source}", where=target):
            convert(source, target, force=True)
    assert source.read_bytes() == builtin_path("micro-llama").read_bytes()
    convert(source, tmp_path / "home" / "folder")  # beside it is well


@pytest.mark.parametrize(
    ("source", "target", "ggml_type", "kind", "facts"),
    [
        ("a", "b", None, ValueError, ("/b", "folder", ".gguf")),
        ("nothing.gguf", "b", None, FileNotFoundError, ("/nothing.gguf",)),
        ("a", "a/config.json/m.gguf", None, NotADirectoryError, ("/a/config.json", "/a/config.json/m.gguf")),
        ("story", "b", GGMLType.Q8_0, ValueError, ("folders", "F32, F16, BF16", "got Q8_0")),
        ("a", "b.gguf", GGMLType.Q4_K, ValueError, ("GGUF", "F32, F16, BF16, Q8_0, Q4_0", "got Q4_K")),
    ],
    ids=["two folders", "no source", "no place", "type of a folder", "type of a file"],
)
def test_impossible_conversion_is_refused(
    tmp_path: Path, source: str, target: str, ggml_type: GGMLType | None, kind: type[Exception], facts: tuple[str, ...]
):
    write_folder(tmp_path / "a", random_tensors("llama"))
    with refuses(kind, *facts):
        path = builtin_path(source) if source == "story" else tmp_path / source
        convert(path, tmp_path / target, ggml_type=ggml_type)
