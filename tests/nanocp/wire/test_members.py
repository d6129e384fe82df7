"""What members say: each value has a way up, and each report somebody who takes it."""

import re
from typing import get_args

import pytest

from harness.paths import ROOT
from nanocp.values.commands import ToInstance, ToPuller
from nanocp.values.members import Report, Said
from nanocp.wire.members import FROM_INSTANCE, FROM_PREFILL, TO_INSTANCE, TO_PREFILL


@pytest.mark.parametrize(
    ("values", "codecs"),
    [(Said, (FROM_INSTANCE, FROM_PREFILL)),
     (ToInstance, (TO_INSTANCE,)),
     (ToPuller, (TO_PREFILL,))],
    ids=["said", "to instances", "to the prefill and the puller"],
)  # fmt: skip
def test_every_value_has_a_codec_and_no_codec_has_more(values, codecs):
    encoded = {name for codec in codecs for name in codec._decoders}
    assert encoded == {value.__name__ for value in get_args(values)}


@pytest.mark.parametrize("report", get_args(Report), ids=lambda report: report.__name__)
def test_the_coordinator_takes_every_report(report):
    """One that nobody takes ends the stream of the member that says it."""
    sources = (ROOT / "control_plane/coordinator").rglob("*.py")
    asks = re.compile(rf"\b(?:case\b|isinstance\().*\b{report.__name__}\b")
    is_taken = any(asks.search(path.read_text()) for path in sources)
    assert is_taken, f"no case or isinstance in control_plane/coordinator/ takes {report.__name__}"
