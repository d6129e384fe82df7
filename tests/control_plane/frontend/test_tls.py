"""TLS at both APIs: encrypted, and only for clients that show a certificate if they are asked."""

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.frontend import front_end
from control_plane.frontend.access import descriptors
from control_plane.frontend.access.tls import check_tls
from control_plane.frontend.http import server
from control_plane.frontend.http.served_model import ServedModel
from harness.exact.settings import configured
from harness.services.frontend_fakes import LIMITS, Service, make_config, running
from harness.services.service_recovery import until
from nanocp.cli.bench.target import Target
from nanocp.client import Client, Unavailable
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config

if shutil.which("openssl") is None:
    pytest.skip("no program `openssl`", allow_module_level=True)


MODEL = ServedModel("tiny", "c")


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """(key, certificate) files for 127.0.0.1, which vouch for themselves."""
    key, made = folder / f"{name}.key", folder / f"{name}.pem"
    subprocess.run(
        [*("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
         *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(key)),
         *("-out", str(made), "-addext", "subjectAltName=IP:127.0.0.1")],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return str(key), str(made)


@pytest.fixture(scope="module")
def server_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return certificate(tmp_path_factory.mktemp("server"), "server")


def with_tls(pair: tuple[str, str], **more: object) -> Config:
    return configured(make_config(), ssl_keyfile=pair[0], ssl_certfile=pair[1], **more)


def https(url: str, ca: str, **options: object) -> httpx.Response:
    context = ssl.create_default_context(cafile=ca)
    if "cert" in options:
        context.load_cert_chain(*reversed(options["cert"]))  # type: ignore[call-overload]
    return httpx.get(url.replace("http:", "https:") + "/v1/models", verify=context)


def test_both_apis_are_encrypted(server_pair):
    _, ca = server_pair
    with running(with_tls(server_pair), model=MODEL) as service:
        assert https(service.url, ca).json()["data"][0]["id"] == "tiny"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{service.url}/v1/models")
        with pytest.raises(httpx.ConnectError):  # The system does not know the certificate.
            httpx.get(service.url.replace("http:", "https:") + "/v1/models")
        with Client(service.address, ca=ca) as client:
            assert client.server_info().vocab_size == LIMITS.vocab_size
        for options in ({}, {"tls": True}):
            plain = Client(service.address, **options)  # type: ignore[arg-type]
            with plain as client, pytest.raises(Unavailable):
                client.server_info()
        with (
            Client(service.address) as client,
            pytest.raises(Unavailable, match="; if it has TLS, give --tls or --ca"),
        ):
            client.server_info()


def test_bench_trusts_the_certificates_that_it_is_given(server_pair):
    _, ca = server_pair

    async def asked(service: Service, file: Path | None) -> str:
        http = service.url.replace("http:", "https:")
        backend: Any = Target(base_url=http, ca=file).connect({})
        try:
            return str(await backend.first_model())
        finally:
            await backend.close()

    async def by_grpc(service: Service) -> int:
        port = int(service.address.rpartition(":")[2])
        backend: Any = Target(backend="grpc", port=port, ca=Path(ca)).connect({})
        try:
            return int((await backend._client.server_info()).vocab_size)
        finally:
            await backend.close()

    with running(with_tls(server_pair), model=MODEL) as service:
        assert asyncio.run(asked(service, Path(ca))) == "tiny"
        with pytest.raises(ValueError, match="no service answers"):
            asyncio.run(asked(service, None))
        assert asyncio.run(by_grpc(service)) == LIMITS.vocab_size
    with pytest.raises(ValueError, match="--ca /absent cannot be read"):
        asyncio.run(asked(service, Path("/absent")))


def test_clients_that_never_finish_a_handshake_keep_nobody_out(server_pair, monkeypatch):
    _, ca = server_pair
    config, most = configured(with_tls(server_pair), http_request_timeout_ms=2000), 5
    for module in (descriptors, server, front_end):
        monkeypatch.setattr(module, "max_connections", lambda *sections: most)

    def is_served(address: str) -> bool:
        try:
            with Client(address, ca=ca) as client:
                return client.server_info().vocab_size == LIMITS.vocab_size
        except Unavailable:
            return False

    with running(config, model=MODEL) as service, ExitStack() as stack:
        for address in (service.url.removeprefix("http://"), service.address):
            host, port = address.split(":")
            for _ in range(40):
                stack.enter_context(socket.create_connection((host, int(port))))
        assert https(service.url, ca).status_code == 200, "the oldest of them makes room"
        until(lambda: is_served(service.address))  # They are cut once their time is over.


def test_clients_must_show_a_certificate_if_the_service_asks(server_pair, tmp_path):
    known, ca = certificate(tmp_path, "known"), server_pair[1]
    config = with_tls(server_pair, ssl_ca_certs=known[1], ssl_cert_reqs=2)
    with running(config, model=MODEL) as service:
        assert https(service.url, ca, cert=known).status_code == 200
        with pytest.raises(httpx.HTTPError):
            https(service.url, ca)
        with pytest.raises(httpx.HTTPError):
            https(service.url, ca, cert=certificate(tmp_path, "stranger"))
        with Client(service.address, ca=ca) as client, pytest.raises(Unavailable):
            client.server_info()


def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path, caplog):
    """Connections that are open go on. Files that are no pair change nothing."""
    (tmp_path / "new").mkdir()
    pair, new = certificate(tmp_path, "server"), certificate(tmp_path / "new", "server")
    old_ca = shutil.copy(pair[1], tmp_path / "old.pem")
    with running(with_tls(pair), model=MODEL) as service:

        def knows(ca: str) -> tuple[bool, bool]:
            """Whether a new client of each API, who trusts this certificate, is answered."""
            with Client(service.address, ca=ca) as client:
                try:
                    by_grpc = bool(client.server_info())
                except Unavailable:
                    by_grpc = False
            try:
                return https(service.url, ca).is_success, by_grpc
            except httpx.ConnectError:
                return False, by_grpc

        with Client(service.address, ca=old_ca) as open_client:
            assert open_client.server_info()
            shutil.copy(new[0], pair[0])  # The key without its certificate.
            deadline = time.monotonic() + 60
            while "the former certificate stays" not in caplog.text:
                assert knows(old_ca) == (True, True) and time.monotonic() < deadline
            shutil.copy(new[1], pair[1])
            while knows(new[1]) != (True, True):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert knows(old_ca) == (False, False)
            assert open_client.server_info()


