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
from llorch.apps.learn.museum import exhibits
from llorch.cli import main as command_line

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+): ", re.MULTILINE)
WIDTH = 88
MUSEUM_INTRODUCTION = """Engines of Llama and Qwen had these bugs. Each symptom is the one of a public report. Find the
cause from the numbers of such an engine, and compare it with the real repair:

```
llorch learn museum open 3 bug3             # writes the report and the numbers
llorch verify micro-llama3 --against bug3   # names the first wrong stage
llorch learn museum answer 3 "no bias"      # checks your answer
llorch learn museum solution 3              # shows the cause and the repair
```

The report says which model the engine ran."""


def commands() -> str:
    """Show every command with its `--help`."""
    context = click.Context(command_line, info_name="llorch", max_content_width=WIDTH, terminal_width=WIDTH)
    return "# Commands\n\n" + "\n\n".join(_helped(command_line, context))


def _helped(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _helped(child, click.Context(child, parent=context, info_name=name, terminal_width=WIDTH))


def names() -> str:
    """Describe the names in `import llorch`."""
    return "# Python\n\nThe names in `import llorch`.\n\n" + "\n\n".join(
        _described(name, getattr(llorch, name), "##") for name in llorch.__all__
    )


def functions() -> str:
    """Describe the operations of the forward pass and of its gradients."""
    parts = ["# Operations", _markdown(inspect.getdoc(llorch.ops) or "")]
    for module_info in pkgutil.iter_modules(llorch.ops.__path__, "llorch.ops."):
        module = import_module(module_info.name)
        parts.append(f"## {module_info.name}\n\n{_markdown(inspect.getdoc(module) or '')}\n\n{_file(module)}")
        members = (value for value in vars(module).values() if getattr(value, "__module__", "") == module_info.name)
        parts += [
            _described(function.__name__, function, "###")
            for function in members
            if inspect.isfunction(function) and not function.__name__.startswith("_")
        ]
    return "\n\n".join(parts)


def museum() -> str:
    """List the symptoms of the bug museum; the cause of each is for the reader to find."""
    exhibit_lines = "\n".join(f"{bug.number}. {bug.symptom}" for bug in exhibits())
    return f"# Museum of bugs\n\n{MUSEUM_INTRODUCTION}\n\n{exhibit_lines}"


def _described(name: str, value: Any, level: str) -> str:
    lines = [f"{level} `{name}`", _head(value), _markdown(inspect.getdoc(value) or "")]
    if inspect.isclass(value) and not issubclass(value, Exception):
        lines += [_described(f"{name}.{method_name}", method, level + "#") for method_name, method in _methods(value)]
    return "\n\n".join(line for line in lines if line)


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """List the public methods of a class and of its base classes in llorch."""
    bases = [cls for cls in owner.__mro__ if cls.__module__.startswith("llorch")]
    for name, value in {name: value for cls in reversed(bases) for name, value in vars(cls).items()}.items():
        method = getattr(value, "fget", None) or getattr(value, "func", value)  # of a property, computed once or always
        if inspect.isfunction(method) and method.__doc__ and (name == "__init__" or not name.startswith("_")):
            yield name, method


def _head(value: Any) -> str:
    """Quote the signature of a function or the fields of a class from the source."""
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(value))).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    head = lines[first - 1 : node.body[0].lineno - 1]
    if isinstance(node, ast.ClassDef):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        head = [
            lines[node.lineno - 1],
            *(line for field in fields for line in lines[field.lineno - 1 : field.end_lineno]),
        ]
    return "```python\n" + "\n".join(head) + "\n```"


def _markdown(docstring: str) -> str:
    """Convert a docstring; its sections, `Args` and the like, become lists."""
    summary, *sections = SECTION.split(docstring)
    parts = [summary.strip()]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        entries = ENTRY.sub(r"\n- `\1`: ", text) if ENTRY.search(text) else textwrap.dedent(text)
        parts.append(f"*{title}*\n\n" + "\n".join(line.strip() for line in entries.strip().splitlines()))
    return "\n\n".join(parts)


def _file(module: ModuleType) -> str:
    path = Path(str(module.__file__)).relative_to(ROOT).as_posix()
    return f"[`{path}`](../{path})"
