"""Check the words of text for readers: openers, retired words, sentence lengths and semicolons.

`prose` cuts Markdown into blocks (paragraphs, list items, headings, table cells) without code, formulas and links.
`help_prose` does so for a help text of click. `findings` checks blocks; `figures` counts them.
"""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

RETIRED_FILE = Path(__file__).parents[1] / "repository/retired_words.txt"
OPENER = re.compile(r"(What|Who|Whose|Which|Whether|That|Of|Likewise|As there|The same(?! \w))\b")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<=[.!?])[\"”')\]*_]*\s+|(?<=:)\s+(?=[A-Z])")
COMMAND = re.compile(r"^\s*(?:\$ )?(?:llorch|pip|python|echo|curl|cat|torchrun|git)\b(?![,.:]).*?(?:\s{2,}|$)")
WORD = re.compile(r"[A-Za-z0-9][\w'\u2019-]*")
N_WORDS = re.compile(r"[A-Za-z][\w'\u2019]*")


def retired_words(text: str) -> list[re.Pattern[str]]:
    """Read regular expressions, one a line; `#` opens a comment."""
    lines = (line.strip() for line in text.splitlines())
    return [re.compile(line, re.IGNORECASE) for line in lines if line and not line.startswith("#")]


RETIRED = retired_words(RETIRED_FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Figures:
    """Counts of one page.

    Attributes:
        words: Words outside code and tables.
        semicolons: Per 1,000 words.
        mean: Words of a sentence on average.
        longest: The longest sentence.
    """

    words: int
    semicolons: float
    mean: float
    longest: str


def prose(markdown: str, *, tables: bool = True) -> list[str]:
    """Cut a Markdown page into blocks of prose.

    Args:
        markdown: The page.
        tables: Keep the cells of tables, each as a block.

    Returns:
        Text of each block, on one line, with `CODE` for each piece of code.
    """
    text = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^([ >]*)(`{3,}|~{3,}).*?^[ >]*\2[`~]*\s*?$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^:{3,}.*$", "\n", text, flags=re.MULTILINE)
    lines: list[str] = []
    for line in text.splitlines():
        lines += _lines(line, tables, after_blank=not lines or not lines[-1].strip() or lines[-1] == _INDENTED)
    blocks = re.split(r"\n\s*\n", "\n".join("" if line == _INDENTED else line for line in lines))
    return [block for each in blocks if re.search("[A-Za-z]", block := _inline(each))]


_INDENTED = "\0"  # stands for a line of an indented block of code


def _lines(line: str, tables: bool, *, after_blank: bool) -> list[str]:
    """Give the lines that stand for one line of a page: blocks are set off by empty ones."""
    bare = line.strip()
    if bare.startswith("|"):
        cells = re.split(r"(?<!\\)\|", bare.strip("|")) if tables else []
        return ["", *(part for cell in cells for part in (cell, ""))]
    if re.match(r" {4}\S", line) and after_blank and not re.match(r"\s*([-*+]|\d+\.)\s", line):
        return [_INDENTED]
    if bare.startswith("#"):
        return ["", bare.lstrip("# "), ""]
    item = re.match(r"\s*(?:[-*+]|\d+\.)\s+(.*)", line)
    return ["", item[1]] if item else [line]


def _inline(block: str) -> str:
    """Strip marks from one block and put placeholders for code, formulas and pictures."""
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "CODE", block, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "MATH", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"</?(?:p|br|summary|details|div|td|th|tr|h\d|li)\b[^>]*>", " . ", text)
    text = re.sub(r"<[^>\s][^>]*>", "", html.unescape(text) if "&" in text else text)
    return re.sub(r"\s+", " ", text.replace("**", "")).strip(" >")


def help_prose(text: str) -> list[str]:
    """Cut a help text of click into blocks of prose; lines that show a command keep only what explains it."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\b", "")):
        running: list[str] = []
        for line in paragraph.splitlines():
            if COMMAND.match(line):
                blocks.append(COMMAND.sub("", line))
            else:
                running.append(line)
        blocks.append(" ".join(running))
    return [bare for block in blocks if re.search("[A-Za-z]", bare := _inline(block))]


def sentences(block: str) -> Iterator[str]:
    """Yield the sentences of a block. A colon ends one when a capital letter follows."""
    for sentence in SENTENCE_END.split(block):
        if re.search("[A-Za-z]", sentence):
            yield sentence.strip(" *_\"“'([.")


def _quoted(text: str) -> str:
    """Put a placeholder for option names and for quotations."""
    text = re.sub(r"(?<!\w)--?[a-z][\w-]*", "OPTION", text)
    return re.sub(r"“[^”]{1,300}”|(?<![\w])\"[^\"]{1,300}\"(?!\w)", "QUOTATION", text)


def findings(blocks: Sequence[str], retired: Sequence[re.Pattern[str]] = tuple(RETIRED)) -> list[str]:
    """List banned openers and retired words, each with the text around it."""
    found = []
    for block in blocks:
        text = _quoted(block)
        for sentence in sentences(text):
            if OPENER.match(sentence) and not sentence.rstrip(' )*_"”').endswith("?"):
                found.append(f"opener: {sentence[:100]}")
        for pattern in retired:
            found += [
                f"retired {hit[0]!r}: ...{text[max(0, hit.start() - 40) : hit.end() + 40]}..."
                for hit in pattern.finditer(text)
            ]
    return found


def figures(markdown: str) -> Figures:
    """Count words, semicolons and sentence lengths of a page outside code and tables."""
    blocks = prose(markdown, tables=False)
    counted = [re.sub(r"\b(?:CODE|MATH)\b", "", block) for block in blocks]
    words = sum(len(N_WORDS.findall(block)) for block in counted)
    every = [sentence for block in blocks for sentence in sentences(block)]
    lengths = [length(sentence) for sentence in every]
    semicolons = 1000 * sum(block.count(";") for block in blocks) / max(words, 1)
    return Figures(words, semicolons, sum(lengths) / max(len(lengths), 1), max(every, key=length, default=""))


def length(sentence: str) -> int:
    """Count the words of a sentence; a piece of code is one."""
    return len(WORD.findall(sentence))


def help_texts(command: click.Command, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each verb's name and its help texts: of the verb, its epilog and its options; then those of its verbs."""
    texts = [command.help, command.short_help, command.epilog]
    texts += [option.help for option in command.params if isinstance(option, click.Option)]
    yield name, [text for text in texts if text]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            found = command.get_command(context, verb)
            assert found, verb
            yield from help_texts(found, f"{name} {verb}")
