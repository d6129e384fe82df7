"""The loads that policies balance: rows, and tokens that attention reads."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.scheduler.state.request import PageMove, Request
from nanocp.values.plan import PAGE_SIZE


class ClusterLoads:
    """Loads of all instances and nodes."""

    def __init__(self, nodes: Sequence[range]) -> None:
        """nodes: the instances of each node, equally many but on the last."""
        num = nodes[-1].stop
        self._nodes, self._instances_per_node = nodes, len(nodes[0])
        self.step = 0
        """First step of the next window; tokens are counted as of this step."""
        self.num_falls = 0
        """Number of times a load fell. While this and the step stay the same, loads only rise."""
        self.num_rows = [0] * num
        """Rows decided for each instance, running or in transfer, but not parked."""
        self.node_rows = [0] * len(nodes)
        """Sums of `num_rows` by node."""
        self.arriving_tokens = [0] * num
        """KV tokens under way to each instance, under tickets that it has not confirmed."""
        self.weights = [0] * num
        """Extra rows and tokens that an instance counts; changed by `weigh`."""
        # A row appends one token each step. Instead of visiting every row each step, an instance
        # counts the rows that grow there: one growing since step s adds step - (s - 1) tokens.
        self._fixed_tokens = [0] * num
        self._growing_rows = [0] * num

    def kv_tokens(self, instance: int) -> int:
        """Return the tokens that its attention reads in the next step, with transfers."""
        return self._fixed_tokens[instance] + self._growing_rows[instance] * self.step

    def kv_tokens_on(self, node: range) -> int:
        """Return the sum of `kv_tokens` over a node's instances."""
        first, last = node.start, node.stop
        return sum(self._fixed_tokens[first:last]) + sum(self._growing_rows[first:last]) * self.step

    def weigh(self, instance: int, weight: int) -> None:
        """Add the weight to the instance's rows and tokens."""
        self.weights[instance] += weight
        self.num_rows[instance] += weight
        self._fixed_tokens[instance] += weight
        # A node counts as full only if all of its instances do.
        node = instance // self._instances_per_node
        if all(self.weights[each] for each in self._nodes[node] if each != instance):
            self.node_rows[node] += weight
        self.num_falls += 1

    def count_row(self, moe_binding: int, sign: int) -> None:
        """Count a row that comes (+1) or goes (-1)."""
        self.num_rows[moe_binding] += sign
        self.node_rows[moe_binding // self._instances_per_node] += sign

    def count_growing(self, request: Request, step: int, sign: int) -> None:
        """Count a row that appends to its tail from the step on (+1) or no longer (-1)."""
        holder = request.runs[request.tail].instance
        self._growing_rows[holder] += sign
        self._fixed_tokens[holder] -= sign * (step - 1)

    def jump(self, request: Request, num_tokens: int) -> None:
        """Count tokens that a growing row gained beyond one a step."""
        self._fixed_tokens[request.runs[request.tail].instance] += num_tokens

    def count_kv(self, request: Request, sign: int) -> None:
        """Count the tokens of a row that does not grow, at their present place."""
        for run in request.runs[: request.tail]:
            self._fixed_tokens[run.instance] += sign * run.num_pages * PAGE_SIZE
        tail = request.runs[request.tail]
        self._fixed_tokens[tail.instance] += sign * (request.position - tail.first_page * PAGE_SIZE)

    def count_move(self, move: PageMove, sign: int) -> None:
        """Count moving pages at their destination, and no longer at their source."""
        if move.is_stopped:
            return
        self._fixed_tokens[move.source] -= sign * move.num_pages * PAGE_SIZE
        self._fixed_tokens[move.destination] += sign * move.num_pages * PAGE_SIZE
