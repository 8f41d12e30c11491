"""Small tokenizers with chat templates that have what is peculiar to six families, trained on Python's own sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megagrpo.agents.chat import Chat

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
{%- if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}
</tool_call>
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


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML.replace("ANSWER", ""), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"), TAGS),
    "thinking": Family(
        CHATML.replace("ANSWER", KEEPS_THINKING), CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"),
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
