"""Hash clusters whose pages go to slots and come back: conversations, failing files, losses.

    PYTHONPATH=tests python -m harness.seed_campaign --kind offload --seeds 1000

The judge compares every page in a slot with the KV of the tokens that its hash stands for, as soon
as the scheduler can find it there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from control_plane.ports.controller_interface import Submission
from data_plane.instance.interface import TermEnds
from data_plane.transport.exchange import PeerLost
from harness.hash_clusters.hash_cluster import HashCluster, crowd
from harness.hash_clusters.hash_parts import Process, crowded, offloading_config
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.transports.local_pages import LocalPageRing
from nanocp.config.whole import Config
from nanocp.values.offload import page_hashes
from nanocp.values.plan import PAGE_SIZE, Event, TransferDone, TransferMissed
from nanocp.values.sampling import SamplingParams


class OffloadingCluster(HashCluster):
    """Plays one seed. Raises AssertionError as soon as a page in a slot is not what it should be.

    Copies run at any turn between two steps. A page in the file may be unreadable, or not fit.
    """

    def __init__(self, seed: int, num_requests: int = 20, config: Config | None = None) -> None:
        self.kv_of: dict[bytes, np.ndarray] = {}
        """By hash of a page: its KV."""
        self.fault_share = 0.0
        super().__init__(seed, num_requests, config or offloading_config(seed))
        self.fault_share = self.random.choice([0, 0, 0.1])
        self.copies = self.random.choice([[0, 1], [1, 3], [9]])
        self.talk_share = 0.7
        self.prefill_share = 0.13
        self.speeds = [max(speed, 0.3) for speed in self.speeds]

    def _start_process(self, index: int, ends: TermEnds) -> Process:
        process = super()._start_process(index, ends)
        slots, num_host = (
            process.instance.pages.copier.slots,
            self.config.scheduler.offload_host_pages,
        )
        read, write = slots.read, slots.write

        def fails(slot: int) -> bool:
            return slot >= num_host and self.random.random() < self.fault_share

        slots.read = lambda slot: None if fails(slot) else read(slot)
        slots.write = lambda slot, payload: not fails(slot) and write(slot, payload)
        return process

    # --- conversations

    def _draw_request(self, prompt_len: int, max_tokens: int) -> tuple[list[int], SamplingParams]:
        """A prompt that is often an earlier one with its answer, and what the user says then."""
        prompt_ids, params = super()._draw_request(prompt_len, max_tokens)
        histories = self._histories()
        if histories and self.random.random() < self.talk_share:
            history = self.random.choice(histories)
            prompt_ids = [*history, *prompt_ids[-self.random.choice([1, 20, 70]) :]][:700]
        return prompt_ids, params

    def _histories(self) -> list[list[int]]:
        """Prompts with as much of their answers as is there."""
        return [
            [*story.prompt_ids, *(story.output[index] for index in range(len(story.output)))]
            for story in self.stories.values()
        ]

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        super()._arrive(prompt_len, max_tokens)
        if self.stories:
            story = next(reversed(self.stories.values()))
            self.learn([*story.prompt_ids, *story.expected])

    def learn(self, token_ids: Sequence[int]) -> None:
        """Keep the KV of every full page of these tokens, by hash."""
        hashes = page_hashes([*token_ids, 0])
        if set(hashes) <= self.kv_of.keys():
            return
        pages = self.model.prefill(list(token_ids), len(hashes) * PAGE_SIZE)
        self.kv_of |= dict(zip(hashes, pages, strict=True))

    # --- the judge

    def _call_scheduler(self, batch: list[Event]) -> None:
        self.num_missed += sum(isinstance(event, TransferMissed) for event in batch)
        super()._call_scheduler(batch)
        if any(isinstance(event, TransferDone) for event in batch):
            self.check_slots()

    def check_slots(self) -> None:
        """Compare every full page that the scheduler finds in memory with its KV."""
        num_host = self.config.scheduler.offload_host_pages
        for index, (host, _) in enumerate(self.scheduler.offload.tiers):
            slots = self.processes[index].instance.pages.copier.slots
            for key, slot in host.kept.items():
                assert slot < num_host
                if isinstance(key, bytes):
                    kv = slots.read(slot).view(np.uint64).reshape(-1, PAGE_SIZE)
                    kv = kv[: self.model.num_layers]  # that of drafts is of one continuation
                    assert np.array_equal(kv, self.kv_of[key]), (
                        f"slot {slot} of instance {index} has another page, or an old one"
                    )

    def _check_answers(self) -> None:
        super()._check_answers()
        self.check_slots()
        offload = self.scheduler.offload
        assert not offload.pins and not offload._copying, "a slot is held though nothing runs"


class LosingCluster(OffloadingCluster, RecoveringCluster):
    """Instances are lost with their slots, and terms end while pages are copied."""

    def __init__(self, seed: int, num_requests: int = 16) -> None:
        self.kv_of = {}
        self.fault_share = 0.0
        RecoveringCluster.__init__(
            self, seed, 3, 3, num_requests=num_requests, config=offloading_config(seed)
        )
        self.copies = self.random.choice([[0, 1], [1, 3], [9]])
        self.talk_share = 0.7

    def submit(self, submission: Submission) -> None:
        """See controller_interface.ControllerInterface."""
        super().submit(submission)
        stream = self.streams.get(submission.request_id)
        prompt_ids = stream.prompt_ids if stream else submission.prompt_ids
        self.learn([*prompt_ids, *self.expected[submission.request_id].all()])

    def _histories(self) -> list[list[int]]:
        return [[*stream.prompt_ids, *stream.output.ids] for stream in self.streams.values()]


class CutCluster(LosingCluster):
    """Connections between instances are cut while pages are under way; no instance is lost."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.losses_left = 0
        self.cuts_left = 4
        self.num_cuts_of_slots = 0
        """Cuts that lost a page from a slot, whose ticket names no instance that sends it."""

    def _turn(self) -> None:
        if self.is_serving and self.cuts_left:
            rings = self.processes[self.serving[0]].instance.pages.moves._rings.values()
            busy = [ring for ring in rings if len(ring)]
            if busy and self.random.random() < 0.2:
                self._cut(self.random.choice(busy))
        super()._turn()

    def _cut(self, ring: LocalPageRing) -> None:
        self.cuts_left -= 1
        expected = {ticket for p in self.processes for ticket in self._of_slots(p)}
        self.num_cuts_of_slots += any(page.ticket in expected for page in ring._pages)
        ring.close()
        ring.is_cut = True

    def _of_slots(self, process: Process) -> Iterator[int]:
        for ticket, each in process.instance.pages._expected.items():
            if each.transfer.source is None:
                yield ticket

    def _between_steps(self, process: Process) -> None:
        try:
            super()._between_steps(process)
        except PeerLost:
            if self.is_serving and process.term == self.term:
                self._end_term()


