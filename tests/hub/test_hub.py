"""Models of the hub, as a user has them: commands against a hub on this machine, through the real huggingface_hub."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import REPOSITORY, spawn
from fake_hub import COMMIT, FakeHub, Repository, serving
from safetensors.numpy import load

MODEL = {path.name: path.read_bytes() for path in (REPOSITORY / "llorch/models/micro-mistral").iterdir()}
GGUF = (REPOSITORY / "llorch/models/micro-llama.gguf").read_bytes()
INDEX = "model.safetensors.index.json"
OTHER = COMMIT[::-1]
LARGE = 11_000_000  # bytes; huggingface_hub keeps what came before a cut in pieces of 10 MiB


def in_shards() -> dict[str, bytes]:
    """The model with its weights in a shard that an index names."""
    index = {"weight_map": dict.fromkeys(load(MODEL["model.safetensors"]), "weights-1.safetensors")}
    files = {name: content for name, content in MODEL.items() if name != "model.safetensors"}
    return files | {"weights-1.safetensors": MODEL["model.safetensors"], INDEX: json.dumps(index).encode()}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    revisions = {"main": COMMIT, "old": OTHER}
    with serving(
        small=Repository(MODEL | {"pytorch_model.bin": b"pickle", "extra.safetensors": b"no"}, revisions),
        shards=Repository(in_shards() | {"consolidated.safetensors": b"no"}),
        gguf=Repository({"m-Q8_0.gguf": GGUF, "m-Q4_0.gguf": b"GGUF"}),
        cut=Repository({"m-Q8_0.gguf": bytes(LARGE)}, cut={"m-Q8_0.gguf": LARGE - 9}),
        gated=Repository(MODEL, gated=True),
        huge=Repository(MODEL, said_size={"model.safetensors": 10**18}),
        lies=Repository({**in_shards(), INDEX: b'{"weight_map": {"a": "../x"}}'}),
        empty=Repository({**in_shards(), INDEX: b"[]"}),
    ) as served:
        yield served


@pytest.fixture(autouse=True)
def asked_of(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands ask this hub, and have an empty cache."""
    hub.asked.clear()
    for name, value in {"ENDPOINT": hub.address, "HUB_OFFLINE": "", "HOME": str(tmp_path), "TOKEN": ""}.items():
        monkeypatch.setenv(f"HF_{name}", value)


def test_a_folder_is_fetched_once_and_found_in_the_cache_from_then_on(hub: FakeHub):
    first = spawn("run", "org/small", "Once", "-n", "2")
    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines() == [
        f"org/small: 4 of 4 files of commit {COMMIT}, 0.1 MB; downloading",
        f"org/small: commit {COMMIT}",
    ]
    assert hub.fetched() == MODEL.keys()  # not the pickle
    hub.asked.clear()
    for offline in ("", "1"):
        again = spawn("run", "org/small", "Once", "-n", "2", HF_HUB_OFFLINE=offline)
        assert (again.returncode, again.stdout) == (0, first.stdout)
        assert again.stderr == f"org/small: commit {COMMIT}, from the cache\n"
    assert hub.asked == []


def test_a_revision_is_a_commit_of_its_own(hub: FakeHub):
    for spec in ("org/small@old", f"org/small@{OTHER}", "org/small"):
        done = spawn("inspect", spec, "--json")
        assert done.returncode == 0, done.stderr
        assert (COMMIT if spec == "org/small" else OTHER) in done.stderr.splitlines()[-1]
    assert len([line for line in hub.asked if line.startswith("GET") and line.endswith("/model.safetensors")]) == 1


def test_shards_are_those_of_the_index(hub: FakeHub):
    done = spawn("inspect", "org/shards")
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == in_shards().keys()
    assert spawn("inspect", "org/shards", HF_HUB_OFFLINE="1").returncode == 0


def test_of_gguf_files_the_one_that_is_asked_for_is_fetched(hub: FakeHub):
    done = spawn("inspect", "org/gguf:q8_0")
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == {"m-Q8_0.gguf"}
    refused = spawn("inspect", "org/gguf:Q4_0", HF_HUB_OFFLINE="1")
    assert (refused.returncode, "not in the cache" in refused.stderr) == (3, True)


