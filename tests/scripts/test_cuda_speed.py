"""Parts of benchmarks/cuda_speed.py and cuda_products.py that run without a CUDA device, at tiny shapes."""

import importlib
import json
import sys
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from helpers.command_line import REPOSITORY

from llorch.apps.bench.measure import COPY_BYTES, PRODUCT_WIDTH, Load
from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES

TINY = ModelConfig(
    family="llama", hidden_size=256, intermediate_size=256, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=64,
    vocab_size=96, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_position_embeddings=16,
    qkv_bias=False, o_bias=False, qk_norm=False, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    monkeypatch.setitem(COPY_BYTES, "cpu", 1 << 12)
    monkeypatch.setitem(PRODUCT_WIDTH, "cpu", 16)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return importlib.import_module("cuda_speed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda_speed", "cuda_products"])
@pytest.mark.usefixtures("script")
def test_without_a_cuda_device_it_says_that_it_did_not_run(name: str):
    done = CliRunner().invoke(importlib.import_module(name).main, [])
    assert done.exit_code == 3
    assert done.stdout == f"NOT RUN: torch {torch.__version__} finds no CUDA device\n"


def test_goals_are_compared_with_their_measured_values(script: ModuleType):
    def our_run(speed: float, share: float) -> dict:
        part = {"tokens_per_s": {"median": speed}, "share_of_copy": share, "share_of_matmul": share}
        return {"prefill": part, "decode": part}

    speeds = {
        "bfloat16": 100.0, "Q8_0": 159.0, "Q4_K": 250.0, "Q4_0": 200.0,
        "TABLE_4": 180.0, "NF4": 150.0, "TABLE_8": 159.0, "INT8": 106.0,
    }  # fmt: skip
    decode = {kind: our_run(speed, 0.85) for kind, speed in speeds.items()}
    other = {
        "decode": {"prefill": {"median": 1.0}, "decode": {"median": 80.0}},
        "prefill": {"prefill": {"median": 5000.0}, "decode": {"median": 1.0}},
    }
    found = script.goals(decode, our_run(4000.0, 0.64), other)
    assert [(goal.actual, goal.met) for goal in found] == [
        (0.85, True), (1.59, False), (2.5, True), (0.9, True), (0.75, False), (1.0, True),
        (pytest.approx(2 / 3), False),
        (0.64, False), (1.25, True), (0.8, False),
    ]  # fmt: skip


def test_prefill_load_reserves_room_for_the_first_token(script: ModuleType):
    assert script.prefill_load(SHAPES["llama-3-8b"]).prompt == 4096
    assert script.prefill_load(SHAPES["llama-2-7b"]).prompt == 4095


@pytest.mark.live
def test_a_whole_shape_runs_on_the_cpu_and_goes_into_json(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "DECODE", Load(8, 2, 1, 1))
    result = json.loads(json.dumps(script.one_shape("tiny", "cpu")))
    assert result["decode"].keys() == {"bfloat16", "Q8_0", "Q4_K", "Q4_0", *script.TABLES}
    assert result["prefill"]["prompt"] == 15
    assert len(result["goals"]) == 10
    assert all(goal["got"] > 0 for goal in result["goals"])
    script.print_goals([result])


@pytest.mark.live
def test_transformers_runs_the_very_same_weights(script: ModuleType):
    from llorch.apps.bench.torch import random
    from llorch.pytorch.cache import Cache
    from llorch.pytorch.device import target

    made = random("tiny", target(), None, Load(8, 2, 1, 1), compiled=False)
    ids = torch.arange(10)[None]
    cache = Cache(TINY, batch=1, n_slots=10, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        mine = made.module(ids, cache.place(torch.arange(10)[None], ctx=10, causal=True), cache)
        other = script.same_in_transformers(made.module, TINY)(ids).logits
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_command_is_kept_with_its_end(script: ModuleType):
    done = script.run([sys.executable, "-c", "print('a'); raise SystemExit(5)"], REPOSITORY)
    assert (done["exit_code"], done["tail"]) == (5, ["a"])