def play_offloading(seed: int, num_requests: int = 20) -> OffloadingCluster:
    """Play one seed to its end; a failure names the seed."""
    return played(OffloadingCluster(seed, num_requests), f"offload --seed {seed}")


def crowd_of(kind: type[OffloadingCluster], seed: int, host_pages: int = 20) -> OffloadingCluster:
    """Rows that are promised no frame outgrow the cluster: preempted ones come back from slots."""
    config = crowded(offloading_config(seed))
    # In windows of one step a row stops only where a page is full.
    slots = {"offload_host_pages": host_pages, "steps_per_window": [1, 4][seed % 2]}
    scheduler = replace(config.scheduler, **slots)
    cluster = kind(seed, 16, replace(config, scheduler=scheduler))
    cluster.talk_share = 0
    return crowd(cluster)


def play_crowded(seed: int) -> OffloadingCluster:
    """Play one seed of a crowd."""
    return played(crowd_of(OffloadingCluster, seed), f"offload-crowd --seed {seed}")


def play_losing(seed: int) -> LosingCluster:
    """Play one seed with losses and ends of terms."""
    return played(LosingCluster(seed), f"offload-losses --seed {seed}")


def play_cut(seed: int) -> CutCluster:
    """Play one seed whose connections are cut."""
    return played(CutCluster(seed), f"offload-cuts --seed {seed}")
