"""Answers in the form of a JSON schema, by models whose weights know nothing of JSON."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from helpers.refusals import Refusal, refuses, row

from llorch.apps.serve.grammar import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, guide_for
from llorch.model.cache import KVCache
from llorch.model.generate import Answer, Guide
from llorch.model.model import Model, load
from llorch.ops.sampling import SamplingSettings, draw, probabilities

MODELS = ("story", "micro-llama", "micro-qwen3")  # vocabularies of both kinds
COLOURS = {"enum": ["red", "green", 'with "quotes"', "ünïcode \u2713", 7, None]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "colour": COLOURS,
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}}, "$ref": "#/$defs/node"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "tree": TREE,
    "colours": COLOURS,
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]+$", "maxLength": 9},
    "number": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 3},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 5000},
    "either": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                                            "additionalProperties": False}]},
    "both": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "some": {"type": "object", "patternProperties": {"^[a-c]{1,3}$": {"type": "integer", "maximum": 9, "minimum": 0}},
             "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
    "date": {"type": "string", "format": "date"},
}  # fmt: skip


@cache
def model(name: str) -> Model:
    return load(name)


def guide(schema: dict[str, Any] | None, name: str = "story", **options: Any) -> Guide:
    return guide_for(model(name).tokenizer, schema, vocab_size=model(name).config.vocab_size, **options)


def answer(name: str, schema: dict[str, Any] | None, *, seed: int, max_tokens: int = 100) -> tuple[str, str | None]:
    """Sample as a batch does; the text, and why it ended."""
    loaded, made, rng = model(name), guide(schema, name), np.random.default_rng(seed)
    settings, text = SamplingSettings(temperature=1.3, seed=seed), ""
    ids = new = loaded.tokenizer.encode("Once")
    cache = KVCache.of(loaded.weights)
    taken = Answer(loaded.tokenizer, end_ids=loaded.tokenizer.eos_token_ids, max_tokens=max_tokens)
    while taken.finish is None:
        logits = np.where(made.allowed(), loaded.forward(new, cache=cache)[-1], np.float32(-np.inf))
        token = draw(probabilities(logits, settings, ids), float(rng.random()))
        made.take(token)
        ids, new = [*ids, token], [token]
        text += taken.take(token, 0.0).text
    return text, taken.finish


def feed(guide: Guide, text: str, name: str = "story") -> bool:
    """Tell whether a text may be taken, with the longest token that fits each time."""
    tokenizer, rest = model(name).tokenizer, text.encode()
    while rest:
        allowed = [(tokenizer.token_bytes(int(one)), int(one)) for one in np.flatnonzero(guide.allowed())]
        data, token = max(((data, one) for data, one in allowed if data and rest.startswith(data)), default=(b"", 0))
        if not data:
            return False
        guide.take(token)
        rest = rest[len(data) :]
    return True


@pytest.mark.slow_cases(but=["both-story", "either-micro-llama", "either-story", "multiple-micro-qwen3"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("which", SCHEMAS)
def test_every_answer_that_ends_is_of_the_schema(which: str, name: str):
    ended = [text for text, why in (answer(name, SCHEMAS[which], seed=seed) for seed in range(2)) if why == "eos"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMAS[which], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", MODELS)
def test_answer_without_a_schema_is_any_object(name: str):
    made = guide(None, name)
    assert feed(made, '{"a": [1, {"b": "c"}], "\u00e9": null}', name)
    assert not feed(guide(None, name), "[1]", name)


def test_end_tokens_may_come_exactly_where_the_form_is_complete_and_nothing_comes_after_one():
    ends = np.isin(np.arange(1003), list(model("story").tokenizer.eos_token_ids))
    made = guide({"type": "integer", "minimum": 10, "maximum": 999})
    seen = []
    for digit in "123":
        assert feed(made, digit)
        seen.append(bool(made.allowed()[ends].all()))
    assert seen == [False, True, True]
    np.testing.assert_array_equal(made.allowed(), ends)  # nothing but an end
    made.take(int(np.flatnonzero(ends)[0]))
    np.testing.assert_array_equal(made.allowed(), ends)


def test_an_end_ends_where_the_form_could_go_on():
    made = guide({"type": "integer"})
    assert feed(made, "4")
    made.take(next(iter(model("story").tokenizer.eos_token_ids)))
    assert made.allowed().sum() == 2  # the two ends: no digit


def test_control_tokens_never_come_inside_and_their_text_may():
    tokenizer = model("story").tokenizer
    made = guide({"type": "string"})
    assert feed(made, '"a <|eot_id|> b')
    assert not made.allowed()[sorted(tokenizer.control_ids)].any()


def test_caller_chooses_the_tokens_that_end_an_answer():
    made = guide({"const": 5}, end_ids=frozenset([1001]))
    assert feed(made, "5")
    assert np.flatnonzero(made.allowed()).tolist() == [1001]
    with refuses(ValueError, "json schema", "ignore_eos", expected="token"):
        guide({"const": 5}, end_ids=frozenset())


def test_rows_without_a_token_are_never_allowed():
    tokenizer = model("story").tokenizer
    made = guide_for(tokenizer, {"type": "string"}, vocab_size=1040)
    assert feed(made, '"a')
    assert made.allowed().shape == (1040,)
    assert made.allowed()[:1003].any()
    assert not made.allowed()[1003:].any()


def test_tokens_that_were_not_allowed_are_refused():
    made = guide(PERSON)
    with refuses("Unsupported", "json schema", "grammar"):
        made.take(3)


@pytest.mark.parametrize("text", ["{  ", '{"a":\n\n\n', '{"a":\n' + 21 * " "])
def test_blanks_are_bounded(text: str):
    assert feed(guide(None), '{\n    "a": 1,\n\t"b":2\n}')
    assert not feed(guide(None), text)
    assert not feed(guide({"type": "object", "x-guidance": {"whitespace_pattern": "[ \\n]+"}}), text)


def test_answers_of_one_model_do_not_disturb_each_other():
    first, second = guide(PERSON), guide(TREE)
    assert feed(first, '{"name": "')
    assert feed(second, "[[")
    assert feed(first, 'A", "age": 20}')
    assert feed(second, "]]")


UNSUPPORTED = {
    "oneOf": {"oneOf": [{"type": "object"}, {"required": ["a"]}]}, "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True}, "if": {"if": {}, "then": {}},
    "contains": {"contains": {}}, "propertyNames": {"propertyNames": {}},
    "dependentRequired": {"dependentRequired": {}}, "type": {"type": "nonsense"},
    "look": {"type": "string", "pattern": "(?=a)b"}, "format": {"type": "string", "format": "x"},
    "remote": {"$ref": "http://127.0.0.1:9/schema.json"}, "file": {"$ref": "file:///etc/hostname"},
    "nowhere": {"$ref": "#/$defs/x"}, "itself": {"$ref": "#"}, "never": {"type": "integer", "minimum": 5, "maximum": 1},
    "lenient": {"uniqueItems": True, "x-guidance": {"lenient": True}},
}  # fmt: skip


@pytest.mark.parametrize("which", UNSUPPORTED)
def test_unsupported_schema_features_are_refused_in_a_line(which: str):
    with refuses("Unsupported", "json schema") as caught:
        guide(UNSUPPORTED[which])
    line = str(caught.value)
    assert len(line) < 400
    assert "\n" not in line
    assert "<" not in line


A, B = "#/$defs/a", "#/$defs/b~1b"


@pytest.mark.parametrize(
    ("schema", "cycle"),
    [
        ({"$ref": "#"}, "# -> #"),
        ({"$ref": A, "$defs": {"a": {"$ref": A}}}, f"{A} -> {A}"),
        ({"$ref": A, "$defs": {"a": {"$ref": B}, "b/b": {"anyOf": [{"$ref": A}]}}}, f"{A} -> {B} -> {A}"),
        ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "# -> #"),
    ],
)
def test_references_that_lead_to_each_other_are_named(schema: dict[str, Any], cycle: str):
    with refuses("Unsupported", cycle, "$ref", where="json schema"):
        guide(schema)


def test_a_schema_that_holds_itself_below_a_type_is_no_cycle():
    guide({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def too_large(name: str, make: Callable[[], dict[str, Any]], limit: str, value: int, actual: int | str) -> Any:
    return row(name, lambda: guide(make()), "TooLarge", "json schema", expected=(limit, value), got=actual)


@pytest.mark.slow_cases("deep")
@pytest.mark.parametrize(
    "refusal",
    [
        too_large("deep", lambda: deep(100_000), "depth", MAX_DEPTH, "more"),
        too_large("a level more", lambda: deep(MAX_DEPTH + 1), "depth", MAX_DEPTH, "more"),
        too_large("values", lambda: {"enum": list(range(MAX_VALUES - 1))}, "values", MAX_VALUES, "more"),
        too_large("characters", lambda: {"const": "x" * MAX_CHARACTERS}, "characters", MAX_CHARACTERS, 65549),
        too_large("multiples", lambda: {"anyOf": [{"multipleOf": n} for n in (101, 102)]}, "multipleOf", 10_000, 10302),
        too_large("a fine multiple", lambda: {"type": "number", "multipleOf": 1.00001}, "multipleOf", 10_000, 100001),
        too_large("endless multiple", lambda: {"multipleOf": float("inf")}, "multipleOf", 10_000, 10001),
    ],
)
def test_expensive_schema_is_refused_before_any_work(refusal: Refusal):
    refusal.check()


def test_numbers_that_json_has_not_are_refused():
    with refuses("Malformed", "json schema", expected="finite", got=("NaN", "infinity")):
        guide({"minimum": float("nan")})


def test_a_schema_at_the_limits_is_taken():
    assert feed(guide(deep(MAX_DEPTH)), "[[[")
    assert feed(guide({"enum": list(range(MAX_VALUES - 2))}), str(MAX_VALUES - 3))
    assert feed(guide({"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}), '{"p999": 1')


def test_a_step_that_costs_too_much_is_the_end_of_that_answer():
    made = guide({"type": "string", "pattern": "(a*)*b(.{0,1000}){0,1000}"})
    with refuses("Unsupported", "json schema", "too many"):
        feed(made, '"ab' + "a " * 300)
