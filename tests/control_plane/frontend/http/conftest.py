"""A front end with the OpenAI API, its client, and threads that wait for answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from harness.services.frontend_fakes import Service, running
from harness.services.openai_service import MODEL, client_of


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=MODEL) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> OpenAI:
    return client_of(service)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool
