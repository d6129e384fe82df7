"""`nanocp generate`: one prompt, streamed to the terminal.

Exit status: 2 for bad arguments or an unreachable service, 1 if the request fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.cli.ask.sampling import NAMES, read_sampling
from nanocp.cli.options.typed import ApiKey, Option, with_options

if TYPE_CHECKING:
    from nanocp.client import Chunk, Finish

MAX_TIMEOUT_S = 1e6
"""Eleven days; gRPC takes later deadlines for past ones."""

_SAMPLING_HELP = (
    'Sampling parameters as the API has them: {"top_k": 20, "stop": ["end"]}. They are '
    f"{', '.join(NAMES)}."
)


@dataclass(frozen=True, slots=True)
class ServiceAccess:
    """The service that a command asks: its address and key."""

    target: Option[str] = "127.0.0.1:50051"
    """HOST:PORT of the service. Several with commas between them: an answer goes on at another one
    if its own is lost."""
    api_key: ApiKey = ""
    tls: Annotated[bool, typer.Option("--tls")] = False
    """Encrypt the connection."""
    ca: Option[Path | None] = None
    """Certificates by which the service's is judged; it means --tls."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The one prompt that is given."""

    prompt: Option[str | None] = None
    """The prompt."""
    prompt_file: Option[Path | None] = None
    """A UTF-8 file with the prompt."""
    prompt_ids: Option[Path | None] = None
    """A file with a JSON array of the prompt's token ids."""

    def read(self) -> str | Sequence[int]:
        """The prompt's text or token ids.

        Raises ValueError unless exactly one is given and readable.
        """
        if [self.prompt, self.prompt_file, self.prompt_ids].count(None) != 2:
            raise ValueError("give exactly one of --prompt, --prompt-file and --prompt-ids")
        if self.prompt is not None:
            if self.prompt.encode(errors="replace").decode() != self.prompt:
                raise ValueError("--prompt is not UTF-8 text")
            return self.prompt
        if self.prompt_file is not None:
            return _read_text(self.prompt_file)
        assert self.prompt_ids is not None
        return _read_ids(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen."""

    sampling: Annotated[
        str,
        typer.Option(metavar="JSON", help=_SAMPLING_HELP, show_default=False),
    ] = "{}"
    temperature: Option[float | None] = None
    """Divides the logits; 0 is greedy, the default."""
    max_tokens: Annotated[int | None, typer.Option(show_default="16")] = None
    """Most tokens to generate."""

    def read(self) -> dict[str, Any]:
        """The parameters that are given. Raises ValueError."""
        read = read_sampling(self.sampling)
        for name in ("temperature", "max_tokens"):
            if (value := getattr(self, name)) is not None:
                if name in read:
                    option = f"--{name.replace('_', '-')}"
                    raise ValueError(f"{name} is in --sampling and in {option}; give one")
                read[name] = value
        return read


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A request's place in the queue."""

    priority: Option[int] = 0
    """A lower number is placed first and preempted last, -100 to 100."""
    queue_timeout_s: Option[float | None] = None
    """Fail if the request waits longer than this many seconds."""
    timeout_s: Option[float | None] = None
    """Abort the request after this many seconds."""

    user: Option[str] = ""
    """Owner of the request, in a service without API keys."""

    def check(self) -> None:
        """Raises ValueError for a time limit that the client cannot keep."""
        for option, limit_s in (
            ("--timeout-s", self.timeout_s),
            ("--queue-timeout-s", self.queue_timeout_s),
        ):
            if limit_s is not None and not 0 < limit_s <= MAX_TIMEOUT_S:
                raise ValueError(
                    f"{option} is {limit_s:g}; it must be above 0 and at most {MAX_TIMEOUT_S:g}"
                )


@with_options
def generate(
    service: ServiceAccess,
    prompt: Prompt,
    sampling: SamplingOptions,
    scheduling: Scheduling,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead.")
    ] = False,
) -> None:
    """Decode one prompt on a running service.

    Several choices (n) are printed when all have ended.
    """
    # grpc costs a fifth of a second to import: `nanocp --help` does not need it.
    from nanocp.client import Client

    chunks: list[Chunk] = []
    with _failures_are_sentences(chunks):
        scheduling.check()
        options = sampling.read()
        is_many = options.get("n", 1) > 1
        if not as_json:
            _check_shown(options)
        asked = prompt.read()
        targets = [target.strip() for target in service.target.split(",")]
        with Client(targets, service.api_key, tls=service.tls, ca=service.ca) as client:
            for chunk in client.generate(asked, **asdict(scheduling), **options):
                chunks.append(chunk)
                if not as_json and not is_many:
                    print(_printable(chunk.text), end="", flush=True)
        _print_rest(chunks, as_json, is_many)


