"""Families of `transformers` give their own results in halves, with padding and without.

With `-s` each prints its largest difference, as a share of the largest value.
"""

import re

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from harness.overlap.overlap_models import compiled, rules_of
from nanocp.overlap.policies.orders import NanoFlow

pytestmark = pytest.mark.usefixtures("fresh")

VOCABULARY, LENGTH = 64, 7
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 4}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, **HEADS}
LLAMA = SMALL | {"max_position_embeddings": 64}
GROUPED = LLAMA | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
VISION = {"hidden_size": 32, "intermediate_size": 48, "image_size": 16, "patch_size": 8, **HEADS}
WHISPER = {
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}, "vocab_size": VOCABULARY,
    "d_model": 32, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
    "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def ids(rows, length=LENGTH):
    return torch.randint(5, VOCABULARY, (rows, length))


def prompt(rows):
    return {"input_ids": ids(rows), "use_cache": False}


def padded(rows):
    lengths = torch.randint(2, LENGTH + 1, (rows, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids(rows), "attention_mask": mask, "use_cache": False}


def masked(rows):
    return {name: value for name, value in padded(rows).items() if name != "use_cache"}


def pair(rows):
    return {"input_ids": ids(rows, 9), "decoder_input_ids": ids(rows, 5), "use_cache": False}


def image(rows):
    return {"pixel_values": torch.randn(rows, 3, 16, 16)}


def sound(rows):
    decoded = {"decoder_input_ids": ids(rows, 4), "use_cache": False}
    return {"input_features": torch.randn(rows, 8, 20), **decoded}


FAMILIES = {
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 5}, prompt),
    "olmoe": ("OlmoeForCausalLM", LLAMA | {"num_experts": 6, "num_experts_per_tok": 3}, prompt),
    "phi": ("PhiForCausalLM", LLAMA, prompt),
    "gemma": ("GemmaForCausalLM", LLAMA | {"num_key_value_heads": 1, "head_dim": 16}, prompt),
    "gemma2": ("Gemma2ForCausalLM",
               LLAMA | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}, prompt),
    "gpt2 with a mask": ("GPT2LMHeadModel", GPT2, padded),
    "gptneox": ("GPTNeoXForCausalLM", LLAMA, prompt),
    "t5": ("T5ForConditionalGeneration", T5 | {"num_heads": 4, "decoder_start_token_id": 0}, pair),
    "vit": ("ViTForImageClassification", VISION, image),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, sound),
    "gptoss": ("GptOssForCausalLM",
               LLAMA | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}, prompt),
    "bloom": ("BloomForCausalLM",
              {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}, prompt),
    "granitemoe": ("GraniteMoeForCausalLM", GROUPED | {"num_local_experts": 4}, prompt),
    "llama, padded": ("LlamaForCausalLM", LLAMA, padded),
    "bert, padded": ("BertForMaskedLM", LLAMA, masked),
    "clip, padded": ("CLIPTextModelWithProjection",
                     LLAMA | {"projection_dim": 8, "eos_token_id": 2}, masked),
}  # fmt: skip
QUICK = ("clip, padded",)
"""Others are system tests; a padded Llama is the document's example."""


def made(name):
    """A small model with random weights, the class of its attention, and its inputs by rows."""
    class_name, sizes, inputs = FAMILIES[name]
    cls = getattr(transformers, class_name)
    family = re.split("For|LMHead|TextModel", class_name)[0]
    return cls(cls.config_class(**sizes)).eval(), f"{family}Attention", inputs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.system) for n in FAMILIES]
)
def test_a_family_is_cut_and_gives_its_own_results(name):
    model, attention, inputs = made(name)
    run, engines = compiled(model, NanoFlow(rules_of(model, attention)))
    worst = 0.0
    for rows in (8, 8, 5, 5):
        given = inputs(rows)
        results = [tree_leaves(form(**given).to_tuple()) for form in (run, model)]
        for mine, own in zip(*results, strict=True):
            scale = float(own.abs().max()) or 1.0
            worst = max(worst, float((mine - own).abs().max()) / scale)
    print(f"\n{name:18} differs by {worst:.1e}")
    assert worst <= 1e-6
    (engine,) = engines
    assert [each.sizes for each in engine.recordings.values()] == [(4, 4), (2, 3)]
    assert "attention" in [each.tag for each in engine.program.operators]


def test_mamba_is_refused_by_name_and_right(caplog):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    config = transformers.MambaConfig(**sizes, intermediate_size=64)
    model = transformers.MambaForCausalLM(config).eval()
    run, engines = compiled(model, NanoFlow(rules_of(model, "MambaMixer")))
    given = {"input_ids": ids(8, 2), "use_cache": False}
    torch.testing.assert_close(run(**given).logits, model(**given).logits)
    assert engines == [] and "runs under a transformation of torch.func" in caplog.text


@pytest.mark.system
def test_switch_transformers_are_right_in_pieces(caplog):
    """It is traced in pieces; of an expert's rows there are as many as chance sends there."""
    experts = {"num_heads": 4, "num_experts": 2, "expert_capacity": 3}
    config = transformers.SwitchTransformersConfig(**T5, num_sparse_encoder_layers=1, **experts)
    model = transformers.SwitchTransformersEncoderModel(config).eval()
    run, engines = compiled(
        model, NanoFlow(rules_of(model, "SwitchTransformersDenseActDense", "mlp"))
    )
    for rows in (8, 8, 5):
        given = ids(rows)
        mine, own = (form(given).last_hidden_state for form in (run, model))
        torch.testing.assert_close(mine, own)
    records = [each for engine in engines for each in engine.recordings.values()]
    assert records and all(each.sizes for each in records), "an expert's rows are cut"
    assert "no input has a dynamic first dimension" in caplog.text
