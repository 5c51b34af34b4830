"""Only the hub and the server use the network; systems without `fcntl`, signals or owners are served or told."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from helpers.refusals import assert_tells

from llorch.apps.doctor.machine import packages
from tests.repository.test_layers import imported_modules

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "llorch").rglob("*.py"))
ALLOWED = ("llorch/files/hub/", "llorch/apps/serve/", "llorch/cli/serve", "llorch/cli/chat")
OF_THE_NETWORK = {
    "socket", "ssl", "socketserver", "http", "urllib", "ftplib", "smtplib", "imaplib", "poplib", "xmlrpc", "telnetlib",
    "requests", "urllib3", "httpx", "httpx2", "aiohttp", "websockets", "huggingface_hub", "hf_xet", "openai", "uvicorn",
    "starlette", "asyncio", "webbrowser",
}  # fmt: skip
ON_MODELS = "run story Once -n 3", "inspect micro-mistral", "tokenize story Once"
PROGRAMS = ("pip", "uv", "curl", "wget", "git", "hf")  # of a process that would ask in llorch's place
WATCHED = f"""
import os, sys
def refuse(event, args):
    if event == "subprocess.Popen":
        words = [os.fsdecode(word) for word in (args[0], *args[1])]
        if set(map(os.path.basename, words)) & set({PROGRAMS!r}):
            print("asked the network:", event, words, file=sys.stderr, flush=True)
            os._exit(1)
    if event.partition(".")[0] in ("socket", "urllib", "http", "ftplib", "smtplib"):
        raise SystemExit(f"asked the network: {{event}} {{args}}")
sys.addaudithook(refuse)
from llorch.cli import main
for line in sys.argv[1:]:
    main(line.split(), prog_name="llorch", standalone_mode=False)
    print(f"did: {{line}}")
"""


def imports(source: str) -> set[str]:
    """Outermost packages that a file imports, anywhere in it, and those that it names to be imported."""
    found = {name.partition(".")[0] for name, _ in imported_modules(source, "llorch")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if getattr(node.func, "id", getattr(node.func, "attr", "")) in ("import_module", "__import__"):
                found.add(str(node.args[0].value).partition(".")[0])
    return found


def test_only_the_hub_and_the_server_import_network_modules():
    sources = {file.relative_to(ROOT).as_posix(): file.read_text() for file in FILES}
    names = re.compile("|".join(OF_THE_NETWORK))  # a file that has none of them need not be parsed
    found = {path: imports(text) & OF_THE_NETWORK for path, text in sources.items() if names.search(text)}
    assert "socket." not in sources["llorch/engines/process.py"]  # it only asks if the system has Unix sockets
    found["llorch/engines/process.py"].remove("socket")
    found["llorch/engines/transformers.py"].remove("huggingface_hub")  # the class of an error
    found["llorch/cli/learn/open.py"].remove("webbrowser")  # it shows a page, if the learner asks for one
    assert {path: names for path, names in found.items() if names and not path.startswith(ALLOWED)} == {}
    assert "huggingface_hub" in found["llorch/files/hub/fetch.py"]


@pytest.mark.parametrize(
    "source",
    ["import socket", "def f():\n    from http.client import X", "import_module('ssl')", "a.__import__('ssl')"],
)
def test_an_import_is_found_wherever_it_is(source: str):
    assert imports(source) & OF_THE_NETWORK


@cache
def watched(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run commands one after the other in one process that ends where one of them asks the network."""
    program = [sys.executable, "-c", WATCHED, *lines]
    return subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)


@pytest.mark.parametrize("line", ON_MODELS)
def test_a_command_on_a_model_that_is_here_opens_no_socket(line: str):
    done = watched(*ON_MODELS)
    assert f"did: {line}\n" in done.stdout, done.stderr


