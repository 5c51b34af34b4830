"""Rules that change one place of a Python source into a bug, for `mutants.py`.

llorch has its own rules, because maintained libraries do not fit: cosmic-ray 8.7 brings a database, GitPython, aiohttp
and does not know the mistakes that this project has met (a keyword left out, a name missing in a table, a loop that
stops after the first chunk); mutmut 3.8 decides itself what runs and has no random sample; libcst only rewrites.
Excluded are places that cannot change a number or an answer: docstrings, annotations, texts of errors, assertions.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

Change = tuple[str, ast.AST | str]  # rule, and the replacement of the node

COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SIBLINGS = (
    ("min", "max"), ("any", "all"), ("floor", "ceil"), ("minimum", "maximum"), ("argmin", "argmax"), ("sin", "cos"),
    ("startswith", "endswith"), ("removeprefix", "removesuffix"), ("append", "extend"), ("lstrip", "rstrip"),
    ("find", "rfind"), ("zeros", "ones"), ("zeros_like", "ones_like"), ("partition", "rpartition"),
)  # fmt: skip
SIBLING = {name: sibling for pair in SIBLINGS for name, sibling in (pair, pair[::-1])}
NO_ANSWER = {"help", "metavar", "show_default", "short_help", "stacklevel", "copy"}  # keywords that change no answer


@dataclass(frozen=True)
class Edit:
    """Change of one place: the bytes from `start` to `end` of the source become `text`."""

    line: int  # first line, from 1
    rule: str  # name of the rule
    start: int
    end: int
    text: str
    old_lines: str  # changed lines before the edit
    new_lines: str  # changed lines after the edit
    at_import: bool  # True if importing the module runs the place

    def apply(self, source: str) -> str:
        """Return the source with this edit made."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def parses(self, source: str) -> bool:
        """Check that the edited source is still a module; parentheses around a node may not fit the new one."""
        try:
            ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return True


def edits(source: str) -> Iterator[Edit]:
    """Yield every edit that a rule can make."""
    data = source.encode()
    starts = [0]
    for row in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    for node, at_import in _nodes(ast.parse(source)):
        for rule, replacement in _changes(node):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            start, end = starts[first] + node.col_offset, starts[last - 1] + (node.end_col_offset or 0)
            text = data[start:end].decode() + replacement if isinstance(replacement, str) else ast.unparse(replacement)
            old_lines = data[starts[first] : starts[last]].decode()
            new_lines = data[starts[first] : start].decode() + text + data[end : starts[last]].decode()
            yield Edit(node.lineno, rule, start, end, text, old_lines.strip(), new_lines.strip(), at_import)


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """Yield nodes that change the module's behaviour, each with True if importing the module runs it."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, at_import = pending.pop()
        if isinstance(node, ast.stmt | ast.expr):
            yield node, at_import
        inside = {*map(id, node.body)} if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else set()
        pending += [(child, at_import and id(child) not in inside) for child in _children(node)]


def _children(node: ast.AST) -> list[ast.AST]:
    """List the children of a node that may be changed."""
    match node:
        case ast.FunctionDef(name="__repr__") | ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import():
            return []
        case ast.ImportFrom() | ast.Expr(value=ast.Constant()) | ast.Assign(value=ast.BinOp(op=ast.BitOr())):
            return []  # the last is a union of types
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return []
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return list(node.orelse)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return []
        case ast.FunctionDef():
            return [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        case ast.ClassDef():
            return list(node.body)
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.keyword(arg=name) if name in NO_ANSWER:
            return []
        case ast.Subscript(value=ast.Name(id="tuple" | "list" | "dict" | "Callable" | "Literal")):
            return []
        case ast.Call(func=ast.Name(id="isinstance")):
            return [node.args[0]]
        case ast.Call(func=ast.Name(id="cast")):
            return [node.args[1]]
        case _:
            return list(ast.iter_child_nodes(node))


def _changes(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                yield "comparison", _with(node, ops=[*node.ops[:index], COMPARE[type(op)](), *node.ops[index + 1 :]])
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
        case ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            yield "and/or", _with(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        case ast.UnaryOp(op=ast.Not()):
            yield "not left out", node.operand
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            yield "last is first", ast.Constant(0)
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node.operand
        case ast.IfExp():
            yield "branches swapped", _with(node, body=node.orelse, orelse=node.body)
        case ast.Constant():
            yield from _constants(node)
        case ast.Subscript():
            yield from _subscripts(node)
        case ast.Call(func=ast.Name(id="isinstance" | "cast")):
            return
        case ast.Call():
            yield from _calls(node)
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
            yield from _tables(node)
        case ast.stmt():
            yield from _statements(node)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Copy a node with other fields."""
    clone = copy.copy(node)
    for name, value in fields.items():
        setattr(clone, name, value)
    return clone


