"""What commands say of their progress."""

import time

from nanocp.cli.options.console import said


def test_progress_is_said_without_a_terminal(capsys, monkeypatch):
    now_s = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with said() as say:
        for what, after_s in (("a: 3/s held", 0.0), ("a: 4/s held", 3.0), ("b", 8.0)):
            now_s[0] += after_s
            say(what)
    assert capsys.readouterr().err.splitlines() == ["0 s: a: 3/s held", "11 s: b"]
