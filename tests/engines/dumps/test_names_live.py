"""All nodes of a run of llama.cpp, under its own names: what an eval callback that keeps everything writes."""

import os

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, raw_array, raw_dump, weights_of

from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.engines.process import GGML_VARIABLES
from llorch.runtime.builtin import BUILTIN, builtin_path

pytestmark = pytest.mark.live


def all_nodes(model: str, ids: tuple[int, ...], *, with_op: bool) -> list[RawArray]:
    os.environ |= GGML_VARIABLES
    from llorch.engines import ggml_tensor
    from llorch.engines.llamacpp import LlamaCpp
    from llorch.engines.llamacpp_graph import GraphWatcher

    nodes: list[RawArray] = []

    class Everything:
        def stage_of(self, _tensor: ggml_tensor.GgmlTensor) -> str:
            return "wanted"

        def keep(self, tensor: ggml_tensor.GgmlTensor) -> None:
            op = ggml_tensor.op_name(tensor) if with_op else ""
            nodes.append(raw_array(tensor.name.decode(), ggml_tensor.copy_tensor(tensor), op=op))

    with LlamaCpp(builtin_path(model)) as engine:
        engine._logits(ids, 0, GraphWatcher(Everything()))  # type: ignore[arg-type] (what a capture is asked)
    return nodes


@pytest.mark.parametrize("with_op", [True, False])
@pytest.mark.parametrize("model", BUILTIN)
def test_every_stage_is_found_among_all_nodes_of_llamacpp(model: str, with_op: bool):
    weights = weights_of(model)
    ids, trace = golden_trace(model, "llamacpp")
    dump = stage_dump(raw_dump(all_nodes(model, ids, with_op=with_op), ids), weights.config, weights=weights)
    without = (
        ("k_cache", "v_cache") if with_op or weights.config.family == "llama" else ("k_cache", "v_cache", "attn_out")
    )
    assert {key for _, key in dump.dumped} == {key for key in trace if not key.endswith(without)}
    for (_, key), dumped in dump.dumped.items():
        expected = trace[key]
        size = np.abs(expected[np.isfinite(expected)]).max()
        np.testing.assert_allclose(dumped.read(), expected, rtol=0, atol=1e-5 * size, err_msg=key)
    assert not any("llorch diff --suggest" in note and "norm" in note for note in dump.notes)
