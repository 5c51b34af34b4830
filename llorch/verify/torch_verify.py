"""Verification of the torch path from end to end: a built-in model against its stored goldens, any model live."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llorch.pytorch.device import Target
from llorch.verify.forward import Say, ask, stored, stored_foundation_rows
from llorch.verify.half import half_tolerances
from llorch.verify.torch_variants import backends
from llorch.verify.torch_verifier import TorchVerifier
from llorch.verify.verifier import Row, Verifier
from llorch.verify.witnesses import ProducerName


def verify_torch_stored(name: str, target: Target, only: Sequence[str] | None = None) -> Iterator[Row]:
    """Judge a built-in model on the torch path against its stored goldens.

    Args:
        name: A built-in model.
        target: Device and dtype.
        only: Backends to judge; None judges all of `backends`.

    Yields:
        Rows of checkpoints 00 to 12.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: The goldens were made for other weights.
        CheckpointMismatch: What ran is not the model or not on the target.
    """
    weights, golden = stored(name)
    yield from (replace(row, backend=str(target)) for row in stored_foundation_rows(name, weights, golden))
    verifier = TorchVerifier(name, weights, golden.cases, golden.evidence, golden.truth, target)
    tolerances = golden.half_tolerances.get(target.dtype_name, golden.tolerances)
    for backend in only if only is not None else backends(target):
        yield from verifier.on(backend).rows(tolerances)


def verify_torch_live(
    path: Path,
    ids: Sequence[int],
    producers: Sequence[ProducerName],
    target: Target,
    *,
    text: str | None = None,
    say: Say = lambda line: None,
    failed: dict[str, str] | None = None,
) -> Iterator[Row]:
    """Judge any model on the torch path against producers that run now; in half precision they run once more in it.

    Args:
        path: A GGUF file or a Hugging Face folder.
        ids: The prompt.
        producers: Which engines to run.
        target: Device and dtype.
        text: The prompt's text, when it was tokenized by us; its ids are then compared too.
        say: Told what is being done.
        failed: Filled with the engines that could not run the model, and why; without it such an error is raised.

    Yields:
        Rows of checkpoints 00 to 12, of every variant in `backends`, and with packed matrices where the file has such.

    Raises:
        MemoryError: The traces or the model would not fit.
        MissingExtra: An engine is not installed.
        RuntimeError: An engine failed, and `failed` is not given.
        CheckpointMismatch: What ran is not the model or not on the target.
    """
    shown = ask(path, ids, producers, text=text, say=say, failed=failed)
    if not shown.evidence:
        return
    yield from (replace(row, backend=str(target)) for row in shown.foundation_rows())
    verifier = TorchVerifier(shown.model, shown.weights, shown.cases, shown.evidence, shown.truth, target)
    usable: list[ProducerName] = [name for name in producers if name in shown.evidence]
    if verifier.half is None:
        tolerances = Verifier(shown.model, shown.weights, shown.cases, shown.evidence, shown.truth).tolerances()
    else:
        tolerances = half_tolerances(
            shown.weights, shown.cases, shown.truth, path, verifier.half, say, producers=usable, failed=failed
        )
        if not tolerances:
            return
    for backend in shown.judged(backends(target, shown.weights)):
        say(f"comparing {backend}")
        yield from verifier.on(backend).rows(tolerances)