def test_installer_is_named_by_no_module():
    named = re.compile(rf"[\"'](?:{'|'.join(PROGRAMS)})[\"']")
    found = [file.relative_to(ROOT).as_posix() for file in FILES if named.search(file.read_text())]
    assert found == ["llorch/apps/doctor/machine/packages.py"]
    assert packages._GIT[:2] == ("git", "describe")  # reads the checkout, for llorch --version


def test_a_socket_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    done = watched("inspect org/name")
    assert "asked the network: socket." in done.stderr


IMPORT_EVERYTHING = """
import pkgutil, sys, llorch
optional = ("torch", "triton", "transformers", "llama_cpp", "peft", "matplotlib", "yaml", "tensorboard")
sys.modules |= dict.fromkeys(optional)
for module in pkgutil.walk_packages(llorch.__path__, "llorch.", onerror=lambda name: None):
    try:
        module.name.endswith("__main__") or __import__(module.name)
        print(module.name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] in optional, error
"""
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run", "story", "Once upon a time", "-n", "3"),
    ("verify", "micro-llama"),
    ("trace", "micro-llama", "--tokens", "1,2,3", "-o", "t.npz"),
    ("convert", "micro-llama", "folder"),
    ("convert", "micro-llama", "copy.gguf"),
    ("data", "show", "story", "pirate"),
)
END = "\x1e"  # of what a command says on stderr
RUN_COMMANDS = f"""
import json, pathlib
from llorch.cli import main
codes = []
for arguments in {COMMANDS}:
    try:
        main(arguments)
    except SystemExit as end:
        codes.append(end.code)
    print(end={END!r}, file=sys.stderr, flush=True)
pathlib.Path("codes.json").write_text(json.dumps(codes))
"""


def elsewhere(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with what Windows lacks taken away."""
    where = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))}
    program = [sys.executable, "-c", f"import fakes.elsewhere\n{code}"]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, env=where, check=False, timeout=300)


@dataclass(frozen=True)
class Seen:
    """Modules that one process imported, and exit code and stderr of each command that it ran then."""

    modules: set[str]
    commands: dict[tuple[str, ...], tuple[int, str]]


@pytest.fixture(scope="module")
def process_facts(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("elsewhere")
    done = elsewhere(IMPORT_EVERYTHING + RUN_COMMANDS, folder)
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "codes.json").read_text())
    *said, last = done.stderr.split(END)
    assert last == ""
    return Seen({*done.stdout.split()}, dict(zip(COMMANDS, zip(codes, said, strict=True), strict=True)))


@pytest.mark.slow
def test_every_module_that_needs_no_torch_is_imported(process_facts: Seen):
    modules = {"llorch.judging.verify", "llorch.training.snapshots", "llorch.files.tokenizer.template_worker"}
    assert modules <= process_facts.modules


@pytest.mark.nightly_cases(but=["trace mi*"])
@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_command_line_works(arguments: tuple[str, ...], process_facts: Seen):
    exit_code, stderr = process_facts.commands[arguments]
    assert (exit_code, stderr.count("rror")) == (0, 0), stderr


def test_a_snapshot_is_written_and_nothing_locks_its_folder(tmp_path: Path):
    code = (
        "from llorch.training.snapshots import SnapshotStore\nimport numpy\nfrom pathlib import Path\n"
        "store = SnapshotStore(Path('run'))\nwith store.lock() as without:\n"
        " print(without)\n store.save(1, {'a': numpy.ones(3)}, {})\nprint(store.steps())"
    )
    without, steps = elsewhere(code, tmp_path).stdout.splitlines()[-2:]
    assert_tells(without, "flock")
    assert steps == "[1]"


def test_an_engine_that_cannot_be_asked_is_one_sentence(tmp_path: Path):
    code = "from llorch.engines.process import EngineProcess\nEngineProcess('llamacpp')"
    kind, said = elsewhere(code, tmp_path).stderr.splitlines()[-1].split(": ", 1)
    assert kind == "llorch.runtime.errors.EngineDied"
    assert_tells(said, "llamacpp", "system", "built-in")
