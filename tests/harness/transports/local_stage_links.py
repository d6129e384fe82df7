"""Messages between the stages of a pipeline within one process, for tests.

Between processes, kv/stage_rings.py does the same.
"""

from collections import deque

from data_plane.transport.stage_links import StageLinks


class LocalStageLinks(StageLinks):
    """Links within one process; the queues hold no more than the passes in flight."""

    def __init__(self, stage, hidden, tokens):
        """hidden: for each stage, what comes from the stage before."""
        self._stage = stage
        self._hidden = hidden
        self._tokens = tokens

    @classmethod
    def create_all(cls, num_stages):
        """Make the ends of all stages."""
        hidden = [deque() for _ in range(num_stages)]
        tokens = deque()
        return [cls(stage, hidden, tokens) for stage in range(num_stages)]

    def connect(self):
        """Nothing: queues need none."""

    def wait(self, timeout_ms):
        """Return: what can come in one process is here."""

    def close(self):
        """Nothing: queues need none."""

    def send_hidden(self, rows):
        waiting = self._hidden[self._stage + 1]
        assert len(waiting) < len(self._hidden), f"more than {len(waiting)} passes are in flight"
        waiting.append(rows)

    def receive_hidden(self):
        waiting = self._hidden[self._stage]
        return waiting.popleft() if waiting else None

    def send_tokens(self, tokens):
        self._tokens.append(tokens)

    def receive_tokens(self):
        return self._tokens.popleft() if self._tokens else None
