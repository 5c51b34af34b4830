"""Vocabularies of right conversions pass, and each wrong change of a vocabulary is FAIL in the row of its subject."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_models import LLAMA_3, chat_folder
from builders.published_vocabularies import VOCABULARIES, write_published
from builders.tiny_models import write_file
from builders.vocabularies import real_vocabulary

from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.files.gguf import StringArray, open_gguf
from llorch.files.tokenizer.byte_level import PRE_TOKENIZERS
from llorch.files.tokenizer.chat import ChatTemplate
from llorch.files.tokenizer.pipeline import WORDS, metaspace
from llorch.files.weights import Weights
from llorch.judging.source import vocabulary
from llorch.judging.source.vocabulary import TEXTS, compare_vocabularies
from llorch.judging.types import Comparison
from llorch.runtime.builtin import EVERY, FOLDERS, builtin_path
from llorch.stages.comparison import FAIL, PASS

Metadata = dict[str, Any]
Rows = dict[str, Comparison]
SUBJECTS = {"tokens", "types", "merges", "pre_tokenizer", "begin", "end", "end of turn", "add_bos", "chat_template"}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PREFIX = "tokenizer.ggml."
STORY_EOT, STORY_HEADER = "<|eot_id|>", "<|start_header_id|>"


@cache
def any_model() -> Weights:
    return open_weights(builtin_path("micro-mistral"))


def vocabulary_of(path: Path) -> Weights:
    """A model with the vocabulary of a path, which needs no tensors."""
    source = open_gguf(path) if path.is_file() else any_model().source
    return Weights(config=any_model().config, path=path, source=source, slots={})


def rows_of(file: Path, source: Path) -> Rows:
    """Compare two vocabularies; return the rows by subject."""
    comparisons = [*compare_vocabularies(vocabulary_of(file), vocabulary_of(source), model="story")]
    assert {(c.stage_ref.checkpoint, c.stage_ref.stage, c.engine, c.backend) for c in comparisons} == {
        ("00", "tokenizer", "source", "file")
    }
    assert all(comparison.note for comparison in comparisons if comparison.verdict == FAIL)
    return {comparison.stage_ref.part: comparison for comparison in comparisons}


def failures(rows: Rows) -> dict[str, str]:
    """Return the notes of the rows that are FAIL."""
    return {part: row.note for part, row in rows.items() if row.verdict == FAIL}


def metadata_of(path: Path) -> Metadata:
    """Read the tokenizer metadata of a GGUF file as values that the gguf package writes."""
    with open_gguf(path) as file:
        values = {key: value for key, value in file.metadata.items() if key.startswith(("tokenizer.", "llorch."))}
    arrays = {key: value.tolist() for key, value in values.items() if isinstance(value, np.ndarray)}
    return values | arrays | {key: [*value] for key, value in values.items() if isinstance(value, StringArray)}


def with_metadata(path: Path, target: Path, change: Callable[[Metadata], object]) -> Path:
    """Write a GGUF file that holds the vocabulary of a file alone, with changed metadata."""
    metadata = metadata_of(path)
    change(metadata)
    return write_file(target, {}, metadata)


def with_json(folder: Path, target: Path, name: str, change: Callable[[Any], object]) -> Path:
    """Copy the files of a folder but the weights, and change one JSON file."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((target / name).read_text()) if (target / name).exists() else {}
    change(content)
    (target / name).write_text(json.dumps(content))
    return target


def with_template(folder: Path, target: Path, template: str | None) -> Path:
    """Copy a folder with another chat template, or without it."""
    with_json(folder, target, "tokenizer_config.json", lambda content: None)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return target


def exchange(values: Any, first: Any, second: Any) -> None:
    values[first], values[second] = values[second], values[first]


def id_of(metadata: Metadata, text: str) -> int:
    return metadata[PREFIX + "tokens"].index(text.encode())


def set_type(metadata: Metadata, text: str, token_type: int) -> None:
    metadata[PREFIX + "token_type"][id_of(metadata, text)] = token_type


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `story` with a chat template."""
    return chat_folder(tmp_path_factory.mktemp("story") / "folder", "story", LLAMA_3)


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    """The GGUF file of that folder."""
    convert(folder, folder.with_suffix(".gguf"))
    return folder.with_suffix(".gguf")


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SentencePiece merges."""
    target = tmp_path_factory.mktemp("spaced") / "folder"
    convert(builtin_path("micro-llama"), target)
    return target


