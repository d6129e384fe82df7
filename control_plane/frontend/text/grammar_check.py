"""The check that a grammar compiles within a bound of processor time, in a process of its own."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from threading import Lock

_OPTION = r"\"no_forcing\": true"
"""Option with which the model cuts literals into tokens, as JSON within JSON."""
_MAX_FIXED_BYTES = 40_000
"""More than any literal within bounds.max_grammar_bytes."""
PROCESSOR_S = 0.2
"""Longest time to compile a grammar: instances compile it too, and a step waits."""
_NO_END = f"it begins with more than {_MAX_FIXED_BYTES} bytes of fixed text, or never ends"
_WAIT_S = 60.0
"""Longest wait for the process, which first reads a large vocabulary."""
_TOO_COSTLY = f"it takes more than {PROCESSOR_S} s of processor time to compile"


class GrammarCheck:
    """Compiles grammars for one tokenizer, one after the other, for any thread."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        """tokenizer_json: returns the text of tokenizer.json."""
        self._tokenizer_json = tokenizer_json
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def error(self, grammar: str) -> str:
        """Return the error of the grammar in one sentence, or nothing."""
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            is_there, _, _ = select.select([process.stdout], [], [], _WAIT_S)
            line = process.stdout.readline() if is_there else ""
            if line:
                return str(json.loads(line))
            self._process = None
            process.kill()
            process.communicate()
            return _TOO_COSTLY

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "control_plane.frontend.text.grammar_check"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._tokenizer_json()) + "\n")
        return process


def main() -> None:
    """Read a tokenizer and then grammars, a line each as JSON; write their errors."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(step_lexer_fuel=20_000, initial_lexer_fuel=100_000)
    tokenizer = LLTokenizer(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        # The signal's own action is what ends a process, in the middle of the library's work.
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        grammar = json.loads(line)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()
        # What may come is followed as far as there is one way only: that may be for ever.
        forcing = LLMatcher(tokenizer, grammar.replace(_OPTION, "", 1), log_level=0, limits=limits)
        num_fixed = len(forcing.compute_ff_bytes())
        signal.setitimer(signal.ITIMER_PROF, 0)
        error = matcher.get_error().partition("\n<state>")[0]
        if error == "NoExtensionBias":
            error = "nothing satisfies it"
        elif not error and num_fixed > _MAX_FIXED_BYTES:
            error = _NO_END
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
