"""Asks an exported model with nothing but transformers: python -m megagrpo.demo.ask DIRECTORY QUESTION [SYSTEM]"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def ask(directory: str, question: str, system: str | None = None) -> str:
    """The model's most likely response to one user message, behind a system message if there is one."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    print(sys.argv[2], ask(*sys.argv[1:]))
