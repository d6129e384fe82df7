"""The cluster page in headless Chromium, on a live cluster: what it draws, in light and in dark.

Needs `chromium` (Debian's package of that name) on PATH, or its path in NANOCP_CHROMIUM.
"""

import asyncio
import contextlib
import re
import subprocess
import time
from html.parser import HTMLParser

import pytest

from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, hash_service, prompt
from nanocp.cli.operate.top import fetch
from nanocp.client import Client
from tests.system.chromium import chromium_path, opened

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def chromium():
    path = chromium_path()
    if path is None:
        pytest.skip(
            "no program `chromium`: apt-get install chromium, or name it in NANOCP_CHROMIUM"
        )
    return path


@pytest.fixture(scope="module")
def service():
    with hash_service(instance_factory="harness.services.hash_members:build_slow") as service:
        yield service


@contextlib.contextmanager
def requests_running(service):
    """Run a request on all four instances and three on one each; their ids, the long one first.

    They run for 9 seconds at least, so a test opens its browser before.
    """
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


@pytest.fixture
def running(service):
    with requests_running(service) as request_ids:
        yield request_ids


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
        "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ]  # fmt: skip
    command = [chromium, *flags, *options, "--dump-dom", url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
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
        and len({re.search(r"--colour: ([^;]+)", part["style"])[1] for part in shares}) == 1
    )
    assert sum("home" in part["class"] for part in shares) == 1, "one of them is its MoE binding"
    assert all("picked" in part["class"] for part in shares), (
        "the address picks it, as a click does"
    )
    written = [int(re.search(r"--written: (\d+)%", part["style"])[1]) for part in shares]
    assert max(written) == 100 and min(written) < 100, "the prompt is there, 1,700 tokens will come"
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
            chromium, f"http://{service.metrics_address}/cluster", option, f"--screenshot={path}",
            "--window-size=900,600",
        )  # fmt: skip
        pictures.append(path.read_bytes())
    assert all(len(picture) > 10_000 for picture in pictures) and pictures[0] != pictures[1]


STATUS = "document.getElementById('status').textContent"


async def after_typing(url, folder, key):
    """The page's status before and after a key is typed into it and sent, and its address then."""
    async with opened(url, folder) as page:
        await page.until(f"![null, 'connecting'].includes({STATUS})")
        before = await page.evaluate(STATUS)
        await page.evaluate(
            f"document.getElementById('key_input').value = {key!r};"
            "document.querySelector('#key button').click()"
        )
        await page.until(f"{STATUS} !== {before!r}")
        return before, await page.evaluate(STATUS), await page.evaluate("location.href")


@pytest.mark.parametrize(("key", "after"), [("key", "live"), ("no key", "this key is not valid")])
def test_the_page_of_a_service_with_keys_shows_the_cluster_to_who_has_one(
    chromium, tmp_path, key, after
):
    (tmp_path / "operators").write_text("a key\n")
    config = configured(CONFIG, operator_keys_file=str(tmp_path / "operators"))
    with hash_service(config) as service:
        url = f"http://{service.metrics_address}/cluster"
        seen = asyncio.run(after_typing(url, tmp_path, key))
    assert seen == ("waiting for a key", after, url), "and the key is not in the address"


OVERLAPS = """(() => {
    const boxes = [...document.querySelectorAll(".card, .bar, .request, .number, .free")]
        .map(element => element.getBoundingClientRect()).filter(box => box.width);
    return boxes.filter(box => box.left < 0 || box.right > innerWidth).length;
})()"""
BAR_WIDTHS = """[...document.querySelectorAll(".bar")]
    .map(bar => bar.getBoundingClientRect().width)"""
COLUMNS = """new Set([...document.querySelectorAll(".card")].filter(card => card.offsetParent)
    .map(card => Math.round(card.getBoundingClientRect().left))).size"""


