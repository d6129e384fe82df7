"""The cost model: step times from the rows, KV tokens and links of each instance.

A layer is attention with exchange, then dispatch, expert GEMMs and combine; all wait for the
slowest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from nanocp.config.cluster import ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.simulator.costs.cluster_file import ClusterFile, Costs
from nanocp.values.plan import PAGE_SIZE

_PARTS_OF_FRAMES = (64, 16, 4, 1)
"""Shares of used frames."""
_NUM_CACHED = 4096


@dataclass(slots=True)
class Loads:
    """Loads of a step; lists by instance."""

    kv_tokens: list[int]
    """Read by attention."""
    rows: list[int]
    attention_rows: list[int]
    """Own and received."""
    links: list[int]
    """Rows sent to other instances, or rows received, whichever are more."""
    links_between_nodes: list[int]
    """Links that leave the node."""

    def part(self, part: float) -> Loads:
        """A part of each load, rounded up."""
        return Loads(
            *(
                [ceil(part * value - 1e-9) for value in each]
                for each in (
                    self.kv_tokens,
                    self.rows,
                    self.attention_rows,
                    self.links,
                    self.links_between_nodes,
                )
            )
        )

    def wide(self, width: int) -> Loads:
        """The loads with so many step rows for each row, and unchanged KV."""
        rows, attention_rows, links, between = (
            [width * value for value in each]
            for each in (self.rows, self.attention_rows, self.links, self.links_between_nodes)
        )
        return Loads(self.kv_tokens, rows, attention_rows, links, between)


class LayerTime(NamedTuple):
    """Microseconds of one MoE layer; the first three are of the slowest instance of that phase."""

    attention_us: float
    exchange_us: float
    other_us: float
    dispatch_combine_us: float
    expert_us: float


class StepTime(NamedTuple):
    """Time of a step and of its layers."""

    step_us: int
    layer: LayerTime
    two_lanes: bool = False
    """Rows run in two lanes; communication counts where it is not hidden."""
    by_schedule: bool = False
    num_drafts: int = 0
    """Drafts of each row; the layer excludes their MTP layers."""


class CostModel:
    """Step times of one cluster and one set of constants."""

    def __init__(
        self,
        file: ClusterFile,
        constants: str,
        num_shares: int = 1,
        wire_form: str = "",
        num_links: int = 0,
    ) -> None:
        """Read the costs of a cluster file.

        num_shares: equal instances per instance of the loads (the fluid bound). wire_form: by
        default the cheapest with num_links links within a node, by default those of the widest
        degree.
        """
        costs = file.costs_of(constants)
        self._file = file
        self._costs = costs
        self._model = file.model
        self._num_shares = num_shares
        self.once_us = costs.step_us
        self.interference = file.interference
        self._row_buckets = file.row_buckets
        self._attention_buckets = file.attention_row_buckets or file.row_buckets
        self._dispatch_us = self._us_per_row = 0.0
        if file.model.num_experts:
            self._dispatch_us = costs.dispatch_combine_us
            self._us_per_row = _dispatch_combine_us_per_row(costs, file.cluster.num_instances)
        forms = [wire_form] if wire_form else list(file.model.wire_forms)
        self._set_form(forms[0])
        if len(forms) > 1:
            num_links = num_links or max(1, max(file.cp_degrees) - 1)

            def cost_us(form: str) -> float:
                self._set_form(form)
                return self.exchange_us(num_links, 0, num_links)

            self._set_form(min(forms, key=cost_us))
        self._without_tokens = lru_cache(_NUM_CACHED)(self._first_phase_without_tokens)

    def _set_form(self, name: str) -> None:
        form, costs = self._model.wire_form(name), self._costs
        self.wire_form = name
        """Name of the wire form."""
        bytes_there, bytes_back = form.query_bytes, form.bytes_per_link - form.query_bytes
        us_per_byte = 1 / (1e3 * costs.exchange_gb_per_s_within_node)
        us_per_byte_between = 1 / (1e3 * costs.exchange_gb_per_s_between_nodes)
        self._us_per_query = bytes_there * us_per_byte
        self._us_per_query_between = bytes_there * us_per_byte_between
        self._us_per_partial = bytes_back * us_per_byte
        self._us_per_partial_between = bytes_back * us_per_byte_between
        self._projection_us = costs.gemm_us(form.projection_mb, 0)
        self._projection_us_per_row = costs.gemm_us(0, form.projection_mflop)

    def step(self, loads: Loads, num_queries: int = 1) -> StepTime:
        """The step's time: every layer waits for the slowest instance of each phase.

        num_queries: of each row, which read its KV once; loads count rows for each.
        """
        model, shares = self._model, self._num_shares
        first = self._slowest_first_phase(loads, num_queries)
        rows = max(loads.rows) / shares
        mean_rows = sum(loads.rows) / (len(loads.rows) * shares)
        pairs_rows = max(rows, self._file.expert_imbalance * mean_rows)
        dispatch_combine = self.dispatch_combine_us(pairs_rows)
        expert = self._file.layer_expert_us(self._costs, mean_rows)
        linear_us = self._other_us(rows) + rows * model.linear_us_per_row
        total = (
            model.num_full_layers * sum(first)
            + model.num_linear_layers * linear_us
            + model.num_moe_layers * (dispatch_combine + expert)
            + self.once_us
        )
        return StepTime(round(total), LayerTime(*first, dispatch_combine, expert))

    def step_with_drafts(self, loads: Loads, num_drafts: int) -> StepTime:
        """The step's time if each row has so many drafts.

        The MTP layer runs over all step rows, then over one of each row per further draft; each run
        pays the step's other costs, an upper bound.
        """
        if not num_drafts:
            return self.step(loads)
        width = 1 + num_drafts
        whole = self.step(loads.wide(width), width)
        turns_us = sum(whole.layer) + (num_drafts - 1) * sum(self.step(loads).layer)
        return whole._replace(
            step_us=whole.step_us + round(turns_us + num_drafts * self.once_us),
            num_drafts=num_drafts,
        )

    def draft_table(
        self, cluster: ClusterConfig, most: int
    ) -> tuple[tuple[int, int, int, int], ...]:
        """`scheduler.draft_table` for equally full instances without links."""
        table = []
        for rows in self._row_buckets:
            for part in _PARTS_OF_FRAMES:
                tokens = cluster.num_frames * PAGE_SIZE // part
                loads = Loads([tokens], [rows], [rows], [0], [0])
                one_us = self.step(loads).step_us
                for drafts in range(1, most + 1):
                    us = self.step_with_drafts(loads, drafts).step_us
                    table.append((rows, tokens, drafts, max(1, round(100 * us / one_us))))
        return tuple(table)

    def step_in_two_lanes(self, loads: Loads) -> StepTime:
        """The step's time with half of each instance's rows in each lane (overlap.md).

        Each lane reads the weights; what travels takes as long as the whole batch's, with a part of
        the GPU.
        """
        lane, whole = self.step(loads.part(0.5)).layer, self.step(loads).layer
        two_lanes_us = self.interference.two_lanes_us
        first_us, exchange_us = lane.attention_us + lane.other_us, lane.exchange_us
        dense_us = two_lanes_us(first_us, exchange_us, whole.exchange_us)
        compute_us = first_us + lane.expert_us
        network_us = exchange_us + lane.dispatch_combine_us
        both_us = whole.exchange_us + whole.dispatch_combine_us
        moe_us = two_lanes_us(compute_us, network_us, both_us)
        num_moe = self._model.num_moe_layers
        num_dense = self._model.num_layers - num_moe
        total_us = num_dense * dense_us + num_moe * moe_us + self.once_us
        seen = (moe_us - 2 * compute_us) / network_us if network_us else 0.0
        return StepTime(
            round(total_us),
            LayerTime(
                2 * lane.attention_us,
                seen * exchange_us,
                2 * lane.other_us,
                seen * lane.dispatch_combine_us,
                2 * lane.expert_us,
            ),
            two_lanes=True,
        )

    def lane_table(self, cluster: ClusterConfig) -> tuple[tuple[int, int, int, str], ...]:
        """`scheduler.lane_table` for equally full instances.

        By rows, without links and with a link for each row; frames fill as rows do.
        """
        tokens_per_row = cluster.num_frames * PAGE_SIZE // cluster.bounds.max_rows
        table = []
        for rows in self._row_buckets:
            for links in (0, rows):
                loads = Loads([rows * tokens_per_row], [rows], [rows + links], [links], [0])
                two_us, one_us = self.step_in_two_lanes(loads).step_us, self.step(loads).step_us
                percent = max(1, round(100 * two_us / one_us))
                table.append((rows, links, percent, "behind_first"))
        return tuple(table)

    def _slowest_first_phase(
        self, loads: Loads, num_queries: int = 1
    ) -> tuple[float, float, float]:
        costs, shares, without_tokens = self._costs, self._num_shares, self._without_tokens
        ps_per_token = costs.ps_per_token(num_queries)
        slowest, longest_us = (0.0, 0.0, 0.0), -1.0
        for kv_tokens, *rest in zip(
            loads.kv_tokens,
            loads.rows,
            loads.attention_rows,
            loads.links,
            loads.links_between_nodes,
            strict=True,
        ):
            rows_us, exchange_us, query_us, other_us = without_tokens(*rest)
            attention_us = 0.0
            if rest[1]:
                # As in `Costs.layer_attention_us`, in its order.
                tokens_us = ps_per_token * (kv_tokens / shares) / 1e6
                attention_us = costs.attention_us + tokens_us + rows_us
                exchange_us += max(0.0, query_us - attention_us * rest[0] / rest[1])
            total_us = attention_us + exchange_us + other_us
            if total_us > longest_us:
                slowest, longest_us = (attention_us, exchange_us, other_us), total_us
        return slowest

    def _first_phase_without_tokens(
        self, rows: int, attention_rows: int, links: int, links_between_nodes: int
    ) -> tuple[float, float, float, float]:
        """Microseconds of attention by rows, exchange less hidden time, Q's route, and the rest."""
        costs, shares = self._costs, self._num_shares
        padded = _padded(attention_rows / shares, self._attention_buckets)
        query_us, exchange_us = self._routes_us(links, links_between_nodes, attention_rows - rows)
        if not costs.hides_queries:
            query_us, exchange_us = 0.0, query_us + exchange_us
        rows_us = costs.attention_ns_per_row * padded / 1e3
        return rows_us, exchange_us, query_us, self._other_us(rows / shares)

    def attention_us(self, kv_tokens: float, attention_rows: float, num_queries: int = 1) -> float:
        """Attention over the instance's tokens by its rows, padded to their bucket."""
        if not attention_rows:
            return 0.0
        return self._costs.layer_attention_us(
            kv_tokens, _padded(attention_rows, self._attention_buckets), num_queries
        )

    def exchange_us(
        self, num_links: int, num_between_nodes: int, num_received: int, own_us: float = inf
    ) -> float:
        """Microseconds that both routes and received rows add; 0 without links.

        own_us: attention of own rows, which hides Q's route in the engine's order.
        """
        query_us, rest_us = self._routes_us(num_links, num_between_nodes, num_received)
        hidden_us = own_us if self._costs.hides_queries else 0.0
        return max(0.0, query_us - hidden_us) + rest_us

    def _routes_us(
        self, num_links: int, num_between_nodes: int, num_received: int
    ) -> tuple[float, float]:
        """Microseconds of Q's route, and of the rest of an exchange."""
        if not num_links:
            return 0.0, 0.0
        costs = self._costs
        hop_us = (costs.exchange_us + bool(num_between_nodes) * costs.exchange_us_between_nodes) / 2
        num_near = num_links - num_between_nodes
        query_us = hop_us + num_near * self._us_per_query
        rest_us = hop_us + num_near * self._us_per_partial
        query_us += num_between_nodes * self._us_per_query_between
        rest_us += num_between_nodes * self._us_per_partial_between
        if num_received:
            rest_us += self._projection_us + self._projection_us_per_row * num_received
            rest_us += costs.hides_queries * costs.attention_us
        return query_us, rest_us

    def dispatch_combine_us(self, rows: float) -> float:
        """Dispatch and combine of an instance with `rows` rows; 0 for a dense model."""
        return self._dispatch_us + self._us_per_row * rows

    def in_tokens(self, num_drafts: int = 0) -> CostConfig:
        """Weights of cost_aware: costs in KV tokens of attention, and ingest in nanoseconds.

        num_drafts: of a row; each adds a row to links and MoE layers.
        """
        costs, width = self._costs, 1 + num_drafts
        link_us, far_link_us = self._us_per_partial, self._us_per_partial_between
        first_us, first_far_us = costs.exchange_us, costs.exchange_us_between_nodes
        if costs.hides_queries:
            first_us, first_far_us = first_us / 2 + costs.attention_us, first_far_us / 2
        else:
            link_us, far_link_us = (
                link_us + self._us_per_query,
                far_link_us + self._us_per_query_between,
            )
        link_us = width * (link_us + self._projection_us_per_row)
        far_link_us = width * (far_link_us + self._projection_us_per_row)
        us_per_token = max(costs.ps_per_token(width), 1e-3) / 1e6
        return CostConfig(
            exchange_tokens=round((first_us + self._projection_us) / us_per_token),
            exchange_tokens_between_nodes=round(first_far_us / us_per_token),
            link_tokens=round(link_us / us_per_token),
            link_tokens_between_nodes=round(far_link_us / us_per_token),
            dispatch_tokens_per_row=round(width * self._us_per_row / us_per_token),
            ingest_ns_per_token=round(self._file.ingest_ns_per_token),
        )

    def _other_us(self, rows: float) -> float:
        if not rows:
            return self._costs.other_us
        return (
            self._costs.other_us
            + self._costs.other_ns_per_row * _padded(rows, self._row_buckets) / 1e3
        )


