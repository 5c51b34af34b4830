"""Which stages arrays are, under the names and in the layouts of the engines."""

from collections.abc import Mapping

import numpy as np
import pytest
from raw_dumps import as_llamacpp, as_transformers, golden_trace, raw_dump, weights_of

from llorch.builtin import BUILTIN
from llorch.dumps.mapping import mapping_of
from llorch.dumps.names import stage_dump
from llorch.dumps.stage_dump import StageDump


def check(dump: StageDump, trace: Mapping[str, np.ndarray]) -> None:
    for (_, key), seen in dump.seen.items():
        want = trace[key] if seen.tokens is None else trace[key][list(seen.tokens)]
        got = seen.read()
        assert got.shape == want.shape, key
        atol = 1e-6 * np.abs(want[np.isfinite(want)]).max()  # products of a scale that was undone
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("engine", ["ours", "transformers", "llamacpp", "llamacpp without operations"])
def test_every_stage_of_an_engine_is_found_under_its_own_name(model: str, engine: str):
    weights = weights_of(model)
    config = weights.config
    ids, trace = golden_trace(model, "transformers" if engine == "transformers" else "llamacpp")
    match engine:
        case "ours":
            arrays = trace
        case "transformers":
            arrays = as_transformers(trace, config)
        case _:
            arrays = as_llamacpp(trace, config, with_op="without" not in engine)
    dump = stage_dump(raw_dump(arrays, ids), config, weights=weights)
    of_ours = {key for key in trace if not (engine.startswith("llama") and key.endswith("_cache"))}
    assert {key for _, key in dump.seen} == of_ours
    check(dump, trace)


MINE = {
    "names": {"blk.{i}.rot_q": "q_rope", "blk.{i}.keys": "k_rope", "blk.{i}.att": "kq", "out": "logits", "tmp": ""},
    "layout": {"k_rope": {"axes": "batch kv_heads head_dim seq"}, "logits": {"transposed": True}},
}


def test_names_of_the_user_in_layouts_that_are_declared_or_found():
    weights = weights_of("micro-llama")
    config = weights.config
    ids, trace = golden_trace("micro-llama", "transformers")
    arrays = {
        "blk.0.rot_q": trace["l0.q_rope"].reshape(1, len(ids), -1),
        "blk.2.rot_q": trace["l2.q_rope"].reshape(-1),
        "blk.1.keys": trace["l1.k_rope"].transpose(1, 2, 0)[None],
        "blk.1.att": trace["l1.q_rope"].swapaxes(0, 1)
        @ np.repeat(trace["l1.k_cache"], config.group_size, 0).swapaxes(1, 2),
        "out": trace["logits"].T,
        "tmp": np.zeros(3),
    }
    dump = stage_dump(raw_dump(arrays, ids), config, mapping=mapping_of(MINE))
    assert {key for _, key in dump.seen} == {"l0.q_rope", "l2.q_rope", "l1.k_rope", "l1.attn_scores", "logits"}
    check(dump, trace)
    (note,) = dump.notes
    assert "q_rope (blk.2.rot_q, (2304,)) is read as seq heads head_dim, as in the table: values do not tell" in note
