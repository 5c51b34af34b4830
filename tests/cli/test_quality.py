"""`llorch quality`."""

import json
from pathlib import Path

import pytest
from builders.quantised_copies import quantised_copy
from builders.story_files import rounded, tale
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses

from llorch.apps.bench import measure as bench
from llorch.cli import bench as verb
from llorch.families.real_shapes import SHAPES
from llorch.files.convert import convert
from llorch.judging.expectations.quantised_models import write_model
from llorch.pytorch import memory
from llorch.pytorch.kernels.packing import PACKERS

SHORT = ("--context", "64", "--windows", "6")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tale.txt"
    path.write_text(tale(monkeypatch, 12) + "\n")
    return path


def measured(*words: str) -> dict:
    return json.loads(invoke("quality", *words, "--json").stdout)


def rows(stdout: str) -> dict[str, list[str]]:
    """Figure to value and error, from the table."""
    split = (line.rsplit(maxsplit=2) for line in stdout.splitlines()[2:])
    return {parts[0].strip(): parts[1:] for parts in split}


@pytest.mark.slow
def test_a_coarse_copy_is_told_from_the_reference(text: Path, tmp_path: Path):
    words = ("story", str(rounded(tmp_path / "coarse.gguf")), "--text", str(text), "--context", "64", "--windows", "16")
    result = invoke("quality", *words)
    assert result.exit_code == 0, result.stderr
    found = measured(*words)
    assert f"{found['windows']} windows of 64 tokens, {31 * found['windows']} scored" in result.stdout
    assert f"{found['tokens'] - 64 * found['windows']} unused" in result.stdout
    table = rows(result.stdout)
    of_reference, of_model = (name for name in table if name.startswith("perplexity of "))
    assert table[of_model][0] == f"{found['perplexity']['value']:.7g}"
    assert table[of_reference][0] == f"{found['reference_perplexity']['value']:.7g}"
    assert float(table["KL divergence, mean (nats)"][0]) == pytest.approx(found["kl"]["value"], rel=1e-6)
    (same_top,) = [name for name in table if name.startswith("same ")]
    assert float(table[same_top][0]) == pytest.approx(100 * found["same_top"]["value"], rel=1e-6)
    assert found["kl"]["value"] > 0.01
    assert found["perplexity"]["value"] > found["reference_perplexity"]["value"]


def test_json_says_what_was_compared_and_every_figure(text: Path, tmp_path: Path):
    coarse = rounded(tmp_path / "coarse.gguf")
    found = measured("story", str(coarse), "--text", str(text), "--windows", "2", "--context", "50")
    about = {"reference": "story", "model": str(coarse), "numerics": "exact", "text": str(text), "context": 50}
    assert about.items() <= found.items()
    assert (found["windows"], found["n_scored"]) == (2, 48)
    assert found["kl_quantiles"].keys() == {"median", "90%", "95%", "99%", "99.9%", "maximum"}
    for name in ("perplexity_ratio", "perplexity_log_ratio", "perplexity_difference", "p_rms", "p_mean"):
        assert found[name].keys() == {"value", "error"}


def test_a_model_differs_from_itself_by_exactly_nothing(text: Path):
    found = measured("story", "story", "--text", str(text), *SHORT)
    assert found["kl"] == {"value": 0, "error": 0}
    assert found["perplexity_ratio"] == {"value": 1, "error": 0}
    assert found["same_top"] == {"value": 1, "error": 0}
    assert set(found["kl_quantiles"].values()) == {0}


def test_a_model_alone_gets_its_perplexity(text: Path):
    alone = invoke("quality", "story", "--text", str(text), *SHORT)
    found = measured("story", "--text", str(text), *SHORT)
    pair = measured("story", "story", "--text", str(text), *SHORT)
    assert found["perplexity"] == pair["perplexity"]
    assert "reference" not in found
    assert rows(alone.stdout).keys() == {"perplexity", "loss (nats)"}


def test_float32_weights_leave_nothing_to_round_with_ggml_numerics(text: Path):
    found = measured("story", "story", "--text", str(text), "--windows", "1", "--numerics", "ggml")
    assert found["numerics"] == "ggml"
    assert found["kl"]["value"] == 0


def test_the_last_line_end_of_a_text_is_no_part_of_it(text: Path):
    def n_tokens() -> int:
        return measured("story", "--text", str(text), "--windows", "1")["tokens"]

    with_end = n_tokens()
    text.write_text(text.read_text().removesuffix("\n"))
    assert n_tokens() == with_end


def test_line_ends_inside_a_text_stay_as_they_are(tmp_path: Path):
    lines = tmp_path / "lines.txt"

    def n_tokens(data: bytes) -> int:
        lines.write_bytes(data)
        return measured("story", "--text", str(lines), "--context", "4")["tokens"]

    assert n_tokens(b"a fox\r\nran\r\nhome") > n_tokens(b"a fox\nran\nhome")


