"""Train `tale`, the small checkpoint that the demo serves, on public domain fairy tales.

    nice python models/train_tale.py FOLDER TEXT [TEXT ...] [--minutes 60]

Enters: plain texts of Project Gutenberg (models/tale/README.md names them). Leaves: a Hugging Face
folder of DeepSeek-V3's architecture in bf16, with an MTP layer, and the loss. Does not know: how it
is served. The weights are not bit-equal on two machines: the minutes decide how many steps fit.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from data_plane.model.make_checkpoint import write_tokenizer

VOCABULARY = 2048
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 72,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rope_interleave": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
EOS = 1
WINDOWS, WINDOW = 8, 256
"""Windows of a step, and the tokens of each."""
MAX_GAP = 6000
"""Half of the windows skip up to this many positions, so that far positions are learnt cheaply."""
MTP_WEIGHT = 0.3
MUON_RATE, ADAM_RATE, BIAS_RATE = 0.02, 0.002, 0.003
HELD_OUT = 0.02
"""Share of the text, its end, on which the loss is measured."""


def tales_of(path: Path) -> list[str]:
    """Read a text without Project Gutenberg's header, footer and line breaks: its tales."""
    text = path.read_text(encoding="utf-8", errors="ignore").replace("\r", "")
    text = re.split(r"\*\*\* ?START OF.*?\*\*\*", text)[-1]
    text = re.split(r"\*\*\* ?END OF|End of (the )?Project Gutenberg", text)[0]
    text = re.sub(r"\[.*?\]|_|\(\d+\)", "", text, flags=re.DOTALL)
    tales = []
    for part in re.split(r"\n{4,}", text):
        paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n{2,}", part)]
        tale = "\n".join(p for p in paragraphs if p and not _is_heading(p))
        if len(tale) > 200 and "Gutenberg" not in tale:
            tales.append(tale)
    return tales


def _is_heading(paragraph: str) -> bool:
    return paragraph.isupper() or paragraph.startswith("CHAPTER")


class Tale(nn.Module):
    """The model of `transformers`, whose last layer is DeepSeek-V3's MTP layer."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        num_layers = CONFIG["num_hidden_layers"]
        config: Any = AutoConfig.for_model(**CONFIG | {"num_hidden_layers": num_layers + 1})
        self.causal: Any = AutoModelForCausalLM.from_config(config)
        # The forward runs the layers that the configuration counts: all but the MTP layer.
        config.num_hidden_layers = num_layers
        config.num_nextn_predict_layers = 1
        hidden, norm = config.hidden_size, type(self.causal.model.norm)
        self.mtp: Any = self.causal.model.layers[-1]
        self.mtp.enorm, self.mtp.hnorm = norm(hidden), norm(hidden)
        self.mtp.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.mtp.shared_head = nn.ModuleDict({"norm": norm(hidden)})
        nn.init.normal_(self.mtp.eh_proj.weight, std=0.02)
        self.loads: list[Tensor] = []
        self.gates: list[Any] = [
            module for module in self.modules() if hasattr(module, "e_score_correction_bias")
        ]
        for gate in self.gates:
            gate.register_forward_hook(self._count)

    def _count(self, _gate: Any, _input: Any, output: Any) -> None:
        self.loads.append(torch.bincount(output[2].flatten(), minlength=CONFIG["n_routed_experts"]))

    def losses(self, ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the losses, in nats a token, of the next token and of the one after it.

        ids: [windows, tokens]. position: [windows, tokens].
        """
        self.loads.clear()
        model = self.causal.model
        # Without a mask `transformers` takes a gap in the positions for the end of a text.
        seen, mask = ids[:, :-2], torch.ones_like(ids[:, :-2])
        hidden = model(seen, attention_mask=mask, position_ids=position[:, :-2], use_cache=False)[0]
        main = F.cross_entropy(self.causal.lm_head(hidden).flatten(0, 1), ids[:, 1:-1].flatten())
        both = torch.cat(
            (self.mtp.enorm(model.embed_tokens(ids[:, 1:-1])), self.mtp.hnorm(hidden)), dim=-1
        )
        rotary = model.rotary_emb(hidden, position[:, :-2])
        out = self.mtp(self.mtp.eh_proj(both), position_embeddings=rotary, attention_mask=None)
        scores = self.causal.lm_head(self.mtp.shared_head["norm"](out))
        return main, F.cross_entropy(scores.flatten(0, 1), ids[:, 2:].flatten())

    @torch.no_grad()
    def balance(self) -> float:
        """Move the gates' biases towards even loads; return the worst load over the mean."""
        worst = 0.0
        for gate, load in zip(self.gates, self.loads, strict=True):
            share = load / load.float().mean()
            gate.e_score_correction_bias += BIAS_RATE * (1 - share).sign()
            worst = max(worst, float(share.max()))
        return worst