@pytest.mark.parametrize("name", [name for name in EVERY if name != "micro-mistral"])
def test_compare_vocabularies_of_converted_model_passes_in_both_directions(name: str, tmp_path: Path):
    path = builtin_path(name)
    target = tmp_path / ("target.gguf" if name in FOLDERS else "target")
    convert(path, target)
    for file, source in ((path, path), (target, path), (path, target)):
        rows = [*compare_vocabularies(open_weights(file), open_weights(source), model=name)]
        parts = {row.stage_ref.part for row in rows}
        assert [row.note for row in rows if row.verdict != PASS] == []
        assert parts == SUBJECTS or (parts ^ SUBJECTS == {"merges", "scores"} and name == "micro-llama")


def test_compare_vocabularies_of_equal_files_has_no_note(folder: Path, gguf: Path):
    assert {
        row.note for file, source in ((folder, folder), (gguf, folder)) for row in rows_of(file, source).values()
    } == {""}


WRONG_METADATA: dict[str, tuple[str, str, Callable[[Metadata], object]]] = {
    "two tokens exchanged": ("tokens", "token 300: ", lambda m: exchange(m[PREFIX + "tokens"], 300, 700)),
    "a marker visible": ("types", "in any prompt", lambda m: set_type(m, STORY_HEADER, 4)),
    "a word user defined": ("types", "user defined in the file, normal", lambda m: set_type(m, "\u0120the", 4)),
    "two merges exchanged": ("merges", "merge 5: ", lambda m: exchange(m[PREFIX + "merges"], 5, 6)),
    "a merge missing": ("merges", "merge 741: None in the file", lambda m: m[PREFIX + "merges"].pop()),
    "another pre-tokenizer": (
        "pre_tokenizer",
        "gpt-2 in the file, llama-bpe in",
        lambda m: m.update({PREFIX + "pre": "gpt-2"}),
    ),
    "another BOS": ("begin", "998", lambda m: m.update({PREFIX + "bos_token_id": 1000})),
    "another EOS": ("end", "generation goes on", lambda m: m.update({PREFIX + "eos_token_id": 998})),
    "a text token as EOS": ("end", "300", lambda m: m.update({PREFIX + "eos_token_id": 300})),
    "a text token as EOT": ("end of turn", "no control token", lambda m: m.update({PREFIX + "eot_token_id": 300})),
    "no BOS added": ("add_bos", "nothing before", lambda m: m.update({PREFIX + "add_bos_token": False})),
    "EOS added": ("add_bos", "EOS after", lambda m: m.update({PREFIX + "add_eos_token": True})),
    "another marker": (
        "chat_template",
        "at character",
        lambda m: m.update({"tokenizer.chat_template": LLAMA_3.replace("<|eot_id|>", "<|end_of_text|>")}),
    ),
    "no template": ("chat_template", "default template", lambda m: m.pop("tokenizer.chat_template")),
    "no vocabulary": ("tokens", "1003 tokens in the source", lambda m: m.update({PREFIX + "model": "none"})),
    "another unknown pre-tokenizer": ("tokens", "pre", lambda m: m.update({PREFIX + "pre": "unheard-of"})),
}


@pytest.mark.parametrize("name", WRONG_METADATA)
def test_compare_vocabularies_of_wrong_gguf_file_fails_in_one_row(name: str, folder: Path, gguf: Path, tmp_path: Path):
    part, excerpt, change = WRONG_METADATA[name]
    wrong = failures(rows_of(with_metadata(gguf, tmp_path / "wrong.gguf", change), folder))
    assert [*wrong] == [part]
    assert excerpt in wrong[part]


def exchange_ids(content: Any) -> None:
    vocab = content["model"]["vocab"]
    exchange(vocab, "\u0120the", "\u0120and")


def show_marker(content: Any) -> None:
    (token,) = [token for token in content["added_tokens"] if token["content"] == STORY_HEADER]
    token["special"] = False


