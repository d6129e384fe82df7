"""What others are told of this machine, and where a service of several nodes puts its instances."""

import socket

import pytest

from control_plane.ports.addresses import advertised_host, is_loopback, join
from nanocp.cli.serve.serve import _groups, _place
from nanocp.config.cluster import ClusterConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config


@pytest.mark.parametrize(("service", "advertised"), [
    (ServiceConfig(), "127.0.0.1"),
    (ServiceConfig(host="10.1.2.3"), "10.1.2.3"),
    (ServiceConfig(host="10.1.2.3", advertised_host="gateway.example"), "gateway.example"),
    (ServiceConfig(host="0.0.0.0", advertised_host="10.9.9.9"), "10.9.9.9"),
])  # fmt: skip
def test_a_host_that_is_named_is_told(service, advertised):
    assert advertised_host(service) == advertised


def test_on_every_interface_the_address_of_the_route_is_told_not_that_of_the_name(monkeypatch):
    """Debian: the machine's name stands for 127.0.1.1."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            assert advertised_host(ServiceConfig(host="0.0.0.0")) == "127.0.1.1", (
                "without a route nothing is better"
            )
            return
        assert (
            advertised_host(ServiceConfig(host="0.0.0.0")) == probe.getsockname()[0] != "127.0.1.1"
        )


@pytest.mark.parametrize(("host", "answer"), [
    ("127.0.0.1", True),
    ("127.0.1.1", True),
    ("::1", True),
    ("localhost", True),
    ("10.0.0.1", False),
    ("a.b", False),
])  # fmt: skip
def test_only_this_machine_reaches_a_loopback_address(host, answer):
    assert is_loopback(host) is answer


def test_an_ipv6_address_has_brackets():
    assert (join("::1", 5), join("10.0.0.1", 5)) == ("[::1]:5", "10.0.0.1:5")


def config(host, num_instances=5, per_node=2):
    cluster = ClusterConfig(num_instances=num_instances, instances_per_node=per_node)
    return Config(cluster=cluster, service=ServiceConfig(host=host))


def test_instances_of_a_node_of_the_plan_are_one_group():
    groups = [[str(member) for member in group] for group in _groups(config("10.0.0.1"))]
    assert groups == [["instance 0", "instance 1"], ["instance 2", "instance 3"], ["instance 4"]]
    assert _groups(config("127.0.0.1")) == (), "nobody elsewhere could dial the controller"


def test_serve_says_where_the_instances_are():
    for host, expected in (
        ("10.0.0.1", "actors of the Ray at auto (3 nodes, 2 at most on each)"),
        (
            "127.0.0.1",
            "actors of the Ray at auto, on this node (--host 127.0.0.1 is a loopback address)",
        ),
    ):
        assert _place(config(host), "auto", True, _groups(config(host))) == expected
