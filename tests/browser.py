"""A headless Chromium that tests drive: the DevTools protocol over a pair of pipes.

``--remote-debugging-pipe`` makes the browser read commands from file descriptor 3 and write answers
and events to 4, each a JSON text that ends in a zero byte; no port is opened and no driver needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: seconds after which a browser counts as hung; one that answers is never waited for, and on a busy
#: machine starting it took more than 10
PATIENCE = 180


def find_browser() -> str | None:
    """Path of an installed Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a running browser.

    Attributes:
        messages: what the page wrote to its console, and what went wrong in it.
        requests: addresses that it asked for.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._commands, self._answers = commands, answers
        self._count = 0
        self._text = b""
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command; raises AssertionError where the browser refuses or does not answer."""
        self._count += 1
        command: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._count:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._text:
            ready, _, _ = select.select([self._answers], [], [], max(0, until - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE} s"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._text += more
        text, _, self._text = self._text.partition(b"\0")
        return json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(given["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(given["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(given["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.messages.append(f"dialog: {given['message']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    # ------------------------------------------------------------------------------- the page

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Show a file in a window of this size and wait until it is there."""
        self.messages.clear()
        self.requests.clear()
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=path.as_uri())
        until = time.monotonic() + PATIENCE
        ready = "document.readyState == 'complete' && location.href != 'about:blank'"
        while not self.run(ready):
            assert time.monotonic() < until, f"{path} does not load"
            time.sleep(0.02)

    def resize(self, width: int, height: int = 1000) -> None:
        """Change the size of the window."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; raises AssertionError where it throws."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def all(self, selector: str, expression: str) -> list[Any]:
        """The values of an expression over ``e`` for every element that matches."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{elements}.map(e => {expression})")

    def count(self, selector: str) -> int:
        """The number of elements that match."""
        return len(self.all(selector, "1"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        x, y = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, x, y)

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        self._mouse("mouseMoved", *self._middle(selector))

    def _mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def _middle(self, selector: str) -> tuple[float, float]:
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return place[0], place[1]

    def key(self, name: str) -> None:
        """Press and release a key: ``Tab``, ``ArrowDown``, ``Enter``."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name,
                windowsVirtualKeyCode=codes[name],
            )  # fmt: skip

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of what the window shows of it."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh browser with an empty profile; it ends with the block.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    program = find_browser()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed")
    to_browser, from_browser = os.pipe(), os.pipe()
    # its helper processes may write to the profile a little longer than it lives
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the shell gives the pipes the numbers that the browser expects
        wiring = 'exec "$@" 3<&"$READ" 4>&"$WRITE"'
        process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", program, *FLAGS, f"--user-data-dir={profile}"],
            env=os.environ | {"READ": str(to_browser[0]), "WRITE": str(from_browser[1])},
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            process.terminate()
            process.wait(PATIENCE)
            os.close(from_browser[0])
