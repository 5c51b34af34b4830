"""Engines in processes of their own: what becomes of them when they crash, hang or are killed, and of us."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, VOCAB, gguf_tensors, write_file
from fakes.faulty_engine import ERRORS
from helpers.command_line import REPOSITORY, spawn
from helpers.refusals import assert_tells, refuses

from llorch.engines import ReferenceEngine, open_engine, process
from llorch.engines.process import EngineInChild, in_child
from llorch.files import open_weights
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.ops.numerics import GGML
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import EngineDied, MissingExtra, UserError
from tests.files.tokenizer.test_template_process import ends_within, running

MODEL = builtin_path("micro-llama")
IDS = "3,1,4,15,9,2,6,5"


def open_faulty_engine(*doing: object) -> Any:
    return EngineInChild("planted", MODEL, "fakes.faulty_engine:FaultyEngine", *doing)


@pytest.fixture
def engine() -> Iterator[Any]:
    with open_faulty_engine() as engine:
        yield engine


@pytest.mark.nightly_cases("abort", "leave")
@pytest.mark.parametrize(
    ("doing", "facts"),
    [
        (("crash",), ("SIGSEGV", "nothing")),
        (("abort",), ("SIGABRT", "engine.cpp:7: ASSERT(x > 0)")),
        (("end_by", signal.SIGKILL), ("SIGKILL", "memory", "nothing")),
        (("leave",), ("status 5",)),
    ],
    ids=["crash", "abort", "end_by", "leave"],
)
def test_ended_engine_raises_an_error_with_its_last_output(doing: tuple, facts: tuple[str, ...], engine: Any):
    with refuses(EngineDied, *facts, where=("planted", "in loading")):
        open_faulty_engine(*doing)
    with refuses(EngineDied, *facts, where=("planted", f"in {doing[0]}")):
        getattr(engine, doing[0])(*doing[1:])
    with refuses(EngineDied, *facts, where="planted"):
        engine.echo()
    with open_faulty_engine() as after:
        assert after.echo(1) == ((1,), {})


@pytest.mark.parametrize("doing", ["hang", "spin"])
def test_hanging_engine_is_killed(doing: str, engine: Any, monkeypatch: pytest.MonkeyPatch):
    pid = engine.pid
    monkeypatch.setattr(process, "START", 0.5)
    with refuses(EngineDied, doing, "1 s", "nothing", where="planted"):
        getattr(engine, doing)()
    assert not running(pid)


def test_call_timeout_grows_with_its_tokens(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(10**6))
    for path in (tmp_path, tmp_path / "a"):
        assert process._time_limit(path) == pytest.approx(180 + 32 * 1e6 / 50e6)
        assert process._time_limit(path, range(68), 5, "text") == pytest.approx(180 + 100 * 1e6 / 50e6)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_cross_the_process_unchanged(name: str, engine: Any):
    expected = ERRORS[name]
    known = {"OwnError": RuntimeError, "MadeItsOwnWay": RuntimeError, "ValueError": UserError}.get(name, type(expected))
    with pytest.raises(known) as caught:
        engine.fail(name)
    text = "MadeItsOwnWay: because it can" if name == "MadeItsOwnWay" else str(expected)
    assert (type(caught.value), str(caught.value)) == (known, text)
    assert getattr(caught.value, "offset", None) == getattr(expected, "offset", None)
    assert getattr(caught.value, "filename", None) == getattr(expected, "filename", None)
    assert "faulty_engine.py" in caught.value.__notes__[0]
    assert engine.echo() == ((), {})


def test_values_cross_the_process_unchanged(engine: Any):
    arrays = {"a": np.arange(6.0).reshape(2, 3)[:, ::2], "b": np.zeros((0, 3), np.float32), "c": np.array(True)}
    arrays |= {"large": np.arange(10**6, dtype=np.int16).reshape(10, -1)}
    others = (None, True, 7, 0.1, float("inf"), "é\n", (1, (2,)), [3], {"x": {4: [5]}}, Path("a"), GGML)
    others += (SAMPLINGS["all"], *(open_weights(builtin_path(name)).config for name in ("micro-llama3", "micro-qwen3")))
    values, named = engine.echo(*others, range(3), np.int64(4), arrays=arrays)
    assert values == (*others, [0, 1, 2], 4)
    for name, array in named["arrays"].items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    with refuses(TypeError, "object", where="messages"):
        engine.echo(object())
    assert engine.echo() == ((), {})


def test_progress_of_a_call_is_reported():
    told: list[str] = []
    with EngineInChild(
        "planted", MODEL, "fakes.faulty_engine:FaultyEngine", "tell", "loads", progress=told.append
    ) as engine:
        assert engine.tell("layer 1", "layer 2") == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert told == ["loads", "layer 1", "layer 2"]
    with open_faulty_engine() as silent:  # the same process
        assert silent.tell("layer 1") == 1
    assert len(told) == 3


def test_every_public_method_of_an_engine_can_be_called_and_no_other(engine: Any):
    assert isinstance(engine.leave_a_file(), Path)
    assert not hasattr(engine, "_private")
    engine.close()
    with refuses(ValueError, "closed", where="planted"):
        engine.echo()


def test_process_serves_one_model_at_a_time(engine: Any):
    with open_faulty_engine() as second:
        assert second.pid != engine.pid
        first, waits = engine.pid, second.pid
    with open_faulty_engine() as third:
        assert third.pid == waits
    engine.close()  # one may wait, not two
    assert running(waits)
    assert not running(first)


def test_engine_process_keeps_its_variables_and_files_private(engine: Any, monkeypatch: pytest.MonkeyPatch):
    assert engine.surroundings() == {"ggml": os.environ.get("GGML_CPU_TILED_MM"), "stdin": "", "ignores Ctrl-C": True}
    monkeypatch.setitem(process._VARIABLES, "planted", process._VARIABLES["llamacpp"] | {"GGML_CPU_TILED_MM": "7"})
    with open_faulty_engine() as told:
        assert told.surroundings()["ggml"] == "7"
        told._process.end()  # type: ignore[union-attr] (not for the next test)
    file = engine.leave_a_file()
    assert file.exists()
    with pytest.raises(EngineDied):
        engine.crash()
    assert not file.parent.exists()


def test_function_can_be_called_in_the_process():
    assert in_child("planted", MODEL, "fakes.faulty_engine:doubled", 3) == 6


def test_an_interruption_ends_the_engine(engine: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "START", 20)
    pid = engine.pid
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run behind `&`
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.hang()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not running(pid)


@pytest.mark.slow_cases(but=["os.abort()-hang", "os.kill(os.getpid(), 9)-"])
@pytest.mark.parametrize("doing", ["hang", "spin", ""])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()", "os.abort()"])
def test_no_engine_outlives_its_parent_process(doing: str, end: str):
    code = f"""
