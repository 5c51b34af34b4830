"""Faults during work: too many requests, clients that leave, jobs and threads that die, the end of the server."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_client import Reply, ask, connection, measure, request, until
from serve_faults_of_clients import CHAT, Verdict, chat, worst
from serve_processes import Server

CLIENTS = 200
LEAVING = 25  # clients in each phase
EARLY = 16  # number of moments of a start, 50 ms apart
PROMPTS = ("Once upon a time", "The little fox", "A red ball", "She said", "In the old tree")


def stream(port: int, index: int, **fields: object) -> asyncio.Task[Reply]:
    """Start a chat whose answer depends on its prompt and seed."""
    body = chat(PROMPTS[index % len(PROMPTS)], seed=index % len(PROMPTS), max_tokens=16, stream=True, **fields)
    return asyncio.create_task(ask(port, "POST", CHAT, body))


async def solo(server: Server) -> list[str]:
    """List the answers of requests that run one at a time."""
    return [(await stream(server.port, index)).text for index in range(len(PROMPTS))]


def share(replies: Sequence[Reply], texts: Sequence[str]) -> int:
    """Count the streams, in the order of their indices, that end with the same text as when run alone."""
    return sum(
        reply.status == 200 and reply.done and reply.text == texts[i % len(texts)] for i, reply in enumerate(replies)
    )


async def too_many(server: Server) -> Verdict:
    """Start 200 clients, of which 4 run and 32 may wait."""
    texts, start_size = await solo(server), server.resident()
    replies = await asyncio.gather(*(stream(server.port, index) for index in range(CLIENTS)))
    taken = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 429 and reply.error and "retry-after" in reply.headers]
    equal, grown = share(replies, texts), server.resident() - start_size
    text = (
        f"{len(taken)} answered, {equal} as alone, {len(refused)} x 429, p99 {worst(refused):.0f} ms; {grown:+.1f} MB"
    )
    right = len(taken) == equal >= 36 and len(taken) + len(refused) == CLIENTS and grown < 50
    return Verdict(right, text)


async def leaving(server: Server) -> Verdict:
    """Start 100 clients that leave: while waiting, before the first token, after it, and before all was sent."""
    seconds_by_phase: dict[str, list[float]] = {"waiting": [], "prompt": [], "answer": [], "sending": []}
    n_late = 0
    for _ in range(LEAVING):
        seconds_by_phase["prompt"].append((await leave(server, "prompt"))[0])
        seconds, n_tokens = await leave(server, "answer")
        seconds_by_phase["answer"].append(seconds)
        n_late = max(n_late, n_tokens)
        seconds_by_phase["sending"].append((await leave(server, "sending"))[0])
    async with connection(server.port, request("POST", CHAT, chat(max_tokens=400, stream=True, seed=1))):
        await until(server.port, running=1)
        for _ in range(LEAVING):
            seconds_by_phase["waiting"].append((await leave(server, "waiting"))[0])
    counts = await until(server.port, running=0, waiting=0)
    slowest = {phase: 1000 * max(seconds) for phase, seconds in seconds_by_phase.items()}
    text = ", ".join(f"{phase} {milliseconds:.0f} ms" for phase, milliseconds in slowest.items())
    cancelled = counts["llorch_answers_cancelled_total"]
    text = f"slot back: {text}; {n_late} tokens after; {cancelled:.0f} cancelled"
    return Verdict(cancelled == 3 * LEAVING + 1, text, max(slowest.values()) <= 250 and n_late <= 1)


async def leave(server: Server, phase: str) -> tuple[float, int]:
    """Leave in a phase; return the seconds until the slot is free, and the tokens computed after the last received."""
    data = request("POST", CHAT, chat(max_tokens=400, stream=True, logprobs=True, seed=1))
    n_before = (await measure(server.port))["llorch_answer_tokens_total"]
    received = 0
    async with connection(server.port, data[:-20] if phase == "sending" else data) as (reader, _):
        if phase == "waiting":
            await until(server.port, waiting=1)
        elif phase == "prompt":
            await until(server.port, running=1)
        elif phase == "answer":
            while received < 3:
                received += b'"logprobs":{' in await reader.readline()
    start = time.perf_counter()
    metrics = await until(server.port, waiting=0) if phase == "waiting" else await until(server.port, running=0)
    n_made = int(metrics["llorch_answer_tokens_total"] - n_before)
    return time.perf_counter() - start, n_made - received


async def deadline(server: Server) -> Verdict:
    """Ask for an answer that takes longer than a request may."""
    plain_reply, stream_reply = await asyncio.gather(
        ask(server.port, "POST", CHAT, chat(max_tokens=400, seed=1)),
        ask(server.port, "POST", CHAT, chat(max_tokens=400, seed=1, stream=True)),
    )
    await until(server.port, running=0, waiting=0)
    last_event = stream_reply.events()[-1]
    is_right = plain_reply.status == 504 and "error" in last_event and not stream_reply.done
    text = f"{plain_reply.status} after {plain_reply.seconds:.1f} s; stream ends with {list(last_event)}"
    return Verdict(is_right, text, plain_reply.seconds < 3)


async def one_fails(server: Server) -> Verdict:
    """Fail jobs at once or later, and fail a step with all jobs in it; other jobs continue."""
    texts = await solo(server)
    outcomes = []
    for seed in (9001, 9002):
        streams = [stream(server.port, index) for index in range(3)]
        bad = await ask(server.port, "POST", CHAT, chat(seed=seed, max_tokens=16))
        n_good = share(await asyncio.gather(*streams), texts)
        outcomes.append((bad.status, n_good))
    bad = await ask(server.port, "POST", CHAT, chat(seed=9003))
    late = await ask(server.port, "POST", CHAT, chat(seed=9002, max_tokens=16, stream=True))
    n_again = share([await stream(server.port, 0)], texts)
    right = outcomes == [(500, 3), (500, 3)] and bad.status == 500 and "error" in late.events()[-1] and not late.done
    text = f"{outcomes}, of all {bad.status}, stream {list(late.events()[-1])}, then {n_again} good"
    return Verdict(right and n_again == 1, text)


async def engine_dies(server: Server) -> Verdict:
    """End the engine's thread: no client stays waiting, and the process ends with an error."""
    streams = [stream(server.port, index) for index in range(3)]
    await until(server.port, running=3)
    start = time.perf_counter()
    bad = await ask(server.port, "POST", CHAT, chat(seed=9004))
    replies = await asyncio.gather(*streams)
    seconds = time.perf_counter() - start
    code = await asyncio.to_thread(server.process.wait, 30)
    is_right = code > 0 and not any(reply.done for reply in replies) and bad.status in (0, 500, 503)
    text = f"told {bad.status} and {[reply.status for reply in replies]} within {seconds:.1f} s; exit {code}"
    return Verdict(is_right, text, seconds < 5)


async def engine_hangs(server: Server) -> Verdict:
    """Hang in a step: /health reports it, requests fail, and the process ends with an error."""
    start = time.perf_counter()
    stuck = asyncio.create_task(ask(server.port, "POST", CHAT, chat(seed=9005)))
    status = 200
    while status == 200 and time.perf_counter() - start < 20:
        await asyncio.sleep(0.1)
        status = (await ask(server.port, "GET", "/health")).status
    seconds = time.perf_counter() - start
    code = await asyncio.to_thread(server.process.wait, 60)
    ended = time.perf_counter() - start
    stuck_status = (await stuck).status
    text = f"/health {status} after {seconds:.1f} s; told {stuck_status}; exit {code} after {ended:.1f} s"
    return Verdict(status == 503 and code > 0 and stuck_status in (0, 500, 503, 504), text, seconds < 6.5)


async def stopped(server: Server) -> Verdict:
    """Send SIGTERM while answers run and wait: they finish, nothing new begins, exit 0."""
    texts = await solo(server)
    running = [stream(server.port, index) for index in range(8)]
    await until(server.port, running=4, waiting=4)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    late_replies = await ask(server.port, "GET", "/health"), await ask(server.port, "POST", CHAT, chat())
    n_good = share(await asyncio.gather(*running), texts)
    code = await asyncio.to_thread(server.process.wait, 40)
    statuses = [reply.status for reply in late_replies]
    is_right = statuses == [503, 503] and n_good == 8 and code == 0
    return Verdict(is_right, f"{n_good} of 8 finished; new {statuses}; exit {code}")


