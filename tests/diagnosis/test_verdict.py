"""What a diagnosis consists of."""

from typing import Any

import pytest

from llorch.diagnosis.verdict import Diagnosis, Finding


@pytest.mark.parametrize(("kinds", "right"), [((), True), (("honest",), True), (("honest", "unknown"), False)])
def test_a_dump_is_right_when_all_that_was_found_is_arithmetic(kinds: Any, right: bool):
    findings = [Finding(kind, "embed", 0, ("embed",), (), (), (), (), "") for kind in kinds]
    assert Diagnosis("m", "d", [], findings, {}).is_right == right