def profile_cp_degrees(
    model: CostModel, degrees: Sequence[int], max_len: int, num_drafts: int = 0
) -> tuple[tuple[int, int], ...]:
    """(length, degree) buckets of 4.2.2: each degree is that of least attention and exchange.

    The sweep has one request, split within a node. The last bucket ends above max_len. num_drafts:
    of the request in each step.
    """
    width = 1 + num_drafts

    def best(length: int) -> int:
        return min(degrees, key=lambda degree: (_alone_us(model, length, degree, width), degree))

    buckets: list[tuple[int, int]] = []
    degree = best(1024)
    for length in range(2048, max_len + 1, 1024):
        if best(length) != degree:
            buckets.append((length, degree))
            degree = best(length)
    return (*buckets, (max_len + 1, degree))


def _alone_us(model: CostModel, length: int, degree: int, width: int) -> float:
    attention_us = model.attention_us(length / degree, width, width)
    return attention_us + model.exchange_us(width * (degree - 1), 0, width, attention_us)


def _dispatch_combine_us_per_row(costs: Costs, ep_size: int) -> float:
    points = costs.dispatch_combine_us_at_128_rows
    sizes = [size for size, _ in points]
    upper = min(bisect_left(sizes, ep_size), len(points) - 1)
    lower = max(upper - 1, 0) if sizes[upper] > ep_size else upper
    (low_size, low_us), (high_size, high_us) = points[lower], points[upper]
    share = (ep_size - low_size) / (high_size - low_size) if high_size > low_size else 0.0
    return max(0.0, low_us + share * (high_us - low_us) - costs.dispatch_combine_us) / 128


def _padded(rows: float, buckets: tuple[int, ...]) -> float:
    index = bisect_left(buckets, rows)
    return buckets[index] if index < len(buckets) else rows
