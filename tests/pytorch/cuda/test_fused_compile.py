"""What passes in Triton's interpreter is compiled too, for a device that need not be here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="NOT RUN: triton not installed")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_device_and_loads_16_bytes_at_a_time(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2 * 12 * 2
    assert not [line for line in lines if "narrow" in line]
