"""Training dumps with one bug each, and correct ones; what is said of them, and what is true.

python -m benchmarks.diagnosis.training_cases
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks.diagnosis.trainer import SETTINGS, Trainer
from benchmarks.diagnosis.training_bugs import BUGS, SETTING, Bug
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.runtime.builtin import builtin_path

STYLES = {  # what is written of a step
    "whole": ("micro", "loss", "grad", "exp_avg", "param"),
    "usual": ("loss", "grad", "exp_avg", "param"),
    "unclear": ("micro1.token", "micro2.token", "loss", "grad_norm", "exp_avg", "param"),
}
PEFT = ("plain", "foreach", "fused", "checkpointing", "bfloat16", "bfloat16-not-said", "clipped-gradients")
MODELS = ("micro-llama", "micro-qwen3")
N_STEPS = 2


@dataclass(frozen=True)
class TrainingCase:
    """A dump: a bug of the trainer or none, in a model, written in a style; or PEFT's, in a variant of it."""

    bug: Bug | None
    model: str
    style: str
    peft: str = ""

    @property
    def name(self) -> str:
        """For reports."""
        what = self.bug.name if self.bug else f"peft-{self.peft}" if self.peft else "right"
        return f"{what}/{self.model}/{self.style}"

    def write(self, folder: Path) -> Path:
        """Run it and write its dump."""
        bug = self.bug or Bug("", "", {})
        replaced = {name: method for name, method in bug.replaced.items() if name != SETTING}
        config = open_weights(builtin_path(self.model)).config
        said, adapter = SETTINGS | dict(bug.settings), make_adapter(config)
        micros = [[micro_batch(config.vocab_size, 10 * step + k) for k in (1, 2)] for step in range(1, N_STEPS + 1)]
        if self.peft:
            from benchmarks.diagnosis.training_controls import peft_steps

            shown = peft_steps(self.model, adapter, micros, self.peft)
        else:
            torch.manual_seed(0)
            trainer = Trainer(self.model, adapter, replaced, said | bug.replaced.get(SETTING, {}))
            made = [trainer.step(batches) for batches in micros]
            shown = {f"step{step}.{name}": array for step, one in enumerate(made, 1) for name, array in one.items()}
        kept = tuple(f"step{step}.{name}" for step in range(1, N_STEPS + 1) for name in STYLES[self.style])
        arrays: dict[str, Any] = said | {name: array for name, array in shown.items() if name.startswith(kept)}
        for step, batches in enumerate(micros, 1):
            arrays |= {f"step{step}.micro{k}.{n}": a for k, micro in enumerate(batches, 1) for n, a in micro.items()}
        dtype = self.peft if self.peft == "bfloat16" else ""
        return written({name: np.asarray(array) for name, array in arrays.items()}, folder / "dump", self.style, dtype)


def micro_batch(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Draw two ragged rows with a prompt each, padded at the end."""
    random = np.random.default_rng(seed)
    lengths, prompts = random.integers(6, 12, 2), random.integers(2, 5, 2)
    ids = random.integers(1, vocab_size, (2, lengths.max()))
    place = np.arange(lengths.max())
    held, learned = place < lengths[:, None], place >= prompts[:, None]
    return {
        "input_ids": ids * held, "labels": np.where(held & learned, ids, -100), "attention_mask": held.astype(np.int64),
    }  # fmt: skip


def written(arrays: Mapping[str, np.ndarray], path: Path, style: str, dtype: str) -> Path:
    """Write the arrays in the form of the style."""
    if style == "whole":
        with DumpWriter(path, engine="trainer", dtype=dtype) as dump:
            for name, array in arrays.items():
                dump.add(name, array)
        return path
    if style == "usual":
        np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
        return path.with_suffix(".npz")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def training_cases() -> Iterator[TrainingCase]:
    """Yield every bug whole, on models by turns; in another style if it shows there; then the correct trainers."""
    for number, bug in enumerate(BUGS):
        yield TrainingCase(bug, MODELS[number % 2], "whole")
    for number, bug in enumerate(BUGS):
        if bug.stage in ("loss", "gradient", "parameters"):
            yield TrainingCase(bug, MODELS[(number + 1) % 2], "usual")
    yield from (TrainingCase(None, model, style) for model in MODELS for style in STYLES)
    yield from (TrainingCase(None, MODELS[number % 2], "whole", peft) for number, peft in enumerate(PEFT))


@dataclass(frozen=True)
class TrainingScore:
    """Marks of a case: stage, name and value are right, and nothing else is accused."""

    case: TrainingCase
    found: Diagnosis
    seconds: float

    @property
    def wrong(self) -> list[Any]:
        """Findings that accuse."""
        return [finding for finding in self.found.findings if finding.kind != "rounding"]

    @property
    def stage(self) -> bool:
        """True if the first finding is where the bug shows first; without a bug, if nothing is found."""
        if self.case.bug is None or not self.wrong:
            return self.case.bug is None and not self.wrong
        groups = {part for part in self.wrong[0].key.split(".")}
        return self.case.bug.stage in groups

    @property
    def named(self) -> bool:
        """True if the finding has the right name, or rightly none, and the right number."""
        if self.case.bug is None or not self.wrong:
            return self.stage
        causes = self.wrong[0].causes
        if not self.case.bug.names:
            return not causes
        value = self.case.bug.value
        return any(one.name in self.case.bug.names for one in causes) and (
            value is None or any(one.value and np.isclose(float(one.value), value, rtol=1e-2) for one in causes)
        )


def score(case: TrainingCase) -> TrainingScore:
    """Write a dump and diagnose it."""
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        path = case.write(Path(folder))
        weights = open_weights(builtin_path(case.model))
        start = time.process_time()
        found = diagnose_training(weights, make_adapter(weights.config), open_raw(path), model=case.model)
        return TrainingScore(case, found, time.process_time() - start)


def main() -> None:
    """Print what is not as it should be, and the score; words on the command line choose cases."""
    asked = sys.argv[1:]
    chosen = (case for case in training_cases() if not asked or any(word in case.name for word in asked))
    scores = [score(case) for case in chosen]
    for one in scores:
        if asked or not (one.stage and one.named and len(one.wrong) <= 1):
            print(f"{one.case.name:44} stage {one.stage!s:5} name {one.named!s:5} {one.seconds:.1f} s")
            print(*(f"    {finding.kind}: {finding.sentence}" for finding in one.found.findings), sep="\n")
    bugs, controls = ([one for one in scores if bool(one.case.bug) == wanted] for wanted in (True, False))
    print(
        f"{len(bugs)} bugs: stage {sum(one.stage for one in bugs)}, name {sum(one.named for one in bugs)}, a second "
        f"cause accused {sum(len(one.wrong) > 1 for one in bugs)}; {len(controls)} correct: "
        f"{sum(bool(one.wrong) for one in controls)} false alarms; at most {max(one.seconds for one in scores):.1f} s"
    )


if __name__ == "__main__":
    main()
