"""Float64 reference: unmodified transformers in pure float64, and the distance of goldens from it.

llorch computes nothing here. The *chained* reference is a run of the whole model. The *isolated* reference is what
transformers makes of a golden's own inputs, stage by stage. Only the golden's distance from it is stored, because
llorch's isolated stages are compared with the golden, and in float64 with the chained reference.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llorch.engines import Call, Progress, open_engine
from llorch.engines.interface import not_a_number
from llorch.judging.goldens.forward import EngineOutput, ReferenceOutput, calls_for, shown_by
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import Pass

FLOAT64_REFERENCE = "transformers-float64"  # its name in rows


def run_reference(
    path: str | Path,
    cases: Mapping[str, Pass],
    engine_outputs: Mapping[str, EngineOutput],
    *,
    n_greedy: int,
    progress: Progress | None = None,
) -> ReferenceOutput:
    """Run transformers in float64 on a GGUF file or a Hugging Face folder.

    It is also run, isolated, on the `engine_outputs` for the same cases. `n_greedy` is the length of the greedy
    continuation. `progress` is told of the layers, where one at a time is in memory.

    Raises:
        MissingExtra: transformers is not installed.
        RuntimeError: It does not run the model, or not in float64.
    """
    with open_engine("transformers", path, dtype="float64", progress=progress) as engine:
        (_, prompt, _), *asked = calls_for(cases, n_greedy)
        isolated: list[Call] = [
            ("isolated", (case.ids, output.traces[name]), {"first_position": case.first_position})
            for output in engine_outputs.values()
            for name, case in cases.items()
        ]
        (greedy, steps), *answers = engine.call_batch([("continued", prompt, {}), *asked, *isolated])
        shown = shown_by(engine, cases, [greedy, *answers[: len(asked)]])
        measured = iter(answers[len(asked) :])
        distances = {engine: {name: next(measured) for name in cases} for engine in engine_outputs}
        return ReferenceOutput(shown, steps, distances)


def require_numbers(engine: str, family: str, shown: EngineOutput, reference: ReferenceOutput | None) -> None:
    """Refuse an engine (ValueError) that gives NaN where the float64 reference, if there is one, has a number."""
    true = {} if reference is None else reference.engine_output.arrays()
    for name, array in shown.arrays().items():
        lost = np.isnan(array) & ~np.isnan(true.get(name, 0.0))
        if lost.any():
            case, key = name.split("/")
            why = not_a_number(engine, family, key.rpartition(".")[2])
            raise UserError(f"{engine}: expected numbers, got {lost.sum()} NaN of {lost.size} in {key} ({case}){why}")
