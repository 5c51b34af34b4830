"""The producer `peft`: what it shows is what PEFT and torch themselves say in another way."""

import numpy as np
import pytest
from planted_training import training_golden_of, weights_of

from llorch.builtin import builtin_path
from llorch.verify.training.judge import difference
from llorch.verify.training.limits import GATE
from llorch.verify.training.recipe import LORA, OPTIMIZER, with_zero_b
from llorch.verify.training.stages import Key

pytestmark = pytest.mark.live
MODEL = "micro-qwen3"


@pytest.fixture(scope="module")
def producer():
    from llorch.verify.witnesses.peft import Peft

    return Peft(builtin_path(MODEL), n_threads=1)


def test_deltas_are_peft_s_own_delta_weight_times_the_input(producer):
    import torch

    adapter = training_golden_of(MODEL).adapter_for(weights_of(MODEL).config)
    seen = producer.forward(adapter, training_golden_of(MODEL).batches[0])
    layer = producer.adapted(adapter).base_model.model.model.layers[1]
    for path, source in (("self_attn.v_proj", "attn_norm"), ("mlp.down_proj", "ffn_act")):
        weight = layer.get_submodule(path).get_delta_weight("default").detach()
        want = torch.from_numpy(seen[f"l1.{source}"]) @ weight.T
        np.testing.assert_allclose(seen[f"l1.lora_delta.{path.rpartition('.')[2]}"], want, atol=2e-6)


def test_an_adapter_with_b_zero_leaves_the_base(producer):
    from llorch.verify.witnesses import open_producer

    golden = training_golden_of(MODEL)
    fresh = with_zero_b(golden.adapter_for(weights_of(MODEL).config))
    seen = producer.forward(fresh, golden.batches[0])["adapted_logits"]
    with open_producer("transformers", builtin_path(MODEL), n_threads=1) as base:
        rows = [base.logits(ids) for ids in golden.rows[0].ids]
    np.testing.assert_allclose(seen, np.concatenate(rows), rtol=0, atol=2e-5)


def test_the_norm_is_that_of_the_gradients_before_clipping(producer):
    golden = training_golden_of(MODEL)
    adapter = golden.adapter_for(weights_of(MODEL).config, LORA)
    found = producer.steps(adapter, [[golden.batches[0]]], OPTIMIZER, shown=(1,))[1]
    grads = [array for name, array in found.items() if ".given." in name]
    assert len(grads) == len(adapter.flat())
    norm = np.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads))
    np.testing.assert_allclose(found["grad_norm"], norm, rtol=1e-6)
    assert norm > OPTIMIZER.max_norm


def test_the_stored_truth_of_isolated_stages_is_peft_in_float64_running_now():
    from llorch.verify.witnesses.peft import Peft
    from llorch.verify.witnesses.peft_isolated import Isolated
    from llorch.verify.witnesses.wide import float64_everywhere

    golden = training_golden_of(MODEL)
    with float64_everywhere():
        made = Isolated(Peft(builtin_path(MODEL), n_threads=1, dtype="float64"), golden).arrays()
    stored = golden.truth["isolated"]
    assert made.keys() == stored.keys()
    assert {array.dtype for array in made.values()} == {np.dtype(np.float64)}
    assert max(difference(made[key], stored[key], Key.of(key).group).error for key in made) < GATE


def test_float64_outside_of_the_mode_that_widens_everything_is_refused():
    from llorch.verify.witnesses.peft import Peft

    with pytest.raises(RuntimeError, match="must be made inside float64_everywhere"):
        Peft(builtin_path(MODEL), n_threads=1, dtype="float64")
