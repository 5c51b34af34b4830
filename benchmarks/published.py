"""Real material, judged: published vocabularies, chat templates, and a published model, in one table.

    python tests/support/fetch_vocabularies.py DIR
    LLORCH_VOCABULARIES=DIR python benchmarks/published.py           a sample, minutes
    LLORCH_VOCABULARIES=DIR python benchmarks/published.py --full    100,000 strings a vocabulary, 200 prompts; hours

Ids of a GGUF file are judged by llama.cpp, ids of a folder by the publisher's own library, texts of templates by
transformers, and what SmolLM2 computes and says by llama.cpp and by transformers in float64. Exit code 1: something is
wrong.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

SUBJECTS = ("The fox", "My neighbour", "A computer", "The capital of France", "Our teacher", "An old ship", "The river")
VERBS = ("is", "was never", "can always", "wanted to", "will soon", "said that", "looks like")
ENDS = ("", " a", " the", " because", " not", " in the morning and")
N_TOKENS = 64


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    what: str
    judge: str
    n: int  # things that were compared
    wrong: int
    note: str = ""

    def __str__(self) -> str:
        return f"| {self.what} | {self.judge} | {self.n} | {self.wrong} | {self.note} |"


@click.command(help=__doc__)
@click.option("--full", is_flag=True, help="Everything, not a sample.")
@click.option("--only", type=click.Choice(["vocabularies", "templates", "model"]), multiple=True, help="Parts to run.")
def main(full: bool, only: tuple[str, ...]) -> None:
    """Entry point."""
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "vocabularies": lambda: vocabularies(100_000 if full else 2_000),
        "templates": templates,
        "model": lambda: model(200 if full else 10),
    }
    print("| what | judge | compared | wrong | note |\n|---|---|---|---|---|")
    wrong = 0
    for name in only or parts:
        for line in parts[name]():
            print(line, flush=True)
            wrong += line.wrong
    sys.exit(1 if wrong else 0)


def vocabularies(count: int) -> Iterator[Line]:
    """Encode strings with every vocabulary in both formats."""
    from fetch_vocabularies import BARE, NAMES
    from published_vocabularies import SENTENCEPIECE, VOCABULARIES, write_published, write_sentencepiece
    from vocabularies import real_vocabulary

    for name in (*NAMES, *BARE):
        yield of_gguf(name, real_vocabulary(name), count)
    with tempfile.TemporaryDirectory() as folder:
        for name in SENTENCEPIECE:
            yield of_gguf(f"mistral {name}", write_sentencepiece(name, Path(folder, f"{name}.gguf")), count)
        for name, published in VOCABULARIES.items():
            gguf, tokenizer = write_published(published, Path(folder, name))
            yield of_gguf(name, gguf, count)
            yield of_folder(name, gguf, tokenizer, count)


def of_gguf(name: str, path: Path, count: int) -> Line:
    """Compare ids of a GGUF file with llama.cpp's."""
    from llama_vocabulary import LlamaVocabulary

    from llorch.files.gguf import open_gguf
    from llorch.tokenizer import Tokenizer
    from tests.tokenizer.test_published import strings_for

    texts, theirs = strings_for(path, count, seed=41), LlamaVocabulary(path)
    with open_gguf(path) as file:
        ours = Tokenizer.from_gguf(file)
    how: dict[str, Any] = {"add_special": False, "parse_special": True}
    wrong = sum(ours.encode(text, **how) != theirs.encode(text, **how) for text in texts)
    theirs.close()
    return Line(f"{name}, GGUF", "llama.cpp", len(texts), wrong)


def of_folder(name: str, gguf: Path, folder: Path, count: int) -> Line:
    """Compare ids of a folder with the publisher's."""
    from published_vocabularies import VOCABULARIES

    from llorch.tokenizer import Tokenizer
    from tests.tokenizer.test_published import of_publisher, strings_for, tokens_beyond_merges

    texts, ours = strings_for(gguf, count, seed=42), Tokenizer.from_huggingface(folder)
    beyond = set() if VOCABULARIES[name].ignore_merges else tokens_beyond_merges(folder)
    want = of_publisher(name, VOCABULARIES[name].path(), texts)
    judged = [(text, ids) for text, ids in zip(texts, want, strict=True) if beyond.isdisjoint(ids)]
    wrong = sum(ours.encode(text, add_special=False) != ids for text, ids in judged)
    note = f"{len(texts) - len(judged)} strings have one of {len(beyond)} tokens that no merges make" if beyond else ""
    return Line(f"{name}, folder", "publisher", len(judged), wrong, note)