@contextmanager
def _failures_are_sentences(chunks: Sequence[Chunk]) -> Iterator[None]:
    from nanocp.client import InvalidArgument, ServiceError, Unauthenticated, Unavailable

    try:
        yield
    except Unauthenticated as error:
        _fail(f"{error} (--api-key, or OPENAI_API_KEY)", 2)
    except ServiceError as error:
        _fail(error, 2 if isinstance(error, InvalidArgument | Unavailable) and not chunks else 1)
    except BrokenPipeError:
        raise  # The reader has stopped reading, as `| head` does: Typer exits without a message.
    except OSError as error:
        _fail(f"standard output cannot be written: {error.strerror}", 1)


def _print_rest(chunks: Sequence[Chunk], as_json: bool, is_many: bool) -> None:
    choices: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        choices.setdefault(chunk.index, []).append(chunk)
    if as_json:
        print(json.dumps(_summary(chunks, choices, is_many)), flush=True)
        return
    for index, of_choice in sorted(choices.items()):
        text = "".join(chunk.text for chunk in of_choice)
        if is_many:
            print(f"[{index}] {_printable(text)}", end="")
        if not text:  # A service without a tokenizer.
            print(*(token_id for chunk in of_choice for token_id in chunk.token_ids), end="")
        print(flush=True)
        print(f"[{_sentence(_finish(of_choice))}]", file=sys.stderr)


def _finish(chunks: Sequence[Chunk]) -> Finish:
    finish = chunks[-1].finish
    assert finish is not None, "a stream without an error ends each choice with `finish`"
    return finish


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_ids(path: Path) -> list[int]:
    try:
        ids = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(ids, list) or not all(
        type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in ids
    ):
        raise ValueError(
            f"{path} must hold a JSON array of token ids, each an integer of 0 or more"
        )
    return ids


def _check_shown(sampling: dict[str, Any]) -> None:
    """Raises ValueError for a parameter whose answer only --json shows."""
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling:
            raise ValueError(f"{name} is shown with --json only; give both")


def _printable(text: str) -> str:
    if not sys.stdout.isatty():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _summary(
    chunks: Sequence[Chunk], choices: Mapping[int, Sequence[Chunk]], is_many: bool
) -> dict[str, Any]:
    of_choices = [_choice_summary(of_choice) for _, of_choice in sorted(choices.items())]
    prompt_tokens = _finish(choices[0]).prompt_tokens
    summary: dict[str, Any] = {"request_id": chunks[-1].request_id, "prompt_tokens": prompt_tokens}
    if prompt_logprobs := [asdict(token) for chunk in chunks for token in chunk.prompt_logprobs]:
        summary["prompt_logprobs"] = prompt_logprobs
    return summary | ({"choices": of_choices} if is_many else of_choices[0])


def _choice_summary(chunks: Sequence[Chunk]) -> dict[str, Any]:
    finish = _finish(chunks)
    summary: dict[str, Any] = {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": finish.reason.value,
        "stop_reason": finish.stop_reason,
        "generated_tokens": finish.generated_tokens,
        "cp_degree": finish.cp_degree,
        "moe_binding": finish.moe_binding,
        "kv_split": finish.kv_split,
    }
    if logprobs := [asdict(token) for chunk in chunks for token in chunk.logprobs]:
        summary["logprobs"] = logprobs
    return summary


def _sentence(finish: Finish) -> str:
    pages = ", ".join(f"{count} on instance {instance}" for instance, count in finish.kv_split)
    return (
        f"{finish.prompt_tokens} prompt and {finish.generated_tokens} generated tokens, "
        f"{finish.reason.value}; CP degree {finish.cp_degree}, MoE binding {finish.moe_binding}, "
        f"pages: {pages}"
    )


def _fail(error: Exception | str, status: int) -> None:
    print(f"nanocp generate: {error}", file=sys.stderr)
    raise typer.Exit(status)
