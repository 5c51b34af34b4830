"""Programs in other languages as an implementation."""

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses

from llorch.apps.learn.check import check
from llorch.apps.learn.choice import Implementation, opened
from llorch.apps.learn.lessons import BY_NUMBER, PARTS
from llorch.apps.learn.program import Program, flat, from_npz, to_npz
from llorch.runtime.errors import LearnerFault, UserError
from llorch.stages.comparison import FAIL, PASS

# rms_norm in C: stored entries one behind the other, each a local header of zip, then a .npy
IN_C = r"""
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char in[1 << 24], out[1 << 24];
static uint32_t u32(const unsigned char *p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24; }
static uint32_t u16(const unsigned char *p) { return p[0] | p[1] << 8; }
static void put(unsigned char *p, uint32_t v, int n) { while (n--) *p++ = v & 255, v >>= 8; }

static unsigned char *npy(size_t size, const char *name, size_t *bytes) {  /* of the array `name` */
    for (size_t at = 0; at + 30 < size && u32(in + at) == 0x04034b50;) {
        uint32_t n = u32(in + at + 22), n_name = u16(in + at + 26), n_extra = u16(in + at + 28);
        unsigned char *data = in + at + 30 + n_name + n_extra;
        if (n_name == strlen(name) + 4 && !memcmp(in + at + 30, name, n_name - 4)) { *bytes = n; return data; }
        at = data + n - in;
    }
    fprintf(stderr, "no array %s\n", name);
    exit(1);
}

static uint32_t crc(const unsigned char *p, size_t n) {
    uint32_t c = ~0u;
    while (n--) { c ^= *p++; for (int k = 0; k < 8; k++) c = c >> 1 ^ (0xedb88320u & -(c & 1)); }
    return ~c;
}

int main(int argc, char **argv) {
    if (argc < 2 || strcmp(argv[1], "rms_norm")) return 69;
    size_t size = fread(in, 1, sizeof in, stdin), n_x, n_w, n_eps;
    unsigned char *x_npy = npy(size, "x", &n_x), *w = npy(size, "weight", &n_w), *e = npy(size, "eps", &n_eps);
    size_t head = 10 + u16(x_npy + 8);
    float *x = malloc(n_x), *y = malloc(n_x), *weight = malloc(n_w);
    double eps;
    memcpy(x, x_npy + head, n_x - head);
    memcpy(weight, w + 10 + u16(w + 8), n_w - 10 - u16(w + 8));
    memcpy(&eps, e + 10 + u16(e + 8), sizeof eps);
    size_t width = (n_w - 10 - u16(w + 8)) / 4, rows = (n_x - head) / 4 / width;
    for (size_t i = 0; i < rows; i++) {
        double sum = 0;
        for (size_t j = 0; j < width; j++) sum += (double)x[i * width + j] * x[i * width + j];
        for (size_t j = 0; j < width; j++) y[i * width + j] = x[i * width + j] / sqrt(sum / width + eps) * weight[j];
    }
    memcpy(out + 35, x_npy, head);  /* y is like x: its header too */
    memcpy(out + 35 + head, y, n_x - head);
    uint32_t sum = crc(out + 35, n_x);
    unsigned char *dir = out + 35 + n_x, *end = dir + 51;
    put(out, 0x04034b50, 4); put(out + 4, 20, 2); put(out + 14, sum, 4); put(out + 18, n_x, 4); put(out + 22, n_x, 4);
    put(out + 26, 5, 2); memcpy(out + 30, "y.npy", 5);
    put(dir, 0x02014b50, 4); put(dir + 4, 20, 2); put(dir + 6, 20, 2); put(dir + 16, sum, 4); put(dir + 20, n_x, 4);
    put(dir + 24, n_x, 4); put(dir + 28, 5, 2); memcpy(dir + 46, "y.npy", 5);
    put(end, 0x06054b50, 4); put(end + 8, 1, 2); put(end + 10, 1, 2); put(end + 12, 51, 4); put(end + 16, dir - out, 4);
    fwrite(out, 1, end + 22 - out, stdout);
    return 0;
}
"""


@pytest.mark.slow
def test_c_program_passes_or_fails_like_python_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT RUN: cc is not installed")
    monkeypatch.chdir(tmp_path)
    for name, text in (("right", IN_C), ("wrong", IN_C.replace("sum / width + eps", "sum / width"))):
        Path(f"{name}.c").write_text(text)
        subprocess.run([compiler, "-O1", "-o", name, f"{name}.c", "-lm"], check=True)
    assert check(BY_NUMBER["01"], opened("cmd:./right")).label == PASS
    assert check(BY_NUMBER["01"], opened("cmd:./wrong")).label == FAIL
    assert opened("cmd:./right").unwritten(PARTS.values()) == [name for name in PARTS if name != "rms_norm"]


