"""Checkpoint 14: checkpoints 00 to 12 again on the torch path, on one device and in one dtype, as its modules run.

Truth, goldens and comparison are those of `llorch.verifier`; only what is ours is computed by the modules. *Isolated*
is a forward pass of these very modules in which the golden takes the place of every stage as soon as it was recorded.

In bfloat16 and float16 a greedy text leaves the golden's at the first near-tie, and all later tokens say nothing. Such
a run is judged again with the golden's tokens fed back: at each step the most likely token must be the golden's, or its
true logit be within the tolerance of the golden's. And each token of the text must be so close to the truly best one.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch

from llorch.compare import Tolerance
from llorch.errors import CheckpointMismatch
from llorch.evidence import HALF_DTYPES, SAMPLINGS, Evidence, Tolerances, Truth, sampler_inputs
from llorch.generate import IdsOnly
from llorch.half import half_ceiling
from llorch.numerics import DtypeName
from llorch.replay import Pass
from llorch.stages import Stage
from llorch.torch_backend.device import Target
from llorch.torch_backend.model import TorchModel, as_numpy
from llorch.torch_backend.observed import ObservedCase, Trace
from llorch.torch_backend.sampling import BatchSettings, Needs, probabilities, seen_tokens
from llorch.torch_backend.variants import VARIANTS, Variant
from llorch.truth import ATTENTION, SCORES, WITNESS
from llorch.verifier import FAIL, PASS, TIE, Row, Verifier, run
from llorch.weights import Weights


class TorchVerifier(Verifier):
    """Judges one variant of the torch path; `on` chooses which.

    Attributes:
        target: Device and dtype that are judged.
        half: The dtype, when it is one of half precision.
        variant: How the modules run.
        model: They.
    """

    variant: Variant
    model: TorchModel

    def __init__(
        self,
        name: str,
        weights: Weights,
        cases: Mapping[str, Pass],
        evidence: Mapping[str, Evidence],
        truth: Truth | None,
        target: Target,
    ) -> None:
        """Prepare; nothing is loaded before `on`.

        Args:
            name: Name of the model in the rows.
            weights: The model in float32, from which all variants are loaded.
            cases: The inputs.
            evidence: What each producer showed for them.
            truth: What float64 shows for them; a run in float64 is judged by it alone.
            target: Device and dtype that are judged.

        Raises:
            ValueError: A trace has not exactly the stages of the model.
        """
        super().__init__(name, weights, cases, evidence, truth)
        self.target = target
        if target.dtype_name == "float64":
            self.evidence = {WITNESS: truth.evidence} if truth is not None else {}
        self._texts: dict[int, np.ndarray] = {}  # by length
        self._forced: dict[tuple[int, ...], np.ndarray] = {}  # tokens that were fed back to the logits of every step
        self.half: DtypeName | None = next((d for d in HALF_DTYPES if d == target.dtype_name), None)

    def on(self, backend: str) -> "TorchVerifier":
        """The same verifier with one variant loaded; the truth is computed once for all.

        Args:
            backend: One of `backends`.

        Returns:
            It.
        """
        return self.judging(VARIANTS[backend.removeprefix(str(self.target))], backend)

    def judging(self, variant: Variant, backend: str) -> "TorchVerifier":
        """The same verifier for any variant.

        Args:
            variant: Loaded now.
            backend: Its name in the rows.

        Returns:
            It.

        Raises:
            ValueError: A parameter is not of the dtype or not on the device of the target.
        """
        other = copy(self)
        other.backend, other.variant = backend, variant
        other.model = variant.make(self.weights, self.target)
        other._isolated_traces, other._forced, other._texts = {}, {}, {}
        require_target(other.model)
        vars(other.model)["tokenizer"] = IdsOnly()  # also a file without a vocabulary is judged
        return other

    def stage_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 00 to 08; attention that shows no scores is one op, with a tolerance of its own."""
        if SCORES <= self.variant.hidden:
            tolerances = {
                case: modes | {"isolated": modes["isolated"] | {"attn_context": modes["isolated"][ATTENTION]}}
                for case, modes in tolerances.items()
                if case in self.cases
            }
        return super().stage_rows(tolerances)

    def sampler_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 09 to 12; what is not equal in half precision is looked at once more."""
        allowed = tolerances["near"]["chained"]["logits"]
        for row in super().sampler_rows(tolerances):
            again = self.half is not None and row.verdict != PASS and row.checkpoint in ("10", "12")
            yield self._at_near_ties(row, allowed) if again else row

    def _allowed_after_cached(self, tolerances: Tolerances, case: str, stage: str, n_tokens: int) -> Tolerance:
        """As there; the last row alone is what sampling sees, whose error is not averaged over a whole pass."""
        alone = n_tokens == 1 and (case, stage) == ("near", "logits")
        return super()._allowed_after_cached(tolerances, case, "selected_logits" if alone else stage, n_tokens)

    def ceiling_of(self, case: str, mode: str, stage: str) -> Tolerance:
        """The largest tolerance that is ever granted to a stage."""
        if self.half is None or stage == "probabilities":  # made from float32 logits in every run
            return super().ceiling_of(case, mode, stage)
        return half_ceiling(self.weights.config, self.cases[case], mode, self.half)

    def _allowed(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        granted = super()._allowed if self.half is None else self._capped
        return granted(made, case, mode, stage)

    def _capped(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        if self.half is None:
            return super()._capped(made, case, mode, stage)
        return made.at_most(self.ceiling_of(case, mode, stage))

    def _comparisons(self) -> Iterator[tuple[str, str, str, Stage, int | None, str]]:
        for comparison in super()._comparisons():
            if comparison[3].name not in self.variant.hidden:
                yield comparison

    def _observed(self, case: str) -> ObservedCase:
        return ObservedCase(self.model, self.cases[case], in_batch=self.variant.in_batch)

    def _run(self, weights: Weights, case: str, *, n_cached: int = 0) -> Trace:
        """Ours; of the second of two passes in a cache that was used before, when there are two."""
        observed, trace = self._observed(case), {}
        if n_cached:
            observed.warm_up()
            observed.feed(n_cached)
        observed.feed(len(self.cases[case].ids), trace=trace)
        return self._complete(trace)

    def _run_isolated(self, case: str, golden: Mapping[str, np.ndarray]) -> Trace:
        trace: Trace = {}
        self._observed(case).feed(len(self.cases[case].ids), trace=trace, golden=golden)
        return self._complete(trace)

    def _isolated_error(self, producer: str, case: str, key: str) -> float:
        fused = key.endswith("attn_context") and self.variant.hidden >= SCORES
        return super()._isolated_error(producer, case, key.replace("attn_context", ATTENTION) if fused else key)

    def _complete(self, trace: Trace) -> Trace:
        expected = {key for key, stage, _ in self._keys if stage.name not in self.variant.hidden}
        wrong = sorted(expected ^ trace.keys())
        if wrong:
            raise CheckpointMismatch(
                f"{self.name}: {self.backend} must show its {len(expected)} stages and no others; "
                f"missing or unknown: {', '.join(wrong[:5])}"
            )
        return trace

    def _last_row(self) -> np.ndarray:
        return self._observed("near").feed(len(self.cases["near"].ids), last_only=True)[0]

    def _probabilities(self) -> dict[str, np.ndarray]:
        logits, history = sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)
        groups = [[*SAMPLINGS]] if self.variant.in_batch else [[name] for name in SAMPLINGS]
        return {name: row for names in groups for name, row in self._filtered(names, logits, history)}

    @torch.inference_mode()
    def _filtered(
        self, names: Sequence[str], logits: np.ndarray, history: Sequence[int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Distributions of some settings, as rows of one batch."""
        settings, device = [SAMPLINGS[name] for name in names], self.target.device
        seen = torch.from_numpy(seen_tokens([history] * len(names), logits.size)).to(device)
        dtype = torch.promote_types(self.target.dtype, torch.float32)  # as the model makes its logits
        rows = torch.from_numpy(logits).to(device, dtype).expand(len(names), -1)
        made = probabilities(rows, BatchSettings.of(settings, device), Needs.of(settings), seen)
        return zip(names, as_numpy(made), strict=True)

    def _greedy(self, n_tokens: int) -> tuple[np.ndarray, list[np.ndarray]]:
        tokens = self._text(n_tokens)
        others = [e.greedy for e in self.evidence.values() if not np.array_equal(tokens, e.greedy)]
        if not others:
            return tokens, []  # logits are looked at where a token is another
        return tokens, [*self._step_by_step(tokens if self.half is None else others[0])]  # equal up to the first such

    def _text(self, n_tokens: int) -> np.ndarray:
        """The greedy text as users get it, in a batch beside another."""
        if n_tokens not in self._texts:
            self._texts[n_tokens] = self._generated(n_tokens)
        return self._texts[n_tokens]

    def _generated(self, n_tokens: int) -> np.ndarray:
        ids = [*self.cases["near"].ids]
        prompts = [ids[::-1][:-1], ids] if self.variant.in_batch else [ids]
        made = self.model.generate_batch(prompts, max_tokens=n_tokens, ignore_eos=True)
        return np.asarray([token.id for row, token in made if row == len(prompts) - 1], np.int64)

    def _step_by_step(self, tokens: np.ndarray) -> np.ndarray:
        """Our logits of every step when these tokens are fed back."""
        fed = tuple(tokens[:-1].tolist())
        if fed not in self._forced:
            near = self.cases["near"].ids
            observed = ObservedCase(self.model, Pass((*near, *fed)), in_batch=self.variant.in_batch)
            rows = [observed.feed(n)[-1] for n in range(len(near), len(near) + len(fed) + 1)]
            self._forced[fed] = np.stack(rows)
        return self._forced[fed]

    def _at_near_ties(self, row: Row, allowed: Tolerance) -> Row:
        """Judge argmax or text of a run in half precision: another token must be as likely, within the tolerance.

        So must every token of the text that the run goes on with, after the tokens before it.
        """
        evidence = self.evidence[row.producer]
        if row.checkpoint == "10":
            want = np.asarray([int(np.argmax(evidence.selected_logits))])
            got = free = self._last_row()[None].argmax(-1)
        else:
            want, free = evidence.greedy, self._text(len(evidence.greedy))
            got = self._step_by_step(want).argmax(-1)
        if free.shape != want.shape:
            return row
        others, after_ours = near_ties(got, want, self._true_steps(want)), self._true_steps(free)
        gap = max([*others.values(), *near_ties(free, after_ours.argmax(-1), after_ours).values()], default=0.0)
        note = f"{len(others)} of {len(want)} steps take another token; largest logit gap {gap:.1e}"
        return replace(
            row,
            verdict=TIE if gap <= allowed.worst else FAIL,
            note=f"{note} of the largest logit, allowed {allowed.worst:.1e}",
        )

    def _true_steps(self, tokens: np.ndarray) -> np.ndarray:
        near = self.cases["near"].ids
        return run(self.wide, Pass((*near, *tokens[:-1].tolist())))["logits"][len(near) - 1 :]


def near_ties(got: np.ndarray, want: np.ndarray, true: np.ndarray) -> dict[int, float]:
    """How much less likely the other tokens really are, where two texts differ.

    Args:
        got: Our token at every step.
        want: The golden's.
        true: True logits of every step, after the golden's tokens before it.

    Returns:
        Step to the distance of the two logits, as a share of the largest.
    """
    return {
        int(at): abs(float(true[at, want[at]] - true[at, got[at]])) / float(np.abs(true[at]).max())
        for at in np.flatnonzero(got != want)
    }


def require_target(model: TorchModel) -> None:
    """Refuse a model whose parameters are not what its target says.

    Args:
        model: Loaded.

    Raises:
        ValueError: A parameter is of another dtype or on another device.
    """
    for name, parameter in model.module.named_parameters():
        if (parameter.dtype, parameter.device) != (model.target.dtype, model.target.device):
            raise ValueError(
                f"{name}: expected {model.target.dtype} on {model.target.device} for {model.target}, "
                f"got {parameter.dtype} on {parameter.device}"
            )