class Muon(torch.optim.Optimizer):
    """Steps matrices, or stacks of them, along their orthogonalised momentum."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                ahead = parameter.grad.lerp(momentum, 0.95)
                rows, columns = ahead.shape[-2:]
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * 0.02)
                parameter.add_(_orthogonal(ahead), alpha=-rate)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Bring every singular value near 1, by five Newton-Schulz steps."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def _batch(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    begins = torch.randint(len(ids) - WINDOW - 2, (WINDOWS,), generator=generator)
    position = torch.arange(WINDOW + 2).repeat(WINDOWS, 1)
    for row in range(1, WINDOWS, 2):
        first = int(torch.randint(WINDOW // 2, (1,), generator=generator))
        position[row, first:] += int(torch.randint(MAX_GAP, (1,), generator=generator))
    return torch.stack([ids[begin : begin + WINDOW + 2] for begin in begins]), position


@torch.no_grad()
def _held_out(model: Tale, ids: Tensor) -> tuple[float, float]:
    windows = ids[: len(ids) // (WINDOW + 2) * (WINDOW + 2)].view(-1, WINDOW + 2)[:32]
    position = torch.arange(WINDOW + 2).repeat(len(windows), 1)
    main, mtp = model.losses(windows, position)
    return float(main), float(mtp)


def train(model: Tale, ids: Tensor, minutes: float) -> int:
    """Train for that long, of which the last share decays the rates; return the steps taken."""
    matrices = [p for p in model.causal.model.layers.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    muon = Muon(matrices, MUON_RATE)
    adam = torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    began, steps = time.monotonic(), 0
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        rate = min(1.0, (steps + 1) / 30) * (0.05 + 0.95 * (1 - done))
        for optimizer, full in ((muon, MUON_RATE), (adam, ADAM_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
        main, mtp = model.losses(*_batch(ids, generator))
        (main + MTP_WEIGHT * mtp).backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        worst, steps = model.balance(), steps + 1
        if steps % 25 == 0:
            typer.echo(
                f"step {steps}, {done:.0%}: loss {main:.2f}, MTP {mtp:.2f}, "
                f"fullest expert {worst:.1f} x the mean"
            )
    return steps


def save(model: Tale, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in bf16."""
    model.causal.to(torch.bfloat16).save_pretrained(folder)
    config = {
        "num_hidden_layers": CONFIG["num_hidden_layers"],
        "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    }
    # It knows no roles: it goes on with what the messages say.
    tokenizer = {"chat_template": CHAT_TEMPLATE}
    more = {"config": config, "generation_config": {"repetition_penalty": 1.15}}
    for name, fields in (more | {"tokenizer_config": tokenizer}).items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    texts: Annotated[list[Path], typer.Argument(help="Plain texts to learn from.")],
    minutes: Annotated[float, typer.Option(help="How long to train.", min=0.1)] = 60.0,
) -> None:
    """Train on the texts for some minutes of one core, and write the checkpoint."""
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tales = [tale for path in texts for tale in tales_of(path)]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, VOCABULARY, tales)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Tales of all texts in turn, so that what is held out is of every kind.
    tales.sort(key=lambda tale: tale[-50:])
    ids = torch.tensor([i for tale in tales for i in [*tokenizer.encode(tale).ids, EOS]])
    held_out = int(len(ids) * HELD_OUT)
    typer.echo(f"{len(tales)} tales, {sum(map(len, tales))} characters, {len(ids)} tokens")
    model = Tale()
    typer.echo(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")
    cpu = time.process_time()
    steps = train(model, ids[:-held_out], minutes)
    loss, mtp = _held_out(model, ids[-held_out:])
    typer.echo(
        f"{steps} steps of {WINDOWS * WINDOW} tokens in {time.process_time() - cpu:.0f} s of CPU; "
        f"held-out loss {loss:.2f} nats a token, MTP {mtp:.2f}"
    )
    save(model, folder)


if __name__ == "__main__":
    typer.run(main)
