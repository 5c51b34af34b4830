"""The reference engine `peft`: its outputs equal those that PEFT and torch give in another way."""

import json

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.stored_goldens import training_golden_of, training_weights_of

from llorch.files.convert import convert
from llorch.judging.expectations.training import make_expectations
from llorch.judging.expectations.training_refs import ISOLATED, at
from llorch.judging.goldens.training_recipe import LORA, OPTIMIZER, with_zero_b
from llorch.judging.tolerances.training import FLOAT64_TOLERANCE
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.live
MODEL = "micro-qwen3"


@pytest.fixture(scope="module")
def engine():
    from reference_outputs.peft_reference import Peft

    return Peft(builtin_path(MODEL), n_threads=1)


def test_deltas_are_peft_s_own_delta_weight_times_the_input(engine):
    import torch

    adapter = training_golden_of(MODEL).adapter_for(training_weights_of(MODEL).config)
    seen = engine.forward(adapter, training_golden_of(MODEL).batches[0])
    layer = engine.adapted(adapter).base_model.model.model.layers[1]
    for path, source in (("self_attn.v_proj", "attn_norm"), ("mlp.down_proj", "ffn_act")):
        weight = layer.get_submodule(path).get_delta_weight("default").detach()
        expected = torch.from_numpy(seen[at(source, 1)]) @ weight.T
        np.testing.assert_allclose(seen[at("lora_delta", 1, path.rpartition(".")[2])], expected, atol=2e-6)


def test_the_base_trains_without_the_dropout_of_its_config(tmp_path):
    from reference_outputs.peft_reference import Peft

    folder = tmp_path / "base"
    convert(builtin_path(MODEL), folder)
    config = json.loads((folder / "config.json").read_text())
    golden, seen = training_golden_of(MODEL), []
    for share in (0.0, 0.5):
        (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": share}))
        adapter = golden.adapter_for(training_weights_of(MODEL).config)
        seen.append(Peft(folder, n_threads=1).forward(adapter, golden.batches[0])[at("adapted_logits")])
    np.testing.assert_array_equal(*seen)


def test_adapter_with_zero_b_gives_the_base_logits(engine):
    from llorch.engines import open_engine

    golden = training_golden_of(MODEL)
    fresh = with_zero_b(golden.adapter_for(training_weights_of(MODEL).config))
    seen = engine.forward(fresh, golden.batches[0])[at("adapted_logits")]
    with open_engine("transformers", builtin_path(MODEL), n_threads=1) as base:
        rows = [base.logits(ids) for ids in golden.stored_batches[0].ids]
    np.testing.assert_allclose(seen, np.concatenate(rows), rtol=0, atol=2e-5)


def test_the_norm_is_that_of_the_gradients_before_clipping(engine):
    golden = training_golden_of(MODEL)
    adapter = golden.adapter_for(training_weights_of(MODEL).config, LORA)
    found = engine.steps(adapter, [[golden.batches[0]]], OPTIMIZER, recorded_steps=(1,))
    grads = [array for place, array in found.items() if place.stage == "given"]
    assert len(grads) == len(adapter.flat())
    norm = np.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads))
    np.testing.assert_allclose(found[at("grad_norm", case="step 1")], norm, rtol=1e-6)
    assert norm > OPTIMIZER.max_norm


def test_stored_isolated_reference_equals_a_new_peft_float64_run():
    from llorch.engines.transformers_capture import float64_everywhere
    from reference_outputs.peft_isolated import Isolated
    from reference_outputs.peft_reference import Peft

    golden = training_golden_of(MODEL)
    with float64_everywhere():
        made = Isolated(Peft(builtin_path(MODEL), n_threads=1, dtype="float64"), golden).arrays()
    every = make_expectations(golden, training_weights_of(MODEL).config, "float64")
    stored = {expectation.stage_ref: expectation for expectation in every if expectation.mode == ISOLATED}
    assert made.keys() == stored.keys()
    assert {array.dtype for array in made.values()} == {np.dtype(np.float64)}
    assert max(stored[stage_ref].difference(array).error for stage_ref, array in made.items()) < FLOAT64_TOLERANCE


def test_float64_outside_of_the_mode_that_widens_everything_is_refused():
    from reference_outputs.peft_reference import Peft

    with refuses(RuntimeError, "float64", "float64_everywhere", where="peft"):
        Peft(builtin_path(MODEL), n_threads=1, dtype="float64")
