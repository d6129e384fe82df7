"""`nanocp batch`: a file of requests, answered by a running service.

Exit status: 0 if all have outputs, 1 if not, 2 for an unusable file or service, 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.options.typed import ApiKey

if TYPE_CHECKING:
    from nanocp.cli.ask.batch_files import BatchAnswer, BatchLine, BatchOutput
    from nanocp.cli.ask.batch_sender import BatchSender


def batch(
    input_file: Annotated[
        Path, typer.Option("-i", "--input-file", help="Requests in OpenAI's batch format.")
    ],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", help="Answers, in the order in which they come.")
    ],
    error_file: Annotated[
        Path | None,
        typer.Option(help="Requests that failed; by default OUTPUT with .errors before its end."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Send only requests that OUTPUT does not have."),
    ] = False,
    base_url: Annotated[
        str, typer.Option(help="http://HOST:PORT or https://HOST:PORT of the service.")
    ] = "http://127.0.0.1:8000",
    max_concurrency: Annotated[int, typer.Option(help="Most requests at a time.", min=1)] = 64,
    retry_s: Annotated[
        float,
        typer.Option(help="Send a request again for this long while there is no room or service."),
    ] = 600.0,
    api_key: ApiKey = "",
    ca: Annotated[
        Path | None, typer.Option(help="Certificates by which the service's is judged.")
    ] = None,
) -> None:
    """Answer a file of requests with a running service, after clients who wait.

    Requests get the lowest class (priority 100) unless they name one. A run that was stopped goes
    on with --resume: answered requests are not sent again, failed ones are.
    """
    from nanocp.cli.ask.batch_files import BatchOutput, read_requests
    from nanocp.cli.ask.batch_sender import BatchSender

    num_requests = sum(1 for _ in read_requests(input_file))
    sender = BatchSender(
        base_url.rstrip("/").removesuffix("/v1"),
        {"Authorization": f"Bearer {api_key}"} if api_key else {},
        max_concurrency,
        retry_s,
        tls_context(ca),
    )
    asyncio.run(sender.check())
    errors = error_file or output_file.with_suffix(f".errors{output_file.suffix}")
    output = BatchOutput(output_file, errors, resume)
    left = (each for each in read_requests(input_file) if each.custom_id not in output.done)
    raise typer.Exit(_run(sender, left, output, num_requests, errors))


def tls_context(ca: Path | None) -> ssl.SSLContext | None:
    """A TLS context for this file of certificates; None without one. Raises ValueError."""
    try:
        return None if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"--ca {ca} cannot be read: {error}") from None


def _run(
    sender: BatchSender,
    requests: Iterator[BatchLine],
    output: BatchOutput,
    num_requests: int,
    errors: Path,
) -> int:
    from nanocp.cli.ask.batch_sender import ServiceGoneError

    num_done, num_failed, status, sentence = len(output.done), 0, 0, ""
    with _bar(num_requests, num_done) as show:

        def answered(answer: BatchAnswer) -> None:
            nonlocal num_done, num_failed
            output.write(answer)
            num_done += answer.is_success
            num_failed += not answer.is_success
            show(num_done, num_failed)

        try:
            asyncio.run(sender.send_all(requests, answered))
        except ServiceGoneError as error:
            status, sentence = 1, f"no service answers at {sender.base_url} ({error}); "
        except OSError as error:
            status, sentence = 1, f"{error.filename or 'an output'}: {error.strerror}; "
        except ValueError as error:
            status, sentence = 1, f"the input has changed: {error}; "
        except KeyboardInterrupt:
            status, sentence = 130, "stopped; "
        finally:
            output.close()
    failed = f", {num_failed} failed: see {errors}" if num_failed else ""
    go_on = "; --resume sends the others" if num_done < num_requests else ""
    print(
        f"nanocp batch: {sentence}{num_done} of {num_requests} answered{failed}{go_on}",
        file=sys.stderr,
    )
    return status or int(num_done < num_requests)


@contextmanager
def _bar(num_requests: int, num_done: int) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import TextColumn

    from nanocp.cli.options.console import request_progress

    with request_progress(TextColumn("{task.fields[failed]}")) as bars:
        bar = bars.add_task("requests", total=num_requests, completed=num_done, failed="")

        def show(num_done: int, num_failed: int) -> None:
            failed = f"{num_failed} failed" if num_failed else ""
            bars.update(bar, completed=num_done + num_failed, failed=failed)

        yield show
