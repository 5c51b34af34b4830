"""A model split over ranks: every stage against the float64 reference, and mistakes of splitting at their stages."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.mesh_programs import invoke_on_mesh
from helpers.mesh_runs import compare
from helpers.refusals import assert_cli_refuses, assert_tells, refuses
from helpers.sharded_runs import joined_together
from helpers.split_runs import NoText, answer_batch, generate_on_ranks, gradients

from llorch.families.layers import Layer
from llorch.files import open_weights
from llorch.lora.config import LoraConfig
from llorch.pytorch.distributed.launch import on_ranks, start
from llorch.pytorch.distributed.sharding_plan import cannot_split, of_a_rank
from llorch.pytorch.model import load_torch
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import EngineDied
from llorch.runtime.launched_rank import is_rank

pytestmark = pytest.mark.usefixtures("warm_ranks")
SIZES: Any = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 66, "hidden_size": 40, "head_dim": 8,
    "vocab_size": 99, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.slow_cases("micro-qwen2-2")
@pytest.mark.parametrize(
    ("model", "n_ranks"),
    [
        ("micro-qwen2", 2),  # biases, tied
        ("micro-qwen2-moe", 2),  # seven experts: four and three; a shared one
        pytest.param("micro-qwen3-moe", 2, marks=pytest.mark.slow),
        pytest.param("micro-llama3", 4, marks=pytest.mark.slow),
        pytest.param("micro-llama", 1, marks=pytest.mark.slow),
    ],
)
def test_every_stage_of_a_sharded_model_matches_the_reference(model: str, n_ranks: int):
    n_rows, n_failed, failed = on_ranks(n_ranks, compare, model, n_ranks, "float64")
    assert (n_failed, failed) == (0, [])
    assert n_rows > 800


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "fault", "first"),
    [
        ("micro-qwen2", "float64", "", []),
        ("micro-qwen2-moe", "float32", "", []),
        ("micro-qwen2", "float64", "unsummed from 500 tokens on", [("whole", "attn_out")]),
    ],
)
def test_every_stage_of_a_sharded_long_context_matches_the_reference(
    model: str, dtype: str, fault: str, first: list[tuple[str, str]]
):
    n_rows, n_failed, failed = on_ranks(2, compare, model, 2, dtype, fault, True)
    assert n_rows > 1600
    assert (failed[:1], n_failed > 0) == (first, bool(first))


@pytest.mark.live
def test_model_with_head_norms_is_sharded_between_heads(tmp_path: Path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    model.save_pretrained(tmp_path)
    n_rows, n_failed, failed = on_ranks(3, compare, tmp_path, 3, "float64")
    assert (n_failed, failed) == (0, [])
    assert n_rows > 800


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes_stay_within_the_limits_of_one_process(dtype: str):
    assert on_ranks(2, compare, "micro-llama", 2, dtype)[1:] == (0, [])


@pytest.mark.parametrize(
    ("fault", "model", "stage"),
    [
        ("unsummed", "micro-llama", "attn_out"),
        pytest.param("averaged", "micro-llama", "attn_out", marks=pytest.mark.slow),
        pytest.param("other rank", "micro-llama", "q_proj", marks=pytest.mark.slow),
        pytest.param("experts of all ranks", "micro-qwen3-moe", "expert_gate", marks=pytest.mark.slow),
        pytest.param("experts of another rank", "micro-qwen3-moe", "expert_gate", marks=pytest.mark.slow),
    ],
)
def test_sharding_fault_is_located(fault: str, model: str, stage: str):
    _, n_failed, failed = on_ranks(2, compare, model, 2, "float64", fault)
    assert n_failed > 100
    assert next(where for mode, where in failed if mode == "isolated") == stage


def kill_rank(rank: str) -> int:
    if os.environ["RANK"] == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(start({"tp": 2}).size())  # where the others wait


def raises() -> None:
    raise ValueError("on every rank")


@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_ends_the_run(rank: str):
    with refuses(EngineDied, f"rank {rank} of 2", "Signal 9 (SIGKILL)"):
        on_ranks(2, kill_rank, rank)


def test_value_of_rank_0_is_returned_and_an_error_ends_all_ranks():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert on_ranks(2, os.getenv, "RANK") == "0"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.raises(EngineDied, match="on every rank"):
        on_ranks(2, raises)
    assert not is_rank()


def start_wrong_mesh() -> str:
    try:
        start({"dp": 2, "tp": 3})
    except ValueError as error:
        return str(error)
    return "nothing"


def test_mesh_size_unequal_to_the_number_of_ranks_is_refused():
    assert_tells(on_ranks(2, start_wrong_mesh), "mesh", expected=("6 ranks", "dp=2 x tp=3"), got=2)


def test_indivisible_or_non_dense_model_is_not_sharded():
    config = open_weights(builtin_path("micro-qwen3")).config
    assert cannot_split(config, 1) is None
    assert_tells(str(cannot_split(config, 2)), expected="2 ranks", got=("heads 15", "KV heads 3"))
    assert_tells(str(cannot_split(config, 3)), expected="3 ranks", got=224)
    hybrid = open_weights(builtin_path("micro-qwen3.5")).config
    assert cannot_split(hybrid, 1) is None
    assert_tells(str(cannot_split(hybrid, 2)), expected="layers", got="qwen3_5")
    part = of_a_rank(config, 3)
    assert (part.n_heads, part.n_kv_heads, part.head_dim, part.layer(0)) == (5, 1, config.head_dim, Layer())


@pytest.mark.slow
def test_command_line_on_several_ranks_prints_once(tmp_path: Path):
    done = invoke_on_mesh(tmp_path, "verify", "--mesh", "tp=2", "micro-qwen3-moe", "--dtype", "float64")
    assert (done.exit_code, done.stdout.count("1 model, ")) == (0, 1), done.stderr
    assert "micro-qwen3-moe   torch-cpu-float64-tp2" in done.stdout
    assert done.stdout.rstrip().endswith(" 0 failed, 1 backend not run")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--mesh", "tp=2", "micro-qwen3"), ("micro-qwen3", "--mesh tp=2", "2 ranks", "heads 15")),
        (("--mesh", "tp=0"), ("dp=N,tp=M", "'tp=0'")),
        (("--mesh", "tp=2", "--device", "cuda"), ("--mesh", "--device")),
        (("--mesh", "tp=2", "quantised"), ("quantised", "--mesh tp=2", "packed")),
    ],
)
def test_unsupported_mesh_command_is_refused_in_one_line(
    arguments: tuple[str, ...], facts: tuple[str, ...], tmp_path: Path
):
    assert_cli_refuses(invoke_on_mesh(tmp_path, "verify", *arguments), 2, *facts)


ATTENTION: Any = {"r": 4, "lora_alpha": 8, "target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}


@pytest.mark.slow
def test_tokens_equal_one_process():
    model = load_torch("micro-qwen2-moe")
    vars(model)["tokenizer"] = NoText()
    assert on_ranks(2, generate_on_ranks, "micro-qwen2-moe", 2, {})["tokens"] == [answer_batch(model)] * 2


def test_gradients_of_attention_adapters_equal_one_process():
    lora = LoraConfig(**ATTENTION)
    alone, split = gradients("micro-qwen2-moe", 1, lora), on_ranks(2, gradients, "micro-qwen2-moe", 2, lora)
    assert alone.keys() == split.keys()
    for name, expected in alone.items():
        largest = float(np.abs(expected).max())
        assert largest > 0
        np.testing.assert_allclose(split[name], expected, rtol=0, atol=1e-12 * largest, strict=True, equal_nan=False)


@pytest.mark.slow
def test_adapters_on_experts_are_refused():
    lora = LoraConfig(r=4, lora_alpha=8, target_parameters=("experts.down_proj",))
    with refuses(EngineDied, "adapters", "experts"):
        on_ranks(2, gradients, "micro-qwen2-moe", 2, lora)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}, {"dp": 3, "tp": 1}])
def test_gathered_tensors_equal_the_sharded_originals(axes: dict[str, int]):
    assert on_ranks(axes["dp"] * axes["tp"], joined_together, axes) == []
