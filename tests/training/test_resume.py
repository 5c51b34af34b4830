"""What has to be equal for a run to be resumed, and how a difference is told."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import refuses

from llorch.training.resume import differences, environment, require_same

SAVED: dict[str, Any] = {
    "base": "ab12",
    "data": "cd34",
    "total_steps": 30,
    "settings": {"lr": 1e-3, "target_modules": ["q_proj", "v_proj"], "dropout": 0.1, "max_length": None, "dora": False},
    "environment": {"threads": 2, "packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "tf32_matmul": False},
}


def changed(name: str, value: object) -> dict[str, Any]:
    values = deepcopy(SAVED)
    *above, last = name.split(".")
    inner = values
    for key in above:
        inner = inner[key]
    inner[last] = value
    return values


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("base", "ffff", "base: saved ab12, now ffff"),
        ("data", "ffff", "data: saved cd34, now ffff"),
        ("total_steps", 31, "total_steps: saved 30, now 31"),
        ("settings.lr", 2e-3, "settings.lr: saved 0.001, now 0.002"),
        ("settings.target_modules", ["q_proj"], "settings.target_modules: saved ['q_proj', 'v_proj'], now ['q_proj']"),
        ("settings.max_length", 64, "settings.max_length: saved None, now 64"),
        ("settings.dora", 0, "settings.dora: saved False, now 0"),
        ("settings.new", 1, "settings.new: saved nothing, now 1"),
        ("environment.threads", 4, "environment.threads: saved 2, now 4"),
        ("environment.packages.torch", "2.14.0", "environment.packages.torch: saved 2.13.0, now 2.14.0"),
        ("environment.packages", {}, "environment.packages.torch: saved 2.13.0, now nothing"),
        ("base", "f" * 99, "base: saved ab12, now " + "f" * 57 + "..."),
    ],
)
def test_a_difference_is_named_with_both_values(name: str, value: object, line: str):
    assert line in differences(SAVED, changed(name, value)).values()


def test_nothing_differs_from_itself_and_tuples_are_the_lists_that_json_makes_of_them():
    assert differences(SAVED, deepcopy(SAVED)) == {}
    assert differences({"a": [1, 2]}, {"a": (1, 2)}) == {}


def test_a_changed_run_is_refused_with_all_differences_and_the_remedy(tmp_path: Path):
    now = changed("base", "ffff") | {"data": "eeee"}
    both = differences(SAVED, now)
    assert len(both) == 2
    with refuses("Inconsistent", *both.values(), "--allow-change", where=tmp_path) as caught:
        require_same(SAVED, now, allow_change=False, path=tmp_path)
    assert caught.value.path == tmp_path


def test_allowed_changes_are_given_back_for_the_record(tmp_path: Path):
    now = changed("environment.threads", 4)
    assert require_same(SAVED, now, allow_change=True, path=tmp_path) == ["environment.threads: saved 2, now 4"]
    assert require_same(SAVED, SAVED, allow_change=False, path=tmp_path) == []


def test_the_environment_follows_the_switches_of_torch():
    before, threads = environment("cpu"), torch.get_num_threads()
    assert before["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    torch.set_num_threads(threads + 1)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = differences(before, environment("cpu"))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert [*found.values()] == [
        f"threads: saved {threads}, now {threads + 1}",
        f"float32_matmul_precision: saved {precision}, now medium",
    ]


@pytest.mark.gpu
def test_the_environment_of_a_device_holds_the_switches_of_cuda():
    before = environment("cuda:0")
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not allowed
    try:
        found = differences(before, environment("cuda:0"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert f"tf32_matmul: saved {allowed}, now {not allowed}" in found.values()
