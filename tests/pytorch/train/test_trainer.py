"""A step of training: what it leaves alone, what it must not depend on, and when it is not made."""

import json
import math
import shutil
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import assert_tells, refuses
from helpers.training_runs import bits, distance, gradients, run_steps, small_data, small_settings

from llorch.files import open_weights
from llorch.files.safetensors import tensor_bytes
from llorch.pytorch.device import target
from llorch.pytorch.lora.adapters import attach
from llorch.pytorch.train import trainer as torch_trainer
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.step import Alone, mean_loss
from llorch.pytorch.train.trainer import NonFiniteLoss
from llorch.runtime.builtin import builtin_path
from llorch.training.data import batches
from llorch.training.settings import TrainSettings


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("eight_bit", [False, True])
def test_training_learns_the_common_part_of_the_rows(tmp_path: Path, eight_bit: bool):
    training = run_steps(small_settings(tmp_path, steps=12, lr=3e-2, r=64, alpha=128.0, eight_bit=eight_bit), steps=0)
    before = training.validate()
    losses = [training.run_step().loss for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    assert training.validate() < before
    moments = [array.dtype for name, array in training.state()[0].items() if name.startswith("optimizer/")]
    assert (np.uint8 in moments) == eight_bit


def test_the_base_keeps_every_bit_and_gets_no_gradient(tmp_path: Path):
    training = run_steps(small_settings(tmp_path, target_modules="all-linear"), steps=3)
    at = target("cpu", "float32")
    fresh = load_for_training(open_weights(builtin_path("micro-qwen3")), at, residency="decoded", batch=1, n_tokens=9)
    weights = {name.replace(".base_layer", ""): tensor for name, tensor in training.module.named_parameters()}
    for name, tensor in fresh.named_parameters():
        assert weights[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name
        assert weights[name].grad is None
        assert not weights[name].requires_grad


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (3, 3), (1, 8)])
def test_accumulated_ragged_batches_equal_one_large_batch(tmp_path: Path, batch_size: int, accumulation: int):
    how = {"dtype": "float64", "max_grad_norm": 0.0, "label_smoothing": 0.1, "dropout": 0.3}
    whole = run_steps(small_settings(tmp_path, **how), steps=0)
    parts = run_steps(small_settings(tmp_path, batch_size=batch_size, accumulation=accumulation, **how), steps=0)
    expected, actual = whole.run_step(), parts.run_step()
    assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
    assert (actual.n_trained, actual.n_tokens) == (expected.n_trained, expected.n_tokens)
    assert distance(gradients(parts), gradients(whole)) < 1e-12


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("float64", 1e-12)])
def test_packed_rows_have_the_loss_and_gradients_of_separate_rows(tmp_path: Path, dtype: str, rounding: float):
    how = {"dtype": dtype, "max_grad_norm": 0.0, "max_length": 40, "init": "gaussian"}
    apart, packed = (run_steps(small_settings(tmp_path, packing=packing, **how), steps=0) for packing in (False, True))
    assert len(packed.plan.order.rows(0)) < len(apart.plan.order.rows(0))  # or nothing was packed
    for _ in range(2):
        expected, actual = apart.run_step(), packed.run_step()
        assert actual.loss == pytest.approx(expected.loss, rel=min(rounding, 1e-6))
        assert (actual.n_trained, actual.n_tokens) == (expected.n_trained, expected.n_tokens)
    assert distance(gradients(packed), gradients(apart)) < rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_no_bit_also_with_dropout(tmp_path: Path, dtype: str):
    how = {"dropout": 0.2, "dtype": dtype}
    plain = run_steps(small_settings(tmp_path, **how), steps=3)
    recomputed = run_steps(small_settings(tmp_path, gradient_checkpointing=True, **how), steps=3)
    assert bits(recomputed.state()[0]) == bits(plain.state()[0])


