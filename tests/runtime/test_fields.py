"""Values of a file, read by type: every refusal by its code, its key, what was expected and what stands there."""

import math
from copy import copy
from typing import Any

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses

from llorch.runtime.errors import FormatError, MissingExtra, suggestion
from llorch.runtime.fields import Fields, ReadTrackingDict, shortest


def fields(**values: object) -> Fields:
    return Fields(values, "x.json")


def test_values_of_the_requested_type_are_returned():
    given = fields(n=3, x=0.5, name="llama", on=True, inner={"n": 4})
    assert given.integer("n", low=3) == 3
    assert given.number("x", low=0.5) == 0.5
    assert isinstance(given.number("n"), float)
    assert given.text("name") == "llama"
    assert given.boolean("on", default=False) is True
    inner = given.section("inner")
    assert inner is not None
    assert inner.integer("n") == 4


@pytest.mark.parametrize("values", [{}, {"key": None}])
def test_absent_and_null_values_become_the_default(values):
    given = Fields(values, "x.json")
    assert given.integer("key", default=7) == 7
    assert given.number("key", default=7) == 7.0
    assert given.text("key", default="a") == "a"
    assert given.boolean("key", default=True) is True
    assert given.section("key") is None
    assert not given.has("key")
    given.refuse("key", unless=("silu",), default="silu")


@pytest.mark.parametrize("values", [{}, {"key": None}])
@pytest.mark.parametrize(("getter", "expected"), [("integer", "integer"), ("number", "number"), ("text", "string")])
def test_a_missing_value_is_refused_by_name(values, getter, expected):
    with refuses("Missing", "x.json", where="key", expected=expected, got="nothing"):
        getattr(Fields(values, "x.json"), getter)("key")


LONG = "a" * 1000
OFF = {"default": False}
A_OR_B = {"unless": ("a", "b"), "default": "a"}
ONLY_0 = {"unless": (0,), "default": 0}


@pytest.mark.parametrize(
    ("getter", "options", "value", "code", "expected", "actual"),
    [
        *(("integer", {}, value, "Malformed", "integer", repr(value)) for value in (1.0, True, "1", [1])),
        ("integer", {}, LONG, "Malformed", "integer", f"'{LONG[:79]}... (1002 characters)"),
        ("integer", {"low": 3}, 2, "OutOfRange", 3, "2"),
        *(("number", {}, value, "Malformed", "number", repr(value)) for value in (True, "1e-5", {"a": 1})),
        *(("number", {"low": 1.0}, value, "OutOfRange", 1.0, str(value)) for value in (0.5, math.nan, -math.inf)),
        *(("number", {}, value, "OutOfRange", "finite", str(value)) for value in (math.nan, math.inf)),
        ("number", {}, 10**400, "OutOfRange", "finite", "1" + "0" * 79 + "... (401 characters)"),
        *(("text", {}, value, "Malformed", "string", repr(value)) for value in (1, b"llama")),
        *(("boolean", OFF, value, "Malformed", ("true", "false"), repr(value)) for value in (0, 1, "true")),
        *(("section", {}, value, "Malformed", "object", repr(value)) for value in (5, [])),
        ("refuse", A_OR_B, "c", "Unsupported", ("'a'", "'b'"), "'c'"),
        *(("refuse", ONLY_0, value, "Unsupported", 0, repr(value)) for value in (np.zeros(2, int), [0], {"a": 0})),
    ],
)
def test_a_value_of_another_type_or_range_is_refused_with_the_value(getter, options, value, code, expected, actual):
    with refuses(code, "x.json", where="key", expected=expected) as caught:
        getattr(fields(key=value), getter)("key", **options)
    assert str(caught.value).endswith(f" {actual}")


def test_supported_variant_is_accepted_and_another_refused():
    for given in (fields(act="swish"), fields(act="silu"), fields()):
        given.refuse("act", unless=("silu", "swish"), default="silu")
    for given in (fields(act="gelu"), fields(act="SiLU")):
        with refuses("Unsupported", where="act", expected=("'silu'", "'swish'")):
            given.refuse("act", unless=("silu", "swish"), default="silu")


def test_the_prefix_is_part_of_every_key_and_message():
    given = Fields({"llama.n": 3, "n": 5}, "x.gguf", prefix="llama.")
    assert given.integer("n") == 3
    assert given.has("n")
    with refuses("Missing", "x.gguf", where="llama.m", got="nothing"):
        given.integer("m")


@pytest.mark.parametrize(("error_fields", "path"), [({}, "x.json"), ({"path": "other.json"}, "other.json")])
def test_an_error_without_a_file_gets_the_file_and_one_with_a_file_keeps_it(error_fields: Any, path: str):
    with pytest.raises(FormatError) as caught, fields().adding_path():
        raise FormatError("OutOfRange", "n: got 2", **error_fields)
    assert (str(caught.value), caught.value.code) == (f"{path}: OutOfRange: n: got 2", "OutOfRange")
    assert caught.value.path == path


def test_a_format_error_is_one_line_whatever_the_file_says():
    error = FormatError("BadMagic", "got 'a\nb\x1b[31m\u2028'", path="dir/x\n.gguf", offset=24)
    assert str(error) == r"dir/x\n.gguf: BadMagic: got 'a\nb\x1b[31m\u2028' (byte 24)"
    assert (error.code, error.path, error.offset) == ("BadMagic", "dir/x\n.gguf", 24)
    assert isinstance(error, ValueError)


def test_unrequested_values_are_unread():
    values = ReadTrackingDict({"a": 1, "b": 2, "null": None, "part": {"c": 3, "d": 4}, "whole": {"e": 5}})
    both = Fields(values, "f.json"), Fields(copy(values), "f.json")  # a copy records for both
    assert both[0].integer("a") == 1
    assert not both[0].is_null("b")
    section = both[1].section("part")
    assert section is not None
    assert section.integer("c") == 3
    assert values.unread() == {"b": 2, "part.d": 4, "whole": {"e": 5}}


def test_float32_is_formatted_as_its_shortest_decimal():
    assert shortest(9.999999747378752e-06) == 1e-05
    assert shortest(1e-5) == 1e-5
    assert shortest(500000.0) == 500000.0
    assert shortest(0.1234567890123) == 0.1234567890123
    assert shortest(1e300) == 1e300


def test_error_formats_a_float32_as_its_shortest_decimal():
    assert_tells(str(Fields({}, "f.gguf").error("Unsupported", "eps", "1", float(np.float32(1e-6)))), got=1e-06)


def test_a_missing_package_names_the_extra_that_brings_it():
    error = MissingExtra("golden", "llama_cpp")
    assert_tells(str(error), "llama_cpp", "pip install 'llorch[golden]'", "-e '.[golden]'")
    assert (error.extra, error.package) == ("golden", "llama_cpp")


def test_nearest_name_is_suggested():
    assert_tells(suggestion("valu", ["values", "lora value"]), "'lora value'")
    assert suggestion("zebra", ["values"]) == ""
