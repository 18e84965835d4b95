"""Chromium without a window, driven through the pipe of its DevTools protocol by the standard library alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REQUIRED = "FLAMIA_BROWSER_REQUIRED"
"""Set where the tests must not be skipped for want of a browser."""

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it refuses to run as root with one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--lang=en-US",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-pipe",
)

# The browser reads from descriptor 3 and writes to 4, whichever numbers the pipes have.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

# Windows keys, text and modifiers of the keys that the tests press.
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": (" ", 32, " "),
    "ArrowDown": ("ArrowDown", 40, ""),
    "End": ("End", 35, ""),
}
_SHIFT = 8


def find() -> str | None:
    """Return the browser of this machine, or None."""
    return next((path for path in map(shutil.which, _NAMES) if path is not None), None)


class Browser:
    """A browser with one page.

    Attributes:
        complaints: what the page wrote to the console, and errors of its scripts and its policy.
        requests: the addresses that the page asked for.
        blocked: why each request that was stopped before it left was stopped.
    """

    def __init__(self, process: subprocess.Popen[bytes], read: int, write: int) -> None:
        self._process, self._read, self._write = process, read, write
        self._number, self._held, self._session = 0, b"", ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.blocked: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.size(1280, 900)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; AssertionError where it fails."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file and wait until it is loaded."""
        self.complaints.clear()
        self.requests.clear()
        self.blocked.clear()
        # A change of the fragment alone would not load the page again.
        for address in ("about:blank", page.resolve().as_uri() + fragment):
            self._loaded = False
            self.call("Page.navigate", url=address)
            while not self._loaded:
                self._next()
        self.requests = [one for one in self.requests if one != "about:blank"]
        self.call("Page.bringToFront")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element, which must not be covered."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0];"
            " const x = r.left + r.width / 2, y = r.top + r.height / 2;"
            " const hit = document.elementFromPoint(x, y);"
            " return {x, y, hit: e === hit || e.contains(hit)}; })()"
        )
        assert box["hit"], f"{selector} is covered or out of sight"
        at = {"x": box["x"], "y": box["y"], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        name, code, text = _KEYS[key]
        about = {
            "key": name,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": _SHIFT * shift,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="char", text=character)

    def media(self, *, scheme: str = "light", kind: str = "") -> None:
        """Prefer a colour scheme, and show the page as on paper where kind is "print"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def size(self, width: int, height: int) -> None:
        """Set the size of the window, in pixels of the page."""
        settings = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **settings)

    def tree(self) -> list[dict[str, Any]]:
        """Return what a screen reader is told: role, name and properties of every node that is not ignored."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            {
                "role": node.get("role", {}).get("value"),
                "name": node.get("name", {}).get("value", ""),
                **{one["name"]: one["value"].get("value") for one in node.get("properties", ())},
            }
            for node in nodes
            if not node["ignored"]
        ]

    def screenshot(self) -> bytes:
        """Return what is seen as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no answer of the browser in {_SECONDS:g} seconds"
            data = os.read(self._read, 1 << 16)
            assert data, f"the browser has gone, with {self._process.poll()}"
            self._held += data
        line, _, self._held = self._held.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, about: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Network.loadingFailed" if "blockedReason" in about:
                self.blocked.append(about["blockedReason"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(about["args"]))
            case "Log.entryAdded":
                self.complaints.append(about["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"dialogue: {about['message']}")


@contextmanager
def started(binary: str, folder: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in a folder, and end it."""
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = (to_browser[0], from_browser[1])
    command = [sys.executable, "-I", "-S", "-c", _LAUNCH, *map(str, ends), binary]
    with open(folder / "browser.log", "wb") as log:
        process = subprocess.Popen(
            [*command, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    for end in ends:
        os.close(end)
    try:
        yield Browser(process, from_browser[0], to_browser[1])
    finally:
        os.close(to_browser[1])  # it ends when its pipe is closed
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