import os, sys, threading, time
from llorch.engines.process import EngineInChild
engine = EngineInChild("planted", "none", "fakes.faulty_engine:FaultyEngine")
print(engine.pid, engine.leave_a_file(), flush=True)
if {doing!r}:
    threading.Thread(target=lambda: getattr(engine, {doing!r})(), daemon=True).start()
    time.sleep(0.3)
{end}
"""
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "support")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=60
    )
    pid, file = done.stdout.split()
    assert ends_within(10, int(pid))
    assert not Path(file).parent.exists()


@pytest.mark.nightly_cases(but=["llamacpp"])
@pytest.mark.live
@pytest.mark.parametrize("name", ["llamacpp", "transformers"])
def test_real_engine_gives_the_same_outputs_from_its_process_and_its_death_is_reported(name: Any):
    from llorch.engines import open_in_process

    with open_engine(name, MODEL) as there, open_in_process(name, MODEL) as here:
        assert isinstance(there, ReferenceEngine)
        assert (there.name, there.n_threads, there.config) == (here.name, here.n_threads, here.config)
        ours, theirs = here.trace((3, 1, 4), first_position=7), there.trace((3, 1, 4), first_position=7)
        assert list(ours) == list(theirs)
        for key in ours:
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key, strict=True)
        assert here.provenance() == there.provenance()
        os.kill(there.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with refuses(EngineDied, "SIGKILL", "in greedy", where=name):
            there.greedy((3, 1), 4)


@pytest.mark.parametrize(("name", "package"), [("llamacpp", "llama_cpp"), ("transformers", "torch")])
def test_without_its_package_no_process_is_started(name: Any, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(process, "EngineProcess", None)
    with refuses(MissingExtra, package):
        open_engine(name, MODEL)


def write_crashing_file(path: Path) -> Path:
    """llama.cpp aborts where two tokens have one text; whoever does not read the vocabulary lives."""
    words = {"model": "gpt2", "pre": "llama-bpe", "tokens": ["a"] * VOCAB, "token_type": [1] * VOCAB, "merges": ["a a"]}
    metadata = GGUF_METADATA | {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    return write_file(path, {name: array * np.float32(0.1) for name, array in gguf_tensors().items()}, metadata)


@pytest.mark.nightly_cases(but=["options1-None"])
@pytest.mark.live
@pytest.mark.parametrize(
    ("options", "engine"),
    [((), "one reference engine: transformers"), (("--numerics", "ggml"), None), (("--against", "llamacpp"), None)],
)
def test_llamacpp_crash_is_reported_and_transformers_used(tmp_path: Path, options: tuple[str, ...], engine: str | None):
    done = spawn("verify", str(write_crashing_file(tmp_path / "deadly.gguf")), "--tokens", IDS, *options)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("NOT RUN: ")]
    assert_tells(line, "NOT RUN: llamacpp", "SIGABRT", "in loading")
    assert "GGML_ASSERT(id_to_token.size() == token_to_id.size()) failed" in line
    assert done.returncode == 3
    assert (engine or "deadly\n") in done.stdout
    assert " 0 failed" in done.stdout
    assert ("PASS" in done.stdout) == bool(engine)
    assert "Traceback" not in done.stderr


@pytest.mark.live
def test_verification_imports_no_engine_in_its_process():
    code = f"""
import os, sys
from pathlib import Path
from llorch.files import open_weights
from llorch.judging.verify import plan_live, verify_live
before = dict(os.environ)
rows = list(verify_live(plan_live(open_weights(Path({str(MODEL)!r})), range(8), ["llamacpp", "transformers"])))
print({{row.verdict for row in rows}}, {{"torch", "transformers", "llama_cpp"}} & {{*sys.modules}})
print(os.environ == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert (done.stdout, done.stderr) == ("{'PASS'} set()\nTrue\n", "")
