"""Tiny reward models that are trained in seconds: they prefer digits."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import torch
import transformers

from examples.demo.model import make_tokenizer

LETTERS = string.ascii_lowercase
QUESTION = {"role": "user", "content": "1+1="}


def conversation(response: str, question: dict[str, str] = QUESTION) -> list[dict[str, str]]:
    return [question, {"role": "assistant", "content": response}]


def make_reward_model(
    directory: Path, kind: str = "llama", *, steps: int = 120, pad: bool = True, labels: int = 1
) -> Path:
    """A classifier of the demo's tokenizer that says which share of a response is digits: of one layer, float32.

    kind: llama reads the last token, bert the first. Without `pad` its config names no padding token.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 96, "num_labels": labels,
        "pad_token_id": tokenizer.pad_token_id if pad else None,
    }  # fmt: skip
    config = {"llama": transformers.LlamaConfig, "bert": transformers.BertConfig}[kind](**shape)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    train(model, tokenizer, steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def train(model: Any, tokenizer: Any, steps: int) -> None:
    """The last logit learns the share of digits, from conversations of one length: no padding."""
    draws = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        length = draws.randint(1, 8)
        alphabets = [[draws.choice([LETTERS, string.digits]) for _ in range(length)] for _ in range(32)]
        texts = ["".join(map(draws.choice, of_text)) for of_text in alphabets]
        ids = [tokenizer.apply_chat_template(conversation(text), tokenize=True)["input_ids"] for text in texts]
        shares = torch.tensor([sum(letter.isdigit() for letter in text) / length for text in texts])
        padding, model.config.pad_token_id = model.config.pad_token_id, -1
        logits = model(input_ids=torch.tensor(ids)).logits[:, -1]
        model.config.pad_token_id = padding
        loss = torch.nn.functional.mse_loss(logits, shares)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def reference_logits(directory: Path, responses: list[str], question: dict[str, str] = QUESTION) -> list[list[float]]:
    """Returns the logits that transformers computes for each conversation alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for response in responses:
        ids = tokenizer.apply_chat_template(conversation(response, question), return_tensors="pt")["input_ids"]
        found.append(model(input_ids=ids).logits[0].tolist())
    return found


def make_judge(directory: Path, *, steps: int = 250) -> Path:
    """A model that writes yes if what it is asked ends in a digit, else no. It has two layers, float32."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    draws = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        length = draws.randint(1, 10)
        texts = ["".join(draws.choice(LETTERS + string.digits * 3) for _ in range(length)) for _ in range(32)]
        rows = []
        for text in texts:
            answer = "yes" if text[-1].isdigit() else "no "
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            rows.append(tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"])
        ids = torch.tensor(rows)
        labels = ids.clone()
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=True, add_generation_prompt=True)["input_ids"]
        labels[:, : len(prompt)] = -100
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
