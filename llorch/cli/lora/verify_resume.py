"""`llorch lora verify-resume`: prove that a run can be stopped and resumed without changing a bit."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llorch.cli.lora.settings_options import chosen_settings, config_option, settings_options
from llorch.cli.mesh import mesh_option
from llorch.cli.options import MODEL, group, json_option, page_option, verb
from llorch.cli.outcome import DIFFERS, OK
from llorch.cli.output import progress, say, to_json
from llorch.cli.threads import threads_option
from llorch.runtime.launched_rank import is_rank

if TYPE_CHECKING:
    from llorch.pytorch.train.verify_resume import Proof, RunComparison

STEPS = 10
KINDS = {"adapter": "weights", "optimizer": "moments", "adapter_model.safetensors": "adapter file"}


@verb(
    "Prove that a run can be resumed bit by bit.",
    "llorch lora verify-resume story --data path/to/chats.jsonl",
    "llorch lora verify-resume path/to/model --data path/to/folder --control",
    "llorch lora verify-resume story --data pirate --mesh dp=2,tp=2",
    page="lora.md",
)
@click.argument("model", type=MODEL, required=False)
@group("Data", page_option("--data", help="JSONL file, .json list, folder or pirate."))
@group("Run", config_option)
@settings_options()
@threads_option
@mesh_option
@group(
    "Output",
    page_option(
        "--control", is_flag=True, help="Two more runs that lose moments or data position and must be detected."
    ),
    page_option("-v", "--verbose", is_flag=True, help="Line for every tensor."),
    json_option("One object: steps, stopped_at, holds, and every tensor compared."),
)
def command(
    *, config: Path | None, axes: Mapping[str, int] | None, control: bool, verbose: bool, as_json: bool, **options: Any
) -> None:
    """Train MODEL twice, once without a stop and once resumed, and compare every bit of the two runs.

    Settings are those of llorch lora train; without --steps a run has 10 steps.

    Exit codes: 0 no bit differs, 1 a bit differs or a control was not detected.
    """
    from llorch.cli.lora.options import require_torch, threads_for_training
    from llorch.pytorch.train.verify_resume import verify_resume
    from llorch.training.stopping import Stopped

    require_torch()
    from llorch.pytorch.distributed.launch import RanksEnded

    if is_rank():
        raise click.UsageError("verify-resume starts the processes of --mesh itself; call it without a launcher")
    steps = STEPS if options["steps"] is None else options["steps"]
    settings = chosen_settings(options | {"steps": steps}, config)
    say(threads_for_training(settings))
    try:
        with tempfile.TemporaryDirectory(prefix="llorch-") as folder, progress("verify-resume") as report:
            proof = verify_resume(settings, Path(folder), control=control, axes=axes, tell=report)
    except (Stopped, RanksEnded) as stopped:
        say("llorch: interrupted")
        raise click.exceptions.Exit(stopped.exit_code) from None
    click.echo(to_json(_as_json(proof)) if as_json else "\n".join(_proof_lines(proof, verbose=verbose)))
    raise click.exceptions.Exit(OK if proof.holds else DIFFERS)


def _proof_lines(proof: "Proof", *, verbose: bool) -> Iterator[str]:
    n_resumed = proof.steps - proof.stopped_at
    yield f"{proof.steps} uninterrupted steps against {proof.stopped_at} + {n_resumed} after a resume"
    yield from _comparison_lines(proof.halves, verbose=verbose)
    yield "bit-identical" if proof.halves.equal else "NOT bit-identical"
    for lost, comparison in proof.controls.items():
        differing = sum(tensor.differing_bits > 0 for tensor in comparison.tensors)
        note = f"{differing} of {len(comparison.tensors)} tensors differ, as expected" if differing else "NOT NOTICED"
        yield f"control, {lost} lost: {note}"


def _comparison_lines(comparison: "RunComparison", *, verbose: bool) -> Iterator[str]:
    """Write a line per kind of tensor, and one for each tensor that differs; with `verbose` for each tensor."""
    kinds = defaultdict(list)
    for tensor in comparison.tensors:
        kinds[tensor.kind].append(tensor)
    for kind, tensors in kinds.items():
        values, bits = sum(tensor.n_values for tensor in tensors), sum(tensor.differing_bits for tensor in tensors)
        yield f"{KINDS.get(kind, kind):13}{len(tensors):5} tensors {values:12,} values {bits:10,} bits differ"
        for tensor in tensors:
            if verbose or tensor.differing_bits:
                yield f"  {tensor.name}: {tensor.n_values:,} values, {tensor.differing_bits:,} bits differ"
    yield f"{'log':13}{comparison.n_lines:5} lines{comparison.differing_lines:32,} lines differ"


def _as_json(proof: "Proof") -> dict[str, Any]:
    return {
        "steps": proof.steps, "stopped_at": proof.stopped_at, "holds": proof.holds,
        "halves": _comparison_as_json(proof.halves),
        "controls": {lost: _comparison_as_json(comparison) for lost, comparison in proof.controls.items()},
    }  # fmt: skip


def _comparison_as_json(comparison: "RunComparison") -> dict[str, Any]:
    tensors = {t.name: {"values": t.n_values, "differing_bits": t.differing_bits} for t in comparison.tensors}
    return {
        "equal": comparison.equal, "tensors": tensors, "log_lines": comparison.n_lines,
        "differing_log_lines": comparison.differing_lines,
    }  # fmt: skip
