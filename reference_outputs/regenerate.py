"""Regenerate the goldens of the built-in models, or check that the stored ones are reproduced.

    python reference_outputs/regenerate.py                 write all
    python reference_outputs/regenerate.py micro-llama     write one
    python reference_outputs/regenerate.py quantised       write those of checkpoint 13
    python reference_outputs/regenerate.py --check         compare with the stored ones at their limits

Goldens come from the installed llama.cpp and transformers, the float64 reference from transformers.
Nothing is written if an engine is missing, or further from this reference than its rounding explains. Goldens of
checkpoint 13 come from llama.cpp and its ggml alone. Those of 15 to 20 come from PEFT with torch, and from llama.cpp;
their float64 reference is PEFT's.
"""

import platform
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import click
import make_quantised
import make_training
import numpy as np
from make_long import make_long

from llorch.engines import ReferenceEngine, open_engine
from llorch.files import Weights, open_weights
from llorch.judging.expectations.files import library_tensors
from llorch.judging.goldens.float64_reference import run_reference
from llorch.judging.goldens.forward import (
    ENGINES,
    N_GREEDY,
    REFERENCE,
    EngineOutput,
    Golden,
    ReferenceOutput,
    TokenCheck,
    cases_for,
    read,
    run_cases,
    save,
    sha256,
)
from llorch.judging.goldens.long_contexts import LongGolden, read_long, save_long
from llorch.judging.goldens.quantised import FOLDER as QUANTISED
from llorch.judging.goldens.quantised import read as read_quantised
from llorch.judging.goldens.quantised import save as save_quantised
from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.judging.goldens.training import read as read_training
from llorch.judging.goldens.training import save as save_training
from llorch.judging.tolerances.forward import MATHEMATICS, ForwardTolerances, limit_of_softmax
from llorch.judging.verify import unable_engines
from llorch.model.model import Model
from llorch.runtime.builtin import EVERY, OTHERS, builtin_path
from llorch.stages.comparison import EXACT, FLOOR, Difference, Tolerance, measure
from llorch.stages.stage_ref import Pass
from llorch.stages.table import keys

FOLDER = Path(__file__).resolve().parent  # never the copy inside an installed wheel
PROMPT = "Once upon a time, Mia the little fox found 7 red apples near the river."
N_TOKENS = {  # a delta net begins a second chunk of 64, every expert is chosen; windows are full twice; else 12
    **dict.fromkeys(set(OTHERS) - {"micro-smollm3"}, 68), "micro-mistral": 40, "micro-qwen3-vl-moe": 40,
}  # fmt: skip
LONG_PROMPT = f"{PROMPT} She put five of them into her old blue bag and carried it up the hill to her friend Ben."
TEXTS = (
    PROMPT,
    "",
    " two  spaces\n\nand lines\t",
    "Grüße, 世界! 🦊👩‍🚀 naïve café",
    "def f(x):\n    return x**2  # 1234567",
    "<s></s><|endoftext|><|im_end|>",
)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice((*EVERY, QUANTISED)))
@click.option("--check", is_flag=True, help="Compare with the stored goldens instead of writing.")
def main(names: tuple[str, ...], check: bool) -> None:
    """Entry point."""
    failures = 0
    for name in names or (*EVERY, QUANTISED):
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
    """Make the goldens of one built-in model; write them, or list their differences from the stored ones."""
    click.echo(f"{name}: running {' and '.join(ENGINES)}", err=True)
    golden = make(name)
    long = make_long(builtin_path(name), ENGINES, str(golden.provenance["weights_sha256"]))
    if check:
        old = read(folder)
        lines = differences(name, golden, old) + made_otherwise(name, old)
        return lines + long_differences(long, read_long(folder))
    save(folder, golden)
    save_long(folder, long)
    return []


def long_differences(new: LongGolden, old: LongGolden) -> list[str]:
    """List differences of newly made goldens of long contexts from the stored ones, a line for each."""
    lines = [] if new.cases == old.cases else ["long contexts: other cases than stored"]
    for case, trace in old.reference.items():
        for name, array in trace.items():
            difference = measure(new.reference.get(case, {}).get(name), array)
            if not difference.within(MATHEMATICS):
                lines.append(f"{case} {name}: {difference.describe()}")
    for engine, cases in old.distances.items():
        for case, base in cases.items():
            actual = new.distances.get(engine, {}).get(case, {})
            # Another processor sums in another order: a float32 run is then as far from float64 again, not farther.
            far = [name for name, d in base.items() if name not in actual or actual[name].error > 4 * d.error + FLOOR]
            lines += [f"distance of {engine}, {case} {name}: {actual.get(name)}, stored {base[name]}" for name in far]
    return lines


