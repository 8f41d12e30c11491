"""Small tokenizers with chat templates that have what is peculiar to some families, trained on Python's own sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megagrpo.agents.chat import USER, Chat, Tools
from megagrpo.agents.dialects.chat_request import Message

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHATML = """
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}For each call, write:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
ANSWER{{ m.content }}
{%- for t in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{ '\n' }}{% endif %}CALL
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
PROMPT{% endif %}"""
HERMES = """<tool_call>
{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}
</tool_call>"""
FUNCTION = """<tool_call>
<function={{ t.function.name }}>
{% for key, value in t.function.arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>"""
PYTHON = """{% if loop.first %}<function_calls>{% endif %}{{ t.function.name }}(
{%- for key, value in t.function.arguments.items() %}{{ key }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %})
{%- if loop.last %}</function_calls>{% endif %}"""
PYTHONIC = """{{ '[' if loop.first else ', ' }}{{ t.function.name }}(
{%- for key, value in t.function.arguments.items() %}{{ key }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}){{ ']' if loop.last }}"""
COMPACT = "[TOOL_CALLS]{{ t.function.name }}[CALL_ID]{{ t.id }}[ARGS]{{ t.function.arguments | tojson }}"
DEEPSEEK = """{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + t.function.name + '\n```json\n' + t.function.arguments + '\n```' }}
{{- '<｜tool▁call▁end｜>' }}{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"""
DEEPSEEK_31 = """{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}
{{- '<｜tool▁call▁begin｜>' + t.function.name + '<｜tool▁sep｜>' + t.function.arguments + '<｜tool▁call▁end｜>' }}
{%- if loop.last %}<｜tool▁calls▁end｜>{% endif %}"""
"""DeepSeek's own templates join arguments with text: they take JSON, no objects."""
OPENS_THINKING = """{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}"""
KEEPS_THINKING = """{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}"""
LLAMA = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

Today is {{ date_string or strftime_now('%d %b %Y') }}.
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content | trim }}{% endif %}
{%- for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}<|eot_id|>
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set t = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ t.name }}", "parameters": {{ t.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GLM = """[GMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}<|{{ m.role }}|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{{ m.content }}
{%- for t in m.tool_calls or [] %}
<tool_call>{{ t.function.name }}
{% for key, value in t.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
MISTRAL = """{{ bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
[INST] {%- if messages[0].role == 'system' and loop.index0 == ns.last %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for t in m.tool_calls %}{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}
{{- ', "id": "' + t.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}
{{- ', "call_id": "' + m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""
GLM_47 = """[GMASK]<sop>
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}<|{{ m.role }}|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content | trim }}{% endif %}</think>
{{- m.content | trim }}
{%- for t in m.tool_calls or [] %}<tool_call>{{ t.function.name }}
{%- for key, value in t.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson }}</arg_value>
{%- endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}<tool_response>
{{- m.content }}</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""
INVOKE = """]~!b[]~b]system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}{{ tools | tojson if tools }}[e~[
{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}]~b]user
{{ m.content }}[e~[
{% elif m.role == 'assistant' %}]~b]ai
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}{{ '\n' }}<minimax:tool_call>
{% for t in m.tool_calls %}<invoke name="{{ t.function.name }}">
{% for key, value in t.function.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}{{ '\n' }}<response>{{ m.content }}</response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
KIMI = """{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- set ns = namespace(plain=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.plain = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>
{%- elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|><think>
{{- m.reasoning_content if loop.index0 > ns.plain }}</think>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for t in m.tool_calls %}<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>
{{- t.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}
{{ m.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
CHANNELS = """<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- if tools or messages[0].role == 'system' %}<|start|>developer<|message|>
{{- messages[0].content if messages[0].role == 'system' }}{{ tools | tojson if tools }}<|end|>{% endif %}
{%- set ns = namespace(final=-1, name='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking.') }}{% endif %}
{%- if (m.content or m.thinking) and loop.index0 > ns.final %}<|start|>assistant<|channel|>analysis<|message|>
{{- m.content or m.thinking }}<|end|>{% endif %}
{%- set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.name }}
{{- '<|channel|>commentary json<|message|>' }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}
{%- set asked = loop.last and not add_generation_prompt %}
{%- if asked and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if asked else '<|end|>') }}
{%- elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
ZEPHYR = """
{%- for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|{{ m.role }}|>
{{ m.content + eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    tags: tuple[str, ...] = ()
    bos: str | None = None


def chatml(answer: str = "", call: str = HERMES, prompt: str = "") -> str:
    return CHATML.replace("ANSWER", answer).replace("CALL", call).replace("PROMPT", prompt)


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(chatml(), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"), TAGS),
    "thinking": Family(
        chatml(KEEPS_THINKING), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"),
        (*TAGS, "<think>", "</think>"),
    ),
    "llama": Family(
        LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
                "<|python_tag|>"),
        ("<|eot_id|>", "<|eom_id|>"), bos="<|begin_of_text|>",
    ),
    "glm": Family(
        GLM, ("[GMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"), TAGS,
    ),
    "mistral": Family(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                  "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>",), bos="<s>",
    ),
    "zephyr": Family(ZEPHYR, ("<s>", "</s>"), ("</s>",)),
    "function": Family(
        chatml(OPENS_THINKING, FUNCTION, "<think>\n"), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"),
        (*TAGS, "<think>", "</think>"),
    ),
    **{
        name: Family(
            chatml(KEEPS_THINKING, form), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"), ("<think>", "</think>")
        )
        for name, form in (
            ("pythonic", PYTHONIC), ("compact", COMPACT), ("deepseek", DEEPSEEK), ("deepseek31", DEEPSEEK_31),
        )
    },
    "python": Family(chatml(call=PYTHON), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>")),
    "glm47": Family(
        GLM_47, ("[GMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"), (*TAGS, "<think>", "</think>"),
    ),
    "invoke": Family(INVOKE, ("]~!b[", "]~b]", "[e~["), ("[e~[",), ("<think>", "</think>")),
    "kimi": Family(
        KIMI, ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
               "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
               "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("<|im_end|>",), ("<think>", "</think>"),
    ),
    "channels": Family(
        CHANNELS, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
    ),
}  # fmt: skip
"""The first stop token is the tokenizer's end of sequence."""


@cache
def texts() -> tuple[str, ...]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:12]
    return tuple(file.read_text(encoding="utf-8", errors="ignore") for file in files)


@cache
def _trained(sentencepiece: bool) -> str:
    """Makes a tokenizer with a space before a text but not after a special token in it, or a byte-level one."""
    if sentencepiece:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        lines = [line for text in texts() for line in text.splitlines(keepends=True)][:4000]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=1200, special_tokens=["<unk>", *bytes_], max_token_length=8, show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        return str(tokenizer.to_str())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    return str(tokenizer.to_str())


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(_trained(name == "zephyr"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.tags])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.stops[0])
    made.chat_template = family.template
    return made


def chat_of(name: str, **arguments: Any) -> Chat:
    tokenizer = tokenizer_of(name)
    return Chat(tokenizer, tokenizer.convert_tokens_to_ids(list(FAMILIES[name].stops)), **arguments)


def written(chat: Chat, said: Message, tools: Tools = ()) -> str:
    """Returns what the template writes of an answer behind its generation prompt, without the token that ends it."""
    whole = chat.render([USER, said], tools, prompt=False)
    answer = whole.removeprefix(chat.render([USER], tools))
    assert answer != whole
    ends = [at for token in chat.stop_tokens if (at := answer.find(chat.text([token]))) >= 0]
    return answer[: min(ends, default=None)]
