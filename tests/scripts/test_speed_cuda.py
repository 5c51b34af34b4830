"""Case `cuda` of benchmarks/speed.py: what runs without a CUDA device, at tiny shapes."""

import importlib
import json
from types import ModuleType
from typing import Any

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
    return importlib.import_module("speed_cases.cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: there is a CUDA device")
@pytest.mark.parametrize("part", ["models", "products"])
@pytest.mark.usefixtures("script")
def test_without_a_cuda_device_it_says_that_it_did_not_run(part: str):
    done = CliRunner().invoke(importlib.import_module("speed").main, ["cuda", "--part", part])
    assert done.exit_code == 3
    assert done.stdout == f"NOT RUN: {part}: torch {torch.__version__} finds no CUDA device\n"


def test_ratios_are_beside_their_goals(script: Any):
    def report(speed: float, share: float) -> dict:
        span = {"median": speed, "min": speed - 1, "max": speed + 1}
        part = {"tokens_per_s": span, "share_of_copy": share, "share_of_matmul": share, "bytes_per_s": 2e9}
        return {"prefill": part, "decode": part}

    speeds = {
        "bfloat16": 100.0, "Q8_0": 159.0, "Q4_K": 250.0, "Q4_0": 200.0,
        "TABLE_4": 180.0, "NF4": 150.0, "TABLE_8": 159.0, "INT8": 106.0,
    }  # fmt: skip
    reports = {(f"llorch {kind}", "decode"): report(speed, 0.85) for kind, speed in speeds.items()}
    reports["llorch bfloat16", "prefill"] = report(4000.0, 0.64)
    reports["transformers", "decode"], reports["transformers", "prefill"] = report(80.0, 1), report(5000.0, 1)
    results = script.Results()
    script.add_rows(results, "tiny", reports)
    assert [(row["value"], row["bandwidth"]) for row in results.rows[:2]] == [(100.0, 2.0), (159.0, 2.0)]
    ratios = [row["value"] for row in results.rows if row["what"] == "ratio"]
    assert ratios == pytest.approx([0.85, 1.59, 2.5, 0.9, 0.75, 1.0, 2 / 3, 0.64, 1.25, 0.8])
    assert [row["value"] for row in results.rows if row["what"] == "goal"][:3] == [0.85, 1.6, 2.5]


def test_prefill_load_reserves_room_for_the_first_token(script: Any):
    assert script.prefill_load(SHAPES["llama-3-8b"]).prompt == 4096
    assert script.prefill_load(SHAPES["llama-2-7b"]).prompt == 4095


@pytest.mark.live
def test_a_whole_shape_runs_on_the_cpu_and_goes_into_json(script: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "DECODE", Load(8, 2, 1, 1))
    results = script.Results()
    script.add_shape(results, "tiny", "cpu")
    rows = json.loads(json.dumps(results.rows))
    kinds = {row["engine"] for row in rows if row["what"] == "decode"}
    names = {f"llorch {kind}" for kind in ("bfloat16", "Q8_0", "Q4_K", "Q4_0", *script.TABLES)}
    assert kinds == names | {"transformers"}
    assert len([row for row in rows if row["what"] == "goal"]) == 10
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.live
def test_transformers_runs_the_very_same_weights(script: Any):
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
