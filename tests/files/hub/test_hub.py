"""Models of the hub, as a user has them: commands against a hub on this machine, through the real huggingface_hub."""

import importlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.fake_hub import COMMIT, FakeHub, Repository, serving
from helpers.command_line import REPOSITORY, invoke, spawn
from helpers.refusals import assert_cli_refuses, assert_tells
from safetensors.numpy import load

Settings = Callable[..., None]
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
def settings(hub: FakeHub, tmp_path: Path) -> Iterator[Settings]:
    """Have commands ask this hub, with an empty cache; call the fixture to change HF_ variables.

    They hold in this process too: huggingface_hub reads its environment where its constants are made.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session
    from huggingface_hub.utils.tqdm import progress_bar_states

    hub.asked.clear()
    with pytest.MonkeyPatch.context() as patch:

        def set_to(**values: str) -> None:
            for name, value in values.items():
                patch.setenv(f"HF_{name}", value)
            importlib.reload(constants)

        set_to(ENDPOINT=hub.address, HUB_OFFLINE="", HOME=str(tmp_path), TOKEN="", HUB_DISABLE_PROGRESS_BARS="1")
        patch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")  # a program decides that itself
        patch.setitem(progress_bar_states, "_global", False)
        yield set_to
    close_session()
    importlib.reload(constants)


def inspected(spec: str, *options: str) -> str:
    """Inspect a model of the hub in this process, and return what was said about its way here."""
    done = invoke("inspect", spec, *options)
    assert done.exit_code == 0, done.stderr
    return done.stderr


def test_a_folder_is_fetched_once_and_found_in_the_cache_from_then_on(hub: FakeHub, settings: Settings):
    first = spawn("run", "org/small", "Once", "-n", "2")
    assert first.returncode == 0, first.stderr
    fetching, fetched = first.stderr.splitlines()  # and no bar
    assert_tells(fetching, "org/small", "4 of 4", COMMIT, "0.1 MB")
    assert_tells(fetched, "org/small", COMMIT)
    assert hub.fetched() == MODEL.keys()  # not the pickle
    hub.asked.clear()
    online = invoke("run", "org/small", "Once", "-n", "2")
    settings(HUB_OFFLINE="1")
    offline = invoke("run", "org/small", "Once", "-n", "2")
    assert (online.exit_code, online.stdout) == (offline.exit_code, offline.stdout) == (0, first.stdout)
    assert online.stderr == offline.stderr
    assert_tells(offline.stderr, "org/small", COMMIT, "cache")
    assert (offline.stderr.count("\n"), hub.asked) == (1, [])


def test_a_revision_is_a_commit_of_its_own(hub: FakeHub):
    for spec in ("org/small@old", f"org/small@{OTHER}", "org/small"):
        assert (COMMIT if spec == "org/small" else OTHER) in inspected(spec, "--json").splitlines()[-1]
    assert len([line for line in hub.asked if line.startswith("GET") and line.endswith("/model.safetensors")]) == 1


def test_shards_are_those_of_the_index(hub: FakeHub, settings: Settings):
    inspected("org/shards")
    assert hub.fetched() == in_shards().keys()
    settings(HUB_OFFLINE="1")
    inspected("org/shards")


def test_only_the_requested_gguf_file_is_fetched(hub: FakeHub, settings: Settings):
    inspected("org/gguf:q8_0")
    assert hub.fetched() == {"m-Q8_0.gguf"}
    settings(HUB_OFFLINE="1")
    assert_cli_refuses(invoke("inspect", "org/gguf:Q4_0"), 3, "org/gguf:Q4_0", "cache")


def test_a_download_goes_on_where_its_connection_was_cut(hub: FakeHub):
    from llorch.files.hub import find

    assert find("org/cut").stat().st_size == LARGE
    assert [line.rpartition("bytes=")[2] for line in hub.asked if "bytes=" in line] == [f"{10 << 20}-"]


REFUSED: dict[str, tuple[int, tuple[str, ...]]] = {
    "org/none": (3, ("'org/none'", "file", "folder", "built-in", "hf auth login")),
    "org/a--b": (3, ("'org/a--b'", "file", "folder", "built-in", "hf auth login")),
    "org/small@v9": (3, ("'org/small@v9'", "org/small", "revision 'v9'", "branch", "tag")),
    "org/gated": (3, ("'org/gated'", "access", "page of org/gated", "hf auth login")),
    "org/gguf": (3, ("'org/gguf'", "GGUF", "org/gguf:QUANT", "m-Q4_0.gguf", "m-Q8_0.gguf")),
    "org/huge": (74, ("org/huge", "1000000000.0 GB", "HF_HOME")),
    "org/lies": (3, ("'org/lies'", INDEX, "'../x'")),
    "org/empty": (3, ("'org/empty'", INDEX, "weights")),
}


def test_unavailable_model_is_one_line():
    for spec, (code, facts) in REFUSED.items():
        done = invoke("inspect", spec)
        assert_cli_refuses(done, code, *facts)
        assert_tells(done.stderr.splitlines()[-1], *facts)


def test_missing_network_error_says_what_to_do(hub: FakeHub, settings: Settings):
    settings(ENDPOINT="http://127.0.0.1:9")
    assert_cli_refuses(invoke("inspect", "org/small"), 3, "'org/small'", "cache", "hub", "reached (", "path")
    settings(ENDPOINT=hub.address, HUB_OFFLINE="1")
    assert_cli_refuses(invoke("inspect", "org/small"), 3, "'org/small'", "cache", "HF_HUB_OFFLINE", "unset", "path")
    assert hub.asked == []


def test_what_others_left_half_in_the_cache_is_completed_or_else_used(tmp_path: Path, settings: Settings):
    from huggingface_hub import snapshot_download

    snapshot_download("org/small", allow_patterns=["config.json", "m*s"])
    settings(HUB_OFFLINE="1")
    assert_tells(inspected("org/small").splitlines()[0], "org/small", "HF_HUB_OFFLINE", "tokenizer")
    settings(HUB_OFFLINE="")
    done = invoke("tokenize", "org/small", "Once")
    assert done.exit_code == 0, done.stderr
    assert_tells(done.stderr, "2 of 4", COMMIT)
    next(tmp_path.rglob("model.safetensors")).unlink()
    settings(HUB_OFFLINE="1")
    assert_cli_refuses(invoke("inspect", "org/small"), 3, "'org/small'", "cache", "HF_HUB_OFFLINE")


@pytest.mark.nightly_cases("y-0")
@pytest.mark.parametrize(("answer", "code"), [("n", 3), ("y", 0)])
def test_interactive_user_is_asked(answer: str, code: int, hub: FakeHub):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llorch", "inspect", "org/small"]
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        os.close(theirs)
        asked = b""
        while b"download?" not in asked:
            asked += os.read(ours, 1000)
        assert_tells(asked.decode(), "org/small", "4 of 4", COMMIT, "0.1 MB")
        os.write(ours, answer.encode() + b"\n")
        while process.poll() is None:
            try:
                os.read(ours, 1000)
            except OSError:  # Linux: nobody writes there any more
                break
        assert process.wait() == code
    os.close(ours)
    assert bool(hub.fetched()) == (answer == "y")
