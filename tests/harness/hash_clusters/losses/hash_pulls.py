"""Hash clusters whose prompts were computed by engines, and are pulled while processes are lost.

    PYTHONPATH=tests python -m harness.seed_campaign --kind pulls --seeds 1000

An engine holds blocks until it is notified, or until its lease ends; then it uses them again. The
puller's book of blocks is the real one.
"""

from collections import Counter, deque
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from control_plane.frontend.client_request import Origin
from data_plane.prefill.pull.holds import Holds
from harness.hash_clusters.hash_parts import Job, draw_config
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from nanocp.config.prefill import PrefillConfig, PullConfig
from nanocp.config.whole import Config
from nanocp.values.commands import (
    CancelPrefill,
    HoldBlocks,
    PagesArrived,
    PrefillRequest,
    RefuseBlocks,
    ReleaseBlocks,
)
from nanocp.values.members import PULLER, BlocksRefused, Envelope, Member
from nanocp.values.plan import TransferFailed
from nanocp.values.remote_blocks import RemoteBlocks


def pulling_config(seed: int) -> Config:
    """A small cluster that pulls; in half of them nothing else computes prompts."""
    config, random = draw_config(Random(seed)), Random(seed + 3)
    pull = PullConfig(("127.0.0.0/8",), on_failure=random.choice(["recompute", "fail"]))
    return replace(config, prefill=PrefillConfig(pull=pull))


