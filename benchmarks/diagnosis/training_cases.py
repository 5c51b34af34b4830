"""Training dumps with one bug each, and correct ones; their diagnosis, and the correct diagnosis.

python -m benchmarks.diagnosis.training_cases
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from llorch.lora.adapter import Adapter, assembled
from llorch.runtime.builtin import builtin_path

STYLES = {  # arrays that are written of a step
    "whole": ("micro", "loss", "grad", "exp_avg", "param"),
    "usual": ("loss", "grad", "exp_avg", "param"),
    "unclear": ("micro1.token", "micro2.token", "loss", "grad_norm", "exp_avg", "param"),
    "one-loss": ("loss",),
    "losses": ("loss",),
}
PEFT = (
    "plain", "foreach", "fused", "checkpointing", "bfloat16", "bfloat16-not-said", "clipped-gradients", "packed"
)  # fmt: skip
MODELS = ("micro-llama", "micro-qwen3")
N_STEPS = 2
FROM_ONE_LOSS = ("adapter-off", "adapter-off-v_proj", "mean-of-rows", "eight-times")


@dataclass(frozen=True)
class TrainingCase:
    """Training dump: a bug of the trainer or none, in a model, written in a style; or a variant of PEFT's training.

    `rows` is as in `micro_batch`. `late` is the number of steps from the adapter before the dump to the one that
    `--adapter` gives: 1 for the adapter after the first step, -1 for the adapter before an earlier step.
    """

    bug: Bug | None
    model: str
    style: str
    peft: str = ""
    rows: str = "ragged"
    late: int = 0

    @property
    def name(self) -> str:
        """Name in reports."""
        subject = self.bug.name if self.bug else f"peft-{self.peft}" if self.peft else "right"
        words = [self.rows] * (self.rows != "ragged") + [f"adapter-{self.late:+}"] * (self.late != 0)
        return "/".join((subject, self.model, self.style, *words))

    @property
    def names(self) -> Sequence[str]:
        """Right names; empty if there is none, or if one number would have to give the value of a setting."""
        return () if self.bug is None or (self.style == "one-loss" and self.bug.value) else self.bug.names

    def write(self, folder: Path) -> Path:
        """Run the training and write its dump."""
        bug = self.bug or Bug("", "", {}, rows=self.rows)
        replaced = {name: method for name, method in bug.replaced.items() if name != SETTING}
        config = open_weights(builtin_path(self.model)).config
        settings, adapter = SETTINGS | dict(bug.settings), make_adapter(config)
        first = 1 + max(0, -self.late)
        numbers = range(first, first + (1 if self.style == "one-loss" else N_STEPS))
        micros = [
            [micro_batch(config.vocab_size, 10 * n + k, bug.rows) for k in (1, 2)] for n in range(1, numbers.stop)
        ]
        if self.peft:
            from benchmarks.diagnosis.training_controls import peft_steps

            by_name = peft_steps(self.model, adapter, micros, self.peft)
        else:
            torch.manual_seed(0)
            trainer = Trainer(self.model, adapter, replaced, settings | bug.replaced.get(SETTING, {}))
            steps = [trainer.step(batches) for batches in micros]
            by_name = {f"step{k}.{name}": array for k, step in enumerate(steps, 1) for name, array in step.items()}
        prefixes = tuple(f"step{step}.{name}" for step in numbers for name in STYLES[self.style])
        arrays: dict[str, Any] = settings | {name: x for name, x in by_name.items() if name.startswith(prefixes)}
        for step in numbers:
            micros_of_step = enumerate(micros[step - 1], 1)
            arrays |= {f"step{step}.micro{k}.{n}": a for k, micro in micros_of_step for n, a in micro.items()}
        dtype = self.peft if self.peft == "bfloat16" else ""
        return written({name: np.asarray(array) for name, array in arrays.items()}, folder / "dump", self.style, dtype)

    def given_adapter(self) -> Adapter:
        """Make the adapter of `--adapter`."""
        config = open_weights(builtin_path(self.model)).config
        adapter = make_adapter(config)
        if self.late <= 0:
            return adapter
        trainer = Trainer(self.model, adapter, {}, SETTINGS)
        for step in range(1, 1 + self.late):
            trainer.step([micro_batch(config.vocab_size, 10 * step + k, self.rows) for k in (1, 2)])
        arrays = {name: array.detach().numpy() for name, array in trainer.p.items()}
        return assembled(adapter.config, arrays, config, where=None)


def micro_batch(vocab_size: int, seed: int, rows: str) -> dict[str, np.ndarray]:
    """Draw two rows: `ragged` with a prompt and padding, or packed with positions `restarting` or `running`."""
    random = np.random.default_rng(seed)
    if rows != "ragged":
        lengths = np.concatenate([random.permutation(lengths) for lengths in ((3, 4, 6), (5, 8))])
        ids, ends = random.integers(1, vocab_size, (2, 13)), np.cumsum(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths]).reshape(ids.shape)
        packed = {"input_ids": ids, "labels": np.where(positions == 0, -100, ids)}
        if rows == "running":
            return packed | {"cu_seqlens": np.append(0, ends)}
        documents = np.searchsorted(ends, np.arange(ids.size), side="right").reshape(ids.shape)
        return packed | {"document_ids": documents, "position_ids": positions}
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
    for number, peft in enumerate(PEFT):
        yield TrainingCase(None, MODELS[number % 2], "whole", peft, rows="running" if peft == "packed" else "ragged")
    yield from (TrainingCase(bug, MODELS[0], "one-loss") for bug in BUGS if bug.name in FROM_ONE_LOSS)
    yield from (TrainingCase(None, MODELS[1], style, rows=r) for style in STYLES for r in ("restarting", "running"))
    yield from (TrainingCase(None, MODELS[0], "whole", late=late) for late in (-1, 1))
    yield from (TrainingCase(None, MODELS[1], style, late=1) for style in ("usual", "losses"))


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
        return ("loss" if self.case.style == "one-loss" else self.case.bug.stage) in groups

    @property
    def is_named(self) -> bool:
        """True if the finding has a right name, or rightly none, and the right value."""
        if self.case.bug is None or not self.wrong:
            return self.stage
        causes = self.wrong[0].causes
        if not self.case.names:
            return not causes
        value = self.case.bug.value
        return any(cause.name in self.case.names for cause in causes) and (
            value is None or any(cause.value and np.isclose(float(cause.value), value, rtol=1e-2) for cause in causes)
        )


def score(case: TrainingCase) -> TrainingScore:
    """Write a dump and diagnose it."""
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        path = case.write(Path(folder))
        weights = open_weights(builtin_path(case.model))
        start = time.process_time()
        diagnosis = diagnose_training(weights, case.given_adapter(), open_raw(path), model=case.model)
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
