"""`llorch bench`."""

import json

import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses

from llorch.apps.bench import measure as bench
from llorch.cli import bench as verb
from llorch.families.real_shapes import SHAPES
from llorch.judging.expectations.quantised_models import write_model
from llorch.pytorch import memory
from llorch.pytorch.kernels.packing import PACKERS

SHORT = ("--prompt", "5", "--decode", "2", "--rounds", "1")


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's ceilings are not what is tested; a copy of 256 MB takes its time under ten tests."""
    monkeypatch.setitem(bench.COPY_BYTES, "cpu", 1 << 12)
    monkeypatch.setitem(bench.PRODUCT_WIDTH, "cpu", 16)


@pytest.mark.parametrize(
    "backend", [(), ("--backend", "torch"), ("--backend", "torch", "--dtype", "bfloat16", "--batch", "2")]
)
def test_speeds_rates_and_shares_are_printed(backend: tuple[str, ...]):
    result = invoke("bench", "micro-llama", *SHORT, *backend)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("micro-llama, ")
    assert [line.split()[0] for line in lines[4:]] == ["prefill", "decode"]
    assert "tokens/s" in lines[4]
    assert "of the copy" in lines[5]
    assert "of the product" in lines[5]


@pytest.mark.parametrize("backend", [(), ("--backend", "torch")])
def test_json_has_what_is_needed_to_repeat_the_run(backend: tuple[str, ...]):
    result = invoke("bench", *SHORT, "--json", *backend)
    made = json.loads(result.stdout)
    assert (made["model"], made["prompt"], made["decoded"], made["batch"], made["rounds"]) == ("story", 5, 2, 1, 1)
    assert made["versions"]["numpy"]
    assert made["device_name"]
    assert made["date"].startswith("20")
    assert made["backend"] == ("torch-cpu-float32" if backend else "numpy")


def test_a_packed_file_is_measured_packed(tmp_path):
    path = str(write_model("Q8_0", tmp_path))
    result = invoke("bench", path, *SHORT, "--backend", "torch", "--weights", "packed", "--json")
    assert json.loads(result.stdout)["weights"] == "Q8_0"


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1e9)
    result = invoke("bench", "--shape", "llama-2-7b", "--backend", "torch")
    assert_cli_refuses(result, 4, "27.5 GB", "1.0 GB", "cpu", "--shape")
    assert result.stderr.startswith("llorch: bench: weights of llama-2-7b need ")


def test_the_names_of_shapes_are_those_of_the_module():
    assert tuple(SHAPES) == verb.SHAPES
    assert {kind.name for kind in PACKERS} == set(verb.TYPES)
