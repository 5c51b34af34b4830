"""`verify` and a sample of the suite under the libraries' other kernels, each variant in a process of its own.

    python .ci/variants.py                        all
    python .ci/variants.py "no C compiler"        some
    python .ci/variants.py --share 1              each with every test of the sampled files
    python .ci/variants.py --list day             print the commands that `.ci/run` takes, one a line; or `nightly`

The sample: the tests of `FILES`, whose numbers come from a library's kernels. Each variant runs another part of
`SHARES` (`pytest --part`), and `ALWAYS`. All have one thread if they do not say otherwise.

A variant that a processor cannot run is NOT RUN, and counted. One that did not take effect has failed: before anything
else a process under it is asked which kernels it uses.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILES = (
    "model/backward model/cache model/forward pytorch/kernels/cpu/cpu pytorch/kernels/cpu/block "
    "pytorch/kernels/cpu/layer pytorch/kernels/cpu/quantised pytorch/train/loading model/model ops/attention "
    "ops/backward ops/cross_entropy ops/linear ops/lora ops/rms_norm ops/rope ops/swiglu judging/quantised "
    "pytorch/batch pytorch/model pytorch/quantised pytorch/batch_invariant/reproducible training/numpy_step "
    "pytorch/train/loss diagnosis/diagnose diagnosis/training/diagnose"
)


def test_file(name: str) -> str:
    """Return the path of the tests of a module."""
    folder, slash, module = name.rpartition("/")
    return f"tests/{folder}{slash}test_{module}.py"


ALWAYS = "tests/pytorch/batch_invariant/test_reproducible.py::test_attention_computes_a_query_alone_on_faulty_kernels"
VERIFY = ("-m llorch verify micro-qwen3 story", "-m llorch verify micro-qwen2 --backend torch --dtype float32")
SHARES = 30  # one variant costs about 70 seconds of processor time
AT_ONCE = 2  # variants; each has one core's work
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
KERNELS = """
import contextlib, io, json, numpy, torch
from threadpoolctl import threadpool_info
from llorch.ops.compiled.library import library
torch.ops.mkldnn._linear_pointwise(torch.ones(16, 16), torch.ones(16, 16), None, "none", [], "")  # oneDNN says its ISA
blas = [pool for pool in threadpool_info() if pool["internal_api"] == "openblas"]
print(json.dumps({
    "openblas": blas[0]["architecture"] if blas else None,
    "aten": torch.backends.cpu.get_cpu_capability(),
    "compiled": library() is not None,
    "threads": torch.get_num_threads(),
}))
"""


@dataclass(frozen=True)
class Variant:
    """Selection of the libraries' kernels.

    Attributes:
        environment: Environment variables of its processes.
        expected: Answer that `KERNELS` must give.
        flag: Flag of the processor that the kernels need.
        left_out: Beginning of the names of files that test the part it takes away.
    """

    environment: Mapping[str, str]
    expected: Mapping[str, object]
    flag: str = ""
    left_out: str | None = None

    def commands(self, part: str) -> tuple[str, ...]:
        """List the commands that python runs under this variant, with a part of the tests, as in 3/30."""
        files = [name for name in FILES.split() if self.left_out is None or not name.startswith(self.left_out)]
        tests = " ".join(map(test_file, files))
        pytest = "-m pytest -n 0 -q --no-header"
        return (*VERIFY, f"{pytest} {ALWAYS}", f"{pytest} --part {part} {tests}")


FOUR_THREADS = dict.fromkeys(THREADS, "4") | {  # waiting ones sleep: they may be more than there are cores
    "MKL_DYNAMIC": "FALSE",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_THREAD_TIMEOUT": "4",
}
NO_COMPILER = {"PATH": str(Path(sys.executable).parent), "CC": ""}
VARIANTS = {
    "the processor's own kernels": Variant({}, {"threads": 1, "compiled": True}),
    "OpenBLAS Haswell": Variant({"OPENBLAS_CORETYPE": "Haswell"}, {"openblas": "Haswell"}, "avx2"),
    "OpenBLAS SkylakeX": Variant({"OPENBLAS_CORETYPE": "SkylakeX"}, {"openblas": "SkylakeX"}, "avx512f"),
    "ATen default": Variant({"ATEN_CPU_CAPABILITY": "default"}, {"aten": "DEFAULT"}),
    "ATen AVX2": Variant({"ATEN_CPU_CAPABILITY": "avx2"}, {"aten": "AVX2"}, "avx2"),
    "oneDNN AVX2": Variant({"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"onednn": "Intel AVX2"}, "avx2"),
    "no C compiler": Variant(NO_COMPILER, {"compiled": False}, left_out="pytorch/kernels/cpu"),
    "4 threads": Variant(FOUR_THREADS, {"threads": 4}),
    "all libraries AVX2": Variant(
        {"OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        {"openblas": "Haswell", "aten": "AVX2", "onednn": "Intel AVX2"},
        "avx2",
    ),
    "ATen default, no C compiler": Variant(
        {"ATEN_CPU_CAPABILITY": "default", **NO_COMPILER},
        {"aten": "DEFAULT", "compiled": False},
        left_out="pytorch/kernels/cpu",
    ),
}
BY_DAY = "all libraries AVX2"  # it sets most things at once
CHOSEN = {name for variant in VARIANTS.values() for name in variant.environment} - {"PATH"}


def kernels(environment: Mapping[str, str]) -> dict[str, object]:
    """Ask the libraries in a new process which kernels they use."""
    lines = _python(("-c", KERNELS), environment | {"ONEDNN_VERBOSE": "1"}).splitlines()
    isa = next((line.split("isa:")[1] for line in lines if "cpu,isa:" in line), None)
    return json.loads(lines[-1]) | {"onednn": isa}


def run(name: str, part: str) -> str:
    """Run a variant.

    Args:
        name: Key of `VARIANTS`.
        part: Part of the sample and number of parts, as in 3/30.

    Returns:
        The verdict: "passed", or a text that begins with "FAILED" or "NOT RUN".
    """
    variant = VARIANTS[name]
    if variant.flag and variant.flag not in _processor_flags():
        return f"NOT RUN: the processor has no {variant.flag}"
    with tempfile.TemporaryDirectory() as cache:  # compiled kernels are kept between processes, but not beyond
        inherited = {key: value for key, value in os.environ.items() if key not in CHOSEN}
        settings = dict.fromkeys(THREADS, "1") | {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(REPOSITORY)}
        environment = inherited | settings | variant.environment
        actual = kernels(environment)
        print(f"{name}: {actual}", flush=True)
        mismatches = {key: value for key, value in variant.expected.items() if actual[key] != value}
        if mismatches:
            return f"FAILED: it did not take effect; expected {mismatches}"
        for command in variant.commands(part):
            try:
                print(f"{name}:", *_python(command.split(), environment).splitlines()[-1:], flush=True)
            except subprocess.CalledProcessError as error:
                print(error.stdout, flush=True)
                return f"FAILED: python {command[:60]} ended with {error.returncode}"
    return "passed"


def _python(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    command = [sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, check=True, text=True, env=dict(environment), cwd=REPOSITORY, **pipes).stdout


def _processor_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def main() -> None:
    """Entry point: exit code 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--share", type=int, default=SHARES, help="each runs one test in so many")
    parser.add_argument("--list", choices=("day", "nightly"), help="print commands, run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        names = VARIANTS if arguments.list == "nightly" else (BY_DAY,)
        return print("\n".join(f'python .ci/variants.py "{name}"' for name in names))
    chosen = [name for name in VARIANTS if name in (arguments.variants or VARIANTS)]
    parts = [f"{list(VARIANTS).index(name) % arguments.share + 1}/{arguments.share}" for name in chosen]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verdicts = dict(zip(chosen, pool.map(run, chosen, parts), strict=True))
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict}")
    kinds = [verdict.partition(":")[0] for verdict in verdicts.values()]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "FAILED", "NOT RUN")))
    sys.exit("FAILED" in kinds or len(verdicts) < len(set(arguments.variants)))


if __name__ == "__main__":
    main()
