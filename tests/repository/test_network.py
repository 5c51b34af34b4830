"""Only the hub and the server use the network."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

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


def test_only_the_hub_and_the_server_import_what_asks_the_network():
    sources = {file.relative_to(ROOT).as_posix(): file.read_text() for file in FILES}
    names = re.compile("|".join(OF_THE_NETWORK))  # a file that has none of them need not be parsed
    found = {path: imports(text) & OF_THE_NETWORK for path, text in sources.items() if names.search(text)}
    assert "socket." not in sources["llorch/engines/process.py"]  # it only asks if the system has Unix sockets
    found["llorch/engines/process.py"].remove("socket")
    found["llorch/engines/transformers.py"].remove("huggingface_hub")  # the class of an error
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
