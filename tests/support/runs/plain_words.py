"""Check the words of text for readers: openers, retired words, sentence lengths and semicolons.

`prose` cuts Markdown into blocks (paragraphs, list items, headings, table cells) without code, formulas and links.
`help_prose` does so for a help text of click, `html_prose` for an HTML page, `script_prose` for JavaScript. `findings`
checks blocks; `figures` counts them.
"""

import re
from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import click
from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexers.javascript import JavascriptLexer
from pygments.token import String

RETIRED_FILE = Path(__file__).parents[2] / "repository/retired_words.txt"
OPENER = re.compile(r"(What|Who|Whose|Which|Whether|That|Of|Likewise|As there|The same(?! \w))\b")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<=[.!?])[\"”')\]*_]*\s+|(?<=:)\s+(?=[A-Z])")
COMMAND = re.compile(r"^\s*(?:\$ )?(?:llorch|pip|python|echo|curl|cat|torchrun|git)\b(?![,.:]).*?(?:\s{2,}|$)")
WORD = re.compile(r"[A-Za-z0-9][\w'\u2019-]*")
N_WORDS = re.compile(r"[A-Za-z][\w'\u2019]*")
MARKDOWN = MarkdownIt("commonmark").enable("table")
SHOWN_AS = {"code_inline": "CODE", "softbreak": " ", "hardbreak": " "}
INLINE_TAG = re.compile(r"</?(?:a|b|code|em|i|img|span|strong|sub|sup)\b|<!")
HIDDEN_TAGS = ("code", "pre", "script", "style")
SHOWN_ATTRIBUTES = ("aria-label", "placeholder", "title", "alt")


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
    text = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.DOTALL | re.MULTILINE)  # front matter
    text = re.sub(r"^:{3,}.*$", "", text, flags=re.MULTILINE)  # directives of MyST
    blocks: list[str] = []
    in_table = False
    for token in MARKDOWN.parse(text):
        in_table = token.type == "table_open" or (in_table and token.type != "table_close")
        if token.type == "html_block":
            blocks += _Texts.of(token.content)
        elif token.type == "inline" and (tables or not in_table):
            blocks.append(_joined(token.children or []))
    return [block for block in blocks if re.search("[A-Za-z]", block)]


def _inline(block: str) -> str:
    """Strip marks from one block."""
    return _joined(MARKDOWN.parseInline(block)[0].children or [])


def _joined(tokens: Sequence[Token]) -> str:
    """Join the text of one block, with placeholders for code and formulas and without pictures."""
    text = ""
    for token in tokens:
        if token.type in ("text", "text_special"):
            text += token.content
        elif token.type in SHOWN_AS:
            text += SHOWN_AS[token.type]
        elif token.type == "html_inline" and not INLINE_TAG.match(token.content):
            text += " . "
    return _on_one_line(text)


def _on_one_line(text: str) -> str:
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "MATH", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text).strip(" >")


class _Texts(HTMLParser):
    """Blocks of an HTML page: the text that it shows and the attributes that it shows or a screen reader reads out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.n_hidden = [""], 0

    @classmethod
    def of(cls, page: str) -> list[str]:
        """Cut a page or a part of one."""
        texts = cls()
        texts.feed(page)
        texts.close()
        return [_on_one_line(block) for block in texts.blocks if re.search("[A-Za-z]", block)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.blocks[-1] += "CODE" if tag == "code" else ""
        self.blocks[-1:] = [*(value or "" for name, value in attrs if name in SHOWN_ATTRIBUTES), self.blocks[-1]]
        self.n_hidden += tag in HIDDEN_TAGS
        self._end(tag)

    def handle_endtag(self, tag: str) -> None:
        self.n_hidden -= tag in HIDDEN_TAGS
        self._end(tag)

    def handle_data(self, data: str) -> None:
        self.blocks[-1] += "" if self.n_hidden else data

    def _end(self, tag: str) -> None:
        if not INLINE_TAG.match(f"<{tag}>"):
            self.blocks.append("")


def html_prose(template: str) -> list[str]:
    """Cut an HTML page, which may be a template of jinja, into blocks; strings in its expressions are blocks, too."""
    lexed = [(kind, value) for _, kind, value in Environment().lex(template)]
    shown = {"data": lambda value: value, "variable_begin": lambda _: "CODE"}
    page = "".join(shown[kind](value) for kind, value in lexed if kind in shown)
    return _Texts.of(page) + [literal_eval(value) for kind, value in lexed if kind == "string"]


def script_prose(source: str) -> list[str]:
    """List the strings of a program in JavaScript, with `CODE` for each part that is computed."""
    strings: list[str] = []
    for kind, text in JavascriptLexer().get_tokens(source):
        if kind in (String.Double, String.Single):
            strings.append(text[1:-1])
        elif kind is String.Backtick and text == "`":
            strings.append("")
        elif kind is String.Backtick:
            strings[-1] += text
        elif kind is String.Interpol and text != "}":
            strings[-1] += "CODE"
    return [string for string in strings if re.search("[A-Za-z]", string)]


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
