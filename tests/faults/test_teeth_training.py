"""Mistakes in the running code turn their checkpoint (15 to 20) red first, and by far."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.fault import InjectedFault, assert_seen
from faults.into_training import over_in_half
from faults.table import LESS_IN_HALF, NOT_IN_HALF, TORCH_TRAINING, TRAINING_FAULTS, TRAINING_FLOAT64
from helpers.kept_suites import reuse_suites

from checkpoints.generated.pages import FOLDER, porting_page
from llorch.diagnosis.mistakes import MISTAKES
from llorch.diagnosis.mistakes.planting import find_owner
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.stages.training import BY_GROUP

# A keyword with another number does not read this file, because it has these names.
NAMES = ("checkpoint_15", "checkpoint_16", "checkpoint_17", "checkpoint_18", "checkpoint_19", "checkpoint_20")


@pytest.fixture(autouse=True, scope="module")
def limits_are_derived_once() -> Iterator[None]:
    with reuse_suites():
        yield


def by_name(fault: InjectedFault) -> str:
    numbers = MISTAKES[fault.name].checkpoints
    return "_".join((*(name for name in NAMES if name[-2:] in numbers), fault.name))


@pytest.mark.parametrize("fault", TRAINING_FAULTS, ids=by_name)
def test_mistake_of_training_goes_red_by_far_at_its_checkpoint_first(
    fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mistake = MISTAKES[fault.name]
    owner, name = find_owner(mistake.part)
    assert callable(getattr(owner, name))
    assert set(mistake.stages) <= BY_GROUP.keys()
    largest = max(map(over_in_half, assert_seen(fault, monkeypatch, tmp_path)))  # in bfloat16, of which page 17 tells
    if mistake.name in NOT_IN_HALF:
        assert largest < 1
    else:
        assert largest >= (1 if mistake.name in LESS_IN_HALF else VISIBLE), f"{largest:.1f} times the tolerance"


def test_page_17_names_the_mistakes_that_bfloat16_hardly_shows():
    text = porting_page(FOLDER, "17").read_text(encoding="utf-8").split("## In bfloat16")[1].split("\n## ")[0]
    assert {fault.name for fault in TRAINING_FAULTS if f"`{fault.name}`" in text} == LESS_IN_HALF | NOT_IN_HALF
    assert f"{len(TRAINING_FAULTS) - len(LESS_IN_HALF | NOT_IN_HALF)} of {len(TRAINING_FAULTS)}" in text


@pytest.mark.slow_cases(but=[
    "lora-alpha-not-divided-float32", "lora-scaled-twice-bfloat16", "loss-labels-not-shifted-float32",
    "loss-smoothing-missing-bfloat16",
])  # fmt: skip
@pytest.mark.parametrize("fault", TORCH_TRAINING, ids=lambda fault: f"{fault.name}-{fault.dtype}")
def test_mistake_of_training_in_torch_goes_red_by_far_at_its_checkpoint_first(
    fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert_seen(fault, monkeypatch, tmp_path)


@pytest.mark.slow_cases(
    "llorch.ops.attention.att*", "llorch.ops.cross_entropy.cross_entropy_*", "llorch.ops.lora.lora_backward",
    "llorch.ops.rms_norm.rms_*", "llorch.ops.rope.rope_backward", "llorch.ops.swiglu.swiglu_backward",
    "llorch.pytorch.lora.modules.delta-as-trainer", "llorch.pytorch.lora.modules.DeltaFunction*",
    "llorch.pytorch.train.adamw.AdamW.clip*", "llorch.pytorch.train.adamw.AdamW.step", "llorch.pytorch.train.step.*",
)  # fmt: skip
@pytest.mark.parametrize("fault", TRAINING_FLOAT64, ids=lambda fault: "-".join((fault.name, *fault.variant.split())))
def test_one_part_in_a_million_is_far_over_the_limit_of_float64(
    fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert_seen(fault, monkeypatch, tmp_path)