def test_dropout_changes_steps_but_not_validations(tmp_path: Path):
    plain, dropping = (run_steps(small_settings(tmp_path, dropout=share), steps=0) for share in (0.0, 0.5))
    assert dropping.validate() == plain.validate()
    for _ in range(2):
        plain.run_step()
        dropping.run_step()
    assert bits(plain.state()[0]) != bits(dropping.state()[0])
    assert dropping.validate() == dropping.validate()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_dropout_masks_differ_between_steps_on_the_same_rows(tmp_path: Path, share: float):
    still = small_settings(tmp_path, dropout=share, init="pissa", lr=1e-30, dtype="float64")
    training, other = run_steps(still, steps=0), run_steps(replace(still, seed=1), steps=0)
    losses = {training.run_step().loss for _ in range(3)}
    assert training.plan.order.steps_per_epoch == 1
    spread = max(losses) - min(losses)
    assert spread > 1e-4 if share else spread < 1e-12
    assert bool(share) == (abs(other.run_step().loss - run_steps(still, steps=0).run_step().loss) > 1e-4)


def test_max_length_beyond_the_context_needs_no_more_memory_than_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    load = torch_trainer.load_for_training

    def record_n_tokens(*arguments: Any, n_tokens: int, **keywords: Any) -> Any:
        asked.append(n_tokens)
        return load(*arguments, n_tokens=n_tokens, **keywords)

    monkeypatch.setattr(torch_trainer, "load_for_training", record_n_tokens)
    training = torch_trainer.Training(plan_training(small_settings(tmp_path, max_length=10**9)))
    assert asked == [training.data.settings.max_length]
    assert asked[0] < 10**6


def test_chunks_of_logits_give_the_same_steps(tmp_path: Path):
    whole, chunked = (run_steps(small_settings(tmp_path, chunk=chunk), steps=3) for chunk in (0, 7))
    assert distance(gradients(chunked), gradients(whole)) < 1e-5
    assert chunked.validate() == pytest.approx(whole.validate(), rel=1e-6)


@pytest.mark.nightly_cases("changes1", "changes2")
@pytest.mark.parametrize(
    "changes", [{}, {"dora": True}, {"eight_bit": True, "lora_plus_ratio": 4.0}, {"init": "pissa"}]
)
def test_loaded_state_continues_bit_for_bit(tmp_path: Path, changes: dict[str, Any]):
    how = {"dropout": 0.1, "schedule": "linear", "batch_size": 3, **changes}
    straight = run_steps(small_settings(tmp_path, **how), steps=2)
    tensors, record = deepcopy(straight.state())
    expected = [straight.run_step() for _ in range(2)]
    at_end = bits(straight.state()[0])
    resumed = run_steps(small_settings(tmp_path, **how), steps=1)  # is elsewhere
    assert resumed.plan.identity() == straight.plan.identity()
    resumed.load(tensors | {"rng/torch": np.zeros(3, np.uint8)}, record)  # which older snapshots have
    assert [resumed.run_step() for _ in range(2)] == expected
    assert bits(resumed.state()[0]) == at_end


@pytest.mark.parametrize("eight_bit", [False, True])
def test_saved_state_is_not_copied(tmp_path: Path, eight_bit: bool):
    training = run_steps(small_settings(tmp_path, eight_bit=eight_bit, r=40), steps=1)
    tensors, _ = training.state()
    parts = [np.frombuffer(part, np.uint8) for part in tensor_bytes(tensors)]
    live = {name: array for name, array in tensors.items() if array.ndim}
    assert all(any(np.shares_memory(array, part) for part in parts) for array in live.values())  # to the disk as it is
    before = bits(live)
    training.run_step()
    assert not before.items() & bits(live).items()  # the arrays that training changes


def test_a_state_of_another_rank_is_refused(tmp_path: Path):
    tensors, record = run_steps(small_settings(tmp_path, r=4), steps=0).state()
    with refuses(ValueError, "matrices", "rank", where="snapshot"):
        run_steps(small_settings(tmp_path), steps=0).load(tensors, record)


