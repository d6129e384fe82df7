"""Members of a cluster without a model: HashInstances over real shared memory, and their prefill.

Light to import, since every process pays for it: no torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_plane.instance.interface import TermEnds
from data_plane.instance.window_edge import Sampler, Window
from data_plane.kv.page_ring import prefill_rings
from data_plane.kv.peer_rings import PeerRings
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from harness.hash_clusters.hash_instance import HashInstance, region_layout
from harness.hash_clusters.hash_model import HashModel
from nanocp.config.whole import Config
from nanocp.values.members import Resync
from nanocp.values.passes import PassPlan
from nanocp.values.plan import PAGE_SIZE, InstancePlan
from nanocp.values.sampling import PromptLogprobs, TokenLogprobs

if TYPE_CHECKING:
    from data_plane.model.weights import Progress

MODEL = HashModel()
WORDY = HashModel(vocab_size=300)
"""A model with as many tokens as the tests' tokenizer has."""


class SlowMember(HashInstance):
    """A step takes 5 ms at least, so that a request of 1,000 tokens outlasts what a test does."""

    def _commit_step(self, window: Window, sample: Sampler) -> None:
        time.sleep(0.005)
        super()._commit_step(window, sample)


class MortalMember(SlowMember):
    """An instance that a certain request ends in its first step."""

    POISON = 666
    """The request's seed."""

    def _commit_step(self, window: Window, sample: Sampler) -> None:
        if any(row.params.seed == self.POISON for lane in window.lanes for row in lane.rows):
            os._exit(9)
        super()._commit_step(window, sample)


class StoppingMember(SlowMember):
    """An instance that stops its process as a window begins in which its peers need it."""

    WINDOW = 20

    def begin(self, plan: InstancePlan) -> Resync | None:
        if plan.window == self.WINDOW:
            self._stop()
        return super().begin(plan)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class HangingMember(StoppingMember):
    """An instance whose decode thread hangs in that window, while its process lives and beats."""

    def _stop(self) -> None:
        threading.Event().wait()


class ForgetfulMember(HashInstance):
    """An instance that refuses two plans, as if its table had lost a change."""

    def begin(self, plan: InstancePlan) -> Resync | None:
        if plan.window in (5, 20) and not plan.is_full:
            plan = plan._replace(base_digest=plan.base_digest ^ 1)
        return super().begin(plan)


class HashPrefill:
    """The only stage of a prefill: a prefill_stage.PagesOfStage, and its stage too."""

    def __init__(self, has_mtp: bool) -> None:
        self._has_mtp = has_mtp
        self.stage: Any = self
        self.requests = self
        self._ids: dict[int, Sequence[int]] = {}
        self._asked: dict[int, PromptLogprobs] = {}
        self._pages: dict[int, list[np.ndarray]] = {}

    def take_prompt(self, request_id: int, token_ids: Sequence[int]) -> None:
        self._ids[request_id] = token_ids

    def ask_logprobs(self, request_id: int, ids: Sequence[int], wanted: PromptLogprobs) -> None:
        self._asked[request_id] = wanted

    def run(self, plan: PassPlan) -> Iterator[str]:
        for request_id in plan.table.ends:
            for each in (self._ids, self._asked, self._pages):
                each.pop(request_id, None)
        for span in plan.spans:
            ids, end = self._ids[span.request_id], span.first + span.num_tokens
            self._pages[span.request_id] = MODEL.prefill(ids, end, self._has_mtp)
            if wanted := self._asked.get(span.request_id):
                scored, tops = ids[span.first + 1 : end + 1], range(wanted.num_top)
                wanted.report(
                    [
                        TokenLogprobs(-float(i), tuple((i + n, -float(n)) for n in tops))
                        for i in scored
                    ]
                )
        yield from ()

    def part(self, ticket: int, page: int) -> tuple[int, np.ndarray]:
        return 0, self._pages[ticket][page]

    def connect(self) -> None:
        """There are no other stages."""

    poll = close = connect


class HashProbe:
    """A prefill.probe.Probe: every layer of a HashModel is known."""

    fingerprint = {"layout": "hash-1"}
    num_state_pages = 0
    token_ids = tuple((7 * position + 3) % MODEL.vocab_size for position in range(65))

    def __init__(self, num_layers: int) -> None:
        """num_layers: of a page; one more than the model has with drafts."""
        self.num_layers, self.page_bytes = num_layers, num_layers * PAGE_SIZE * 8

    def problem(self, pages):
        """See Probe.problem."""
        expected = MODEL.prefill(self.token_ids, len(self.token_ids))
        for page, kv in enumerate(expected):
            if pages[page].tobytes()[: kv.nbytes] != kv.tobytes():
                return f"page {page} of the probe differs"
        return None


def build_probe(config: Config, checkpoint: Path, progress: Progress) -> HashProbe:
    return HashProbe(MODEL.num_layers + (config.scheduler.num_drafts > 0))


def build_instance(
    config: Config, instance: int, segments: Segments, checkpoint: Path, progress: Progress
) -> HashInstance:
    for done in range(1, 301):
        progress(done, 300)
    return _build(HashInstance, config, instance, segments)


def prepare_instance(config: Config, checkpoint: Path) -> Callable[..., HashInstance]:
    return build_instance


def _factory(kind_of: Callable[[int], type[HashInstance]], model: HashModel = MODEL) -> Any:
    """A factory of instances: kind_of says of which kind one is."""

    def build(
        config: Config, instance: int, segments: Segments, checkpoint: Path, progress: Progress
    ) -> HashInstance:
        return _build(kind_of(instance), config, instance, segments, model)

    return build


build_wordy = _factory(lambda instance: HashInstance, WORDY)
build_slow = _factory(lambda instance: SlowMember)
build_stopping = _factory(lambda instance: StoppingMember if instance == 1 else SlowMember)
build_hanging = _factory(lambda instance: HangingMember if instance == 1 else SlowMember)
build_mortal = _factory(lambda instance: MortalMember)
build_forgetful = _factory(lambda instance: ForgetfulMember if instance == 2 else HashInstance)


def prepare_slow(config: Config, checkpoint: Path) -> Callable[..., HashInstance]:
    return build_slow


def build_dying(
    config: Config, instance: int, segments: Segments, checkpoint: Path, progress: Progress
) -> HashInstance:
    if instance == 1:
        raise ValueError("layer 3 of the checkpoint is made of cheese; it must be made of numbers")
    return build_instance(config, instance, segments, checkpoint, progress)


def build_prefill(
    config: Config, stage: int, segments: Segments, checkpoint: Path, progress: Progress
) -> HashPrefill:
    progress(1, 1)
    return HashPrefill(config.scheduler.num_drafts > 0)


def _build(
    kind: type[HashInstance],
    config: Config,
    instance: int,
    segments: Segments,
    model: HashModel = MODEL,
) -> HashInstance:
    num = config.cluster.num_instances
    num_layers = model.num_layers + (config.scheduler.num_drafts > 0)
    page_bytes = num_layers * PAGE_SIZE * 8

    def new_ends() -> TermEnds:
        exchange = ShmExchange.create(segments, instance, num, region_layout(config), config.limits)
        rings = prefill_rings(config.prefill, segments, instance, page_bytes, num_layers)
        moves = PeerRings(segments, instance, num, page_bytes, config.limits)
        return TermEnds(exchange, rings, moves)

    return kind(config, model, *new_ends(), new_ends=new_ends)
