"""`nanocp prefill-flags`: vLLM's flags to compute prompts for `nanocp serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_TRANSFER = "--kv-transfer-config"


def prefill_flags(
    checkpoint: Annotated[Path, typer.Argument(help="The folder that `nanocp serve` serves.")],
    config: Annotated[
        Path | None, typer.Option(help="The YAML file of the service, for its dtype.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A network that vLLM may dial, as 10.0.0.0/8, where NanoCP's instances are on "
            "other machines.",
            metavar="NETWORK",
        ),
    ] = None,
) -> None:
    """Print flags for vLLM: vllm serve CHECKPOINT $(nanocp prefill-flags CHECKPOINT)."""
    from data_plane.model.config import ModelConfig
    from nanocp.config.file import load_config

    loaded = load_config(config, {})
    delta = ModelConfig.from_folder(checkpoint).delta
    if delta is not None and delta.has_channel_decay:
        reason = "states of Kimi Delta Attention do not come from vLLM"
        raise ValueError(f"{reason}; let NanoCP's own prefill compute prompts of {checkpoint}")
    flags = [
        f"--dtype {loaded.data_plane.dtype}",
        f"{_TRANSFER}.kv_connector NanocpConnector",
        f"{_TRANSFER}.kv_connector_module_path nanocp.connectors.vllm",
        f"{_TRANSFER}.kv_role kv_producer",
    ]
    if delta is not None:
        flags += ["--mamba-ssm-cache-dtype float32", "--no-enable-prefix-caching"]
    if allow:
        flags.append(f"{_TRANSFER}.kv_connector_extra_config.allowed {','.join(allow)}")
    print(" ".join(flags))
