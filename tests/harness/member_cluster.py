"""The members of a small cluster, with fakes for all that is around them."""

import asyncio
import functools

from prometheus_client import CollectorRegistry

from control_plane.coordinator.members.members import Members
from control_plane.observe.recovery_metrics import RecoveryMetrics
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.values.members import PREFILL, Hello, Member, Peer, Ready

FIRST, SECOND = Member("instance", 0), Member("instance", 1)
LIMITS = LimitsConfig()
NO_RECOVERY = LimitsConfig(recovery_timeout_ms=0)


def in_a_loop(test):
    """Run the test as the controller's event loop would."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return run


class Events:
    """Remembers what it is called for."""

    newest_ticket = 17
    has_windows = False

    def __init__(self):
        self.reports, self.calls = [], []

    def reported(self, member, report):
        self.reports.append((member, report))

    def prefill_arrived(self):
        self.calls.append("prefill arrived")

    def took_over(self, kept):
        self.calls.append(("took over", kept))

    def instance_lost(self, instance):
        self.calls.append(("lost", instance))

    def seats_wanted(self, seats):
        self.calls.append(("seats wanted", seats))

    def term_ended(self):
        self.calls.append("ended")

    def term_began(self, term):
        self.calls.append(("began", term))

    def cluster_lost(self, message):
        self.calls.append(("cluster lost", message))

    def prefill_lost(self):
        self.calls.append("prefill lost")


class Processes:
    """Remembers which processes are to end and to start; they end at once, or not at all."""

    def __init__(self):
        self.calls = []
        self.error = None
        self.obstacle = ""

    def obstacle_to_more(self, num_instances):
        return self.obstacle if num_instances else ""

    def kill(self, member):
        self.calls.append(("kill", str(member)))

    def start(self, member, number, term):
        if self.error:
            raise self.error
        self.calls.append(("start", str(member), number, term))


class Cluster:
    """The members of two instances, and all that is around them."""

    def __init__(self, limits=LIMITS, **prefill):
        config = Config(
            cluster=ClusterConfig(num_instances=2), prefill=PrefillConfig(**prefill), limits=limits
        )
        self.events, self.processes = Events(), Processes()
        self.registry = CollectorRegistry()
        self.metrics = RecoveryMetrics(self.registry)
        self.progress, self.loaded = [], []
        self.members = Members(config, self.events, self.processes, self.metrics)
        self.members.watch(
            self.progress.append, lambda member, percent: self.loaded.append((member, percent))
        )
        self.streams = {}

    def attach(self, *members, kept=None):
        for member in members:
            hello = Hello(member.instance, Peer(node=str(member)), kept)
            self.streams[member] = self.members.attach(member, hello)

    def say(self, member, term, said):
        self.members.received(member, said, term)

    def ready(self, *members, term=1):
        for member in members:
            self.say(member, term, Ready(("process 9",) if member == PREFILL else ()))

    def kinds(self, member):
        return [
            message and message.WhichOneof("message") for message in sent_to(self.streams[member])
        ]

    async def until(self, condition):
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not happen")

    async def until_replaced(self, member, number, term):
        await self.until(lambda: ("start", str(member), number, term) in self.processes.calls)


def sent_to(stream):
    """The messages down that wait in the stream."""
    queue = stream._messages
    return [queue.get_nowait() for _ in range(queue.qsize())]


def running(limits=LIMITS, **prefill):
    """A cluster whose members are all ready, and have read all that they were sent."""
    cluster = Cluster(limits, **prefill)
    cluster.attach(*cluster.members.expected)
    cluster.ready(*cluster.members.expected)
    cluster.members.start.wait()
    for stream in cluster.streams.values():
        sent_to(stream)
    cluster.events.calls.clear()
    return cluster
