"""A learner's folder: one Python file a lesson; a function that only raises NotImplementedError is not written."""

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.lessons import LESSONS, PARTS

_MODULES = frozenset(lesson.module for lesson in LESSONS)
_FAULT = "_not_importable"
_ALIKE = 0.85  # share of letters that two names have in common
_folders: set[str] = set()  # whose files were imported so far


def read_folder(folder: Path, around: Callable[[Call], Call] = lambda call: call) -> dict[str, Call]:
    """Import what is written, as it is now: functions by the name of the part, without those that are not written.

    Functions of a file that cannot be imported raise what it raised. `around` is put around every function, and around
    the import of each file.
    """
    written: dict[str, Call] = {}
    with _importable(folder, around):
        for lesson in LESSONS:
            if not (folder / f"{lesson.module}.py").is_file():
                continue
            module = importlib.import_module(lesson.module)
            if (error := vars(module).get(_FAULT)) is not None:
                written |= {exercise.name: _raising(error) for exercise in lesson.parts}
                continue
            for exercise in lesson.parts:
                found = vars(module).get(exercise.name)
                if callable(found) and found is not exercise.reference:
                    written[exercise.name] = around(found)
    return written


def _raising(error: BaseException) -> Call:
    """Return an exercise that raises this error when it is called."""

    def part(**given: object) -> Any:
        raise error

    return part


def renamed_in(folder: Path, written: Container[str]) -> dict[str, str]:
    """Find functions that seem to be parts under another name, or in another lesson's file: a sentence by part."""
    found: dict[str, str] = {}
    files = {lesson.module: _functions_of(folder / f"{lesson.module}.py") for lesson in LESSONS}
    for lesson in LESSONS:
        for exercise in lesson.parts:
            if exercise.name in written:
                continue
            if name := next(
                (name for name, given in files[lesson.module].items() if _is_alike(exercise, name, given)), ""
            ):
                found[exercise.name] = f"you define {name} in {lesson.module}.py; the lesson asks for {exercise.name}"
            elif file := next((module for module, functions in files.items() if exercise.name in functions), ""):
                found[exercise.name] = f"you define {exercise.name} in {file}.py; the lesson reads {lesson.module}.py"
    return found


def _functions_of(file: Path) -> dict[str, list[str]]:
    """Map each function that a learner's file defines to its parameters; stubs are left out."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return {}
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: [each.arg for each in node.args.args] for node in functions if not _only_raises(node.body)}


def _is_alike(exercise: Exercise, name: str, given: Sequence[str]) -> bool:
    """Tell if a function seems meant as a part: a similar name, or the same parameters in the same order."""
    if name in PARTS:
        return False
    asked = [*inspect.signature(exercise.reference).parameters]
    mine, right = (each.replace("_", "").lower() for each in (name, exercise.name))
    return difflib.SequenceMatcher(None, mine, right).ratio() >= _ALIKE or (given == asked and len(asked) > 1)


def unwritten_in(tree: ast.Module) -> set[str]:
    """Name the functions of a file whose last version only raises NotImplementedError."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    last = {node.name: _only_raises(node.body) for node in functions}
    return {name for name, only_raises in last.items() if only_raises}


def _only_raises(body: Sequence[ast.stmt]) -> bool:
    rest = [each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    return len(rest) == 1 and isinstance(rest[0], ast.Raise) and "NotImplementedError" in ast.unparse(rest[0])


class _Borrowing(SourceFileLoader):
    """Has the reference in the place of what is not written or importable, so that other files can import it.

    From the first line on: two files may import each other. Bytecode is never read: it may be of an earlier version
    that has the same size and second.
    """

    def __init__(self, fullname: str, path: str, around: Callable[[Call], Call]) -> None:
        super().__init__(fullname, path)
        self._run = around(super().exec_module)

    def exec_module(self, module: ModuleType) -> None:
        """Run a lesson's file over the reference functions; if it fails, keep these and the error."""
        parts = {
            exercise.name: exercise.reference
            for lesson in LESSONS
            if lesson.module == self.name
            for exercise in lesson.parts
        }
        vars(module).update(parts)
        try:
            if Path(self.path).is_file():
                self._run(module=module)
        except (Exception, SystemExit) as error:
            vars(module).update(parts, **{_FAULT: error})

    def get_code(self, fullname: str) -> CodeType:
        """Compile a lesson's file without the exercises that are not written."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), filename=path)
        unwritten = unwritten_in(tree) & PARTS.keys()
        tree.body = [node for node in tree.body if getattr(node, "name", None) not in unwritten]
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path, around: Callable[[Call], Call]) -> None:
        self._folder, self._around = folder, around

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = self._folder / f"{fullname}.py"
        if fullname not in _MODULES:
            return None
        return spec_from_file_location(fullname, file, loader=_Borrowing(fullname, str(file), self._around))


@contextmanager
def _importable(folder: Path, around: Callable[[Call], Call]) -> Iterator[None]:
    """Make the folder's files importable under their names.

    Other files of the folder can be imported by them, too, and stay importable.
    """
    _forget_earlier()
    finder, place, kept = _Finder(folder, around), str(folder.resolve()), sys.dont_write_bytecode
    sys.meta_path.insert(0, finder)
    sys.path.append(place)  # last, so that a learner's file does not hide a module of Python with its name
    _folders.add(place)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept
        sys.meta_path.remove(finder)


def _forget_earlier() -> None:
    """Drop the imported modules of another folder, or of an earlier version of this one."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in _MODULES or (file and any(Path(file).is_relative_to(folder) for folder in _folders)):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if place not in _folders]
    _folders.clear()
    importlib.invalidate_caches()
