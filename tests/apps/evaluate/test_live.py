"""The same figures from llama.cpp: from its logits, with torch for the maths, and as its own tool printed them."""

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest
from builders.story_files import tale
from helpers.command_line import invoke

import llorch
from llorch.apps.evaluate.scores import ModelDifference, PairScores, compare_models, mean
from llorch.apps.evaluate.windows import cut_text, score_pair
from llorch.ops.numerics import EXACT, GGML, Numerics
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.live
CONTEXT, FIRST = 256, 128  # the tool's `-c 256`, and the first row of a window that it scores
LOGIT_ERROR = 1.5e-6  # of one float32 engine, relative to the largest logit: the distance from float64 in the goldens
# What llama-perplexity of ggml 0.25.3 printed (x86, AVX512) for `story`, for `story` quantised by the library to Q8_0
# and Q4_0 (pure), and decoded to F32 again by the library so that activations stay float32; the text is that of the
# fixture below and a line end. Flags: -c 256 -b 256 -ub 256 --no-repack -fa off -ctk f32 -ctv f32, first with
# --kl-divergence-base FILE, then --kl-divergence too. Its own perplexity of the reference in that second run is 2.418:
# the file keeps no probability below exp(-16) of the best, so that rare tokens look likelier than they are.
PRINTED = {
    "F32": {"ppl": 2.513477, "ppl+-": 0.101180},
    "Q8_0": {"ppl": 2.512752, "ppl+-": 0.101089, "kl": 0.000054, "kl+-": 0.000007, "top": 99.586, "rms": 0.205},
    "Q4_0": {"ppl": 2.508214, "ppl+-": 0.100467, "kl": 0.014906, "kl+-": 0.001662, "top": 93.618, "rms": 4.060},
}


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    return tale(monkeypatch, 80)


@pytest.fixture(params=["Q8_0", "Q4_0"])
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """`story`, quantised by llama.cpp."""
    import llama_cpp

    path = tmp_path / f"{request.param}.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{request.param}")
    settings.pure = True
    status = llama_cpp.llama_model_quantize(bytes(builtin_path("story")), bytes(path), ctypes.pointer(settings))
    assert status == 0
    return path


def llorch_scores(path: Path, text: str, numerics: Numerics = EXACT) -> PairScores:
    reference, model = llorch.load("story"), llorch.load(path, numerics=numerics)
    windows = cut_text([reference, model], text, context=CONTEXT)
    return PairScores.join(list(score_pair(reference, model, windows)))


def engine_logits(path: Path, text: str, numerics: Numerics) -> tuple[np.ndarray, np.ndarray]:
    """Logits and right tokens of the second half of every window."""
    from llorch.engines.llamacpp import LlamaCpp

    logits, targets = [], []
    with LlamaCpp(path, numerics=numerics) as engine:
        ids = engine.tokenize(text, add_special=True, parse_special=False)
        assert ids is not None
        for start in range(0, len(ids) - CONTEXT + 1, CONTEXT):
            window = [ids[0], *ids[start + 1 : start + CONTEXT]]
            logits.append(engine.logits(window)[FIRST : CONTEXT - 1])
            targets += window[FIRST + 1 :]
    return np.concatenate(logits), np.array(targets)


def engine_scores(path: Path, text: str, numerics: Numerics = EXACT) -> tuple[PairScores, float]:
    """The figures of each token by torch, and the largest logit."""
    import torch
    from torch.nn.functional import cross_entropy, kl_div, log_softmax

    expected, targets = engine_logits(builtin_path("story"), text, EXACT)
    actual, _ = engine_logits(path, text, numerics)
    p, q = torch.from_numpy(expected).double(), torch.from_numpy(actual).double()
    right = torch.from_numpy(targets)
    scores = PairScores(
        cross_entropy(p, right, reduction="none").numpy(),
        cross_entropy(q, right, reduction="none").numpy(),
        kl_div(log_softmax(q, 1), log_softmax(p, 1), reduction="none", log_target=True).sum(1).numpy(),
        (p.argmax(1) == q.argmax(1)).numpy(),
    )
    return scores, float(np.abs(expected).max())