def test_non_finite_loss_ends_training_before_the_update_and_names_rows(tmp_path: Path):
    training = run_steps(small_settings(tmp_path, lr=1e30, batch_size=2), steps=1)
    before = bits(training.state()[0])
    with refuses(NonFiniteLoss, where="step 2", expected="finite", got="loss") as error:
        training.run_step()
    assert all(
        f"train.jsonl:{row[0].source.rpartition(':')[2]}" in str(error.value) for row in training.plan.order.rows(1)
    )
    assert bits(training.state()[0]) == before
    assert training.step == 1


@pytest.mark.parametrize("non_finite", ["gradient", "loss"])
def test_non_finite_gradient_or_loss_alone_ends_training(tmp_path: Path, non_finite: str):
    training = run_steps(small_settings(tmp_path), steps=1)
    name, parameter = next(iter(training.parameters.items()))
    if non_finite == "gradient":
        parameter.register_hook(lambda gradient: gradient * np.inf)
    else:
        others = torch.arange(1, training.module.config.vocab_size)  # with a probability of 0, no gradient through it
        training.module.lm_head.register_forward_hook(lambda _m, _i, logits: logits.index_fill(-1, others, -math.inf))
    before = bits(training.state()[0])
    with refuses(NonFiniteLoss, where="step 2", got=name if non_finite == "gradient" else ("loss inf", "train.jsonl")):
        training.run_step()
    assert bits(training.state()[0]) == before
    assert parameter.grad is None


# Another value of every setting, and the parts of the identity that it changes.
ALL, NAMED = "settings", "settings initial_adapter"
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "micro-qwen2"}, "base initial_adapter"), "data": ({"data": "train.jsonl"}, "data"),
    "valid": ({"data": "train.jsonl", "valid": 0.3}, "data"),
    "max_length": ({"max_length": 20}, "settings data"), "train_on": ({"train_on": "last"}, "settings data"),
    "parse_special": ({"parse_special": True}, "settings data"), "packing": ({"packing": True}, "settings data"),
    "epochs": ({"steps": None, "epochs": 7}, "total_steps"), "steps": ({"steps": 5}, "total_steps"),
    "warmup_steps": ({"warmup_steps": 2}, "warmup_steps"),
    "warmup_ratio": ({"warmup_steps": None, "warmup_ratio": 1.0}, "warmup_steps"),
    "r": ({"r": 4}, NAMED), "target_modules": ({"target_modules": ("q_proj",)}, NAMED),
    "exclude_modules": ({"exclude_modules": ("q_proj",)}, NAMED), "seed": ({"seed": 1}, NAMED),
    "target_parameters": ({"target_parameters": ("experts.down_proj",)}, NAMED),
    "layers_to_transform": ({"layers_to_transform": (0,)}, NAMED), "init": ({"init": "gaussian"}, NAMED),
    "rank_pattern": ({"rank_pattern": {"q_proj": 4}}, NAMED), "dora": ({"dora": True}, NAMED),
    "alpha": ({"alpha": 6.0}, ALL), "alpha_pattern": ({"alpha_pattern": {"q_proj": 6.0}}, ALL),
    "dropout": ({"dropout": 0.1}, "settings dropout"), "rslora": ({"rslora": True}, ALL), "lr": ({"lr": 0.1}, ALL),
    "lora_plus_ratio": ({"lora_plus_ratio": 2.0}, ALL), "schedule": ({"schedule": "linear"}, ALL),
    "weight_decay": ({"weight_decay": 0.1}, ALL), "max_grad_norm": ({"max_grad_norm": 0.5}, ALL),
    "eight_bit": ({"eight_bit": True}, ALL), "batch_size": ({"batch_size": 7, "steps": 4}, ALL),
    "accumulation": ({"accumulation": 2}, ALL), "label_smoothing": ({"label_smoothing": 0.1}, ALL),
    "template_date": ({"template_date": "2024-02-29"}, ALL),
    "chat_template_kwargs": ({"chat_template_kwargs": {"x": 1}}, ALL),
    "chunk": ({"chunk": 3}, ALL), "dtype": ({"dtype": "bfloat16"}, ALL),
    "weights": ({"weights": "packed"}, f"{ALL} compiled_kernels"),
    **{name: ({name: 9}, "") for name in ("eval_every", "save_every", "keep")},  # these change no bit
    **{name: ({name: True}, "") for name in ("gradient_checkpointing", "tensorboard")},
}  # fmt: skip


