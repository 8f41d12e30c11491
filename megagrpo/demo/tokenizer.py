"""A tokenizer without merges: one token per character (strictly, per byte), so that any text comes back (in NFC)."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Of the class that AutoTokenizer chooses for a Qwen2 model. 262 tokens: even, so that tensor=2 splits them."""
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
