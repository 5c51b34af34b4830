"""Checkpoints 00 to 12 of every built-in model, against the stored goldens of both producers.

pytest -k checkpoint            all
pytest -k checkpoint_01b        one
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from llorch.builtin import BUILTIN, builtin_path
from llorch.files import open_weights
from llorch.stages import CHECKPOINTS, STAGES
from llorch.verify.goldens import PRODUCERS, SAMPLINGS
from llorch.verify.judge import PASS, Row
from llorch.verify.models import verify_stored
from llorch.verify.runners.numpy import BACKENDS, FLOAT64
from llorch.verify.training.stages import TRAINING_STAGES
from llorch.verify.truth import WITNESS

Key = tuple[str, str, str, str, str, str]  # checkpoint, model, stage, mode, producer, backend


@cache
def rows(model: str) -> dict[Key, list[Row]]:
    grouped: dict[Key, list[Row]] = {}
    for row in verify_stored(model):
        key = (row.checkpoint, row.model, row.stage, row.mode, row.producer, row.backend)
        grouped.setdefault(key, []).append(row)
    return grouped


def expected_keys(model: str) -> Iterator[Key]:
    config = open_weights(builtin_path(model)).config
    yield "00", model, "tensors", "exact", "reader", "numpy"
    yield "00", model, "token_ids", "exact", "llamacpp", "numpy"
    for producer, backend in (*product(PRODUCERS, BACKENDS), (WITNESS, FLOAT64)):
        for stage in STAGES:
            if stage.applies_to(config):
                yield stage.checkpoint, model, stage.name, "isolated", producer, backend
                yield stage.checkpoint, model, stage.name, "chained", producer, backend
                yield "03", model, stage.name, "decode", producer, backend
        yield "09", model, "selected_logits", "chained", producer, backend
        yield "10", model, "argmax", "exact", producer, backend
        for name in SAMPLINGS:
            yield "11", model, f"probabilities.{name}", "isolated", producer, backend
        yield "12", model, "generation", "exact", producer, backend


def keys_by_checkpoint() -> list[Key]:
    found = [key for model in BUILTIN for key in expected_keys(model)]
    return sorted(found, key=lambda key: list(CHECKPOINTS).index(key[0]))


@pytest.mark.parametrize("key", keys_by_checkpoint(), ids=lambda key: "checkpoint_" + "-".join(key))
def test_checkpoint(key: Key):
    found = rows(key[1]).get(key, [])
    assert found, f"{key}: no comparison was made"
    bad = [row for row in found if row.verdict != PASS]  # stored models have no near-ties
    assert not bad, f"{len(bad)} of {len(found)} rows do not pass, first: {bad[0]}"


@pytest.mark.parametrize("model", BUILTIN)
def test_checkpoint_rows_are_all_looked_at(model: str):
    assert rows(model).keys() == set(expected_keys(model))


@pytest.mark.parametrize("model", BUILTIN)
def test_checkpoint_rows_cover_every_layer_and_case(model: str):
    config = open_weights(builtin_path(model)).config
    for (_, _, stage, mode, *_), found in rows(model).items():
        if stage in {s.name for s in STAGES if s.in_layer} and mode != "decode":
            assert {(r.case, r.layer) for r in found} == {
                (case, layer) for case in ("near", "far") for layer in range(config.n_layers)
            }


def test_every_checkpoint_has_a_test():
    with_a_file_of_its_own = {
        number for number in CHECKPOINTS if Path(__file__).with_name(f"test_checkpoint_{number}.py").is_file()
    }
    found = {key[0] for key in keys_by_checkpoint()} | with_a_file_of_its_own
    assert found | {stage.checkpoint for stage in TRAINING_STAGES} == set(CHECKPOINTS)  # test_training_checkpoints.py
