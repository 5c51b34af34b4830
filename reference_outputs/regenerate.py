"""Make the goldens of the built-in models again, or check that the stored ones can be made again.

    python reference_outputs/regenerate.py                 write all
    python reference_outputs/regenerate.py micro-llama     write one
    python reference_outputs/regenerate.py quantised       write those of checkpoint 13
    python reference_outputs/regenerate.py --check         compare with the stored ones at their tolerances

Goldens come from llama.cpp and transformers as they are installed here, the truth from transformers in float64;
tolerances come from how far the two lie from it; for runs in bfloat16 and float16, when they run in that dtype.
Nothing is written when a producer is missing or too far from the truth. Goldens of checkpoint 13 come from llama.cpp
and its ggml alone, those of 15 to 20 from PEFT with torch, and from llama.cpp; their truth is PEFT's in float64.
"""

import platform
import sys
from pathlib import Path

import click
import make_half
import make_quantised
import make_training
import numpy as np

from llorch.builtin import BUILTIN, builtin_path
from llorch.files import Weights, open_weights
from llorch.model import Model
from llorch.verify.compare import measure
from llorch.verify.foundation import foreign_tensors
from llorch.verify.goldens import N_GREEDY, PRODUCERS, Evidence, Golden, TokenCheck, cases_for, read, save, sha256, take
from llorch.verify.quantised_goldens import FOLDER as QUANTISED
from llorch.verify.quantised_goldens import read as read_quantised
from llorch.verify.quantised_goldens import save as save_quantised
from llorch.verify.training.goldens import MODELS as TRAINED
from llorch.verify.training.goldens import read as read_training
from llorch.verify.training.goldens import save as save_training
from llorch.verify.truth import take_truth
from llorch.verify.verifier import MATHEMATICS, Verifier
from llorch.verify.witnesses import Producer, open_producer

FOLDER = Path(__file__).resolve().parent  # never the copy inside an installed wheel
PROMPT = "Once upon a time, Mia the little fox found 7 red apples near the river."
N_TOKENS = 12
TEXTS = (
    PROMPT,
    "",
    " two  spaces\n\nand lines\t",
    "Grüße, 世界! 🦊👩‍🚀 naïve café",
    "def f(x):\n    return x**2  # 1234567",
    "<s></s><|endoftext|><|im_end|>",
)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice((*BUILTIN, QUANTISED)))
@click.option("--check", is_flag=True, help="Compare with the stored goldens instead of writing.")
def main(names: tuple[str, ...], check: bool) -> None:
    """Entry point."""
    failures = 0
    for name in names or (*BUILTIN, QUANTISED):
        folder = FOLDER / name
        lines = quantised(folder, check=check) if name == QUANTISED else built_in(name, folder, check=check)
        lines += training(name, folder, check=check) if name in TRAINED else []
        failures += len(lines)
        if check:
            click.echo("\n".join(lines) if lines else f"{name}: reproduced")
        else:
            click.echo(f"{name}: written to {folder.name}, {size(folder) / 1e6:.1f} MB")
    sys.exit(1 if failures else 0)


def built_in(name: str, folder: Path, *, check: bool) -> list[str]:
    """Make the goldens of one built-in model; write them, or say where they are not the stored ones."""
    click.echo(f"{name}: running {' and '.join(PRODUCERS)}", err=True)
    golden = make(name)
    if check:
        stored = read(folder)
        return differences(golden, stored) + made_otherwise(name, stored)
    save(folder, golden)
    return []


def training(name: str, folder: Path, *, check: bool) -> list[str]:
    """Make the goldens of checkpoints 15 to 20; write them, or say where they are not the stored ones."""
    click.echo(f"{name}: running peft and llamacpp", err=True)
    golden = make_training.make_training(name)
    if check:
        return make_training.checked(golden, read_training(folder), open_weights(builtin_path(name)))
    save_training(folder, golden)
    return []


def quantised(folder: Path, *, check: bool) -> list[str]:
    """Make the goldens of checkpoint 13; write them, or say where they are not the stored ones."""
    click.echo(f"{QUANTISED}: running ggml and llamacpp", err=True)
    golden = make_quantised.make_quantised()
    if check:
        return make_quantised.differences(golden, read_quantised(folder))
    save_quantised(folder, golden)
    return []


