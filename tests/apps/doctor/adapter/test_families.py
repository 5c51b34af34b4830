"""The doctor beside matrices that share an adapter, beside experts, and beside models without a tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
from builders.family_adapters import family_adapter
from builders.random_adapters import random_adapter, tiny_base
from helpers.refusals import assert_tells

from llorch.apps.doctor.adapter import examine
from llorch.apps.doctor.adapter.checks import check_run
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.lora.base import identity_of
from llorch.lora.merge import MergedWeights
from llorch.lora.peft_format import write_peft
from llorch.runtime.builtin import builtin_path


@pytest.mark.parametrize("model", ["micro-qwen3-next", "micro-qwen3.5-moe", "micro-qwen2-moe"])
def test_what_an_adapter_adds_is_what_merging_adds(model: str, tmp_path: Path):
    weights = open_weights(builtin_path(model))
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path, base=identity_of(weights))
    found = {finding.check: finding for finding in examine(tmp_path, builtin_path(model), against=())}
    assert {finding.verdict for finding in found.values()} <= {"ok", "warning", "NOT RUN"}
    merged, largest = MergedWeights(weights, adapter), 0.0
    for target in adapter.targets.values():
        base, new = ([w.read(part.name).ravel() for part in target.parts] for w in (weights, merged))
        before, after = np.concatenate(base), np.concatenate(new)
        largest = max(largest, float(np.linalg.norm(after - before) / np.linalg.norm(before)))
    assert_tells(found["size of the change"].text, f"{largest:.2%}")


def test_a_run_on_a_model_without_a_tokenizer_is_examined_all_the_same(tmp_path: Path):
    base = tiny_base(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    settings = {"model": str(base), "data": str(tmp_path / "rows.jsonl")}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    end, data = check_run(tmp_path, open_weights(base))
    assert end.verdict == "NOT RUN"
    assert "tokenizer.json" in end.text
    assert data.check == "training data"


def test_an_engine_that_computes_the_base_otherwise_is_not_run(tmp_path: Path):
    convert(builtin_path("micro-qwen2"), tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    config.write_text(json.dumps(json.loads(config.read_text()) | window))
    weights = open_weights(tmp_path / "base")
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    last = examine(tmp_path / "adapter", tmp_path / "base", against=("llamacpp",))[-1]
    assert (last.check, last.verdict) == ("logits in llama.cpp", "NOT RUN")
    assert_tells(last.text, "llama.cpp", "sliding_window", "qwen2", 4)
