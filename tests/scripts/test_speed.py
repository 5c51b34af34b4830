"""benchmarks/speed.py: rounds, ratios, engines that do not survive, and the tables of benchmarks/README.md."""

import importlib
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from helpers.command_line import REPOSITORY

CASES = ("cuda", "decode", "mesh", "open", "prefill", "serve", "tables", "train", "verify")
GONE = "ended by SIGSEGV in prefill"
README = REPOSITORY / "benchmarks" / "README.md"


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("speed_cases.rounds")


@pytest.fixture
def tables(rounds: Any) -> Any:
    return importlib.import_module("speed_cases.tables")


def speed(*words: str) -> Result:
    return CliRunner().invoke(importlib.import_module("speed").main, words)


@pytest.mark.usefixtures("rounds")
def test_help_lists_the_cases():
    lines = speed("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert tuple(line.split()[0] for line in lines) == CASES


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fly",), "No such command 'fly'"),
        (("decode", "--type", "Q9"), "'Q9' is not one of 'F32'"),
        (
            ("decode", "--variant", "jax"),
            "expected numpy or torch, then option=value, all with commas between; got 'jax'",
        ),
        (("open", "--reference", "torch,dtype"), "got 'torch,dtype'"),
        (("train", "--rounds", "0"), "0 is not in the range"),
    ],
)
def test_bad_options_are_refused(words: tuple[str, ...], message: str):
    done = speed(*words)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("end", [0, 1, 3])
def test_an_engine_that_ends_is_named_and_the_others_go_on(rounds: Any, end: int, capsys: pytest.CaptureFixture[str]):
    def measure(engine: Any, number: int) -> Any:
        if engine.name == "short" and number == end:
            raise rounds.NotRun(GONE)
        return engine, {"decode": (float(number), 0.0)}

    results = rounds.Results()
    results.model = "F32"
    engines = [rounds.Engine("short"), rounds.Engine("long")]
    ran, samples = rounds.interleave(engines, measure, range(4), results)
    assert [engine.name for engine in ran] == ["long"]
    assert samples == {"long": {"decode": [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]}}
    assert capsys.readouterr().out == f"NOT RUN: F32 short: {GONE}\n"


def test_an_engine_that_crashes_in_its_defaults_gets_the_one_option_that_it_needs(
    rounds: Any, monkeypatch: pytest.MonkeyPatch
):
    class Fragile:
        def __init__(self, engine: Any, threads: int) -> None:
            self.is_plain = "use_extra_bufts" in engine.options

        def ask(self, method: str, *args: object) -> dict[str, Any]:
            if not self.is_plain:
                raise rounds.NotRun(GONE)
            return {"seconds": 0.5, "others": 0.0}

        def close(self) -> None: ...

    monkeypatch.setattr(rounds, "Process", Fragile)
    engine = rounds.Engine("llama.cpp", fallback={"use_extra_bufts": False})
    actions = [("prefill", [[1]], {"prefill 1": lambda answer: 1 / answer["seconds"]})]
    results = rounds.Results()
    ran, samples = rounds.interleave_loaded([engine], actions, 2, 1, results)
    assert samples == {"llama.cpp": {"prefill 1": [(2.0, 0.0), (2.0, 0.0)]}}
    assert ran[0].note == f"llama.cpp with use_extra_bufts=False: in its defaults it {GONE}"
    results.add(ran, samples, {"prefill 1": "tokens/s"})
    assert (results.rows[0]["note"], results.not_run) == (ran[0].note, [])


def test_ratios_are_those_of_quiet_paired_rounds(rounds: Any):
    engines = [rounds.Engine("llorch", variant="numpy"), rounds.Engine("llama.cpp", reference=True)]
    samples = {
        "llorch numpy": {"decode": [(10.0, 0.0), (9.0, 0.5), (30.0, 0.0), (20.0, 0.01)]},
        "llama.cpp": {"decode": [(20.0, 0.0), (90.0, 0.0), (10.0, 0.0), (10.0, 0.02)]},
    }
    results = rounds.Results()
    results.add(engines, samples, {"decode": "tokens/s"}, n_bytes=500_000_000)
    row, reference = results.rows
    assert row == {
        "model": "", "engine": "llorch", "variant": "numpy", "what": "decode", "unit": "tokens/s", "value": 20.0,
        "low": 10.0, "high": 30.0, "rounds": 4, "quiet": 3, "ratios": {"llama.cpp": [2.0, 0.5, 3.0]}, "bandwidth": 10.0,
    }  # fmt: skip
    assert "ratios" not in reference


