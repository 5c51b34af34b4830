"""What hooks on torch models show, beside goldens and beside a model of nobody's kind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.families import MICRO
from fakes.handwritten_llama import Handwritten
from helpers.command_line import invoke
from helpers.refusals import assert_tells, refuses
from torch import nn

import llorch
from llorch.engines import open_engine
from llorch.engines.dumps.raw import digest
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.judging.goldens.forward import Golden, read
from llorch.runtime.builtin import builtin_path, goldens_folder
from llorch.stages.comparison import Tolerance
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import keys

NAME = "micro-llama"
CLOSE = Tolerance(3e-6, 1e-5)  # two ways to order the sums of float32
OWN = {
    "tok": "embed", "output of blocks.{i}.attn.wq": "q_proj", "blocks.{i}.attn.turn_q": "q_rope",
    "blocks.{i}.attn.wo": "attn_out", "input of blocks.{i}.attn.wo": "attn_context",
    "input of blocks.{i}.n2": "attn_residual", "blocks.{i}": "block_out", "head": "logits",
}  # fmt: skip


def load_golden(name: str) -> tuple[Golden, dict[str, np.ndarray]]:
    golden = read(goldens_folder() / name)
    return golden, dict(golden.engine_outputs["transformers"].traces["near"])


def arrays(dump: StageDump, number: int = 0) -> dict[str, np.ndarray]:
    return {key: dumped.read() for key, dumped in dump.of_pass(number)}


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_model_with_custom_module_names_is_captured_pass_by_pass():
    golden, expected = load_golden(NAME)
    ids = golden.cases["near"].ids
    weights = open_weights(builtin_path(NAME))
    model = Handwritten(weights)
    with llorch.capture(model, OWN, engine="mine") as dump:
        model(torch.tensor(ids[:-1]))
        model(torch.tensor(ids[-1:]))
    assert count_hooks(model) == 0
    shown = dump.stage_dump(weights)
    assert shown.passes == (Tokens(ids[:-1]), Tokens(ids[-1:], len(ids) - 1))
    assert (shown.features.engine, shown.features.dtype, shown.features.kv_cache) == ("mine", "float32", "")
    in_layer = [stage for stage in OWN.values() if stage not in ("embed", "logits")]
    for number, rows in enumerate((slice(0, -1), slice(-1, None))):
        part = {key: expected[key][rows] for key in arrays(shown, number)}
        assert part.keys() == {"embed", "logits", *(f"l{i}.{stage}" for i in range(3) for stage in in_layer)}
        report = llorch.compare(arrays(shown, number), part, CLOSE)
        assert report.agrees, str(report)
    assert dump.weights["blocks.1.attn.wq.weight"] == digest(weights["layers.1.q_proj"])


class UnusualModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)

    def forward(self, input_ids: Any = None, position_ids: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        return self.embed_tokens(input_ids)


ONE = torch.tensor([[1, 2]])


@pytest.mark.parametrize(
    ("names", "call", "facts"),
    [
        ({"a.{i}.b": "q_proj"}, {}, ("UnusualModel", "a.{i}.b", "none")),
        (None, {"input_ids": ONE.repeat(3, 1)}, ("one sequence", "batch of 3")),
        (None, {"inputs_embeds": torch.zeros(1, 2)}, ("token ids", "none", "input_ids", "position_ids")),
        (None, {"input_ids": ONE, "attention_mask": torch.tensor([[0, 1]])}, ("padding", "attention_mask")),
        (None, {"input_ids": ONE, "position_ids": torch.tensor([[3, 5]])}, ("positions", "[3, 5]")),
    ],
)
def test_unsupported_call_is_refused_and_hooks_are_removed(names: Any, call: Any, facts: tuple[str, ...]):
    model = UnusualModel()
    with refuses(ValueError, *facts, where="capture"), llorch.capture(model, names):
        model(**call)
    assert count_hooks(model) == 0


def test_positions_come_from_the_call_and_weights_are_hashed_on_request():
    model = UnusualModel()
    with llorch.capture(model, weights=False, dtype="float16") as dump:
        model(ONE, position_ids=torch.tensor([[30, 31]]))
        model(ONE, start_pos=7)
        model(ONE)
    assert [tokens.first_position for tokens in dump.passes] == [30, 7, 9]
    assert dump.weights == {}
    assert dump.features.dtype == "float16"


class NamedInputModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = UnusualModel(), UnusualModel()

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.outer(input_ids=ids) + self.inner(input_ids=ids)}


def test_input_may_be_a_keyword_and_captured_outputs_must_be_tensors():
    model = NamedInputModel()
    with llorch.capture(model, {"input of inner": "mine"}) as dump:
        model(ONE)
    np.testing.assert_array_equal(dump.arrays[0, "mine", None].read(), ONE.numpy(), strict=True)
    with refuses(ValueError, where="capture", expected=("tensor", "NamedInputModel"), got="dict"):
        with llorch.capture(model, {"": "logits"}):
            model(ONE)


@pytest.mark.slow  # imports a compiler
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_refused(in_place: bool):
    model = UnusualModel()
    compiled: Any = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    actual = (type(compiled).__name__, "torch.compile")
    with refuses(ValueError, where="capture", expected="eager", got=actual), llorch.capture(compiled):
        pass


@pytest.fixture(params=MICRO)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, tmp_path: Path) -> Iterator[Any]:
    """transformers' own, of a folder, and its registry of attention functions as it was."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    convert(builtin_path(name), tmp_path / "folder")
    before = dict(ALL_ATTENTION_FUNCTIONS)
    yield AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32, attn_implementation="eager")
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


