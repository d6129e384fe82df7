"""A decoder whose KV and experts are split over simulated instances, without any exchange.

It has no scheduler and no graph engine either. It calls the model's own functions in the order of a
decode step, so that a test can look at logits.
"""

from functools import partial

import torch

from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.attention.lse_merge import lse_merge
from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.model.config import ModelConfig
from data_plane.model.layers import gated_heads, shared_experts
from data_plane.model.norm import rms_norm
from data_plane.model.weights import expert_range, load_weights
from data_plane.step.cpu_kernels import TorchKernels
from harness.exact.reference_prefill import prefill_pages
from nanocp.values.plan import PAGE_SIZE

CARRY_PAGE_BYTES = 4096


def page_table(frames):
    """Make a page table [rows, pages] int32 of lists of frames."""
    width = max(1, *map(len, frames))
    return torch.tensor([row + [0] * (width - len(row)) for row in frames], dtype=torch.int32)


def torch_attention(config):
    """Make torch's attention for a model on the CPU."""
    site = AttentionSite.of(config, torch.device("cpu"), torch.float32, torch.float32)
    return attention_backend("torch", site)[0]


class SplitDecoder:
    """Page p of row b lives on instance (p + b) % num_instances, in frames that do not ascend."""

    def __init__(
        self,
        checkpoint,
        num_instances=1,
        wire_form="latent",
        dtype=torch.float32,
        num_frames=64,
        kernels=None,
    ):
        self.config = ModelConfig.from_folder(checkpoint)
        self.ops = kernels or TorchKernels()
        self.num_instances = num_instances
        self.wire_form = wire_form
        self.weights = [
            load_weights(
                checkpoint,
                self.config,
                dtype,
                expert_range(self.config, instance, num_instances),
                packing=self.ops,
            )
            for instance in range(num_instances)
        ]
        self.all_weights = load_weights(
            checkpoint, self.config, dtype, range(self.config.num_experts)
        )
        self.places, self.carry, self.prompt_carry = self.config.places, None, None
        if self.config.delta is not None:
            new_pool = partial(CarryPool, self.config.delta, len(self.config.linear_layers),
                               dtype=dtype, page_bytes=CARRY_PAGE_BYTES)  # fmt: skip
            self.carry, self.prompt_carry = new_pool(num_frames=16), new_pool(num_frames=1)
        shape = (self.config.num_kept_layers, num_frames, PAGE_SIZE, self.config.attention.kv_width)
        self.pools = [torch.full(shape, 100.0, dtype=dtype) for _ in range(num_instances)]
        self._free = [
            list(range(0, num_frames, 2)) + list(range(1, num_frames, 2))
            for _ in range(num_instances)
        ]
        self.attention = self.ops.own_attention(self.config) or torch_attention(self.config)
        self.frames = []  # [row][instance] -> frames of its pages there, in order

    def add_row(self, prompt_ids, chunk_tokens=96):
        """Prefill all but the last token of a prompt; returns the number of its row."""
        row = len(self.frames)
        self.frames.append([[] for _ in range(self.num_instances)])
        num_tokens = len(prompt_ids) - 1
        pages = prefill_pages(
            self.all_weights, self.config, prompt_ids, num_tokens, chunk_tokens,
            carry=self.prompt_carry,
        )  # fmt: skip
        for page, kv_LSD in pages:
            instance, frame = self._allocate(row, page)
            count = min(PAGE_SIZE, num_tokens - page * PAGE_SIZE)
            self.pools[instance][:, frame, :count] = kv_LSD[:, :count]
        if self.carry is not None:
            for number in range(self.carry.frame_bytes // CARRY_PAGE_BYTES):
                self.carry.page(row, number)[:] = self.prompt_carry.page(0, number)
            if not num_tokens:
                self.carry.clear(row)
        return row

    def _allocate(self, row, page):
        instance = (page + row) % self.num_instances
        frame = self._free[instance].pop(0)
        self.frames[row][instance].append(frame)
        return instance, frame

    @torch.inference_mode()
    def step(self, tokens, positions):
        """Decode one token of each row; returns logits [B, vocabulary]."""
        config, finish = self.config, self.ops.finish_attention
        lengths, slots = self._plan_appends(positions)
        plans = [
            self.attention.plan(
                page_table([frames[i] for frames in self.frames]),
                torch.tensor([row[i] for row in lengths], dtype=torch.int32),
            )
            for i in range(self.num_instances)
        ]
        position_B = torch.tensor(positions)
        x_BX = self.all_weights.embedding[torch.tensor(tokens)]
        self.weights[0].rope.reach(max(positions))
        for index in range(config.num_layers):
            layers = [weights.layers[index] for weights in self.weights]
            layer, rope, place = layers[0], self.weights[0].rope, self.places[index]
            if index in config.linear_layers:
                rows = torch.arange(len(tokens))
                carried = CarryRows(rows, position_B, torch.ones_like(rows, dtype=torch.bool))
                normed = rms_norm(x_BX, layer.input_norm, config.norm_eps)
                o_BHV = self.ops.linear_attention(
                    self.carry, place, carried, normed, layer.attention
                )
                x_BX, normed = self.ops.after_attention(x_BX, o_BHV, layer, rope, config)
                x_BX = x_BX + self._mlp(normed, layers)
                continue
            latent_BC, kv_BD, _ = self.ops.attention_rows(x_BX, position_B, layer, rope, config)
            for row, (instance, frame, offset) in enumerate(slots):
                self.pools[instance][place, frame, offset] = kv_BD[row]
            partials, lses = [], []
            for instance, plan in enumerate(plans):
                q_BHD = self.ops.attention_queries(latent_BC, position_B, layer, rope, config)
                pool = self.pools[instance][place]
                partial, lse = self.attention.run(q_BHD, pool, plan, config.attention.softmax_scale)
                partials.append(
                    finish(partial, layer, config) if self.wire_form == "latent" else partial
                )
                lses.append(lse)
            merged, _ = lse_merge(torch.stack(partials), torch.stack(lses))
            merged = merged.to(x_BX.dtype)
            o_BHV = merged if self.wire_form == "latent" else finish(merged, layer, config)
            o_BHV = gated_heads(x_BX, o_BHV, layer, config)
            x_BX, normed = self.ops.after_attention(x_BX, o_BHV, layer, rope, config)
            x_BX = x_BX + self._mlp(normed, layers)
        return self.ops.logits(x_BX, self.weights[0], config)

    def _mlp(self, x_BX, layers):
        if layers[0].moe is None:
            return self.ops.gated_mlp(x_BX, layers[0].mlp)
        expert_BK, weight_BK = self.ops.gate(x_BX, layers[0].moe, self.config)
        all_rows = torch.arange(len(x_BX))
        out = sum(
            self.ops.visit_experts(
                x_BX, expert_BK, weight_BK, all_rows, [], layer.moe, layer.moe.held[0]
            )[0]
            for layer in layers
        )
        shared = shared_experts(x_BX, layers[0].moe, self.ops.gated_mlp)
        return out if shared is None else out + shared

    def _plan_appends(self, positions):
        lengths, slots = [], []
        for row, position in enumerate(positions):
            page, offset = divmod(position, PAGE_SIZE)
            if offset == 0:
                self._allocate(row, page)
            holder = (page + row) % self.num_instances
            local = [PAGE_SIZE * len(frames) for frames in self.frames[row]]
            local[holder] += offset + 1 - PAGE_SIZE
            lengths.append(local)
            slots.append((holder, self.frames[row][holder][-1], offset))
        return lengths, slots
