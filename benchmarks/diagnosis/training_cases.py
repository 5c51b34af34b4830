"""Training dumps with one bug each, and correct ones; their diagnosis, and the correct diagnosis.

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

STYLES = {  # arrays that are written of a step
    "whole": ("micro", "loss", "grad", "exp_avg", "param"),
    "usual": ("loss", "grad", "exp_avg", "param"),
    "unclear": ("micro1.token", "micro2.token", "loss", "grad_norm", "exp_avg", "param"),
}
PEFT = ("plain", "foreach", "fused", "checkpointing", "bfloat16", "bfloat16-not-said", "clipped-gradients")
MODELS = ("micro-llama", "micro-qwen3")
N_STEPS = 2


@dataclass(frozen=True)
class TrainingCase:
    """Training dump: a bug of the trainer or none, in a model, written in a style; or a variant of PEFT's training."""

    bug: Bug | None
    model: str
    style: str
    peft: str = ""

    @property
    def name(self) -> str:
        """Name in reports."""
        subject = self.bug.name if self.bug else f"peft-{self.peft}" if self.peft else "right"
        return f"{subject}/{self.model}/{self.style}"

    def write(self, folder: Path) -> Path:
        """Run the training and write its dump."""
        bug = self.bug or Bug("", "", {})
        replaced = {name: method for name, method in bug.replaced.items() if name != SETTING}
        config = open_weights(builtin_path(self.model)).config
        settings, adapter = SETTINGS | dict(bug.settings), make_adapter(config)
        micros = [[micro_batch(config.vocab_size, 10 * step + k) for k in (1, 2)] for step in range(1, N_STEPS + 1)]
        if self.peft:
            from benchmarks.diagnosis.training_controls import peft_steps

            by_name = peft_steps(self.model, adapter, micros, self.peft)
        else:
            torch.manual_seed(0)
            trainer = Trainer(self.model, adapter, replaced, settings | bug.replaced.get(SETTING, {}))
            steps = [trainer.step(batches) for batches in micros]
            by_name = {f"step{k}.{name}": array for k, step in enumerate(steps, 1) for name, array in step.items()}
        prefixes = tuple(f"step{step}.{name}" for step in range(1, N_STEPS + 1) for name in STYLES[self.style])
        arrays: dict[str, Any] = settings | {name: x for name, x in by_name.items() if name.startswith(prefixes)}
        for step, batches in enumerate(micros, 1):
            arrays |= {f"step{step}.micro{k}.{n}": a for k, micro in enumerate(batches, 1) for n, a in micro.items()}
        dtype = self.peft if self.peft == "bfloat16" else ""
        return written({name: np.asarray(array) for name, array in arrays.items()}, folder / "dump", self.style, dtype)


def micro_batch(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Draw two ragged rows with a prompt each, padded at the end."""
    random = np.random.default_rng(seed)
    lengths, prompts = random.integers(6, 12, 2), random.integers(2, 5, 2)
    ids = random.integers(1, vocab_size, (2, lengths.max()))
    position = np.arange(lengths.max())
    real, in_loss = position < lengths[:, None], position >= prompts[:, None]
    return {
        "input_ids": ids * real, "labels": np.where(real & in_loss, ids, -100), "attention_mask": real.astype(np.int64),
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
    """Yield every bug with whole dumps, models in turn; in another style if it shows there; then right trainers."""
    for number, bug in enumerate(BUGS):
        yield TrainingCase(bug, MODELS[number % 2], "whole")
    for number, bug in enumerate(BUGS):
        if bug.stage in ("loss", "gradient", "parameters"):
            yield TrainingCase(bug, MODELS[(number + 1) % 2], "usual")
    yield from (TrainingCase(None, model, style) for model in MODELS for style in STYLES)
    yield from (TrainingCase(None, MODELS[number % 2], "whole", peft) for number, peft in enumerate(PEFT))


@dataclass(frozen=True)
class TrainingScore:
    """Marks of a case: stage, name and value are right, and nothing else is reported."""

    case: TrainingCase
    diagnosis: Diagnosis
    seconds: float

    @property
    def wrong(self) -> list[Any]:
        """Findings other than rounding."""
        return [finding for finding in self.diagnosis.findings if finding.kind != "rounding"]

    @property
    def stage(self) -> bool:
        """True if the first finding is where the bug shows first; without a bug, if there is no finding."""
        if self.case.bug is None or not self.wrong:
            return self.case.bug is None and not self.wrong
        groups = {part for part in self.wrong[0].key.split(".")}
        return self.case.bug.stage in groups

    @property
    def is_named(self) -> bool:
        """True if the finding has a right name, or rightly none, and the right value."""
        if self.case.bug is None or not self.wrong:
            return self.stage
        causes = self.wrong[0].causes
        if not self.case.bug.names:
            return not causes
        value = self.case.bug.value
        return any(cause.name in self.case.bug.names for cause in causes) and (
            value is None or any(cause.value and np.isclose(float(cause.value), value, rtol=1e-2) for cause in causes)
        )


def score(case: TrainingCase) -> TrainingScore:
    """Write a dump and diagnose it."""
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        path = case.write(Path(folder))
        weights = open_weights(builtin_path(case.model))
        start = time.process_time()
        diagnosis = diagnose_training(weights, make_adapter(weights.config), open_raw(path), model=case.model)
        return TrainingScore(case, diagnosis, time.process_time() - start)


def main() -> None:
    """Print wrong answers, and the score; words on the command line select cases."""
    words = sys.argv[1:]
    selected = (case for case in training_cases() if not words or any(word in case.name for word in words))
    scores = [score(case) for case in selected]
    for s in scores:
        if words or not (s.stage and s.is_named and len(s.wrong) <= 1):
            print(f"{s.case.name:44} stage {s.stage!s:5} name {s.is_named!s:5} {s.seconds:.1f} s")
            print(*(f"    {finding.kind}: {finding.sentence}" for finding in s.diagnosis.findings), sep="\n")
    bugs, controls = ([s for s in scores if bool(s.case.bug) == has_bug] for has_bug in (True, False))
    print(
        f"{len(bugs)} bugs: stage {sum(s.stage for s in bugs)}, name {sum(s.is_named for s in bugs)}, a second "
        f"cause accused {sum(len(s.wrong) > 1 for s in bugs)}; {len(controls)} correct: "
        f"{sum(bool(s.wrong) for s in controls)} false alarms; at most {max(s.seconds for s in scores):.1f} s"
    )


if __name__ == "__main__":
    main()