@pytest.mark.nightly_cases(but=["micro-qwen3"])
@pytest.mark.live
@torch.no_grad()
def test_captured_stages_equal_the_engine_trace_bit_for_bit(model: Any, name: str, tmp_path: Path):
    ids = load_golden(name)[0].cases["near"].ids
    with open_engine("transformers", tmp_path / "folder", n_threads=torch.get_num_threads()) as engine:
        expected = engine.trace(ids)  # now: the last bit of a golden's exponential is that of its processor
    with llorch.capture(model) as dump:
        model(torch.tensor([ids]))
    weights = open_weights(builtin_path(name))
    shown = dump.stage_dump(weights)
    for key, array in arrays(shown).items():
        np.testing.assert_array_equal(array, expected.pop(key), strict=True, err_msg=key)
    assert not expected
    assert (shown.features.engine, shown.features.flash_attention) == ("transformers", False)
    assert dump.weights["model.layers.1.self_attn.k_proj.weight"] == digest(weights["layers.1.k_proj"])


@pytest.mark.live
@torch.no_grad()
@pytest.mark.parametrize("name", ["micro-qwen3"], indirect=True)
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_generated_tokens_are_passes_with_full_context_caches_for_any_attention(model: Any, name: str, kind: str):
    ids = load_golden(name)[0].cases["near"].ids
    model.set_attn_implementation(kind)
    with llorch.capture(model) as dump:
        made = model.generate(torch.tensor([ids[:-2]]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist()
    n = len(ids) - 2
    assert dump.passes == [Tokens(ids[:-2]), Tokens((made[n],), n), Tokens((made[n + 1],), n + 1)]
    shown = dump.stage_dump(open_weights(builtin_path(name)))
    assert shown.dumped[0, "logits"].tokens == (n - 1,)  # generate asks for no others
    assert shown.dumped[2, "l1.k_cache"].read().shape[1] == n + 2
    np.testing.assert_array_equal(shown.dumped[1, "l0.k_rope"].read()[0], shown.dumped[2, "l0.k_cache"].read()[:, n])
    assert (("l0.attn_probs" in arrays(shown)), shown.features.flash_attention) == (kind == "eager", kind != "eager")
    whole = llorch.load(name).forward
    trace: dict[str, np.ndarray] = {}
    whole(made[:-1], trace=trace)
    for key, stage, _ in keys(open_weights(builtin_path(name)).config):
        if stage.axes.startswith("seq") and key != "logits":
            actual = np.concatenate([arrays(shown, number)[key] for number in range(3)])
            assert llorch.compare({key: actual}, {key: trace[key]}, CLOSE).agrees, key


@pytest.mark.live
@torch.no_grad()
@pytest.mark.parametrize("name", ["micro-llama"], indirect=True)
def test_bfloat16_is_kept_and_only_used_cache_slots_are_captured(model: Any, name: str):
    model.to(torch.bfloat16)
    with llorch.capture(model) as dump:
        model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    shown = dump.stage_dump(open_weights(builtin_path(name)))
    assert {dumped.stored for key, dumped in shown.of_pass(0) if not key.endswith("attn_probs")} == {"bfloat16"}
    assert [shown.dumped[n, "l0.k_cache"].read().shape[1] for n in (0, 1)] == [3, 4]
    np.testing.assert_array_equal(shown.dumped[1, "l0.k_rope"].read()[0], shown.dumped[1, "l0.k_cache"].read()[:, 3])
    assert shown.dumped[1, "l1.attn_scores"].read().shape[-1] == 4


@pytest.mark.live
@torch.no_grad()
@pytest.mark.parametrize("name", ["micro-llama"], indirect=True)
def test_pass_starts_after_the_cache_and_a_capture_may_have_one_pass(model: Any, name: str):
    with llorch.capture(model) as dump:
        with llorch.capture(model) as first:
            cache = model(torch.tensor([[3, 1, 4]])).past_key_values
        model(torch.tensor([[1]]), past_key_values=cache)
        model(torch.tensor([[1]]))
    assert dump.passes == [Tokens((3, 1, 4)), Tokens((1,), 3), Tokens((1,), 0)]
    assert [*first.arrays] == [(0, name, layer) for n, name, layer in dump.arrays if n == 1]


@pytest.mark.live
@torch.no_grad()
@pytest.mark.parametrize("name", ["micro-qwen3"], indirect=True)
def test_model_error_is_diagnosed_from_a_captured_folder(model: Any, name: str, tmp_path: Path):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1e-4
    with llorch.capture(model) as dump:
        model.generate(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), max_new_tokens=2, pad_token_id=0)
    dump.save(tmp_path / "dump")
    result = invoke("diagnose", str(tmp_path / "dump"), "--model", str(tmp_path / "folder"))
    assert result.exit_code == 1, result.stderr
    assert_tells(result.stdout, "FAIL", "eps", "0.0001", where="l0.attn_norm")
    model.model.norm.weight.mul_(1.01)
    with llorch.capture(model) as dump:
        model(torch.tensor([[3, 1, 4]]))
    dump.save(tmp_path / "dump")
    assert invoke("diagnose", str(tmp_path / "dump"), "--model", name).exit_code == 14


@pytest.mark.nightly_cases(but=["chunk-micro-qwen3.5"])
@pytest.mark.live
@torch.no_grad()
@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen3.5"], indirect=True)
@pytest.mark.parametrize("n_past", [7, 4], ids=["step", "chunk"])
def test_pass_with_uncaptured_past_is_not_blamed(model: Any, name: str, n_past: int, tmp_path: Path):
    ids = load_golden(name)[0].cases["near"].ids[:8]
    past = model(torch.tensor([ids[:n_past]])).past_key_values
    with llorch.capture(model) as dump:
        model(torch.tensor([ids[n_past:]]), past_key_values=past)
    dump.save(tmp_path / "dump")
    words = ("diagnose", str(tmp_path / "dump"), "--model", name, "--json")
    alone, whole = (invoke(*words, *more) for more in ((), ("--tokens", ",".join(map(str, ids)))))
    assert (alone.exit_code, whole.exit_code) == (0, 0), alone.stderr + whole.stderr
    (not_run,) = json.loads(alone.stdout)["not_run"].values() or ([],)
    assert {place["stage"] for place in not_run} >= ({"l0.conv_out", "l0.delta_out"} if "3.5" in name else set())
    assert json.loads(whole.stdout)["not_run"] == {}


@pytest.mark.live
@torch.no_grad()
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_generated_tokens_beyond_a_window_are_not_blamed(kind: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    path = builtin_path("micro-mistral")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=kind)
    ids = load_golden("micro-mistral")[0].cases["near"].ids[:24]
    with llorch.capture(model) as dump:
        model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    dump.save(tmp_path / "dump")
    assert dump.arrays[1, "k_cache", 0].shape[1] == model.config.sliding_window < len(ids)
    result = invoke("diagnose", str(tmp_path / "dump"), "--model", "micro-mistral", "--json")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert (json.loads(result.stdout)["findings"], json.loads(result.stdout)["not_run"]) == ([], {})
