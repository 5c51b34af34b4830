"""Programs of reports: run where the engine is, and kept only where they show the bug."""

import sys
from pathlib import Path

import pytest

from benchmarks.atlas.catalogue import AtlasEngine
from benchmarks.atlas.inputs import AtlasInput
from benchmarks.atlas.repro_scripts import ProgramOutput, shown

pytestmark = pytest.mark.live
BIASED, PLAIN = AtlasInput("llama", "biases", gguf=True), AtlasInput("llama", gguf=True)
LOGITS = """
import torch
from transformers import AutoModelForCausalLM
def logits(file, ids):
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=file, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0]{injected}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "inputs").mkdir()
    return home


def run(injected: str, home: Path, this: AtlasInput, control: AtlasInput) -> ProgramOutput | None:
    engine = AtlasEngine("planted", "planted", gguf=True, snippet=LOGITS.format(injected=injected))
    return shown(this, control, engine, Path(sys.executable), home)


@pytest.mark.nightly_cases(but=["llama-biases.gguf-llama.gguf"])
@pytest.mark.parametrize(
    ("this", "control"),
    [
        (AtlasInput("llama", "eps", gguf=True), PLAIN),  # rows in pairs
        (BIASED, PLAIN),  # tensors that one of them lacks
        (AtlasInput("llama", "tied", gguf=True), PLAIN),  # or the other
        (AtlasInput("qwen2", "eps", gguf=True), AtlasInput("qwen2", gguf=True)),
    ],
    ids=lambda each: each.name,
)
def test_a_bug_of_a_file_is_shown_in_few_lines(this: AtlasInput, control: AtlasInput, home: Path):
    made = run(f' + 0.01 * (file == "{this.name}") + 5e-5', home, this, control)
    assert made
    assert len(made.program.splitlines()) < 30
    assert [line.split()[0] for line in made.printed.splitlines()] == [this.name, control.name]


@pytest.mark.nightly_cases(but=[' [*] float("nan")'])
@pytest.mark.parametrize("injected", ["", " + 0.01", ' * float("nan")', "[999]"])
def test_what_does_not_show_it_is_not_kept(injected: str, home: Path):
    assert run(injected, home, AtlasInput("qwen2", "eps", gguf=True), AtlasInput("qwen2", gguf=True)) is None