class Engines:
    """All engines: the blocks of each prompt, and who has told them what."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.lease_s = random.choice([0.02, 0.5, 30.0])
        self.prompts: dict[tuple[str, str], list[int]] = {}
        self.blocks: dict[tuple[str, str], RemoteBlocks] = {}
        self.until: dict[tuple[str, str], float] = {}
        """The end of the lease of each held set."""
        self.reused: set[tuple[str, str]] = set()
        self.notified: Counter[tuple[str, str]] = Counter()
        self.num_expired = 0

    def prefill(self, token_ids: list[int], now: float) -> RemoteBlocks:
        """Compute a prompt."""
        number = len(self.prompts)
        name, num = f"engine {number % 2}", len(token_ids)
        ids = tuple(range(-(-num // 16)))
        blocks = RemoteBlocks(name, f"prompt {number}", ids, "127.0.0.1", 5600 + number % 2, 1, num)
        self.prompts[blocks.key] = list(token_ids)
        self.blocks[blocks.key] = blocks
        self.until[blocks.key] = now + self.lease_s
        return blocks

    def beat(self, key: tuple[str, str], now: float) -> None:
        """Renew a lease that has not ended."""
        if key in self.until:
            self.until[key] = max(self.until[key], now + 2 / 3 * self.lease_s)

    def notify(self, key: tuple[str, str]) -> None:
        """Free the blocks of a prompt that was read."""
        self.notified[key] += 1
        self.until.pop(key, None)

    def go_on(self, now: float) -> None:
        """Leases end, and free blocks get other KV."""
        for key in [key for key, until in self.until.items() if until <= now]:
            del self.until[key]
            self.num_expired += 1
        free = self.prompts.keys() - self.until.keys() - self.reused
        if free and self.random.random() < 0.3:
            self.reused.add(self.random.choice(sorted(free)))


class PullingCluster(RecoveringCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    checks = True
    """Whether the puller compares what it has read with the prompt."""
    beats = True
    pulled_share = 0.7

    def __init__(self, seed: int, *args: Any, **named: Any) -> None:
        config = named.pop("config", None) or pulling_config(seed)
        of_pulls = self.of_pulls = Random(seed + 4)
        self.engines = Engines(of_pulls)
        self.to_puller: deque[Envelope] = deque()
        self.pulls: list[Job] = []
        self._begin_puller()
        self.num_pulled = self.num_failed_pulls = self.num_pullers_lost = 0
        super().__init__(seed, *args, config=config, **named)
        if not config.prefill.computes:
            self.pulled_share = 1.0
            self.num_failed_transfers = 1  # What is preempted or lost later has no KV anywhere.
        self._refused: set[int] = set()

    def _begin_puller(self) -> None:
        self.holds = Holds(self.engines.lease_s)
        self.to_puller.clear()
        self.pulls.clear()

    @property
    def _now(self) -> float:
        return self.now_us / 1e6

    def _origin(self, prompt_ids: list[int]) -> Origin:
        origin = super()._origin(prompt_ids)
        if self.of_pulls.random() >= self.pulled_share:
            return origin
        # The same prompt twice has two sets of blocks; a choice of the same call shares one.
        return replace(origin, remote=self.engines.prefill(prompt_ids, self._now))

    # --- the puller

    def _take_work(self, member: Member, envelope: Envelope) -> bool:
        if member != PULLER:
            return super()._take_work(member, envelope)
        self.to_puller.append(envelope)
        return True

    def _turn(self) -> None:
        super()._turn()
        random, now = self.of_pulls, self._now
        self.engines.go_on(now)
        if PULLER in self.coordinator.writers:
            return
        for _ in range(min(len(self.to_puller), random.choice([0, 0, 1, 5]))):
            self._take_by_puller(self.to_puller.popleft())
        self.holds.expire(now)
        if self.beats:
            for sets in self.holds.beats_due(now).values():
                for held in sets:
                    self.engines.beat(held.blocks.key, now)
                self.holds.renewed(sets, now)
        if random.random() < 0.2:
            self._notify()
        if self.pulls and random.random() < 0.2:
            self._pull(random.choice(self.pulls))
        if random.random() < 0.01:
            self._end_calls()

    def _notify(self) -> None:
        for address in list(self.holds.notices):
            for blocks in self.holds.notices.pop(address):
                self.engines.notify(blocks.key)

    def _take_by_puller(self, envelope: Envelope) -> None:
        match envelope.message:
            case HoldBlocks(request_id, blocks):
                self.holds.hold(request_id, blocks, self._now)
                if self.of_pulls.random() < 0.003:
                    self._say_of_puller(BlocksRefused(request_id, "no"), envelope.term)
            case ReleaseBlocks(request_id):
                self.holds.release(request_id)
            case RefuseBlocks(blocks):
                self.holds.refuse(blocks)
            case PrefillRequest(transfer):
                pages = list(transfer.instances())
                self.pulls.append(Job(transfer, {}, pages, envelope.term))
            case CancelPrefill(ticket):
                self.pulls = [job for job in self.pulls if job.transfer.ticket != ticket]
            case PagesArrived(ticket):
                for job in [job for job in self.pulls if job.transfer.ticket == ticket]:
                    self.pulls.remove(job)
                    self.num_pulled += 1

    def _pull(self, job: Job) -> None:
        transfer, random = job.transfer, self.of_pulls
        found = self.holds.of(transfer.request_id)
        if found is None or random.random() < 0.01 or self._now >= found.deadline:
            self._give_up(job)
            return
        key = found.blocks.key
        if key in self.engines.reused and self.checks:
            self._give_up(job)
            return
        if not job.pages:
            return  # It waits for its receivers.
        token_ids = self.engines.prompts[key]
        if key in self.engines.reused:
            token_ids = [each ^ 1 for each in token_ids]
        if not job.kv:
            job.kv = dict(enumerate(self.model.prefill(token_ids, transfer.num_tokens)))
        page = job.pages.pop()
        self.processes[transfer.instances()[page]].ring.put(transfer.ticket, page, job.kv[page])

    def _give_up(self, job: Job) -> None:
        self.pulls.remove(job)
        self.num_failed_pulls += 1
        self.num_failed_transfers += 1
        self._say_of_puller(TransferFailed(job.transfer.ticket, "the lease is over"), job.term)

    def _say_of_puller(self, said: Any, term: int) -> None:
        self.events.append((PULLER, term, said))

    def _lose_writer(self, member: Member) -> None:
        if member == PULLER:
            self._begin_puller()
            self.num_pullers_lost += 1
        super()._lose_writer(member)

    def _end_calls(self) -> None:
        """A call that has ended names its blocks once more."""
        for request_id, stream in self.streams.items():
            is_over = stream.output.finish_reason is not None or stream.ended is not None
            remote = stream.origin.remote
            if is_over and remote is not None and request_id not in self._refused:
                self._refused.add(request_id)
                refuse = partial(self._refuse, remote)
                self.events.append(refuse)

    def _refuse(self, blocks: RemoteBlocks) -> None:
        self.coordinator.held.refuse(blocks)
        self._settle()

    # --- the judge

    def _is_over(self) -> bool:
        if not self._is_answered():
            return False
        self._end_calls()
        if self.to_puller or PULLER in self.coordinator.writers:
            return False
        self._notify()
        return super()._is_over()

    def _check_end(self) -> None:
        super()._check_end()
        held = self.coordinator.held
        assert not held._held and not held._pulled, "a request holds blocks"
        self._notify()
        assert not self.holds._of_users and not self.holds._in_use
        self._check_notified()

    def _check_notified(self) -> None:
        for key in self.engines.prompts:
            num = self.engines.notified[key]
            assert num == 1 or self.num_pullers_lost, f"{key} was notified {num} times"
        assert not self.engines.until, "blocks stay until their lease ends"


class PullingFailoverCluster(PullingCluster, FailoverCluster):
    """The controller and front ends are lost too. Raises AssertionError as PullingCluster."""

    def _begin_controller(self, *args: Any) -> None:
        self.holds.orphan(self._now)
        self.pulls.clear()
        self.to_puller.clear()
        super()._begin_controller(*args)

    def _check_notified(self) -> None:
        """What a lost process was to say is not said: such blocks stay until their lease ends."""

    def _is_over(self) -> bool:
        # What nobody holds again ends with its lease.
        self.holds.expire(float("inf"))
        return super()._is_over()


def play(seed: int, max_losses: int = 6) -> PullingCluster:
    """Play one seed to its end; a failure names the seed."""
    return played(PullingCluster(seed, max_losses), f"pulls --seed {seed}")


def play_failovers(seed: int) -> PullingFailoverCluster:
    """Play one seed whose controller and front ends are lost too; a failure names the seed."""
    return played(PullingFailoverCluster(seed), f"pull-failovers --seed {seed}")