def report(**changes: Any) -> dict[str, Any]:
    row = {"model": "F32", "engine": "llorch", "variant": "numpy", "what": "decode", "unit": "tokens/s", "value": 20.0}
    row |= {"low": 10.0, "high": 30.0, "rounds": 3, "quiet": 2, "ratios": {"llama.cpp": [0.5, 0.4, 0.6]}}
    peer = row | {"engine": "llama.cpp", "variant": "", "value": 40.0, "ratios": {}, "note": "llama.cpp with an option"}
    host = {
        "processor": "a processor", "cores": 2, "openblas": "Zen", "OPENBLAS_CORETYPE": "unset", "commit": "abc",
        "versions": {"numpy": "2"}, "date": "2026-12-01",
    }  # fmt: skip
    settings = {"threads": 2, "types": ["F32"]}
    return {
        "machine": host,
        "case": "decode",
        "settings": settings,
        "rows": [row, peer],
        "not_run": ["x: why"],
    } | changes


def test_a_table_has_values_ratios_and_what_did_not_run(tables: Any):
    text = tables.text_of(report())
    assert (
        "`python benchmarks/speed.py decode` on a processor, 2 cores, 2026-12-01, llorch abc; threads 2, types" in text
    )
    assert "OpenBLAS kernels Zen (`OPENBLAS_CORETYPE` unset)" in text
    assert "| F32 | llorch numpy | 20 (10-30) | **0.50** (0.40-0.60) |\n| F32 | llama.cpp | 40 (10-30) |  |\n" in text
    assert text.endswith(
        "- llama.cpp with an option\n- other programs were busy in 2 of 6 measurements\n- NOT RUN: x: why"
    )


def test_sections_with_results_are_filled_and_the_others_stay(tables: Any, tmp_path: Path):
    page = "<!-- speed: a -->\nold\n<!-- end of a -->\ntext\n<!-- speed: b -->\nkept\n<!-- end of b -->\n"
    (tmp_path / "a.json").write_text(json.dumps(report()))
    filled = tables.fill(page, tmp_path)
    assert filled == page.replace("old", tables.text_of(report()))
    assert tables.fill(filled, tmp_path) == filled
    (tmp_path / "c.json").write_text(json.dumps(report()))
    with pytest.raises(click.ClickException, match="got none for <!-- speed: c -->"):
        tables.fill(page, tmp_path)


def test_the_tables_of_the_page_are_those_of_the_stored_results(tables: Any):
    page = README.read_text()
    assert tables.SECTION.search(page)
    assert tables.fill(page, README.parent / "results") == page


@pytest.mark.live
def test_engines_decode_a_model_in_processes_of_their_own(rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models, engines = importlib.import_module("speed_cases.models"), importlib.import_module("speed_cases.engines")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(models.SHAPES, "dense", models.QWEN_05B | sizes | {"vocab_size": 4096})
    assert engines.READ_BYTES >= 1 << 30
    words = (
        "decode --type F32 --variant numpy --variant numpy,kernels=ggml --prompt 4 --decode 2 --rounds 1 --threads 1"
    )
    done = speed(*words.split(), "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.exit_code == 3
    assert [row["engine"] for row in results["rows"]] == ["llorch", "llama.cpp", "transformers", "memory"]
    assert results["rows"][0]["ratios"].keys() == {"llama.cpp", "transformers"}
    assert all(row["bandwidth"] > 0 for row in results["rows"])
    (reason,) = results["not_run"]
    assert reason.startswith("F32 llorch numpy,kernels=ggml: ")
