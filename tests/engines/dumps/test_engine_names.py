"""Stages behind the names of llorch, of llama.cpp's nodes, also all of a live run, and of Hugging Face's modules."""

import os

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, raw_array, raw_dump, weights_of

from llorch.engines.dumps.engine_names import Meaning, meaning_of, nameless
from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.engines.process import GGML_VARIABLES
from llorch.runtime.builtin import BUILTIN, builtin_path

QWEN = "micro-qwen2"  # three layers, with biases


@pytest.mark.parametrize(
    ("name", "layer", "stages", "found_in"),
    [
        ("q_rope", 2, ["q_rope"], 2),
        ("layers.1.attn_norm", None, ["attn_norm"], 1),
        ("l1.logits", None, None, None),
        ("q_rope", None, None, None),
        ("logits", 1, None, None),
        ("l1.x", None, None, None),
        ("l_out", 1, ["block_out"], 1),
        ("kq-0", None, ["kq"], 0),
        ("inp_embd", None, ["embed"], None),
        ("result_norm-1", None, None, None),
        ("node_14", None, None, None),
        ("model.layers.2", None, ["block_out"], 2),
        ("base_model.model.model.layers.2.mlp.down_proj.input", None, ["ffn_act"], 2),
        ("model.layers.2.mlp.down_proj.input.0", None, ["ffn_act"], 2),
        ("model.layers.2.self_attn", None, ["attn_out"], 2),
        ("input_layernorm", 1, ["attn_norm"], 1),
        ("model.norm", None, ["final_norm"], None),
        ("lm_head.output", None, ["logits"], None),
        ("lm_head", 1, None, None),
        ("model", None, None, None),
        ("model.layers.2.mlp.act_fn", None, None, None),
        ("model.layers.0.self_attn.qkv_proj", None, ["q_proj", "k_proj", "v_proj"], 0),
        ("hidden_states.0", None, ["embed"], None),
        ("hidden_states_2", None, ["block_out"], 1),
        ("hidden_states.3", None, ["final_norm"], None),
        ("attentions.1", None, ["attn_probs"], 1),
        ("past_key_values.1.0", None, ["k_cache"], 1),
        ("past_key_values.1.value", None, ["v_cache"], 1),
        ("past_key_values.1", None, None, None),
        ("attentions.1.key", None, None, None),
    ],
)
def test_engine_name_maps_to_layer_and_stages(
    name: str, layer: int | None, stages: list[str] | None, found_in: int | None
):
    meaning = meaning_of(name, layer, weights_of(QWEN).config, op="", nth=0, of=1)
    if stages is None:
        assert meaning is None
    else:
        assert meaning is not None
        assert ([*meaning.stages], meaning.layer) == (stages, found_in)
        assert ("final norm" in meaning.assumed) == (name == "hidden_states.3")


@pytest.mark.parametrize(
    ("model", "ops", "read_as"),
    [
        ("micro-llama", ["MUL_MAT", "RESHAPE", "ROPE"], ["q_proj", "", "q_rope"]),
        (QWEN, ["MUL_MAT", "ADD", "RESHAPE", "ROPE"], ["", "q_proj", "", "q_rope"]),
        ("micro-llama", ["", "", ""], ["q_proj", "", "q_rope"]),
        (QWEN, ["", "", "", ""], ["", "q_proj", "", "q_rope"]),
        (QWEN, [""], ["q_rope"]),
    ],
)
def test_qcur_nodes_are_identified_by_operation_or_order(model: str, ops: list[str], read_as: list[str]):
    config = weights_of(model).config
    found = [meaning_of("Qcur-1", None, config, op=op, nth=nth, of=len(ops)) for nth, op in enumerate(ops)]
    assert ["".join(each.stages) if each else "?" for each in found] == read_as
    assert [bool(each and each.assumed) for each in found] == [not ops[0] and bool(stage) for stage in read_as]
    values = [meaning_of("Vcur-1", None, config, op="", nth=nth, of=2) for nth in (0, 1)]
    assert ["".join(each.stages) if each else "?" for each in values] == ["", "v_proj"]


@pytest.mark.parametrize(
    ("name", "op", "previous", "stages"),
    [
        ("node_31", "FLASH_ATTN_EXT", Meaning(("v_proj",), 2, True), ("attn_context",)),
        ("node_33", "MUL_MAT", Meaning(("attn_context",), 2, True), ("attn_out",)),
        ("node_33", "MUL_MAT", Meaning(("attn_norm",), 2, True), None),
        ("node_33", "GET_ROWS", Meaning(("attn_context",), 2, True), None),
        ("mine", "MUL_MAT", Meaning(("attn_context",), 2, True), None),
        ("node_33", "MUL_MAT", None, None),
        ("node_0", "MUL_MAT", Meaning(("embed",), None, True), None),
    ],
)
def test_unnamed_node_is_identified_by_its_predecessor(
    name: str, op: str, previous: Meaning | None, stages: tuple[str, ...] | None
):
    meaning = nameless(name, op, previous, weights_of(QWEN).config)
    assert meaning == (Meaning(stages, 2, by_llamacpp=True) if stages else None)


@pytest.mark.parametrize("name", ["norm", "norm-0", "kqv-1", "Kcur-0 (view)", "cache_v_l1 (reshaped) (view)"])
def test_other_nodes_of_llamacpp_map_to_no_stage(name: str):
    assert meaning_of(name, None, weights_of(QWEN).config, op="", nth=0, of=1) == Meaning((), by_llamacpp=True)


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


@pytest.mark.live
@pytest.mark.parametrize("with_op", [True, False])
@pytest.mark.parametrize("model", BUILTIN)
def test_every_stage_is_identified_among_all_llamacpp_nodes(model: str, with_op: bool):
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
