"""The cluster page in headless Chromium, on a live cluster: what it draws, in light and in dark.

Needs `chromium` (Debian's package of that name) on PATH, or its path in NANOCP_CHROMIUM.
"""

import os
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest

from harness.hash_service import hash_service, prompt
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
    """One request on all four instances and three on one each: their numbers, the long one's first."""
    with Client(service.address) as client:
        streams = []
        for length, seed in ((300, 1), (30, 2), (30, 3), (30, 4)):
            streams.append(client.generate(prompt(length, seed), max_tokens=1700, timeout_s=120))
            next(streams[-1])  # The long one is placed on an empty cluster.
        while len(requests := fetch(service.metrics_address)["requests"]) < len(streams):
            time.sleep(0.1)
        yield [one["id"] for one in sorted(requests, key=lambda one: -len(one["pages_on"]))]
    while fetch(service.metrics_address)["num_running"]:
        time.sleep(0.1)


class Parts(HTMLParser):
    """Attributes of every part of a bar."""

    def __init__(self, page):
        super().__init__()
        self.parts = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "i" and "data-request" in dict(attributes):
            self.parts.append({"class": ""} | dict(attributes))


def drawn(chromium, url, *options):
    """The document after its scripts have run for a while, and what they said on the console."""
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ]
    command = [chromium, *flags, *options, "--dump-dom", url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90)
    said = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return result.stdout, said


@pytest.mark.parametrize("door", ["metrics_address", "http_address"])
def test_a_request_on_several_instances_has_one_colour_on_all_of_them(
    chromium, service, running, door
):
    long = running[0]
    page, said = drawn(chromium, f"http://{getattr(service, door)}/cluster#request={long}")
    assert said == [], "no script failed, nothing was missing"
    assert re.search(r'id="status"[^>]*>live<', page)
    parts = Parts(page).parts
    assert {part["data-request"] for part in parts} == set(map(str, running))
    shares = [part for part in parts if part["data-request"] == str(long)]
    assert (
        len(shares) == 4
        and len({part["style"].rpartition("background")[2] for part in shares}) == 1
    )
    assert sum("home" in part["class"] for part in shares) == 1, "one of them is its MoE binding"
    assert all("picked" in part["class"] for part in shares), "the address says so, as a click does"
    life = re.search(r'<section class="card" id="life">(.*?)</section>', page, re.S)[1]
    assert re.findall(r"<b>([^<]+)</b>", life)[:3] == ["arrived", "placed", "KV is there"]
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
