"""Causes that one number of a training dump would fit: a setting needs a second number, a known mistake a close one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import assert_tells
from helpers.without_gaps import without_gaps

from benchmarks.diagnosis.training_bugs import BUGS
from benchmarks.diagnosis.training_cases import TrainingCase, micro_batch, score
from llorch.diagnosis.mistakes.mistake import injected
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.training.hypotheses import partly_applied
from llorch.diagnosis.verdict import Finding
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.training_dump import split_documents
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.lora.adapter import LoraTensors
from llorch.runtime.builtin import builtin_path
from llorch.training.numpy_step import loss_and_gradients

BY_NAME = {bug.name: bug for bug in BUGS}


def findings(name: str, style: str) -> list[Finding]:
    with without_gaps():
        return list(score(TrainingCase(BY_NAME[name], "micro-qwen3", style)).diagnosis.findings)


def test_setting_that_one_number_fits_is_no_cause():
    (finding,) = findings("eight-times", "one-loss")
    assert (finding.kind, finding.causes, finding.near_misses) == ("unknown", (), ())
    assert_tells(finding.sentence, "logits", "token_losses", "grad.*", "second step", "step0.param.*")


def test_setting_that_two_numbers_fit_is_the_cause():
    (finding,) = findings("eight-times", "losses")
    assert [(cause.name, float(cause.value)) for cause in finding.causes] == [("loss-normalisation", pytest.approx(8))]


@pytest.mark.parametrize(
    ("name", "cause"), [("adapter-off", "lora-delta-missing"), ("adapter-off-v_proj", "lora-partly-applied")]
)
def test_known_mistake_is_named_by_one_number(name: str, cause: str):
    (finding,) = findings(name, "one-loss")
    assert [cause.name for cause in finding.causes] == [cause]
    assert np.isclose(finding.causes[0].explained_share, 1.0, atol=1e-4)


@pytest.mark.parametrize(("offset", "names"), [(0.0, ["lora-partly-applied"]), (1e-5, [])])  # tolerance: 1.7e-5
def test_mistake_that_fits_one_number_roughly_is_no_cause(offset: float, names: list[str], tmp_path: Path):
    weights = open_weights(builtin_path("micro-llama"))
    adapter, rows = make_adapter(weights.config), micro_batch(weights.config.vocab_size, 1, "ragged")
    small = {name: LoraTensors(lora.lora_A, lora.lora_B * np.float32(0.03)) for name, lora in adapter.tensors.items()}
    adapter, (batch, _) = replace(adapter, tensors=small), split_documents(**rows)
    with injected(next(iter(partly_applied(adapter)))):
        loss, _ = loss_and_gradients(weights.astype(np.float64), replace(adapter), [batch], label_smoothing=0.0)
    np.savez(tmp_path / "dump.npz", allow_pickle=False, loss=np.float64(loss * (1 + offset)), **rows)
    with without_gaps():
        dump_findings = diagnose_training(weights, adapter, open_raw(tmp_path / "dump.npz")).findings
    assert [cause.name for finding in dump_findings for cause in finding.causes] == names