def test_a_download_goes_on_where_its_connection_was_cut(hub: FakeHub):
    code = "from llorch.hub import find; print(find('org/cut').stat().st_size)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, cwd=REPOSITORY)
    assert int(done.stdout) == LARGE
    assert [line.rpartition("bytes=")[2] for line in hub.asked if "bytes=" in line] == [f"{10 << 20}-"]


REFUSED = {
    "org/none": (3, "model 'org/none': no such file or folder, not a built-in model, and no such model on the"),
    "org/a--b": (3, "model 'org/a--b': no such file or folder, not a built-in model, and no such model"),
    "org/small@v9": (3, "model 'org/small@v9': org/small has no revision 'v9'; give a branch, a tag or a commit"),
    "org/gated": (3, "model 'org/gated': access is granted by its owners only; ask for access on the page of"),
    "org/gguf": (3, "model 'org/gguf': several GGUF files; say which as org/gguf:QUANT, of: m-Q4_0.gguf, m-Q8_0."),
    "org/huge": (74, "org/huge needs 1000000000.0 GB, "),
    "org/lies": (3, "model 'org/lies': model.safetensors.index.json names '../x', which the repository does not"),
    "org/empty": (3, "model 'org/empty': model.safetensors.index.json names no files of weights"),
}
EACH = """
import json, sys
from click.testing import CliRunner
from llorch.cli import main
for spec in sys.argv[1:]:
    done = CliRunner().invoke(main, ["inspect", spec])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


def test_what_cannot_be_had_is_one_line():
    done = subprocess.run([sys.executable, "-c", EACH, *REFUSED], stdout=subprocess.PIPE, check=True, cwd=REPOSITORY)
    for line, (expected, said) in zip(done.stdout.splitlines(), REFUSED.values(), strict=True):
        code, stdout, stderr = json.loads(line)
        assert (code, stdout, "Traceback" in stderr) == (expected, "", False), stderr
        assert said in stderr.splitlines()[-1]


def test_without_a_network_it_is_said_what_to_do(hub: FakeHub):
    done = spawn("inspect", "org/small", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 3
    assert "not in the cache of the Hugging Face hub, and the hub could not be reached (" in done.stderr
    offline = spawn("inspect", "org/small", HF_HUB_OFFLINE="1")
    assert "and HF_HUB_OFFLINE forbids to ask for it; unset that, or give a path" in offline.stderr
    assert (offline.returncode, hub.asked) == (3, [])


def test_what_others_left_half_in_the_cache_is_completed_or_else_used(tmp_path: Path):
    code = (
        "from huggingface_hub import snapshot_download as get; get('org/small', allow_patterns=['config.json', 'm*s'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    offline = spawn("inspect", "org/small", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert "what the cache has of it has no tokenizer" in offline.stderr
    done = spawn("tokenize", "org/small", "Once")
    assert done.returncode == 0, done.stderr
    assert f"2 of 4 files of commit {COMMIT}" in done.stderr
    next(tmp_path.rglob("model.safetensors")).unlink()
    lacking = spawn("inspect", "org/small", HF_HUB_OFFLINE="1")
    assert "not in the cache" in lacking.stderr


@pytest.mark.parametrize(("answer", "code"), [("n", 3), ("y", 0)])
def test_who_sits_at_a_terminal_is_asked(answer: str, code: int, hub: FakeHub):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llorch", "inspect", "org/small"]
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        os.close(theirs)
        asked = b""
        while b"download?" not in asked:
            asked += os.read(ours, 1000)
        assert f"org/small: 4 of 4 files of commit {COMMIT}, 0.1 MB" in asked.decode()
        os.write(ours, answer.encode() + b"\n")
        while process.poll() is None:
            try:
                os.read(ours, 1000)
            except OSError:  # Linux: nobody writes there any more
                break
        assert process.wait() == code
    os.close(ours)
    assert bool(hub.fetched()) == (answer == "y")
