"""Values of a file, read by type: every refusal by its text."""

import math

import numpy as np
import pytest

from llorch.errors import FormatError, MissingExtra, suggestion
from llorch.fields import Fields


def fields(**values: object) -> Fields:
    return Fields(values, "x.json")


def refusal(call) -> FormatError:
    with pytest.raises(FormatError) as caught:
        call()
    return caught.value


def test_values_of_the_wanted_type_are_handed_out():
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
    assert given.optional_number("key") is None
    assert given.section("key") is None
    assert not given.has("key")
    given.refuse("key", unless=("silu",), default="silu")


@pytest.mark.parametrize("values", [{}, {"key": None}])
@pytest.mark.parametrize(
    ("getter", "expected"), [("integer", "an integer"), ("number", "a number"), ("text", "a string")]
)
def test_a_missing_value_is_refused_by_name(values, getter, expected):
    error = refusal(lambda: getattr(Fields(values, "x.json"), getter)("key"))
    assert error.code == "Missing"
    assert str(error) == f"x.json: Missing: key: expected {expected}, got nothing"


@pytest.mark.parametrize(
    ("getter", "value", "expected"),
    [
        ("integer", 1.0, "an integer, got 1.0"),
        ("integer", True, "an integer, got True"),
        ("integer", "1", "an integer, got '1'"),
        ("integer", [1], "an integer, got [1]"),
        ("number", True, "a number, got True"),
        ("number", "1e-5", "a number, got '1e-5'"),
        ("number", {"a": 1}, "a number, got {'a': 1}"),
        ("optional_number", "1", "a number, got '1'"),
        ("text", 1, "a string, got 1"),
        ("text", b"llama", "a string, got b'llama'"),
        ("section", 5, "an object, got 5"),
        ("section", [], "an object, got []"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_value(getter, value, expected):
    error = refusal(lambda: getattr(fields(key=value), getter)("key"))
    assert str(error) == f"x.json: Malformed: key: expected {expected}"


@pytest.mark.parametrize("value", [0, 1, "true", "false"])
def test_only_true_and_false_are_booleans(value):
    error = refusal(lambda: fields(key=value).boolean("key", default=False))
    assert str(error) == f"x.json: Malformed: key: expected true or false, got {value!r}"


def test_numbers_below_the_limit_are_refused_with_the_limit():
    assert str(refusal(lambda: fields(key=2).integer("key", low=3))) == (
        "x.json: OutOfRange: key: expected at least 3, got 2"
    )
    assert str(refusal(lambda: fields(key=0.5).number("key", low=1.0))) == (
        "x.json: OutOfRange: key: expected at least 1.0, got 0.5"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_numbers_that_are_not_finite_are_refused(value):
    error = refusal(lambda: fields(key=value).number("key"))
    assert error.code == "OutOfRange"
    assert str(error).startswith("x.json: OutOfRange: key: expected a finite number, got ")
    assert refusal(lambda: fields(key=value).number("key", low=1.0)).code == "OutOfRange"


def test_a_long_value_is_shown_shortened():
    error = refusal(lambda: fields(key="a" * 1000).integer("key"))
    assert str(error) == "x.json: Malformed: key: expected an integer, got '" + "a" * 76 + "..."


def test_the_prefix_is_part_of_every_key_and_message():
    given = Fields({"llama.n": 3, "n": 5}, "x.gguf", prefix="llama.")
    assert given.integer("n") == 3
    assert given.has("n")
    assert str(refusal(lambda: given.integer("m"))) == "x.gguf: Missing: llama.m: expected an integer, got nothing"


def test_a_variant_that_llorch_lacks_is_refused_with_what_it_has():
    fields(act="silu").refuse("act", unless=("silu", "swish"), default="silu")
    error = refusal(lambda: fields(act="gelu").refuse("act", unless=("silu", "swish"), default="silu"))
    assert str(error) == "x.json: Unsupported: act: expected 'silu' or 'swish', got 'gelu'"


@pytest.mark.parametrize("value", [np.array([0, 0]), [0], {"a": 0}])
def test_a_list_in_place_of_one_value_is_refused(value):
    error = refusal(lambda: fields(experts=value).refuse("experts", unless=(0,), default=0))
    assert error.code == "Unsupported"
    assert "experts: expected 0, got" in str(error)


def test_an_error_without_a_file_gets_the_file():
    error = refusal(lambda: raise_named(FormatError("OutOfRange", "config: n must be 1, got 2")))
    assert str(error) == "x.json: OutOfRange: config: n must be 1, got 2"
    assert error.code == "OutOfRange"
    assert error.path == "x.json"


def test_an_error_with_a_file_keeps_it():
    error = refusal(lambda: raise_named(FormatError("Missing", "m", path="other.json")))
    assert str(error) == "other.json: Missing: m"


def raise_named(error: FormatError) -> None:
    with fields().naming_the_file():
        raise error


def test_a_format_error_is_one_line_whatever_the_file_says():
    error = FormatError("BadMagic", "got 'a\nb\x1b[31m\u2028'", path="dir/x\n.gguf", offset=24)
    assert str(error) == r"dir/x\n.gguf: BadMagic: got 'a\nb\x1b[31m\u2028' (byte 24)"
    assert (error.code, error.path, error.offset) == ("BadMagic", "dir/x\n.gguf", 24)
    assert isinstance(error, ValueError)


def test_a_missing_package_names_the_extra_that_brings_it():
    error = MissingExtra("golden", "llama_cpp")
    assert str(error) == (
        "llama_cpp is not installed; get it with: pip install 'llorch[golden]', "
        "or in a clone: pip install -c constraints.txt -e '.[golden]'"
    )
    assert (error.extra, error.package) == ("golden", "llama_cpp")


def test_of_several_names_the_nearest_is_suggested():
    assert suggestion("valu", ["values", "lora value"]) == "; did you mean 'lora value'?"
    assert suggestion("zebra", ["values"]) == ""
