"""Asks a model with nothing but transformers: python -m examples.demo.ask DIRECTORY QUESTION... [--system SYSTEM]"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

RESPONSE_TOKENS_MAX = 12
"""Number of the tokens of the demos' longest response, `make demo-llm`."""


def ask(directory: str, questions: Sequence[str], system: str | None = None) -> Iterator[str]:
    """Yields the model's most likely response to each question: a user message after the system message, if any."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    before = [] if system is None else [{"role": "system", "content": system}]
    for question in questions:
        messages = [*before, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, max_new_tokens=RESPONSE_TOKENS_MAX, do_sample=False)
        yield tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    disable_progress_bar()
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--system")
    given = parser.parse_args()
    for question, response in zip(given.questions, ask(**vars(given)), strict=True):
        print(question, " ".join(response.split()))
