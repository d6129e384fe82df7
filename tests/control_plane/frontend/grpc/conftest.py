"""A front end with the gRPC API."""

from collections.abc import Iterator

import pytest

from harness.services.frontend_fakes import Service, running


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running() as service:
        yield service
