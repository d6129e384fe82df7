"""The oracle: one `transformers` forward over prompt and output judges every greedy token.

It shares no code with serving, so no fault either. Only the demo and tests need `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_plane.reference.gates import GateDecision, ReferenceGates

NEAR_TIE = 1e-5
"""A logit this close to the highest is right too: fp32 sums depend on order."""
_ATTENTION = "sdpa_of_equal_widths"
_SCALE = "_scale_inv"
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_MAX_TRIES = 8
"""Most near-ties tried the other way for one output; each costs a forward."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reference model's judgement of one output."""

    num_tokens: int
    first_wrong: int | None
    """Index of the first wrong token, or None."""
    near_ties: int
    """Near-ties decided otherwise than by the reference: tokens within NEAR_TIE of the argmax, and
    gates' changed choices within GATE_NEAR_TIE.
    """

    @property
    def exact(self) -> bool:
        """True if every token is right, and there is one."""
        return self.first_wrong is None and self.num_tokens > 0


def _attention(
    module: Any, query: Any, key: Any, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[Any, None]:
    """Run `transformers`' sdpa, with values padded to the width of the keys."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    width = value.shape[-1]
    padded = torch.nn.functional.pad(value, (0, max(0, key.shape[-1] - width)))
    output, _ = sdpa_attention_forward(module, query, key, padded, mask, **options)
    return output[..., :width], None


def _loaded(checkpoint: Path, fields: Mapping[str, Any]) -> Any:
    """Load the reference model, with repairs for published folders.

    `transformers` wants a float for Ling's -5, does not know Kimi-K2, and de-quantises FP8 in other
    blocks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    told: dict[str, Any] = dict(fields)
    block = (told.pop("quantization_config", None) or {}).get("weight_block_size")
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": _ATTENTION}
    how["local_files_only"] = True
    if isinstance(told.get("kda_lower_bound"), int):
        told["kda_lower_bound"] = float(told["kda_lower_bound"])
    elif told.get("model_type") == "kimi_k2":
        told["model_type"] = "deepseek_v3"
    elif told == fields:
        return AutoModelForCausalLM.from_pretrained(str(checkpoint), **how)
    how["config"] = config = AutoConfig.for_model(**told)
    if block is None:
        return AutoModelForCausalLM.from_pretrained(str(checkpoint), **how)
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    return model_class.from_pretrained(None, state_dict=_plain_weights(checkpoint, block), **how)


def _plain_weights(checkpoint: Path, block: Sequence[int]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    stored: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(file)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(_SCALE)}
    for name, scale in scales.items():
        weight = stored[name.removesuffix(_SCALE)].float()
        wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        stored[name.removesuffix(_SCALE)] = weight * wide[: len(weight), : weight.shape[1]]
    return stored


def limit_activations(model: Any, fields: Mapping[str, Any]) -> None:
    """Let a model's experts hold Ling's limits, which `transformers` does not read."""
    routed, shared = (dict(enumerate(fields.get(name) or ())) for name in _LIMITS)
    for index, layer in enumerate(model.model.layers if routed or shared else ()):
        if not hasattr(layer.mlp, "experts"):
            continue  # a dense MLP has no limit
        experts, own = layer.mlp.experts, layer.mlp.shared_experts
        if limit := routed.get(index):
            experts.forward = partial(_limited_experts, experts, limit)
        if limit := shared.get(index):
            own.forward = partial(_limited_mlp, own, limit)


def _limited(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    opened = torch.nn.functional.silu(gate)
    return torch.minimum(opened, torch.tensor(limit)) * up.clamp(min=-limit, max=limit)


def _limited_mlp(mlp: Any, limit: float, x: torch.Tensor) -> Any:
    return mlp.down_proj(_limited(mlp.gate_proj(x), mlp.up_proj(x), limit))


def _limited_experts(
    experts: Any, limit: float, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out, linear = torch.zeros_like(x), torch.nn.functional.linear
    for expert in set(chosen.flatten().tolist()):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], experts.gate_up_proj[expert]).chunk(2, dim=-1)
        sums = linear(_limited(gate, up, limit), experts.down_proj[expert])
        out.index_add_(0, token, sums * weights[token, place, None])
    return out


Distance = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Each output token's distance from its logits' choice: ([output, vocabulary], ids) -> [output]."""


def below_highest(logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
    """Return a greedy output's Distance: each token's logit below the highest."""
    chosen = logits.gather(1, torch.tensor(output_ids)[:, None]).squeeze(1)
    return logits.max(dim=-1).values - chosen


class Oracle:
    """The reference model, loaded once, in fp32; torch then has one thread in its process."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises as `transformers` does if it cannot read the checkpoint."""
        import transformers

        # On a busy machine two threads, which wait for each other, took 20 times as long.
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        transformers.AttentionInterface.register(_ATTENTION, _attention)
        transformers.AttentionMaskInterface.register(
            _ATTENTION, transformers.masking_utils.sdpa_mask
        )
        fields = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
        model = _loaded(Path(checkpoint), fields)
        limit_activations(model, fields)
        self._model = model.eval()
        self._gates = ReferenceGates(model)

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Return [output, vocabulary]: row i decides token i of the output."""
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits: torch.Tensor = self._model(
            ids, logits_to_keep=len(output_ids), use_cache=False
        ).logits[0]
        return logits

    def judge(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        distance: Distance = below_highest,
    ) -> Verdict:
        """Judge an output, by default a greedy one, up to its first wrong token."""
        if not output_ids:
            return Verdict(0, None, 0)
        verdict, ties = self._compare(prompt_ids, output_ids, frozenset(), distance)
        otherwise: frozenset[GateDecision] = frozenset()
        tried: set[GateDecision] = set()
        while verdict.first_wrong is not None and len(tried) < _MAX_TRIES:
            position = len(prompt_ids) - 1 + verdict.first_wrong
            untried = [tie for tie in ties if tie.token <= position and tie not in tried]
            if not untried:
                break
            tie = max(untried, key=lambda tie: tie.token)  # the later, the more it weighs
            tried.add(tie)
            trial, trial_ties = self._compare(prompt_ids, output_ids, otherwise | {tie}, distance)
            if trial.first_wrong is None or trial.first_wrong > verdict.first_wrong:
                verdict, ties, otherwise = trial, trial_ties, otherwise | {tie}
        return replace(verdict, near_ties=verdict.near_ties + len(otherwise))

    def _compare(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        otherwise: frozenset[GateDecision],
        distance: Distance,
    ) -> tuple[Verdict, list[GateDecision]]:
        self._gates.near_ties, self._gates.decided_otherwise = [], otherwise
        logits = self.logits(prompt_ids, output_ids)
        self._gates.decided_otherwise = frozenset()
        below = distance(logits, output_ids)
        wrong = (~(below <= NEAR_TIE)).nonzero().flatten().tolist()  # so that NaN is wrong
        first_wrong = wrong[0] if wrong else None
        verdict = Verdict(len(output_ids), first_wrong, int((below[:first_wrong] > 0).sum()))
        return verdict, self._gates.near_ties
