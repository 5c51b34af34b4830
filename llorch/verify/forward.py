"""Verification from end to end: a built-in model against its stored goldens, any model against live producers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from llorch.builtin import builtin_path, goldens_folder
from llorch.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.memory import available_memory
from llorch.model import Model
from llorch.stages import keys
from llorch.verify.foundation import Table, differing, foreign_tensors, own_tensors
from llorch.verify.goldens import N_GREEDY, Evidence, Golden, TokenCheck, Truth, cases_for, not_run, read, sha256, take
from llorch.verify.quantised import QuantisedVerifier
from llorch.verify.replay import Pass
from llorch.verify.truth import WITNESS, take_truth
from llorch.verify.verifier import BACKENDS, FLOAT64, Row, Verifier, exact_row
from llorch.verify.witnesses import ProducerName, open_producer
from llorch.verify.witnesses.process import in_child, start

Say = Callable[[str], None]


@dataclass(frozen=True)
class Shown:
    """What producers that ran now showed for a file.

    Attributes:
        weights: Of the file.
        cases: What they were given.
        evidence: By producer; those that could not run the model are absent.
        truth: What float64 shows; None where transformers cannot run the model.
        texts: The prompt, with the ids that each of their tokenizers gives.
    """

    weights: Weights
    cases: Mapping[str, Pass]
    evidence: Mapping[str, Evidence]
    truth: Truth | None
    texts: Sequence[TokenCheck]

    @property
    def model(self) -> str:
        """Name of the model in rows."""
        return Model(self.weights).name

    def judged(self, backends: Iterable[str]) -> list[str]:
        """Those of some backends that there is something to judge by: in float64 only the truth is that."""
        return [name for name in backends if self.truth is not None or "float64" not in name]

    def foundation_rows(self) -> Iterator[Row]:
        """Checkpoint 00, but for the embedding: the file as we read it, its tokens as we make them."""
        yield from foundation_rows(self.model, own_tensors(self.weights), foreign_tensors(Path(self.weights.path)))
        if self.texts:
            yield from token_rows(self.model, self.weights, self.texts)


def verify_stored(name: str) -> Iterator[Row]:
    """Judge a built-in model against its stored goldens.

    Args:
        name: A built-in model.

    Yields:
        Rows, checkpoint 00 first.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: The goldens were made for other weights.
    """
    weights, golden = stored(name)
    yield from stored_foundation_rows(name, weights, golden)
    verifier = Verifier(name, weights, golden.cases, golden.evidence, golden.truth)
    for backend in (*BACKENDS, FLOAT64):
        yield from verifier.on(backend).rows(golden.tolerances)


def stored(name: str) -> tuple[Weights, Golden]:
    """Open a built-in model and its goldens.

    Args:
        name: A built-in model.

    Returns:
        Both.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: The goldens were made for other weights.
    """
    path = builtin_path(name)
    golden = read(goldens_folder() / name)
    if golden.provenance["weights_sha256"] != sha256(path):
        raise ValueError(f"golden {name}: made for other weights than {path}; run reference_outputs/regenerate.py")
    return open_weights(path), golden


def verify_live(
    path: Path,
    ids: Sequence[int],
    producers: Sequence[ProducerName],
    *,
    text: str | None = None,
    say: Say = lambda line: None,
    failed: dict[str, str] | None = None,
) -> Iterator[Row]:
    """Judge any model against producers that run now.

    Args:
        path: A GGUF file or a Hugging Face folder.
        ids: The prompt.
        producers: Which engines to run.
        text: The prompt's text, when it was tokenized by us; its ids are then compared too.
        say: Told what is being done.
        failed: Filled with the engines that could not run the model, and why; without it such an error is raised.

    Yields:
        Rows, checkpoint 00 first.

    Raises:
        MemoryError: The traces would not fit.
        MissingExtra: An engine is not installed.
        RuntimeError: An engine failed, and `failed` is not given.
    """
    shown = ask(path, ids, producers, text=text, say=say, failed=failed)
    if not shown.evidence:
        return
    say("reading the tensor table")
    yield from shown.foundation_rows()
    verifier = Verifier(shown.model, shown.weights, shown.cases, shown.evidence, shown.truth)
    tolerances = verifier.tolerances()
    say("comparing")
    for backend in shown.judged((*BACKENDS, FLOAT64)):
        yield from verifier.on(backend).rows(tolerances)


def ask(
    path: Path,
    ids: Sequence[int],
    producers: Sequence[ProducerName],
    *,
    text: str | None,
    say: Say,
    failed: dict[str, str] | None,
) -> Shown:
    """Run producers on a model; for the arguments and exceptions see `verify_live`."""
    weights = open_weights(path)
    cases = cases_for(ids, weights.config)
    require_memory(weights.config, len(ids), n_traces=3 * len(producers) + 3)  # truths are twice as wide
    require_engines(weights, producers)
    start((*producers, "transformers"))  # which the truth takes
    n_greedy = min(N_GREEDY, weights.config.max_position_embeddings - len(ids) + 1)
    evidence: dict[str, Evidence] = {}
    tokens: dict[str, Sequence[int]] = {}
    for name in producers:
        say(f"running {name}")
        with not_run(name, failed):
            with open_producer(name, path) as producer:
                shown = take(producer, cases, n_greedy=n_greedy)
                theirs = producer.tokenize(text, add_special=True, parse_special=False) if text is not None else None
            evidence[name] = shown
            tokens |= {name: theirs} if theirs is not None else {}
    texts = [TokenCheck(text, tokens)] if text is not None else []
    return Shown(weights, cases, evidence, _truth(path, cases, evidence, n_greedy, say, failed), texts)


def _truth(
    path: Path,
    cases: Mapping[str, Pass],
    evidence: Mapping[str, Evidence],
    n_greedy: int,
    say: Say,
    failed: dict[str, str] | None,
) -> Truth | None:
    """Of the model, or None with the reason in `failed`."""
    if not evidence:
        return None
    say(f"running {WITNESS}")
    with not_run(WITNESS, failed):
        require_truth(open_weights(path))
        return take_truth(path, cases, evidence, n_greedy=n_greedy)
    return None


def require_truth(weights: Weights) -> None:
    """Refuse a model that does not fit as float64, before an engine loads it.

    Args:
        weights: The model.

    Raises:
        MemoryError: It needs more than is free.
    """
    needed, free = 8 * sum(math.prod(weights.shape(name)) for name in weights), available_memory()
    if needed > free:
        raise MemoryError(f"the truth needs float64 weights, {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def verify_as_stored(
    model: Model,
    ids: Sequence[int],
    *,
    text: str | None = None,
    say: Say = lambda line: None,
    failed: dict[str, str] | None = None,
) -> Iterator[Row]:
    """Judge a GGUF file under ggml numerics, against llama.cpp running the file as it is.

    Args:
        model: Loaded from a GGUF file, with the numerics to judge.
        ids: The prompt.
        text: The prompt's text, when it was tokenized by us; its ids are then compared too.
        say: Told what is being done.
        failed: Filled with why llama.cpp could not run the model; without it such an error is raised.

    Yields:
        Rows, checkpoint 00 first.

    Raises:
        MemoryError: The traces would not fit.
        MissingExtra: llama.cpp is not installed.
        RuntimeError: llama.cpp failed, and `failed` is not given.
    """
    path = Path(model.weights.path)
    n_greedy = min(N_GREEDY, model.config.max_position_embeddings - len(ids) + 1)
    require_memory(model.config, len(ids) + n_greedy, n_traces=6)
    say("running llamacpp")
    with not_run("llamacpp", failed), open_producer("llamacpp", path, numerics=model.weights.numerics) as producer:
        greedy = producer.greedy(ids, n_greedy)
        cases = cases_for(ids, model.config) | {"near": Pass((*ids, *greedy[:-1]))}
        evidence = replace(take(producer, cases, n_greedy=1), greedy=np.asarray(greedy, np.int64))
        theirs = producer.tokenize(text, add_special=True, parse_special=False) if text is not None else None
    if failed:
        return
    say("comparing tensors")
    yield from foundation_rows(model.name, own_tensors(model.weights), foreign_tensors(path))
    if text is not None and theirs is not None:
        yield from token_rows(model.name, model.weights, [TokenCheck(text, {"llamacpp": theirs})])
    yield from decode_rows(model.name, model.weights)
    say("comparing stages")
    verifier = QuantisedVerifier(model.name, model.weights, cases, {"llamacpp": evidence})
    yield from verifier.rows(verifier.tolerances())


def decode_rows(model: str, weights: Weights) -> Iterator[Row]:
    """Checkpoint 13: our decoding of every matrix of a file, bit by bit against ggml's own C functions."""
    decode = partial(in_child, "llamacpp", weights.path, "llorch.verify.witnesses.ggml_tensor:decode")
    by_type: dict[str, list[Packed]] = defaultdict(list)
    for info in weights.source.tensors.values():
        packed = weights.source.packed(info.name)
        if packed.ggml_type is not GGMLType.F32:
            by_type[packed.ggml_type.name].append(packed)
    for kind, tensors in by_type.items():
        wrong = [
            packed.name
            for packed in tensors
            for start, ours in packed.tiles()
            if not np.array_equal(
                ours.reshape(-1).view(np.uint32),
                decode(packed.by_row[start : start + len(ours)], packed.ggml_type, ours.size).view(np.uint32),
            )
        ]
        share = len(set(wrong)) / len(tensors)
        yield exact_row(model, "13", f"decode.{kind}", "llamacpp", share, ", ".join(wrong[:5]))


