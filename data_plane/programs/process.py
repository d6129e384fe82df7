"""A member as a plain process: `python -m data_plane.programs.process`.

Standard input has a pickled MemberSpec, after a SpareSpec in a spare. Exit status 0 means a
shutdown, else 1, with a sentence on standard error unless the controller has it.
"""

from __future__ import annotations

import logging
import pickle
import sys
from pathlib import Path

from data_plane.member.instance_runner import run_instance
from data_plane.member.lifetime import FailureReported, Make, MemberSpec, SpareSpec, sentence
from data_plane.member.node_streams import run_node_streams
from data_plane.member.stage_runner import StageLoop
from data_plane.prefill.pull.puller import run_puller
from data_plane.prefill.staged_prefill import run_staged_prefill
from data_plane.transport.shared_memory import sweep_stale
from nanocp.logs import configure


def run_member(spec: MemberSpec, make: Make | None = None) -> None:
    """Run the spec's member until the controller asks for a shutdown."""
    # Segments of members that were killed: no other process may look on this machine.
    sweep_stale()
    try:
        if spec.node is not None:
            run_node_streams(spec)
        elif spec.instance is not None and spec.config.cluster.layout == "pipeline":
            run_instance(spec, make_loop=StageLoop)
        elif spec.instance is not None:
            run_instance(spec, make)
        elif spec.is_puller:
            run_puller(spec)
        elif spec.config.prefill.engines:
            # It probes engines with torch, which an instance without a model does not have.
            from data_plane.prefill.external_prefill import run_external_prefill

            run_external_prefill(spec)
        else:
            run_staged_prefill(spec)
    finally:
        # Segments of peers on this machine that were killed, which may be why this member leaves.
        sweep_stale(spec.cluster_id)


def main() -> int:
    """Read the spec and run the member; returns the exit status."""
    spec: MemberSpec | SpareSpec = pickle.load(sys.stdin.buffer)
    configure(spec.config.service.log_format, spec.config.service.log_level, spec.name)
    make: Make | None = None
    try:
        if isinstance(spec, SpareSpec):
            make = spec.prepare()
            print("ready", flush=True)
            try:
                spec = _take_seat()
            except EOFError:
                return 0
        run_member(spec, make)
    except FailureReported as failure:
        logging.debug("the member failed", exc_info=failure)
        return 1
    except Exception as error:
        logging.debug("the member failed", exc_info=True)
        print(f"{spec.name}: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _take_seat() -> MemberSpec:
    """Wait for a seat, and show its name. Raises EOFError if the service has ended."""
    spec: MemberSpec = pickle.load(sys.stdin.buffer)
    configure(spec.config.service.log_format, spec.config.service.log_level, spec.name)
    # The last word of its command line stays that of a spare.
    Path("/proc/self/comm").write_text(spec.name)
    return spec


if __name__ == "__main__":
    sys.exit(main())