Made = Callable[[str], Program]
GIVEN = {"x": np.ones((2, 3), np.float32), "weight": np.ones(3, np.float32), "eps": 1e-6}
ANSWER = "import io, sys, os, time, signal, subprocess\nif sys.argv[1] != 'rms_norm': sys.exit(69)\n"
READ = "import numpy as np\ngiven = dict(np.load(io.BytesIO(sys.stdin.buffer.read()) ))\n"


@pytest.fixture
def program(tmp_path: Path) -> Made:
    def write_program(text: str, seconds: float = 10.0) -> Program:
        (tmp_path / "prog.py").write_text(ANSWER + textwrap.dedent(text))
        return Program(f"cmd:{sys.executable} '{tmp_path / 'prog.py'}'", seconds=seconds)

    return write_program  # type: ignore[return-value]


def test_numbers_are_arrays_without_axes_and_dicts_are_flat():
    arrays = flat({"w": {"q_proj": np.ones((2, 3)), "q_bias": None}, "head_dim": 4, "eps": 1e-6, "bias": None})
    assert {name: array.shape for name, array in arrays.items()} == {"w.q_proj": (2, 3), "head_dim": (), "eps": ()}
    back = from_npz(to_npz({**arrays, "turned": np.arange(6).reshape(2, 3).T}), most=1000)
    assert back["head_dim"] == 4
    assert back["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_stderr_is_passed_on(program: Made, capfd: pytest.CaptureFixture[str]):
    text = READ + "sys.stderr.write('hello')\nnp.savez(sys.stdout.buffer, y=given['x'] * given['weight'])\n"
    written = program(text)
    assert ("rms_norm" in written, "rope" in written) == (True, False)
    assert "hello" not in capfd.readouterr().err  # it was only asked
    assert written["rms_norm"](**GIVEN).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert capfd.readouterr().err == "hello"


def test_a_part_that_is_given_the_model_as_a_function_is_never_a_program(tmp_path: Path):
    (tmp_path / "all.py").write_text("")  # exit status 0: whatever is asked for is written
    written = Program(f"cmd:{sys.executable} '{tmp_path / 'all.py'}'")
    assert "argmax" in written
    assert "generate" not in written


SAVE = "import numpy as np; b = io.BytesIO(); np.savez{0}(b, {1}); d = b.getvalue()\n"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("sys.exit(3)", ["exit status 3"]),
        ("if sys.stdin.buffer.read(): sys.exit(69)", [69, "written", "arguments"]),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ["SIGSEGV"]),
        ("", ["stdout", "npz", "zip"]),
        (SAVE.format("", "y=1.0") + "sys.stdout.buffer.write(d[:len(d) // 2])", ["stdout", "npz"]),
        (SAVE.format("", "y=1.0") + "sys.stdout.buffer.write(d[:60] + d[90:])", ["stdout", "npz"]),
        (SAVE.format("", "y=np.array([{}])") + "sys.stdout.buffer.write(d)", ["stdout", "npz", "Object"]),
        (SAVE.format("", "Y=1.0, z=2") + "sys.stdout.buffer.write(d)", ["named y", "Y, z"]),
        (SAVE.format("_compressed", "y=np.zeros(1 << 18)") + "sys.stdout.buffer.write(d)", [8 << 18 | 128, 1 << 20]),
        ("while True: sys.stdout.write('y' * 100000)", ["1 MiB", "stdout"]),
    ],
    ids=["exit", "unwritten", "crash", "nothing", "half", "hole", "objects", "names", "large", "endless"],
)  # fmt: skip
def test_program_fault_is_a_sentence(program: Made, monkeypatch: pytest.MonkeyPatch, text: str, facts: list[object]):
    monkeypatch.setattr("llorch.apps.learn.program._MAX_BYTES", 1 << 20)
    written = program("if sys.stdin.buffer.peek(1) == b'': sys.exit(0)\n" + text)
    with refuses(LearnerFault, "rms_norm", *facts):
        written["rms_norm"](**GIVEN)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("time.sleep(60)", ["2 s"]),
        ("os.close(1); time.sleep(60)", ["stdout", "closed"]),
        ("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'])", ["2 s"]),
    ],
    ids=["loop", "closed", "child"],
)
def test_a_call_has_a_deadline(program: Callable[..., Program], text: str, facts: list[str]):
    written = program(text, seconds=2)
    with refuses(LearnerFault, "rms_norm", *facts):
        written["rms_norm"](**GIVEN)


def test_a_file_that_is_no_program_cannot_be_started(tmp_path: Path):
    (tmp_path / "prog").write_bytes(b"\0\1\2")
    (tmp_path / "prog").chmod(0o755)
    found = check(BY_NUMBER["01"], Implementation("cmd", Program(f"cmd:'{tmp_path / 'prog'}'")))
    assert_tells(found.fault, tmp_path / "prog", "Exec format error")


def test_program_with_an_open_quote_is_refused():
    with refuses(UserError, where="implementation", expected="cmd:", got='"cmd:\'a"'):
        Program("cmd:'a")
