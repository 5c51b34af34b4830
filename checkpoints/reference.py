"""The reference pages of the site, made from docstrings and from `--help`."""

import ast
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import llorch
import llorch.ops
from llorch.cli import main as command_line

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+): ", re.MULTILINE)
WIDTH = 88


def commands() -> str:
    """Show every command with its `--help`."""
    context = click.Context(command_line, info_name="llorch", max_content_width=WIDTH, terminal_width=WIDTH)
    return "# Commands\n\n" + "\n\n".join(_helped(command_line, context))


def _helped(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _helped(below, click.Context(below, parent=context, info_name=name, terminal_width=WIDTH))


def names() -> str:
    """Describe the names in `import llorch`."""
    return "# Python\n\nThe names in `import llorch`.\n\n" + "\n\n".join(
        _described(name, getattr(llorch, name), "##") for name in llorch.__all__
    )


def functions() -> str:
    """Describe the operations of the forward pass and of its gradients."""
    parts = ["# Operations", _markdown(inspect.getdoc(llorch.ops) or "")]
    for found in pkgutil.iter_modules(llorch.ops.__path__, "llorch.ops."):
        module = import_module(found.name)
        parts.append(f"## {found.name}\n\n{_markdown(inspect.getdoc(module) or '')}\n\n{_file(module)}")
        mine = (value for value in vars(module).values() if getattr(value, "__module__", "") == found.name)
        parts += [
            _described(each.__name__, each, "###")
            for each in mine
            if inspect.isfunction(each) and not each.__name__.startswith("_")
        ]
    return "\n\n".join(parts)


def _described(name: str, value: Any, level: str) -> str:
    lines = [f"{level} `{name}`", _head(value), _markdown(inspect.getdoc(value) or "")]
    if inspect.isclass(value) and not issubclass(value, Exception):
        lines += [_described(f"{name}.{each}", method, level + "#") for each, method in _methods(value)]
    return "\n\n".join(line for line in lines if line)


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """List the public methods of a class and of its base classes in llorch."""
    ours = [each for each in owner.__mro__ if each.__module__.startswith("llorch")]
    for name, value in {name: value for each in reversed(ours) for name, value in vars(each).items()}.items():
        method = getattr(value, "fget", None) or getattr(value, "func", value)  # of a property, computed once or always
        if inspect.isfunction(method) and method.__doc__ and (name == "__init__" or not name.startswith("_")):
            yield name, method


def _head(value: Any) -> str:
    """Quote the signature of a function or the fields of a class from the source."""
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(value))).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    shown = lines[first - 1 : node.body[0].lineno - 1]
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        shown = [
            lines[node.lineno - 1],
            *(line for each in fields for line in lines[each.lineno - 1 : each.end_lineno]),
        ]
    return "```python\n" + "\n".join(shown) + "\n```"


def _markdown(docstring: str) -> str:
    """Convert a docstring; its sections, `Args` and the like, become lists."""
    before, *sections = SECTION.split(docstring)
    made = [before.strip()]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        entries = ENTRY.sub(r"\n- `\1`: ", text) if ENTRY.search(text) else textwrap.dedent(text)
        made.append(f"*{title}*\n\n" + "\n".join(line.strip() for line in entries.strip().splitlines()))
    return "\n\n".join(made)


def _file(module: ModuleType) -> str:
    path = Path(str(module.__file__)).relative_to(ROOT).as_posix()
    return f"[`{path}`](../{path})"
