"""The cluster page in headless Chromium, on a live cluster: what it draws, in light and in dark.

Needs `chromium` (Debian's package of that name) on PATH, or its path in NANOCP_CHROMIUM.
"""

import asyncio
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser

import aiohttp
import pytest

from harness.hash_service import CONFIG, hash_service, prompt
from nanocp.cli.top import fetch
from nanocp.client import Client

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def chromium():
    path = (
        os.environ.get("NANOCP_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip(
            "no program `chromium`: apt-get install chromium, or name it in NANOCP_CHROMIUM"
        )
    return path


@pytest.fixture(scope="module")
def service():
    with hash_service(instance_factory="harness.hash_members:build_slow") as service:
        yield service


@pytest.fixture
def running(service):
    """Run a request on all four instances and three on one each; their ids, the long one first."""
    with Client(service.address) as client:
        streams = []
        for length, seed in ((300, 1), (30, 2), (30, 3), (30, 4)):
            streams.append(client.generate(prompt(length, seed), max_tokens=1700, timeout_s=120))
            next(streams[-1])  # so the long request is placed on an empty cluster
        while len(requests := fetch(service.metrics_address)["requests"]) < len(streams):
            time.sleep(0.1)
        yield [one["id"] for one in sorted(requests, key=lambda one: -len(one["pages_on"]))]
    while fetch(service.metrics_address)["num_running"]:
        time.sleep(0.1)


class Parts(HTMLParser):
    """Collects the attributes of every part of a bar."""

    def __init__(self, page):
        super().__init__()
        self.parts = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "i" and "data-request" in dict(attributes):
            self.parts.append({"class": ""} | dict(attributes))


def drawn(chromium, url, *options):
    """(the document after its scripts have run for a while, their lines on the console)."""
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ]
    command = [chromium, *flags, *options, "--dump-dom", url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90)
    logged = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return result.stdout, logged


@pytest.mark.parametrize("port", ["metrics_address", "http_address"])
def test_a_request_on_several_instances_has_one_colour_on_all_of_them(
    chromium, service, running, port
):
    long = running[0]
    page, logged = drawn(chromium, f"http://{getattr(service, port)}/cluster#request={long}")
    assert logged == [], "no script failed, nothing was missing"
    assert re.search(r'id="status"[^>]*>live<', page)
    parts = Parts(page).parts
    assert {part["data-request"] for part in parts} == set(map(str, running))
    shares = [part for part in parts if part["data-request"] == str(long)]
    assert (
        len(shares) == 4
        and len({part["style"].rpartition("background")[2] for part in shares}) == 1
    )
    assert sum("home" in part["class"] for part in shares) == 1, "one of them is its MoE binding"
    assert all("picked" in part["class"] for part in shares), (
        "the address picks it, as a click does"
    )
    timeline = re.search(r'<section class="card" id="timeline">(.*?)</section>', page, re.S)[1]
    assert re.findall(r"<b>([^<]+)</b>", timeline)[:3] == ["arrived", "placed", "KV is there"]
    assert re.search(r'id="running">4<', page) and re.search(r'id="tpot">[\d.]+ ms<', page)


def test_light_and_dark_differ(chromium, service, running, tmp_path):
    pictures = []
    for number, option in enumerate(
        ("--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0")
    ):
        path = tmp_path / f"{number}.png"
        drawn(
            chromium,
            f"http://{service.metrics_address}/cluster",
            option,
            f"--screenshot={path}",
            "--window-size=900,600",
        )
        pictures.append(path.read_bytes())
    assert all(len(picture) > 10_000 for picture in pictures) and pictures[0] != pictures[1]


async def after_typing(chromium, url, folder, key):
    """The page's status before and after a key is typed into it and sent, and its address then."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [chromium, *flags, f"--user-data-dir={folder}", url], stderr=subprocess.DEVNULL
    )
    try:
        port_file = folder / "DevToolsActivePort"
        # Chromium makes the file before it writes the port into it.
        while not (port_file.exists() and (words := port_file.read_text().split())):
            await asyncio.sleep(0.1)
        port = words[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (tab,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"]) as socket:

                async def evaluate(expression):
                    command = {"expression": expression, "returnByValue": True}
                    await socket.send_json(
                        {"id": 1, "method": "Runtime.evaluate", "params": command}
                    )
                    return (await socket.receive_json())["result"]["result"].get("value")

                async def status_other_than(*others):
                    async with asyncio.timeout(30):
                        while (status := await evaluate(STATUS)) in others:
                            await asyncio.sleep(0.1)
                        return status

                before = await status_other_than("connecting", None)
                await evaluate(
                    f"document.getElementById('key_input').value = {key!r};"
                    "document.querySelector('#key button').click()"
                )
                return before, await status_other_than(before), await evaluate("location.href")
    finally:
        process.terminate()
        process.wait()


STATUS = "document.getElementById('status').textContent"


@pytest.mark.parametrize(("key", "after"), [("a key", "live"), ("no key", "this key is not valid")])
def test_the_page_of_a_service_with_keys_shows_the_cluster_to_who_has_one(
    chromium, tmp_path, key, after
):
    config = replace(CONFIG, service=replace(CONFIG.service, api_keys=("a key",)))
    with hash_service(config) as service:
        url = f"http://{service.metrics_address}/cluster"
        seen = asyncio.run(after_typing(chromium, url, tmp_path, key))
    assert seen == ("waiting for a key", after, url), "and the key is not in the address"
