"""Loads of each instance as the plans decide them: rows, links, KV in flight."""

from __future__ import annotations

from collections import Counter

from nanocp.config.cluster import ClusterConfig
from nanocp.simulator.costs.cost import Loads
from nanocp.values.plan import InstanceLoad, InstancePlan, Transfer
from nanocp.values.table import NUM_LANES
from nanocp.values.table_changes import RouteChange, TableChanges

_NO_CHANGES = TableChanges()


class DecidedLoads:
    """Loads kept up to date by the changes alone."""

    def __init__(self, cluster: ClusterConfig) -> None:
        num = cluster.num_instances
        self._cluster = cluster
        self._rows: list[list[int]] = [[] for _ in range(NUM_LANES * num)]
        """Lane * number of instances + instance -> rows."""
        self.instance_of: dict[int, int] = {}
        self._num_slots = [[0] * num for _ in range(NUM_LANES * num)]
        self._sent, self._received = [0] * num, [0] * num
        self._sent_between, self._received_between = [0] * num, [0] * num
        self._arriving: dict[int, Counter[int]] = {}
        self._arriving_tokens = [0] * num

    def transfer_started(self, transfer: Transfer) -> Counter[int]:
        """Count the tokens in flight. Returns instance -> tokens.

        The scheduler's loads include them at once; rows read them once they have arrived.
        """
        tokens: Counter[int] = Counter()
        for target in transfer.targets:
            tokens[target.instance] += target.num_tokens_of(transfer.num_tokens)
        under_way = Counter(tokens)
        if transfer.source is not None:  # until then they are read where they were
            under_way[transfer.source] -= sum(tokens.values())
        assert transfer.request_id not in self._arriving, "two transfers of one request"
        for instance, count in under_way.items():
            self._arriving_tokens[instance] += count
        self._arriving[transfer.request_id] = under_way
        return tokens

    def window_sent(self, plans: tuple[InstancePlan, ...]) -> tuple[list[int], list[int]]:
        """Apply a window's changes; returns the requests whose row joined, and whose row left."""
        lost: set[int] = set()
        won: dict[int, int] = {}
        for plan in plans:
            changes = plan.changes
            if changes == _NO_CHANGES:  # no row of it starts or ends
                continue
            if changes.rows:
                self._change_rows(plan, lost, won)
            for change in changes.q_route:
                self._change_slot(plan.instance, change)
            for start in plan.starts:
                self._has_arrived(start.request_id)
            for request_id in (*plan.ends, *(clear.request_id for clear in changes.cleared)):
                self._has_arrived(request_id)
        left = [request_id for request_id in lost if request_id not in won]
        for request_id in left:
            del self.instance_of[request_id]
        joined = [request_id for request_id in won if request_id not in self.instance_of]
        self.instance_of.update(won)
        return joined, sorted(left)

    def request_ended(self, request_id: int) -> None:
        """Forget a request that was ended or preempted, maybe before its row started."""
        self._has_arrived(request_id)

    def loads(self, decided: tuple[InstanceLoad, ...]) -> Loads:
        """Loads of the last window sent, from the scheduler's loads after it."""
        num = self._cluster.num_instances
        num_rows = list(map(len, self._rows))
        rows = [sum(num_rows[instance::num]) for instance in range(num)]
        return Loads(
            kv_tokens=[
                load.kv_tokens - under_way
                for load, under_way in zip(decided, self._arriving_tokens, strict=True)
            ],
            rows=rows,
            attention_rows=[
                own + received for own, received in zip(rows, self._received, strict=True)
            ],
            links=list(map(max, self._sent, self._received)),
            links_between_nodes=list(map(max, self._sent_between, self._received_between)),
        )

    def _has_arrived(self, request_id: int) -> None:
        for instance, count in self._arriving.pop(request_id, {}).items():
            self._arriving_tokens[instance] -= count

    def _change_rows(self, plan: InstancePlan, lost: set[int], won: dict[int, int]) -> None:
        before = set()
        after = set()
        for row, request_id, lane in plan.changes.rows:
            rows = self._rows[lane * self._cluster.num_instances + plan.instance]
            if row < len(rows):
                before.add(rows[row])
            if request_id is None:
                rows.pop()
                continue
            after.add(request_id)
            if row < len(rows):
                rows[row] = request_id
            else:
                rows.append(request_id)
        # The last row of a dense list moves into a hole: it is in both sets.
        lost.update(before - after)
        won.update(dict.fromkeys(sorted(after - before), plan.instance))

    def _change_slot(self, sender: int, change: RouteChange) -> None:
        receiver, slot, request_id, lane = change
        num_slots = self._num_slots[lane * self._cluster.num_instances + sender]
        if request_id is None:
            delta = -1
        elif slot == num_slots[receiver]:
            delta = 1
        else:
            return
        num_slots[receiver] += delta
        self._sent[sender] += delta
        self._received[receiver] += delta
        if self._cluster.node_of(sender) != self._cluster.node_of(receiver):
            self._sent_between[sender] += delta
            self._received_between[receiver] += delta
