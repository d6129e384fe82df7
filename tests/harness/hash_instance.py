"""A fake instance whose tokens are wrong exactly if KV was lost, doubled, stale or overwritten.

Enters: plans, tickets and pages, through the instance's interface. Leaves: events and tokens. Does
not know: tensors, sockets.

Only a step's arithmetic is fake. What happens between steps is the code that serves
(instance/window_edge.py, instance/page_transfers.py), and a step exchanges what a real one does:
queries and partials by routes, dispatch and combine with every peer. A step is a generator that
yields what it awaits, so that a test can interleave the steps of a whole cluster in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from data_plane.graph.buckets import Bucket
from data_plane.instance.interface import PageMover, PageSource, TermEnds
from data_plane.instance.lanes import Waiting, WindowLane, in_turns, run_waiting
from data_plane.instance.rows import Row
from data_plane.instance.window_edge import Window, WindowEdge
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.slots import Slots
from data_plane.transport.exchange import (
    Awaited,
    Channel,
    Exchange,
    Field,
    RegionLayout,
    in_two_lanes,
    row_bytes,
)
from data_plane.transport.mailbox import mailbox_layout
from harness import hash_model
from harness.hash_model import HashModel
from nanocp.config.whole import Config
from nanocp.values.experts import ExpertTable, home_table
from nanocp.values.plan import PAGE_SIZE


def region_layout(config: Config) -> RegionLayout:
    """The fields of one region for each channel; the counterpart of transport.regions."""
    cluster = config.cluster
    links, rows = cluster.bounds.max_links, cluster.bounds.max_rows
    layout = {
        Channel.Q: (
            Field("position", "int64", (links,)),
            Field("live", "bool", (links,)),
            Field("query", "uint64", (links,)),
            Field("appends", "bool", (links,)),
        ),
        Channel.RES: (Field("partial", "uint64", (links,)),),
        Channel.DISPATCH: (
            Field("count", "int32", (1,)),
            Field("expert_slot", "int32", (rows,)),
            Field("hidden", "uint64", (rows,)),
        ),
        Channel.COMBINE: (Field("output", "uint64", (rows,)),),
        **mailbox_layout(cluster),
    }
    return in_two_lanes(layout) if config.scheduler.has_lanes else layout


class HashInstance(WindowEdge):
    """An instance with a HashModel; instance.interface.Instance has the contract of each call."""

    def __init__(
        self,
        config: Config,
        model: HashModel,
        exchange: Exchange,
        rings: Sequence[PageSource],
        moves: PageMover,
        new_ends: Callable[[], TermEnds] | None = None,
    ) -> None:
        """new_ends: see WindowEdge."""
        ends = TermEnds(exchange, rings, moves)
        super().__init__(config, ends, dict.fromkeys(Channel, 0), new_ends)
        self.selected = ["hash model: no weights, no attention backend"]
        self._model = model
        page_bytes = 8 * PAGE_SIZE * model.num_layers
        if (slots := Slots.of(config, page_bytes)) is not None:
            self.copier = PageCopier(self._instance, slots, self._read_page, self._write_page)
        self._scratch = config.cluster.num_frames
        self._kv = np.zeros((model.num_layers, config.cluster.num_frames + 1, PAGE_SIZE), np.uint64)
        self._row_bytes = row_bytes(region_layout(config))
        self.place_experts(home_table(hash_model.NUM_EXPERTS, config.cluster.num_instances))

    def place_experts(self, table: ExpertTable) -> None:
        """See WindowEdge.place_experts; nothing is loaded."""
        self._experts = table
        self._expert_in = table.at(self._instance)

    def run_step(self) -> None:
        """See interface.Instance.run_step."""
        run_waiting(self.step(), self._exchange)

    def step(self) -> Waiting[None]:
        """`run_step` as a generator.

        Attention runs where the KV is. The MoE binding merges the partials and sends the row to its
        experts.
        """
        with self._one_step() as window:
            step = window.plan.first_step + window.steps_done
            hidden = [
                [hash_model.embed(row.token, row.position) for row in lane.rows]
                for lane in window.lanes
            ]
            layers = [
                self._layers(step, lane, values)
                for lane, values in zip(window.lanes, hidden, strict=True)
            ]
            yield from in_turns(layers, lambda put: self._exchange.arrived(*put))
            for lane, values in zip(window.lanes, hidden, strict=True):
                self._sample(window, lane.rows, values)

    def _layers(self, step: int, lane: WindowLane, hidden: list[int]) -> Iterator[Awaited]:
        """One lane's layers; hidden: of its rows, in place."""
        num_moe_layers = self._model.num_layers - self._model.num_dense_layers
        for layer in range(self._model.num_layers):
            epoch = step * self._model.num_layers + layer
            yield from self._attention(layer, epoch, lane, hidden)
            moe_layer = layer - self._model.num_dense_layers
            if moe_layer >= 0:
                yield from self._moe(step * num_moe_layers + moe_layer, lane, hidden)
            else:
                hidden[:] = [hash_model.after_mlp(value, 0) for value in hidden]

    def _region(self, awaited: Awaited) -> dict[str, np.ndarray]:
        """The region that was awaited; the step went on because it is here."""
        return self._exchange.wait(*awaited)

    def _bucket(self, window: Window) -> Bucket:
        """No graph is captured: every shape is a bucket of its own."""
        return Bucket(window.num_rows, window.num_received)

    def _put(
        self, channel: Channel, lane: WindowLane, peer: int, epoch: int, num_rows: int
    ) -> None:
        self._exchange.put(channel.in_lane(lane.number), peer, epoch, num_rows)
        self._sent_bytes[channel] += num_rows * self._row_bytes[channel]

    def _attention(
        self, layer: int, epoch: int, lane: WindowLane, hidden: list[int]
    ) -> Iterator[Awaited]:
        self._send_queries(epoch, lane, hidden)
        merged = []
        for row, query in zip(lane.rows, hidden, strict=True):
            holds = self._holder(row) == self._instance
            merged.append(
                self._attend(layer, row.request_id, row.position, query, holds and not row.finished)
            )
        for peer, requests in enumerate(lane.res_route):
            if requests:
                yield from self._answer(layer, epoch, lane, peer)
        row_of = {row.request_id: index for index, row in enumerate(lane.rows)}
        for peer, requests in enumerate(lane.q_route):
            if requests:
                awaited = Awaited(Channel.RES.in_lane(lane.number), peer, epoch)
                yield awaited
                region = self._region(awaited)
                for request_id, value in zip(requests, region["partial"].tolist(), strict=False):
                    merged[row_of[request_id]] += value
        hidden[:] = [hash_model.after_attention(*pair) for pair in zip(hidden, merged, strict=True)]

    def _send_queries(self, epoch: int, lane: WindowLane, hidden: list[int]) -> None:
        rows = lane.rows
        row_of = {row.request_id: index for index, row in enumerate(rows)}
        for peer, requests in enumerate(lane.q_route):
            if not requests:
                continue
            region = self._exchange.outgoing(Channel.Q.in_lane(lane.number), peer, epoch)
            for slot, request_id in enumerate(requests):
                row = rows[row_of[request_id]]
                region["position"][slot] = row.position
                region["live"][slot] = not row.finished
                region["query"][slot] = hidden[row_of[request_id]]
                region["appends"][slot] = self._holder(row) == peer
            self._put(Channel.Q, lane, peer, epoch, len(requests))

    def _answer(self, layer: int, epoch: int, lane: WindowLane, peer: int) -> Iterator[Awaited]:
        """Attend for the rows that a peer sent, and return the partials.

        Slot s of the peer's region is the request in slot s of the Res-route.
        """
        requests = lane.res_route[peer]
        awaited = Awaited(Channel.Q.in_lane(lane.number), peer, epoch)
        yield awaited
        region = self._region(awaited)
        fields = (region[name].tolist() for name in ("position", "live", "query", "appends"))
        out = self._exchange.outgoing(Channel.RES.in_lane(lane.number), peer, epoch)["partial"]
        for slot, (request_id, position, live, query, appends) in enumerate(
            zip(requests, *fields, strict=False)
        ):
            out[slot] = self._attend(layer, request_id, position, query, appends and live)
        self._put(Channel.RES, lane, peer, epoch, len(requests))

    def _holder(self, row: Row) -> int:
        return self._table.holder(row.request_id, row.position // PAGE_SIZE)

    def _attend(self, layer: int, request_id: int, position: int, query: int, appends: bool) -> int:
        """Append the new token's KV, then attend over the frames of this instance.

        appends: whether the KV is kept; else it goes to the scratch frame.
        """
        frames = self._table.frames(request_id)
        page, offset = divmod(position, PAGE_SIZE)
        kv = self._kv[layer]
        kv[frames[page] if appends else self._scratch, offset] = hash_model.kv_entry(
            layer, position, query
        )
        full = [frame for number, frame in frames.items() if number < page]
        total = int(kv[full].sum()) if full else 0
        if page in frames:
            total += int(kv[frames[page], : offset + 1].sum())
        return hash_model.partial(query, total)

    def _moe(self, epoch: int, lane: WindowLane, hidden: list[int]) -> Iterator[Awaited]:
        """Send the live rows to their experts and await what they return.

        Every instance sends to every peer, zero rows too (protocol.md, equal epochs).
        """
        rows = lane.rows
        sent: list[list[int]] = [[] for _ in range(self._num_instances)]
        for index, row in enumerate(rows):
            if not row.finished:
                sent[self._experts.seats[hash_model.gate(hidden[index])]].append(index)
        peers = self._peers
        for peer in peers:
            region = self._exchange.outgoing(Channel.DISPATCH.in_lane(lane.number), peer, epoch)
            region["count"][0] = len(sent[peer])
            for slot, index in enumerate(sent[peer]):
                expert_id = hash_model.gate(hidden[index])
                region["expert_slot"][slot] = self._experts.slots[expert_id]
                region["hidden"][slot] = hidden[index]
            self._put(Channel.DISPATCH, lane, peer, epoch, len(sent[peer]))
        outputs = [0] * len(rows)
        for index in sent[self._instance]:
            outputs[index] = hash_model.expert(hash_model.gate(hidden[index]), hidden[index])
        for peer in peers:
            yield from self._run_experts(epoch, lane, peer)
        for peer in peers:
            awaited = Awaited(Channel.COMBINE.in_lane(lane.number), peer, epoch)
            yield awaited
            region = self._region(awaited)
            for index, output in zip(sent[peer], region["output"].tolist(), strict=False):
                outputs[index] = output
        hidden[:] = [hash_model.after_mlp(*pair) for pair in zip(hidden, outputs, strict=True)]

    def _run_experts(self, epoch: int, lane: WindowLane, peer: int) -> Iterator[Awaited]:
        awaited = Awaited(Channel.DISPATCH.in_lane(lane.number), peer, epoch)
        yield awaited
        region = self._region(awaited)
        combine = Channel.COMBINE.in_lane(lane.number)
        out = self._exchange.outgoing(combine, peer, epoch)["output"]
        for slot in range(int(region["count"][0])):
            # Only this instance's experts exist here: a row that came to the wrong place gets
            # another expert's output.
            expert_id = self._expert_in.get(int(region["expert_slot"][slot]), -1)
            out[slot] = hash_model.expert(expert_id, int(region["hidden"][slot]))
        self._put(Channel.COMBINE, lane, peer, epoch, int(region["count"][0]))

    def _sample(self, window: Window, rows: list[Row], hidden: list[int]) -> None:
        for row, value in zip(rows, hidden, strict=True):
            if not row.finished:
                token_id = hash_model.sample(
                    value, row.params, row.output_ids, self._model.vocab_size
                )
                logprobs = hash_model.logprobs(value, token_id, row.params, self._model.vocab_size)
                self._commit(window, row, token_id, logprobs)

    def _read_page(self, frame: int) -> np.ndarray:
        return self._kv[:, frame].reshape(-1).copy().view(np.uint8)

    def _write_page(self, frame: int, num_tokens: int, payload: np.ndarray, layers: slice) -> None:
        self._kv[layers, frame] = payload.view(np.uint64).reshape(-1, PAGE_SIZE)
