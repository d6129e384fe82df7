"""Other people's inputs, each whole, streamed and over gRPC (README.md)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from harness.services.cases import ask, cases, wrong
from harness.services.tale_models import MODELS, tale_service
from nanocp.serve.service import Service

CASES = cases()


@pytest.fixture(scope="module")
def service_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Service]]:
    """The service of a model, started when a case first needs it."""
    started: dict[str, Service] = {}
    with ExitStack() as stack:

        def get(name: str) -> Service:
            if name not in started:
                folder = tmp_path_factory.mktemp("models")
                started[name] = stack.enter_context(tale_service(name, folder))
            return started[name]

        yield get


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}-{way}") for case in CASES for way in case.ways],
)
def test_the_answer_is_right(service_of, case, way):
    service = service_of(case.model)
    answer = ask(case, way, service.http_address, service.address)
    found = wrong(case, way, answer)
    assert not found, "\n".join([*found, f"{case.source}", f"{answer.body!r:.2000}"])


def test_a_case_says_who_says_so():
    for case in CASES:
        assert case.source and case.model in MODELS and case.expected, case.name
