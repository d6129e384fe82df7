"""A page in headless Chromium, driven over its debugging protocol; needs the program `chromium`."""

import asyncio
import base64
import contextlib
import os
import shutil
import subprocess

import aiohttp

_LIMIT_S = 60


def chromium_path():
    """The program, or None."""
    named = os.environ.get("NANOCP_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """An open page. `problems` are its exceptions, and the lines that it wrote to the console."""

    def __init__(self, socket):
        self.problems = []
        self._socket = socket
        self._number = 0

    async def command(self, method, **params):
        """Send a command of the debugging protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(_LIMIT_S):
            while (message := await self._socket.receive_json()).get("id") != self._number:
                if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    self.problems.append(message["params"])
        return message["result"]

    async def evaluate(self, expression):
        """The value of an expression of the page."""
        answer = await self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")

    async def until(self, expression):
        """Wait until the expression is true."""
        async with asyncio.timeout(_LIMIT_S):
            while not await self.evaluate(f"Boolean({expression})"):
                await asyncio.sleep(0.1)

    async def resize(self, width, height=900, dark=False):
        """Give the page a window of this many CSS pixels."""
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key, code):
        """Press a key and release it; `code` is its virtual key code."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.command("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **named)

    async def picture(self):
        """The whole page as PNG."""
        answer = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextlib.asynccontextmanager
async def opened(url, folder):
    """Open the page in a Chromium of its own, whose profile is in the folder."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [chromium_path(), *flags, f"--user-data-dir={folder}", "about:blank"],
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = folder / "DevToolsActivePort"
        async with asyncio.timeout(_LIMIT_S):
            # Chromium makes the file before it writes the port into it.
            while not (port_file.exists() and (words := port_file.read_text().split())):
                await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{words[0]}/json") as answer:
                (tab,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await page.command(f"{domain}.enable")
                await page.command("Page.navigate", url=url)
                await page.until(f"location.href.startsWith({url!r}) && document.readyState")
                yield page
    finally:
        process.terminate()
        process.wait()
