"""Selection of kernels: the result of a check, what is stored of it, and the kernels that a model gets."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.quick_interpreter import prepare_once_a_launch
from helpers.command_line import invoke
from helpers.refusals import assert_tells, refuses
from torch import Tensor, nn

import llorch
from llorch.pytorch import random_weights
from llorch.pytorch.causal_lm import CausalLM, attention, keep_nothing
from llorch.pytorch.decoding import Decoding
from llorch.pytorch.device import Target, target
from llorch.pytorch.kernels import TRAINED, kernel_check, kernel_selection
from llorch.pytorch.kernels import table as all_leaves
from llorch.pytorch.kernels.kernel_check import KernelCheck, check_kernel
from llorch.pytorch.kernels.kernel_selection import run_in_child, verdicts
from llorch.pytorch.kernels.packing import CPU_KIND_NAMES, KIND_NAMES, pack
from llorch.pytorch.kernels.sdpa import sdpa_attention, use_sdpa
from llorch.pytorch.kernels.table import kernels_for
from llorch.runtime.errors import CheckpointMismatch, MissingDevice, MissingExtra

built_kernels = kernel_selection.built_kernels.__wrapped__  # a process remembers the results of the function
CPU = torch.device("cpu")
PLAIN = ["norm", "linear", "rotate", "attend", "act", "block"]
ALL = [*(f"packed {kind}" for kind in KIND_NAMES), *PLAIN]  # of CUDA
EXPERTS = [f"packed experts {kind}" for kind in KIND_NAMES]
WITH_GRADIENTS = [f"{TRAINED}{kind}" for kind in ("norm", "rotate", "act", *ALL[: len(KIND_NAMES)])]
ON_CPU = [f"packed {kind}" for kind in CPU_KIND_NAMES]
TRAINED_ON_CPU = [f"{TRAINED}{kind}" for kind in ON_CPU]
QUICK = ("norm", "rotate", "attend", "act", *WITH_GRADIENTS)  # in Triton's interpreter
RIGHT, WRONG, SLOW = KernelCheck(0.5, 0.9), KernelCheck(7.0, 0.9), KernelCheck(0.5, 1.4)


def run_once(call: Callable[[], object]) -> float:
    """A clock that stands still."""
    return 1.0


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_check.USUAL, "cpu", kernel_check.ODD)


@pytest.mark.parametrize("kind", [*ON_CPU, *TRAINED_ON_CPU, *PLAIN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_kernels_pass_the_kernel_check(kind: str, dtype: str):
    at = target("cpu", dtype)
    assert check_kernel(kind, kernels_for(CPU, at.dtype, required=True), at, run_once).fault(timed=True) == ""


@pytest.mark.nightly_cases("attend", "rotate")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.nightly) for kind in (*ALL, *WITH_GRADIENTS)]
)
def test_triton_kernels_pass_the_kernel_check(kind: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="NOT RUN: triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("NOT RUN: the interpreter is off where there is a device")
    from llorch.pytorch.kernels.triton.kernels import TRITON_KERNELS

    prepare_once_a_launch(monkeypatch)
    monkeypatch.setattr(random_weights, "file_fields", pack)  # the layout of CUDA
    assert {*TRITON_KERNELS} == {*ALL, *EXPERTS, *WITH_GRADIENTS, "graph"}
    assert check_kernel(kind, TRITON_KERNELS, target(), run_once).fault(timed=True) == ""


class WrongElement(nn.Module):
    """A kernel with one wrong element in its results."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, *inputs: Any) -> Any:
        made = self.original(*inputs)
        first = (made if isinstance(made, Tensor) else made[0]).clone()
        first.view(-1)[-1] += first.detach().abs().max() / 8
        return first if isinstance(made, Tensor) else (first, *made[1:])


