"""A learner's folder: one Python file per lesson. A function that only raises NotImplementedError is not written."""

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
_FAULT = "_not_importable"  # name in a module that holds the error of its import
_SIMILAR = 0.85  # smallest ratio of difflib for two names that may be the same
_folders: set[str] = set()  # folders in sys.path for learners' files


def read_folder(folder: Path, around: Callable[[Call], Call] = lambda call: call) -> dict[str, Call]:
    """Import the current files of a folder; return the written functions by exercise name.

    If a file cannot be imported, each of its functions raises the error of the import. `around` wraps every function,
    and the import of each file.
    """
    written: dict[str, Call] = {}
    with _importable(folder, around):
        for lesson in LESSONS:
            if not (folder / f"{lesson.module}.py").is_file():
                continue
            module = importlib.import_module(lesson.module)
            if (error := vars(module).get(_FAULT)) is not None:
                written |= {exercise.name: _make_raising(error) for exercise in lesson.parts}
                continue
            for exercise in lesson.parts:
                function = vars(module).get(exercise.name)
                if callable(function) and function is not exercise.reference:
                    written[exercise.name] = around(function)
    return written


def _make_raising(error: BaseException) -> Call:
    """Make a function that raises this error when it is called."""

    def unimportable(**arguments: object) -> Any:
        raise error

    return unimportable


def find_renamed(folder: Path, written: Container[str]) -> dict[str, str]:
    """Find unwritten exercises under another name or in another lesson's file; return a sentence for each exercise."""
    notes: dict[str, str] = {}
    files = {lesson.module: _read_functions(folder / f"{lesson.module}.py") for lesson in LESSONS}
    for lesson in LESSONS:
        for exercise in lesson.parts:
            if exercise.name in written:
                continue
            if name := next(
                (name for name, names in files[lesson.module].items() if _is_similar(exercise, name, names)), ""
            ):
                notes[exercise.name] = f"you define {name} in {lesson.module}.py; the lesson asks for {exercise.name}"
            elif file := next((module for module, functions in files.items() if exercise.name in functions), ""):
                notes[exercise.name] = f"you define {exercise.name} in {file}.py; the lesson reads {lesson.module}.py"
    return notes


def _read_functions(file: Path) -> dict[str, list[str]]:
    """Map each function that a learner's file defines, except stubs, to its parameters."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return {}
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: [arg.arg for arg in node.args.args] for node in functions if not _only_raises(node.body)}


def _is_similar(exercise: Exercise, name: str, parameters: Sequence[str]) -> bool:
    """Tell if a function is probably this exercise: a similar name, or the same parameters in the same order."""
    if name in PARTS:
        return False
    expected = [*inspect.signature(exercise.reference).parameters]
    a, b = (text.replace("_", "").lower() for text in (name, exercise.name))
    return difflib.SequenceMatcher(None, a, b).ratio() >= _SIMILAR or (parameters == expected and len(expected) > 1)


def unwritten_in(tree: ast.Module) -> set[str]:
    """Return the names of functions that only raise NotImplementedError in their last definition."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    is_stub = {node.name: _only_raises(node.body) for node in functions}
    return {name for name, is_unwritten in is_stub.items() if is_unwritten}


def _only_raises(body: Sequence[ast.stmt]) -> bool:
    nodes = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return len(nodes) == 1 and isinstance(nodes[0], ast.Raise) and "NotImplementedError" in ast.unparse(nodes[0])


class _LessonLoader(SourceFileLoader):
    """Loader of a lesson's file that provides the reference of every exercise that the file does not define.

    It adds the references before the first line runs, because two files may import each other. Bytecode is never read:
    it may belong to an earlier version with the same size and modification time in seconds.
    """

    def __init__(self, fullname: str, path: str, around: Callable[[Call], Call]) -> None:
        super().__init__(fullname, path)
        self._run = around(super().exec_module)

    def exec_module(self, module: ModuleType) -> None:
        """Run a lesson's file on top of the references; if it fails, restore them and store the error as `_FAULT`."""
        references = {
            exercise.name: exercise.reference
            for lesson in LESSONS
            if lesson.module == self.name
            for exercise in lesson.parts
        }
        vars(module).update(references)
        try:
            if Path(self.path).is_file():
                self._run(module=module)
        except (Exception, SystemExit) as error:
            vars(module).update(references, **{_FAULT: error})

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
        return spec_from_file_location(fullname, file, loader=_LessonLoader(fullname, str(file), self._around))


@contextmanager
def _importable(folder: Path, around: Callable[[Call], Call]) -> Iterator[None]:
    """Make the lesson files of a folder importable by name in the `with` block.

    Lesson files can import other files of the folder, and those stay importable after the block.
    """
    _forget_earlier()
    finder, folder_path, had_no_bytecode = _Finder(folder, around), str(folder.resolve()), sys.dont_write_bytecode
    sys.meta_path.insert(0, finder)
    sys.path.append(folder_path)  # last, so that a learner's file hides no module of Python
    _folders.add(folder_path)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = had_no_bytecode
        sys.meta_path.remove(finder)


def _forget_earlier() -> None:
    """Drop modules that were imported from another folder, or from an earlier version of this folder."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in _MODULES or (file and any(Path(file).is_relative_to(folder) for folder in _folders)):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in _folders]
    _folders.clear()
    importlib.invalidate_caches()