def require_memory(config: ModelConfig, n_tokens: int, *, n_traces: int) -> None:
    """Refuse a prompt whose traces do not fit the memory, before any engine runs.

    Args:
        config: The model.
        n_tokens: Length of the prompt; attention is recorded for every pair of tokens.
        n_traces: Float32 traces that are held at once.

    Raises:
        MemoryError: They need more than is free.
    """
    values = sum(math.prod(stage.shape(config, seq=n_tokens, ctx=n_tokens)) for _, stage, _ in keys(config))
    needed = 4 * values * n_traces
    free = available_memory()
    if needed > free:
        raise MemoryError(
            f"verify: the traces of {n_tokens} tokens need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "give a shorter prompt"
        )


def require_engines(weights: Weights, producers: Sequence[ProducerName]) -> None:
    """Refuse a model that does not fit as float32 in every engine, before any of them loads it.

    Args:
        weights: The model.
        producers: The engines; llama.cpp maps a file, transformers holds a copy of its own.

    Raises:
        MemoryError: They need more than is free.
    """
    one = 4 * sum(math.prod(weights.shape(name)) for name in weights)
    needed = one * (1 + ("transformers" in producers))  # ours, and its
    free = available_memory()
    if needed > free:
        raise MemoryError(
            f"{weights.path}: exact numerics need float32 weights in every engine, about {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; use --numerics ggml, or --against llamacpp alone"
        )


