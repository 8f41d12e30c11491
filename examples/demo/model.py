"""The demos' untrained model, Qwen2 with 0.9 million parameters, and its tokenizers: of texts, and of tool calls."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Tokenizer

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MAX_TOKENS = 128

# <|user|>37+45=<|assistant|>#### 82<|end|>
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + message.content + ('<|end|>' if message.role == 'assistant' else '') -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# <|system|><tools>{"name": "calculate", "arguments": {"expression": "string"}}</tools><|user|>2*3+4=<|assistant|>
# <tool_call>\n{"name": "calculate", "arguments": {"expression": "2*3"}}\n</tool_call><|end|><|tool|>6<|assistant|>
# as Hermes and Qwen write calls; of a tool's schema only names and types.
TOOLS_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|><tools>' -}}{%- for tool in tools -%}"
    """{{- '{"name": "' + tool.function.name + '", "arguments": {' -}}"""
    "{%- for name, kind in tool.function.parameters.properties.items() -%}"
    """{{- '"' + name + '": "' + kind.type + '"' + ('' if loop.last else ', ') -}}"""
    "{%- endfor -%}{{- '}}' -}}{%- endfor -%}{{- '</tools>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}"""
    "{{- call.function.arguments | tojson + '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- if message.role == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
WORDS_OF_CALLS = (
    "<tools>", "</tools>", "<tool_call>\n", '{"name": "', '", "arguments": {"', '": "', '"}}', "\n</tool_call>",
)  # fmt: skip
"""Each is one token of `make_tool_tokenizer`, so that a call is about as long as what it says."""
TOOLS_MAX_TOKENS = 256


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16},
    "qwen3_5_text": {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "gpt_oss": {
        "head_dim": 32, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 192,
    },
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Families of the demo's models, and sizes of their own."""


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, family: str = "qwen2") -> PreTrainedModel:
    """Makes random float32 weights. Heads, query groups, layers, vocabulary are even, for tensor=2 and pipeline=2."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(family, **(sizes | FAMILIES[family]))
    return AutoModelForCausalLM.from_config(config).float()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per byte, without merges, so that decoding returns any text (in NFC).

    AutoTokenizer chooses this class for a Qwen2 model. 262 tokens: an even number, which tensor=2 can split.
    """
    return _tokenizer(CHAT_TEMPLATE, MAX_TOKENS)


def make_tool_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer like make_tokenizer's, with a template that writes tools and their calls. Each part of a call
    and each of `words` is one token; `words` must leave an even number of tokens."""
    tokenizer = _tokenizer(TOOLS_TEMPLATE, TOOLS_MAX_TOKENS)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*WORDS_OF_CALLS, *words)])
    return tokenizer


def _tokenizer(template: str, tokens_max: int) -> PreTrainedTokenizerFast:
    vocabulary = [PAD, END, *ROLES, *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocabulary)},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLES),
        chat_template=template,
        model_max_length=tokens_max,
    )
