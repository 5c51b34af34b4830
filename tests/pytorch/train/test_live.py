"""Training against PEFT and torch.optim: the same first adapter and the same batches, step by step."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.mesh_training import compare_live
from helpers.training_passes import attach_in_peft, peft_name
from helpers.training_runs import Silent, small_settings
from torch.nn.functional import cross_entropy

from llorch.files.convert import convert
from llorch.files.hub import find
from llorch.pytorch.distributed.launch import on_ranks
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.run import Run
from llorch.pytorch.train.trainer import Training
from llorch.runtime.builtin import goldens_folder

STEPS = 21
LORA = {"r": 3, "lora_alpha": 5.0, "target_modules": ("q_proj", "v_proj", "o_proj", "down_proj")}


def loop(model: Any, training: Any, *, weight_decay: float) -> list[tuple[float, float]]:
    """Train a PEFT model as one would by hand: loss and norm of every step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    seen = []
    for step in range(STEPS):
        made = training.plan.order.step(step)
        n_trained, total = sum(batch.n_trained for batch in made), 0.0
        for batch in made:
            ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
            mask = torch.from_numpy(batch.positions >= 0).long()
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = cross_entropy(*flat, ignore_index=-100, reduction="sum") / n_trained
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = training.settings.lr * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((total, norm.item()))
    return seen


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly_cases(but=["micro-qwen2-kind2"])
@pytest.mark.parametrize(
    ("name", "kind"), [("micro-qwen3", {}), ("micro-llama", {"rslora": True}), ("micro-qwen2", {"dora": True})]
)
def test_losses_of_many_steps_equal_peft_and_torch(tmp_path: Path, name: str, kind: dict[str, bool]):
    settings = small_settings(
        tmp_path, model=name, batch_size=3, accumulation=2, schedule="linear", steps=STEPS, weight_decay=0.1,
        target_modules=LORA["target_modules"], **kind,
    )  # fmt: skip
    training: Any = Training(plan_training(settings))
    theirs = attach_in_peft(name, training.adapter, **LORA, **{f"use_{key}": value for key, value in kind.items()})
    expected = loop(theirs, training, weight_decay=0.1)
    actual = [training.run_step() for _ in range(STEPS)]
    np.testing.assert_allclose([one.loss for one in actual], [loss for loss, _ in expected], rtol=1e-5, strict=True)
    np.testing.assert_allclose([one.norm for one in actual], [norm for _, norm in expected], rtol=1e-3, strict=True)
    assert actual[-1].loss < 0.9 * actual[0].loss
    trained = dict(theirs.named_parameters())
    for key, array in training.adapter.flat().items():
        peft = trained[peft_name(key, training.adapter.targets)].detach().numpy()
        assert np.abs(array - peft).max() < 0.2 * training.settings.lr, key  # Adam divides by small gradients


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
def test_trained_adapter_gives_the_same_logits_in_peft(tmp_path: Path):
    import peft
    from transformers import AutoModelForCausalLM

    folder, base = tmp_path / "run", tmp_path / "base"
    convert(find("micro-qwen3"), base)
    chosen = {
        "target_modules": ("q_proj", "v_proj", "up_proj"), "exclude_modules": ("layers.0.self_attn.v_proj",),
        "rank_pattern": {r"layers\.1\..*_proj": 5, "q_proj": 2}, "alpha_pattern": {"up_proj": 40.0},
        "layers_to_transform": (0, 1),
    }  # fmt: skip
    result = Run(small_settings(tmp_path, steps=6, lr=2e-2, **chosen), folder, Silent()).run()
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if "lora_A" in name}
    assert sorted(shape[0] for shape in trained.values()) == [2, 3, 5, 5, 5]
    training = Training(plan_training(small_settings(tmp_path)))
    total, n_trained = 0.0, 0
    for example in training.data.valid:
        ids, labels = torch.tensor([example.ids]), torch.tensor(example.labels)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        total += cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum").item()
        n_trained += example.n_trained
    assert result.valid_loss is not None
    assert total / n_trained == pytest.approx(result.valid_loss["last"][1], rel=1e-5)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.nightly_cases(but=["float64"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_training_on_four_ranks_equals_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    monkeypatch.syspath_prepend(str(goldens_folder()))
    golden = importlib.import_module("make_training").make_training("micro-llama3")
    n_rows, failed = on_ranks(4, compare_live, "micro-llama3", golden, {"dp": 1, "tp": 4}, dtype)
    assert failed == []
    assert n_rows > 500
