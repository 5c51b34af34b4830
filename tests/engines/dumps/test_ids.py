"""Whose word counts for the tokens of a run, and tokens found in embeddings."""

import numpy as np
import pytest
from builders.raw_dumps import raw_array, weights_of
from helpers.refusals import Refusal, assert_tells, row

from llorch.engines.dumps.ids import ids_from_embedding
from llorch.engines.dumps.mapping import NameMap, mapping_of
from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.stages.stage_ref import Tokens

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


def test_tokens_that_nobody_states_are_found_pass_by_pass():
    found = dump(TABLE[[*IDS]][None], TABLE[[9]])
    assert found.passes == (Tokens(IDS, 7), Tokens((9,), 10))
    assert_tells(found.notes[0], "token ids", "embed")


def test_the_dump_the_mapping_and_the_command_may_agree():
    mapping = mapping_of({"run": {"ids": [*IDS], "first_position": 7}})
    tokens = (Tokens(IDS, 7),)
    assert dump(TABLE[[*IDS]], mapping=mapping).passes == tokens
    assert dump(TABLE[[*IDS]], ids=IDS).passes == tokens
    assert dump(TABLE[[*IDS]], mapping=mapping, ids=IDS, passes=tokens).passes == tokens


REFUSALS = [
    row("other embeddings", lambda: dump(TABLE[[*IDS]] + 1), "Missing", "--tokens", where="ids:", got="none"),
    row("another width", lambda: dump(np.zeros((3, 95), np.float32)), "Missing", "--tokens", where="ids:", got="none"),
    row("another number of passes", lambda: dump(*[TABLE[[*IDS]]] * 2, ids=IDS),
        "Missing", "command", where="ids:", expected="2 passes", got=1),
    row("outside the vocabulary", lambda: dump(TABLE[[*IDS]], ids=(1, 401, 2)),
        "OutOfRange", where="ids:", expected="0 to 400", got=401),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_tokens_that_are_missing_or_contradict_are_refused(refusal: Refusal):
    refusal.check()
