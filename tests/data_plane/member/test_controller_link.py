"""The stream to the controller, with real gRPC."""

import pytest

from data_plane.member.controller_link import ControllerLink, ControllerLost
from harness.member_fakes import LIMITS


def test_a_controller_that_does_not_answer_is_named(free_port):
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(
        ControllerLost, match=f"no controller answered at {address} within start_timeout_ms"
    ):
        ControllerLink(address, LIMITS)
