"""The status port with API keys: what it shows with a key, without one, and if it is public."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from control_plane.frontend.api_keys import ApiKeys
from control_plane.observe.status_server import DATA_PATHS, SEATS_PATH, StatusServer
from harness.hash_service import CONFIG, hash_service

KEY = {"Authorization": "Bearer a key"}
SNAPSHOT = b'{"num_running": 41}'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = StatusServer(CollectorRegistry(), lambda: SNAPSHOT, ApiKeys(("a key",)).admit)
    yield f"http://127.0.0.1:{server.serve('127.0.0.1', 0)}"
    server.close()


def test_data_needs_the_key(url: str) -> None:
    for path in (*DATA_PATHS, "/metrics/", "/%6Detrics", "/cluster/snapshot.json/"):
        for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "a key"}):
            answer = httpx.get(url + path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert "an API key is required" in answer.text and "41" not in answer.text
        assert httpx.get(url + path, headers=KEY).status_code == 200
    assert httpx.get(f"{url}/cluster/snapshot.json", headers=KEY).content == SNAPSHOT


def test_the_page_itself_holds_no_data_and_asks_for_the_key(url: str) -> None:
    page = httpx.get(f"{url}/cluster")
    assert page.status_code == 200 and 'id="key_input" type="password"' in page.text
    assert httpx.get(f"{url}/elsewhere").status_code == 404


def test_a_service_asks_for_its_keys_at_the_status_port_unless_it_is_public(tmp_path: Path) -> None:
    """Whether they are its own or a file's. Who changes seats needs one in any case."""
    (tmp_path / "keys").write_text("a key\n")
    of_file: dict[str, Any] = {"api_keys_file": str(tmp_path / "keys"), "public_status": True}
    own: dict[str, Any] = {"api_keys": ("a key",)}
    for options, code in ((own, 401), (of_file, 200)):
        keys = replace(CONFIG.service, **options)
        small = replace(CONFIG.cluster, num_instances=1)
        with hash_service(replace(CONFIG, cluster=small, service=keys)) as service:
            for address in (service.metrics_address, service.http_address):
                for path in DATA_PATHS:
                    url = f"http://{address}{path}"
                    assert httpx.get(url).status_code == code
                    assert httpx.get(url, headers=KEY).status_code == 200
            url = f"http://{service.http_address}/v1/models"
            assert httpx.get(url).status_code == 401
            assert httpx.get(url, headers=KEY).status_code == 200
            url = f"http://{service.metrics_address}{SEATS_PATH}"
            assert httpx.get(url).status_code == code
            assert httpx.post(url, json={"seats": [7]}).status_code == 401
            assert httpx.post(url, json={"seats": [7]}, headers=KEY).status_code == 400
