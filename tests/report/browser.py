"""A headless Chromium, spoken to in its own protocol (CDP) over two pipes: nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page:
    """One tab. `complaints` are its console messages, exceptions and blocked or failed requests."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb", buffering=1 << 20)
        self._number, self._rest = 0, b""
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Load a file in a window of a size, and wait until it is complete."""
        self.load(path, width=width, height=height, dark=dark, phone=phone)
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def load(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """The same without a script that waits until all is drawn: the page may have scripts disabled."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.complaints.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(self._message())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, after its promise."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", answer["exceptionDetails"]["text"]))
        return answer["result"].get("value")

    def wheel(self, x: float, y: float, by: float, *, ctrl: bool = False) -> None:
        """Turn the wheel over a point."""
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by, modifiers=2 if ctrl else 0)

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a point."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one point and release at another."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def named(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader comes to."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")]

    def scripts(self, *, enabled: bool) -> None:
        """Whether pages that are loaded from now on run their scripts."""
        self._call("Emulation.setScriptExecutionDisabled", value=not enabled)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save what is shown as PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._from.read1()
            assert more, "the browser has gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method", ""), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in about["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"]["exception"].get("description", about["exceptionDetails"]["text"]))
        elif method == "Log.entryAdded":
            self.complaints.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith("file:"):
            self.complaints.append(f"asks for {about['request']['url']}")
        if method:
            self._events.append(event)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, which ends with the block; skips the test where there is none."""
    binary = next(filter(None, map(shutil.which, _NAMES)), None)
    if binary is None:
        pytest.skip("no Chromium; install it with: apt-get install chromium")
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (from_us, to_us)]  # away from 3 and 4, which the browser will use
    command = [
        *(
            "bash",
            "-c",
            f'exec 3<&{theirs[0]} 4>&{theirs[1]}; exec "$@"',
            "bash",
            binary,
            "--headless=new",
            "--remote-debugging-pipe",
        ),
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}"),
    ]
    process = subprocess.Popen(command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (from_us, to_us, *theirs):
        os.close(end)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)  # the browser ends when its pipe does
        process.wait()
