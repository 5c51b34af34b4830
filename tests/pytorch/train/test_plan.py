import shutil
from pathlib import Path

import pytest
from helpers.training_runs import small_settings

from llorch.pytorch.train import plan as plans
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.trainer import Training


def test_plan_training_gives_every_setting_a_value(tmp_path: Path):
    plan = plan_training(small_settings(tmp_path, lr=None, max_length=None))
    assert None not in (plan.settings.lr, plan.settings.dtype, plan.settings.max_length, plan.settings.template_date)


def test_training_reads_no_data_after_its_plan_is_made(tmp_path: Path):
    plan = plan_training(small_settings(tmp_path))
    shutil.rmtree(tmp_path / "data")
    assert Training(plan).run_step().step == 1


def test_a_run_over_packed_matrices_is_another_one_without_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packed, decoded = (plan_training(small_settings(tmp_path, weights=weights)) for weights in ("packed", "decoded"))
    before, plain = packed.identity(), decoded.identity()
    monkeypatch.setattr(plans, "library", lambda: None)
    assert before | {"compiled_kernels": False} == packed.identity() != before
    assert plain == decoded.identity()
