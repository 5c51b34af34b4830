"""Servers in child processes: llorch's, and llama-cpp-python's."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

READY = re.compile(r"http://\S+:(\d+)")
PATIENCE = 180.0  # seconds to load a model


class Server:
    """Running server on loopback."""

    def __init__(self, command: Sequence[str], port: int = 0, key: str | None = None) -> None:
        """Start it and collect its stderr. Without a port, the line that reports readiness contains it."""
        self.stderr_lines: list[str] = []
        self._key = key
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | ({"LLORCH_API_KEY": key} if key else {}),
        )  # fmt: skip
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        try:
            self.port = port or self._read_port()
            self.model = self._first_model()
        except BaseException:
            self.process.kill()
            raise

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr_lines.append(line)
            if READY.search(line):
                self._is_ready.set()
        self._is_ready.set()

    def _read_port(self) -> int:
        self._is_ready.wait(PATIENCE)
        for line in self.stderr_lines:
            if match := READY.search(line):
                return int(match[1])
        raise RuntimeError(f"the server did not say that it is ready: {''.join(self.stderr_lines)[-2000:]}")

    def _first_model(self) -> str:
        end = time.monotonic() + PATIENCE
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/models")
        if self._key is not None:
            request.add_header("authorization", f"Bearer {self._key}")
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    return json.load(answer)["data"][0]["id"]
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"/v1/models: {error}") from None
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the server did not begin to answer; it is {self.process.poll() or 'alive'}")

    def cpu_seconds(self) -> float:
        """Count the processor seconds of the server; 0 if the system does not report them."""
        try:
            user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:
            return 0.0
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> float:
        """Count the resident megabytes of the server."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def open_files(self) -> int:
        """Count the files and sockets that the server has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self) -> int:
        """Stop the server if it still runs; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join(10)
        return self.process.wait()


def llorch(model: str, *options: str, key: str | None = None) -> Server:
    """Start `llorch serve` on a free port."""
    return Server(["llorch", "serve", model, "--port", "0", *options], key=key)


def faulty(seconds: float, model: str, *options: str) -> Server:
    """Start `llorch serve` with the faults of `faulty_server` and steps that take `seconds` longer."""
    return Server(["benchmarks.faulty_server", str(seconds), "serve", model, "--port", "0", *options])


def llama_cpp(model: Path, *, threads: int, context: int) -> Server:
    """Start the server of llama-cpp-python, which answers requests one by one; new requests do not interrupt others."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words: dict[str, object] = {
        "model": model, "port": port, "n_threads": threads, "n_threads_batch": threads, "n_ctx": context,
        "interrupt_requests": False, "verbose": False,
    }  # fmt: skip
    command = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return Server(["llama_cpp.server", *command], port)
