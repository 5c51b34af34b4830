"""Names and layouts of engines are mapped to stages, and arrays to the tokens of a run."""

from collections.abc import Mapping

import numpy as np
import pytest
from builders.raw_dumps import as_llamacpp, as_transformers, golden_trace, raw_array, raw_dump, weights_of
from helpers.refusals import Refusal, assert_tells, row

from llorch.engines.dumps.ids import ids_from_embedding
from llorch.engines.dumps.layout import to_half_split
from llorch.engines.dumps.mapping import NameMap, mapping_of
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.files import Weights
from llorch.files.tensor_names import interleave
from llorch.ops.rope import rope, rope_tables
from llorch.runtime.builtin import BUILTIN
from llorch.stages.stage_ref import Tokens


def check(dump: StageDump, trace: Mapping[str, np.ndarray]) -> None:
    for (_, key), dumped in dump.dumped.items():
        expected = trace[key] if dumped.tokens is None else trace[key][list(dumped.tokens)]
        actual = dumped.read()
        assert actual.shape == expected.shape, key
        atol = 1e-6 * np.abs(expected[np.isfinite(expected)]).max()  # products of a scale that was undone
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=key)


@pytest.mark.slow_cases(
    but=["llamacpp-micro-qwen2", "ours-micro-llama3", "ours-micro-qwen2", "transformers-micro-llama"]
)
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("engine", ["ours", "transformers", "llamacpp", "llamacpp without operations"])
def test_every_stage_is_found_under_its_engine_name(model: str, engine: str):
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
    assert {key for _, key in dump.dumped} == of_ours
    check(dump, trace)


MINE = {
    "names": {"blk.{i}.rot_q": "q_rope", "blk.{i}.keys": "k_rope", "blk.{i}.att": "kq", "out": "logits", "tmp": ""},
    "layout": {"k_rope": {"axes": "batch kv_heads head_dim seq"}, "logits": {"transposed": True}},
}


def test_user_names_map_with_declared_or_detected_layouts():
    config = weights_of("micro-llama").config
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
    assert {key for _, key in dump.dumped} == {"l0.q_rope", "l2.q_rope", "l1.k_rope", "l1.attn_scores", "logits"}
    check(dump, trace)
    (note,) = dump.notes
    assert_tells(note, "q_rope (blk.2.rot_q, (2304,))", "seq heads head_dim", "table")


def ambiguous_heads() -> tuple[Weights, tuple[int, ...], Mapping[str, np.ndarray]]:
    """A model of twelve heads, and twelve tokens."""
    weights = weights_of("micro-llama3")
    ids, trace = golden_trace("micro-llama3", "transformers")
    assert len(ids) == weights.config.n_heads
    return weights, ids, trace