def test_a_phone_of_400_pixels_gets_one_column_with_long_bars(chromium, service, tmp_path):
    async def look():
        url = f"http://{service.metrics_address}/cluster"
        async with opened(url, tmp_path) as page:
            with requests_running(service):
                for width in (400, 700, 1280):
                    await page.resize(width)
                    await page.until("document.querySelectorAll('.bar').length === 4")
                    assert await page.evaluate(OVERLAPS) == 0, (
                        f"something is outside {width} pixels"
                    )
                    assert min(await page.evaluate(BAR_WIDTHS)) >= 200, f"at {width}"
                    assert (await page.evaluate(COLUMNS) == 1) == (width == 400)
                assert page.problems == []

    asyncio.run(look())


def test_a_request_is_picked_by_keyboard_and_keeps_the_focus(chromium, service, tmp_path):
    focused = "document.activeElement.dataset.request"

    async def look():
        url = f"http://{service.metrics_address}/cluster"
        async with opened(url, tmp_path) as page:
            with requests_running(service):
                await page.until("document.querySelector('#long .request')")
                await page.press("Tab", 9)
                while await page.evaluate(f"{focused} === undefined"):
                    await page.press("Tab", 9)
                request = await page.evaluate(focused)
                await page.press("Enter", 13)
                await page.until("!document.getElementById('timeline').hidden")
                assert f"request={request}" in await page.evaluate("location.hash")
                before = await page.evaluate("latest.tokens_per_s.length")
                await page.until(f"latest.tokens_per_s.length > {before + 1}")
                assert await page.evaluate(focused) == request, "the page was drawn again since"
                assert (
                    await page.evaluate("document.activeElement.getAttribute('aria-pressed')")
                    == "true"
                )
                await page.press("Escape", 27)
                await page.until("document.getElementById('timeline').hidden")

    asyncio.run(look())


def test_an_ended_request_says_what_took_its_time(chromium, service, tmp_path):
    with Client(service.address) as client:
        list(client.generate(prompt(70, 9), max_tokens=20))

    async def look():
        async with opened(f"http://{service.metrics_address}/cluster", tmp_path) as page:
            await page.until("document.querySelector('#ended .request')")
            line = await page.evaluate("document.querySelector('#ended .request').innerText")
            assert re.search(r"length, [\d.]+ s", line)
            assert re.search(r"decode [\d.]+ s, 20 tokens at [\d.]+ ms", line)

    asyncio.run(look())


def test_a_request_is_ended_by_a_button(chromium, service, tmp_path):
    async def look():
        async with opened(f"http://{service.metrics_address}/cluster", tmp_path) as page:
            with requests_running(service) as running:
                await page.until("document.querySelector('#long .request')")
                await page.evaluate("window.confirm = () => true")
                await page.evaluate("document.querySelector('#long .request').click()")
                await page.evaluate("document.getElementById('end').click()")
                await page.until(
                    "document.getElementById('end_note').textContent.includes('ended')"
                )
                open_ids = "latest.requests.map(one => one.id)"
                await page.until(f"!{open_ids}.includes({running[0]})")
                assert sorted(await page.evaluate(open_ids)) == sorted(running[1:])
                assert page.problems == []

    asyncio.run(look())


CUT = """[...document.querySelectorAll(".id")]
    .filter(name => name.offsetParent && name.scrollWidth > name.clientWidth).length"""


def test_names_are_whole_and_more_of_a_list_is_a_link(chromium, service, tmp_path):
    with Client(service.address) as client:
        for number in range(8):
            name = f"chatcmpl-{number:032x}"
            list(client.generate(prompt(70, number), max_tokens=2, request_id=name))

    async def look():
        async with opened(f"http://{service.metrics_address}/cluster", tmp_path) as page:
            lines = "document.querySelectorAll('#ended .request').length"
            await page.until(f"{lines} === 6")
            for width in (400, 1280):
                await page.resize(width)
                assert await page.evaluate(CUT) == 0
            text = await page.evaluate("document.querySelector('#ended .link').textContent")
            assert re.fullmatch(r"\d+ more", text)
            await page.evaluate("document.querySelector('#ended .link').click()")
            await page.until(f"{lines} === {6 + int(text.split()[0])}")
            assert await page.evaluate("document.querySelector('#ended .link')") is None

    asyncio.run(look())
