"""checkpoints/mesh: its files are run as they are, several "machines" as launchers on this one, and train.

What SLURM and Kubernetes do is played by a few lines: they start a copy on each machine, with its variables.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import REPOSITORY
from helpers.training_runs import small_data

FOLDER = REPOSITORY / "checkpoints" / "mesh"
SBATCH = FOLDER / "train.sbatch"
SERVICE, JOB = yaml.safe_load_all((FOLDER / "train.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
NODES = ("nodes", "gpus-per-node")

SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames machine[1-2]" ] && printf 'localhost\\nlocalhost\\n'
"""
SRUN = """#!/bin/bash
for node in $(seq "$SLURM_NNODES"); do "$@" & copies+=($!); done
for copy in "${copies[@]}"; do wait "$copy" || code=$?; done
exit "${code:-0}"
"""


def training_options(folder: Path, mesh: str, steps: int) -> str:
    """Train for few steps on short rows."""
    settings = f"--steps {steps} --batch-size 4 --r 4 --lr 5e-3 --warmup-steps 0 --dtype float64"
    return f"micro-llama --data {small_data(folder)} --mesh {mesh} {settings}"


def environment(**variables: str) -> dict[str, str]:
    """Take the variables of this machine, with the programs of this Python before others."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **here, **variables}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def submitted(folder: Path, mesh: str, steps: int, gpus: int) -> None:
    """Run the file for SLURM on two machines."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = environment(
        SLURM_JOB_NODELIST="machine[1-2]", SLURM_NNODES="2", SLURM_GPUS_ON_NODE=str(gpus), SLURM_JOB_ID="7",
        RDZV_PORT=str(free_port()),
    )  # fmt: skip
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    command = ["bash", SBATCH, folder / "run", *training_options(folder, mesh, steps).split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def pods(folder: Path, mesh: str, steps: int, gpus: int) -> None:
    """Run the command of the pods, each with its index and the environment of the file, names of hosts replaced."""
    (container,) = POD["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    own = {"GPUS": str(gpus), "RUN": str(folder / "run"), "WHAT": training_options(folder, mesh, steps)}
    assert own.keys() < values.keys()
    env = environment(**values | own | {"HEAD": f"localhost:{free_port()}"})
    started = [
        subprocess.Popen(
            [*container["command"], *container["args"]], env=env | {"JOB_COMPLETION_INDEX": str(index)},
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for index in range(JOB["spec"]["completions"])
    ]  # fmt: skip
    said = [pod.communicate(timeout=300)[1] for pod in started]
    assert [pod.returncode for pod in started] == [0] * len(started), said


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def of_one_process(folder: Path, steps: int) -> list[float]:
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training
    from llorch.training.settings import TrainSettings

    given: dict[str, Any] = {"r": 4, "lr": 5e-3, "warmup_steps": 0, "batch_size": 4, "dtype": "float64"}
    training = Training(
        plan_training(TrainSettings(model="micro-llama", data=str(folder / "data"), steps=steps, **given))
    )
    return [training.run_step().loss for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.nightly_cases("submitted-dp=2,tp=2-2")
@pytest.mark.parametrize(
    ("start", "mesh", "gpus"), [(submitted, "tp=2", 1), (submitted, "dp=2,tp=2", 2), (pods, "dp=2", 1)]
)
def test_two_machines_train_as_one_process_and_a_second_start_goes_on(start: Any, mesh: str, gpus: int, tmp_path: Path):
    start(tmp_path, mesh, 2, gpus)
    expected = of_one_process(tmp_path, 2)
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-12)
    start(tmp_path, mesh, 3, gpus)
    assert losses(tmp_path)[:2] == pytest.approx(expected, rel=1e-12)
    assert len(losses(tmp_path)) == 3
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_pods_find_the_first_one_under_the_name_that_the_service_gives_it():
    (container,) = POD["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    name = JOB["metadata"]["name"]
    assert values["HEAD"].partition(":")[0] == f"{name}-0.{POD['subdomain']}"
    assert SERVICE["metadata"]["name"] == POD["subdomain"]
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert int(values["MACHINES"]) == JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    assert int(values["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_mesh_of_an_example_has_as_many_ranks_as_its_machines_have_gpus():
    sbatch, pod = SBATCH.read_text(), (FOLDER / "train.yaml").read_text()
    (nodes,), (gpus,) = (re.findall(rf"^#SBATCH --{key}=(\d+)", sbatch, re.MULTILINE) for key in NODES)
    limit = POD["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    for text, n_ranks in ((sbatch, int(nodes) * int(gpus)), (pod, JOB["spec"]["completions"] * limit)):
        ((dp, tp),) = re.findall(r"--mesh dp=(\d+),tp=(\d+)", text)
        assert int(dp) * int(tp) == n_ranks
