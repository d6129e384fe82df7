"""Fit of a checkpoint in a cluster's memory, from its config.json alone."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.options.typed import Option
from nanocp.values.plan import PAGE_SIZE

if TYPE_CHECKING:
    from data_plane.model.config import ModelConfig
    from nanocp.config.cluster import ClusterConfig
    from nanocp.config.data_plane import DataPlaneConfig
    from nanocp.config.scheduler import SchedulerConfig
    from nanocp.config.whole import Config

_GB = 1e9
_GPUS_OF_A_NODE, _INSTANCES = 8, 4


@dataclass(frozen=True, slots=True)
class Device:
    """An instance's device, in GB of 10^9 bytes."""

    memory_gb: float
    reserve_gb: float
    """Captured graphs and what the libraries take."""
    usable_share: float = 0.9


DEVICES = {
    "h20": Device(96, 5.7),
    "h100": Device(80, 5.7),
    "h200": Device(141, 5.7),
    "b200": Device(180, 5.7),
    "cpu": Device(0, 0.5),
}
"""Name -> device. GPU memory is the makers'; 5.7 GB of graphs is the paper's Table 2."""
DeviceName = StrEnum("DeviceName", list(DEVICES))  # type: ignore[misc]
_CPU = DeviceName("cpu")


ModelDtype = StrEnum("ModelDtype", ["bfloat16", "float32"])


@dataclass(frozen=True, slots=True)
class Hardware:
    """A checkpoint's instances and devices."""

    instances: Annotated[int | None, typer.Option(min=1)] = None
    """Instances. Default: 4 for a folder without --log, else the cluster's own number."""
    device: Option[DeviceName] = _CPU
    """Device of an instance; cpu: a share of this machine."""
    memory_gb: Option[float | None] = None
    """GB of an instance's memory, in place of the device's."""
    layout: Option[str] = "instances"
    """instances; or pipeline, whose stages have some layers each."""
    dtype: ModelDtype | None = None
    """bfloat16 or float32; by default bfloat16 on a GPU and float32 on a CPU."""
    kv_dtype: str = "auto"
    """auto: as dtype; fp8: latent KV on a GPU."""
    lanes: bool = False
    """Windows may run in two lanes, each with its regions."""
    drafts: bool = False
    """The model's MTP layer drafts (scheduler.num_drafts)."""

    def config(self) -> Config:
        """The configuration of a service on it."""
        from nanocp.config.data_plane import default_dtype
        from nanocp.config.whole import Config

        config, is_gpu, num = Config(), self.device != _CPU, self.instances or _INSTANCES
        device = "cuda" if is_gpu else "cpu"
        return replace(
            config,
            cluster=replace(
                config.cluster, num_instances=num, instances_per_node=num, layout=self.layout
            ),
            scheduler=replace(
                config.scheduler,
                lanes="always" if self.lanes else "off",
                num_drafts=int(self.drafts),
            ),
            data_plane=replace(
                config.data_plane,
                device=device,
                dtype=self.dtype.value if self.dtype else default_dtype(device),
                kv_dtype=self.kv_dtype,
                # The only one that both lanes can use on a GPU.
                dispatch_backend="exchange" if self.lanes else config.data_plane.dispatch_backend,
                exchange_backend="nvshmem" if is_gpu and num > _GPUS_OF_A_NODE else "auto",
            ),
        )


def report_folder(folder: Path, hardware: Hardware) -> bool:
    """Print an instance's memory; return True if the model fits and can run.

    Raises ValueError for a bad checkpoint or configuration.
    """
    from control_plane.frontend.text.tokenizer import load_tokenizer
    from data_plane.model.config import ModelConfig
    from nanocp.serve.served import check_model

    model = ModelConfig.from_folder(folder, hardware.drafts)
    tokenizer = load_tokenizer(folder)
    config = hardware.config()
    check_model(config, model, folder)
    report = _report_stages if hardware.layout == "pipeline" else _report
    fits = report(folder, model, hardware)
    if config.data_plane.has_nvshmem:
        typer.echo(
            f"More than {_GPUS_OF_A_NODE} GPUs are on several nodes, which exchange by "
            "exchange_backend nvshmem: it is experimental, and no two nodes have run it "
            "(docs/use/deploy.md)."
        )
    if tokenizer is None:
        typer.echo("No tokenizer here: prompts are token ids, and chats are refused.")
    return fits


