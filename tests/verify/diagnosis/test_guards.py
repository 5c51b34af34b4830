"""Whether the numbers of a dump may be compared: what is of another run is refused, what an engine did wrong is not."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from raw_dumps import golden_trace, raw_dump, weights_of

from llorch.builtin import BUILTIN
from llorch.dumps.names import stage_dump
from llorch.dumps.raw import RawDump, digest
from llorch.dumps.stage_dump import Features, Seen, StageDump, Tokens
from llorch.errors import GuardFailed
from llorch.files.names import inventory
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rounding import round_activations
from llorch.verify.diagnosis.guards import check

NAME = "micro-llama"
WEIGHTS = weights_of(NAME)
IDS, TRACE = golden_trace(NAME, "transformers")
LAST = f"l{WEIGHTS.config.n_layers - 1}.block_out"
Arrays = Mapping[str, np.ndarray]


def dump_of(arrays: Arrays, *, ids: tuple[int, ...] = IDS, first_position: int = 0, **features: Any) -> StageDump:
    return StageDump.of_arrays([Tokens(ids, first_position)], arrays, source="mine", **features)


def bf16(array: np.ndarray) -> np.ndarray:
    return round_activations(array, "BF16")


@pytest.mark.parametrize("engine", ["llamacpp", "transformers"])
@pytest.mark.parametrize("name", BUILTIN)
def test_the_run_of_an_engine_is_compared_without_a_note(name: str, engine: str):
    weights, (ids, trace) = weights_of(name), golden_trace(name, engine)
    hashes = {}
    for ours, weight in inventory(weights.config).items():
        told = digest(weights.array(ours))
        hashes |= {weight.gguf: told, weight.huggingface: told, f"base_model.model.{weight.huggingface}": told}
    hashes |= {"lm_head.weight": digest(weights.array("lm_head" if "lm_head" in weights else "embed_tokens"))}
    dump = dump_of(trace, ids=ids)
    assert check(dump, weights, ids=ids, first_position=0, hashes=hashes) == []
    rounded = {key: bf16(array) for key, array in trace.items()}
    assert check(dump_of(rounded, ids=ids, dtype="bfloat16"), weights) == []


def refused(guard: str, message: str, dump: StageDump, **said: Any) -> None:
    with pytest.raises(GuardFailed, match=message) as caught:
        check(dump, WEIGHTS, **said)
    assert caught.value.guard == guard
    assert str(caught.value).startswith(f"mine: {guard}: ")


@pytest.mark.parametrize(
    ("ids", "how"),
    [
        ((IDS[0], *IDS), r"expected 12 tokens \(1 335 376 378 400 394 389 280 ...\), as you say, got a dump of 13 .*"
         ": the first one is there twice, as when BOS is added by template and tokenizer; run the engine"),
        ((9, *IDS), ": 9 stands in front, as BOS does"),
        ((*IDS, 0, 0, 0), ": padded with 3 times 0"),
        ((0, 0, *IDS), ": padded with 2 times 0"),
        ((*IDS[:5], 7, *IDS[6:]), ": they part at token 5"),
        (IDS[:-2], ": they part at token 10"),
    ],
)  # fmt: skip
def test_tokens_that_are_not_those_of_the_user_are_refused(ids: tuple[int, ...], how: str):
    refused("ids", how, dump_of({}, ids=ids), ids=IDS)


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ((0, *range(11)), r"embeddings of 12 tokens \(1 1 335 .*: the first one is there twice, .*; give the tokens"),
        ((0, 2, 1, *range(3, 12)), "in pass 0, as the dump says, .*: they part at token 1"),
        ((3, *range(11)), ": 378 stands in front"),
    ],
)
def test_embeddings_of_other_tokens_than_those_that_are_said_are_refused(order: tuple[int, ...], how: str):
    refused("ids", how, dump_of({"embed": TRACE["embed"][list(order)]}))
    some = Seen("embed", "float32", lambda: bf16(TRACE["embed"][list(order)][1:3]), (1, 2))
    if order[1] != 1:
        refused("ids", "in pass 0", StageDump("mine", (Tokens(IDS),), {(0, "embed"): some}))


TABLE = WEIGHTS.array("embed_tokens")


@pytest.mark.parametrize(
    "wrong",
    [
        TABLE[(np.array(IDS) + 1) % len(TABLE)], 11 * TABLE[list(IDS)], np.full_like(TRACE["embed"], np.nan),
        TABLE.reshape(TABLE.shape[::-1])[:, list(IDS)].T, WEIGHTS.array("lm_head")[list(IDS)],
        TABLE[np.array(IDS) % 256],
    ],
)  # fmt: skip
def test_a_wrong_lookup_of_the_right_tokens_is_left_to_the_diagnosis(wrong: np.ndarray):
    assert check(dump_of({"embed": wrong}), WEIGHTS) == []


def test_positions_that_do_not_follow_are_refused():
    refused("positions", "expected the first token at 0, as you say, got a dump from 7 on; run",
            dump_of({}, first_position=7), first_position=0)  # fmt: skip
    refused("positions", "expected pass 1 to begin at 12, where the one before ends, got 0; make a dump for each",
            StageDump("mine", (Tokens(IDS), Tokens((3,))), {}))  # fmt: skip
    most = WEIGHTS.config.max_position_embeddings
    refused(
        "positions", f"expected at most {most}, as the model has, got {most + 2}", dump_of({}, first_position=most - 10)
    )
    assert check(dump_of({}, first_position=7), WEIGHTS) == []


@pytest.mark.parametrize("key", ["l1.k_cache", "l0.attn_scores"])
def test_a_cache_of_more_tokens_than_the_dump_tells_of_is_refused(key: str):
    ids = IDS[4:]
    part = TRACE[key] if "cache" in key else TRACE[key][:, 4:]
    refused("positions", rf"{key} of pass 0: expected .*ctx=8.*, got \(.*12.*\); dump the passes that filled the cache",
            dump_of({key: part}, ids=ids, first_position=4))  # fmt: skip


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("l0.q_rope", TRACE["l0.q_rope"].swapaxes(0, 1), "of pass 0: expected seq=12, heads=6, head_dim=32, got"),
        ("l0.q_rope", TRACE["l0.q_rope"][None], r"got \(1, 12, .*; read it with llorch.dumps.names"),
        ("l0.attn_probs", TRACE["l0.attn_probs"][:, :5], r"seq=12, ctx=12, got \(6, 5, 12\)"),
        ("l0.q_norm", TRACE["l0.q_rope"], "expected a stage of this model, got l0.q_norm"),
        ("l9.block_out", TRACE[LAST], "expected a stage of this model, got l9.block_out"),
    ],
)  # fmt: skip
def test_an_array_that_does_not_fit_its_stage_is_refused(key: str, array: np.ndarray, message: str):
    refused("layout", message, dump_of({"embed": TRACE["embed"], key: array}))


EPS, GAIN = WEIGHTS.config.rms_norm_eps, WEIGHTS.array("final_norm")
BARE = TRACE["l1.attn_norm"] / WEIGHTS.array("layers.1.attn_norm")
IN = TRACE["l1.attn_residual"]
OUT, NORMED = TRACE[LAST], TRACE["final_norm"]
TWICE = rms_norm(NORMED, GAIN, eps=EPS)


def head(x: np.ndarray) -> np.ndarray:
    return linear(x, WEIGHTS.array("lm_head"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({LAST: NORMED}, f"expected {LAST} before the final norm, got an array of pass 0 that is behind it; dump"),
        ({LAST: NORMED, "final_norm": NORMED}, "is behind it"),
        ({LAST: NORMED, "logits": TRACE["logits"]}, "is behind it"),
        ({LAST: OUT, "final_norm": OUT, "logits": TRACE["logits"]}, "behind the norm .* goes into the norm"),
        ({"l1.attn_norm": BARE, "l1.k_proj": TRACE["l1.k_proj"]}, "l1.attn_norm .* is normalised without the gain"),
        ({"l1.ffn_norm": IN, "l1.attn_residual": IN, "l1.ffn_up": TRACE["l1.ffn_up"]},
         "expected l1.ffn_norm .* is what goes into the norm"),
    ],
)  # fmt: skip
def test_a_row_at_the_other_side_of_a_norm_than_its_name_says_is_refused(arrays: Arrays, message: str):
    refused("norm", message, dump_of(arrays))
    refused("norm", message, dump_of({key: bf16(array) for key, array in arrays.items()}))


@pytest.mark.parametrize(
    "arrays",
    [
        {LAST: OUT, "final_norm": OUT, "logits": head(OUT)},
        {LAST: NORMED, "final_norm": TWICE, "logits": head(TWICE)},
        {LAST: NORMED, "logits": head(TWICE)},
        {LAST: NORMED[:1]},
        {"l1.attn_norm": BARE, "l1.q_proj": linear(BARE, WEIGHTS.array("layers.1.q_proj"))},
        {"l0.attn_norm": TRACE["embed"], "embed": TRACE["embed"],
         "l0.v_proj": linear(TRACE["embed"], WEIGHTS.array("layers.0.v_proj"))},
    ],
)  # fmt: skip
def test_a_norm_that_the_engine_left_out_or_made_twice_is_left_to_the_diagnosis(arrays: Arrays):
    n_tokens = len(next(iter(arrays.values())))
    assert check(dump_of(arrays, ids=IDS[:n_tokens]), WEIGHTS) == []


@pytest.mark.parametrize("odd", [np.inf, np.nan, 1e38])
def test_numbers_that_ran_away_are_left_to_the_diagnosis(odd: float):
    assert (
        check(
            dump_of({key: np.where(array > 1, np.float32(odd), 1e30 * array) for key, array in TRACE.items()}), WEIGHTS
        )
        == []
    )


def test_where_nothing_was_made_of_it_a_norm_that_looks_left_out_is_noted():
    (note,) = check(dump_of({LAST: OUT, "final_norm": OUT}), WEIGHTS)
    assert note == "norm: final_norm is what goes into the norm: left out by the engine, or dumped at another place"


def in_production(logits: np.ndarray, *, tokens: tuple[int, ...] | None = None, **features: Any) -> StageDump:
    seen = {(0, "logits"): Seen("logits", "float32", lambda: TRACE["logits"])}
    unwatched = {0: Seen("production_logits", "float32", lambda: logits, tokens)}
    return StageDump("mine", (Tokens(IDS),), seen, Features(**features), (), unwatched)


def test_a_capture_that_is_not_the_run_in_production_is_refused():
    noise = 1 + 1e-3 * np.random.default_rng(0).standard_normal(TRACE["logits"].shape, np.float32)
    assert check(in_production(TRACE["logits"]), WEIGHTS) == []
    assert check(in_production(TRACE["logits"][-1:], tokens=(11,)), WEIGHTS) == []
    (note,) = check(in_production(TRACE["logits"] * noise, dtype="bfloat16"), WEIGHTS)
    assert re.fullmatch("run: logits of token 0 of pass 0 are .*e-0. from those in production", note)
    (note,) = check(in_production(TRACE["logits"] * (1 + (noise - 1) / 2)), WEIGHTS)
    assert re.fullmatch("run: logits of token 0 of pass 0 are [45].*e-04 from those in production", note)
    honest: list[dict[str, Any]] = [{"kv_cache": "float16"}, {"flash_attention": True}, {"activations": "Q8_0"}]
    for wider in honest:
        assert len(check(in_production(TRACE["logits"] * noise, **wider), WEIGHTS)) == 1
    refused("run", "logits of token 0 of pass 0 .* an error of .*: another kernel or path; capture the path",
            in_production(TRACE["logits"] * noise))  # fmt: skip
    refused("run", "token 11 .*: that is captured token 10, so one of them counts from the first generated token",
            in_production(TRACE["logits"][10:11], tokens=(11,)))  # fmt: skip
    nothing = StageDump("mine", (Tokens(IDS),), {}, production={0: Seen("p", "float32", lambda: TRACE["logits"])})
    assert check(nothing, WEIGHTS) == []


@pytest.mark.parametrize(
    ("guard", "said", "message"),
    [
        ("ids", {"ids": (1, 2)}, r"expected 2 tokens \(1 2\), as the command says, got .* in the dump: they part at"),
        ("positions", {"ids": IDS, "first_position": 3}, "passes from 3 on, as the command says, got 0 in the dump"),
        ("layout", {}, r"embed \(embed\): expected seq=12 hidden=96, in any order .*, got \(7, 7\); give axes"),
    ],
)  # fmt: skip
def test_a_guard_may_fail_as_soon_as_names_are_read(guard: str, said: dict[str, Any], message: str):
    arrays = {"embed": TRACE["embed"] if said else np.ones((7, 7), np.float32)}
    with pytest.raises(GuardFailed, match=f"^dump: {guard}: .*{message}") as caught:
        stage_dump(raw_dump(arrays, IDS), WEIGHTS.config, **said)
    assert caught.value.guard == guard


def test_passes_that_do_not_follow_are_refused_before_their_caches_are_read():
    raw = RawDump("dump", raw_dump({"embed": TRACE["embed"]}).arrays, (Tokens(IDS), Tokens((3,))))
    with pytest.raises(GuardFailed, match=r"^dump: positions: expected pass 1 to begin at 12"):
        stage_dump(raw, WEIGHTS.config)