WRONG_JSON: dict[str, tuple[str, str, str, Callable[[Any], object]]] = {
    "two ids exchanged": ("tokens", "'\u0120the'", "tokenizer.json", exchange_ids),
    "a marker visible": ("types", "user defined in the file, control", "tokenizer.json", show_marker),
    "two merges exchanged": ("merges", "merge 5: ", "tokenizer.json", lambda c: exchange(c["model"]["merges"], 5, 6)),
    "another pre-tokenizer": (
        "pre_tokenizer", "smollm in the file, llama-bpe", "tokenizer.json",
        lambda c: c.update(pre_tokenizer=WORDS["smollm"]),
    ),
    "another EOS": ("end", "generation goes on", "tokenizer_config.json", lambda c: c.update(eos_token=STORY_HEADER)),
    "no BOS added": ("add_bos", "nothing before", "tokenizer.json", lambda c: c.update(post_processor=None)),
}  # fmt: skip


@pytest.mark.parametrize("of_gguf", [False, True])
@pytest.mark.parametrize("name", WRONG_JSON)
def test_compare_vocabularies_of_wrong_folder_fails_in_one_row(
    name: str, of_gguf: bool, folder: Path, gguf: Path, tmp_path: Path
):
    part, excerpt, file, change = WRONG_JSON[name]
    wrong = failures(rows_of(with_json(folder, tmp_path / "wrong", file, change), gguf if of_gguf else folder))
    assert [*wrong] == [part]
    assert excerpt in wrong[part]


def test_compare_vocabularies_reports_two_mistakes_in_two_rows(folder: Path, gguf: Path, tmp_path: Path):
    def change(metadata: Metadata) -> None:
        exchange(metadata[PREFIX + "merges"], 5, 6)
        metadata[PREFIX + "pre"] = "gpt-2"

    assert failures(rows_of(with_metadata(gguf, tmp_path / "wrong.gguf", change), folder)).keys() == {
        "merges", "pre_tokenizer",
    }  # fmt: skip


def test_compare_tokens_shows_three_differences_with_both_texts(folder: Path, gguf: Path, tmp_path: Path):
    def rotate(metadata: Metadata) -> None:
        tokens = metadata[PREFIX + "tokens"]
        tokens[300:305] = [*tokens[301:305], tokens[300]]

    texts = [token.decode() for token in metadata_of(gguf)[PREFIX + "tokens"][300:305]]
    row = rows_of(with_metadata(gguf, tmp_path / "wrong.gguf", rotate), folder)["tokens"]
    assert row.note.startswith(f"token 300: {texts[1]!r} in the file, {texts[0]!r} in the source; token 301: ")
    assert "token 302" in row.note
    assert "token 303" not in row.note
    assert "and 2 more" in row.note
    assert row.reference_error == 5 / 1003


def test_compare_end_of_turn_without_an_end_of_the_source_fails(folder: Path, gguf: Path, tmp_path: Path):
    header = id_of(metadata_of(gguf), STORY_HEADER)
    source = with_json(folder, tmp_path / "s", "generation_config.json", lambda c: c.update(eos_token_id=[header]))
    assert failures(rows_of(gguf, source)) == {"end of turn": f"generation goes on after {header} {STORY_HEADER!r}"}
    added = rows_of(source, gguf)["end of turn"]
    assert (added.verdict, added.note) == (PASS, f"generation also ends at {header} {STORY_HEADER!r}")


def look_special(content: Any) -> None:
    content["added_tokens"] += [
        content["added_tokens"][0] | {"id": 1003 + i, "content": text, "special": False}
        for i, text in enumerate(("<|tool|>", "<tool>"))
    ]


@pytest.mark.parametrize(("types", "wrong"), [((3, 4), []), ((4, 4), []), ((4, 3), ["types"]), ((3, 1), ["types"])])
def test_compare_types_allows_what_the_converter_of_llama_cpp_writes(
    types: tuple[int, int], wrong: list[str], folder: Path, gguf: Path, tmp_path: Path
):
    def change(metadata: Metadata) -> None:
        metadata[PREFIX + "tokens"] += [b"<|tool|>", b"<tool>"]
        metadata[PREFIX + "token_type"] += types

    source = with_json(folder, tmp_path / "source", "tokenizer.json", look_special)
    rows = rows_of(with_metadata(gguf, tmp_path / "file.gguf", change), source)
    assert [*failures(rows)] == wrong
    assert ("llama.cpp's converter" in rows["types"].note) == (types[0] == 3)


