"""A headless Chromium, spoken to over two pipes in its DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess

from tests.waiting import wait_for

PROGRAMS = ("chromium-headless-shell", "chromium")
REQUIRED = "SHARDCLIP_REQUIRE_BROWSER"


def program():
    """Where the browser is, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page in a browser; counts what it asks for and what goes wrong."""

    def __init__(self, folder):
        here_out, self._in = os.pipe()
        self._out, here_in = os.pipe()
        command = [
            program(),
            "--headless",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "about:blank",
        ]

        # The protocol's pipes are 3 and 4; the shell puts them there.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{here_out} 4>&{here_in}', "bash", *command],
            pass_fds=(here_out, here_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(here_out)
        os.close(here_in)
        self._buffer = b""
        self._number = 0
        self.requests = []
        self.complaints = []
        self._loaded = set()
        self._session = None
        (page,) = wait_for(self._pages)
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def _pages(self):
        targets = self.call("Target.getTargets")["targetInfos"]
        return [target for target in targets if target["type"] == "page"]

    def call(self, method, **parameters):
        """Call a method of the protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._notice(answer)

    def _next(self):
        while b"\0" not in self._buffer:
            got = os.read(self._out, 1 << 20)
            assert got, f"the browser has ended with {self._process.wait(10)}"
            self._buffer += got
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _notice(self, message):
        method, about = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        if method == "Page.lifecycleEvent" and about["name"] == "load":
            self._loaded.add(about["loaderId"])
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(about)

    def open(self, url, width, height=844, *, mobile):
        """Show a page in a window of this size, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        self.requests.clear()
        document = self.call("Page.navigate", url=url)["loaderId"]
        while document not in self._loaded:
            self._notice(self._next())

    def ask(self, expression):
        """Evaluate JavaScript; its value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path):
        """Save the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        """End it."""
        with contextlib.suppress(OSError):
            self._session = None
            self._number += 1
            message = {"id": self._number, "method": "Browser.close"}
            os.write(self._in, json.dumps(message).encode() + b"\0")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