def frames_that_fit(
    folder: Path,
    cluster: ClusterConfig,
    own: DataPlaneConfig,
    scheduler: SchedulerConfig,
    room: float,
) -> int:
    """Frames of a GPU instance in `room` bytes, beside all else.

    Raises ValueError if there are none.
    """
    from data_plane.model.config import ModelConfig
    from data_plane.startup.memory_need import memory_need

    model = ModelConfig.from_folder(folder, scheduler.num_drafts > 0)
    stores_bf16 = _stores_bf16(folder, model)
    need = memory_need(model, cluster, own, scheduler.has_lanes, stores_bf16)
    left = room - _GB * DEVICES["h200"].reserve_gb - need.fixed
    if left < need.page:
        raise ValueError(
            f"no frame fits into {room / _GB:.1f} GB of each GPU: weights and exchange take "
            f"{need.fixed / _GB:.1f} GB; give more --instances, or see `nanocp plan`"
        )
    return int(left // need.page)


def _report(folder: Path, model: ModelConfig, hardware: Hardware) -> bool:
    from data_plane.startup.memory_need import keeps_bf16, memory_need, prefill_bytes
    from nanocp.cli.plan.page import slot_sentences
    from nanocp.values.experts import num_slots

    whole, stores_bf16 = model, _stores_bf16(folder, model)
    model = _as_stored(folder, model)
    config, name, device = hardware.config(), hardware.device, DEVICES[hardware.device]
    cluster, num_instances = config.cluster, config.cluster.num_instances
    memory = _GB * (hardware.memory_gb or device.memory_gb or _share_of_this_machine(num_instances))
    need = memory_need(model, cluster, config.data_plane, hardware.lanes, stores_bf16)
    usable, reserve = device.usable_share * memory, _GB * device.reserve_gb
    left = usable - reserve - need.fixed
    typer.echo(f"{folder}: {_describe(model)}")
    typer.echo(
        f"on {num_instances} x {name} of {memory / _GB:.1f} GB, {usable / _GB:.1f} of them usable; "
        f"{config.data_plane.dtype}"
        f"{', matrices bfloat16 as stored' if keeps_bf16(config.data_plane, stores_bf16) else ''}; "
        "each instance:"
    )
    rows = [("other weights", need.other_weights, "the same on every instance")]
    if model.num_experts:
        share = num_slots(model.num_experts, num_instances, cluster.redundant_experts)
        rows.insert(0, ("experts", need.experts, f"{share} of {model.num_experts} in each layer"))
    rows += [
        ("graphs", int(reserve), "captured steps and libraries"),
        (
            "exchange",
            need.exchange,
            f"regions for {num_instances - 1} peers{', of two lanes' if hardware.lanes else ''}",
        ),
    ]
    if need.states:
        about = f"{cluster.bounds.max_rows} rows of {need.state / 1e6:.2f} MB and two more"
        rows.append(("states", need.states, about))
    num_frames = int(left // need.page) if left > 0 else 0
    tokens = num_frames * PAGE_SIZE
    rows.append(
        ("frames", num_frames * need.page, f"{num_frames:,} pages of {need.page / 1e6:.2f} MB")
    )
    for what, num_bytes, about in rows:
        typer.echo(f"  {what:<14}{num_bytes / _GB:8.2f} GB   {about}")
    if num_frames < 1:
        typer.echo(f"It does not fit: {(need.page - left) / _GB:.1f} GB too many on each instance.")
        typer.echo(_advice(model, hardware, stores_bf16, usable - reserve))
        return False
    num_needed = -(-model.longest // max(tokens, 1))
    typer.echo(
        f"It fits. KV: {tokens:,} tokens on one instance, {tokens * num_instances:,} on all. The "
        f"model was made for {model.longest:,}: such a request needs "
        + (
            f"{num_needed} of {num_instances} instances at least."
            if num_needed <= num_instances
            else f"{num_needed} instances, and there are {num_instances}."
        )
    )
    if need.state:
        typer.echo(
            f"A row less (cluster.bounds.max_rows) leaves room for "
            f"{int(need.state // need.page * PAGE_SIZE):,} tokens more on an instance."
        )
    if model.num_experts:
        shape = (model.num_experts, model.num_experts_per_token, num_instances)
        for sentence in slot_sentences(need.experts / share, *shape):
            typer.echo(sentence)
    if name == _CPU:
        max_rows = config.of_prefill_stages.cluster.bounds.max_rows
        prefill = prefill_bytes(model, config.data_plane, max_rows) / _GB
        typer.echo(f"Beside them the prefill has the whole model: {prefill:.2f} GB and more.")
    typer.echo(_weights(folder, whole))
    return True


def _report_stages(folder: Path, model: ModelConfig, hardware: Hardware) -> bool:
    from data_plane.startup.memory_need import stage_needs
    from nanocp.config.pipeline import PipelineConfig
    from nanocp.values.passes import layers_of

    config, device = hardware.config(), DEVICES[hardware.device]
    num_stages = config.cluster.num_instances
    memory = _GB * (hardware.memory_gb or device.memory_gb or _share_of_this_machine(num_stages))
    usable, reserve = device.usable_share * memory, _GB * device.reserve_gb
    pipeline = PipelineConfig.of(config.pipeline, num_stages, model.num_layers)
    needs = stage_needs(model, pipeline, config.data_plane, _stores_bf16(folder, model))
    typer.echo(f"{folder}: {_describe(model)}")
    typer.echo(
        f"on {num_stages} stages of {memory / _GB:.1f} GB, {usable / _GB:.1f} of them usable; "
        f"{config.data_plane.dtype}"
    )
    num_frames = []
    for stage, need in enumerate(needs):
        layers = layers_of(pipeline.first_split, stage)
        left = usable - reserve - need.weights - need.rings
        num_frames.append(int(left // need.page))
        typer.echo(
            f"  stage {stage:<4} layers {layers.start:>3} to {layers.stop - 1:<3}"
            f"{need.weights / _GB:9.2f} GB of weights, rings {need.rings / _GB:.2f} GB, "
            f"room for {max(num_frames[-1], 0):,} pages of {need.page / 1e6:.2f} MB"
        )
    fewest = min(num_frames)
    if fewest < 1:
        worst = num_frames.index(fewest)
        typer.echo(f"It does not fit: stage {worst} has no room for a page. Take more stages.")
        return False
    typer.echo(
        f"It fits. KV: {fewest * PAGE_SIZE:,} tokens, by the stage with the least room. A layer "
        "that moves needs its weights and KV at its new stage too (pipeline.max_layers)."
    )
    typer.echo(_weights(folder, model))
    return True


def _describe(model: ModelConfig) -> str:
    kind = model.attention
    experts = f"{model.num_experts} experts, {model.num_experts_per_token} a token"
    linear = f", {len(model.linear_layers)} of them linear attention" * bool(model.linear_layers)
    return (
        f"{model.num_layers} layers{linear}{' and an MTP layer' * model.num_mtp_layers}, "
        f"{experts if model.num_experts else 'all dense'}, {kind.num_heads} heads, "
        f"KV of {kind.kv_width} elements a token and layer"
    )


def _advice(model: ModelConfig, hardware: Hardware, stores_bf16: bool, room: float) -> str:
    from data_plane.startup.memory_need import memory_need, smallest_cluster

    config, ways = hardware.config(), []
    cluster, own, lanes = config.cluster, config.data_plane, hardware.lanes
    fewest = smallest_cluster(model, cluster, own, lanes, stores_bf16, room)
    if fewest is not None:
        ways.append(f"{fewest} instances of this device")
    need = memory_need(model, cluster, own, lanes, stores_bf16)
    for name, device in DEVICES.items():
        larger = _GB * (device.usable_share * device.memory_gb - device.reserve_gb)
        if hardware.memory_gb is None and own.device == "cuda" and larger >= need.fixed + need.page:
            ways.append(f"{cluster.num_instances} x {name}")
    halved = replace(own, dtype="bfloat16")
    smaller = memory_need(model, cluster, halved, lanes, stores_bf16)
    if own.dtype == "float32" and smaller.fixed + smaller.page <= room:
        ways.append("--set dtype=bfloat16")
    if not ways:
        return "Every instance holds all weights but its experts: a larger device is needed."
    return f"What would make it fit: {', or '.join(ways)}."


def _has_weights(folder: Path) -> bool:
    return bool(list(folder.glob("*.safetensors*")))


def _as_stored(folder: Path, model: ModelConfig) -> ModelConfig:
    """The model, without FP8 if its weights are there and experts are not all FP8."""
    from data_plane.model.weights import stores_fp8_experts

    if model.fp8_block is not None and _has_weights(folder):
        with contextlib.suppress(ValueError):  # what is missing is named after the table
            if not stores_fp8_experts(folder, model):
                return replace(model, fp8_block=None)
    return model


def _stores_bf16(folder: Path, model: ModelConfig) -> bool:
    """True if matrices are stored in bf16; without all weights, as config.json says."""
    from data_plane.model.config_fields import read_json
    from data_plane.model.families import text_fields
    from data_plane.model.weights import stores_bf16

    if _has_weights(folder):
        with contextlib.suppress(ValueError):  # what is missing is named after the table
            return stores_bf16(folder, model)
    fields = text_fields(read_json(folder / "config.json"))
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return model.fp8_block is None and dtype == "bfloat16"


def _weights(folder: Path, model: ModelConfig) -> str:
    """A sentence on the folder's tensors."""
    from data_plane.model.sizes import stored_shapes
    from data_plane.model.weights import open_tensors

    if not _has_weights(folder):
        num = len(stored_shapes(model, range(model.num_experts)))
        return f"The folder has no weights yet; {num:,} tensors will be read."
    _, shapes = open_tensors(folder, model, range(model.num_experts))
    return f"The folder has all {len(shapes):,} tensors."


def _share_of_this_machine(num_instances: int) -> float:
    import psutil

    return float(psutil.virtual_memory().total / num_instances / _GB)
