"""The requests that `nanocp bench serve` sends.

Enters: options. Leaves: requests in their order. Does not know: services, rates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.bench.dataset import DatasetOptions
from nanocp.bench.names import DATASETS, TRACES
from nanocp.cli.options.typed import FieldOptions, field_option

if TYPE_CHECKING:
    from nanocp.bench.dataset import SampleRequest

_RANDOM_ONLY = ("range_ratio", "prefix_len", "vocab_size")
OPTIONS = FieldOptions(
    [
        field_option(DatasetOptions, "name", name="dataset_name", choices=DATASETS),
        field_option(DatasetOptions, "path", name="dataset_path"),
        *(
            field_option(DatasetOptions, name)
            for name in (
                "num_prompts",
                "seed",
                "length_scale",
                "time_scale",
                "prefix_repetition_prefix_len",
                "prefix_repetition_suffix_len",
                "prefix_repetition_num_prefixes",
            )
        ),
        *(field_option(DatasetOptions, name, name=f"random_{name}") for name in _RANDOM_ONLY),
    ]
)
"""Options that are DatasetOptions' fields."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Options of prompt and output lengths, as vLLM has them, and the tokenizer that counts."""

    input_len: Annotated[int | None, typer.Option(help="The same as --random-input-len.")] = None
    output_len: Annotated[int | None, typer.Option(help="Output tokens, of any dataset.")] = None
    random_input_len: Annotated[int, typer.Option(help="random: tokens of a prompt.")] = 1024
    random_output_len: Annotated[int, typer.Option(help="random: tokens of an output.")] = 128
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json; without it, token ids.")
    ] = None

    def dataset(self, given: dict[str, Any]) -> DatasetOptions:
        """The dataset; `given` has fields of DatasetOptions.

        Raises ValueError, naming the option, for a dataset that cannot be.
        """
        is_random = given.get("name", "random") == "random"
        return DatasetOptions(
            **given,
            input_len=self.input_len or self.random_input_len,
            output_len=self.output_len or (self.random_output_len if is_random else None),
        )

    def requests(self, dataset: DatasetOptions, backend: str) -> list[SampleRequest]:
        """The dataset's requests as the backend takes them.

        Raises ValueError for an unusable file, and without the tokenizer that they need.
        """
        from nanocp.bench.dataset import sample_requests

        tokenizer = self._read_tokenizer()
        requests = sample_requests(dataset, tokenizer)
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


def is_trace(dataset: DatasetOptions) -> bool:
    """Whether the requests have times of their own."""
    return dataset.name in TRACES
