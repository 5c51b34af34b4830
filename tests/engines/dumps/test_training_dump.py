"""Training dumps read: every name and shape that fits, and one clear line for those that do not."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.refusals import Refusal, assert_tells, refuses, row

from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.engines.dumps.training_dump import TrainingDump, training_dump
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.lora.adapter import Adapter
from llorch.runtime.builtin import builtin_path
from llorch.stages.stage_ref import Tokens
from llorch.training.batch import IGNORED

IDS = np.array([[5, 6, 7, 8], [9, 4, 0, 0]])
LABELS = np.array([[-100, 6, 7, 8], [-100, 4, -100, -100]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
BATCH = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}
TENSOR = "layers.1.q_proj.lora_A"


@cache
def config() -> ModelConfig:
    return open_weights(builtin_path("micro-qwen3")).config


@cache
def adapter() -> Adapter:
    return make_adapter(config())


def make_raw_dump(arrays: Mapping[str, Any], passes: tuple[Tokens, ...] = (), layer: int | None = None) -> RawDump:
    given = {name: np.asarray(array) for name, array in arrays.items()}
    found = [(0, RawArray(name, str(a.dtype), a.shape, lambda a=a: a, layer=layer)) for name, a in given.items()]
    return RawDump("dump", tuple(found), passes)


def read(**arrays: object) -> TrainingDump:
    return training_dump(make_raw_dump(BATCH | {"loss": 1.5} | arrays), adapter())


@pytest.mark.parametrize(
    "name",
    [
        "grad.base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "grad.base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight.grad",
        "grad.l1.q_proj.lora_A",
        "grad.layers.1.q_proj.lora_A",
        "step1.grad.l1.q_proj.lora_A",
    ],
)
def test_tensor_has_its_peft_or_llorch_name(name: str):
    array = adapter().flat()[TENSOR] + 1
    shown = read(**{name: array}).steps[0].shown["gradient", TENSOR]
    assert (shown.name, shown.stored) == (name, "float32")
    np.testing.assert_array_equal(shown.array, array)


def test_layer_may_be_given_separately():
    arrays = (
        make_raw_dump(BATCH).arrays + make_raw_dump({"grad.q_proj.lora_A": adapter().flat()[TENSOR]}, layer=1).arrays
    )
    assert [*training_dump(RawDump("dump", arrays), adapter()).steps[0].shown] == [("gradient", TENSOR)]


def test_rows_become_documents_without_padding():
    (batch,) = read().steps[0].batches
    assert [ids.tolist() for ids, _ in batch.each_document()] == [[5, 6, 7, 8], [9, 4]]
    assert batch.n_trained == 4


def test_packed_rows_split_at_position_restarts_and_first_labels_are_masked():
    rows = {"input_ids": IDS[:1], "labels": IDS[:1], "position_ids": [[0, 1, 0, 1]]}
    (batch,) = training_dump(make_raw_dump(rows | {"loss": 1.0}), adapter()).steps[0].batches
    assert [labels.tolist() for _, labels in batch.each_document()] == [[IGNORED, 6], [IGNORED, 8]]


@pytest.mark.parametrize(
    ("declared", "last_position"),
    [
        ({"document_ids": [[7, 7, 3, 3]]}, 3),  # positions may run on
        ({"document_ids": [[7, 7, 3, 3]], "position_ids": [[0, 1, 0, 1]]}, 1),
        ({"cu_seqlens": [0, 2, 4], "position_ids": [[0, 1, 2, 3]]}, 3),
        ({"cu_seqlens": [0, 2, 4, 4]}, 3),
    ],
)
def test_declared_documents_split_a_row_wherever_positions_restart(declared: dict[str, Any], last_position: int):
    rows = {"input_ids": IDS[:1], "labels": IDS[:1], "loss": 1.0}
    dump = training_dump(make_raw_dump(rows | declared), adapter())
    (batch,) = dump.steps[0].batches
    assert [labels.tolist() for _, labels in batch.each_document()] == [[IGNORED, 6], [IGNORED, 8]]
    assert dump.last_position == last_position


def test_document_without_labels_is_skipped_with_a_note():
    dump = read(labels=np.where(np.arange(2)[:, None] == 0, LABELS, -100))
    assert [ids.tolist() for ids, _ in dump.steps[0].batches[0].each_document()] == [[5, 6, 7, 8]]
    (note,) = dump.notes
    assert_tells(note, "1 documents", "step 1")


@pytest.mark.parametrize(
    ("losses", "rows"),
    [
        (np.array([1.0, 2.0, 3.0, 4.0]), [1, 1, 1, 0, 1, 0]),  # of learned tokens alone
        (np.array([[1.0, 2.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]]), [1] * 6),
        (np.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), [1, 1, 1, 0, 1, 1]),  # without the last column
    ],
)
def test_token_losses_align_with_their_logits(losses: np.ndarray, rows: list[int]):
    shown = read(token_losses=losses).steps[0].shown["token_losses", ""]
    assert shown.array.tolist() == [1, 2, 3, 0, 4, 0]
    assert shown.rows is not None
    assert shown.rows.tolist() == [bool(row) for row in rows]


def test_steps_micro_batches_and_settings_are_identified_by_name():
    arrays = {f"step3.micro{k}.{name}": array for k in (1, 2) for name, array in BATCH.items()}
    arrays |= {"step2.exp_avg.l1.q_proj.lora_A": adapter().flat()[TENSOR], "step3.loss": 2.0, "betas": [0.8, 0.9]}
    dump = training_dump(make_raw_dump(arrays | {"lr": 0.5, "step3.lr": 0.25}), adapter())
    assert [(step.number, len(step.batches), step.lr) for step in dump.steps] == [(2, 0, 0.5), (3, 2, 0.25)]
    assert (dump.settings.betas, dump.settings.eps, dump.declared) == ((0.8, 0.9), 1e-8, {"betas", "lr"})


def test_passes_are_micro_batches_of_one_row_where_there_are_no_ids():
    dump = training_dump(make_raw_dump({"loss": 1.0}, (Tokens((5, 6, 7)), Tokens((8, 9)))), adapter())
    assert [batch.labels.tolist() for batch in dump.steps[0].batches] == [[[-100, 6, 7]], [[-100, 9]]]


def refused_dump(name: str, arrays: dict[str, object], *facts: object, **fields: object) -> Any:
    """A row of an array that fits nothing; the arrays are those beside or in place of the right ones."""
    return row(name, lambda: read(**arrays), ValueError, "training dump:", *facts, **fields)


LOGITS, KNOWN = np.ones((2, 4, 7)), ("input_ids, labels", "grad, clipped, exp_avg_sq, exp_avg, param")
REFUSALS = [
    refused_dump("a layer too far", {"grad.l9.q_proj.lora_A": np.ones((2, 64))}, "'grad.l9.q_proj.lora_A'", *KNOWN),
    refused_dump("no kind", {"l1.q_proj.lora_A": np.ones((2, 64))}, "'l1.q_proj.lora_A'", *KNOWN),
    refused_dump("transposed", {"grad.l1.q_proj.lora_A": np.ones((64, 2))},
          where="grad.l1.q_proj.lora_A:", expected="(2, 64)", got="(64, 2)"),
    refused_dump("labels cut", {"labels": LABELS[:, :2]},
          "step 1", expected="shape", got=("input_ids (2, 4)", "labels (2, 2)")),
    refused_dump("documents too short", {"cu_seqlens": [0, 3, 7]}, where="cu_seqlens:", expected=8, got="[0, 3, 7]"),
    refused_dump("logits cut", {"logits": np.ones((2, 3, 7))}, where="logits:", expected="(2, 4)", got="(2, 3, 7)"),
    refused_dump("losses cut", {"token_losses": np.ones(3)}, where="token_losses:", expected=("(2, 4)", 4), got="(3,)"),
    refused_dump("two losses", {"loss": np.ones(2)}, where="loss:", expected="one number", got="(2,)"),
    refused_dump("beta of 1", {"betas": [0.9, 1.0]}, where="betas:", expected=2, got="(0.9, 1.0)"),
    refused_dump("negative eps", {"eps": -1.0}, where="eps:", expected=1, got="(-1.0,)"),
    refused_dump("logits of no micro-batch", {"micro2.logits": LOGITS, "logits": LOGITS},
          where="logits of step 1:", expected="[1]", got="[1, 2]"),
    refused_dump("a step left out", {"step3.input_ids": IDS}, expected=("ids", "steps"), got="[1, 3]"),
    *(row(f"{what} alone", lambda arrays=arrays: training_dump(make_raw_dump(arrays), adapter()),
          ValueError, "training dump:", "(dump)", expected="ids", got=("neither", "one"))
      for what, arrays in {"ids": BATCH, "loss": {"loss": 1.0}}.items()),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_unknown_array_is_refused_in_one_line(refusal: Refusal):
    with refuses(refusal.kind, *refusal.facts, **refusal.fields) as caught:
        refusal.make()
    assert "\n" not in str(caught.value)