def test_the_error_of_a_single_token_is_null(text: Path):
    assert measured("story", "--text", str(text), "--context", "3", "--windows", "1")["perplexity"]["error"] is None


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\n", ("text.txt", "empty")),
        (b"caf\xe9 au lait", ("text.txt", "UTF-8", "0xe9", 3)),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_in_one_line(data: bytes, expected: tuple[object, ...], tmp_path: Path):
    (tmp_path / "text.txt").write_bytes(data)
    result = invoke("quality", "story", "--text", str(tmp_path / "text.txt"))
    assert_cli_refuses(result, 2, *expected)
    assert len(result.stderr.splitlines()) == 1


def test_a_text_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.quality.available_memory", lambda: 1e9)
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(1 << 30)  # takes no room on the disk
    result = invoke("quality", "story", "--text", str(tmp_path / "large.txt"))
    assert_cli_refuses(result, 4, tmp_path / "large.txt", "1.07 GB", "214.7 GB", "1.0 GB are free")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("story nothing.gguf --text {}", 3, ("'nothing.gguf'",)),
        ("story micro-llama --text {}", 2, ("story", 1003, "micro-llama", 401)),
        ("story --text {} --context 513", 2, ("context", "story", "3 to 512", 513)),
        ("story --text {} --windows 0", 2, ("--windows", 0, "1<=x")),
        ("story --text {} --kv-cache f16", 2, ("--kv-cache f16", "--numerics ggml")),
        ("story", 2, ("--text",)),
    ],
)
def test_an_unusable_command_line_is_refused(words: str, code: int, expected: tuple[object, ...], text: Path):
    assert_cli_refuses(invoke("quality", *words.replace("{}", str(text)).split()), code, *expected)


def test_models_that_do_not_fit_together_are_refused(text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.quality.available_memory", lambda: 4e8)  # room for one
    assert invoke("quality", "story", "--text", str(text), "--windows", "1").exit_code == 0
    result = invoke("quality", "story", "story", "--text", str(text), "--windows", "1")
    assert_cli_refuses(result, 4, "story and story", "0.6 GB", "0.4 GB")


def test_quality_of_a_quantised_folder_is_that_of_its_decoded_copy(text: Path, tmp_path: Path):
    folder, decoded = quantised_copy("story", tmp_path / "copy"), tmp_path / "decoded"
    convert(folder, decoded)
    words = (str(folder), "--text", str(text), "--windows", "2", "--context", "32")
    same = measured(str(decoded), *words)
    assert (same["kl"]["value"], same["same_top"]["value"]) == (0, 1)
    assert same["perplexity"] == same["reference_perplexity"]
    found = measured("story", *words)
    assert 1e-7 < found["kl"]["value"] < 1e-2


SHORT_RUN = ("--prompt", "5", "--decode", "2", "--rounds", "1")


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's ceilings are not what is tested; a copy of 256 MB takes its time under ten tests."""
    monkeypatch.setitem(bench.COPY_BYTES, "cpu", 1 << 12)
    monkeypatch.setitem(bench.PRODUCT_WIDTH, "cpu", 16)


@pytest.mark.parametrize(
    "backend", [(), ("--backend", "torch"), ("--backend", "torch", "--dtype", "bfloat16", "--batch", "2")]
)
def test_speeds_rates_and_shares_are_printed(backend: tuple[str, ...]):
    result = invoke("bench", "micro-llama", *SHORT_RUN, *backend)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("micro-llama, ")
    assert [line.split()[0] for line in lines[4:]] == ["prefill", "decode"]
    assert "tokens/s" in lines[4]
    assert "of the copy" in lines[5]
    assert "of the product" in lines[5]


@pytest.mark.parametrize("backend", [(), ("--backend", "torch")])
def test_json_has_what_is_needed_to_repeat_the_run(backend: tuple[str, ...]):
    result = invoke("bench", *SHORT_RUN, "--json", *backend)
    made = json.loads(result.stdout)
    assert (made["model"], made["prompt"], made["decoded"], made["batch"], made["rounds"]) == ("story", 5, 2, 1, 1)
    assert made["versions"]["numpy"]
    assert made["device_name"]
    assert made["date"].startswith("20")
    assert made["backend"] == ("torch-cpu-float32" if backend else "numpy")


def test_a_packed_file_is_measured_packed(tmp_path):
    path = str(write_model("Q8_0", tmp_path))
    result = invoke("bench", path, *SHORT_RUN, "--backend", "torch", "--weights", "packed", "--json")
    assert json.loads(result.stdout)["weights"] == "Q8_0"


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1e9)
    result = invoke("bench", "--shape", "llama-2-7b", "--backend", "torch")
    assert_cli_refuses(result, 4, "27.5 GB", "1.0 GB", "cpu", "--shape")
    assert result.stderr.startswith("llorch: bench: weights of llama-2-7b need ")


def test_the_names_of_shapes_are_those_of_the_module():
    assert tuple(SHAPES) == verb.SHAPES
    assert {kind.name for kind in PACKERS} == set(verb.TYPES)
