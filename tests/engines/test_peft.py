"""The producer `peft`: what it shows is what PEFT and torch themselves say in another way."""

import numpy as np
import pytest
import safetensors.numpy as container
from planted_training import training_golden_of, weights_of
from random_adapters import IDS, adapted_logits, random_adapter, tiny_base
from refusals import refuses

from llorch.builtin import builtin_path
from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.verify.training.claims import claims
from llorch.verify.training.limits import GATE
from llorch.verify.training.places import ISOLATED, at
from llorch.verify.training.recipe import LORA, OPTIMIZER, with_zero_b

pytestmark = pytest.mark.live
MODEL = "micro-qwen3"


@pytest.fixture(scope="module")
def producer():
    from llorch.engines.peft import Peft

    return Peft(builtin_path(MODEL), n_threads=1)


def test_deltas_are_peft_s_own_delta_weight_times_the_input(producer):
    import torch

    adapter = training_golden_of(MODEL).adapter_for(weights_of(MODEL).config)
    seen = producer.forward(adapter, training_golden_of(MODEL).batches[0])
    layer = producer.adapted(adapter).base_model.model.model.layers[1]
    for path, source in (("self_attn.v_proj", "attn_norm"), ("mlp.down_proj", "ffn_act")):
        weight = layer.get_submodule(path).get_delta_weight("default").detach()
        want = torch.from_numpy(seen[at(source, 1)]) @ weight.T
        np.testing.assert_allclose(seen[at("lora_delta", 1, path.rpartition(".")[2])], want, atol=2e-6)


def test_an_adapter_with_b_zero_leaves_the_base(producer):
    from llorch.engines import open_producer

    golden = training_golden_of(MODEL)
    fresh = with_zero_b(golden.adapter_for(weights_of(MODEL).config))
    seen = producer.forward(fresh, golden.batches[0])[at("adapted_logits")]
    with open_producer("transformers", builtin_path(MODEL), n_threads=1) as base:
        rows = [base.logits(ids) for ids in golden.rows[0].ids]
    np.testing.assert_allclose(seen, np.concatenate(rows), rtol=0, atol=2e-5)


def test_the_norm_is_that_of_the_gradients_before_clipping(producer):
    golden = training_golden_of(MODEL)
    adapter = golden.adapter_for(weights_of(MODEL).config, LORA)
    found = producer.steps(adapter, [[golden.batches[0]]], OPTIMIZER, shown=(1,))
    grads = [array for place, array in found.items() if place.stage == "given"]
    assert len(grads) == len(adapter.flat())
    norm = np.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads))
    np.testing.assert_allclose(found[at("grad_norm", case="step 1")], norm, rtol=1e-6)
    assert norm > OPTIMIZER.max_norm


def test_the_stored_truth_of_isolated_stages_is_peft_in_float64_running_now():
    from llorch.engines.float64_everywhere import float64_everywhere
    from llorch.engines.peft import Peft
    from llorch.engines.peft_isolated import Isolated

    golden = training_golden_of(MODEL)
    with float64_everywhere():
        made = Isolated(Peft(builtin_path(MODEL), n_threads=1, dtype="float64"), golden).arrays()
    config = weights_of(MODEL).config
    stored = {claim.place: claim for claim in claims(golden, config, "float64") if claim.mode == ISOLATED}
    assert made.keys() == stored.keys()
    assert {array.dtype for array in made.values()} == {np.dtype(np.float64)}
    assert max(stored[place].difference(array).error for place, array in made.items()) < GATE


def test_float64_outside_of_the_mode_that_widens_everything_is_refused():
    from llorch.engines.peft import Peft

    with refuses(RuntimeError, "float64", "float64_everywhere", where="peft"):
        Peft(builtin_path(MODEL), n_threads=1, dtype="float64")


@pytest.fixture
def made(tmp_path):
    base = tiny_base(tmp_path / "base")
    weights = open_weights(base)
    adapter = random_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    return base, tmp_path / "adapter", adapter


def test_a_gguf_base_serves_as_well_as_a_folder(made, tmp_path):
    from llorch.engines.peft import peft_logits

    base, folder, adapter = made
    write_gguf(open_weights(base), tmp_path / "base.gguf")
    for model in (base, tmp_path / "base.gguf"):
        want = adapted_logits(base, adapter)
        np.testing.assert_allclose(peft_logits(model, folder, IDS), want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_keys_that_fit_nothing_are_an_error_where_peft_only_warns(made):
    from llorch.engines.peft import peft_logits

    base, folder, _ = made
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace("q_proj", "query"): array for name, array in container.load_file(path).items()}
    container.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RuntimeError, match="missing adapter keys"):
        peft_logits(base, folder, IDS)
