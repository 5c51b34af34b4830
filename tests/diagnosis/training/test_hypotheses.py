"""Adapters applied in part, gradients of exactly 0, and documents of a packed row that see each other."""

import pytest
from helpers.without_gaps import without_gaps
from torch import Tensor

from benchmarks.diagnosis.trainer import Trainer
from benchmarks.diagnosis.training_bugs import BUGS, Bug
from benchmarks.diagnosis.training_cases import TrainingCase, score
from llorch.diagnosis.training.hypotheses import partly_applied
from llorch.diagnosis.verdict import Finding
from llorch.files import open_weights
from llorch.lora.config import LoraConfig
from llorch.lora.initial import initial_adapter
from llorch.runtime.builtin import builtin_path

BY_NAME = {bug.name: bug for bug in BUGS}


def findings(name: str, style: str, rows: str = "ragged") -> list[Finding]:
    with without_gaps():
        return list(score(TrainingCase(BY_NAME.get(name), "micro-qwen3", style, rows=rows)).diagnosis.findings)


def test_parts_of_an_adapter_are_modules_layers_and_the_head():
    weights = open_weights(builtin_path("micro-llama"))
    config = LoraConfig(target_modules=("q_proj", "v_proj", "lm_head", "embed_tokens"))
    adapter = initial_adapter(config, weights, init="default", seed=0)
    layers = [f"layer {layer}" for layer in range(weights.config.n_layers)]
    *partial, whole = partly_applied(adapter)
    parts = [mistake.diagnosis.removeprefix("The adapter of ").removesuffix(" is not applied.") for mistake in partial]
    assert sorted(parts) == sorted(["q_proj", "v_proj", "attention", *layers, "lm_head", "embed_tokens"])
    assert whole.name == "lora-delta-missing"


@pytest.mark.slow_cases("v_proj-*")
@pytest.mark.parametrize(
    ("part", "style"), [("v_proj", "whole"), ("layers.1", "usual"), ("down_proj", "one-loss")], ids=lambda x: x
)
def test_part_of_an_adapter_that_is_not_applied_is_named(part: str, style: str):
    (finding,) = findings(f"adapter-off-{part}", style)
    assert [cause.name for cause in finding.causes] == ["lora-partly-applied"]
    assert f"The adapter of {part.replace('layers.', 'layer ')} is not applied." in finding.sentence


@pytest.mark.parametrize(("name", "first"), [("v-frozen", "v_proj"), ("all-frozen", "down_proj")])
def test_gradient_of_exactly_zero_is_called_that(name: str, first: str):
    (finding,) = findings(name, "usual")
    assert [cause.name for cause in (*finding.causes, *finding.alternatives)] == ["gradient-exactly-zero"]
    assert f"The gradient of layers.1.{first}.lora_A is exactly 0" in finding.sentence


@pytest.mark.slow
def test_zero_gradient_beside_another_error_is_called_that():
    def wrong(self: Trainer, loss: Tensor) -> dict[str, Tensor]:
        grads = Trainer.gradients(self, loss)
        first, second = (f"layers.1.down_proj.lora_{kind}" for kind in "AB")
        return grads | {first: grads[first] * 0, second: grads[second].flip(0)}

    bug = Bug("zero-and-flipped", "gradient", {"gradients": wrong})
    with without_gaps():
        finding = score(TrainingCase(bug, "micro-qwen3", "usual")).wrong[0]
    assert finding.kind == "unknown"
    assert finding.sentence.endswith("This gradient is exactly 0.")


@pytest.mark.parametrize("rows", ["restarting", "running"])
def test_documents_that_see_each_other_are_named(rows: str):
    (finding,) = findings(f"documents-visible-{rows}", "usual")
    assert [cause.name for cause in finding.causes] == ["packed-documents-see-each-other"]


@pytest.mark.parametrize("rows", ["restarting", "running"])
def test_right_block_mask_passes_with_any_positions(rows: str):
    assert findings("right", "usual", rows) == []
