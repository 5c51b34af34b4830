"""The training pass: hidden states of the page, packed documents apart, recomputed blocks with the same bits."""

import numpy as np
import pytest
import torch
from torch import nn

from llorch.builtin import builtin_path
from llorch.files import open_weights
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.load import load_dense
from llorch.pytorch.model import load_torch
from llorch.pytorch.sdpa import use_sdpa
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states
from llorch.train.batch import IGNORED, Batch

CPU = torch.device("cpu")
DOCUMENTS = ([3, 41, 5, 97, 60, 7], [9, 8, 11, 250, 6, 77, 12, 30, 31], [300, 2, 17])


class Tilted(nn.Module):
    """Something trained beside a frozen projection, with dropout: enough to have gradients and random numbers."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.tilt = nn.Parameter(torch.full((base.out_features,), 0.1, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(torch.dropout(x, 0.3, self.training)) * (1 + self.tilt)


def tilt(module: CausalLM, path: str) -> None:
    leaf = module.get_submodule(path)
    assert isinstance(leaf, nn.Linear)
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, Tilted(leaf))


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
    return Batch(ids, np.where(documents < 0, IGNORED, ids), positions, documents)


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
    want = alone(name)
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            got = hidden[r, at : at + len(DOCUMENTS[i])].detach().numpy()
            np.testing.assert_allclose(got, want[i], rtol=0, atol=1e-12)
            at += len(DOCUMENTS[i])


def test_a_document_longer_than_the_context_is_refused():
    long = batch([[list(range(5)) * 9000]])
    with pytest.raises(
        ValueError, match=r"a document of 45000 tokens does not fit the context of 40960; .*--max-length"
    ):
        hidden_states(model(), long, CPU)


def gradients(*, again: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
    module = model(dtype)
    for path in ("self_attn.q_proj", "mlp.up_proj"):
        for i in range(module.config.n_layers):
            tilt(module, f"model.layers.{i}.{path}")
    if again:
        checkpoint_gradients(module)
    torch.manual_seed(5)
    hidden = hidden_states(module.train(), batch([[DOCUMENTS[0]], [DOCUMENTS[1]]]), CPU)
    hidden.square().sum().backward()
    grads = [p.grad for p in module.parameters() if p.requires_grad]
    assert len(grads) == 4
    assert all(g is not None and bool(g.any()) for g in grads), "the graph is cut"
    return hidden.detach(), [g for g in grads if g is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_change_no_bit_with_dropout_too(dtype: torch.dtype):
    kept, recomputed = (gradients(again=again, dtype=dtype) for again in (False, True))
    assert torch.equal(kept[0], recomputed[0])
    assert all(torch.equal(a, b) for a, b in zip(kept[1], recomputed[1], strict=True))


def test_a_frozen_weight_gets_no_gradient():
    module = model(torch.float32)
    tilt(module, "model.layers.0.self_attn.q_proj")
    hidden_states(module, batch([[DOCUMENTS[0]]]), CPU).sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None] == [
        "model.layers.0.self_attn.q_proj.tilt"
    ]
