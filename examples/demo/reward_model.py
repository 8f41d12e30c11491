"""Trains a reward model for `larger` (demo/puzzles.py): python -m examples.demo.reward_model MODEL OUTPUT

It is the demo's model with a head for one number, and learns whether A or B is right.
"""

from __future__ import annotations

import random
import sys

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.demo.adder import SEED
from examples.demo.puzzles import larger

STEPS, PUZZLES_PER_STEP, LR = 150, 32, 5e-4


def train(model: str, output: str) -> float:
    """Writes the Hugging Face directory `output`. Returns the share of the last ten steps' answers scored on the right
    side of 0."""
    torch.manual_seed(SEED)
    maker = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    shares = []
    for _ in range(STEPS):
        puzzles = [larger(maker) for _ in range(PUZZLES_PER_STEP)]
        answered = [(puzzle.question, letter) for puzzle in puzzles for letter in "AB"]
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answered]
        tokens = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
        right = torch.tensor([float(letter == puzzle.right) for puzzle in puzzles for letter in "AB"])
        scores = classifier(**tokens).logits[:, 0]
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(scores, right).backward()
        optimizer.step()
        schedule.step()
        shares.append(((scores > 0) == (right > 0)).float().mean().item())
    classifier.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return sum(shares[-10:]) / 10


if __name__ == "__main__":
    print(f"{sys.argv[2]}: a reward model, right about {train(sys.argv[1], sys.argv[2]):.1%} of answers")
