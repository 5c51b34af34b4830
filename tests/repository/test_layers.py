"""The packages of llorch: imports point down only, optional packages stay out of the core, pages show the tree."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import llorch

ROOT = Path(__file__).parents[2]
PACKAGES = (  # each may import those before it, at the top of a file or in a function
    "runtime", "families", "stages", "ops", "files", "lora", "model", "training", "pytorch", "engines", "judging",
    "diagnosis", "apps", "__init__", "cli", "__main__",
)  # fmt: skip
LAYER = {name: level for level, name in enumerate(PACKAGES)}
ON_TORCH = (  # nothing imports these at its top
    "llorch/pytorch/", "llorch/engines/", "llorch/judging/runners/torch",
    "llorch/judging/runners/training_torch", "llorch/judging/expectations/packed", "llorch/apps/learn/on_torch/",
    "llorch/apps/serve/", "llorch/apps/bench/torch",
)  # fmt: skip
OPTIONAL = (
    "torch", "triton", "transformers", "llama_cpp", "huggingface_hub", "matplotlib", "starlette", "uvicorn", "pydantic",
    "prometheus_client", "llguidance", "peft", "tensorboard", "bitsandbytes", "yaml", "watchfiles",
)  # fmt: skip
ONLY_ON_UNIX = ("fcntl", "resource", "pwd", "grp", "termios")
PRINTING = (
    "llorch/__main__.py", "llorch/cli/", "llorch/files/tokenizer/template_worker.py", "llorch/apps/learn/sandbox.py",
)  # fmt: skip
FILES = sorted((ROOT / "llorch").rglob("*.py"))
SOURCES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in FILES}


def part_of(path: str) -> str:
    """The module or package directly below llorch that a file belongs to."""
    return path.removesuffix(".py").split("/")[1]


def package_of(path: str) -> str:
    return path.rpartition("/")[0].replace("/", ".")


@cache
def imported_modules(source: str, package: str) -> list[tuple[str, int]]:
    """List the full dotted names that a file imports, anywhere in it, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def violations(source: str, part: str, package: str = "llorch") -> list[str]:
    """Imports of llorch that point up, or to nothing that has a layer."""
    found = []
    for name, line in imported_modules(source, package):
        head, *below = name.split(".")
        if head != "llorch":
            continue
        target = below[0] if below and below[0] in LAYER else "__init__"
        if LAYER[target] > LAYER[part]:
            found.append(f"line {line}: {part} (L{LAYER[part]}) imports {name} (L{LAYER[target]})")
    return found


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Modules whose imports, also those in functions, lead back to the first one; empty if there are none."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}

    def module_of(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    graph = {
        module: {module_of(name) for name, _ in imported_modules(sources[path], package_of(path))} & modules.keys()
        for module, path in modules.items()
    }
    try:
        TopologicalSorter({module: names - {module} for module, names in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def top_level_imports(source: str) -> set[str]:
    """Outermost packages that importing the file imports: those outside functions."""
    names = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        pending += ast.iter_child_nodes(node)
    return names


def prints(source: str) -> list[int]:
    """Lines that write to the streams of the process."""
    if not re.search("print|stdout|stderr", source):  # most files: they need not be parsed
        return []
    nodes = list(ast.walk(ast.parse(source)))
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"]
    streams = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("stdout", "stderr")]
    return [n.lineno for n in (*calls, *(n for n in streams if isinstance(n.value, ast.Name) and n.value.id == "sys"))]


def test_only_the_command_line_prints():
    found = {path: prints(source) for path, source in SOURCES.items() if not path.startswith(PRINTING)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_print_is_found():
    assert prints("print(1)\nimport sys\nsys.stderr.write('')\nprint = 3\nx.print()") == [1, 3]


def test_only_the_worker_and_the_launcher_of_ranks_start_processes():
    starts = re.compile(
        r"\bos\.(fork|spawn|exec|posix_spawn|system|popen)|torch\.(distributed\.launcher|multiprocessing)\b"
    )
    found = set()
    for path, source in SOURCES.items():
        if re.search(r"subprocess|multiprocessing|ProcessPool|os\.|launcher", source):  # else it need not be parsed
            names = {name for name, _ in imported_modules(source, package_of(path))}
            modules = {name.split(".")[0] for name in names if not name.startswith("multiprocessing.connection")}
            if modules & {"subprocess", "multiprocessing", "pty"} or starts.search(source) or "ProcessPool" in source:
                found.add(path)
    assert found == {"llorch/runtime/worker.py", "llorch/pytorch/distributed/launch.py"}


def test_every_module_is_in_a_package():
    without = {part_of(path) for path in SOURCES} - LAYER.keys()
    assert not without, f"give these modules a place in PACKAGES: {sorted(without)}"


def test_no_app_imports_another():
    apps = [path for path in SOURCES if path.startswith("llorch/apps/") and path.count("/") > 2]
    assert len(apps) > 50
    wrong = {
        path: name
        for path in apps
        for name, _ in imported_modules(SOURCES[path], package_of(path))
        if name.startswith("llorch.apps.") and name.split(".")[2] != path.split("/")[2]
    }
    assert wrong == {}


def test_imports_point_down_only():
    found = {path: violations(source, part_of(path), package_of(path)) for path, source in SOURCES.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_import_leads_back_to_its_module():
    assert cycle(SOURCES) == []


def test_a_cycle_inside_a_package_is_found():
    sources = {"llorch/a/b.py": "from llorch.a import c", "llorch/a/c.py": "def f():\n    from llorch.a.b import x"}
    assert set(cycle(sources)) == {"llorch.a.b", "llorch.a.c"}
    assert cycle(sources | {"llorch/a/c.py": ""}) == []


def test_optional_packages_top_level_imports_only_in_engines_and_torch():
    for path, source in SOURCES.items():
        wrong = {*ONLY_ON_UNIX, *(() if path.startswith(ON_TORCH) else OPTIONAL)}
        named = {name for name in wrong if name in source}  # none in most files: they need not be parsed
        assert not named or not top_level_imports(source) & named, path


@pytest.mark.parametrize(
    ("source", "part", "package", "n_violations"),
    [
        ("from llorch.model.forward import forward", "stages", "llorch", 1),
        ("import llorch.model.model", "ops", "llorch", 1),
        ("from llorch import model", "families", "llorch", 1),
        ("import llorch", "stages", "llorch", 1),
        ("def f():\n    from llorch.cli import main", "judging", "llorch", 1),
        ("from .. import judging", "files", "llorch.files", 1),
        ("from ..model import forward", "ops", "llorch.ops", 1),
        ("from .model import load", "runtime", "llorch", 1),
        ("from llorch.nowhere import x", "runtime", "llorch", 1),
        ("from llorch.families.config import ModelConfig", "model", "llorch", 0),
        ("from llorch.files.gguf import open_gguf", "files", "llorch.files", 0),
        ("from .gguf import open_gguf", "files", "llorch.files", 0),
        ("import numpy as np\nfrom gguf import GGUFWriter", "runtime", "llorch", 0),
    ],
)
def test_an_import_that_points_up_is_found_and_no_other(source: str, part: str, package: str, n_violations: int):
    assert len(violations(source, part, package)) == n_violations


def test_imports_at_the_top_are_told_from_those_in_functions():
    source = "import a.b\nif True:\n    from c import d\ndef f():\n    import e\nclass G:\n    import h"
    assert top_level_imports(source) == {"a", "c", "h"}


def run_python(code: str) -> str:
    program = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_llorch_pulls_in_none_of_the_optional_or_slow_packages():
    slow = (*OPTIONAL, "rich", "click", "jinja2")
    loaded = run_python(f"import llorch; print(*sorted({set(slow)} & set(sys.modules)))")
    assert loaded == ""


def test_llorch_can_be_imported_where_the_optional_packages_are_absent():
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in OPTIONAL)
    names = "FormatError ModelConfig SamplingSettings Token Tolerance compare load"
    assert run_python(f"{blocked}; import llorch; print(*[n for n in llorch.__all__ if n in {names.split()}])") == names


def test_everything_that_llorch_exports_exists():
    assert [name for name in llorch.__all__ if not hasattr(llorch, name)] == []


PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = PAGE.partition("```\n")[2].partition("```")[0]
TREE = re.search(r"^llorch/\n.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
PARTS = re.compile(r"[\w/]+(?:/|\.py)(?=[\s,:;]|$)")


def tree() -> list[str]:
    """Return the lines of the tree in ARCHITECTURE.md."""
    assert TREE
    return TREE[0].splitlines()


def missing(lines: list[str]) -> list[str]:
    """List the folders and files that a tree names and the repository lacks."""
    names = []
    for line in lines:
        folder, *parts = PARTS.findall(line)
        home = f"llorch/{folder}" if line.startswith(" ") else folder
        names += [] if (ROOT / home).exists() else [home]
        names += [home + part for part in parts if not any((ROOT / parent / part).exists() for parent in (home, "."))]
    return names


def test_tree_names_every_package_in_the_order_of_imports():
    packages = [line.split("/")[0].strip() for line in tree() if line.startswith("  ")]
    assert packages == [name for name in PACKAGES if (ROOT / "llorch" / name / "__init__.py").exists()]
    assert len(tree()) <= 25
    assert missing(tree()) == []


@pytest.mark.parametrize("path", ["README.md", "llorch/__init__.py"])
def test_other_pages_show_the_same_tree(path: str):
    text = (ROOT / path).read_text(encoding="utf-8")
    page = text if path.endswith(".md") else ast.get_docstring(ast.parse(text)) or ""
    indent = "" if path.endswith(".md") else "    "
    assert "".join(f"{indent}{line}\n" for line in tree()) in f"{page}\n"


def test_missing_folder_or_file_of_a_tree_is_listed():
    assert missing(["  ops/  one a file: rope.py, rape.py", "nowhere/  nothing"]) == ["llorch/ops/rape.py", "nowhere/"]


def test_picture_names_existing_folders():
    names = re.findall(r"(?<!\w)[a-z_/]+/(?=[\s,)]|$)", PICTURE)
    assert len(names) > 12
    assert [name for name in names if not any((ROOT / parent / name).exists() for parent in ("llorch", "."))] == []


def test_page_is_short():
    assert PAGE.count("\n") <= 80
