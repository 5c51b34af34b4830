"""Help pages and their pages in `checkpoints/commands` are short and in groups, and every command on them is parsed.

The examples include `llorch learn check --teeth`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from helpers.command_line import invoke, words_of

from llorch.cli import main
from llorch.cli.verbs import HELP_ALL, PAGES, Option, Page, Verb, page_option

ROOT = Path(__file__).parents[2]
MOST_LINES, MANY_OPTIONS, WIDTH, MOST_EXAMPLES = 60, 25, 80, 3
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in (ROOT / PAGES).glob("*.md")}


def contexts(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Yield a context of each command of the command line, with the width of a terminal."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from contexts(found, found.context_class(found, parent=context, info_name=name))


TOP = main.context_class(main, info_name="llorch", terminal_width=WIDTH)
ALL = {context.command_path: context for context in contexts(main, TOP)}
HELP = {name: context.get_help() for name, context in ALL.items()}
TOP.meta[HELP_ALL] = True
FULL = {name: context.get_help() for name, context in ALL.items()}
PAGE_OF = {name: context.command for name, context in ALL.items() if isinstance(context.command, Page)}


def options(name: str) -> list[click.Option]:
    return [param for param in ALL[name].command.params if isinstance(param, click.Option)]


def too_long(page: str, n_options: int) -> bool:
    """Check the number of lines: 60, or 25 and 1.5 an option where there are more than 25."""
    most = MOST_LINES if n_options <= MANY_OPTIONS else 25 + 1.5 * n_options
    return page.count("\n") + 1 > most


@pytest.fixture
def parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Give the exit code of a command line that is parsed, and whose verb does nothing, where examples find files."""
    monkeypatch.setattr(Verb, "invoke", lambda self, ctx: None)
    monkeypatch.chdir(tmp_path)
    for folder in ("path/to/dump", "path/to/adapter", "my_llama"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "answers.npz").touch()
    return lambda line: invoke(*words_of(line)).exit_code


def test_every_command_has_a_page_in_this_form():
    assert PAGE_OF.keys() == ALL.keys()
    assert len(ALL) > 40


@pytest.mark.parametrize("name", ALL)
def test_a_help_page_is_short_and_has_one_to_three_examples(name: str):
    assert 1 <= len(PAGE_OF[name].examples) <= MOST_EXAMPLES
    for page in (HELP[name], FULL[name]):
        assert not too_long(page, len(options(name)))
        assert [line for line in page.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("width", range(60, 81, 4))
def test_no_word_of_a_help_page_is_broken(width: int):
    top = main.context_class(main, info_name="llorch", terminal_width=width)
    lines = [line for context in contexts(main, top) for line in context.get_help().splitlines()]
    assert len(lines) > 300
    assert [line for line in lines if line.endswith("-")] == []
    assert not any("\u2011" in line for line in lines)


def test_a_long_help_page_is_found():
    assert not too_long("line\n" * 59 + "line", 25)
    assert too_long("line\n" * 60 + "line", 25)
    assert not too_long("line\n" * 63 + "line", 26)
    assert too_long("line\n" * 64 + "line", 26)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name in PAGE_OF for line in PAGE_OF[name].examples])
def test_an_example_is_parsed(name: str, line: str, parsed: Callable[[str], int]):
    assert name.removesuffix(" watch") in line
    assert f"  {line}\n" in HELP[name]
    assert parsed(line) == 0


@pytest.mark.parametrize("line", ["llorch run story x --chart y", "llorch lora trane", "llorch bench --rounds x"])
def test_an_example_with_a_mistake_is_refused(line: str, parsed: Callable[[str], int]):
    assert parsed(line) == 2


@pytest.mark.parametrize("name", [name for name in ALL if name != "llorch"])
def test_every_option_belongs_to_a_group(name: str):
    sections = (section.partition(":\n") for section in FULL[name].split("\n\n"))
    groups = {title: re.sub(r"(?m)^ {3,}.*", "", text).replace("[no-]", "") for title, _, text in sections}
    for option in options(name):
        assert isinstance(option, Option)
        assert re.search(rf"(?m)^  .*{option.opts[-1]}\b", groups[option.group]), option.name


@pytest.mark.parametrize("name", ALL)
def test_every_command_and_option_has_a_text(name: str):
    command = ALL[name].command
    assert all([command.help, command.get_short_help_str(), *(option.help for option in options(name))])


def test_a_range_is_shown_where_its_end_is_small():
    shown = {name: "<=x" in HELP[name] for name in ALL}
    assert [name for name in shown if shown[name]] == ["llorch serve"]  # --parallel, up to 256
    assert not any(text in page for page in HELP.values() for text in ("None]", "2147483647"))


def test_a_pair_of_flags_is_one_name():
    @click.command()
    @page_option("--packing/--no-packing", help="Rows.")
    def command() -> None: ...

    assert "--[no-]packing  Rows." in command.get_help(click.Context(command))


def test_verbs_stand_below_their_headings():
    page = main.get_help(TOP)
    sections = [section.splitlines() for section in page.split("\n\n")]
    headings = {lines[0]: [line.split()[0] for line in lines[1:]] for lines in sections if lines[0].endswith(":")}
    assert headings["Port a model:"][:2] == ["verify", "diagnose"]
    assert headings["Run and serve:"] == ["run", "chat", "serve"]
    listed = [verb for heading in main.headings for verb in headings[f"{heading}:"]]
    assert listed == main.list_commands(TOP)
    assert len(listed) == 18


def test_every_page_is_named_by_a_help_page():
    assert {command.page for command in PAGE_OF.values() if command.page} == TEXTS.keys()
    assert all(f"\nMore: {command.page}\n" in HELP[name] for name, command in PAGE_OF.items() if command.page)


@pytest.mark.parametrize("name", TEXTS)
def test_a_link_of_a_page_leads_to_a_file(name: str):
    for link in re.findall(r"\]\(([^)#]+)", TEXTS[name]):
        assert ((ROOT / name).parent / link).exists(), link


def commands(text: str) -> list[str]:
    """List the command lines in the blocks of a page, with continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text.replace("\\\n", " "), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if re.search(r"(?:^|\W)llorch ", line)]


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, text in TEXTS.items() for line in commands(text)])
def test_a_command_of_a_page_is_parsed(name: str, line: str, parsed: Callable[[str], int]):
    assert name in TEXTS
    assert parsed(line) == 0


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_explains_options_that_exist(name: str):
    known = {opt for context in ALL.values() for param in context.command.params for opt in param.opts}
    prose = re.sub(r"(?ms)^```.*?^```", "", TEXTS[name])
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", prose)) - known == set()
