"""Axes in every order, heads joined or split, a batch, padding, fused projections, pairs."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, raw_array, raw_dump, weights_of
from helpers.refusals import Refusal, assert_tells, refuses, row

from llorch.engines.dumps.layout import VALUE_HEADS, Form, find_nearest_form, list_forms, normalise, sine_distance
from llorch.engines.dumps.mapping import mapping_of
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.families.layers import DeltaNet, Layer
from llorch.files.tensor_names import interleave
from llorch.runtime.errors import GuardFailed
from llorch.stages.table import BY_NAME, axis_sizes

MODEL = "micro-qwen3"  # all dimensions differ
IDS, TRACE = golden_trace(MODEL, "transformers")
CONFIG = weights_of(MODEL).config
N = len(IDS)
SIZES = axis_sizes(CONFIG, seq=N, ctx=N)


def read_stage(stage: str, array: np.ndarray, **layout: object) -> tuple[np.ndarray, tuple[str, ...]]:
    """A stage of layer 1 as the dump gives it back, and the notes."""
    key = f"l1.{stage}" if BY_NAME[stage].in_layer else stage
    mapping = mapping_of({"layout": {stage: layout} if layout else {}})
    dump = stage_dump(raw_dump({key: array}, IDS), CONFIG, mapping=mapping)
    return dump.dumped[0, key].read(), tuple(dump.notes)


def trace_array(stage: str) -> np.ndarray:
    return TRACE[f"l1.{stage}" if BY_NAME[stage].in_layer else stage]


@pytest.mark.parametrize("stage", ["embed", "q_proj", "q_rope", "k_cache", "attn_context", "ffn_act", "logits"])
def test_every_order_of_the_axes_is_found_by_shape(stage: str):
    array = trace_array(stage)
    for order in permutations(range(array.ndim)):
        turned = array.transpose(order)
        for shown in (turned, turned[None], turned[:, None], turned.astype(np.float64)):
            actual, notes = read_stage(stage, shown)
            np.testing.assert_array_equal(actual, array)
            assert bool(notes) == (order != tuple(range(array.ndim)))


@pytest.mark.parametrize("stage", ["q_proj", "v_proj", "attn_context"])
def test_joined_heads_may_be_split_in_any_order(stage: str):
    split = trace_array(stage).reshape(N, -1, CONFIG.head_dim)
    for order in permutations(range(3)):
        np.testing.assert_array_equal(read_stage(stage, split.transpose(order))[0], trace_array(stage))


@pytest.mark.parametrize("stage", ["q_norm", "k_rope"])
def test_split_heads_may_be_joined(stage: str):
    joined = trace_array(stage).reshape(N, -1)
    for shown in (joined, joined.T, joined.reshape(-1)):
        np.testing.assert_array_equal(read_stage(stage, shown)[0], trace_array(stage))


def test_padded_context_is_trimmed():
    padded = np.concatenate(
        [trace_array("k_cache"), np.full((CONFIG.n_kv_heads, 250, CONFIG.head_dim), 7, np.float32)], 1
    )
    np.testing.assert_array_equal(read_stage("k_cache", padded)[0], trace_array("k_cache"))
    turned = np.ascontiguousarray(padded.transpose(0, 2, 1))
    np.testing.assert_array_equal(read_stage("k_cache", turned)[0], trace_array("k_cache"))
    for shown in (turned, turned[None]):
        np.testing.assert_array_equal(
            read_stage("k_cache", shown, axes="kv_heads head_dim ctx")[0], trace_array("k_cache")
        )


@pytest.mark.parametrize(
    ("stage", "axes", "array"),
    [
        ("q_rope", "batch heads seq head_dim", trace_array("q_rope").swapaxes(0, 1)[None]),
        ("q_rope", "heads seq head_dim", trace_array("q_rope").swapaxes(0, 1).reshape(-1)),
        ("q_rope", "q_width seq", trace_array("q_rope").reshape(N, -1).T),
        ("q_proj", "head_dim heads seq", trace_array("q_proj").reshape(N, -1, CONFIG.head_dim).transpose(2, 1, 0)),
        ("attn_scores", "heads ctx seq", trace_array("attn_scores").swapaxes(1, 2)),
    ],
)
def test_declared_axes_are_used(stage: str, axes: str, array: np.ndarray):
    actual, notes = read_stage(stage, array, axes=axes)
    np.testing.assert_array_equal(actual, trace_array(stage))
    assert not notes
    key = f"l1.{stage}"
    of_dump = stage_dump(raw_dump([raw_array(key, array, axes=tuple(axes.split()))], IDS), CONFIG)
    np.testing.assert_array_equal(of_dump.dumped[0, key].read(), trace_array(stage))


@pytest.mark.parametrize("declared", [{"masked": False}, {}])
def test_scores_before_the_mask_get_the_mask_of_the_window(declared: dict[str, object]):
    config = replace(CONFIG, layers=(Layer(window=5),) * CONFIG.n_layers)
    distance = np.arange(N)[:, None] - np.arange(N)
    scores = np.random.default_rng(0).standard_normal((CONFIG.n_heads, N, N)).astype(np.float32)
    masked = np.where((distance >= 0) & (distance < 5), scores, -np.inf)
    array = scores if declared else np.where(np.isneginf(masked), -1e9, masked).astype(np.float32)
    mapping = mapping_of({"layout": {"attn_scores": declared} if declared else {}})
    dump = stage_dump(raw_dump({"l1.attn_scores": array}, IDS), config, mapping=mapping)
    np.testing.assert_array_equal(dump.dumped[0, "l1.attn_scores"].read(), masked)


@pytest.mark.parametrize("stage", ["q_tempered", "q_head_norm", "k_head_norm"])
def test_pairs_of_stages_after_the_rotation_are_undone(stage: str):
    heads = np.arange(2 * CONFIG.n_heads * CONFIG.head_dim, dtype=np.float32).reshape(2, -1, CONFIG.head_dim)
    paired = interleave(heads.reshape(-1), heads.size // CONFIG.head_dim).reshape(heads.shape)
    layout = mapping_of({"layout": {stage: {"permuted": "interleaved"}}}).layouts[stage]
    hidden = np.zeros((2, 2), bool)
    np.testing.assert_array_equal(normalise(paired, BY_NAME[stage], layout, CONFIG, hidden), heads)


def test_pairs_factors_and_masks_are_undone_where_declared():
    paired = interleave(trace_array("q_rope").reshape(-1), trace_array("q_rope").size // CONFIG.head_dim).reshape(
        trace_array("q_rope").shape
    )
    np.testing.assert_array_equal(read_stage("q_rope", paired, permuted="interleaved")[0], trace_array("q_rope"))
    np.testing.assert_array_equal(read_stage("q_rope", paired)[0], paired)
    np.testing.assert_array_equal(
        read_stage("ffn_gate", trace_array("ffn_gate") * 4, times=4)[0], trace_array("ffn_gate")
    )
    scores = trace_array("attn_scores")
    unmasked = np.where(np.isfinite(scores), scores, 3.0)
    np.testing.assert_array_equal(read_stage("attn_scores", unmasked, masked=False)[0], scores)
    np.testing.assert_array_equal(read_stage("attn_scores", unmasked)[0], unmasked)
    for least in (-1e4, np.finfo(np.float32).min):  # added to scores, as good as infinite
        np.testing.assert_array_equal(
            read_stage("attn_scores", np.where(np.isfinite(scores), scores, least))[0], scores
        )


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_projections_are_split(transposed: bool):
    q, k, v = (trace_array(f"{letter}_proj") for letter in "qkv")
    groups = [x.reshape(N, CONFIG.n_kv_heads, -1) for x in (q, k, v)]
    fused = {
        "stacked": np.concatenate([q, k, v], 1),
        "groups": np.concatenate(groups, 2).reshape(N, -1),
        "alternating": np.stack([trace_array("ffn_gate"), trace_array("ffn_up")], 2).reshape(N, -1),
    }
    for order, array in fused.items():
        stages = ["ffn_gate", "ffn_up"] if order == "alternating" else ["q_proj", "k_proj", "v_proj"]
        mapping = mapping_of({"names": {"w.{i}": stages}, "layout": {"w.{i}": {"fused": order}}})
        shown = array.T if transposed else array
        dump = stage_dump(raw_dump({"w.1": shown[None]}, IDS), CONFIG, mapping=mapping)
        assert {key for _, key in dump.dumped} == {f"l1.{stage}" for stage in stages}
        for (_, key), dumped in dump.dumped.items():
            np.testing.assert_array_equal(dumped.read(), TRACE[key])


def test_half_precision_is_widened_and_rows_match_their_tokens():
    half = trace_array("ffn_out")[[3, 1]].astype(np.float16)
    dumped = stage_dump(raw_dump([raw_array("l1.ffn_out", half, tokens=(3, 1))], IDS), CONFIG).dumped[0, "l1.ffn_out"]
    assert (dumped.tokens, dumped.stored, dumped.read().dtype) == ((3, 1), "float16", np.float32)
    last = stage_dump(raw_dump({"logits": trace_array("logits")[-1]}, IDS), CONFIG)
    assert last.dumped[0, "logits"].tokens == (N - 1,)
    (note,) = last.notes
    assert_tells(note, "logits", "last token")
    every = stage_dump(raw_dump([raw_array("logits", trace_array("logits"), tokens=tuple(range(N)))], IDS), CONFIG)
    assert every.dumped[0, "logits"].tokens is None


def read_zeros(*shape: int, **layout: object) -> object:
    return read_stage("q_rope", np.zeros(shape, np.float32), **layout)


FITTING, AS_TABLE = f"seq={N} heads=15 head_dim=32", "seq heads head_dim"
LAYOUT, MALFORMED = "dump: layout: l1.q_rope (q_rope):", "dump: Malformed: l1.q_rope (q_rope): axes:"
REFUSALS = [
    row("two axes", lambda: read_zeros(N, 7), GuardFailed, where=LAYOUT, expected=FITTING, got=(f"({N}, 7)", "tokens")),
    row("two of a batch", lambda: read_zeros(2, N, 15, 32),
        GuardFailed, "tokens", where=LAYOUT, expected=FITTING, got=f"(2, {N}, 15, 32)"),
    row("heads out of order", lambda: read_zeros(N, 8, 60), GuardFailed, "[layout.q_rope]", where=LAYOUT,
        expected=FITTING, got=f"({N}, 8, 60)"),
    row("unknown axis", lambda: read_zeros(N, 15, 32, axes="seq head head_dim"),
        "Malformed", where=MALFORMED, expected=AS_TABLE, got=("seq head head_dim", "'heads'")),
    row("axis left out", lambda: read_zeros(N, 15, 32, axes="seq heads"),
        "Malformed", where=MALFORMED, expected=AS_TABLE, got="seq heads"),
    row("another size", lambda: read_zeros(N, 15, 33, axes=AS_TABLE),
        GuardFailed, where=LAYOUT, expected=(AS_TABLE, f"({N}, 15, 32)"), got=f"({N}, 15, 33)"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_mismatched_shape_is_refused_with_the_accepted_layouts(refusal: Refusal):
    refusal.check()


@pytest.mark.parametrize("tokens", [(), (N,), (-1,)])
def test_tokens_belong_to_the_pass(tokens: tuple[int, ...]):
    array = raw_array("l1.ffn_out", np.zeros((max(len(tokens), 1), CONFIG.hidden_size)), tokens=tokens)
    where = ("dump:", "l1.ffn_out", "ffn_out", "tokens:")
    with refuses("OutOfRange", where=where, expected=f"0 to {N - 1}", got=str(tokens)):
        stage_dump(raw_dump([array], IDS), CONFIG)


@pytest.mark.parametrize(("heads", "seq", "ctx"), [(15, N, N), (N, 1, N), (15, 7, N)])
def test_key_axis_is_last_for_ambiguous_sizes(heads: int, seq: int, ctx: int):
    sizes = SIZES | {"heads": heads, "seq": seq, "ctx": ctx}
    assert [str(form) for form in list_forms(("heads", "seq", "ctx"), (heads, seq, ctx), sizes)] == ["heads seq ctx"]


def test_nearest_requires_a_much_smaller_distance():
    one, other = Form(("a",), (1,)), Form(("b",), (1,))
    assert find_nearest_form({one: 0.3, other: 0.05}) is other
    assert find_nearest_form({one: 0.2, other: 0.05}) is None
    assert find_nearest_form({one: 0.51, other: 3.0}) is None


def test_unlike_is_the_sine_of_the_angle_between_finite_values():
    x, y = np.array([3.0, 0, -np.inf, 1]), np.array([3.0, 4, 1, -np.inf])
    assert sine_distance(x, y) == pytest.approx(0.8)
    assert sine_distance(-5 * y, y) == pytest.approx(0)
    assert sine_distance(np.zeros(4), y) == 1


HYBRID = replace(
    CONFIG, layers=(Layer(mixer="delta_net"),) * CONFIG.n_layers, attention_gate=True,
    delta_net=DeltaNet(conv_kernel=4, n_key_heads=2, n_value_heads=6, key_head_dim=14, value_head_dim=10),
)  # fmt: skip


@pytest.mark.parametrize("stage", VALUE_HEADS)
def test_declared_tiles_of_value_heads_are_undone(stage: str):
    """Value heads 0 to 5 of key heads 0 0 0 1 1 1 are stored as 0 3 1 4 2 5."""
    axes, sizes = BY_NAME[stage].axes.split(), axis_sizes(HYBRID, seq=N, ctx=N) | {"conv_width": 56 + 60}
    heads = np.arange(6) if stage == "delta_state" else np.arange(6).repeat(10 if "value_width" in axes else 1)
    if "conv_width" in axes:
        heads = np.concatenate([np.full(56, -1), np.arange(6).repeat(10)])
    axis = next(index for index, name in enumerate(axes) if name in ("conv_width", "value_width", "v_heads"))
    array = np.zeros([sizes[name] for name in axes], np.float32)
    array += heads.reshape([-1 if index == axis else 1 for index in range(len(axes))])
    stored = np.where(array < 0, array, np.array([0, 3, 1, 4, 2, 5])[array.astype(int)]).astype(np.float32)
    mapping = mapping_of({"layout": {stage: {"value_heads": "tiled"}}})
    dumped = stage_dump(raw_dump({f"l1.{stage}": stored}, IDS), HYBRID, mapping=mapping).dumped[0, f"l1.{stage}"]
    np.testing.assert_array_equal(dumped.read(), array)
    assert dumped.is_reordered


@pytest.mark.parametrize("stage", ["conv_state", "conv_out", "q_l2", "beta", "delta_state", "delta_out", "gated_norm"])
def test_stages_of_a_delta_net_are_found_by_shape(stage: str):
    """A state is one of value-major memory, too, and heads are joined or split."""
    shape = BY_NAME[stage].shape(HYBRID, seq=N, ctx=N)
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    joined = array.reshape(*shape[: min(1, len(shape) - 2)], -1, shape[-1]) if len(shape) > 2 else array
    for shown in (*(array.transpose(order) for order in permutations(range(array.ndim))), joined, array[None]):
        actual = stage_dump(raw_dump({f"l1.{stage}": shown}, IDS), HYBRID).dumped[0, f"l1.{stage}"].read()
        np.testing.assert_array_equal(actual, array)
