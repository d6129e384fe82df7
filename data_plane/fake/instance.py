"""An instance without torch: a token is wrong exactly if KV was lost, doubled, stale or
overwritten.

Enters: plans, tickets and pages, through the door (door.py). Leaves: events and tokens. It
exchanges as the real instance does: Q and partials by routes, dispatch and combine with everybody,
hand-offs by mailbox. Does not know: tensors, sockets. A step is a generator that yields what it
waits for, so that a test can interleave the steps of a whole cluster in one thread; `begin` and
`run_step` drive it by waiting.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

import numpy as np

from data_plane.fake import model as hash_model
from data_plane.fake.model import HashModel
from data_plane.instance.interface import Polled, ResyncNeeded
from data_plane.instance.page_transfers import PageMover, PageSource, PageTransfers
from data_plane.instance.rows import Row, finished_of
from data_plane.transport.exchange import Channel, Exchange, Field, RegionLayout, row_bytes
from nanocp.config import ClusterConfig, Config
from nanocp.plan import PAGE_SIZE, InstancePlan, WindowDone
from nanocp.sampling import Token
from nanocp.table import InstanceTable
from nanocp.wire.convert import decode_hand_off_state, encode_hand_off_state, max_hand_off_bytes

Awaited = tuple[Channel, int, int]
"""(channel, source, epoch) that a step waits for."""

Result = TypeVar("Result")


def region_layout(cluster: ClusterConfig) -> RegionLayout:
    """The fields of one region for each channel; the counterpart of transport.regions."""
    links, rows, hand_offs = (
        cluster.bounds.max_links,
        cluster.bounds.max_rows,
        cluster.bounds.max_hand_offs,
    )
    return {
        Channel.Q: (
            Field("position", "int64", (links,)),
            Field("live", "bool", (links,)),
            Field("query", "uint64", (links,)),
            Field("appends", "bool", (links,)),
        ),
        Channel.RES: (Field("partial", "uint64", (links,)),),
        Channel.DISPATCH: (
            Field("count", "int32", (1,)),
            Field("local_expert", "int32", (rows,)),
            Field("hidden", "uint64", (rows,)),
        ),
        Channel.COMBINE: (Field("output", "uint64", (rows,)),),
        Channel.MAILBOX: (
            Field("count", "int32", (1,)),
            Field("length", "int32", (hand_offs,)),
            Field("payload", "uint8", (hand_offs, max_hand_off_bytes(cluster.max_model_len))),
        ),
    }


class HashInstance(PageTransfers):
    """See door.Instance for the contract of each call."""

    def __init__(
        self,
        config: Config,
        instance: int,
        model: HashModel,
        exchange: Exchange,
        ring: PageSource | None = None,
        moves: PageMover | None = None,
    ) -> None:
        super().__init__(instance, config.cluster.num_instances, ring, moves)
        self.choices = ["hash model: no weights, no attention backend"]
        self._config = config
        self._num_instances = config.cluster.num_instances
        self._model = model
        self._exchange = exchange
        self._scratch = config.cluster.num_frames
        self._kv = np.zeros((model.num_layers, config.cluster.num_frames + 1, PAGE_SIZE), np.uint64)
        self._rows: dict[int, Row] = {}
        self._plan: InstancePlan | None = None
        self._steps_done = 0
        self._num_tokens = 0
        self._row_bytes = row_bytes(region_layout(config.cluster))
        self._sent_bytes = dict.fromkeys(Channel, 0)
        self._began_ns = self._waited_ns = 0
        self._finished: list[Token] = []
        self._tokens: list[Token] = []

    def connect(self) -> int:
        """Attach to every peer. Returns the number of prepared graphs: none."""
        self._exchange.connect(self._config.limits.start_timeout_ms)
        if self._moves is not None:
            self._moves.connect()
        return 0

    # --- the door

    def begin(self, plan: InstancePlan) -> ResyncNeeded | None:
        """See door.Instance.begin."""
        return self._drive(self.begin_steps(plan))

    def run_step(self) -> None:
        """See door.Instance.run_step."""
        self._drive(self.step())

    def _drive(self, steps: Generator[Awaited, None, Result]) -> Result:
        while True:
            try:
                awaited = next(steps)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            self._exchange.wait(*awaited)

    def poll(self) -> Polled:
        """See door.Instance.poll."""
        polled = Polled(tuple(self._events), tuple(self._tokens))
        self._events.clear()
        self._tokens.clear()
        return polled

    def close(self) -> None:
        """See door.Instance.close."""
        self._exchange.close()
        if self._moves is not None:
            self._moves.close()

    # --- the edge of a window

    def begin_steps(self, plan: InstancePlan) -> Generator[Awaited, None, ResyncNeeded | None]:
        """`begin` as a generator."""
        if plan.is_full:
            self._table = InstanceTable(self._instance, self._num_instances)
        elif self._table.digest != plan.base_digest:
            return ResyncNeeded(
                plan.window, f"base digest {self._table.digest:#x}, not {plan.base_digest:#x}"
            )
        self._table.apply(plan.changes)
        if self._table.digest != plan.result_digest:
            return ResyncNeeded(
                plan.window, f"result digest {self._table.digest:#x}, not {plan.result_digest:#x}"
            )
        for request_id in plan.ends:
            del self._rows[request_id]
        self._post_hand_offs(plan)
        yield from self._await_hand_offs(plan)
        for start in plan.starts:
            self._rows[start.request_id] = Row.start(start)
        self._plan, self._steps_done = plan, 0
        self._num_tokens, self._sent_bytes = 0, dict.fromkeys(Channel, 0)
        self._began_ns, self._waited_ns = time.perf_counter_ns(), self._exchange.waited_ns
        return None

    def _post_hand_offs(self, plan: InstancePlan) -> None:
        for peer in sorted({peer for _, peer in plan.hand_offs_out}):
            states = [
                self._rows.pop(request_id).handed_over()
                for request_id, to in plan.hand_offs_out
                if to == peer
            ]
            region = self._exchange.outgoing(Channel.MAILBOX, peer, plan.window)
            region["count"][0] = len(states)
            for number, payload in enumerate(map(encode_hand_off_state, states)):
                region["length"][number] = len(payload)
                region["payload"][number, : len(payload)] = np.frombuffer(payload, np.uint8)
            self._exchange.put(Channel.MAILBOX, peer, plan.window, len(states))

    def _await_hand_offs(self, plan: InstancePlan) -> Generator[Awaited, None, None]:
        for peer in sorted({peer for _, peer in plan.hand_offs_in}):
            region = yield from self._await(Channel.MAILBOX, peer, plan.window)
            for number in range(int(region["count"][0])):
                payload = region["payload"][number, : region["length"][number]].tobytes()
                row = Row.received(decode_hand_off_state(payload))
                self._rows[row.request_id] = row

    def _await(
        self, channel: Channel, source: int, epoch: int
    ) -> Generator[Awaited, None, dict[str, np.ndarray]]:
        while not self._exchange.arrived(channel, source, epoch):
            yield channel, source, epoch
        return self._exchange.wait(channel, source, epoch)

    # --- a step (design of the real one: attention where the KV is, merge and experts at the MoE
    # binding)

    def step(self) -> Generator[Awaited, None, None]:
        """`run_step` as a generator."""
        plan = self._plan
        assert plan is not None, "a step outside a window"
        step = plan.first_step + self._steps_done
        rows = [self._rows[request_id] for request_id in self._table.rows]
        hidden = [hash_model.embed(row.token, row.position) for row in rows]
        num_moe_layers = self._model.num_layers - self._model.num_dense_layers
        for layer in range(self._model.num_layers):
            yield from self._attention(layer, step * self._model.num_layers + layer, rows, hidden)
            moe_layer = layer - self._model.num_dense_layers
            if moe_layer >= 0:
                yield from self._moe(step * num_moe_layers + moe_layer, rows, hidden)
            else:
                hidden[:] = [hash_model.after_mlp(value, 0) for value in hidden]
        self._commit(rows, hidden)
        self._steps_done += 1
        if self._steps_done == plan.num_steps:
            self._events.append(self._window_done(plan, len(rows)))
            self._finished.clear()
            self._plan = None

    def _window_done(self, plan: InstancePlan, num_rows: int) -> WindowDone:
        num_received, sent = sum(map(len, self._table.res_route)), self._sent_bytes
        return WindowDone(
            self._instance,
            plan.window,
            finished_of(self._finished),
            step_us=(time.perf_counter_ns() - self._began_ns) // plan.num_steps // 1000,
            exchange_us=(self._exchange.waited_ns - self._waited_ns) // plan.num_steps // 1000,
            num_tokens=self._num_tokens,
            num_rows=num_rows,
            num_received=num_received,
            # No graph is captured: every shape is a bucket of its own.
            bucket_rows=num_rows,
            bucket_received=num_received,
            route_bytes=sent[Channel.Q] + sent[Channel.RES],
            expert_bytes=sent[Channel.DISPATCH] + sent[Channel.COMBINE],
        )

    def _put(self, channel: Channel, peer: int, epoch: int, num_rows: int) -> None:
        self._exchange.put(channel, peer, epoch, num_rows)
        self._sent_bytes[channel] += num_rows * self._row_bytes[channel]

    def _attention(
        self, layer: int, epoch: int, rows: list[Row], hidden: list[int]
    ) -> Generator[Awaited, None, None]:
        self._send_queries(epoch, rows, hidden)
        merged = []
        for row, query in zip(rows, hidden, strict=True):
            holds = self._holder(row) == self._instance
            merged.append(
                self._attend(layer, row.request_id, row.position, query, holds and not row.finished)
            )
        for peer, requests in enumerate(self._table.res_route):
            if requests:
                yield from self._answer(layer, epoch, peer, requests)
        row_of = {row.request_id: index for index, row in enumerate(rows)}
        for peer, requests in enumerate(self._table.q_route):
            if requests:
                region = yield from self._await(Channel.RES, peer, epoch)
                for request_id, value in zip(requests, region["partial"].tolist(), strict=False):
                    merged[row_of[request_id]] += value
        hidden[:] = [hash_model.after_attention(*pair) for pair in zip(hidden, merged, strict=True)]

    def _send_queries(self, epoch: int, rows: list[Row], hidden: list[int]) -> None:
        row_of = {row.request_id: index for index, row in enumerate(rows)}
        for peer, requests in enumerate(self._table.q_route):
            if not requests:
                continue
            region = self._exchange.outgoing(Channel.Q, peer, epoch)
            for slot, request_id in enumerate(requests):
                row = rows[row_of[request_id]]
                region["position"][slot] = row.position
                region["live"][slot] = not row.finished
                region["query"][slot] = hidden[row_of[request_id]]
                region["appends"][slot] = self._holder(row) == peer
            self._put(Channel.Q, peer, epoch, len(requests))

    def _answer(
        self, layer: int, epoch: int, peer: int, requests: list[int]
    ) -> Generator[Awaited, None, None]:
        """Attention for the rows that a peer sent; slot s of its region is the request of slot s of
        the Res-route."""
        region = yield from self._await(Channel.Q, peer, epoch)
        fields = (region[name].tolist() for name in ("position", "live", "query", "appends"))
        out = self._exchange.outgoing(Channel.RES, peer, epoch)["partial"]
        for slot, (request_id, position, live, query, appends) in enumerate(
            zip(requests, *fields, strict=False)
        ):
            out[slot] = self._attend(layer, request_id, position, query, appends and live)
        self._put(Channel.RES, peer, epoch, len(requests))

    def _holder(self, row: Row) -> int:
        return self._table.holder(row.request_id, row.position // PAGE_SIZE)

    def _attend(self, layer: int, request_id: int, position: int, query: int, appends: bool) -> int:
        """Append the new token's KV (to the scratch frame if it is not to be kept), then attend
        over local frames."""
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

    def _moe(
        self, epoch: int, rows: list[Row], hidden: list[int]
    ) -> Generator[Awaited, None, None]:
        """Live rows to the owners of their experts and back. Everybody sends to everybody, zero
        rows too (docs/protocol.md, equal epochs)."""
        sent: list[list[int]] = [[] for _ in range(self._num_instances)]
        for index, row in enumerate(rows):
            if not row.finished:
                sent[self._owner(hash_model.gate(hidden[index]))].append(index)
        peers = [peer for peer in range(self._num_instances) if peer != self._instance]
        for peer in peers:
            region = self._exchange.outgoing(Channel.DISPATCH, peer, epoch)
            region["count"][0] = len(sent[peer])
            for slot, index in enumerate(sent[peer]):
                region["local_expert"][slot] = hash_model.gate(hidden[index]) - self._first_expert(
                    peer
                )
                region["hidden"][slot] = hidden[index]
            self._put(Channel.DISPATCH, peer, epoch, len(sent[peer]))
        outputs = [0] * len(rows)
        for index in sent[self._instance]:
            outputs[index] = hash_model.expert(hash_model.gate(hidden[index]), hidden[index])
        for peer in peers:
            yield from self._run_experts(epoch, peer)
        for peer in peers:
            region = yield from self._await(Channel.COMBINE, peer, epoch)
            for index, output in zip(sent[peer], region["output"].tolist(), strict=False):
                outputs[index] = output
        hidden[:] = [hash_model.after_mlp(*pair) for pair in zip(hidden, outputs, strict=True)]

    def _run_experts(self, epoch: int, peer: int) -> Generator[Awaited, None, None]:
        region = yield from self._await(Channel.DISPATCH, peer, epoch)
        out = self._exchange.outgoing(Channel.COMBINE, peer, epoch)["output"]
        first_expert = self._first_expert(self._instance)
        num_experts = self._first_expert(self._instance + 1) - first_expert
        for slot in range(int(region["count"][0])):
            # Only its own experts exist here: a row sent to the wrong owner gets some other
            # expert's output.
            expert_id = first_expert + int(region["local_expert"][slot]) % num_experts
            out[slot] = hash_model.expert(expert_id, int(region["hidden"][slot]))
        self._put(Channel.COMBINE, peer, epoch, int(region["count"][0]))

    def _owner(self, expert_id: int) -> int:
        return expert_id * self._num_instances // hash_model.NUM_EXPERTS

    def _first_expert(self, instance: int) -> int:
        return -(-instance * hash_model.NUM_EXPERTS // self._num_instances)

    def _commit(self, rows: list[Row], hidden: list[int]) -> None:
        for row, value in zip(rows, hidden, strict=True):
            if not row.finished:
                token_id = hash_model.sample(
                    value, row.params, row.output_ids, self._model.vocab_size
                )
                logprobs = hash_model.logprobs(value, token_id, row.params, self._model.vocab_size)
                token = row.commit(token_id, logprobs)
                self._tokens.append(token)
                self._num_tokens += 1
                if token.finish_reason is not None:
                    self._finished.append(token)

    # --- transfers

    def _read_page(self, frame: int) -> np.ndarray:
        return self._kv[:, frame].reshape(-1).copy()

    def _write_page(self, frame: int, num_tokens: int, payload: np.ndarray) -> None:
        self._kv[:, frame] = payload.view(np.uint64).reshape(self._model.num_layers, PAGE_SIZE)
