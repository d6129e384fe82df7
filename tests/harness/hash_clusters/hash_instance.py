"""A fake instance whose tokens are wrong exactly if KV was lost, doubled, stale or overwritten.

Only a step's arithmetic is fake. What happens between steps is the code that serves
(instance/window_edge.py, instance/page_transfers.py), and a step exchanges what a real one does:
queries and partials by routes, dispatch and combine with every peer. A step is a generator that
yields what it awaits, so that a test can interleave the steps of a whole cluster in one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from random import Random

import numpy as np

from data_plane.graph.buckets import Bucket
from data_plane.instance.interface import PageMover, PageSource, TermEnds, TermStart, state_page
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
from harness.hash_clusters import hash_model
from harness.hash_clusters.expert_moves import HashSlots
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.hash_state_pool import HashStates
from nanocp.config.whole import Config
from nanocp.overlap.ops import Ops
from nanocp.overlap.policies.orders import Sequential
from nanocp.values.experts import home_table
from nanocp.values.plan import PAGE_SIZE, Transfer
from nanocp.values.sampling import TokenLogprobs

_position = attrgetter("position")


def region_layout(config: Config) -> RegionLayout:
    """The fields of one region for each channel; the counterpart of transport.regions."""
    cluster = config.cluster
    links, rows = cluster.bounds.max_links, cluster.bounds.max_rows
    layout = {
        Channel.Q: (Field("position", "int64", (links,)),
                    Field("live", "bool", (links,)),
                    Field("query", "uint64", (links,)),
                    Field("appends", "bool", (links,))),
        Channel.RES: (Field("partial", "uint64", (links,)),),
        Channel.DISPATCH: (Field("count", "int32", (1,)),
                           Field("number", "int32", (rows,)),
                           Field("hidden", "uint64", (rows,))),
        Channel.COMBINE: (Field("output", "uint64", (rows,)),),
        **mailbox_layout(cluster),
    }  # fmt: skip
    return in_two_lanes(layout) if config.scheduler.has_lanes else layout


@dataclass(slots=True)
class _Input:
    """What a step row takes through the layers."""

    row: Row
    position: int
    live: bool
    hidden: int


class HashFrames:
    """The frames of one instance: entries of KV, and states."""

    def __init__(self, config: Config, model: HashModel) -> None:
        self.states = HashStates(config.cluster, model) if model.linear_layers else None
        self._cluster = config.cluster
        num_layers = model.num_layers + (config.scheduler.num_drafts > 0)
        num_layers -= len(model.linear_layers)
        self.kv = np.zeros((num_layers, config.cluster.num_frames + 1, PAGE_SIZE), np.uint64)

    def read(self, frame: int) -> np.ndarray:
        """See PageFrames."""
        if (state := state_page(self.states, self._cluster, frame)) is not None:
            return state.copy().view(np.uint8)
        return self.kv[:, frame].reshape(-1).copy().view(np.uint8)

    def write(self, frame: int, num_tokens: int, payload: np.ndarray, offset: int) -> None:
        """See PageFrames."""
        if (state := state_page(self.states, self._cluster, frame)) is not None:
            state[:] = payload.view(np.uint64)
            return
        kv, first = payload.view(np.uint64).reshape(-1, PAGE_SIZE), offset // 8 // PAGE_SIZE
        self.kv[first : first + len(kv), frame] = kv

    def make(self, transfer: Transfer) -> bool:
        """All pages are sent."""
        return False


class AnyOrder(Sequential):
    """A random priority among lanes that can go on; at times it would let them wait."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def next_round(self, ops: Ops) -> None:
        """Execute any of what is ready, or nothing."""
        ready = [op for lane in range(ops.num_micro_batches) for op in ops.get_ready_ops(lane)]
        if self._random.random() < 0.8:
            ops.execute((self._random.choice(ready),))


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
        self._frames = frames = HashFrames(config, model)
        seed = config.scheduler.chaos_seed + exchange.instance
        self.slots = HashSlots(exchange.instance, model.num_moe_layers, seed)
        super().__init__(config, ends, frames, dict.fromkeys(Channel, 0), self.slots, new_ends)
        self.selected = ["hash model: no weights, no attention backend"]
        self._model = model
        self.token_after: Callable[[Row], int] = lambda row: 0
        """What the row samples after its drafts, which no instance knows: for drafts."""
        self.draft_percent = 60
        """How many drafts of 100 are right."""
        self.drafted: list[tuple[int, int, int]] = []
        """(request, output tokens, hidden value) of each first draft."""
        self.order = AnyOrder(seed)
        self._num_attentions, self._num_mixtures = [0, 0], [0, 0]
        """By lane, in this term: epochs of the exchange."""
        page_bytes = 8 * PAGE_SIZE * len(frames.kv)
        if (
            slots := Slots.of(config.scheduler, config.kv_offload.file_dir, page_bytes)
        ) is not None:
            self.pages.copier = PageCopier(self._instance, slots, frames.read, frames.write)
        self._scratch = config.cluster.num_frames
        self._row_bytes = row_bytes(region_layout(config))
        self.slots.place(home_table(hash_model.NUM_EXPERTS, config.cluster.num_instances))

    def join(self, ends: TermEnds, start: TermStart) -> None:
        """See interface.Instance.join."""
        super().join(ends, start)
        self._num_attentions, self._num_mixtures = [0, 0], [0, 0]

    def run_step(self) -> None:
        """See interface.Instance.run_step."""
        run_waiting(self.step(), self._exchange)

    def step(self) -> Waiting[None]:
        """`run_step` as a generator."""
        with self._one_step() as window:
            inputs = [
                [
                    _Input(
                        row,
                        row.position + offset,
                        offset < row.num_live(window.plan.num_drafts),
                        hash_model.embed(row.step_token(offset), row.position + offset),
                    )
                    for row in lane.rows
                    for offset in range(window.width)
                ]
                for lane in window.lanes
            ]
            yield from self._run_layers(window, inputs, range(self._model.num_layers))
            self._commit_step(
                window,
                lambda rows, offset: [
                    self._sample(each.row, inputs[each.lane][each.place + offset].hidden)
                    for each in rows
                ],
            )
            if window.plan.num_drafts:
                yield from self._draft(window, inputs)

    def _draft(self, window: Window, inputs: list[list[_Input]]) -> Waiting[None]:
        """Run the MTP layer where the next token is known by now, then at one position each."""
        mtp = range(self._model.num_layers, self._model.num_layers + 1)
        for each in chain(*inputs):
            row, num_ahead = each.row, each.row.position - each.position
            each.live = each.live and not row.finished and num_ahead > 0
            if each.live:
                next_token = row.output_ids[len(row.output_ids) - num_ahead]
                each.hidden = hash_model.mtp_input(each.hidden, next_token, each.position)
        for turn in range(window.plan.num_drafts):
            yield from self._run_layers(window, inputs, mtp)
            for of_lane in inputs:
                for begin in range(0, len(of_lane), window.width):
                    self._take_draft(of_lane[begin : begin + window.width], turn)

    def _take_draft(self, of_row: list[_Input], turn: int) -> None:
        """Keep a row's draft; its next turn begins where this one came to."""
        last = max((each for each in of_row if each.live), key=_position, default=None)
        for each in of_row:
            each.live = False
        if last is None:
            return
        row, size = last.row, self._model.vocab_size
        if turn == 0:
            self.drafted.append((row.request_id, len(row.output_ids), last.hidden))
        token = hash_model.draft(last.hidden, self.token_after(row), self.draft_percent, size)
        row.drafts.append(token)
        position = last.position + 1
        hidden = hash_model.mtp_input(last.hidden, token, position)
        of_row[0] = _Input(row, position, turn + 1 < row.num_left, hidden)

    def _run_layers(
        self, window: Window, inputs: list[list[_Input]], layers: range
    ) -> Waiting[None]:
        lanes = [
            self._layers(lane, of_lane, layers)
            for lane, of_lane in zip(window.lanes, inputs, strict=True)
        ]
        yield from in_turns(lanes, lambda put: self._exchange.arrived(*put), self.order)

    def _layers(self, lane: WindowLane, inputs: list[_Input], layers: range) -> Iterator[Awaited]:
        """One lane's layers over its step rows."""
        for layer in layers:
            if layer in self._model.linear_layers:
                self._linear_attention(layer, inputs)
            else:
                self._num_attentions[lane.number] += 1
                yield from self._attention(layer, self._num_attentions[lane.number], lane, inputs)
            if layer >= self._model.num_dense_layers:
                self._num_mixtures[lane.number] += 1
                number = layer - self._model.num_dense_layers
                yield from self._moe(number, self._num_mixtures[lane.number], lane, inputs)
            else:
                for each in inputs:
                    each.hidden = hash_model.after_mlp(each.hidden, 0)

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
        self, layer: int, epoch: int, lane: WindowLane, inputs: list[_Input]
    ) -> Iterator[Awaited]:
        by_request: dict[int, list[_Input]] = {}
        for each in inputs:
            by_request.setdefault(each.row.request_id, []).append(each)
        self._send_queries(epoch, lane, by_request)
        merged = {
            request_id: [self._attend_own(layer, each) for each in of_row]
            for request_id, of_row in by_request.items()
        }
        for peer, requests in enumerate(lane.res_route):
            if requests:
                yield from self._answer(layer, epoch, lane, peer)
        for peer, requests in enumerate(lane.q_route):
            if requests:
                awaited = Awaited(Channel.RES.in_lane(lane.number), peer, epoch)
                yield awaited
                partials = iter(self._region(awaited)["partial"].tolist())
                for request_id in requests:
                    merged[request_id] = [own + next(partials) for own in merged[request_id]]
        for request_id, of_row in by_request.items():
            for each, value in zip(of_row, merged[request_id], strict=True):
                each.hidden = hash_model.after_attention(each.hidden, value)

    def _linear_attention(self, layer: int, inputs: list[_Input]) -> None:
        """A row's state is at its MoE binding: no peer has part in it."""
        assert self._frames.states is not None
        for each in inputs:
            if each.live:
                frame = self._carry_frame(each.row.request_id)
                record = hash_model.kv_entry(layer, each.position, each.hidden)
                after = self._frames.states.step(frame, layer, each.position, record)
                each.hidden = hash_model.after_attention(
                    each.hidden, hash_model.partial(each.hidden, after)
                )

    def _attend_own(self, layer: int, each: _Input) -> int:
        appends = each.live and self._holder(each) == self._instance
        return self._attend(layer, each.row.request_id, each.position, each.hidden, appends)

    def _send_queries(
        self, epoch: int, lane: WindowLane, by_request: dict[int, list[_Input]]
    ) -> None:
        for peer, requests in enumerate(lane.q_route):
            if not requests:
                continue
            region = self._exchange.outgoing(Channel.Q.in_lane(lane.number), peer, epoch)
            sent = [each for request_id in requests for each in by_request[request_id]]
            for slot, each in enumerate(sent):
                region["position"][slot] = each.position
                region["live"][slot] = each.live
                region["query"][slot] = each.hidden
                region["appends"][slot] = self._holder(each) == peer
            self._put(Channel.Q, lane, peer, epoch, len(sent))

    def _answer(self, layer: int, epoch: int, lane: WindowLane, peer: int) -> Iterator[Awaited]:
        """Attend for the rows that a peer sent, and return the partials."""
        assert self._window is not None
        requests = [each for each in lane.res_route[peer] for _ in range(self._window.width)]
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

    def _holder(self, each: _Input) -> int:
        return self._table.now.holder(each.row.request_id, each.position // PAGE_SIZE)

    def _attend(self, layer: int, request_id: int, position: int, query: int, appends: bool) -> int:
        """Append the new token's KV, then attend over the frames of this instance.

        appends: whether the KV is kept; else it goes to the scratch frame.
        """
        frames = self._table.now.frames(request_id)
        page, offset = divmod(position, PAGE_SIZE)
        kv = self._frames.kv[layer - sum(linear < layer for linear in self._model.linear_layers)]
        kv[frames[page] if appends else self._scratch, offset] = hash_model.kv_entry(
            layer, position, query
        )
        full = [frame for number, frame in frames.items() if number < page]
        total = int(kv[full].sum()) if full else 0
        if page in frames:
            total += int(kv[frames[page], : offset + 1].sum())
        return hash_model.partial(query, total)

    def _moe(
        self, layer: int, epoch: int, lane: WindowLane, inputs: list[_Input]
    ) -> Iterator[Awaited]:
        """Send the live rows to the slots of their experts and await what they return.

        Every instance sends to every peer, zero rows too (protocol.md, equal epochs).
        """
        hidden = [each.hidden for each in inputs]
        sent: list[list[int]] = [[] for _ in range(self._config.cluster.num_instances)]
        numbers = {
            index: self.slots.names[layer](hash_model.gate(each.hidden), index + self._instance)
            for index, each in enumerate(inputs)
            if each.live
        }
        for index, number in numbers.items():
            sent[number // self.slots.num_slots].append(index)
        peers = self._peers
        for peer in peers:
            region = self._exchange.outgoing(Channel.DISPATCH.in_lane(lane.number), peer, epoch)
            region["count"][0] = len(sent[peer])
            for slot, index in enumerate(sent[peer]):
                region["number"][slot] = numbers[index]
                region["hidden"][slot] = hidden[index]
            self._put(Channel.DISPATCH, lane, peer, epoch, len(sent[peer]))
        outputs = [0] * len(inputs)
        for index in sent[self._instance]:
            outputs[index] = self._run_expert(layer, numbers[index], hidden[index])
        for peer in peers:
            yield from self._run_experts(layer, epoch, lane, peer)
        for peer in peers:
            awaited = Awaited(Channel.COMBINE.in_lane(lane.number), peer, epoch)
            yield awaited
            region = self._region(awaited)
            for index, output in zip(sent[peer], region["output"].tolist(), strict=False):
                outputs[index] = output
        for each, output in zip(inputs, outputs, strict=True):
            each.hidden = hash_model.after_mlp(each.hidden, output)

    def _run_expert(self, layer: int, number: int, hidden: int) -> int:
        """Only this instance's experts exist here: a row at a wrong slot gets another's output."""
        return hash_model.expert(self.slots.visit(layer, number), hidden)

    def _run_experts(
        self, layer: int, epoch: int, lane: WindowLane, peer: int
    ) -> Iterator[Awaited]:
        awaited = Awaited(Channel.DISPATCH.in_lane(lane.number), peer, epoch)
        yield awaited
        region = self._region(awaited)
        combine = Channel.COMBINE.in_lane(lane.number)
        out = self._exchange.outgoing(combine, peer, epoch)["output"]
        for slot in range(int(region["count"][0])):
            number, hidden = int(region["number"][slot]), int(region["hidden"][slot])
            out[slot] = self._run_expert(layer, number, hidden)
        self._put(Channel.COMBINE, lane, peer, epoch, int(region["count"][0]))

    def _sample(self, row: Row, hidden: int) -> tuple[int, TokenLogprobs | None]:
        size = self._model.vocab_size
        token_id = hash_model.sample(hidden, row.params, row.output_ids, size)
        return token_id, hash_model.logprobs(hidden, token_id, row.params, size)
