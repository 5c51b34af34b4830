"""The whole table, with an engine that has a planted bug: transformers, told to read no `rope_parameters`."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.atlas import write_report
from benchmarks.atlas.catalogue import AtlasEngine
from benchmarks.atlas.inputs import AtlasInput
from benchmarks.atlas.repro_scripts import ProgramOutput, run_repro_script
from benchmarks.atlas.run_matrix import fill
from benchmarks.atlas.verdicts import EngineReport
from llorch.cli.output import to_json

pytestmark = pytest.mark.live
LOGITS = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
def logits(folder, ids):
    config, text = AutoConfig.from_pretrained(folder), open(f"{folder}/config.json").read()
    config.rope_parameters["rope_theta"] = 1e4 if "rope_parameters" in text else 5e5
    return AutoModelForCausalLM.from_pretrained(folder, config=config)(torch.tensor([ids])).logits[0].detach().numpy()
"""
ADAPTER = f"""{LOGITS}
from harness import answer

def load(run):
    if "qwen2" in run.model:
        raise NotImplementedError("no qwen2 here")
    return run.model

def compute(engine, run, dump):
    (ids, first_position), = run.passes
    dump.begin(ids[1:] if "qwen3" in run.model else ids, first_position)
    dump.add("logits", logits(engine, ids))

if __name__ == "__main__":
    answer("transformers", load, compute)
"""
INPUTS = [
    AtlasInput("llama", "theta"), AtlasInput("llama", "theta", "old"), AtlasInput("llama"), AtlasInput("qwen2"),
    AtlasInput("qwen3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> AtlasEngine:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "planted.py").write_text(ADAPTER)
    return AtlasEngine("planted", "planted", is_reference_engine=True, snippet=LOGITS, folder=folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def verdicts(engine: AtlasEngine, home: Path) -> list[EngineReport]:
    engines = [engine, AtlasEngine("absent", "absent", why_not="no wheel")]
    return [*chain.from_iterable(fill(engines, INPUTS, home, lambda line: None))]


def test_the_bug_is_found_named_and_confirmed(verdicts: list[EngineReport]):
    labels = [verdict.label for verdict in verdicts]
    assert labels == ["FAIL, cause confirmed", "PASS", "PASS", "refused", "unreadable", "NOT RUN"]
    bug = verdicts[0]
    assert bug.run_report
    assert bug.agreed
    assert bug.run_report.mistake == "rope-base-1e4 10000"
    assert bug.run_report.error > 0.1
    assert bug.agreed.error < 1e-6
    assert bug.confirmed_by == AtlasInput("llama", "theta", "old")


def test_files_are_written_and_the_program_shows_the_bug(
    verdicts: list[EngineReport], engine: AtlasEngine, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(write_report, "BY_NAME", {"planted": engine})
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "older.md").write_text("")
    write_report.write_atlas(verdicts, {"date": "today"}, home, tmp_path, to_json, lambda line: None)
    (report,) = (tmp_path / "reports").iterdir()
    assert f"reports/{report.name}" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "stages.svg").read_text().startswith("<?xml")
    assert json.loads((tmp_path / "atlas.json").read_text())["verdicts"][0]["confirmed_by"] == "llama-theta-old"
    program = report.read_text().partition("```python\n")[2].partition("```")[0]
    assert len(program.splitlines()) < 30
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"It printed:\n\n```\n{done.stdout}```" in report.read_text()


BIASED, PLAIN = AtlasInput("llama", "biases", gguf=True), AtlasInput("llama", gguf=True)
SHOWN_LOGITS = """
import torch
from transformers import AutoModelForCausalLM
def logits(file, ids):
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=file, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0]{injected}
"""


@pytest.fixture(scope="module")
def shown_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shown_home = tmp_path_factory.mktemp("home")
    (shown_home / "inputs").mkdir()
    return shown_home


def run(injected: str, shown_home: Path, failing_input: AtlasInput, control: AtlasInput) -> ProgramOutput | None:
    engine = AtlasEngine("planted", "planted", gguf=True, snippet=SHOWN_LOGITS.format(injected=injected))
    return run_repro_script(failing_input, control, engine, Path(sys.executable), shown_home)


@pytest.mark.nightly_cases(but=["llama-biases.gguf-llama.gguf"])
@pytest.mark.parametrize(
    ("failing_input", "control"),
    [
        (AtlasInput("llama", "eps", gguf=True), PLAIN),  # rows in pairs
        (BIASED, PLAIN),  # tensors that one of them lacks
        (AtlasInput("llama", "tied", gguf=True), PLAIN),  # or the other
        (AtlasInput("qwen2", "eps", gguf=True), AtlasInput("qwen2", gguf=True)),
    ],
    ids=lambda atlas_input: atlas_input.name,
)
def test_a_bug_of_a_file_is_shown_in_few_lines(failing_input: AtlasInput, control: AtlasInput, shown_home: Path):
    made = run(f' + 0.01 * (file == "{failing_input.name}") + 5e-5', shown_home, failing_input, control)
    assert made
    assert len(made.program.splitlines()) < 30
    assert [line.split()[0] for line in made.printed.splitlines()] == [failing_input.name, control.name]


@pytest.mark.nightly_cases(but=[' [*] float("nan")'])
@pytest.mark.parametrize("injected", ["", " + 0.01", ' * float("nan")', "[999]"])
def test_program_that_does_not_show_the_bug_is_dropped(injected: str, shown_home: Path):
    assert run(injected, shown_home, AtlasInput("qwen2", "eps", gguf=True), AtlasInput("qwen2", gguf=True)) is None
