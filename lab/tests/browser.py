"""A real Chromium without a window, spoken to over two pipes: the DevTools protocol, with nothing else to install."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
)
AS_THREE_AND_FOUR = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]  # either may be 3 or 4 itself
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from 3 and writes to 4; Popen's own way to move them warns in a process with threads."""
PATIENCE = 600
"""Seconds to wait for an answer: a busy machine is slow, a dead browser closes its pipe."""


def chromium():
    """Where it is. Without one, tests skip; where all of them have to run (CI=true), they fail."""
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("no Chromium: install it (Debian: apt install chromium), or name one in the variable CHROMIUM")
    return found


class Browser:
    def __init__(self, folder):
        (its_read, self._write), (self._read, its_write) = os.pipe(), os.pipe()
        command = [chromium(), *FLAGS, f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_THREE_AND_FOUR, str(its_read), str(its_write), *command],
            pass_fds=(its_read, its_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_read)
        os.close(its_write)
        self._rest, self._count, self.events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def _message(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "Chromium has closed its pipe" if ready else f"no answer within {PATIENCE} s"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, session=None, **parameters):
        self._count += 1
        request = {"id": self._count, "method": method, "params": parameters}
        os.write(self._write, json.dumps(request | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (message := self._message()).get("id") != self._count:
            self.events.append(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def wait(self, method, session):
        while not any(event["method"] == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._message())


class Page:
    """A file in a tab of its own, `width` pixels wide, in the theme "light" or "dark"."""

    def __init__(self, browser, path, width=1440, theme="light"):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.load(path)

    def load(self, path):
        """Show a file in this tab, without the new process of a new tab; events of the file before are forgotten."""
        self.url = Path(path).resolve().as_uri()
        self.forget_events()
        self.call("Page.navigate", url=self.url)
        self.browser.wait("Page.loadEventFired", self.session)

    def resize(self, width):
        size = {"width": width, "height": 844 if width < 600 else 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def seen(self, *methods):
        """The parameters of all events of these kinds, so far."""
        self.evaluate("0")  # events that were on their way come before its answer
        mine = (event for event in self.browser.events if event.get("sessionId") == self.session)
        return [event["params"] for event in mine if event["method"] in methods]

    @property
    def complaints(self):
        """What the console says, exceptions included."""
        return self.seen("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

    @property
    def requests(self):
        return [event["request"]["url"] for event in self.seen("Network.requestWillBeSent")]

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self):
        """Close the tab; its events are forgotten."""
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.forget_events()

    def forget_events(self):
        self.browser.events = [event for event in self.browser.events if event.get("sessionId") != self.session]

    def pdf(self):
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
