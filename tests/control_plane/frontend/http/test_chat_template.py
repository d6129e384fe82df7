"""Chat templates render as `transformers` applies them; what they refuse is a sentence."""

import json

import pytest

from control_plane.frontend.http.tools.chat_template import ChatTemplate, load_chat_template
from harness.programs.imports import assert_not_imported
from harness.services.frontend_fakes import TOKENIZER

# In the manner of DeepSeek-V3's and of Kimi-K2's: namespaces, tools, refusals, trimming, JSON.
TURNS = """{%- set ns = namespace(system='') -%}
{%- for message in messages if message.role == 'system' -%}
  {%- set ns.system = ns.system + message.content -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{{ '<|User|>' + message.content }}
  {%- elif message.role == 'assistant' and message.tool_calls is defined -%}
    {{- message.tool_calls | tojson }}
  {%- elif message.role == 'assistant' -%}
    {{- '<|Assistant|>' + message.content + (eos_token if not loop.last else '') }}
  {%- elif message.role != 'system' -%}{{ raise_exception('no such role: ' + message.role) }}
  {%- endif -%}
{%- endfor -%}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- if add_generation_prompt -%}
  {{- '<|Assistant|>' + ('<think>' if thinking else '') }}
{%- endif -%}"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {"type": "function",
     "function": {"name": "weather", "parameters": {"type": "object", "ü": "<&>"}}}
]  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "Who is <there>?\n"},
    {"role": "assistant", "content": "Nobody. "},
    {"role": "user", "content": "Nobody?"},
]


@pytest.mark.parametrize(("messages", "options"), [
    (CHAT, {}),
    (CHAT[:1], {"add_generation_prompt": False}),
    (CHAT, {"tools": TOOLS}),
    (CHAT, {"arguments": {"thinking": True}}),
    (CHAT[:3], {"add_generation_prompt": False, "continue_final_message": True}),
    ([*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], {}),
])  # fmt: skip
def test_a_chat_renders_as_transformers_applies_the_template(messages, options):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER._tokenizer, chat_template=TURNS, **TOKENS
    )
    arguments = options.get("arguments", {})
    plain = {"add_generation_prompt": True} | {k: v for k, v in options.items() if k != "arguments"}
    expected = reference.apply_chat_template(messages, tokenize=False, **plain, **arguments)
    assert ChatTemplate(TURNS, TOKENS).render(messages, **options) == expected


@pytest.mark.parametrize(("messages", "options", "sentence"), [
    ([{"role": "clown", "content": "ha"}], {}, "chat template: no such role: clown"),
    ([{"role": "user"}], {}, "cannot be rendered by the model's chat template"),
    (CHAT, {"arguments": {"messages": []}}, "chat_template_kwargs has messages"),
    (CHAT[:3], {"continue_final_message": True}, "are both true; one must be false"),
    ([{"role": "user", "content": 5}], {}, "cannot be rendered"),
])  # fmt: skip
def test_what_a_template_refuses_is_a_sentence(messages, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ChatTemplate(TURNS, TOKENS).render(messages, **options)


def test_a_checkpoint_says_its_template_in_a_file_or_in_its_configuration(tmp_path):
    assert load_chat_template(tmp_path) is None
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"},
    ]
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**tokens, "chat_template": named}))
    template = load_chat_template(tmp_path)
    assert template is not None and template.render([{"role": "user", "content": ""}]) == "<s></s>"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = load_chat_template(tmp_path)
    assert (
        template is not None
        and template.render([{"role": "user", "content": ""}]) == "from the file"
    )
    config.write_text("{")
    with pytest.raises(ValueError, match=r"the chat template of .* cannot be read"):
        load_chat_template(tmp_path)


ADDED = {"content": "<b>", "lstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize(("config", "named", "text"), [
    ({}, {"bos_token": ADDED}, "<b>"),
    ({"bos_token": None}, {"bos_token": "<b>", "additional_special_tokens": ["<x>"]}, "<b>"),
    ({"bos_token": "<a>"}, {"bos_token": ADDED}, "<b>"),
    ({"bos_token": ADDED}, None, "<b>"),
    ({"bos_token": "<a>"}, {"eos_token": "</s>"}, "<a>"),
    ({"bos_token": "<a>", "added_tokens_decoder": {"0": ADDED}}, {"bos_token": "<b>"}, "<a>"),
    ({}, {}, ""),
])  # fmt: skip
def test_special_tokens_are_those_of_both_files(tmp_path, config, named, text):
    """transformers 5.24.0 reads special_tokens_map.json where no decoder is listed."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    if named is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    template = load_chat_template(tmp_path)
    assert template is not None and template.render([{"role": "user"}]) == text
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(ValueError, match=r"special_tokens_map.json cannot be read"):
        load_chat_template(tmp_path)


def test_rendering_brings_no_torch():
    program = (
        "import sys; from control_plane.frontend.http.tools.chat_template import ChatTemplate\n"
        "assert ChatTemplate('{{ messages[0].role }}', {}).render([{'role': 'user'}]) == 'user'\n"
        "assert 'transformers' in sys.modules"
    )
    assert_not_imported(program, "torch")
