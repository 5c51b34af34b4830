"""Faults of clients, requests and the machine, provoked on real `llorch serve` processes, with the outcome of each.

    python benchmarks/serve_faults.py                      all faults, about six minutes
    python benchmarks/serve_faults.py --only S4 --only S13
    python benchmarks/serve_faults.py --soak 30            minutes of mixed load
    python benchmarks/serve_faults.py --backend torch      the continuous batch, in reproducible mode

Servers run as processes on loopback, with `story`; where time matters each step takes longer, as
`faulty_server` makes it. Exit code 1 if a behaviour is not as expected. A time that is longer than expected is called
SLOW and is no failure, because it depends on what else the machine does; times are worth reading with `--jobs 1` only.
"""

import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import serve_faults_of_clients as clients
import serve_faults_of_readers as readers
import serve_faults_of_text as text
import serve_faults_of_work as work
from serve_faults_of_clients import KEY, Verdict
from serve_processes import Server, faulty, llorch
from speed_cases.rounds import describe_machine

OPEN_FILES = 4096
BACKENDS = {"numpy": (), "torch": ("--backend", "torch", "--mode", "reproducible")}
ALONE = ("--parallel", "1")


@dataclass(frozen=True)
class Fault:
    """Fault that is provoked on a server started for it."""

    number: str  # number in the list of faults
    title: str
    expected: str
    run: Callable[[Server], Awaitable[Verdict]]
    options: Sequence[str] = ()  # options of the server
    step: float | None = None  # seconds added to each step; such a server also has the injected faults
    key: str | None = None
    model: Callable[[Path], str] = lambda folder: "story"  # writes a model to the folder, or names a built-in one


FAULTS = (
    Fault("S1", "1,000 half-open connections", "408 at 10 s; others p99 < 100 ms; < 20 MB", clients.half_open),
    Fault("S2", "400 MB, chunks, long headers, CL+TE", "413, 413, 431, 400; < 10 MB", clients.huge),
    Fault("S2b", "a body that stops coming", "408 at 30 s", clients.without_end),
    Fault("S3", "200 clients, 4 run, 32 wait", "as alone, or 429; < 50 MB", work.too_many, step=0.005),
    Fault("S4", "100 clients leave in four phases", "slot back in 250 ms, <= 1 token", work.leaving, ALONE, 0.05),
    Fault("S4b", "streams that nobody reads", "dropped after 30 s, < 50 MB", readers.unread),
    Fault("S5", "an answer takes too long", "504, error event; slot free", work.deadline, ("--timeout", "1"), 0.05),
    Fault("S6", "bad numbers, types, JSON", "400, field named", clients.bad_fields),
    Fault("S7", "1 MB of text", "400, < 3 s each; /health p99 < 250 ms", clients.long_texts),
    Fault("S8", "wrong keys", "401 but for /health", clients.keys, key=KEY),
    Fault("S9", "foreign hosts, origins, models", "403, 403, 404", clients.names),
    Fault("S11", "texts of control tokens", "text, but in raw prompts", text.controls, model=text.with_template),
    Fault("G13", "a template that means harm", "400 in 1.5 s; others as alone", text.harm, model=text.with_template),
    Fault("S13", "a job raises, a step raises", "500 for them, others as alone", work.one_fails, step=0.005),
    Fault("S14", "the engine's thread dies", "told within 5 s, exit > 0", work.engine_dies, step=0.005),
    Fault("S14b", "a step hangs", "/health 503 at 5 s, exit > 0", work.engine_hangs, ("--timeout", "8"), 0.005),
    Fault("S15", "SIGTERM under load", "all finish, new 503, exit 0", work.stopped, step=0.02),
    Fault("S15b", "SIGTERM, an answer of a minute", "cut at 30 s, exit 0", work.cut, step=0.5),
    Fault("S15c", "SIGTERM while a model loads", "exit in 1 s, nothing said or left", work.stopped_early),
    Fault("S18", "secrets in requests", "none in the log", clients.log, ("-v",), key=KEY),
)  # fmt: skip


def provoke(fault: Fault, backend: Sequence[str] = ()) -> Verdict:
    """Provoke a fault on a server that is started for it."""
    _allow_open_files()
    with tempfile.TemporaryDirectory() as folder:
        model = fault.model(Path(folder))
        if fault.step is None:
            server = llorch(model, *fault.options, *backend, key=fault.key)
        else:
            server = faulty(fault.step, model, *fault.options, *backend)
        try:
            return asyncio.run(fault.run(server))  # type: ignore[arg-type]
        finally:
            server.stop()


def judge(fault: Fault, backend: Sequence[str]) -> Verdict:
    """Judge a fault; an exception counts as a failure."""
    try:
        return provoke(fault, backend)
    except Exception as error:
        return Verdict(right=False, measured=f"{type(error).__name__}: {error}")


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        new_limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice([fault.number for fault in FAULTS] + ["S16"]))
@click.option("--soak", default=1.0, show_default=True, help="Minutes of mixed load.")
@click.option("--backend", type=click.Choice(list(BACKENDS)), default="numpy", show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Faults at a time; most of them wait.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead.")
def main(only: tuple[str, ...], soak: float, backend: str, jobs: int, as_json: bool) -> None:
    """Entry point."""
    soak_fault = Fault(
        "S16", f"{soak:g} min of mixed load", "< 1 MB in 10 min, no file left open", partial(work.soak, minutes=soak)
    )
    faults = [fault for fault in (*FAULTS, soak_fault) if not only or fault.number in only]
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for fault, verdict in zip(faults, pool.map(partial(judge, backend=BACKENDS[backend]), faults), strict=True):
            rows.append(
                {"fault": fault.number, "what": fault.title, "expected": fault.expected, "measured": verdict.measured,
                 "ok": verdict.right, "in_time": verdict.in_time}
            )  # fmt: skip
            if not as_json:
                label = "FAILED" if not verdict.right else "OK" if verdict.in_time else "SLOW"
                line = f"{label:<7}{fault.number:<6}{fault.title:<38}{fault.expected:<44}{verdict.measured}"
                print(line, flush=True)
    failed = [row["fault"] for row in rows if not row["ok"]]
    print(
        json.dumps(rows) if as_json else f"{describe_machine()}; {len(rows) - len(failed)} of {len(rows)} as expected"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
