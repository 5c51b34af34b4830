"""Arrays of another width than their stage's: padded logits, a rank's heads, copies of KV heads, fewer keys."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from builders.raw_dumps import golden_trace, raw_array, raw_dump, weights_of
from helpers.refusals import assert_tells, refuses

from llorch.diagnosis.diagnose import check_stages, diagnose
from llorch.engines.dumps.mapping import mapping_of
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.engines.dumps.widths import Share
from llorch.families.layers import Layer
from llorch.runtime.errors import GuardFailed
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.stage_ref import Tokens, heads_axis
from llorch.stages.table import BY_NAME

MODEL = "micro-llama3"  # 12 query heads, 4 KV heads, head_dim 32, 397 tokens in the vocabulary
IDS, TRACE = golden_trace(MODEL, "transformers")
WEIGHTS = weights_of(MODEL)
CONFIG, N = WEIGHTS.config, len(IDS)
EXACT = WEIGHTS.astype(np.float64, keep=True)
ATTENTION = ("q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "k_cache", "v_cache", "attn_scores", "attn_context")
Arrays = Mapping[str, np.ndarray]


def read(arrays: Arrays | list[RawArray], **run: object) -> StageDump:
    return stage_dump(raw_dump(arrays, IDS), CONFIG, mapping=mapping_of({"run": run}), weights=WEIGHTS)


def verdicts(dump: StageDump) -> dict[str, str]:
    return {check.key: check.verdict for check in check_stages(EXACT, dump, lambda line: None)[1]}


def share_of(array: np.ndarray, stage: str, rank: int, n: int) -> np.ndarray:
    return np.split(array, n, axis=heads_axis(BY_NAME[stage]) or 0)[rank]


def shares(rank: int, n: int, *stages: str) -> dict[str, np.ndarray]:
    """Attention of layer 1 as one rank has it."""
    return {f"l1.{stage}": share_of(TRACE[f"l1.{stage}"], stage, rank, n) for stage in stages or ATTENTION}


def padded_logits(padding: float) -> np.ndarray:
    return np.concatenate([TRACE["logits"], np.full((N, 19), padding, np.float32)], axis=1)


@pytest.mark.parametrize("padding", [-np.inf, -1e9, 0.0, np.nan])
def test_padded_logits_are_compared_without_their_padding(padding: float):
    dump = read({"logits": padded_logits(padding)})
    np.testing.assert_array_equal(dump.dumped[0, "logits"].read(), TRACE["logits"])
    assert_tells(" ".join(dump.notes), "416 columns", "397")
    assert diagnose(EXACT, dump).is_right


def test_largest_logit_in_the_padding_is_a_finding():
    logits = padded_logits(0.0)
    logits[7, 399] = logits[7].max() + 1
    diagnosis = diagnose(EXACT, read({"logits": logits}))
    (finding,) = diagnosis.failures
    assert_tells(finding.sentence, "row 7", "padding column 399", "1 of 12", "from 397")
    assert (finding.key, finding.n_pass) == ("logits", 0)
    last = read([raw_array("logits", logits[7], tokens=(7,))])
    assert_tells(last.defects[0].sentence, "row 7", "column 399")


@pytest.mark.parametrize(("rank", "n"), [(0, 2), (1, 2), (3, 4)])
def test_heads_of_one_rank_are_found_by_values_and_compared(rank: int, n: int):
    dump = read(shares(rank, n))
    for (_, key), dumped in dump.dumped.items():
        np.testing.assert_array_equal(dumped.read(), shares(rank, n)[key])
    assert set(verdicts(dump).values()) == {PASS}
    assert len(verdicts(dump)) == len(ATTENTION)
    (note,) = dump.notes
    assert_tells(note, f"rank {rank} of {n}", f"q_proj {rank * 12 // n} to", "all-reduce")


def test_all_arrays_of_a_dump_have_the_heads_of_one_rank():
    """Keys of another rank than the queries are an error of the engine, not a reading."""
    keys = ("k_proj", "v_proj")
    dump = read(shares(1, 2, "q_proj") | shares(0, 2, *keys))
    assert verdicts(dump) == {"l1.q_proj": PASS, "l1.k_proj": FAIL, "l1.v_proj": FAIL}


def test_wrong_head_in_a_share_is_found():
    wrong = shares(1, 2)
    wrong["l1.v_proj"] = wrong["l1.v_proj"] * 1.01
    assert {key for key, verdict in verdicts(read(wrong)).items() if verdict == FAIL} == {"l1.v_proj"}


def test_share_with_unknown_rank_is_left_out_unless_declared():
    noise = np.random.default_rng(0).normal(size=(N, 6, 32)).astype(np.float32)
    arrays = {"embed": TRACE["embed"], "l1.q_rope": noise}
    assert (0, "l1.q_rope") in read(arrays | shares(1, 2, "v_proj")).dumped  # a later array shows the rank
    dump = read(arrays)
    assert [*dump.dumped] == [(0, "embed")]
    assert_tells(" ".join(dump.notes), "q_rope of layer 1", "0 to 5", "6 to 11", 'rank = "0/2"')
    assert read(arrays, rank="1/2").dumped[0, "l1.q_rope"].heads == (6, 12)


def test_more_ranks_than_kv_heads_share_a_kv_head():
    assert Share(5, 6).heads(BY_NAME["q_proj"], CONFIG) == (10, 12)
    assert Share(5, 12).heads(BY_NAME["k_cache"], CONFIG) == (1, 2)
    assert Share(5, 12).elements(BY_NAME["k_proj"], CONFIG) == (32, 64)


@pytest.mark.parametrize("stage", ["k_proj", "v_proj", "k_rope", "k_cache", "v_cache"])
def test_equal_copies_of_kv_heads_are_compared_once(stage: str):
    array, axis = TRACE[f"l1.{stage}"], heads_axis(BY_NAME[stage])
    assert axis is not None
    heads = array.reshape(*array.shape[:axis], CONFIG.n_kv_heads, -1, *array.shape[axis + 1 :])
    copies = heads.repeat(3, axis).reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])
    dump = read({f"l1.{stage}": copies})
    np.testing.assert_array_equal(dump.dumped[0, f"l1.{stage}"].read(), array)
    assert_tells(" ".join(dump.notes), stage, "3 times")
    assert verdicts(dump) == {f"l1.{stage}": PASS}


def test_copies_of_kv_heads_that_differ_are_left_out():
    copies = TRACE["l1.k_rope"].repeat(3, axis=1)
    copies[:, 5] *= 1.5
    tiled = np.concatenate([TRACE["l0.k_rope"]] * 3, axis=1)
    dump = read({"embed": TRACE["embed"], "l1.k_rope": copies, "l0.k_rope": tiled})
    assert [*dump.dumped] == [(0, "embed")]
    assert_tells(" ".join(dump.notes), "k_rope of layer 1", "k_rope of layer 0", "i % 4")
    assert [*dump.left_out.values()] == [[(0, "l1.k_rope"), (0, "l0.k_rope")]]


def test_scores_of_a_token_may_end_at_its_own_key():
    scores, probs = TRACE["l1.attn_scores"][:, 4:5, :5], TRACE["l1.attn_probs"][:, 4:5, :5]
    dump = read(
        [raw_array("l1.attn_scores", scores, tokens=(4,)), raw_array("l1.attn_probs", probs[:, 0], tokens=(4,))]
    )
    np.testing.assert_array_equal(dump.dumped[0, "l1.attn_scores"].read(), TRACE["l1.attn_scores"][:, 4:5])
    assert verdicts(dump) == {"l1.attn_scores": PASS, "l1.attn_probs": PASS}


def test_scores_of_the_newest_keys_are_found_by_values():
    arrays = {f"l1.{stage}": TRACE[f"l1.{stage}"][..., 8:] for stage in ("attn_scores", "attn_probs")}
    rows = [raw_array(key, array[:, 8:], tokens=(8, 9, 10, 11)) for key, array in arrays.items()]
    dump = read([raw_array("embed", TRACE["embed"]), *rows])
    assert_tells(" ".join(dump.notes), "newest 4 of 12")
    assert verdicts(dump) == {"embed": PASS, "l1.attn_scores": PASS, "l1.attn_probs": PASS}
    wrong = raw_array("l1.attn_probs", arrays["l1.attn_probs"][:, 8:] * 1.01, tokens=(8, 9, 10, 11))
    assert verdicts(read([wrong])) == {"l1.attn_probs": FAIL}


def test_scores_with_a_window_for_each_row_are_left_out():
    config = replace(CONFIG, layers=(Layer(window=4),) * 2)
    newest = raw_array("l1.attn_probs", TRACE["l1.attn_probs"][:, 11:, 8:], tokens=(11,))
    several = raw_array("l0.attn_probs", TRACE["l0.attn_probs"][:, 10:, 7:], tokens=(10, 11))
    banded = raw_array("l0.attn_scores", TRACE["l0.attn_scores"][..., 8:])
    dump = stage_dump(raw_dump([newest, several, banded], IDS), config)
    assert [dump.dumped[0, key].read().shape for key in ("l1.attn_probs", "l0.attn_probs")] == [
        (12, 1, 12),
        (12, 2, 12),
    ]
    assert [*dump.left_out.values()] == [[(0, "l0.attn_scores")]]


def test_array_of_another_width_is_left_out_and_the_rest_is_compared():
    arrays = {f"l{i}.ffn_act": TRACE[f"l{i}.ffn_act"][:, :80] for i in (0, 1)} | {"l1.ffn_up": TRACE["l1.ffn_up"]}
    diagnosis = diagnose(EXACT, read(arrays))
    assert {result.key: result.verdict for result in diagnosis.results} == {"l1.ffn_up": PASS}
    assert_tells(" ".join(diagnosis.notes), "ffn_act of layers 0, 1", "inter=160", "(12, 80)")
    assert [*diagnosis.not_run.values()] == [[(0, "l0.ffn_act"), (0, "l1.ffn_act")]]


def test_dump_of_another_model_is_refused():
    other = weights_of("micro-llama")  # the same width of the residual stream
    arrays = {key: TRACE[key] for key in ("l1.q_proj", "l1.k_proj", "l1.ffn_act", "l1.ffn_out", "l1.block_out")}
    with refuses(GuardFailed, where="dump: layout", expected="q_width=192", got="(12, 384)"):
        stage_dump(raw_dump(arrays, IDS), other.config, weights=other)
    dump = stage_dump(raw_dump(arrays | {"embed": TRACE["embed"]}, IDS), other.config, weights=other)
    assert len(dump.dumped) == 3


def test_dump_of_another_number_of_tokens_is_refused():
    arrays = [(0, raw_array(key, TRACE[key][:9])) for key in ("embed", "l0.ffn_up", "l0.ffn_out")]
    raw = RawDump("dump", (*arrays, (0, raw_array("logits", TRACE["logits"][8:9]))), (Tokens(IDS),))
    with refuses(GuardFailed, where="dump: layout", expected=f"seq={N}", got="(9, 96)"):
        stage_dump(raw, CONFIG, weights=WEIGHTS)