@pytest.mark.parametrize("kind", [*ON_CPU[:5], *PLAIN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_element_fails_the_check(kind: str, dtype: str):
    found = check_kernel(kind, {kind: WrongElement}, target("cpu", dtype), run_once)
    assert 1 < found.off < math.inf
    assert_tells(found.fault(timed=False), f"{found.off:.3g}")


class WrongGradient(WrongElement):
    """A kernel whose results are right, and whose gradient has one wrong element."""

    def forward(self, *inputs: Any) -> Any:
        x = inputs[0].view_as(inputs[0])
        x.register_hook(self.with_one_wrong)
        return self.original(x, *inputs[1:])

    def with_one_wrong(self, grad: Tensor) -> Tensor:
        wrong = grad.clone()
        wrong.view(-1)[-1] += wrong.abs().max() / 8
        return wrong


@pytest.mark.parametrize("wrong", [WrongElement, WrongGradient])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", WITH_GRADIENTS)
def test_one_wrong_element_or_gradient_fails_the_check(kind: str, dtype: str, wrong: Any):
    assert 1 < check_kernel(kind, {kind: wrong}, target("cpu", dtype), run_once).off < math.inf
    assert check_kernel(kind, {kind: lambda original: original}, target("cpu", dtype), run_once).fault(timed=True) == ""


@pytest.mark.parametrize(
    ("broken", "facts"),
    [
        (lambda original: lambda x: original(x).double(), ("inf",)),
        (lambda original: lambda x: original(x)[:1], ("inf",)),
        (lambda original: lambda x: original(x) * math.nan, ("inf",)),
        (lambda original: lambda x: 1 / 0, ("ZeroDivisionError", "division by zero")),
    ],
    ids=["of another dtype", "of another shape", "nan", "an error"],
)
def test_invalid_kernel_output_fails_the_check(broken: Callable, facts: tuple[str, ...]):
    found = check_kernel("norm", {"norm": broken}, target("cpu", "bfloat16"), run_once)
    assert found.off == math.inf
    assert_tells(found.fault(timed=False), *facts)


@pytest.mark.parametrize(("skipped", "right"), [(0, True), (1, False)])
def test_replayed_steps_are_compared_with_steps_one_by_one(skipped: int, right: bool):
    def replay(decoding: Decoding, ctx: int) -> None:
        for _ in range(1 + skipped):
            decoding.step(kernel_check.CTX)

    assert (
        check_kernel("graph", {"graph": lambda original: replay}, target(), run_once).fault(timed=True) == ""
    ) is right


def test_timed_steps_reuse_one_decoding_and_its_recording():
    class GraphRecording:
        decoding: Decoding | None = None

        def __call__(self, decoding: Decoding, ctx: int) -> None:
            self.decoding = self.decoding or decoding
            assert decoding is self.decoding
            decoding.step(kernel_check.CTX)

    def often(call: Callable[[], object]) -> float:
        return float(len([call() for _ in range(kernel_check.CTX // 2)]))  # of four steps: twice the slots there are

    assert check_kernel("graph", {"graph": lambda original: GraphRecording()}, target(), often).fault(timed=True) == ""


def test_slower_kernel_is_a_fault_only_if_speed_counts():
    times = iter([3.0, 2.0] * 2)
    found = check_kernel("norm", kernels_for(CPU, torch.float32, required=True), target(), lambda call: next(times))
    assert found.fault(timed=False) == ""
    assert found.slow == 1.5
    assert_tells(found.fault(timed=True), "1.5")


def n_launches(kind: str, launch: Callable[[], object]) -> int:
    """Count how often the host launches a kernel while its time on a CUDA device is taken."""
    launches = []
    kernel_check.make_clock(torch.device("cuda"), kind)(lambda: launches.append(launch()))
    return len(launches)


@pytest.mark.gpu
def test_device_kernel_time_excludes_host_launches():
    x = torch.zeros(1, device="cuda")
    assert n_launches("norm", lambda: x.add_(1)) == 2  # a warm-up and the recording; replays are timed
    assert n_launches("graph", lambda: x.add_(1)) > 2


@pytest.mark.parametrize(("kind", "n"), [("norm", 2), ("graph", 20), (f"{TRAINED}norm", 20)])
def test_recorded_kernel_time_excludes_host_launches(monkeypatch: pytest.MonkeyPatch, kind: str, n: int):
    testing = pytest.importorskip("triton.testing", reason="NOT RUN: triton is not installed")

    def record(call: Callable[[], object], *, warm_up: Callable[[], object]) -> SimpleNamespace:
        warm_up()
        call()
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr("llorch.pytorch.kernels.triton.graph.recorded", record)
    monkeypatch.setattr(testing, "do_bench", lambda call, **_: sum(call() is None for _ in range(20)))
    assert n_launches(kind, lambda: None) == n


def test_kernel_that_ends_its_process_is_named_and_others_are_checked():
    program = """
import json, os, sys
results, device, dtype, *kinds = sys.argv[1:]
for kind in kinds:
    if kind == "bad":
        print("CUDA error: illegal access", file=sys.stderr, flush=True)
        os._exit(7)
    open(results, "a").write(json.dumps({kind: {"off": 0.1, "slow": 0.5, "died": ""}}) + "\\n")
"""
    found = run_in_child(target(), ["a", "bad", "b"], program=["-c", program])
    assert [found[kind].fault(timed=True) for kind in ("a", "b")] == ["", ""]
    assert_tells(found["bad"].fault(timed=False), 7, "CUDA error: illegal access")


def test_kernel_check_that_never_ends_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_selection, "PATIENCE", 0.5)
    assert_tells(run_in_child(target(), ["waits"], program=["-c", "import time; time.sleep(60)"])["waits"].died, "0 s")


@pytest.mark.slow
def test_kernel_check_process_tries_the_named_kernels():
    found = run_in_child(target(), ["norm", "rotate"])
    assert {kind: one.fault(timed=False) for kind, one in found.items()} == {"norm": "", "rotate": ""}


@pytest.fixture
def checked_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Trials that were made, in a cache of their own."""
    made: list[str] = []

    def record_kinds(target: Target, kinds: list[str]) -> dict[str, KernelCheck]:
        made.extend(kinds)
        return dict.fromkeys(kinds, KernelCheck(0.5, math.nan))

    monkeypatch.setattr(kernel_selection, "run_in_child", record_kinds)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


@pytest.mark.usefixtures("checked_kinds")
def test_new_check_logs_its_duration_and_a_cached_check_logs_nothing(caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        verdicts(target("cpu", "bfloat16"), ["norm", "linear"])
    (record,) = caplog.records
    assert_tells(record.getMessage(), "2 kernels", "the CPU", "bfloat16")


def test_results_are_kept_for_the_same_device_and_source(
    checked_kinds: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for at in (target(), target(), target("cpu", "bfloat16")):
        assert verdicts(at, ["norm"])["norm"].fault(timed=False) == ""
    assert checked_kinds == ["norm"] * 2
    (file, _) = sorted((tmp_path / "llorch").glob("kernels-*.json"))
    for damaged in (b"", b"{", b'{"norm": {"way": 1}}', file.read_bytes()[:-9], b"\xff"):
        for kept in (tmp_path / "llorch").iterdir():
            kept.write_bytes(damaged)
        verdicts(target(), ["norm"])
    assert checked_kinds == ["norm"] * 7
    monkeypatch.setattr(kernel_selection, "identity", lambda command: "another processor")
    verdicts(target(), ["norm"])
    verdicts(target(), ["norm"], anew=True)
    assert checked_kinds == ["norm"] * 9
    assert {*verdicts(target(), ["norm", "trained norm"])} == {"norm", "trained norm"}
    verdicts(target(), ["norm"])
    assert checked_kinds == [*["norm"] * 9, "trained norm"]


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, KernelCheck]], None]:
    """A CUDA device whose kernels were found to be this and that."""

    def set_checks(checks: dict[str, KernelCheck]) -> None:
        monkeypatch.setattr(kernel_selection, "kernels_for", lambda *a, **k: {kind: nn.Identity for kind in checks})
        monkeypatch.setattr(kernel_selection, "verdicts", lambda target, kinds: checks)
        monkeypatch.setattr(kernel_selection, "device_name", lambda device: "NVIDIA H100")

    return set_checks


def cuda(kernels: Any) -> Target:
    return Target(torch.device("cuda", 0), torch.float32, kernels)


def test_auto_installs_right_and_fast_kernels_and_logs_the_others(fake_device, caplog):
    fake_device({"norm": RIGHT, "act": WRONG, "linear": SLOW})
    assert [*built_kernels(cuda("auto"))] == ["norm"]
    (line,) = caplog.messages
    assert_tells(line, "NVIDIA H100", "torch-cuda-float32", where="kernels")
    of_act, of_linear = line.rpartition(":")[2].split(";")
    assert_tells(of_act, "act", 7)
    assert_tells(of_linear, "linear", 1.4)
    assert built_kernels(cuda("torch")) == {}


def test_only_training_gets_the_kernels_with_gradients(fake_device):
    fake_device({"norm": RIGHT, "trained norm": RIGHT, "trained act": SLOW})
    assert [*built_kernels(cuda("auto"))] == ["norm"]
    assert [*built_kernels(cuda("auto"), training=True)] == ["trained norm"]
    assert built_kernels(cuda("torch"), training=True) == {}


def test_training_on_the_cpu_gets_the_kernels_of_packed_matrices():
    kinds = {*TRAINED_ON_CPU}
    assert built_kernels(target("cpu", "float32"), training=True).keys() == kinds
    assert not kinds & built_kernels(target("cpu", "float32")).keys()
    assert built_kernels(target("cpu", "float32", "torch"), training=True) == {}


def test_mode_own_accepts_slow_kernels_and_refuses_wrong_ones(fake_device, caplog):
    fake_device({"norm": RIGHT, "linear": SLOW})
    assert [*built_kernels(cuda("own"))] == ["norm", "linear"]
    fake_device({"norm": RIGHT, "act": WRONG})
    with refuses(CheckpointMismatch, "NVIDIA H100", "act", 7, "--kernels auto", where="kernels own") as caught:
        built_kernels(cuda("own"))
    assert "norm" not in str(caught.value)
    assert caplog.messages == []


def test_no_kernels_are_installed_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(all_leaves, "find_spec", lambda name: None)
    monkeypatch.setattr(all_leaves, "library", lambda: None)
    device = torch.device("cuda", 0)
    assert kernels_for(device, torch.float32, required=False) == kernels_for(device, torch.float64, required=True) == {}
    with refuses(MissingExtra, "triton"):
        kernels_for(device, torch.float32, required=True)
    assert [*kernels_for(CPU, torch.float32, required=False)] == ["linear"]
    with refuses(MissingDevice, "C compiler"):
        kernels_for(CPU, torch.float32, required=True)


@pytest.mark.parametrize(("kernels", "has_cpu_kernels"), [("torch", False), ("auto", True)])
@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_model_has_the_requested_kernels(kernels: Any, has_cpu_kernels: bool, mode: Any):
    model = llorch.load_torch("micro-llama", kernels=kernels, mode=mode)
    assert any(".cpu." in type(module).__module__ for module in model.module.modules()) is has_cpu_kernels
    assert model.target.kernels == kernels


@pytest.mark.slow
def test_cpu_model_does_not_import_triton():
    code = (
        "import sys, llorch, llorch.apps.bench.torch, llorch.judging.runners.torch\n"
        "[*llorch.load_torch('micro-llama').generate([1], max_tokens=2)]\n"
        "print([name for name in sys.modules if name.startswith(('triton', 'llorch.pytorch.kernels.triton'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("verdict", "status"), [(SLOW, 0), (WRONG, 1)])
def test_verify_reports_the_check_of_requested_kernels(verdict, status, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.judging.expectations.packed.verdicts", lambda target, kinds, anew: {"norm": verdict})
    monkeypatch.setattr("llorch.cli.on_torch.TorchBackend.stored", lambda self, model: iter(()))
    result = invoke("verify", "micro-llama3", "--kernels", "own", "--dtype", "float32", "--json")
    (row,) = json.loads(result.stdout)["comparisons"]
    assert (row["model"], row["stage"], row["verdict"]) == ("kernels", "norm", "FAIL" if status else "PASS")
    assert (result.exit_code == 1) is (status == 1)


def test_kernel_option_has_three_values():
    with refuses(ValueError, where="kernels", expected=("auto", "torch", "own"), got="'all'"):
        target("cpu", "float32", "all")


MASKS = ["none", "padding"]
DTYPES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


# the rounding of sums; in half precision, two roundings of a result of about 1: the probabilities' and its own


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seq", "ctx"), [(1, 9), (1, 1), (7, 7), (5, 9)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 20), (6, 2, 64), (7, 1, 8)], ids=str)
def test_sdpa_equals_the_reference_attention(seq, ctx, heads, kv_heads, head_dim, mask, dtype, device):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seq, heads, head_dim, generator=generator).to(device, dtype)
    store = torch.randn(2, 2, kv_heads, ctx + 3, head_dim, generator=generator).to(device, dtype)
    keys, values = store[:, :, :, :ctx]  # views, as of a longer cache
    last = torch.arange(ctx - seq, ctx).expand(2, seq).clone()
    last[1] = (last[1] - 2).clamp(min=0)  # what padding sees
    visible = (torch.arange(ctx) <= last[:, None, :, None]).to(device) if mask == "padding" else None
    actual = sdpa_attention(q, keys, values, visible, keep_nothing)
    expected = attention(q.double(), keys.double(), values.double(), visible, keep_nothing)
    assert actual.dtype is dtype
    assert actual.device.type == device
    assert actual.flatten(-2).shape == (2, seq, heads * head_dim)
    assert ((actual.double() - expected).abs() <= DTYPES[dtype] * values.double().abs().max()).all()


def test_use_sdpa_replaces_attention_in_every_layer(config):
    model = CausalLM(config)
    use_sdpa(model)
    layers: Any = model.model.layers
    assert all(layer.self_attn.attend is sdpa_attention for layer in layers)
