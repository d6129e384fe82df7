"""`nanocp generate`: one prompt, streamed to the terminal.

Enters: options. Leaves: text on standard output and a summary on standard error, or one JSON
object; exit status 2 if the service cannot be reached or refuses the arguments, 1 if the request
fails. Does not know: the service's insides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nanocp.client import Chunk, Finish

MAX_TIMEOUT_S = 1e6
"""Eleven days. gRPC takes a deadline beyond its clock for one that has passed."""


def generate(
    target: Annotated[str, typer.Option(help="HOST:PORT of the service.")] = "127.0.0.1:50051",
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt.")] = None,
    prompt_ids: Annotated[
        Path | None, typer.Option(help="A file with a JSON array of the prompt's token ids.")
    ] = None,
    n: Annotated[
        int | None, typer.Option(help="Choices: outputs of the prompt, shown when all have ended.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate (default 16).")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="No stop token before so many tokens.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set with this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens this likely, relative to the best.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 disfavours tokens of the prompt and the output.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Disfavours tokens of the output, -2 to 2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once per occurrence.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="ID:BIAS, added to a token's logit, -100 to 100; repeatable."),
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="A word not to generate; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="A token that ends the request; repeatable.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the request; repeatable.")
    ] = None,
    include_stop_str_in_output: Annotated[
        bool, typer.Option(help="Print the stop text too.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Do not stop at the model's end-of-sequence tokens.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: each token's log probability, and those of so many likely ones."
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: the same of each token of the prompt but the first."),
    ] = None,
    priority: Annotated[
        int, typer.Option(help="Its class: a lower number is placed first, from -100 to 100.")
    ] = 0,
    queue_timeout_s: Annotated[
        float | None, typer.Option(help="Give up if it waits longer to be placed.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Abort the request after so many seconds.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            help="For a service that asks for one.", envvar="OPENAI_API_KEY", metavar="KEY"
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead.")
    ] = False,
) -> None:
    """Decode one prompt on a running service."""
    # grpc costs a fifth of a second to import: `nanocp --help` does not need it.
    from nanocp.client import Client

    given = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_token_ids": stop_token_id or None,
        "ignore_eos": ignore_eos,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "bad_words": bad_word or None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "n": n,
        "stop": stop or None,
        "include_stop_str_in_output": include_stop_str_in_output,
    }
    sampling: Any = {name: value for name, value in given.items() if value is not None}
    chunks: list[Chunk] = []
    with _failures_are_sentences(chunks):
        _check(
            timeout_s,
            queue_timeout_s,
            as_json,
            {"--logprobs": logprobs, "--prompt-logprobs": prompt_logprobs},
        )
        if logit_bias:
            sampling["logit_bias"] = dict(map(_read_bias, logit_bias))
        asked = _read_prompt(prompt, prompt_file, prompt_ids)
        with Client(target, api_key) as client:
            limits: Any = {
                "timeout_s": timeout_s,
                "queue_timeout_s": queue_timeout_s,
                "priority": priority,
            }
            for chunk in client.generate(asked, **limits, **sampling):
                chunks.append(chunk)
                if not as_json and not _is_many(n):
                    print(_printable(chunk.text), end="", flush=True)
        _print_rest(chunks, as_json, _is_many(n))


@contextmanager
def _failures_are_sentences(chunks: Sequence[Chunk]) -> Iterator[None]:
    """With the exit status of what went wrong; `chunks` are those that came before."""
    from nanocp.client import InvalidArgument, ServiceError, Unauthenticated, Unavailable

    try:
        yield
    except Unauthenticated as error:
        _fail(f"{error} (--api-key, or OPENAI_API_KEY)", 2)
    except ServiceError as error:
        _fail(error, 2 if isinstance(error, InvalidArgument | Unavailable) and not chunks else 1)
    except ValueError as error:
        _fail(error, 2)
    except BrokenPipeError:
        raise  # The reader has had enough, as of `| head`: Typer exits without a word.
    except OSError as error:
        _fail(f"standard output cannot be written: {error.strerror}", 1)


def _is_many(n: int | None) -> bool:
    return n is not None and n > 1


def _print_rest(chunks: Sequence[Chunk], as_json: bool, is_many: bool) -> None:
    """What is printed once the request has ended."""
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


def _read_prompt(
    text: str | None, text_file: Path | None, ids_file: Path | None
) -> str | Sequence[int]:
    """The one prompt that was given. Raises ValueError if it is not exactly one, or if its file is
    unusable."""
    if [text, text_file, ids_file].count(None) != 2:
        raise ValueError("give exactly one of --prompt, --prompt-file and --prompt-ids")
    if text is not None:
        if not text.isascii() and text.encode(errors="replace").decode() != text:
            raise ValueError("--prompt is not UTF-8 text")
        return text
    path = text_file or ids_file
    assert path is not None
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if text_file is not None:
        return content
    try:
        ids = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(ids, list) or not all(
        type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in ids
    ):
        raise ValueError(
            f"{path} must hold a JSON array of token ids, each an integer of 0 or more"
        )
    return ids


def _check(
    timeout_s: float | None,
    queue_timeout_s: float | None,
    as_json: bool,
    of_json: dict[str, int | None],
) -> None:
    """Raises ValueError for options that the service does not see. `of_json`: those whose answer
    only --json shows."""
    for option, limit_s in (("--timeout-s", timeout_s), ("--queue-timeout-s", queue_timeout_s)):
        if limit_s is not None and not 0 < limit_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"{option} is {limit_s:g}; it must be above 0 and at most {MAX_TIMEOUT_S:g}"
            )
    for option, value in of_json.items():
        if value is not None and not as_json:
            raise ValueError(f"{option} is shown with --json only; give both")


def _read_bias(option: str) -> tuple[int, float]:
    """Raises ValueError if it is not ID:BIAS."""
    token_id, _, bias = option.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"--logit-bias is {option!r}; it must be ID:BIAS, as in 42:-1.5") from None


def _printable(text: str) -> str:
    """The text; a terminal gets no control characters from a model."""
    if not sys.stdout.isatty():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _summary(
    chunks: Sequence[Chunk], choices: Mapping[int, Sequence[Chunk]], is_many: bool
) -> dict[str, Any]:
    """Of one choice, all at the top; of several, what is each one's own in a list by index."""
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
    split = ", ".join(f"{pages} on instance {instance}" for instance, pages in finish.kv_split)
    return (
        f"{finish.prompt_tokens} prompt and {finish.generated_tokens} generated tokens, {finish.reason.value}; "
        f"CP degree {finish.cp_degree}, MoE binding {finish.moe_binding}, pages: {split}"
    )


def _fail(error: Exception | str, status: int) -> None:
    print(f"nanocp generate: {error}", file=sys.stderr)
    raise typer.Exit(status)
