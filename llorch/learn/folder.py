"""A learner's folder: one Python file a lesson; a function that only raises NotImplementedError is not written."""

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from llorch.learn.lessons import LESSON_OF, LESSONS, PARTS
from llorch.learn.part import Call


def read_folder(folder: Path) -> dict[str, Call]:
    """Import what is written.

    Args:
        folder: With some of the files that `llorch learn init` made.

    Returns:
        Functions by the name of the part; those that are not written are absent. Those of a file that cannot be
        imported raise what it raised.
    """
    written: dict[str, Call] = {}
    with _importable(folder):
        for lesson in LESSONS:
            if not (folder / f"{lesson.module}.py").is_file():
                continue
            module = import_module(lesson.module)
            if (error := vars(module).get(_FAULT)) is not None:
                written |= {part.name: _raising(error) for part in lesson.parts}
                continue
            unwritten = unwritten_in(folder / f"{lesson.module}.py")
            for part in lesson.parts:
                if part.name not in unwritten and callable(vars(module).get(part.name)):
                    written[part.name] = vars(module)[part.name]
    return written


_FAULT = "_not_importable"


def _raising(error: BaseException) -> Call:
    def part(**given: Any) -> Any:
        raise error

    return part


def unwritten_in(path: Path) -> set[str]:
    """Names of the functions of a file that do nothing but raise NotImplementedError."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _only_raises(node.body)}


def _only_raises(body: Sequence[ast.stmt]) -> bool:
    rest = [each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    return len(rest) == 1 and isinstance(rest[0], ast.Raise) and "NotImplementedError" in ast.unparse(rest[0])


class _Borrowing(SourceFileLoader):
    """Puts the reference in the place of what is not written or importable, so that other files can import it."""

    def exec_module(self, module: ModuleType) -> None:
        try:
            if is_there := Path(self.path).is_file():
                super().exec_module(module)
            borrowed = unwritten_in(Path(self.path)) & PARTS.keys() if is_there else self._parts()
        except (Exception, SystemExit) as error:
            setattr(module, _FAULT, error)
            borrowed = self._parts()
        for name in borrowed:
            setattr(module, name, PARTS[name].reference)

    def _parts(self) -> set[str]:
        return {name for name, lesson in LESSON_OF.items() if lesson.module == self.name}


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = self._folder / f"{fullname}.py"
        if fullname not in {lesson.module for lesson in LESSONS}:
            return None
        return spec_from_file_location(fullname, file, loader=_Borrowing(fullname, str(file)))


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The folder's files under their names; other files of it can be imported by them too, and stay importable."""
    names = {lesson.module for lesson in LESSONS}
    for name in names & sys.modules.keys():
        del sys.modules[name]  # of another folder, or of an earlier version
    finder = _Finder(folder)
    sys.meta_path.insert(0, finder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
