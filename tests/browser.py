"""A headless Chromium for tests, driven by its own protocol over two pipes: no driver, no port, no third package.

LEASEDJOB_TEST_CHROMIUM names the program; without it one on the PATH is taken. `make integration` brings one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
VARIABLE = "LEASEDJOB_TEST_CHROMIUM"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "Backspace": 8, " ": 32}


def program() -> str | None:
    """A Chromium of this machine, or None."""
    return os.environ.get(VARIABLE) or next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser refused, or the page's script failed."""


class Browser:
    """One Chromium, with a profile of its own that is removed at its end."""

    def __init__(self, binary: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="leasedjob-chromium-", ignore_cleanup_errors=True)
        to_browser, from_test = os.pipe()
        to_test, from_browser = os.pipe()

        self._process = subprocess.Popen(
            [
                "bash",  # Chromium reads from 3 and writes to 4
                "-c",
                f'exec "$@" 3<&{to_browser} 4>&{from_browser}',
                "bash",
                binary,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",  # tests run as root in CI, and open nothing but the project's own pages
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--force-color-profile=srgb",
                "--font-render-hinting=none",
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_browser, from_browser),
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._write, self._read = from_test, to_test
        self._number = 0
        self._rest = b""
        self.events: deque[Json] = deque(maxlen=20_000)

    def close(self) -> None:
        """Ends the browser and what it started."""
        with contextlib.suppress(OSError, BrowserError):
            self.send("Browser.close", seconds=5)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def send(self, method: str, session: str | None = None, *, seconds: float = PATIENCE, **params: Any) -> Json:
        """One command, and its answer; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + seconds
        while True:
            answer = self.receive(until - time.monotonic())
            if answer is None:
                raise BrowserError(f"no answer to {method} within {seconds} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                result: Json = answer["result"]
                return result

    def receive(self, seconds: float) -> Json | None:
        """The next message; None where none comes in time. Events are also kept."""
        until = time.monotonic() + seconds
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                return None
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"the browser has ended with {self._process.wait(10)}")
            self._rest += data
        raw, _, self._rest = self._rest.partition(b"\0")
        message: Json = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    @contextlib.contextmanager
    def tab(self, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True) -> Iterator[Tab]:
        """A tab in a context of its own (no cache, no storage of others)."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                tab.send(f"{domain}.enable")
            tab.size(width, height)
            tab.media(dark=dark)
            if not scripts:
                tab.send("Emulation.setScriptExecutionDisabled", value=True)
            yield tab
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """One page, and what it did."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, **params: Any) -> Json:
        return self._browser.send(method, self._session, **params)

    def _events(self, method: str) -> list[Json]:
        return [
            e["params"] for e in self._browser.events if e.get("sessionId") == self._session and e["method"] == method
        ]

    # --- how it is looked at -----------------------------------------------------------------------------------------

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def media(self, *, dark: bool = False, still: bool = False) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> int:
        """Goes there, and waits until it is loaded; the status of the answer."""
        seen = len(self._events("Page.loadEventFired"))
        answer = self.send("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url}: {answer['errorText']}")
        until = time.monotonic() + PATIENCE
        while len(self._events("Page.loadEventFired")) <= seen:
            if self._browser.receive(until - time.monotonic()) is None:
                raise BrowserError(f"{url} is not loaded within {PATIENCE} s")
        loader = answer["loaderId"]
        return next(
            int(e["response"]["status"])
            for e in reversed(self._events("Network.responseReceived"))
            if e["loaderId"] == loader and e["type"] == "Document"
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    # --- what is there -----------------------------------------------------------------------------------------------

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is worth; promises are awaited. It runs beside the page's policy."""
        answer = self.send(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            allowUnsafeEvalBlockedByCSP=True,
        )
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, what: str, script: str, seconds: float = PATIENCE) -> Any:
        """The first true value of the expression."""
        until = time.monotonic() + seconds
        last = None
        while time.monotonic() < until:
            last = self.value(script)
            if last:
                return last
            self._browser.receive(0.05)
        raise BrowserError(f"not within {seconds} s: {what} (last: {last!r}); the page: {self.text()[:1500]}")

    def text(self, selector: str = "body") -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.value(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText.trim())"
        )
        return found

    # --- what a person does ------------------------------------------------------------------------------------------

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, as the keyboard sends it."""
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        typed = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown" if typed else "rawKeyDown", text=typed, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, words: str) -> None:
        for letter in words:
            self.press(letter)

    def click(self, selector: str) -> None:
        place = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    # --- what it did -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Takes up what the browser has told until now."""
        while self._browser.receive(0.05) is not None:
            pass

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, violations of the page's policy, dialogs."""
        self.settle()
        found = [
            " ".join(str(a.get("value", a.get("description"))) for a in e["args"])
            for e in self._events("Runtime.consoleAPICalled")
            if e["type"] in ("error", "warning", "assert")
        ]
        found += [json.dumps(e["exceptionDetails"])[:500] for e in self._events("Runtime.exceptionThrown")]
        found += [
            f"{e['entry']['text']} {e['entry'].get('url', '')}"
            for e in self._events("Log.entryAdded")
            if e["entry"]["level"] in ("error", "warning")
        ]
        found += [f"dialog: {e['message']}" for e in self._events("Page.javascriptDialogOpening")]
        return found

    def asked(self) -> list[str]:
        """The URLs of all requests."""
        self.settle()
        return [str(e["request"]["url"]) for e in self._events("Network.requestWillBeSent")]


@contextlib.contextmanager
def chromium(skip: Callable[[str], object]) -> Iterator[Browser]:
    """A browser; `skip` is called where this machine has none, but in CI that is an error."""
    binary = program()
    if binary is None:
        text = f"no Chromium: `python -m tests.cluster chromium` brings one; name it in {VARIABLE}"
        if os.environ.get("CI") == "true":
            raise BrowserError(text)
        skip(text)
        return
    browser = Browser(binary)
    try:
        yield browser
    finally:
        browser.close()
