"""Numbers on the command line: no option of any verb takes a value that a library cannot hold."""

from typing import Any

import click
import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, refuses

from llorch.cli.lora.settings_options import Pair
from llorch.ops.sampling import SamplingSettings
from llorch.training.settings import TrainSettings
from tests.cli.test_help import ALL

NUMBERS = click.types.IntParamType, click.types.FloatParamType
OF_SAMPLING = {"temperature", "top_p", "min_p", "repetition_penalty"}  # ranges that Python users share


FOUND = {  # each number that a command or one of its verbs takes
    f"{path.removeprefix('llorch ')} {param.opts[-1]}": param
    for path, context in ALL.items()
    for param in context.command.params
    if isinstance(param.type, NUMBERS)
}


def test_the_numbers_of_all_verbs_are_found():
    for name in ("run --threads", "run --rank-timeout", "lora train --lr", "quality --context", "learn check --seconds",
                 "serve --timeout", "bench --rounds", "learn museum open number"):  # fmt: skip
        assert name in FOUND
    assert len(FOUND) > 60


@pytest.mark.parametrize("name", FOUND)
def test_an_option_refuses_what_no_library_can_hold(name: str):
    param = FOUND[name]
    for text in ("nan", "inf", "-inf", str(2**64), str(-(2**64))):
        is_float = isinstance(param.type, click.types.FloatParamType)
        if param.name in OF_SAMPLING:
            if text in ("nan", "inf", "-inf"):
                settings: dict[str, Any] = {param.name: float(text)}
                with refuses(ValueError, param.name):
                    SamplingSettings(**settings)
        elif is_float and text.lstrip("-").isdecimal() and getattr(param.type, "max", 0) is None:
            continue  # a float64 holds it
        elif text.startswith("-") and getattr(param.type, "min", 0) is None and not is_float:
            continue  # what computes refuses a negative number, with the range that it has
        else:
            with pytest.raises(click.BadParameter):
                param.type.convert(text, param, None)


@pytest.mark.parametrize(
    "words",
    ["run story x --threads 0", "run story x --threads 18446744073709551616", "run story x --threads 1025",
     "run story x --mesh tp=2 --rank-timeout nan", "run story x --mesh tp=2 --rank-timeout inf",
     "run story x --mesh tp=2 --rank-timeout 1e300", "run story x --mesh tp=2 --rank-timeout 0",
     "serve story --timeout nan", "quality story --text README.md --context -1", "learn check --seconds inf",
     "lora train story --data pirate -o new --alpha nan", "lora train story --data pirate -o new --alpha-pattern q=nan",
     "lora train story --data pirate -o new --rank-pattern q=18446744073709551616", "run story x --seed -1",
     "run story x --top-k -1", "bench --rounds 18446744073709551616"],
)  # fmt: skip
def test_a_command_with_such_a_number_ends_with_exit_code_2(words: str):
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, "Traceback" in result.stderr) == (2, "", False), result.stderr


@pytest.mark.parametrize("name", ["r", "steps", "batch_size", "max_length", "epochs", "keep", "save_every"])
def test_a_settings_file_refuses_such_a_count(name: str):
    counts: dict[str, Any] = {name: 2**64}
    with refuses(ValueError, name, 2**31 - 1, got=2**64):
        TrainSettings(model="story", data="pirate", **counts)


def test_a_number_of_a_pattern_is_one_of_its_kind():
    assert Pair(click.INT).convert("q_proj=8", None, None) == ("q_proj", 8)
    assert_cli_refuses(
        invoke("lora", "train", "story", "--data", "pirate", "-o", "new", "--rank-pattern", "q=1.5"), 2, "'q=1.5'"
    )
