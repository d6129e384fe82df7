"""The requests of `nanocp bench serve`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.bench.dataset import DatasetOptions
from nanocp.bench.names import TRACES
from nanocp.cli.options.typed import Option

if TYPE_CHECKING:
    from nanocp.bench.dataset import SampleRequest


@dataclass(frozen=True, slots=True)
class Dataset(DatasetOptions):
    """Options of the prompts and their lengths, with the tokenizer."""

    name: Annotated[str, typer.Option("--dataset-name")] = "random"
    path: Annotated[Path | None, typer.Option("--dataset-path")] = None
    num_prompts: Option[int] = 1000
    seed: Option[int] = 0
    random_input_len: Option[int] = 1024
    random_output_len: Option[int] = 128
    tokenizer: Option[Path | None] = None
    """A folder with tokenizer.json; without it, token ids."""

    @property
    def is_trace(self) -> bool:
        """True if requests have their own times."""
        return self.name in TRACES

    def requests(self, backend: str) -> list[SampleRequest]:
        """Requests in the backend's form.

        Raises ValueError for an unusable file or a missing tokenizer.
        """
        from nanocp.bench.dataset import sample_requests

        tokenizer = self._read_tokenizer()
        requests = sample_requests(self, tokenizer)
        if backend != "openai-chat" or all(isinstance(one.prompt, str) for one in requests):
            return requests
        if tokenizer is None:
            raise ValueError(
                "--backend openai-chat sends texts: give --tokenizer, to make them of token ids"
            )
        return [replace(request, prompt=tokenizer.decode(request.prompt)) for request in requests]

    def _read_tokenizer(self) -> Any:
        if self.tokenizer is None:
            return None
        import tokenizers

        folder = self.tokenizer
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises Exception itself.
            raise ValueError(
                f"--tokenizer {folder} has no tokenizer that can be read: {error}"
            ) from error
