import shutil
from pathlib import Path

from runs.training_runs import small_settings

from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.trainer import Training


def test_plan_training_leaves_no_setting_without_a_value(tmp_path: Path):
    plan = plan_training(small_settings(tmp_path, lr=None, max_length=None))
    assert None not in (plan.settings.lr, plan.settings.dtype, plan.settings.max_length, plan.settings.template_date)


def test_training_reads_no_data_after_its_plan_is_made(tmp_path: Path):
    plan = plan_training(small_settings(tmp_path))
    shutil.rmtree(tmp_path / "data")
    assert Training(plan).run_step().step == 1