LAWFUL_METADATA: dict[str, tuple[str, str, Callable[[Metadata], object]]] = {
    "padding": (
        "tokens", "padding ids: 2 in the file, 0 in the source",
        lambda m: (m[PREFIX + "tokens"].extend([b"[PAD1003]", b""]), m[PREFIX + "token_type"].extend([4, 5])),
    ),
    "an unused token": (
        "tokens", "", lambda m: (m[PREFIX + "tokens"].append(b"<extra>"), m[PREFIX + "token_type"].append(5))
    ),
    "an end token user defined": ("types", "by its text", lambda m: set_type(m, STORY_EOT, 4)),
    "an additional end token": ("end of turn", "ends at 1000", lambda m: m.update({PREFIX + "eom_token_id": 1000})),
    "another name of the pre-tokenizer": ("pre_tokenizer", "", lambda m: m.update({PREFIX + "pre": "llama-v3"})),
    "a comment in the template": (
        "chat_template", "equal renderings", lambda m: m.update({"tokenizer.chat_template": "{# x #}" + LLAMA_3})
    ),
    "another template": (
        "chat_template", "'tool_use' in the file only", lambda m: m.update({"tokenizer.chat_template.tool_use": "x"})
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWFUL_METADATA)
def test_compare_vocabularies_of_lawful_gguf_file_passes_with_a_note(
    name: str, folder: Path, gguf: Path, tmp_path: Path
):
    part, excerpt, change = LAWFUL_METADATA[name]
    rows = rows_of(with_metadata(gguf, tmp_path / "lawful.gguf", change), folder)
    assert failures(rows) == {}
    assert excerpt in rows[part].note
    assert [other for other, row in rows.items() if row.note and other != part] == []


def test_compare_begin_of_unused_bos_is_a_note(gguf: Path, folder: Path, tmp_path: Path):
    def drop(metadata: Metadata) -> None:
        metadata |= {PREFIX + "add_bos_token": False, "tokenizer.chat_template": "x"}

    source = with_metadata(gguf, tmp_path / "source.gguf", drop)
    file = with_metadata(source, tmp_path / "file.gguf", lambda m: m.update({PREFIX + "bos_token_id": 1000}))
    assert failures(rows_of(file, source)) == {}
    assert "no text of the source begins with BOS" in rows_of(file, source)["begin"].note


@pytest.mark.parametrize(
    ("role", "sides"), [("bos", "BOS before and nothing after"), ("eos", "nothing before and EOS")]
)
def test_compare_added_names_the_role_of_an_id_with_two_roles(role: str, sides: str, tmp_path: Path):
    source = builtin_path("micro-qwen2")
    file = with_metadata(source, tmp_path / "file.gguf", lambda m: m.update({f"{PREFIX}add_{role}_token": True}))
    wrong = failures(rows_of(file, source))
    assert [*wrong] == ["add_bos"]
    assert wrong["add_bos"].startswith(sides)


def test_compare_added_allows_the_setting_of_tokenizer_config(gguf: Path, folder: Path, tmp_path: Path):
    source = with_json(folder, tmp_path / "source", "tokenizer_config.json", lambda c: c.update(add_bos_token=False))
    file = with_metadata(gguf, tmp_path / "file.gguf", lambda m: m.update({PREFIX + "add_bos_token": False}))
    assert failures(rows_of(file, source)) == {}
    assert "agrees with the file" in rows_of(file, source)["add_bos"].note
    assert failures(rows_of(gguf, source)) == {}


TEMPLATES: dict[str, tuple[str | None, str | None, str, str]] = {
    "endless in the file": (ENDLESS, LLAMA_3, FAIL, "the chat template of the file takes over 1 s"),
    "endless in the source": (LLAMA_3, ENDLESS, FAIL, "the chat template of the source takes over 1 s"),
    "invalid in the file": ("{% if %}", LLAMA_3, FAIL, "the chat template of the file cannot be read"),
    "refusing in the file": (
        "{% if tools %}{{ raise_exception('no') }}{% endif %}" + LLAMA_3, LLAMA_3, FAIL,
        "one turn, tools: the file's template refuses it",
    ),
    "refusing in the source": (
        LLAMA_3, "{% if tools %}{{ raise_exception('no') }}{% endif %}" + LLAMA_3, PASS,
        "other text, 32 equal renderings, 32 that the source's template refuses",
    ),
    "refusing everything in the source": (LLAMA_3, "{{ raise_exception('no') }}", FAIL, "refuses every conversation"),
    "only in the file": (LLAMA_3, None, PASS, "template 'default' in the file only"),
    "another answer to enable_thinking": (
        LLAMA_3 + "{% if enable_thinking is false %}x{% endif %}", LLAMA_3, FAIL,
        "one turn, enable_thinking false: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_compare_templates(name: str, folder: Path, tmp_path: Path):
    actual, expected, verdict, excerpt = TEMPLATES[name]
    file, source = (
        with_template(folder, tmp_path / side, template) for side, template in (("file", actual), ("source", expected))
    )
    rows = rows_of(file, source)
    assert (rows["chat_template"].verdict, [*failures(rows)]) == (verdict, ["chat_template"] * (verdict == FAIL))
    assert excerpt in rows["chat_template"].note


def test_compare_templates_shows_the_first_different_characters(folder: Path, tmp_path: Path):
    file = with_template(folder, tmp_path / "file", LLAMA_3.replace("<|start_header_id|>", "<|header|>"))
    note = rows_of(file, folder)["chat_template"].note
    assert "conversations are rendered otherwise, one turn: 'f_text|><|header|>user" in note
    assert "in the source at character 19" in note


def test_compare_templates_stops_at_the_first_limit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **kw: (rendered.append(0), render(*args, **kw))[1])
    rows_of(with_template(folder, tmp_path / "file", ENDLESS), folder)
    assert len(rendered) == 1


def test_compare_vocabularies_without_a_vocabulary_of_the_source_is_a_note(gguf: Path, folder: Path, tmp_path: Path):
    bare = with_metadata(gguf, tmp_path / "bare.gguf", lambda m: m.update({PREFIX + "model": "none"}))
    (tmp_path / "empty").mkdir()
    for file, source in ((gguf, bare), (bare, bare), (folder, tmp_path / "empty")):
        rows = rows_of(file, source)
        assert (rows.keys(), rows["tokens"].verdict) == ({"tokens"}, PASS)
        assert rows["tokens"].note.startswith("NOT RUN: llorch reads no vocabulary of the source: ")
    assert [*failures(rows_of(tmp_path / "empty", folder))] == ["tokens"]


def test_compare_encodings_omits_texts_that_nfc_changes(folder: Path, gguf: Path, tmp_path: Path):
    source = with_json(folder, tmp_path / "source", "tokenizer.json", lambda c: c.update(normalizer={"type": "NFC"}))
    row = rows_of(gguf, source)["pre_tokenizer"]
    assert (row.verdict, row.note[:32]) == (PASS, "not compared: texts that NFC cha")
    assert [*failures(rows_of(folder, source))] == ["pre_tokenizer"]


@pytest.mark.parametrize("pre", ["llama4", "tekken"])
def test_compare_encodings_omits_texts_for_which_llama_cpp_approximates(
    pre: str, folder: Path, gguf: Path, tmp_path: Path
):
    source = with_json(folder, tmp_path / "source", "tokenizer.json", lambda c: c.update(pre_tokenizer=WORDS[pre]))
    file = with_metadata(gguf, tmp_path / "file.gguf", lambda m: m.update({PREFIX + "pre": pre}))
    rows = rows_of(file, source)
    assert failures(rows) == {}
    assert rows["pre_tokenizer"].note.endswith(f"llama.cpp approximates the pre-tokenizer {pre}")
    assert [*failures(rows_of(gguf, source))] == ["pre_tokenizer"]


def test_texts_tell_pre_tokenizers_apart(folder: Path, gguf: Path, tmp_path: Path):
    names = {settings.patterns: name for name, settings in PRE_TOKENIZERS.items()}
    assert len(TEXTS) >= 60
    for first, second in combinations(names.values(), 2):
        words = [vocabulary._llamacpp_words(name) for name in (first, second)]
        assert any(vocabulary._split(words[0], text) != vocabulary._split(words[1], text) for text in TEXTS)


WRONG_SCORES: dict[str, tuple[str, Callable[[Metadata], object]]] = {
    "two scores exchanged": ("scores", lambda m: exchange(m[PREFIX + "scores"], 259, 261)),
    "no scores": ("scores", lambda m: m.pop(PREFIX + "scores")),
    "no added space": ("pre_tokenizer", lambda m: m.update({PREFIX + "add_space_prefix": False})),
    "a type changed": ("types", lambda m: exchange(m[PREFIX + "token_type"], 2, 300)),
}


@pytest.mark.parametrize("of_gguf", [False, True])
@pytest.mark.parametrize("name", WRONG_SCORES)
def test_compare_vocabularies_of_wrong_sentencepiece_fails_in_one_row(
    name: str, of_gguf: bool, spaced: Path, tmp_path: Path
):
    part, change = WRONG_SCORES[name]
    wrong = with_metadata(builtin_path("micro-llama"), tmp_path / "wrong.gguf", change)
    assert [*failures(rows_of(wrong, builtin_path("micro-llama") if of_gguf else spaced))] == [part]


def test_compare_merges_of_wrong_sentencepiece_folder_fails_against_scores_and_merges(spaced: Path, tmp_path: Path):
    wrong = with_json(spaced, tmp_path / "wrong", "tokenizer.json", lambda c: exchange(c["model"]["merges"], 3, 40))
    for source, part in ((builtin_path("micro-llama"), "scores"), (spaced, "merges")):
        assert [*failures(rows_of(wrong, source))] == [part]


def test_compare_types_of_unknown_token_that_is_not_added_passes(spaced: Path, tmp_path: Path):
    def drop(content: Any) -> None:
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<unk>"]

    source = with_json(spaced, tmp_path / "source", "tokenizer.json", drop)
    assert failures(rows_of(builtin_path("micro-llama"), source)) == {}


def test_compare_merges_of_other_scores_in_the_same_order_is_a_note(tmp_path: Path):
    def double(metadata: Metadata) -> None:
        metadata[PREFIX + "scores"] = [2 * score for score in metadata[PREFIX + "scores"]]

    rows = rows_of(
        with_metadata(builtin_path("micro-llama"), tmp_path / "file.gguf", double), builtin_path("micro-llama")
    )
    assert failures(rows) == {}
    assert rows["scores"].note == "other scores in the same order"


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_compare_encodings_omits_texts_before_which_schemes_add_other_spaces(scheme: str, spaced: Path, tmp_path: Path):
    def change(content: Any) -> None:
        content |= {"normalizer": None, "pre_tokenizer": metaspace(scheme)}

    source = with_json(spaced, tmp_path / "source", "tokenizer.json", change)
    rows = rows_of(builtin_path("micro-llama"), source)
    assert failures(rows) == {}
    assert rows["pre_tokenizer"].note.endswith(f"as in llama.cpp in the file, {scheme} in the source")
    assert [*failures(rows_of(spaced, source))] == ["pre_tokenizer"]


def test_compare_vocabularies_of_another_kind_fails_in_the_tokens(folder: Path, spaced: Path):
    assert {"tokens", "pre_tokenizer"} <= failures(rows_of(spaced, folder)).keys()


PUBLISHED = {  # vocabulary, GGUF file: rows that are FAIL
    # The writer of the folder lists two control tokens only, and no BOS; the merges are llama.cpp's.
    "llama-3": ("llama-bpe", {"tokens": "token 128004: ", "add_bos": "BOS before"}),
    # The writer lists every pair that makes a token; llama.cpp's file has the pair of the training only.
    "qwen-2": ("qwen2", {"merges": "merge 1: "}),
}


@pytest.mark.weights
@pytest.mark.nightly_cases(but=["qwen-2"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_compare_vocabularies_of_published_vocabulary_fails_where_the_folder_is_incomplete(name: str, tmp_path: Path):
    file, expected = PUBLISHED[name]
    _, folder = write_published(VOCABULARIES[name], tmp_path / name)
    rows = rows_of(real_vocabulary(file), folder)
    wrong = failures(rows)
    assert wrong.keys() == expected.keys()
    assert all(excerpt in wrong[part] for part, excerpt in expected.items())
    assert (rows["pre_tokenizer"].note == "") == (name == "llama-3")