def _constants(node: ast.Constant) -> Iterator[Change]:
    match node.value:
        case bool():
            yield "truth value", ast.Constant(not node.value)
        case int():
            yield "constant", ast.Constant(node.value + 1 if abs(node.value) < 64 else node.value * 2)
        case float():
            yield "constant", ast.Constant(node.value * 2 or 1.0)


def _subscripts(node: ast.Subscript) -> Iterator[Change]:
    match node.slice:
        case ast.Constant(value=0):
            yield "first is last", _with(node, slice=ast.Constant(-1))
        case ast.Slice():
            for name in ("lower", "upper", "step"):
                if getattr(node.slice, name) is not None:
                    yield f"slice without its {name}", _with(node, slice=_with(node.slice, **{name: None}))


def _calls(node: ast.Call) -> Iterator[Change]:
    for keyword in node.keywords:
        if keyword.arg not in NO_ANSWER:
            remaining = [argument for argument in node.keywords if argument is not keyword]
            yield f"{keyword.arg or '**'}= left out", _with(node, keywords=remaining)
    for index, (first, second) in enumerate(pairwise(node.args)):
        are_names = isinstance(first, ast.Name | ast.Attribute) and isinstance(second, ast.Name | ast.Attribute)
        if are_names and ast.dump(first) != ast.dump(second):
            yield "arguments swapped", _with(node, args=[*node.args[:index], second, first, *node.args[index + 2 :]])
    match node.func:
        case ast.Name(id=name) if name in SIBLING:
            yield name, _with(node, func=ast.Name(SIBLING[name]))
        case ast.Attribute(attr=name) if name in SIBLING:
            yield name, _with(node, func=_with(node.func, attr=SIBLING[name]))


def _tables(node: ast.Tuple | ast.List | ast.Set | ast.Dict) -> Iterator[Change]:
    """Yield the table without one of its names, for each name."""
    names = node.keys if isinstance(node, ast.Dict) else node.elts
    if len(names) < 2 or not all(map(_is_name, names)):
        return
    for index in range(len(names)):
        label = f"{ast.unparse(names[index])[:40]} left out" if names[index] else "** left out"  # pyright: ignore[reportArgumentType]
        if isinstance(node, ast.Dict):
            yield label, _with(node, keys=_without(node.keys, index), values=_without(node.values, index))
        else:
            yield label, _with(node, elts=_without(node.elts, index))


def _is_name(node: ast.expr | None) -> bool:
    """Check for a string, or a row of a table that begins with a string."""
    if isinstance(node, ast.Tuple) and node.elts:
        node = node.elts[0]
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _without(items: list, index: int) -> list:
    return [*items[:index], *items[index + 1 :]]


def _statements(node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield "statement left out", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
            yield "statement left out", ast.Pass()
        case ast.If(orelse=[], body=[ast.Return() | ast.Continue() | ast.Raise()]):
            yield "statement left out", ast.Pass()
        case ast.For() if not isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            yield "loop ends after the first", f"\n{' ' * node.body[-1].col_offset}break"
