"""Headless Chromium over its debugging pipe: opens a page and says what a person and the network saw."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The debugging pipe is descriptors 3 and 4 of the browser. Python's own way of placing them there would fork a
# process with jax's threads, so a small interpreter moves them and becomes the browser.
_BECOME = (
    "import fcntl, os, sys\n"
    "a, b = (fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3])\n"
    "os.dup2(a, 3); os.dup2(b, 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe", "--window-size=1200,900",
)  # fmt: skip


def find_browser() -> str | None:
    """Returns the path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclasses.dataclass
class Seen:
    """What opening a page showed.

    Attributes:
      errors: console errors and uncaught exceptions.
      requests: every address asked for but the page itself.
      answers: values of the expressions asked for.
      screenshot: a PNG.
    """

    errors: list[str]
    requests: list[str]
    answers: list[Any]
    screenshot: bytes


class Browser:
    """One browser process; use as a context."""

    def __init__(self, profile: pathlib.Path, limit_s: float = 60.0):
        path = find_browser()
        assert path is not None
        self.limit_s, self._next, self._buffer = limit_s, 0, b""
        self.events: list[dict[str, Any]] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", self.session)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Returns the browser's answer to one command."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + self.limit_s
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise OSError("the browser has ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def open(
        self,
        page: pathlib.Path,
        ask: list[str] | None = None,
        *,
        dark: bool = False,
        width: int = 1200,
    ) -> Seen:
        """Returns what a local page shows once it has loaded.

        Args:
          page: the file.
          ask: JavaScript expressions, asked of the page when it has loaded.
          dark: whether the system prefers dark pages.
          width: of the window.
        """
        s = self.session
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", s, features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            s,
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", s, url=page.as_uri())
        deadline = time.monotonic() + self.limit_s
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read(deadline))
        answers = []
        for expression in ask or ():
            found = self.call(
                "Runtime.evaluate", s, expression=expression, returnByValue=True, awaitPromise=True
            )
            assert "exceptionDetails" not in found, found
            answers.append(found["result"].get("value"))
        picture = self.call("Page.captureScreenshot", s, format="png", captureBeyondViewport=True)
        return Seen(
            [json.dumps(e["params"]) for e in self.events if _is_error(e)],
            [
                e["params"]["request"]["url"]
                for e in self.events
                if e.get("method") == "Network.requestWillBeSent"
                and e["params"]["request"]["url"].split("#")[0] != page.as_uri()
            ],
            answers,
            base64.b64decode(picture["data"]),
        )


def _is_error(event: dict[str, Any]) -> bool:
    method, params = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        return True
    if method == "Runtime.consoleAPICalled":
        return params["type"] in ("error", "assert", "warning")
    return method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")


# What a person could not read: text that leaves its drawing, and drawings without size.
OUTSIDE = """(() => { const out = [];
for (const svg of document.querySelectorAll('svg.hj-svg')) {
  const frame = svg.getBoundingClientRect();
  if (!frame.width || !frame.height) continue;
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1) out.push(svg.dataset.picture + ': ' + text.textContent);
  } }
return out; })()"""
VISIBLE = """(() => { const out = {};
for (const e of document.querySelectorAll('[data-picture]')) {
  const box = e.getBoundingClientRect();
  const shapes = [...e.querySelectorAll('rect,path,circle,label,summary')].filter(
      x => { const b = x.getBoundingClientRect(); return b.width > 0 || b.height > 0; }).length;
  (out[e.dataset.picture] ??= []).push([box.width, box.height, shapes]);
} return out; })()"""
HEIGHT = "document.documentElement.scrollHeight"
