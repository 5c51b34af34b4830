"""Float64 reference: unmodified transformers in pure float64, and the distance of goldens from it.

llorch computes nothing here. A golden is an array of a reference engine in its dtype. The *chained* reference is a run
of the whole model. The *isolated* reference is the output of transformers for the golden's inputs, stage by stage. Only
the golden's distance from it is stored: llorch's isolated stages are compared with the golden, or in float64 with the
chained reference.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llorch.engines import Call, Progress, open_engine
from llorch.engines.interface import not_a_number
from llorch.judging.goldens.forward import EngineOutput, ReferenceOutput, calls_for, collect_output
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import Pass

FLOAT64_REFERENCE = "transformers-float64"  # engine name in comparisons


def run_reference(
    path: str | Path,
    cases: Mapping[str, Pass],
    engine_outputs: Mapping[str, EngineOutput],
    *,
    n_greedy: int,
    progress: Progress | None = None,
) -> ReferenceOutput:
    """Run transformers in float64 on a GGUF file or a Hugging Face folder.

    Also run each stage isolated on the `engine_outputs` of the same cases. `n_greedy` is the length of the greedy
    continuation. `progress` is called for each layer if only one layer at a time is in memory.

    Raises:
        MissingExtra: transformers is not installed.
        RuntimeError: transformers does not run the model, or not in float64.
    """
    with open_engine("transformers", path, dtype="float64", progress=progress) as engine:
        (_, prompt, _), *other_calls = calls_for(cases, n_greedy)
        isolated: list[Call] = [
            ("isolated", (case.ids, output.traces[name]), {"first_position": case.first_position})
            for output in engine_outputs.values()
            for name, case in cases.items()
        ]
        (greedy, step_logits), *returned = engine.call_batch([("continued", prompt, {}), *other_calls, *isolated])
        output = collect_output(engine, cases, [greedy, *returned[: len(other_calls)]])
        distances_in_order = iter(returned[len(other_calls) :])
        distances = {engine: {name: next(distances_in_order) for name in cases} for engine in engine_outputs}
        return ReferenceOutput(output, step_logits, distances)


def require_numbers(engine: str, family: str, output: EngineOutput, reference: ReferenceOutput | None) -> None:
    """Raise UserError if an engine returns NaN where the float64 reference, if there is one, has a number."""
    reference_arrays = {} if reference is None else reference.engine_output.arrays()
    for name, array in output.arrays().items():
        is_nan = np.isnan(array) & ~np.isnan(reference_arrays.get(name, 0.0))
        if is_nan.any():
            case, key = name.split("/")
            reason = not_a_number(engine, family, key.rpartition(".")[2])
            raise UserError(
                f"{engine}: expected numbers, got {is_nan.sum()} NaN of {is_nan.size} in {key} ({case}){reason}"
            )
