"""Chat templates in the style of model families, written anew, and templates with faults."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken

from rlctl.environment.byte_tokenizer import byte_tokenizer as tokenizer_of_bytes

_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_ONE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = _TOOLS + "{% for m in messages %}" + _ONE + "{% endfor %}" + _OPEN
_AS_USER = (
    "{% if m.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}" + _ONE + "{% endif %}"
)
QWEN25 = _TOOLS + "{% for m in messages %}" + _AS_USER + "{% endfor %}" + _OPEN
#: Thoughts are shown only after the last message of the user.
QWEN3 = (
    _TOOLS
    + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    + "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}"
    + "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    + "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    + "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    + "{{ said }}<|im_end|>\n{% else %}"
    + _AS_USER
    + "{% endif %}{% endfor %}"
    + _OPEN
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
#: Opens the thoughts itself; shows none of earlier replies.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SMOLLM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}" + _ONE + "{% endfor %}" + _OPEN
)
#: No token ends a reply: the token of the next role does.
GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_BOS, _IM = "<s>", ("<|im_start|>",)
#: Family → (template, end of turn, further special tokens, start token).
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], str | None]] = {
    "chatml": (CHATML, "<|im_end|>", _IM, None),
    "qwen2.5": (QWEN25, "<|im_end|>", _IM, None),
    "qwen3": (QWEN3, "<|im_end|>", _IM, None),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), "<|begin_of_text|>"),
    "mistral": (MISTRAL, "</s>", ("[INST]", "[/INST]", "[TOOL_CALLS]"), _BOS),
    "gemma": (GEMMA, "<end_of_turn>", ("<start_of_turn>",), "<bos>"),
    "deepseek": (DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>"), "<｜begin｜>"),
    "phi": (PHI, "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"), None),
    "smollm": (SMOLLM, "<|im_end|>", _IM, "<|im_start|>"),
    "glm": (GLM, "<|user|>", ("<|observation|>", "<|assistant|>", "<|system|>", "<sop>"), None),
}
#: Those that show a reply without thoughts as it was sampled.
KEEPING = ("chatml", "qwen2.5", "qwen3", "llama3", "mistral", "gemma", "phi", "smollm")


def tokenizer_of(family: str) -> Any:
    """A tokenizer of bytes for a family."""
    template, end, others, start = FAMILIES[family]
    return byte_tokenizer(template, end, others, start)


def byte_tokenizer(
    template: str | None, end: str = "<|im_end|>", others: tuple[str, ...] = _IM, start: str | None = None
) -> Any:
    """A tokenizer of bytes; its special tokens take the white space after them if their family's do."""
    given = {"pad_token": "<pad>"} | ({} if start is None else {"bos_token": start})
    tokenizer = tokenizer_of_bytes(template, (end, *others), strips_right=end == "<|end|>", **given)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    return tokenizer


def _each(one: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + one + "{% endfor %}" + _OPEN


_REPLY = "{% if m.role == 'assistant' %}"
_ELSE = "{% else %}" + _ONE + "{% endif %}"
#: Fault → (what the audit must report, template).
FAULTY: dict[str, tuple[str, str]] = {
    "no template": ("no_template", ""),
    "refuses a second turn": (
        "refuses_turns",
        _each("{% if loop.index0 > 1 %}{{ raise_exception('one turn') }}{% endif %}" + _ONE),
    ),
    "shows no replies": ("reply_unseen", _each("{% if m.role != 'assistant' %}" + _ONE + "{% endif %}")),
    "shows the last message only": (
        "splits",
        "{% for m in messages[-1:] %}" + _ONE + "{% endfor %}" + _OPEN,
    ),
    "cuts replies": (
        "reply_unseen",
        _each(_REPLY + "<|im_start|>assistant\n{{ m.content[:5] }}<|im_end|>\n" + _ELSE),
    ),
    "changes the case of replies": (
        "reply_unseen",
        _each(_REPLY + "<|im_start|>assistant\n{{ m.content | upper }}<|im_end|>\n" + _ELSE),
    ),
    "marks replies": (
        "splits",
        _each(_REPLY + "<|im_start|>assistant\n> {{ m.content }}<|im_end|>\n" + _ELSE),
    ),
    "another end of turn": (
        "end_of_turn",
        _each("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_start|>end\n"),
    ),
    "end of turn is text": ("marks_are_text", _each("<|im_start|>{{ m.role }}\n{{ m.content }}<|eot|>\n")),
    "the role's name is text": ("marks_are_text", CHATML.replace("<|im_start|>", "<|role|>")),
    "no beginning of a reply": ("no_generation_prompt", "{% for m in messages %}" + _ONE + "{% endfor %}"),
    "always begins a reply": (
        "splits",
        "{% for m in messages %}" + _ONE + "{% endfor %}{% if messages[-1].role == 'user' %}"
        "<|im_start|>assistant\nSure: {% endif %}",
    ),
    "another text each time": (
        "changing",
        "{% set ns = namespace(n=0) %}" + _each(_ONE, "{{ [1, 2, 3, 4, 5, 6, 7, 8, 9] | random }}\n"),
    ),
    "counts the messages": ("splits", _each(_ONE, "{{ messages | length }} messages\n")),
    "the last message first": (
        "splits",
        "{% for m in messages[-1:] + messages[:-1] %}" + _ONE + "{% endfor %}" + _OPEN,
    ),
    "tools are not shown": ("tools_unseen", "{% if tools %}{% endif %}" + _each(_ONE)),
    "tool output is not shown": ("no_tool_role", _each("{% if m.role != 'tool' %}" + _ONE + "{% endif %}")),
    "refuses tools": (
        "no_tool_role",
        _each("{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + _ONE),
    ),
    "two start tokens": ("two_starts", "<|im_start|>" + CHATML.replace(_TOOLS, "")),
    "strips thoughts": (
        "splits_thoughts",
        _each(
            _REPLY + "<|im_start|>assistant\n{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n" + _ELSE
        ),
    ),
    "changes output of tools": (
        "observation_changed",
        _each("{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content | tojson }}<|im_end|>\n" + _ELSE),
    ),
    "broken": ("refuses_turns", _each("{{ m.nothing.more }}" + _ONE)),
}
