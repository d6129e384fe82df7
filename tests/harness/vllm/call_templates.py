"""Small chat templates with the constructs of published ones, and conversations for them.

Enters: nothing. Leaves: sources by name. They are written for tests; no published text is in them.
"""

from typing import Any

_SYSTEM = """{%- if tools %}{{ '<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{%- endif %}"""
_END = "{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"


def _template(call: str, content: str = "{{ m.content }}", before: str = "") -> str:
    """A template that prints `call` for each call of a message, and `content` in any message."""
    return (
        f"{_SYSTEM}{before}{{%- for m in messages %}}{{{{ '<' + m.role + '>' }}}}{content}"
        f"{{%- if m.tool_calls %}}{{%- for c in m.tool_calls %}}{call}{{%- endfor %}}{{%- endif %}}"
        f"{{%- endfor %}}{_END}"
    )


_PARTS = """{%- macro shown(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}
{%- if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"""
_PAIR = "{{ '<arg_key>' + k + '</arg_key>%s<arg_value>' }}{{ v if v is string else v | tojson }}"
_DEEPSEEK_HEAD = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + "
_DEEPSEEK_TAIL = " + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"

FORMS = {
    # Reads the content by methods of a text, as Qwen3's does.
    "qwen3": (
        _template(
            '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
            "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}",
            "{{ m.content.split('</think>')[-1].lstrip('\\n') }}",
        ),
        "hermes",
    ),
    # Prints a text as it is, and anything else as JSON.
    "hermes_text": (
        _template(
            '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}"
        ),
        "hermes",
    ),
    # Goes through the members of the arguments, as Qwen3-Coder's and Qwen3.5's do.
    "qwen3_coder": (
        _template(
            "{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
            "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
            "{{ v | tojson if v is mapping else v | string }}{{ '\\n</parameter>\\n' }}{% endfor %}"
            "{{ '</function>\\n</tool_call>' }}"
        ),
        "qwen3_coder",
    ),
    "glm45": (
        _PARTS
        + _template(
            "{{ '\\n<tool_call>' + c.function.name + '\\n' }}"
            "{% for k, v in c.function.arguments.items() %}"
            + _PAIR % "\\n"
            + "{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}",
            "{{ shown(m.content) }}",
        ),
        "glm45",
    ),
    "glm47": (
        _PARTS
        + _template(
            "{{ '<tool_call>' + c.function.name }}"
            "{% for k, v in c.function.arguments.items() %}"
            + _PAIR % ""
            + "{{ '</arg_value>' }}{% endfor %}{{ '</tool_call>' }}",
            "{{ shown(m.content) if m.role == 'user' else m.content }}",
        ),
        "glm45",
    ),
    # Adds the arguments to other texts, and knows a call by a content that is null.
    "deepseek_r1": (
        _template(
            _DEEPSEEK_HEAD + "c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + "
            "c.function.arguments + '\\n```'" + _DEEPSEEK_TAIL
        )
        .replace("{{ m.content }}", "{% if m.content is not none %}{{ m.content }}{% endif %}")
        .replace("{%- if m.tool_calls %}", "{%- if m.content is none %}"),
        "deepseek_v3",
    ),
    "deepseek_v31": (
        _template(
            _DEEPSEEK_HEAD + "c.function.name + '<｜tool▁sep｜>' + "
            "(c.function.arguments | tojson)" + _DEEPSEEK_TAIL
        ),
        "deepseek_v31",
    ),
    "kimi_k2": (
        _template(
            "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + c.id + "
            "'<|tool_call_argument_begin|>' }}{{ c.function.arguments | tojson }}"
            "{{ '<|tool_call_end|><|tool_calls_section_end|>' }}"
        ),
        "kimi_k2",
    ),
    # Prints calls in a form of its own, as Mistral's and Llama's do.
    "mistral": (_template("{{ '[TOOL_CALLS]' }}{{ c.function | tojson }}"), ""),
    "functionary": (_template("{{ '<f=' + c.function.name + '>' + c.function.arguments }}"), ""),
    # Tells of another form in words, and prints no call.
    "words": ("{{ 'Write <tool_call>{...}</tool_call>.' }}" + _template(""), ""),
    # Refuses roles that it does not know.
    "strict_roles": (
        "{%- for m in messages %}{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
        "{{ raise_exception('no such role') }}{%- endif %}{{ m.content }}{%- endfor %}",
        "",
    ),
}
"""Template -> (source, form of its calls)."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    """A call of an earlier message."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"functions.{name}:0", "type": "function", "function": function}


def asked(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    """A conversation in which a function was called."""
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "functions.weather:0", "content": "Rain."},
    ]