def identity(folder: Path, **changes: Any) -> dict[str, Any]:
    return run_steps(small_settings(folder, **changes), steps=0).plan.identity()


@pytest.fixture(scope="module")
def usual_identity(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return identity(tmp_path_factory.mktemp("usual"))


@pytest.mark.slow_cases("chat_template_kwargs", "max_length", "model", "target_parameters", "valid")
@pytest.mark.parametrize("name", [field.name for field in fields(TrainSettings) if field.name != "device"])
def test_every_setting_is_in_the_identity_or_changes_no_bit(tmp_path: Path, usual_identity: dict[str, Any], name: str):
    given, changed = OTHER[name]
    place = {"data": str(small_data(tmp_path) / given["data"])} if "data" in given else {}
    before = {"valid": place, "target_parameters": {"model": "micro-qwen3-moe"}}.get(name, {})
    plain = identity(tmp_path, **before) if before else usual_identity
    other = identity(tmp_path, **{**before, **given, **place})
    assert {key for key in plain | other if plain.get(key) != other.get(key)} == set(changed.split())


@pytest.mark.parametrize("init", ["gaussian", "pissa"])
def test_training_starts_at_the_base_for_every_init(tmp_path: Path, init: str):
    plain, other = (run_steps(small_settings(tmp_path, init=kind), steps=0) for kind in ("default", init))
    assert other.validate() == pytest.approx(plain.validate(), rel=1e-5)


def test_pissa_adapter_applies_to_the_unchanged_base_file(tmp_path: Path):
    training = run_steps(small_settings(tmp_path, init="pissa"), steps=3)
    module = load_for_training(training.plan.weights, training.target, residency="decoded", batch=8, n_tokens=40)
    attach(module, training.adapter)
    made = batches(training.data.rows(training.data.valid), 8)
    assert mean_loss(Alone(module), made, training.target.device) == pytest.approx(training.validate(), rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_dropout_in_the_base_config_is_noted_before_training(tmp_path: Path, share: float):
    base = Path(shutil.copytree(builtin_path("micro-mistral"), tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attention_dropout": share, "hidden_dropout": 0.5}))
    training = run_steps(small_settings(tmp_path, model=str(base)), steps=0)
    notes = [note for note in training.plan.notes if "dropout" in note]
    assert len(notes) == bool(share)
    if share:
        assert_tells(notes[0], "config.json", "attention_dropout", share, "PEFT")


@pytest.mark.parametrize(
    ("model", "modules", "facts"),
    [
        ("micro-qwen2", ("lm_head", "q_proj"), ["lm_head", "merge"]),
        ("micro-qwen2", ("embed_tokens",), ["embed_tokens", "merge"]),
        ("micro-qwen2", ("q_proj",), []),
        ("micro-qwen3", ("lm_head",), []),
    ],
)
def test_adapter_on_tied_embeddings_is_noted_before_training(
    tmp_path: Path, model: str, modules: Any, facts: list[str]
):
    tied = open_weights(builtin_path(model)).config.tie_word_embeddings
    training = run_steps(small_settings(tmp_path, model=model, target_modules=modules), steps=0)
    found = [note for note in training.plan.notes if " tied " in note]
    assert (tied, len(found)) == (model == "micro-qwen2", bool(facts))
    if facts:
        assert_tells(found[0], *facts, "GGUF")
