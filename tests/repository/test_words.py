"""Text for readers has no banned opener, no retired word and no misspelling; README.md keeps its length and sentences.

`retired_words.txt` beside this file lists the retired words. `tests/support/runs/plain_words.py` counts.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import click
import pytest
from messages import messages, messages_of
from runs.plain_words import (
    COMMAND,
    figures,
    findings,
    help_prose,
    help_texts,
    html_prose,
    length,
    prose,
    retired_words,
    script_prose,
    sentences,
)

ROOT = Path(__file__).parents[2]
FOLDERS = ("checkpoints", "benchmarks", ".github")
FORMS = sorted((ROOT / ".github").rglob("*.yml"))
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")]
    + [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
WEB = {".html": html_prose, ".js": script_prose, ".svg": html_prose}
WEB_FILES = sorted(  # the chat page, the report of a diagnosis, the pictures of README.md
    file for name in ("llorch/**/*.html", "llorch/**/*.js", "checkpoints/*.svg") for file in ROOT.glob(name)
)
VERBS = (
    "run", "verify", "diagnose", "diff", "dump-writer", "inspect", "tokenize", "trace", "convert", "quality", "bench",
    "serve", "chat", "doctor", "completion", "lora", "data", "learn",
)  # fmt: skip
SPELLED_SO = ("fo",)  # pieces of tokens in a lesson


@cache
def every_help() -> dict[str, list[str]]:
    from llorch.cli import main

    return dict(help_texts(main, "llorch"))


def of_verb(verb: str) -> list[str]:
    return [text for name, texts in every_help().items() if f"{name} ".startswith(f"llorch {verb} ") for text in texts]


def browser_texts(file: Path) -> list[str]:
    return WEB[file.suffix](file.read_text(encoding="utf-8"))


def misspelt(files: Iterable[Path], capsys: pytest.CaptureFixture[str]) -> list[str]:
    from codespell_lib import main

    capsys.readouterr()
    main("--ignore-words-list", ",".join(SPELLED_SO), *map(str, files))
    return capsys.readouterr().out.splitlines()


def assert_plain(blocks: Iterable[str]) -> None:
    found = findings([*blocks])
    assert not found, f"{len(found)} places (tests/repository/retired_words.txt):\n" + "\n".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_banned_opener_and_no_retired_word(name: str):
    assert_plain(prose((ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", WEB_FILES, ids=lambda file: file.name)
def test_a_page_of_a_browser_has_no_banned_opener_and_no_retired_word(file: Path):
    blocks = browser_texts(file)
    assert blocks
    assert_plain(blocks)


def test_pages_of_a_browser_are_spelled_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.txt"
    page.write_text("\n".join(text for file in WEB_FILES for text in browser_texts(file)), encoding="utf-8")
    assert misspelt([page], capsys) == []


def test_pages_are_spelled_right(capsys: pytest.CaptureFixture[str]):
    assert misspelt([*PAGES, *FORMS, ROOT / "CITATION.cff"], capsys) == []


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_a_help_page_has_no_banned_opener_and_no_retired_word(verb: str):
    texts = of_verb(verb) if verb else every_help()["llorch"]
    assert texts
    assert_plain(block for text in texts for block in help_prose(text))


def test_help_is_spelled_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "help.txt"
    page.write_text("\n".join(text for texts in every_help().values() for text in texts), encoding="utf-8")
    assert misspelt([page], capsys) == []


def test_every_verb_has_a_help_page_of_its_own_here():
    from llorch.cli import main

    assert set(VERBS) == {*main.list_commands(click.Context(main))}


def test_a_message_has_no_banned_opener_and_no_retired_word():
    told = messages()
    assert len(told) > 1500
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, line, message in told
        for text in findings(help_prose(message))
    ]
    assert not found, f"{len(found)} places (tests/repository/retired_words.txt):\n" + "\n".join(found)


def test_messages_are_spelled_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "messages.txt"
    page.write_text("\n".join(text for _, _, text in messages()), encoding="utf-8")
    assert misspelt([page], capsys) == []


@pytest.mark.parametrize("source", ["raise ValueError('a hat of felt')", "say(f'{n} hats of felt are {made} here')"])
def test_a_string_with_three_words_in_a_row_is_a_message(source: str):
    assert len([*messages_of(source)]) == 1


@pytest.mark.parametrize("source", ["def f():\n  'A hat of felt.'", "option(help='a hat of felt')", "x = 'two words'"])
def test_docstrings_and_help_texts_are_no_messages(source: str):
    assert [*messages_of(source)] == []


README = figures((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_readme_has_at_most_1200_words():
    assert README.words <= 1200


def test_the_readme_has_at_most_4_semicolons_in_1000_words():
    assert README.semicolons <= 4


def test_the_readme_has_at_most_18_words_a_sentence():
    assert README.mean <= 18


def test_the_readme_has_no_sentence_above_35_words():
    assert length(README.longest) <= 35, README.longest


WORDS = retired_words("# comment\n\n\\bhouse\\b\n\\bleaf\\b(?! node)\n")


@pytest.mark.parametrize(
    "page",
    [
        "What it does is shown.",
        "It works. Of the CPU.",
        "# Whether it is right",
        "- That is an item.",
        "Note: Who asks is served.",
        "| a | Which is it |\n|---|---|",
        "Likewise.",
        "It is **bold.** Whose it is, nobody says.",
        "> Whose is quoted so.",
        "The same, on a GPU.",
        "It is a house.",
        "See the HOUSE of cards.",
        "| leaf | b |",
        "A [leaf](https://example.org) here.",
        "<summary>What it does</summary>",
        "`code` and house",
        "one\n\n    code\n\nhouse\n",
        "```\ncode\n```\nhouse",
        "1. house",
    ],
)
def test_a_banned_opener_or_a_retired_word_is_found_once(page: str):
    assert len(findings(prose(page), WORDS)) == 1


@pytest.mark.parametrize(
    "page",
    [
        "What does it do?",
        "It shows what it does, of the CPU.",
        "# Who is it for?",
        "Whatever it is, offices are open. Offset 3.",
        "The same file is read twice.",
        "A leaf node, and a household.",
        "A word in `a house`, and --house, and ``one `house` ``.",
        'They say "the house" and “a leaf” there.',
        "```text\nWhat is it. house\n```",
        "~~~\nhouse\n~~~",
        "text\n\n    house\n    Of it.\n\n    leaf\n",
        "<!-- house -->",
        "[words](https://example.org/house)",
        "![house](a.png)",
        "$house$ and $$house$$",
        "- item\n  ```\n  house\n  ```\n",
    ],
)
def test_code_quotations_questions_and_like_words_are_not_found(page: str):
    assert findings(prose(page), WORDS) == []


@pytest.mark.parametrize(
    ("cut", "source"),
    [
        (html_prose, "<p>What it does</p>"),
        (html_prose, "<ul><li>It is.<li>Of the CPU</ul>"),
        (html_prose, '<main aria-label="A house"></main>'),
        (html_prose, "<h2>{{ 'Which it is' if a else b }}</h2>"),
        (html_prose, "<p>{% if a %}It is.{% endif %} Of {{ b }}</p>"),
        (html_prose, "<p>It is <b>a</b> <span>house</span></p>"),
        (html_prose, "<pre>house</pre><p>house"),
        (script_prose, 'say("Of the CPU");'),
        (script_prose, "say(`It has ${n} parts. Of ${`the`} CPU`);"),
        (script_prose, "say('a \\'house\\'');"),
    ],
)
def test_a_text_of_a_browser_is_found_once(cut: Callable[[str], list[str]], source: str):
    assert len(findings(cut(source), WORDS)) == 1


@pytest.mark.parametrize(
    ("cut", "source"),
    [
        (html_prose, '<style>.house {}</style><p class="house">{{ house }} <code>house</code>{# house #}</p>'),
        (html_prose, "<script>house()</script><!-- house --><button>Which stages?</button>"),
        (script_prose, "// Of a house\nhouse(`${house}`); /* house */"),
    ],
)
def test_code_in_a_page_of_a_browser_is_not_found(cut: Callable[[str], list[str]], source: str):
    assert findings(cut(source), WORDS) == []


def test_figures_count_words_semicolons_and_sentences_outside_code_and_tables():
    page = "# Two words\n\n| not; one |\n|---|\n\nOne `a; b` two; three. Four five!\n\n```\nx; y z\n```\n"
    counted = figures(page)
    assert (counted.words, counted.semicolons, counted.mean) == (7, 1000 / 7, 8 / 3)
    assert counted.longest == "One CODE two; three"


def test_a_sentence_ends_at_a_stop_and_at_a_colon_before_a_capital():
    assert [*sentences("One, e.g. two: three. Four: Five? (Six.) Seven")] == [
        "One, e.g. two: three", "Four:", "Five?", "Six", "Seven",
    ]  # fmt: skip


def test_commands_of_a_help_text_are_code_and_what_explains_them_is_not():
    text = "Do it.\n\n\b\nllorch run house -n 3    Of the CPU\nllorch diff house leaf\nllorch: a leaf\nin two lines"
    assert help_prose(text) == ["Do it.", "Of the CPU", "llorch: a leaf in two lines"]
    assert COMMAND.match("$ llorch run story")


def test_help_texts_are_those_of_verbs_options_and_epilogs():
    @click.command(help="A", epilog="B")
    @click.option("--c", help="C")
    @click.argument("d")
    def verb() -> None: ...

    group = click.Group("group", help="D", commands={"verb": verb})
    assert dict(help_texts(group, "x")) == {"x": ["D"], "x verb": ["A", "B", "C"]}


def test_a_misspelling_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.md"
    page.write_text("It recieves a fo.\n", encoding="utf-8")
    assert len(misspelt([page], capsys)) == 1
