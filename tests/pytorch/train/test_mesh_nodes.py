"""A training on two nodes, each torchrun's agent with two ranks, of which one node is lost."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from helpers.mesh_programs import (
    PROGRAM,
    TORCHRUN,
    arguments,
    ended,
    invoke_on_mesh,
    last_step,
    started,
    wait_for_steps,
)


def nodes(folder: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Two agents, of which the first keeps the store by which they meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = f"--rdzv-backend c10d --rdzv-id test --rdzv-endpoint localhost:{port} --local-addr localhost".split()
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *meeting]
    run = [PROGRAM, *arguments(folder, *more, mesh="dp=2,tp=2")]
    return [started([*command, "--rdzv-conf", f"is_host={is_host}", *run]) for is_host in (1, 0)]


def kill_node(agent: subprocess.Popen[str]) -> None:
    """The agent and its ranks, at once."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    agent.communicate()


@pytest.mark.slow
@pytest.mark.nightly_cases("with the store")
@pytest.mark.parametrize("lost", [0, 1], ids=["with the store", "the other one"])
def test_where_a_node_is_lost_the_other_ends_with_a_line_and_both_go_on_later(lost: int, tmp_path: Path):
    agents = nodes(tmp_path, "--steps", "400", "--rank-timeout", "20")
    wait_for_steps(tmp_path, 5)
    kill_node(agents[lost])
    code, said = ended(agents[1 - lost])
    ours = [line for line in said if line.startswith("llorch: ")]
    assert code == 1
    assert len(ours) in (1, 2), said  # both ranks that are left may see it before one has told the other
    assert all(line.startswith(("llorch: lost ", "llorch: waited 20 s ")) for line in ours)
    done = last_step(tmp_path)
    assert done >= 2  # whole before that of step 4 began; that is written beside the steps
    go_on = ("--steps", str(done + 2), "--resume", "--allow-change")
    if lost == 0:
        assert [ended(agent)[0] for agent in nodes(tmp_path, *go_on)] == [0, 0]
    else:  # on one node, whose ranks start in a tenth of the time
        assert invoke_on_mesh(tmp_path, *arguments(tmp_path, *go_on, mesh="dp=2,tp=2")).exit_code == 0
    assert last_step(tmp_path) == done + 2