def rotate_interleaved(heads: np.ndarray, weights: Weights) -> np.ndarray:
    """The mistake: pairs (2j, 2j+1) of weights whose pairs are (j, j + half)."""
    c = weights.config
    tables = rope_tables(np.arange(len(heads)), head_dim=c.head_dim, theta=c.rope_theta, scaling=c.rope_scaling)
    halves = to_half_split(heads)
    return interleave(rope(halves, *tables).reshape(-1), halves.size // c.head_dim).reshape(heads.shape)


@pytest.mark.parametrize("heads_first", [False, True])
def test_wrong_rotation_is_not_hidden_by_axis_detection(heads_first: bool):
    weights, ids, trace = ambiguous_heads()
    wrong = rotate_interleaved(trace["l0.q_proj"].reshape(len(ids), -1, weights.config.head_dim), weights)
    shown = wrong.swapaxes(0, 1) if heads_first else wrong
    dump = stage_dump(raw_dump({"l0.q_rope": shown}, ids), weights.config, weights=weights)
    np.testing.assert_array_equal(dump.dumped[0, "l0.q_rope"].read(), wrong)
    assert any("by its values" in note for note in dump.notes) == heads_first


def test_heads_joined_before_transposing_are_no_layout():
    weights, ids, trace = ambiguous_heads()
    heads = trace["l0.attn_context"].reshape(len(ids), -1, weights.config.head_dim)
    wrong = heads.swapaxes(0, 1).reshape(len(ids), -1)
    for shown in (wrong, wrong.reshape(-1)):
        dump = stage_dump(raw_dump({"l0.attn_context": shown}, ids), weights.config, weights=weights)
        np.testing.assert_array_equal(dump.dumped[0, "l0.attn_context"].read(), wrong)


def test_scores_of_keys_by_queries_are_read_as_they_are_unless_declared():
    weights, ids, trace = ambiguous_heads()
    turned = np.ascontiguousarray(trace["l0.attn_probs"].swapaxes(1, 2))
    raw = raw_dump({"l0.attn_probs": turned}, ids)
    plain = stage_dump(raw, weights.config, weights=weights)
    declared = mapping_of({"layout": {"attn_probs": {"axes": "heads ctx seq"}}})
    np.testing.assert_array_equal(plain.dumped[0, "l0.attn_probs"].read(), turned)
    check(stage_dump(raw, weights.config, mapping=declared), trace)


NO_ARRAY = np.zeros(1, np.float32)
QWEN = "micro-qwen2"  # three layers, with biases


@pytest.mark.parametrize("model", ["micro-llama", "micro-smollm3", "micro-ministral3"])
def test_llamacpp_nodes_in_gguf_pair_order_are_reordered(model: str):
    weights = weights_of(model)
    ids, trace = golden_trace(model, "llamacpp")
    rows = trace["l0.q_rope"]
    paired = interleave(rows.reshape(len(ids), -1).T, weights.config.n_heads).T.reshape(rows.shape)
    check(stage_dump(raw_dump([raw_array("Qcur-0", paired, op="ROPE")], ids), weights.config), trace)


def test_nodes_in_half_split_order_are_unchanged():
    weights = weights_of("micro-llama")
    ids, trace = golden_trace("micro-llama", "transformers")
    raw = raw_dump([raw_array("Qcur-0", trace["l0.q_rope"], op="ROPE")], ids)
    dump = stage_dump(raw, weights.config, weights=weights)
    check(dump, trace)
    (note,) = dump.notes
    assert_tells(note, "Qcur-0", "llama.cpp", "halves", "values")
    assert_tells(stage_dump(raw, weights.config).notes[0], "Qcur-0", "llama.cpp", "neighbours", "files")


def test_unknown_names_and_duplicate_names_are_noted():
    ids, trace = golden_trace("micro-llama", "transformers")
    arrays = {f"x{i}": NO_ARRAY for i in range(3)} | {letter: NO_ARRAY for letter in "abcdefgh"}
    arrays |= {"model.layers.0": trace["l0.block_out"], "hidden_states.1": trace["l0.block_out"]}
    dump = stage_dump(raw_dump(arrays, ids), weights_of("micro-llama").config)
    assert [(key, dumped.name) for (_, key), dumped in dump.dumped.items()] == [("l0.block_out", "model.layers.0")]
    second, nameless = dump.notes
    assert_tells(second, "hidden_states.1", "l0.block_out", "model.layers.0")
    assert_tells(nameless, "11 arrays", "x{i}, a, b, c, d, e, f, g and 1 more", "llorch diff --suggest")


def map_arrays(*arrays: RawArray) -> object:
    mapping = mapping_of({"names": {"blk.{i+1}.x": "q_rope", "y": "q_rope"}})
    return stage_dump(raw_dump(arrays, [1, 2]), weights_of(QWEN).config, mapping=mapping)


LAYERS = "0 to 2"
INTEGERS, TWO_ROWS = raw_array("logits", NO_ARRAY.astype(int)), raw_array("embed", np.zeros((2, 96)))
REFUSALS = [
    row("a layer too far", lambda: map_arrays(raw_array("l3.q_rope", NO_ARRAY)),
        "OutOfRange", where="dump: OutOfRange: l3.q_rope (q_rope):", expected=LAYERS, got=3),
    row("a layer before the first", lambda: map_arrays(raw_array("blk.0.x", NO_ARRAY)),
        "OutOfRange", where="dump: OutOfRange: blk.0.x (q_rope):", expected=LAYERS, got=-1),
    row("no layer", lambda: map_arrays(raw_array("y", NO_ARRAY)),
        "OutOfRange", where="dump: OutOfRange: y (q_rope):", expected=LAYERS, got="None"),
    row("another family's stage", lambda: map_arrays(raw_array("l1.q_norm", NO_ARRAY)),
        "Unexpected", where="dump: Unexpected: l1.q_norm (q_norm):", expected="qwen2"),
    row("integers", lambda: map_arrays(INTEGERS),
        "DType", where="dump: DType: logits (logits):", expected="float32, float16, bfloat16, float64", got="int64"),
    row("a stage twice", lambda: map_arrays(TWO_ROWS, TWO_ROWS),
        "Duplicate", where="dump: Duplicate: embed:", expected="pass 0", got="two"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_stage_absent_from_the_model_is_refused(refusal: Refusal):
    refusal.check()


def test_arrays_are_read_lazily():
    def refuse() -> np.ndarray:
        raise AssertionError

    arrays = [RawArray("embed", "float32", (2, 96), refuse), RawArray("unknown", "float32", (2, 96), refuse)]
    assert [*stage_dump(raw_dump(arrays, [1, 2]), weights_of(QWEN).config).dumped] == [(0, "embed")]


WEIGHTS = weights_of("micro-llama")
TABLE = WEIGHTS.array("embed_tokens")
IDS = (5, 400, 5)


def dump(
    *embeddings: np.ndarray, passes: tuple[Tokens, ...] = (), mapping: NameMap | None = None, ids: tuple[int, ...] = ()
) -> StageDump:
    arrays = tuple((n_pass, raw_array("embed", array)) for n_pass, array in enumerate(embeddings))
    raw = RawDump("dump", arrays, passes)
    return stage_dump(raw, WEIGHTS.config, mapping=mapping, ids=ids, first_position=7, weights=WEIGHTS)


@pytest.mark.parametrize("rounded", [np.float32, np.float16])
def test_rows_of_the_embedding_table_are_tokens(rounded: type):
    assert ids_from_embedding(TABLE[[*IDS]].astype(rounded), WEIGHTS) == IDS
    assert ids_from_embedding(TABLE[[*IDS]] * 1.02, WEIGHTS) is None
    assert ids_from_embedding(np.concatenate([TABLE[[*IDS]], TABLE[[9]] * 1.02]), WEIGHTS) is None


def test_unstated_tokens_are_recovered_pass_by_pass():
    found = dump(TABLE[[*IDS]][None], TABLE[[9]])
    assert found.passes == (Tokens(IDS, 7), Tokens((9,), 10))
    assert_tells(found.notes[0], "token ids", "embed")


def test_equal_ids_from_dump_mapping_and_command_are_accepted():
    mapping = mapping_of({"run": {"ids": [*IDS], "first_position": 7}})
    tokens = (Tokens(IDS, 7),)
    assert dump(TABLE[[*IDS]], mapping=mapping).passes == tokens
    assert dump(TABLE[[*IDS]], ids=IDS).passes == tokens
    assert dump(TABLE[[*IDS]], mapping=mapping, ids=IDS, passes=tokens).passes == tokens


ID_REFUSALS = [
    row("other embeddings", lambda: dump(TABLE[[*IDS]] + 1), "Missing", "--tokens", where="ids:", got="none"),
    row("another width", lambda: dump(np.zeros((3, 95), np.float32)), "Missing", "--tokens", where="ids:", got="none"),
    row("another number of passes", lambda: dump(*[TABLE[[*IDS]]] * 2, ids=IDS),
        "Missing", "command", where="ids:", expected="2 passes", got=1),
    row("outside the vocabulary", lambda: dump(TABLE[[*IDS]], ids=(1, 401, 2)),
        "OutOfRange", where="ids:", expected="0 to 400", got=401),
]  # fmt: skip


@pytest.mark.parametrize("refusal", ID_REFUSALS)
def test_tokens_that_are_missing_or_contradict_are_refused(refusal: Refusal):
    refusal.check()


def test_arrays_of_several_passes_are_separated():
    first, second = np.zeros((2, 3), np.float32), np.ones((1, 3), np.float16)
    dump = StageDump.of_arrays([Tokens((4, 5)), Tokens((6,), 2)], {"embed": first}, {"embed": second}, engine="mine")
    assert [(n, key, dumped.stored) for (n, key), dumped in dump.dumped.items()] == [
        (0, "embed", "float32"), (1, "embed", "float16"),
    ]  # fmt: skip
    ((key, dumped),) = dump.of_pass(1)
    assert key == "embed"
    assert dumped.read() is second
    assert dump.features.engine == "mine"
