"""The demo's untrained model, Qwen2 with 0.9 million parameters, and its tokenizer."""

from __future__ import annotations

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

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


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Random weights in float32. Heads, query groups, layers and vocabulary are even, for tensor=2 and pipeline=2."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen2ForCausalLM(config).float()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, without merges, so that any text comes back (in NFC).

    AutoTokenizer chooses this class for a Qwen2 model. 262 tokens: an even number, which tensor=2 can split.
    """
    vocabulary = [PAD, END, *ROLES, *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocabulary)},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )
