"""Faults in the work itself: too much of it, clients that leave, jobs and threads that die, the end of the server."""

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
EARLY = 16  # moments of a start, 50 ms apart
PROMPTS = ("Once upon a time", "The little fox", "A red ball", "She said", "In the old tree")


def stream(port: int, index: int, **fields: object) -> asyncio.Task[Reply]:
    """Start a chat whose answer depends on its prompt and seed."""
    body = chat(PROMPTS[index % len(PROMPTS)], seed=index % len(PROMPTS), max_tokens=16, stream=True, **fields)
    return asyncio.create_task(ask(port, "POST", CHAT, body))


async def solo(server: Server) -> list[str]:
    """List the answers of requests that run alone."""
    return [(await stream(server.port, i)).text for i in range(len(PROMPTS))]


def share(replies: Sequence[Reply], alone: Sequence[str]) -> int:
    """Count the streams, in the order of their indices, that end like the answer alone."""
    return sum(
        reply.status == 200 and reply.done and reply.text == alone[i % len(alone)] for i, reply in enumerate(replies)
    )


async def too_many(server: Server) -> Verdict:
    """Start 200 clients where 4 run and 32 may wait."""
    alone, before = await solo(server), server.resident()
    replies = await asyncio.gather(*(stream(server.port, i) for i in range(CLIENTS)))
    taken = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 429 and reply.error and "retry-after" in reply.headers]
    same, grown = share(replies, alone), server.resident() - before
    text = f"{len(taken)} answered, {same} as alone, {len(refused)} x 429, p99 {worst(refused):.0f} ms; {grown:+.1f} MB"
    right = len(taken) == same >= 36 and len(taken) + len(refused) == CLIENTS and grown < 50
    return Verdict(right, text)


async def leaving(server: Server) -> Verdict:
    """Start 100 clients that leave: while they wait, before the first token, after it, and before all was sent."""
    took: dict[str, list[float]] = {"waiting": [], "prompt": [], "answer": [], "sending": []}
    after = 0
    for _ in range(LEAVING):
        took["prompt"].append((await leave(server, "prompt"))[0])
        seconds, n_after = await leave(server, "answer")
        took["answer"].append(seconds)
        after = max(after, n_after)
        took["sending"].append((await leave(server, "sending"))[0])
    async with connection(server.port, request("POST", CHAT, chat(max_tokens=400, stream=True, seed=1))):
        await until(server.port, running=1)
        for _ in range(LEAVING):
            took["waiting"].append((await leave(server, "waiting"))[0])
    counts = await until(server.port, running=0, waiting=0)
    slowest = {phase: 1000 * max(seconds) for phase, seconds in took.items()}
    text = ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in slowest.items())
    cancelled = counts["llorch_answers_cancelled_total"]
    text = f"slot back: {text}; {after} tokens after; {cancelled:.0f} cancelled"
    return Verdict(cancelled == 3 * LEAVING + 1, text, max(slowest.values()) <= 250 and after <= 1)


async def leave(server: Server, phase: str) -> tuple[float, int]:
    """Leave in a phase; return the seconds until the slot is free, and the tokens made after all received ones."""
    data = request("POST", CHAT, chat(max_tokens=400, stream=True, logprobs=True, seed=1))
    before = (await measure(server.port))["llorch_answer_tokens_total"]
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
    after = await until(server.port, waiting=0) if phase == "waiting" else await until(server.port, running=0)
    made = int(after["llorch_answer_tokens_total"] - before)
    return time.perf_counter() - start, made - received


async def deadline(server: Server) -> Verdict:
    """Ask for an answer that takes longer than a request may."""
    whole, streamed = await asyncio.gather(
        ask(server.port, "POST", CHAT, chat(max_tokens=400, seed=1)),
        ask(server.port, "POST", CHAT, chat(max_tokens=400, seed=1, stream=True)),
    )
    await until(server.port, running=0, waiting=0)
    last = streamed.events()[-1]
    right = whole.status == 504 and "error" in last and not streamed.done
    text = f"{whole.status} after {whole.seconds:.1f} s; stream ends with {list(last)}"
    return Verdict(right, text, whole.seconds < 3)


async def one_fails(server: Server) -> Verdict:
    """Fail jobs at once or later, and fail a step with all jobs in it; other jobs continue."""
    alone = await solo(server)
    seen = []
    for seed in (9001, 9002):
        others = [stream(server.port, i) for i in range(3)]
        bad = await ask(server.port, "POST", CHAT, chat(seed=seed, max_tokens=16))
        good = share(await asyncio.gather(*others), alone)
        seen.append((bad.status, good))
    bad = await ask(server.port, "POST", CHAT, chat(seed=9003))
    late = await ask(server.port, "POST", CHAT, chat(seed=9002, max_tokens=16, stream=True))
    again = share([await stream(server.port, 0)], alone)
    right = seen == [(500, 3), (500, 3)] and bad.status == 500 and "error" in late.events()[-1] and not late.done
    text = f"{seen}, of all {bad.status}, stream {list(late.events()[-1])}, then {again} good"
    return Verdict(right and again == 1, text)


async def engine_dies(server: Server) -> Verdict:
    """End the thread that computes: no client stays waiting, and the process ends with an error."""
    others = [stream(server.port, i) for i in range(3)]
    await until(server.port, running=3)
    start = time.perf_counter()
    bad = await ask(server.port, "POST", CHAT, chat(seed=9004))
    told = await asyncio.gather(*others)
    seconds = time.perf_counter() - start
    code = await asyncio.to_thread(server.process.wait, 30)
    right = code > 0 and not any(reply.done for reply in told) and bad.status in (0, 500, 503)
    text = f"told {bad.status} and {[reply.status for reply in told]} within {seconds:.1f} s; exit {code}"
    return Verdict(right, text, seconds < 5)


async def engine_hangs(server: Server) -> Verdict:
    """Hang in a step: /health says so, requests fail, and the process ends with an error."""
    start = time.perf_counter()
    stuck = asyncio.create_task(ask(server.port, "POST", CHAT, chat(seed=9005)))
    status = 200
    while status == 200 and time.perf_counter() - start < 20:
        await asyncio.sleep(0.1)
        status = (await ask(server.port, "GET", "/health")).status
    seconds = time.perf_counter() - start
    code = await asyncio.to_thread(server.process.wait, 60)
    ended = time.perf_counter() - start
    told = (await stuck).status
    text = f"/health {status} after {seconds:.1f} s; told {told}; exit {code} after {ended:.1f} s"
    return Verdict(status == 503 and code > 0 and told in (0, 500, 503, 504), text, seconds < 6.5)


async def stopped(server: Server) -> Verdict:
    """Send SIGTERM while answers run and wait: they finish, nothing new begins, exit 0."""
    alone = await solo(server)
    running = [stream(server.port, i) for i in range(8)]
    await until(server.port, running=4, waiting=4)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    late = await ask(server.port, "GET", "/health"), await ask(server.port, "POST", CHAT, chat())
    good = share(await asyncio.gather(*running), alone)
    code = await asyncio.to_thread(server.process.wait, 40)
    statuses = [reply.status for reply in late]
    right = statuses == [503, 503] and good == 8 and code == 0
    return Verdict(right, f"{good} of 8 finished; new {statuses}; exit {code}")


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
    """Send SIGTERM at many moments of a server's start: it ends at once, with no process and no file behind."""
    command: Any = server.process.args
    ends = await asyncio.to_thread(lambda: [_stopped_after(command, at / 20) for at in range(EARLY)])
    codes = [code for code, _, _ in ends]
    slowest, loud = max(seconds for _, seconds, _ in ends), [said for _, _, said in ends if said]
    right = set(codes) <= {-signal.SIGTERM, 0} and codes[0] != 0 and not loud
    text = f"{codes.count(-signal.SIGTERM)} of {EARLY} by the signal, others 0, in {slowest:.2f} s; {loud[:1]}"
    return Verdict(right, text, slowest < 1)


def _stopped_after(command: Sequence[str], seconds: float) -> tuple[int, float, str]:
    """Return the exit code, the seconds, and any output or leftover that should not exist."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": folder},
        )  # fmt: skip
        time.sleep(seconds)
        start = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        took, left = time.perf_counter() - start, [file.name for file in Path(folder).iterdir()]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 0)
        left.append("a process")
    odd = [line for line in said.splitlines() if " at http://" not in line]
    return process.returncode, took, " ".join(odd + left)


async def soak(server: Server, minutes: float) -> Verdict:
    """Run mixed load: answers, streams, bad requests, clients that leave; nothing may grow."""
    end, n, sizes = time.perf_counter() + 60 * minutes, 0, []
    while time.perf_counter() < end:
        tasks = [stream(server.port, i) for i in range(6)]
        tasks.append(asyncio.create_task(ask(server.port, "POST", CHAT, chat(max_tokens=8))))
        tasks.append(asyncio.create_task(ask(server.port, "POST", CHAT, b"{")))
        async with connection(server.port, request("POST", CHAT, chat(max_tokens=400, stream=True))) as (reader, _):
            await reader.readline()
        await asyncio.gather(*tasks)
        n += len(tasks) + 1
        sizes.append((time.perf_counter(), server.resident(), server.open_files()))
    await until(server.port, running=0, waiting=0)
    late = sizes[len(sizes) // 3 :]  # the first third warms up
    grown = slope([at for at, _, _ in late], [size for _, size, _ in late]) * 600
    files = server.open_files() - min(files for _, _, files in sizes[:3])
    text = f"{n} requests in {minutes:g} min; {grown:+.2f} MB per 10 min; {files:+d} files"
    return Verdict(grown < 1 and files <= 0, text)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Compute the slope of the line through points, by least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
