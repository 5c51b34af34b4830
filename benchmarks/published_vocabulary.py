"""Published vocabularies and chat templates: ids against llama.cpp and publishers, texts against transformers."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from published_lines import Line, all_lines, progress


def vocabularies(count: int) -> Iterator[Line]:
    """Encode strings with every vocabulary in both formats."""
    from builders.published_vocabularies import SENTENCEPIECE, VOCABULARIES, write_published, write_sentencepiece
    from builders.vocabularies import real_vocabulary
    from fetch_vocabularies import BARE, NAMES

    for name in (*NAMES, *BARE):
        progress(f"vocabularies: {name}")
        yield compare_gguf(name, real_vocabulary(name), count)
    with tempfile.TemporaryDirectory() as folder:
        for name in SENTENCEPIECE:
            yield compare_gguf(f"mistral {name}", write_sentencepiece(name, Path(folder, f"{name}.gguf")), count)
        for name, published in VOCABULARIES.items():
            progress(f"vocabularies: {name}")
            gguf, tokenizer = write_published(published, Path(folder, name))
            yield compare_gguf(name, gguf, count)
            yield compare_folder(name, gguf, tokenizer, count)


def compare_gguf(name: str, path: Path, count: int) -> Line:
    """Compare ids of a GGUF file with llama.cpp's."""
    from helpers.llama_vocabulary import LlamaVocabulary

    from llorch.files.gguf import open_gguf
    from llorch.files.tokenizer import Tokenizer
    from tests.files.tokenizer.test_published import strings_for

    texts, vocabulary = strings_for(path, count, seed=41), LlamaVocabulary(path)
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    options: dict[str, Any] = {"add_special": False, "parse_special": True}
    wrong = sum(tokenizer.encode(text, **options) != vocabulary.encode(text, **options) for text in texts)
    vocabulary.close()
    return Line(f"{name}, GGUF", "llama.cpp", len(texts), wrong)


def compare_folder(name: str, gguf: Path, folder: Path, count: int) -> Line:
    """Compare ids of a folder with the publisher's."""
    from builders.published_vocabularies import VOCABULARIES

    from llorch.files.tokenizer import Tokenizer
    from tests.files.tokenizer.test_published import of_publisher, strings_for, tokens_beyond_merges

    texts, tokenizer = strings_for(gguf, count, seed=42), Tokenizer.from_huggingface(folder)
    unreachable = set() if VOCABULARIES[name].ignore_merges else tokens_beyond_merges(folder)
    expected = of_publisher(name, VOCABULARIES[name].path(), texts)
    comparable = [(text, ids) for text, ids in zip(texts, expected, strict=True) if unreachable.isdisjoint(ids)]
    wrong = sum(tokenizer.encode(text, add_special=False) != ids for text, ids in comparable)
    n_left_out = len(texts) - len(comparable)
    note = f"{n_left_out} strings have one of {len(unreachable)} tokens that no merges make" if unreachable else ""
    return Line(f"{name}, folder", "publisher", len(comparable), wrong, note)


def templates() -> Iterator[Line]:
    """Render every template with every shape of conversation."""
    from builders.vocabularies import real_vocabulary

    from tests.files.tokenizer.test_chat import PUBLISHED_CHATS

    texts = {"bos_token": "<bos>", "eos_token": "<eos>"}
    files = sorted((real_vocabulary("qwen2").parent / "templates").glob("*.jinja"))
    for shape in PUBLISHED_CHATS:
        renderings = {file.stem: render_both(file.read_text(), texts, shape) for file in files}
        refused = sum(expected is None and actual is None for expected, actual in renderings.values())
        wrong = [name for name, (expected, actual) in renderings.items() if expected != actual]
        note = all_lines((f"both refuse {refused}", ", ".join(wrong)))
        yield Line(f"templates: {shape}", "transformers", len(files), len(wrong), note)


def render_both(source: str, texts: Mapping[str, str], shape: str) -> tuple[str | None, str | None]:
    """Render a conversation with transformers and with llorch; None if a template refuses it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from llorch.files.tokenizer.chat import ChatTemplate, TemplateSettings
    from llorch.runtime.errors import FormatError
    from tests.files.tokenizer.test_chat import PUBLISHED_CHATS

    messages, tools, opens_answer, variables = PUBLISHED_CHATS[shape]
    options: Any = {"tools": tools, "add_generation_prompt": opens_answer}
    expected = actual = None
    try:
        expected = render_jinja_template([messages], chat_template=source, **options, **texts, **variables)[0][0]
    except Exception:  # a template can raise any exception
        pass
    try:
        actual = ChatTemplate(source, variables=texts).render(messages, settings=TemplateSettings(variables), **options)
    except FormatError:
        pass
    return expected, actual
