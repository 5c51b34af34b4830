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
    assert given.section("key") is None
    assert not given.has("key")
    given.refuse("key", unless=("silu",), default="silu")


@pytest.mark.parametrize("values", [{}, {"key": None}])
@pytest.mark.parametrize(
    ("getter", "expected"), [("integer", "an integer"), ("number", "a number"), ("text", "a string")]
)
def test_a_missing_value_is_refused_by_name(values, getter, expected):
    error = refusal(lambda: getattr(Fields(values, "x.json"), getter)("key"))
    assert str(error) == f"x.json: Missing: key: expected {expected}, got nothing"


@pytest.mark.parametrize(
    ("getter", "how", "value", "told"),
    [
        ("integer", {}, 1.0, "Malformed: key: expected an integer, got 1.0"),
        ("integer", {}, True, "Malformed: key: expected an integer, got True"),
        ("integer", {}, "1", "Malformed: key: expected an integer, got '1'"),
        ("integer", {}, [1], "Malformed: key: expected an integer, got [1]"),
        ("integer", {}, "a" * 1000, "Malformed: key: expected an integer, got '" + "a" * 76 + "..."),
        ("integer", {"low": 3}, 2, "OutOfRange: key: expected at least 3, got 2"),
        ("number", {}, True, "Malformed: key: expected a number, got True"),
        ("number", {}, "1e-5", "Malformed: key: expected a number, got '1e-5'"),
        ("number", {}, {"a": 1}, "Malformed: key: expected a number, got {'a': 1}"),
        ("number", {"low": 1.0}, 0.5, "OutOfRange: key: expected at least 1.0, got 0.5"),
        *(("number", {}, x, f"OutOfRange: key: expected a finite number, got {x}") for x in (math.nan, math.inf)),
        ("number", {}, 10**400, "OutOfRange: key: expected a finite number, got 1" + "0" * 76 + "..."),
        *(
            ("number", {"low": 1.0}, x, f"OutOfRange: key: expected at least 1.0, got {x}")
            for x in (math.nan, -math.inf)
        ),
        ("text", {}, 1, "Malformed: key: expected a string, got 1"),
        ("text", {}, b"llama", "Malformed: key: expected a string, got b'llama'"),
        *(
            ("boolean", {"default": False}, x, f"Malformed: key: expected true or false, got {x!r}")
            for x in (0, 1, "true")
        ),
        ("section", {}, 5, "Malformed: key: expected an object, got 5"),
        ("section", {}, [], "Malformed: key: expected an object, got []"),
        ("refuse", {"unless": ("a", "b"), "default": "a"}, "c", "Unsupported: key: expected 'a' or 'b', got 'c'"),
        ("refuse", {"unless": (0,), "default": 0}, np.zeros(2, int), "Unsupported: key: expected 0, got array([0, 0])"),
        ("refuse", {"unless": (0,), "default": 0}, [0], "Unsupported: key: expected 0, got [0]"),
        ("refuse", {"unless": (0,), "default": 0}, {"a": 0}, "Unsupported: key: expected 0, got {'a': 0}"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused_with_the_value(getter, how, value, told):
    assert str(refusal(lambda: getattr(fields(key=value), getter)("key", **how))) == f"x.json: {told}"


def test_a_variant_that_llorch_has_is_taken():
    fields(act="swish").refuse("act", unless=("silu", "swish"), default="silu")


def test_the_prefix_is_part_of_every_key_and_message():
    given = Fields({"llama.n": 3, "n": 5}, "x.gguf", prefix="llama.")
    assert given.integer("n") == 3
    assert given.has("n")
    assert str(refusal(lambda: given.integer("m"))) == "x.gguf: Missing: llama.m: expected an integer, got nothing"


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
