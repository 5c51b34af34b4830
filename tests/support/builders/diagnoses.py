"""Diagnoses of many kinds, made by hand: what reports have to show, ugly ones among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from llorch.diagnosis.diagnose import settled
from llorch.diagnosis.dump_checker import profile
from llorch.diagnosis.verdict import Diagnosis, Finding, Kind, StageCheck
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.judging.types import Cause, Comparison
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FAIL, PASS, ROUNDING, Difference, Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import Stage, keys

LIMIT = Tolerance(4.8e-7, 2e-6)
N_TOKENS = 12
PAIRS = "interleaved pairs; these weights pair dim i with dim i + head_dim/2"
HOSTILE = "<script>alert(1)</script>\x00\x1b[31m\u202eevil\ud800 \N{GRINNING FACE} " + "long" * 60


@cache
def config(n_layers: int = 4, **changes: int) -> ModelConfig:
    return replace(open_weights(builtin_path("micro-llama")).config, n_layers=n_layers, **changes)


@cache
def stage_check(stage: Stage, model: ModelConfig, size: float) -> StageCheck:
    """A stage of layer 0, off by `size` of its limit, the more the later the token and the head."""
    expected = np.random.default_rng(1).normal(size=stage.shape(model, seq=N_TOKENS, ctx=N_TOKENS)).astype(np.float32)
    off = np.random.default_rng(2).normal(size=expected.shape)
    for axis, n in enumerate(expected.shape):
        off *= np.geomspace(0.01, 1, n).reshape([-1 if at == axis else 1 for at in range(expected.ndim)])
    actual = expected + off * size * LIMIT.error
    error = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    verdict = PASS if size < 0.9 else ROUNDING if size < 2 else FAIL
    profiled = None if verdict == PASS else profile(actual, expected, stage, model)
    local = Difference(error, 3 * error, None, (3,) * expected.ndim, 0.55, -0.82)
    isolated = Comparison("story", StageRef("", stage.name), "isolated", "dump", "numpy", local, LIMIT, verdict)
    return StageCheck(isolated, isolated, (), "", "float32, as its arrays are stored", profiled)


def results(model: ModelConfig, sizes: Mapping[str, float], *, rename: Callable[[str], str] = str) -> list[StageCheck]:
    """Every stage of a model, off by 0.3 of the limit where nothing else is said; what is inherited grows."""
    checks, inherited = [], 1e-7
    for name, stage, layer in keys(model):
        size = sizes.get(name, 0.3)
        check = stage_check(stage, replace(model, n_layers=1), size)
        isolated = replace(check.isolated, stage_ref=StageRef(stage.checkpoint, stage.name, layer))
        inherited = min(1.0, max(inherited * 1.02, isolated.difference.error if size > 2 else 0.0))
        difference = replace(isolated.difference, error=inherited)
        chained = replace(isolated, mode="chained", difference=difference)
        checks.append(replace(check, isolated=isolated, chained=chained, engine_name=rename(name), ran_since=(name,)))
    return checks


def finding(
    place: str, kind: Kind = "mistake", *, name: str = "rope-interleaved-pairs", message: str = PAIRS
) -> Finding:
    layer = int(place[1 : place.index(".")]) if "." in place else None
    cause = Cause(name, "mistake", message, (place,), 0.9998, 0.4, "interleaved")
    sentence = "theta is 10000 here, the file says 500000."
    near = Cause("rope-theta", "near miss", sentence, (place,), 0.61, 21_000.0, "10000")
    known = kind in ("mistake", "rounding")
    return Finding(
        kind, place, 0, (place,), () if layer is None else (layer,), (cause,) if known else (), (near,),
        ((0, place),), f"{place}: {message}; explains 99.98 % of the error" if known else f"{place}: none of the known",
        (Cause("rope-sine-sign", "mistake", "the sine has another sign", (place,), 0.9998, 0.5),) if known else (),
    )  # fmt: skip


def diagnosis(
    sizes: Mapping[str, float], findings: Sequence[Finding] = (), *, n_layers: int = 4, source: str = "dumps/mine",
    rename: Callable[[str], str] = str, **changes: int,
) -> Diagnosis:  # fmt: skip
    return Diagnosis(
        "story", source, settled(results(config(n_layers, **changes), sizes, rename=rename), findings), findings,
        {"no token is cached before a pass": ["rope-decode-position", "cache-order"], "12 tokens": ["mask-window"]},
        ["l0.q_rope was found with heads split, although nothing says so"],
    )  # fmt: skip


def right() -> Diagnosis:
    return diagnosis({})


def rounding() -> Diagnosis:
    return diagnosis({"l1.ffn_act": 1.5}, [finding("l1.ffn_act", "rounding", name="bf16", message="bf16 does this")])


def undeclared() -> Diagnosis:
    """Beyond the limits of float32, until a rounding that nobody declared was found."""
    return diagnosis({"l1.ffn_act": 900.0}, [finding("l1.ffn_act", "rounding", name="Q8_0", message="inputs in Q8_0")])


def one_bug() -> Diagnosis:
    return diagnosis({"l1.q_rope": 5e5}, [finding("l1.q_rope")])


def two_bugs() -> Diagnosis:
    sizes = {"l1.q_rope": 5e5, "l2.q_rope": 4e5, "l3.v_proj": 2e3, "l3.ffn_act": 1.5}
    first = replace(finding("l1.q_rope"), layers=(1, 2), places=((0, "l1.q_rope"), (0, "l2.q_rope")))
    more = [finding("l3.v_proj", "unknown"), finding("l3.ffn_act", "rounding", name="bf16", message="this is bf16")]
    return diagnosis(sizes, [first, *more])


def not_finite() -> Diagnosis:
    made = diagnosis({"l0.attn_scores": 1e9}, [finding("l0.attn_scores", "not finite")])
    bad = Difference.from_fault(("non-finite", "3 of 4096 actual values"))
    results = [
        replace(r, isolated=replace(r.isolated, difference=bad)) if r.verdict == FAIL else r for r in made.results
    ]
    return replace(made, results=results)


def hundred_layers() -> Diagnosis:
    return diagnosis({"l90.k_rope": 3e3}, [finding("l90.k_rope")], n_layers=100)


def every_layer() -> Diagnosis:
    places = [f"l{layer}.ffn_act" for layer in range(60)]
    return diagnosis(dict.fromkeys(places, 1e4), [finding(at, "unknown") for at in places], n_layers=60)


def hostile() -> Diagnosis:
    made = diagnosis(
        {"l1.q_rope": 5e5}, [finding("l1.q_rope", message=HOSTILE)], source=HOSTILE, rename=HOSTILE.__add__
    )
    return replace(made, model=HOSTILE, could_not_show={HOSTILE: [HOSTILE]}, notes=[HOSTILE])


def logits_only() -> Diagnosis:
    made = diagnosis({"logits": 7e4}, [finding("logits", "unknown")], vocab_size=128_256)
    return replace(made, results=[result for result in made.results if result.key == "logits"])


def two_passes() -> Diagnosis:
    made = two_bugs()
    refs = [replace(check.isolated.stage_ref, n_pass=1) for check in made.results]
    isolated = [replace(c.isolated, stage_ref=ref) for c, ref in zip(made.results, refs, strict=True)]
    later = [replace(check, isolated=c) for check, c in zip(made.results, isolated, strict=True)]
    return replace(made, results=[*made.results, *later])


def nothing_seen() -> Diagnosis:
    return replace(right(), results=[], notes=[], could_not_show={})


ALL = (
    right, rounding, undeclared, one_bug, two_bugs, not_finite, hundred_layers, every_layer, hostile, logits_only,
    two_passes, nothing_seen,
)  # fmt: skip
