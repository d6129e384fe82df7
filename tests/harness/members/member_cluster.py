"""The members of a small cluster, with values for all that is around them: no loop, no clock."""

from prometheus_client import CollectorRegistry

from control_plane.coordinator.members.output import KillProcess
from control_plane.observe.metrics.recovery import RecoveryMetrics
from control_plane.shell.controller import members_of
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.values.members import PREFILL, Hello, Member, Peer, Ready

FIRST, SECOND = Member("instance", 0), Member("instance", 1)
LIMITS = LimitsConfig()
NO_RECOVERY = LimitsConfig(recovery_timeout_ms=0)


class Facts:
    """What the coordinator may ask."""

    newest_ticket = 17
    has_windows = False
    obstacle = ""

    def obstacle_to_more(self, num_instances):
        return self.obstacle if num_instances else ""


class Cluster:
    """The members of two instances. Every call of them is settled: what it lets out is kept here.

    Processes that are to end or to start do so at once, and say nothing.
    """

    def __init__(self, limits=LIMITS, **prefill):
        config = Config(
            cluster=ClusterConfig(num_instances=2), prefill=PrefillConfig(**prefill), limits=limits
        )
        self.facts = Facts()
        self.registry = CollectorRegistry()
        self.members = members_of(config, RecoveryMetrics(self.registry), None, self.facts)
        self.progress = []
        self.members.start.progress = self.progress.append
        self.now_us = 0
        self.sent, self.events, self.reports, self.says = {}, [], [], []
        self.commands, self.error = [], None

    def settle(self):
        self.members.deadlines.tick(self.now_us)
        while output := self.members.output.take():
            for member, message in output.sends:
                self.sent.setdefault(member, []).append(message)
            self.events += output.events
            self.says += [line.text for line in output.says]
            for command in output.processes:
                is_kill = isinstance(command, KillProcess)
                self.commands += [command] if is_kill or not self.error else []
                self.members.replacements.done(command, None if is_kill else self.error)
            self.members.deadlines.tick(self.now_us)

    def after(self, result):
        """Settle what a call of the members has led to."""
        self.settle()
        return result

    def __getattr__(self, name):
        """A method of the members, which is settled."""
        method = getattr(self.members, name)
        return lambda *arguments: self.after(method(*arguments))

    def wait(self, ms):
        """So much time passes, and what is overdue on the way happens then."""
        end_us = self.now_us + 1000 * ms
        while (due_us := self.members.deadlines.next_us) is not None and due_us <= end_us:
            self.now_us = due_us
            self.settle()
        self.now_us = end_us
        self.settle()

    def attach(self, *members, kept=None, experts=()):
        for member in members:
            self.sent.pop(member, None)  # It has another stream.
            peer = Peer(node=str(member))
            hello = Hello(member.instance, peer, kept, experts=experts)
            self.after(self.members.attach(member, hello))

    def say(self, member, term, said):
        if self.after(self.members.heard(member, said, term)):
            self.reports.append((member, said))

    def ready(self, *members, term=1):
        for member in members:
            self.say(member, term, Ready(("process 9",) if member == PREFILL else ()))

    def regroup(self):
        self.after(self.members.terms.end())

    def settled(self):
        self.after(self.members.changes.settled())

    def blame(self, instances, message):
        self.after(self.members.suspicion.blame(instances, message))

    def undo(self):
        self.after(self.members.changes.undo())

    def sent_to(self, member):
        """The messages that went down since the last call."""
        return self.sent.pop(member, [])

    def kinds(self, member):
        return [sent and type(sent.message) for sent in self.sent_to(member)]

    def starts(self):
        """(member, number, term) of every process that was started."""
        commands = [each for each in self.commands if not isinstance(each, KillProcess)]
        return [(each.member, each.number, each.term) for each in commands]

    def until_replaced(self, member, number, term):
        """Time passes until this process is started."""
        for _ in range(10):
            if (member, number, term) in self.starts():
                return
            self.wait(250)
        raise AssertionError(f"{member} is not replaced: {self.commands}")


def running(limits=LIMITS, **prefill):
    """A cluster whose members are all ready, and have read all that they were sent."""
    cluster = Cluster(limits, **prefill)
    cluster.attach(*cluster.members.expected)
    cluster.ready(*cluster.members.expected)
    cluster.members.start.wait()
    cluster.sent.clear()
    cluster.events.clear()
    return cluster


def one_may_serve():
    """A running cluster of two instances, one of which can serve alone."""
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    return cluster
