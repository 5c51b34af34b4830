"""Faults in the torch path turn the right row of checkpoint 14 red first, and by far in float32."""

from pathlib import Path

import pytest
from faults.fault import InjectedFault, assert_seen
from faults.table import TORCH


def by_name(fault: InjectedFault) -> str:
    """Name a fault with its checkpoint; in a right run, the comparisons and the variant."""
    if fault.name == "none":
        return f"none-{fault.rows}{fault.variant}"
    dtype = "" if fault.dtype == "float32" else f"{fault.dtype}_"
    return f"{dtype}checkpoint_14_{fault.check.first[0]}_{fault.name.replace(' ', '-')}"


@pytest.mark.slow_cases(but=[
    "none-*", "checkpoint_14_*", "bfloat16_checkpoint_14_01b_positi*",
    "bfloat16_checkpoint_14_01b_rope-of-keys-missing", "bfloat16_checkpoint_14_04_mask-of*",
    "bfloat16_checkpoint_14_08_tied-head-not-tied",
])  # fmt: skip
@pytest.mark.parametrize("fault", TORCH, ids=by_name)
def test_a_fault_in_torch_is_red_where_it_is(fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert_seen(fault, monkeypatch, tmp_path)
