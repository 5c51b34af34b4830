"""Several adapters beside one model that runs in torch: chosen per request and per prompt, added and removed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.refusals import Refusal, refuses, row
from helpers.split_runs import NoText
from helpers.training_passes import ALL, SETTINGS

import llorch
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.adapter import Adapter, LoraTensors
from llorch.lora.config import LoraConfig
from llorch.lora.targets import LoraTarget, MatrixPart
from llorch.model.generate import Token
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.batch_invariant.reproducible import FixedRows
from llorch.pytorch.kernels.cpu.block import CpuBlock
from llorch.pytorch.lora.modules import LoraLinear
from llorch.pytorch.model import TorchModel, load_torch

STARTS = ("Once upon a time", "The little fox", "A boy named", "There was a", "She said")
MODES = pytest.mark.parametrize("mode", ["fast", "reproducible"])


def weak_lora(model: TorchModel, seed: int, **settings) -> Adapter:
    """Strong enough to change the text, weak enough to leave it one."""
    return random_adapter(model.config, seed=seed, **{"lora_alpha": 0.5} | settings)


@pytest.fixture(scope="module")
def model() -> TorchModel:
    made = load_torch("story")
    made.add_adapter("one", weak_lora(made, 1, lora_alpha=3.0))
    made.add_adapter("two", weak_lora(made, 2, use_dora=True, target_modules=("q_proj", "down_proj", "lm_head")))
    made.add_adapter("three", weak_lora(made, 3, lora_alpha=3.0, target_modules=("embed_tokens", "v_proj")))
    return made


def token_ids(tokens) -> list[int]:
    return [token.id for token in tokens]


def generate_ids(model: TorchModel, prompt: str | Sequence[int], adapter: str | None, n: int = 8) -> list[int]:
    return token_ids(model.generate(prompt, max_tokens=n, ignore_eos=True, adapter=adapter))


def split_rows(batch: Sequence[tuple[int, Token]], n: int) -> list[list[int]]:
    return [[token.id for row, token in batch if row == at] for at in range(n)]


def with_merged(adapter: Adapter) -> TorchModel:
    """The story model with an adapter of its layers added to its matrices."""
    model = load_torch("story")
    for name, target in adapter.targets.items():
        tensors = adapter.tensors[name]
        product = adapter.scaling(name) * (tensors.lora_B.astype(np.float64) @ tensors.lora_A)
        weight = model.module.get_parameter(f"{target.path}.weight")
        weight.copy_((weight.double() + torch.from_numpy(product)).float())
    return model


@pytest.mark.nightly_cases("all")
@pytest.mark.parametrize(("targets", "alpha"), [(ALL, 0.5), (("q_proj", "v_proj"), 3.0)], ids=["all", "q and v"])
def test_generation_with_an_adapter_equals_the_merged_model(targets: tuple[str, ...], alpha: float):
    plain = load_torch("story")
    adapter = weak_lora(plain, 5, target_modules=targets, lora_alpha=alpha)
    plain.add_adapter("mine", adapter)
    merged = with_merged(adapter)
    differs = 0
    for start in STARTS[:3]:
        ours = generate_ids(plain, start, "mine", 10)
        assert ours == generate_ids(merged, start, None, 10)
        differs += ours != generate_ids(plain, start, None, 10)
    assert differs >= 2


def test_base_generation_is_unchanged_by_added_adapters(model: TorchModel):
    alone = load_torch("story")
    ids = alone.tokenizer.encode(STARTS[0])
    assert np.array_equal(model.forward(ids), alone.forward(ids))
    assert generate_ids(model, STARTS[0], None) == generate_ids(alone, STARTS[0], None)
    kinds = [type(module) for module in alone.module.modules()]
    assert [type(module) for module in model.module.modules()] == kinds
    assert CpuBlock in kinds


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_remove_adapter_restores_logits_and_modules_of_the_base(dtype: str, mode):
    model = load_torch("micro-qwen2", dtype=dtype, mode=mode)
    ids, models = [3, 17, 8, 39, 0, 25], dict(model.module.named_modules())
    before = model.forward(ids)
    model.add_adapter("one", weak_lora(model, 1, target_modules=(*ALL, "embed_tokens", "lm_head")))
    assert not np.array_equal(model.forward(ids, adapter="one"), before)
    assert np.array_equal(model.forward(ids), before)
    model.remove_adapter("one")
    assert np.array_equal(model.forward(ids), before)
    assert dict(model.module.named_modules()) == models
    with refuses(ValueError, "none", "'one'"):
        model.forward(ids, adapter="one")


@pytest.mark.nightly_cases(but=["dense-float32-fast", "packed Q4_K_M-bfloat16-reproducible"])
@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["packed Q4_K_M", "dense"])
def test_rows_with_different_adapters_equal_each_prompt_alone(dtype: str, mode, kind: str, tmp_path: Path):
    path = write_model("Q4_K_M", tmp_path) if kind.startswith("packed") else "micro-qwen2"
    model = load_torch(path, dtype=dtype, mode=mode, residency="packed" if kind.startswith("packed") else "decoded")
    for seed, name in enumerate(SETTINGS):
        model.add_adapter(f"a{seed}", random_adapter(model.config, seed=seed, lora_alpha=0.3, **SETTINGS[name]))
    names = [None, "a0", "a3", "a5", None, "a6", "a0"]
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 90, 3 + at).tolist() for at in range(len(names))]
    model.tokenizer = NoText()  # type: ignore[misc] (the micro models have no vocabulary)
    most = [2, 4, 3, 5, 1, 3, 2]  # so that the batch is narrowed on its way
    batch = list(model.generate_batch(prompts, max_tokens=most, ignore_eos=True, adapter=names))
    alone = [generate_ids(model, prompt, name, n) for prompt, name, n in zip(prompts, names, most, strict=True)]
    if dtype == "float32" or mode == "reproducible":
        assert split_rows(batch, len(names)) == alone
    allowed = 0 if mode == "reproducible" else 1e-4 if dtype == "float32" else 0.1
    for at, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        (first,) = model.generate(prompt, max_tokens=1, ignore_eos=True, adapter=name)
        in_batch = next(token.logprob for row, token in batch if row == at)
        assert in_batch == pytest.approx(first.logprob, rel=0, abs=allowed)


def test_one_adapter_can_be_named_for_all_prompts(model: TorchModel):
    batch = list(model.generate_batch(STARTS, max_tokens=6, ignore_eos=True, adapter="two"))
    assert split_rows(batch, len(STARTS)) == [generate_ids(model, start, "two", 6) for start in STARTS]


def test_concurrent_generations_keep_their_adapters(model: TorchModel):
    names = ["one", None, "two", "three"]
    expected = [generate_ids(model, STARTS[0], name, 6) for name in names]
    running = [model.generate(STARTS[0], max_tokens=6, ignore_eos=True, adapter=name) for name in names]
    actual = [[next(answer).id for answer in running] for _ in range(6)]
    assert [list(row) for row in zip(*actual, strict=True)] == expected
    assert len({tuple(row) for row in expected}) >= 3


def test_generation_continues_after_its_adapter_is_replaced():
    model = load_torch("story")
    first, second = weak_lora(model, 1), weak_lora(model, 2)
    model.add_adapter("mine", first)
    names, most = ["mine", None, "mine", None], [8, 3, 8, 3]  # narrowed after the removal
    expected = list(model.generate_batch(STARTS[:4], max_tokens=most, ignore_eos=True, adapter=names))
    running = model.generate_batch(STARTS[:4], max_tokens=most, ignore_eos=True, adapter=names)
    begun = [next(running)]
    model.remove_adapter("mine")
    model.add_adapter("mine", second)
    new = generate_ids(model, STARTS[0], "mine")
    assert begun + list(running) == expected
    assert generate_ids(model, STARTS[0], "mine") == new
    assert new != split_rows(expected, 4)[0]


def test_late_answer_does_not_affect_a_new_adapter_of_the_same_name():
    model = load_torch("story")
    model.add_adapter("mine", weak_lora(model, 1))
    old = model.generate(STARTS[0], max_tokens=8, ignore_eos=True, adapter="mine")
    next(old)
    model.remove_adapter("mine")
    model.add_adapter("mine", weak_lora(model, 2))
    fresh = load_torch("story")
    fresh.add_adapter("mine", weak_lora(fresh, 2))
    assert token_ids(old) != generate_ids(fresh, STARTS[0], "mine", 8)[1:]
    assert generate_ids(model, STARTS[0], "mine") == generate_ids(fresh, STARTS[0], "mine")


def test_reproducible_adapted_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    lora_A, lora_B, x = (torch.randn(*shape, generator=generator) for shape in ((16, 896), (600, 16), (150, 896)))
    lora_module = LoraLinear(FixedRows(torch.nn.Linear(896, 600)), fixed=True)
    config = LoraConfig(r=16, target_modules=("q_proj",))
    part = MatrixPart("layers.0.q_proj")
    target = LoraTarget("layers.0.q_proj", "model.layers.0.self_attn.q_proj", 896, 600, (part,), ())
    tensors = LoraTensors(lora_A.numpy(), lora_B.numpy())
    lora_module.add("one", config, target, tensors, dtype=torch.float32, trainable=False, minus=None, part=part)
    lora_module.activate("one")
    with torch.no_grad():
        together = lora_module(x)
        for rows in (1, 3, 40):
            assert torch.equal(lora_module(x[:rows]), together[:rows])


def test_a_trace_names_the_same_stages_as_without_an_adapter(model: TorchModel):
    plain: dict[str, np.ndarray] = {}
    adapted: dict[str, np.ndarray] = {}
    model.forward([5, 9, 2], trace=plain)
    logits = model.forward([5, 9, 2], trace=adapted, adapter="one")
    assert plain.keys() == adapted.keys()
    assert np.array_equal(adapted["logits"], logits)
    np.testing.assert_allclose(model.forward([5, 9, 2], adapter="one"), logits, rtol=0, atol=1e-4)


MISTAKES = [
    row("unknown", lambda model: generate_ids(model, STARTS[0], "four"), ValueError, "'four'", "one", "two", "three"),
    row("one for two prompts", lambda model: list(model.generate_batch(STARTS[:2], adapter=["one"])),
        ValueError, "adapter", where="generate_batch", expected=2, got=1),
    row("there", lambda model: model.add_adapter("one", weak_lora(model, 1)), ValueError, "'one'", "already"),
    row("spaced", lambda model: model.add_adapter("a b", weak_lora(model, 1)), ValueError, expected="letters",
        got="'a b'"),
    row("of torch", lambda model: model.add_adapter("keys", weak_lora(model, 1)), ValueError, "torch", "'keys'"),
    row("of another model", lambda model: model.add_adapter("x", weak_lora(load_torch("micro-qwen2"), 1)),
        ValueError, "model", "names", "shapes", where="'x'"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", MISTAKES)
def test_invalid_adapter_calls_are_refused(refusal: Refusal, model: TorchModel):
    refusal.check(model)
    assert model.adapters == ["one", "two", "three"]


PROMPTS = [[3, 17, 8], [5, 26, 17, 33, 2], [19]]


def test_a_compiled_model_refuses_to_mix_adapters_in_a_call():
    model = llorch.load_torch("story", compiled=True)
    model.add_adapter("one", random_adapter(model.config))
    with refuses(ValueError, "compiled", "one adapter", where="generate_batch"):
        list(model.generate_batch(["a", "b"], adapter=["one", None]))


@pytest.mark.gpu
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_with_every_adapter_generate_the_tokens_of_numpy(dora: bool, compiled: bool):
    numpy, cuda = llorch.load("micro-qwen3"), llorch.load_torch("micro-qwen3", device="cuda", compiled=compiled)
    for model in (numpy, cuda):
        for seed, name in enumerate(("one", "two")):
            model.add_adapter(name, random_adapter(model.config, seed=seed, use_dora=dora))
    how = {"settings": SamplingSettings(), "max_tokens": 40, "ignore_eos": True}
    names = ["one", None, "two"]
    expected = [
        [token.id for token in numpy.generate(prompt, adapter=name, **how)]
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    for _ in range(2):  # the second time through graphs that were recorded
        alone = [
            [token.id for token in cuda.generate(prompt, adapter=name, **how)]
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        assert alone == expected
    if not compiled:
        batch = list(cuda.generate_batch(PROMPTS, adapter=names, **how))
        assert [[token.id for row, token in batch if row == at] for at in range(3)] == expected
