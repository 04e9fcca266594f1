"""A page in headless Chromium, driven through its debugging protocol; `websockets` is needed."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

CHROMIUM = shutil.which("chromium")


class Page:
    """A browser with one page and no network but this machine's; use it as a context.

    `errors` has what the page has written to its console as an error, and blocked requests.
    """

    def __init__(self, folder: Path, width: int = 1280, height: int = 800) -> None:
        from websockets.sync.client import connect

        words = [
            CHROMIUM, "--headless=new", "--no-sandbox", f"--user-data-dir={folder}",
            "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--disable-background-networking", f"--window-size={width},{height}",
            "--remote-debugging-port=0", "about:blank",
        ]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, **quiet)
        port = folder / "DevToolsActivePort"
        self._until(lambda: port.exists() and port.read_text().count("\n"))
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        with urllib.request.urlopen(address, timeout=20) as reply:
            target = next(each for each in json.load(reply) if each["type"] == "page")
        self.stack = ExitStack()
        self.socket = self.stack.enter_context(
            connect(target["webSocketDebuggerUrl"], max_size=None)
        )
        self.number, self.errors = 0, []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        self.process.terminate()
        self.process.wait(20)

    def send(self, method: str, **params: object) -> dict:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            reply = json.loads(self.socket.recv(timeout=60))
            if reply.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.errors.append(json.dumps(reply["params"])[:500])
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def value(self, script: str) -> object:
        """What an expression is, after its promise."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> float:
        """Wait until an expression is true; how long it took."""
        begin = time.monotonic()
        self._until(lambda: self.value(script), seconds)
        return time.monotonic() - begin

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _until(self, holds, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not come"
            assert self.process.poll() is None, "the browser ended"
            time.sleep(0.02)
