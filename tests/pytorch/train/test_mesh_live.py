"""Checkpoints 15 to 20 on four ranks that share each layer: PEFT runs now, as no stored golden has four KV heads."""

import importlib
from pathlib import Path

import pytest
from helpers.mesh_training import compare_live

from llorch.pytorch.distributed.launch import on_ranks
from llorch.runtime.builtin import goldens_folder

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]


@pytest.mark.nightly_cases(but=["float64"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_training_on_four_ranks_of_a_layer_is_that_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    monkeypatch.syspath_prepend(str(goldens_folder()))
    golden = importlib.import_module("make_training").make_training("micro-llama3")
    n_rows, failed = on_ranks(4, compare_live, "micro-llama3", golden, {"dp": 1, "tp": 4}, dtype)
    assert failed == []
    assert n_rows > 500
