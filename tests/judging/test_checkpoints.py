"""Checkpoints 00 to 12 of every built-in model, against the stored goldens of both engines.

pytest -k checkpoint            all
pytest -k checkpoint_01b        one
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from helpers.kept_suites import PARTS, forward_part, forward_rows

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import ENGINES, SAMPLINGS
from llorch.judging.runners.numpy import BACKENDS, FLOAT64
from llorch.judging.types import Comparison
from llorch.judging.verify import verify_stored
from llorch.runtime.builtin import EVERY, FOLDERS, builtin_path
from llorch.stages.comparison import PASS
from llorch.stages.table import BY_NAME, CHECKPOINTS, STAGES
from llorch.stages.training import TRAINING_STAGES

Key = tuple[str, str, str]  # checkpoint, model, stage
Compared = set[tuple[str, str, str]]  # mode, engine, backend


STAGE, DECODE, SAMPLER = PARTS
SHOWN_BY = {"03": (STAGE, DECODE), **dict.fromkeys(("09", "10", "11", "12"), (SAMPLER,))}  # the others: by stages alone


@cache
def comparisons(model: str, parts: Sequence[str] = PARTS) -> dict[Key, list[Comparison]]:
    grouped: dict[Key, list[Comparison]] = {}
    for comparison in (c for part in parts for c in forward_part(model, part)):
        stage_ref = comparison.stage_ref
        grouped.setdefault((stage_ref.checkpoint, comparison.model, stage_ref.name), []).append(comparison)
    return grouped


def expected(model: str) -> dict[Key, Compared]:
    """Every comparison; those of the file itself first."""
    config = open_weights(builtin_path(model)).config
    found: dict[Key, Compared] = {
        ("00", model, "tensors"): {("exact", "reader", "numpy")},
        ("00", model, "token_ids"): {("exact", "transformers" if model in FOLDERS else "llamacpp", "numpy")},
    }
    engines = ("transformers",) if model == "micro-mistral" else ENGINES  # llama.cpp reads no window
    for engine, backend in (*product(engines, BACKENDS), (FLOAT64_REFERENCE, FLOAT64)):
        for number, stage, mode in places(config):
            found.setdefault((number, model, stage), set()).add((mode, engine, backend))
    return found


def places(config: ModelConfig) -> Iterator[tuple[str, str, str]]:
    for stage in (stage for stage in STAGES if stage.applies_to(config)):
        yield from ((stage.checkpoint, stage.name, mode) for mode in ("isolated", "chained"))
        yield "03", stage.name, "decode"
    yield "09", "selected_logits", "chained"
    yield "10", "argmax", "exact"
    yield from (("11", f"probabilities.{name}", "isolated") for name in SAMPLINGS)
    yield "12", "generation", "exact"


EXPECTED = {key: comparisons for model in EVERY for key, comparisons in expected(model).items()}
BY_MODEL = sorted(EXPECTED, key=lambda key: (key[1], key))  # tests of one model stay in one process


@pytest.mark.parametrize("key", BY_MODEL, ids=lambda key: "checkpoint_" + "-".join(key))
def test_checkpoint(key: Key):
    number, model, _ = key
    found = comparisons(model, SHOWN_BY.get(number, (STAGE,))).get(key, [])
    assert {(c.mode, c.engine, c.backend) for c in found} == EXPECTED[key]
    bad = [c for c in found if c.verdict != PASS]  # stored models have no near-ties
    assert not bad, f"{len(bad)} of {len(found)} rows do not pass, first: {bad[0]}"


@pytest.mark.parametrize("model", EVERY)
def test_checkpoint_rows_are_all_looked_at_and_cover_every_layer_and_case(model: str):
    assert comparisons(model).keys() == {key for key in EXPECTED if key[1] == model}
    config = open_weights(builtin_path(model)).config
    found: dict[tuple[str, ...], set[tuple[str, int | None]]] = {}
    for comparison in forward_rows(model):
        if comparison.stage_ref.name in {s.name for s in STAGES if s.in_layer} and comparison.mode != "decode":
            key = comparison.stage_ref.name, comparison.mode, comparison.engine, comparison.backend
            found.setdefault(key, set()).add((comparison.stage_ref.run, comparison.stage_ref.layer))
    for (stage, *_), places in found.items():
        layers = [layer for layer in range(config.n_layers) if BY_NAME[stage].applies_to(config, layer)]
        assert places == set(product(("near", "far"), layers)), stage


def test_comparisons_made_in_parts_equal_verify_stored():
    assert forward_rows("micro-mistral") == list(verify_stored("micro-mistral", long=False))


def test_every_checkpoint_has_a_test():
    folder = Path(__file__).parent
    with_a_file = {number for number in CHECKPOINTS if (folder / f"test_checkpoint_{number}.py").is_file()}
    found = {number for number, *_ in EXPECTED} | with_a_file
    assert found | {stage.checkpoint for stage in TRAINING_STAGES} == set(CHECKPOINTS)  # test_training_checkpoints.py
