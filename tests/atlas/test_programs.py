"""Programs of reports: run where the engine is, and kept only where they show the bug."""

import sys
from pathlib import Path

import pytest

from llorch.atlas.catalogue import Engine
from llorch.atlas.inputs import Input
from llorch.atlas.programs import Shown, shown

pytestmark = pytest.mark.live
BIASED, PLAIN = Input("llama", "biases", gguf=True), Input("llama", gguf=True)
LOGITS = """
import torch
from transformers import AutoModelForCausalLM
def logits(file, ids):
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=file, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0]{planted}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "inputs").mkdir()
    return home


def run(planted: str, home: Path, this: Input, sister: Input) -> Shown | None:
    engine = Engine("planted", "planted", gguf=True, snippet=LOGITS.format(planted=planted))
    return shown(this, sister, engine, Path(sys.executable), home)


@pytest.mark.parametrize(
    ("this", "sister"),
    [
        (Input("llama", "eps", gguf=True), PLAIN),  # rows in pairs
        (BIASED, PLAIN),  # tensors that one of them lacks
        (Input("llama", "tied", gguf=True), PLAIN),  # or the other
        (Input("qwen2", "eps", gguf=True), Input("qwen2", gguf=True)),
    ],
    ids=lambda each: each.name,
)
def test_a_bug_of_a_file_is_shown_in_few_lines(this: Input, sister: Input, home: Path):
    made = run(f' + 0.01 * (file == "{this.name}") + 5e-5', home, this, sister)
    assert made
    assert len(made.program.splitlines()) < 30
    assert [line.split()[0] for line in made.printed.splitlines()] == [this.name, sister.name]


@pytest.mark.parametrize("planted", ["", " + 0.01", ' * float("nan")', "[999]"])
def test_what_does_not_show_it_is_not_kept(planted: str, home: Path):
    assert run(planted, home, Input("qwen2", "eps", gguf=True), Input("qwen2", gguf=True)) is None