def training(name: str, folder: Path, *, check: bool) -> list[str]:
    """Make the goldens of checkpoints 15 to 20; write them, or list their differences from the stored ones."""
    click.echo(f"{name}: running peft and llamacpp", err=True)
    golden = make_training.make_training(name)
    if check:
        return make_training.checked(golden, read_training(folder), open_weights(builtin_path(name)))
    save_training(folder, golden)
    return []


def quantised(folder: Path, *, check: bool) -> list[str]:
    """Make the goldens of checkpoint 13; write them, or list their differences from the stored ones."""
    click.echo(f"{QUANTISED}: running ggml and llamacpp", err=True)
    golden = make_quantised.make_quantised()
    if check:
        return make_quantised.differences(golden, read_quantised(folder))
    save_quantised(folder, golden)
    return []


def make(name: str) -> Golden:
    """Run both reference engines on one built-in model.

    Args:
        name: The model.

    Returns:
        Goldens, float64 reference and provenance.
    """
    path = builtin_path(name)
    weights = open_weights(path)
    prompt, n_tokens = prompt_of(name)
    ids = prompt_ids(weights, prompt, n_tokens)
    cases = cases_for(ids, weights.config)
    engine_outputs: dict[str, EngineOutput] = {}
    engines: dict[str, object] = {}
    tokens: dict[str, dict[str, list[int]]] = {text: {} for text in TEXTS}
    unsupported = unable_engines(ENGINES, weights.config, ids, N_GREEDY)
    for engine_name in ENGINES:
        if engine_name in unsupported:
            continue
        with open_engine(engine_name, path, n_threads=2) as engine:
            engine_outputs[engine_name] = run_cases(engine, cases)
            engines[engine_name] = engine.provenance()
            for text in TEXTS:
                tokens[text] |= token_ids(engine, text)
    reference = run_reference(path, cases, engine_outputs, n_greedy=N_GREEDY)
    engines[REFERENCE] = {"route": reference.engine_output.load_path.stored()}
    refuse_far_engines(name, weights, cases, engine_outputs, reference)
    return Golden(
        cases=cases,
        engine_outputs=engine_outputs,
        reference=reference,
        tensors=library_tensors(path),
        tokens=[TokenCheck(text, ids) for text, ids in tokens.items()],
        unsupported_reason=unsupported,
        provenance={
            "command": "python reference_outputs/regenerate.py",
            "weights_sha256": sha256(path),
            "prompt": prompt,
            "engines": engines,
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    )


def prompt_of(name: str) -> tuple[str, int]:
    """Return the prompt of a model, and the number of its tokens."""
    return (LONG_PROMPT, N_TOKENS[name]) if name in N_TOKENS else (PROMPT, 12)


def prompt_ids(weights: Weights, prompt: str, n_tokens: int) -> list[int]:
    """Encode the first tokens of a prompt.

    Raises:
        ValueError: Fewer than 8 are distinct; such an input hides mistakes.
    """
    ids = Model(weights).tokenizer.encode(prompt)[:n_tokens]
    if len(set(ids)) < 8:
        raise ValueError(f"regenerate: expected at least 8 distinct tokens, got {ids}")
    return ids


def token_ids(engine: ReferenceEngine, text: str) -> dict[str, list[int]]:
    """Return the engine's ids of a text, under its name, if the engine has a tokenizer."""
    ids = engine.tokenize(text, add_special=True, parse_special=False)
    return {} if ids is None else {engine.name: ids}


def refuse_far_engines(
    name: str,
    weights: Weights,
    cases: Mapping[str, Pass],
    engine_outputs: Mapping[str, EngineOutput],
    reference: ReferenceOutput,
) -> None:
    """Refuse goldens that differ from the float64 reference by more than rounding.

    Raises:
        ValueError: An engine is further from the float64 reference than the tolerance derived for float32.
    """
    tolerances = limits_of(weights, cases, reference)
    tolerance, exact = allowed(tolerances, reference), reference.engine_output.arrays()
    comparisons = [
        (f"{engine} chained {key}", difference_of(array.astype(exact[key].dtype), exact[key], key), tolerance[key])
        for engine, output in engine_outputs.items()
        for key, array in output.arrays().items()
        if key in tolerance
    ]
    comparisons += [
        (f"{engine} isolated {case}/{key}", reference.isolated[engine][case][key], tolerances[case].isolated(key))
        for engine, case, (key, *_) in product(engine_outputs, cases, keys(weights.config))
    ]
    far = [
        f"{label}: {diff.describe()}, allowed {tolerance.error:.1e}"
        for label, diff, tolerance in comparisons
        if not diff.within(tolerance)
    ]
    if far:
        raise ValueError(f"regenerate {name}: {len(far)} goldens far from the float64 reference:\n" + "\n".join(far))


def limits_of(weights: Weights, cases: Mapping[str, Pass], reference: ReferenceOutput) -> dict[str, ForwardTolerances]:
    """Derive the tolerances of float32, by case."""
    return {case: ForwardTolerances(weights, run, reference.engine_output.traces[case]) for case, run in cases.items()}


def allowed(tolerances: Mapping[str, ForwardTolerances], reference: ReferenceOutput) -> dict[str, Tolerance]:
    """Derive the allowed distance of two correct engines, by name of the stored golden; texts must be equal."""
    softmax = limit_of_softmax(reference.engine_output.selected_logits.size)
    traces = reference.engine_output.traces
    return {
        **{f"{case}/{key}": tolerances[case].chained(key) for case, trace in traces.items() for key in trace},
        **{f"near/probabilities.{setting}": softmax for setting in reference.engine_output.probabilities},
        "near/selected_logits": tolerances["near"].last_row(),
    }


def difference_of(actual: np.ndarray | None, expected: np.ndarray | None, key: str) -> Difference:
    """Measure the difference between two goldens."""
    return measure(actual, expected, masked=key.endswith("attn_scores"))


def differences(name: str, new: Golden, old: Golden) -> list[str]:
    """List differences of newly made goldens of a model from the stored ones, a line for each."""
    parts = ("cases", "tensors", "tokens", "unsupported_reason")
    lines = [f"{part}: not as stored" for part in parts if getattr(new, part) != getattr(old, part)]
    tolerance = allowed(limits_of(open_weights(builtin_path(name)), old.cases, old.reference), old.reference)
    for engine in old.engine_outputs:
        lines += changed_route(engine, new.engine_outputs[engine], old.engine_outputs[engine])
        new_arrays, old_arrays = new.engine_outputs[engine].arrays(), old.engine_outputs[engine].arrays()
        lines += [f"{engine} {key}: only on one side" for key in sorted(new_arrays.keys() ^ old_arrays.keys())]
        for key in new_arrays.keys() & old_arrays.keys():
            difference = difference_of(new_arrays[key], old_arrays[key], key)
            if not difference.within(tolerance.get(key, EXACT)):
                lines.append(f"{engine} {key}: {difference.describe()}")
    return lines


def changed_route(name: str, new: EngineOutput, old: EngineOutput) -> list[str]:
    """Return one line if the file reached an engine by another load path than the stored one."""
    return [] if new.load_path == old.load_path else [f"{name}: {new.load_path}; stored: {old.load_path}"]


def made_otherwise(name: str, golden: Golden) -> list[str]:
    """List differences of the stored float64 reference from one recomputed from the stored goldens, a line for each."""
    reference = run_reference(builtin_path(name), golden.cases, golden.engine_outputs, n_greedy=N_GREEDY)
    lines = changed_route(REFERENCE, reference.engine_output, golden.reference.engine_output)
    new, old = ({**t.engine_output.arrays(), "step logits": t.step_logits} for t in (reference, golden.reference))
    for key in sorted(new.keys() | old.keys()):
        difference = difference_of(old.get(key), new.get(key), key)
        if not difference.within(MATHEMATICS):
            lines.append(f"truth {key}: {difference.describe()}")
    for engine, (case, base) in ((p, of) for p in golden.engine_outputs for of in golden.reference.isolated[p].items()):
        actual = reference.isolated[engine][case]
        lines += [
            f"distance of {engine}, {case} {key}: {base.get(key)}, made again {actual.get(key)}"
            for key in sorted(actual.keys() | base.keys())
            if key not in actual or key not in base or not same_distance(actual[key], base[key])
        ]
    return lines


def same_distance(new: Difference, old: Difference) -> bool:
    """Compare the stored digits, except for changes that float64 in another order makes."""
    pairs = (new.error, old.error), (new.worst, old.worst)
    return all(abs(actual - expected) <= 1e-3 * expected + MATHEMATICS.error for actual, expected in pairs)


def size(folder: Path) -> int:
    """Count the bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