def make(name: str) -> Golden:
    """Run both producers on one built-in model.

    Args:
        name: The model.

    Returns:
        Goldens, tolerances and provenance.
    """
    path = builtin_path(name)
    weights = open_weights(path)
    ids = prompt_ids(weights)
    cases = cases_for(ids, weights.config)
    evidence: dict[str, Evidence] = {}
    engines: dict[str, object] = {}
    tokens: dict[str, dict[str, list[int]]] = {text: {} for text in TEXTS}
    for producer_name in PRODUCERS:
        with open_producer(producer_name, path, n_threads=2) as producer:
            evidence[producer_name] = take(producer, cases)
            engines[producer_name] = producer.provenance()
            for text in TEXTS:
                tokens[text] |= token_ids(producer, text)
    truth = take_truth(path, cases, evidence, n_greedy=N_GREEDY)
    verifier = Verifier(name, weights, cases, evidence, truth)
    halves = make_half.half_runs(name, weights, cases, truth)
    for judge in (verifier, *(half.verifier for half in halves.values())):
        refuse_far_witnesses(judge)
    return Golden(
        cases=cases,
        evidence=evidence,
        truth=truth,
        tolerances=verifier.tolerances(),
        half_tolerances={dtype: half.verifier.tolerances() for dtype, half in halves.items()},
        half_errors={dtype: half.verifier.errors() for dtype, half in halves.items()},
        tensors=foreign_tensors(path),
        tokens=[TokenCheck(text, ids) for text, ids in tokens.items()],
        provenance={
            "command": "python reference_outputs/regenerate.py",
            "weights_sha256": sha256(path),
            "prompt": PROMPT,
            "engines": engines,
            "half_engines": {dtype: half.engines for dtype, half in halves.items()},
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    )


def prompt_ids(weights: Weights) -> list[int]:
    """The first tokens of the prompt.

    Raises:
        ValueError: Fewer than 8 are distinct; such an input hides mistakes.
    """
    ids = Model(weights).tokenizer.encode(PROMPT)[:N_TOKENS]
    if len(set(ids)) < 8:
        raise ValueError(f"regenerate: expected at least 8 distinct tokens, got {ids}")
    return ids


def token_ids(producer: Producer, text: str) -> dict[str, list[int]]:
    """The producer's ids of a text, under its name, when it has a tokenizer."""
    ids = producer.tokenize(text, add_special=True, parse_special=False)
    return {} if ids is None else {producer.name: ids}


def refuse_far_witnesses(verifier: Verifier) -> None:
    """Refuse goldens that are not the truth to rounding in the dtype of the run.

    Raises:
        ValueError: A producer is further from the float64 truth than the ceiling allows.
    """
    far = [
        f"{d.case} {d.mode} {d.stage}: {d.difference.describe()}"
        for d in verifier.distances()
        if not d.difference.within(verifier.ceiling_of(d.case, d.mode, d.stage))
    ]
    if far:
        raise ValueError(f"regenerate {verifier.name}: {len(far)} goldens too far from the truth:\n" + "\n".join(far))


def differences(new: Golden, stored: Golden) -> list[str]:
    """Where newly made goldens are not the stored ones, within the stored tolerances.

    Args:
        new: Made now.
        stored: Read from the repository.

    Returns:
        One line for each difference.
    """
    lines = make_half.differences(new.half_tolerances, stored.half_tolerances)
    for what in ("cases", "tensors", "tokens"):
        if getattr(new, what) != getattr(stored, what):
            lines.append(f"{what}: not as stored")
    for producer in PRODUCERS:
        ours, theirs = new.evidence[producer].arrays(), stored.evidence[producer].arrays()
        lines += [f"{producer} {name}: only on one side" for name in sorted(ours.keys() ^ theirs.keys())]
        for name in ours.keys() & theirs.keys():
            case, key = name.split("/")
            stage = key.split(".")[0] if key.startswith("probabilities") else key.split(".")[-1]
            difference = measure(ours[name], theirs[name], masked=stage == "attn_scores")
            by_stage = stored.tolerances[case]["isolated" if stage == "probabilities" else "chained"]
            allowed = by_stage.get(stage)
            if difference.fault or (difference.error > 0 and (allowed is None or not difference.within(allowed))):
                lines.append(f"{producer} {name}: {difference.describe()}")
    return lines


def made_otherwise(name: str, stored: Golden) -> list[str]:
    """What of the stored truth and tolerances is not made again of the stored goldens, one line for each."""
    path = builtin_path(name)
    truth = take_truth(path, stored.cases, stored.evidence, n_greedy=N_GREEDY)
    lines = []
    new, old = ({**t.evidence.arrays(), "step logits": t.step_logits} for t in (truth, stored.truth))
    for key in sorted(new.keys() | old.keys()):
        difference = measure(old.get(key), new.get(key), masked=key.endswith("attn_scores"))
        if not difference.within(MATHEMATICS):
            lines.append(f"truth {key}: {difference.describe()}")
    judge = Verifier(name, open_weights(path), stored.cases, stored.evidence, truth)
    made = ({"float32": tolerances} for tolerances in (judge.tolerances(), stored.tolerances))
    return lines + make_half.differences(*made, times=make_half.AGAIN)


def size(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
