"""Case `mesh` of benchmarks/speed.py: what its formulas say of bytes is what ranks keep and send, exactly."""

import importlib
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from helpers.command_line import REPOSITORY
from helpers.warm_ranks import warm_ranks

from benchmarks.speed_cases import mesh_model
from benchmarks.speed_cases.mesh_model import Job, Machine, memory, messages, step_time
from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES

PAGE = (REPOSITORY / "checkpoints" / "mesh" / "README.md").read_text()
SMALL = ModelConfig(
    family="qwen2", hidden_size=64, intermediate_size=160, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16,
    vocab_size=97, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
    qkv_bias=True, o_bias=False, qk_norm=False, tie_word_embeddings=True,
)  # fmt: skip
JOB = Job(SMALL, dp=2, tp=2, rows=4, tokens=8, r=4, recomputed=True, chunk=16, passes=2)


@pytest.fixture
def sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import what lies beside them; so do the processes that are started from here."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


def mesh(*words: str) -> Result:
    """Run the case in this process."""
    return CliRunner().invoke(importlib.import_module("speed").main, ["mesh", *words])


def count_messages(job: Job) -> Counter[tuple[str, str, int]]:
    """By axis, kind and bytes."""
    found: Counter[tuple[str, str, int]] = Counter()
    for each in messages(job):
        found[each.axis, each.kind, each.size] += each.count
    return found


def careless(*arguments: Any) -> list:
    """Ranks that sum gradients after every pass of a step, not once."""
    from benchmarks.speed_cases.mesh_ranks import measured
    from llorch.pytorch.train.step import OnMesh

    OnMesh.sum_gradients = lambda self, *, now: None  # type: ignore[method-assign]
    return measured(*arguments)


@pytest.mark.usefixtures("sibling")
@pytest.mark.parametrize(
    "job", [pytest.param(JOB, id="2x2"), pytest.param(replace(JOB, width=4, recomputed=False), marks=pytest.mark.slow)]
)
def test_four_ranks_keep_and_send_what_the_formulas_say_to_the_byte(job: Job):
    from benchmarks.speed_cases.mesh_ranks import measured
    from llorch.pytorch.distributed.launch import on_ranks

    expected = memory(job)
    with warm_ranks():
        costs = on_ranks(4, measured, job, "cpu", 0, False)  # the step that is counted, and none that is timed
    assert len(costs) == 4
    for cost in costs:
        assert Counter(cost.messages) == count_messages(job)
        assert cost.kept == {"weights": expected.weights, "adapters": expected.adapters, "moments": expected.moments}


@pytest.mark.slow
@pytest.mark.usefixtures("sibling")
def test_a_message_too_many_is_seen():
    from llorch.pytorch.distributed.launch import on_ranks

    job = replace(JOB, tp=1)
    with warm_ranks():
        found = Counter(on_ranks(2, careless, job, "cpu", 0, False)[0].messages)
    ((key, count),) = (found - count_messages(job)).items()
    assert key[:2] == ("dp", "reduce-scatter")
    assert (count, count_messages(job) - found) == (SMALL.n_layers * (job.passes - 1), Counter())


def test_ranks_of_dp_have_shares_of_everything_and_those_of_tp_of_the_layers():
    alone, dp, tp = (memory(replace(JOB, dp=dp, tp=tp)) for dp, tp in ((1, 1), (2, 1), (1, 2)))
    assert dp.moments * 2 == alone.moments
    embedding = SMALL.vocab_size * SMALL.hidden_size * JOB.width
    assert alone.weights / 2 <= dp.weights < alone.weights / 2 + embedding / 2
    assert embedding < tp.weights < alone.weights / 2 + embedding
    assert messages(replace(JOB, dp=1, tp=1)) == []


def test_a_ring_moves_a_sum_twice_and_a_gather_once():
    gather = mesh_model.Message("", "dp", "all-gather", 800, 3)
    assert gather.moved(4) == 1800
    assert replace(gather, kind="all-reduce").moved(4) == 3600


def test_seconds_on_paper_follow_the_assumptions():
    slow, fast = (step_time(JOB, Machine(between=speed, per_machine=2)) for speed in (1e9, 2e9))
    assert (slow.compute, slow.tp) == (fast.compute, fast.tp)
    latency = sum(each.count for each in messages(JOB) if each.axis == "dp") * Machine().latency
    assert slow.dp - latency == pytest.approx(2 * (fast.dp - latency))
    assert slow.one_after_the_other == pytest.approx(slow.compute + slow.tp + slow.dp)


def test_the_figures_of_the_measured_shape_follow_from_the_formulas():
    stored = REPOSITORY / "benchmarks" / "results" / "mesh.json"
    if stored.exists():
        rows = [row for row in json.loads(stored.read_text())["rows"] if row["engine"] == "rank 0"]
        assert len({row["model"] for row in rows}) == 4
        for row in rows:
            is_exact = row["what"].startswith(("kept", "messages"))
            assert row.get("ratios", {}).get("formula", [1])[0] == pytest.approx(1, rel=0 if is_exact else 0.06)
        return
    figures = (REPOSITORY / "benchmarks" / "README.md").read_text().partition("### On a mesh\n")[2]
    rows = re.findall(r"^\| (\d) x (\d) \| (\S+) \| (\S+) / (\S+) \| \S+ \| (\S+) \|", figures, re.MULTILINE)
    for dp, tp, kept, predicted, measured, sent in rows:
        job = Job(SHAPES["qwen2.5-0.5b"], int(dp), int(tp), rows=4, tokens=64)
        expected = memory(job)
        assert (kept, predicted) == (f"{expected.between_steps / 1e6:.3f}", f"{expected.peak / 1e9:.3f}")
        assert float(sent) == round(sum(each.volume for each in messages(job)) / 1e6, 3)
        assert float(measured) == pytest.approx(expected.peak / 1e9, rel=0.06)
    assert len(rows) == 4


@pytest.mark.usefixtures("sibling")
def test_the_table_of_the_page_is_what_the_command_prints():
    done = mesh("--paper")
    assert done.exit_code == 0
    rows = re.findall(r"^\|.*", done.stdout, re.MULTILINE)
    assert len(rows) > 5
    assert "\n".join(rows) in PAGE


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: there is a CUDA device")
@pytest.mark.usefixtures("sibling")
def test_without_a_cuda_device_it_says_that_it_did_not_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")  # which the command sets: it is taken back
    done = mesh("--device", "cuda")
    assert done.exit_code == 3
    assert f"NOT RUN: dp x tp = 1 x 1: torch {torch.__version__} finds 0 CUDA devices" in done.stdout