def assert_no_bias(actual: np.ndarray, expected: np.ndarray) -> None:
    """Rounding errors have no direction: their mean is within 4 of its standard errors of nothing."""
    difference = mean(actual - expected)
    assert abs(difference.value) <= 4 * difference.error


@pytest.mark.nightly_cases(but=["Q4_0"])
def test_figures_are_those_of_torch_on_the_logits_of_llamacpp(quantised: Path, text: str):
    found, (expected, largest) = llorch_scores(quantised, text), engine_scores(quantised, text)
    logit = 2 * LOGIT_ERROR * largest  # two engines
    for name in ("reference_loss", "loss"):
        a, b = getattr(found, name), getattr(expected, name)
        assert np.abs(a - b).max() <= 2 * logit  # the right token's logit, and the sum over all
        assert_no_bias(a, b)
        assert np.exp(a.mean()) == pytest.approx(np.exp(b.mean()), rel=1e-6)
    # d KL = sum p (d - KL) e + sum (q - p) e', d = log p/q, errors e, e'; and sum p |d| <= KL + 2/e, sum |q - p| <= 2
    assert (np.abs(found.kl - expected.kl) <= logit * (2 * expected.kl + 2 / np.e + 2)).all()
    assert_no_bias(found.kl, expected.kl)
    assert np.count_nonzero(found.same_top != expected.same_top) <= 1  # a tie within rounding


@pytest.mark.nightly_cases(but=["Q4_0"])
def test_figures_are_those_that_llama_perplexity_prints(quantised: Path, text: str):
    found, printed = compare_models(llorch_scores(quantised, text)), PRINTED[quantised.stem]
    assert found.n_scored == 38 * 127
    for estimate, expected in ((found.reference_perplexity, PRINTED["F32"]), (found.perplexity, printed)):
        assert estimate.value == pytest.approx(expected["ppl"], rel=1e-6)
        assert estimate.error == pytest.approx(expected["ppl+-"], rel=1e-5)
    assert found.kl.value == pytest.approx(printed["kl"], abs=sixteen_bits(found) + 5e-7)
    assert found.kl.error == pytest.approx(printed["kl+-"], abs=sixteen_bits(found) + 5e-7)
    assert 100 * found.same_top.value == pytest.approx(printed["top"], abs=5e-4)
    assert 100 * found.p_rms.value == pytest.approx(printed["rms"], abs=1e-3)


def sixteen_bits(difference: ModelDifference) -> float:
    """Error of the tool's file in a mean: log probabilities in 65535 steps of a range of 16; 4 standard errors."""
    return 4 * (16 / 65535 / np.sqrt(12)) / np.sqrt(difference.n_scored)


@pytest.mark.parametrize("quantised", ["Q8_0"], indirect=True)
def test_the_command_line_gives_the_numerics_to_the_last_model_only(quantised: Path, text: str, tmp_path: Path):
    (tmp_path / "tale.txt").write_text(text)
    words = ("--text", str(tmp_path / "tale.txt"), "--context", str(CONTEXT), "--windows", "2", "--json")
    rounds, exact, alone = (
        json.loads(invoke("quality", *models, *words, "--numerics", numerics).stdout)
        for models, numerics in (
            ((str(quantised), str(quantised)), "ggml"),
            (("story", str(quantised)), "exact"),
            ((str(quantised),), "ggml"),
        )
    )
    assert rounds["reference_perplexity"] == exact["perplexity"]
    assert rounds["perplexity"] == alone["perplexity"] != exact["perplexity"]


@pytest.mark.parametrize("quantised", ["Q8_0"], indirect=True)
def test_ggml_numerics_give_the_divergence_of_llamacpp_itself(quantised: Path, text: str):
    expected, _ = engine_scores(quantised, text, GGML)
    found = llorch_scores(quantised, text, GGML)
    assert_no_bias(found.kl, expected.kl)
    assert_no_bias(found.loss, expected.loss)
    assert found.kl.mean() == pytest.approx(expected.kl.mean(), rel=0.25)  # rounding edges flip: 4 standard errors
    assert llorch_scores(quantised, text).kl.mean() < expected.kl.mean() / 2  # most comes from rounded activations
