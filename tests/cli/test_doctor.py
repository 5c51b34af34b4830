"""`llorch doctor`, on this machine and on one where packages are broken."""

import json
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY, spawn

AREAS = ["packages", "extras", "machine", "engines", "reference engines", "caches", "self-test"]
SLOW_TO_IMPORT = (
    "accelerate", "bitsandbytes", "compressed_tensors", "huggingface_hub", "llama_cpp", "llguidance", "matplotlib",
    "peft", "prometheus_client", "pydantic", "starlette", "tensorboard", "transformers", "uvicorn",
)  # fmt: skip


@pytest.mark.slow  # imports all that is installed
def test_where_all_works_the_exit_code_is_0_and_every_part_is_looked_at():
    done = spawn("doctor", "--json")
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout)
    assert (said["version"], said["broken"]) == (2, 0)
    assert list(dict.fromkeys(one["area"] for one in said["findings"])) == AREAS
    assert {one["state"] for one in said["findings"]} <= {"ok", "absent", "warning"}
    assert all(one.keys() == {"area", "name", "state", "text", "repair"} for one in said["findings"])


def test_packages_that_end_the_process_do_not_end_this_one(tmp_path: Path):
    for module in SLOW_TO_IMPORT:
        (tmp_path / f"{module}.py").touch()
    (tmp_path / "watchfiles.py").write_text("import os; os.abort()")
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 11)")
    done = spawn("doctor", "--json", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert list(dict.fromkeys(one["area"] for one in said["findings"])) == AREAS
    broken = {one["name"]: one for one in said["findings"] if one["state"] == "broken"}
    assert said["broken"] == len(broken)
    assert broken.keys() >= {"learn", "torch", "train", "devices"}
    assert "SIGABRT" in broken["learn"]["text"]
    assert broken["learn"]["repair"] == "pip install --force-reinstall 'watchfiles>=1.0'"
    assert "SIGSEGV" in broken["devices"]["text"]
    assert said["findings"][-1]["state"] == "ok"  # the self-test


def test_where_what_is_needed_is_broken_it_still_answers(tmp_path: Path):
    (tmp_path / "gguf.py").write_text("raise ImportError('cut')")
    (tmp_path / "torch.py").write_text("")  # which is imported at once
    done = spawn("doctor", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.returncode == 1, done.stderr
    assert "(ImportError: cut)" in done.stdout
    assert "all else" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{done.stdout.count('BROKEN')} broken"