def templates() -> Iterator[Line]:
    """Render every template with every shape of conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template
    from vocabularies import real_vocabulary

    from llorch.errors import FormatError
    from llorch.tokenizer.chat import ChatTemplate, TemplateSettings
    from tests.tokenizer.test_chat import PUBLISHED_CHATS

    texts = {"bos_token": "<bos>", "eos_token": "<eos>"}
    files = sorted((real_vocabulary("qwen2").parent / "templates").glob("*.jinja"))
    for shape, (messages, tools, opened, variables) in PUBLISHED_CHATS.items():
        refused = wrong = 0
        for file in files:
            how: Any = {"tools": tools, "add_generation_prompt": opened}
            source, want, got = file.read_text(), None, None
            try:
                want = render_jinja_template([messages], chat_template=source, **how, **texts, **variables)[0][0]
            except Exception:  # a template raises what it likes
                refused += 1
            try:
                template = ChatTemplate(source, variables=texts)
                got = template.render(messages, settings=TemplateSettings(variables), **how)
            except FormatError:
                pass
            wrong += got != want
        yield Line(f"templates: {shape}", "transformers", len(files), wrong, f"both refuse {refused}")


def model(n_prompts: int) -> Iterator[Line]:
    """Judge SmolLM2 as it was published: every stage, then texts."""
    from fetch_vocabularies import MODEL
    from vocabularies import real_vocabulary

    from llorch.model import load
    from llorch.numerics import GGML
    from llorch.verify.judge import FAIL
    from llorch.verify.models import verify_as_stored, verify_live
    from llorch.verify.witnesses import open_producer

    path = real_vocabulary("qwen2").parent / MODEL
    opened = load(path, numerics=GGML)
    prompt = "The capital of France is"
    rows = list(verify_as_stored(opened, opened.tokenizer.encode(prompt), text=prompt))
    yield Line("SmolLM2 as stored", "llama.cpp", len(rows), sum(row.verdict == FAIL for row in rows))
    ids = opened.tokenizer.encode(prompt)
    rows = list(verify_live(path, ids, ("llamacpp", "transformers"), text=prompt))
    yield Line("SmolLM2 decoded", "both, float64", len(rows), sum(row.verdict == FAIL for row in rows))
    exact = load(path)
    differing = ties = 0
    with open_producer("llamacpp", path) as engine:
        for text in prompts(n_prompts):
            ids = exact.tokenizer.encode(text)
            theirs = engine.greedy(ids, N_TOKENS)
            ours = [token.id for token in exact.generate(ids, max_tokens=N_TOKENS, ignore_eos=True)]
            if ours != theirs:
                differing += 1
                ties += is_tie(engine, ids, ours, theirs)
    note = f"{differing} texts differ, {ties} of them where llama.cpp itself holds the two tokens equal to its rounding"
    yield Line(f"SmolLM2, {N_TOKENS} greedy tokens", "llama.cpp", n_prompts, differing - ties, note)


def prompts(n: int) -> list[str]:
    """Beginnings of sentences, in a fixed order."""
    every = [f"{subject} {verb}{end}" for end in ENDS for verb in VERBS for subject in SUBJECTS]
    return every[:n]


def is_tie(engine: Any, ids: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Tell whether llama.cpp holds the first two tokens that differ closer than two of its own runs differ."""
    at = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    before = [*ids, *theirs[:at]]
    together, alone = engine.logits(before)[-1], engine.selected_logits(before)
    return abs(alone[ours[at]] - alone[theirs[at]]) <= 2 * np.abs(together - alone).max()


if __name__ == "__main__":
    main()