def stored_foundation_rows(name: str, weights: Weights, golden: Golden) -> Iterator[Row]:
    """Checkpoint 00 of a built-in model, but for the embedding."""
    yield from foundation_rows(name, own_tensors(weights), golden.tensors)
    yield from token_rows(name, weights, golden.tokens)


def foundation_rows(model: str, own: Table, foreign: Table) -> Iterator[Row]:
    """Checkpoint 00: names, types, shapes and bytes of all tensors."""
    wrong = differing(own, foreign)
    n_tensors = len(own.keys() | foreign.keys())
    yield exact_row(model, "00", "tensors", "reader", len(wrong) / n_tensors, ", ".join(wrong[:5]))


def token_rows(model: str, weights: Weights, checks: Sequence[TokenCheck]) -> Iterator[Row]:
    """Checkpoint 00: our token ids against each producer's, for every text."""
    tokenizer = Model(weights).tokenizer
    for producer in sorted({producer for check in checks for producer in check.ids}):
        texts = [check for check in checks if producer in check.ids]
        wrong = [check for check in texts if tokenizer.encode(check.text) != list(check.ids[producer])]
        note = f"{wrong[0].text!r}: {tokenizer.encode(wrong[0].text)} not {wrong[0].ids[producer]}" if wrong else ""
        yield exact_row(model, "00", "token_ids", producer, len(wrong) / len(texts), note)
