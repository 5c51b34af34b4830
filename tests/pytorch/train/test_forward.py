"""The training pass: hidden states of the page, and packed documents apart from each other."""

import numpy as np
import pytest
import torch
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.ops.rope import rope_tables
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.load import load_dense
from llorch.pytorch.model import load_torch
from llorch.pytorch.train.forward import hidden_states, place_of
from llorch.runtime.builtin import builtin_path
from llorch.training.batch import IGNORED, Batch

CPU = torch.device("cpu")
DOCUMENTS = ([3, 41, 5, 97, 60, 7], [9, 8, 11, 250, 6, 77, 12, 30, 31], [300, 2, 17])


def model(dtype: torch.dtype = torch.float64, name: str = "micro-qwen3") -> CausalLM:
    return load_dense(open_weights(builtin_path(name)), dtype=dtype, device=CPU)


def batch(rows: list[list[list[int]]]) -> Batch:
    """Rows of documents, padded at the end."""
    seq = max(sum(map(len, row)) for row in rows)
    ids, positions, documents = (np.full((len(rows), seq), fill) for fill in (0, -1, -1))
    for r, row in enumerate(rows):
        at = 0
        for d, document in enumerate(row):
            part = slice(at, at + len(document))
            ids[r, part], positions[r, part], documents[r, part] = document, np.arange(len(document)), d
            at += len(document)
    return Batch(ids, np.where(documents < 0, IGNORED, ids), positions, documents, np.arange(len(rows)))


def alone(name: str = "micro-qwen3") -> list[np.ndarray]:
    """The last norm of each document in a pass of its own, by the cached path."""
    whole = load_torch(builtin_path(name), dtype="float64", attention="eager")
    traces: list[dict[str, np.ndarray]] = [{} for _ in DOCUMENTS]
    for document, trace in zip(DOCUMENTS, traces, strict=True):
        whole.forward(document, trace=trace)
    return [trace["final_norm"] for trace in traces]


@pytest.mark.parametrize("name", ["micro-llama3", "micro-qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "rows", [[[0], [1], [2]], [[0, 2], [1]], [[1], [0, 2]], [[2, 1, 0]]], ids=["padded", "first", "second", "one row"]
)
def test_a_document_is_what_it_is_alone(rows: list[list[int]], attention: str, name: str):
    module = model(name=name)
    if attention == "sdpa":
        use_sdpa(module)
    hidden = hidden_states(module, batch([[DOCUMENTS[i] for i in row] for row in rows]), CPU)
    expected = alone(name)
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            actual = hidden[r, at : at + len(DOCUMENTS[i])].detach().numpy()
            np.testing.assert_allclose(actual, expected[i], rtol=0, atol=1e-12)
            at += len(DOCUMENTS[i])


def test_a_document_longer_than_the_context_is_refused():
    long = batch([[list(range(5)) * 9000]])
    with refuses(ValueError, 45000, 40960, "--max-length", where="train"):
        hidden_states(model(), long, CPU)


@pytest.mark.parametrize("longest", [1, 8, 9, 17])
def test_angles_have_the_bits_of_those_computed_for_their_positions(longest: int):
    module = model(torch.float32, "micro-llama3")
    one = batch([[list(range(longest)), [1, 2]], [[3]]])
    place = place_of(module, one, CPU)
    config, positions = module.config, one.positions.clip(min=0)
    kind = {"head_dim": config.rotated, "theta": config.rope_theta, "scaling": config.rope_scaling}
    for actual, table in zip((place.cos, place.sin), rope_tables(positions.reshape(-1), **kind), strict=True):
        assert np.array_equal(actual.numpy(), table.reshape(*positions.shape, -1).astype(np.float32))


def test_angles_are_not_those_of_another_model():
    one = batch([[[1, 2, 3, 4]]])
    first, other = (place_of(model(name=name), one, CPU) for name in ("micro-llama3", "micro-qwen2"))
    assert first.cos.shape != other.cos.shape or not torch.equal(first.cos, other.cos)
