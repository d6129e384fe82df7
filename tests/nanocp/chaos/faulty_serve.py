"""`nanocp serve` of HashInstances with a fault in all processes but members, for what must see it.

python tests/nanocp/chaos/faulty_serve.py FAULT serve ...
"""

import os
import runpy
import sys
from dataclasses import replace

from control_plane.coordinator.flights.transfers import Transfers
from control_plane.frontend.client_stream import ClientStream
from control_plane.frontend.streams import ClientStreams
from control_plane.scheduler.state.cluster_state import ClusterState
from harness.paths import ROOT
from nanocp.serve import supervisor
from nanocp.values.sampling import RowInput
from nanocp.wire import rows


def doubled():
    """A client gets the last token of the attempt before once more."""
    take_new = ClientStream.take_new

    def again(self):
        ids = take_new(self)
        if self.attempts.number and not getattr(self, "was_doubled", False) and ids:
            self.was_doubled = True
            return [*ids[:1], *ids]
        return ids

    ClientStream.take_new = again


def other_output_ids():
    """A later attempt samples as if its output were another."""
    from control_plane.frontend import streams

    def encoded(row: RowInput):
        return rows.encode_row_input(replace(row, output_ids=row.output_ids[::-1]))

    streams.encode_row_input = encoded


def forgotten():
    """One in four requests that a term's end has interrupted is not submitted again."""
    begin_attempt = ClientStreams._begin_attempt

    def some(self, stream, cause):
        if stream.request_id % 4:
            begin_attempt(self, stream, cause)
        else:
            stream.begin_attempt(cause)

    ClientStreams._begin_attempt = some


def leaking():
    """Frames of every tenth request stay with it."""
    remove = ClusterState.remove

    def leak(self, request):
        frames = remove(self, request)
        return {} if request.request_id % 10 == 0 else frames

    ClusterState.remove = leak


def unanswered():
    """Every tenth ticket stays open, though its receivers have answered."""
    answered = Transfers.answered

    def some(self, ticket, instance):
        if ticket % 10:
            answered(self, ticket, instance)

    Transfers.answered = some


def ending():
    """The service ends when it is to give its first token."""
    ClientStream.take_new = lambda self: os._exit(3)


def sound():
    """No fault."""


FAULTS = {
    each.__name__: each
    for each in (doubled, other_output_ids, forgotten, leaking, unanswered, ending, sound)
}


def plant_in_processes(fault):
    """Front ends and the controller, if they are processes, begin with the same fault."""
    for name in ("CONTROLLER_COMMAND", "FRONT_END_COMMAND"):
        module = getattr(supervisor, name)[-1]
        setattr(supervisor, name, (sys.executable, __file__, fault, "-m", module))


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    FAULTS[fault]()
    if sys.argv[1] == "-m":
        module = sys.argv[2]
        del sys.argv[1:3]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    plant_in_processes(fault)
    sys.argv.insert(1, "build_slow")
    runpy.run_path(str(ROOT / "tests/harness/services/hash_serve.py"), run_name="__main__")
