"""Decoding as steps that are replayed: on CUDA as a graph; all that a graph needs of a step is tested without one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llorch
from llorch.model.generate import Job
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.decoding import Decoding, size_class
from llorch.pytorch.kernels.triton.graph import GraphedSteps, run_warm_up
from llorch.pytorch.sampling import Needs

DRAWN = SamplingSettings(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)
IDS = [5, 60, 17, 33, 2]


@pytest.fixture(scope="module")
def model() -> llorch.TorchModel:
    return llorch.load_torch("micro-qwen3")


def begin_decoding(model: llorch.TorchModel, jobs: Sequence[Job], *, n_slots: int = 64) -> Decoding:
    needs = Needs.of([job.settings for job in jobs])
    decoding = Decoding(model.module, model.new_cache(len(jobs), n_slots), needs, n_end_ids=2)
    decoding.begin(jobs, chunk=512)
    return decoding


def job(settings: SamplingSettings, n: int = 12, ids: Sequence[int] = IDS, end: Sequence[int] = ()) -> Job:
    return Job(list(ids), n, settings, frozenset(end))


@pytest.mark.parametrize("settings", [SamplingSettings(), DRAWN])
def test_full_context_steps_generate_the_tokens_of_generate(model: llorch.TorchModel, settings: SamplingSettings):
    expected = [t.id for t in model.generate(IDS, max_tokens=12, settings=settings, ignore_eos=True)]
    decoding = begin_decoding(model, [job(settings)])
    for _ in range(11):
        decoding.step(decoding.cache.n_slots)
    assert decoding.tokens[0, :12].tolist() == expected


def test_steps_keep_every_tensor_address(model: llorch.TorchModel):
    decoding = begin_decoding(model, [job(DRAWN)] * 2)
    before = [tensor.data_ptr() for tensor in (*decoding.state, *decoding.cache.keys, *decoding.cache.values)]
    for _ in range(3):
        decoding.step(64)
    assert [tensor.data_ptr() for tensor in (*decoding.state, *decoding.cache.keys, *decoding.cache.values)] == before


class NoHostTransfers(TorchDispatchMode):
    """Fails when an operation reads or makes a tensor that is not on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device.type == "meta", f"{func} works on {tensor.device}"
        return out


@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen2", "micro-qwen3"])
@pytest.mark.parametrize("settings", [SamplingSettings(), DRAWN])
def test_step_transfers_nothing_between_host_and_device(name: str, settings: SamplingSettings):
    device = torch.device("meta")  # has no values: whoever asks for one gets an error
    config = llorch.load(name).config
    with device:
        module = CausalLM(config)
    cache = Cache(config, batch=3, n_slots=16, dtype=torch.float32, device=device)
    decoding = Decoding(module, cache, Needs.of([settings]), n_end_ids=2)
    with NoHostTransfers():
        decoding.step(16)
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called"), NoHostTransfers():
        decoding.tokens[0, 0].item()
    with pytest.raises(AssertionError, match="works on cpu"), NoHostTransfers():
        decoding.ids.copy_(torch.zeros(3, 1))


def test_warm_up_step_keeps_the_state_unchanged(model: llorch.TorchModel):
    one, other = begin_decoding(model, [job(DRAWN)]), begin_decoding(model, [job(DRAWN)])
    for _ in range(5):
        run_warm_up(other, 64)
        one.step(64)
        other.step(64)
    assert all(torch.equal(a, b) for a, b in zip(one.state, other.state, strict=True))
    assert torch.equal(one.cache.keys[1], other.cache.keys[1])


def test_infinities_left_in_the_cache_do_not_affect_later_answers(model: llorch.TorchModel):
    decoding, fresh = begin_decoding(model, [job(DRAWN)]), begin_decoding(model, [job(DRAWN)])
    for store in (*decoding.cache.keys, *decoding.cache.values):
        store.fill_(torch.inf)
    decoding.begin([job(DRAWN)], chunk=512)
    for _ in range(5):
        decoding.step(64)
        fresh.step(64)
    assert all(torch.equal(a, b) for a, b in zip(decoding.state, fresh.state, strict=True))


def test_finished_sequence_does_not_change(model: llorch.TorchModel):
    free = [t.id for t in model.generate(IDS, max_tokens=12, ignore_eos=True)]
    decoding = begin_decoding(model, [job(SamplingSettings(), end=[free[3]]), job(SamplingSettings(), n=2), job(DRAWN)])
    for _ in range(11):
        decoding.step(64)
    filled = [int(cache[0].any(-1).sum()) for cache in decoding.cache.keys[0][:, :, :64]]
    assert filled == [len(IDS) + free.index(free[3]), len(IDS) + 1, len(IDS) + 11]
    assert decoding.positions[:, 0].tolist() == [-1, -1, -1]


def test_size_classes_fit_and_waste_less_than_half():
    for n_slots in (300, 5000):
        for ctx in range(1, n_slots + 1):
            size = size_class(ctx, n_slots)
            assert ctx <= size <= n_slots
            assert size <= 256 or size < 1.5 * ctx or size == n_slots
    assert sorted({size_class(ctx, 2048) for ctx in range(1, 2049)}) == [256, 384, 512, 768, 1024, 1536, 2048]


@pytest.mark.slow
@pytest.mark.nightly_cases("adapters")
@pytest.mark.parametrize("scenario", ["settings", "adapters"])
def test_compiled_steps_generate_the_tokens_of_eager_steps(scenario: str):
    command = [sys.executable, "-m", "helpers.compiled_steps", "micro-qwen3", scenario]
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=support)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [SamplingSettings(), DRAWN])
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graph_generates_the_tokens_of_eager_steps(settings: SamplingSettings, compiled: bool):
    model = llorch.load_torch("micro-qwen3", device="cuda", compiled=compiled)
    assert {p.device.type for p in model.module.parameters()} == {"cuda"}
    eager, graphed = (begin_decoding(model, [job(settings, n=300)] * 2, n_slots=400) for _ in range(2))
    graphed.replay = GraphedSteps()
    for _ in range(299):  # into the second size class
        eager.step(400)
        graphed.advance()
    assert graphed.tokens.device.type == "cuda"
    assert torch.equal(eager.tokens, graphed.tokens)
    expected = [
        t.id for t in llorch.load("micro-qwen3").generate(IDS, max_tokens=20, settings=settings, ignore_eos=True)
    ]
    assert [t.id for t in model.generate(IDS, max_tokens=20, settings=settings, ignore_eos=True)] == expected
