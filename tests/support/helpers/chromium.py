"""A page in a real Chromium without a window, driven through a pipe: how it looks, how wide it is, what it loads."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--disable-background-networking", "--disable-component-update", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One page of a running Chromium."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers, self._session, self._rest = count(1), {}, b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int, scheme: str = "light") -> None:
        """Load a file, and wait until it stands."""
        self.visit(path.as_uri(), width=width, scheme=scheme)

    def visit(self, url: str, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Load a page, and wait until it stands."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._load("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page again, and wait until it stands."""
        self._load("Page.reload")

    def _load(self, method: str, **params: Any) -> None:
        self.events.clear()
        self.call(method, **params)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def event_parameters(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of events since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def screenshot(self, path: Path) -> None:
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile; ends with the block."""
    assert PROGRAM is not None
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()

    def as_three_and_four() -> None:
        for fd, high in [(3, os.dup(theirs_in)), (4, os.dup(theirs_out))]:
            os.dup2(high, fd)

    words = [PROGRAM, *_QUIET, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(words, pass_fds=(3, 4), preexec_fn=as_three_and_four, stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        browser = Browser(commands, answers)
        yield browser
        browser._session = {}
        browser.call("Browser.close")
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait(timeout=30)