async def cut(server: Server) -> Verdict:
    """Send SIGTERM while an answer runs longer than the grace period; the process cuts it and exits with 0."""
    async with connection(server.port, request("POST", CHAT, chat(max_tokens=400, seed=1, stream=True))) as (reader, _):
        await until(server.port, running=1)
        start = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        with suppress(ConnectionError):
            await reader.read()
            while await reader.read(65536):
                pass
        code = await asyncio.to_thread(server.process.wait, 60)
    seconds = time.perf_counter() - start
    return Verdict(code == 0 and seconds > 29, f"cut, exit {code} after {seconds:.1f} s", seconds < 36)


async def stopped_early(server: Server) -> Verdict:
    """Send SIGTERM at many moments of a server's start: it ends at once and leaves no process and no file."""
    command: Any = server.process.args
    ends = await asyncio.to_thread(lambda: [_stopped_after(command, index / 20) for index in range(EARLY)])
    codes = [code for code, _, _ in ends]
    slowest, outputs = max(seconds for _, seconds, _ in ends), [output for _, _, output in ends if output]
    is_right = set(codes) <= {-signal.SIGTERM, 0} and codes[0] != 0 and not outputs
    text = f"{codes.count(-signal.SIGTERM)} of {EARLY} by the signal, others 0, in {slowest:.2f} s; {outputs[:1]}"
    return Verdict(is_right, text, slowest < 1)


def _stopped_after(command: Sequence[str], seconds: float) -> tuple[int, float, str]:
    """Return the exit code, the seconds, and any unexpected output or leftover."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": folder},
        )  # fmt: skip
        time.sleep(seconds)
        start = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        stop_seconds, leftovers = time.perf_counter() - start, [file.name for file in Path(folder).iterdir()]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 0)
        leftovers.append("a process")
    unexpected = [line for line in output.splitlines() if " at http://" not in line]
    return process.returncode, stop_seconds, " ".join(unexpected + leftovers)


async def soak(server: Server, minutes: float) -> Verdict:
    """Run mixed load: answers, streams, bad requests, clients that leave; nothing may grow."""
    end, n_requests, sizes = time.perf_counter() + 60 * minutes, 0, []
    while time.perf_counter() < end:
        tasks = [stream(server.port, index) for index in range(6)]
        tasks.append(asyncio.create_task(ask(server.port, "POST", CHAT, chat(max_tokens=8))))
        tasks.append(asyncio.create_task(ask(server.port, "POST", CHAT, b"{")))
        async with connection(server.port, request("POST", CHAT, chat(max_tokens=400, stream=True))) as (reader, _):
            await reader.readline()
        await asyncio.gather(*tasks)
        n_requests += len(tasks) + 1
        sizes.append((time.perf_counter(), server.resident(), server.open_files()))
    await until(server.port, running=0, waiting=0)
    measured = sizes[len(sizes) // 3 :]  # the first third warms up
    growth = slope([time_point for time_point, _, _ in measured], [size for _, size, _ in measured]) * 600
    files = server.open_files() - min(files for _, _, files in sizes[:3])
    text = f"{n_requests} requests in {minutes:g} min; {growth:+.2f} MB per 10 min; {files:+d} files"
    return Verdict(growth < 1 and files <= 0, text)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Compute the slope of the line through points, by least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
