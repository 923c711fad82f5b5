"""A headless Chromium, driven over a pipe by its DevTools protocol."""

import contextlib
import json
import os
import shutil
import subprocess
import time

COMMAND = shutil.which("chromium") or shutil.which("google-chrome")

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--hide-scrollbars"),
)


class Browser:
    """One page of a browser, with the requests and errors that it made."""

    def __init__(self, profile, width, height):
        to_read, self._to_browser = os.pipe()
        self._from_browser, to_write = os.pipe()
        # The browser reads its descriptor 3 and writes 4; a shell moves ours there.
        move = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", move, "bash", COMMAND, *_FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*command, f"--window-size={width},{height}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._session, self._rest = 0, None, b""
        self.requests, self.errors = [], []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", **size)
        except BaseException:
            self.close()
            raise

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            part = os.read(self._from_browser, 2**20)
            assert part, "the browser ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        event = json.loads(text)
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(event["params"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.errors.append(event["params"])
            self.close()
        return event

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} stays {value!r}"
            time.sleep(0.05)
        return value

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def close(self):
        self._process.kill()
        self._process.wait()
        for descriptor in (self._to_browser, self._from_browser):
            with contextlib.suppress(OSError):
                os.close(descriptor)