def test_files_that_cannot_be_used_are_named(server_pair, tmp_path, caplog):
    key, made = server_pair
    (tmp_path / "nothing.pem").write_text("nothing")
    for wrong in (
        {"ssl_keyfile": key, "ssl_certfile": str(tmp_path / "absent.pem")},
        {"ssl_keyfile": key, "ssl_certfile": str(tmp_path / "nothing.pem")},
        {"ssl_keyfile": certificate(tmp_path, "other")[0], "ssl_certfile": made},
    ):
        with pytest.raises(ValueError, match=r"ssl_certfile .* cannot be"):
            check_tls(ServiceConfig(**wrong))
    check_tls(ServiceConfig())
    Path(key).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        check_tls(ServiceConfig(ssl_keyfile=key, ssl_certfile=made))
    Path(key).chmod(0o600)
    assert "other users may read" in caplog.text
    with pytest.raises(ValueError, match="go together"):
        ServiceConfig(ssl_keyfile="a")
    with pytest.raises(ValueError, match="ssl_cert_reqs is 2"):
        ServiceConfig(ssl_cert_reqs=2)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
@pytest.mark.parametrize("content", [None, "no certificate\n"])
def test_a_file_that_cannot_be_used_is_named(server_pair, tmp_path, name, content):
    file = tmp_path / "a file"
    if content is not None:
        file.write_text(content)
    files = {"ssl_keyfile": server_pair[0], "ssl_certfile": server_pair[1]} | {name: str(file)}
    with pytest.raises(ValueError) as raised:
        check_tls(ServiceConfig(**files))
    said = str(raised.value)
    assert f"{name} {file}" in said
    assert ("cannot be read: No such file" in said) == (content is None), said


def test_files_that_are_no_pair_are_both_named(server_pair, tmp_path):
    key, _ = certificate(tmp_path, "other")
    with pytest.raises(ValueError, match="cannot be used together") as raised:
        check_tls(ServiceConfig(ssl_keyfile=key, ssl_certfile=server_pair[1]))
    assert key in str(raised.value) and server_pair[1] in str(raised.value)
