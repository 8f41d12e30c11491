"""Cost of float8 blocks in nats, on the CPU: a small model that has learnt sums by heart, with and without them.

    python -m benchmarks.quantization            # four minutes of one core

The model answers at temperature 1 with its bfloat16 weights quantised, as an engine would; the logprobs of its tokens
are compared with those of the same weights as they are, as a trainer's. All products are in float32, so that nothing
else differs. In the last row inputs of linear layers are rounded to float8 as well, in groups of 128 of a token, as
SGLang's kernels round them. It emulates them: it is no figure of theirs, and a model of 0.9 million parameters is no
figure for yours.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from examples.demo.adder import make_splits
from examples.demo.model import make_model, make_tokenizer
from megagrpo.weights.quantizing import dequantize, quantize

STEPS, BATCH, SEED = 1500, 64, 1
SAMPLES = 4096


def trained() -> tuple[torch.nn.Module, list[Tensor]]:
    """The demo's model after so many steps on right answers, and prompts [tokens] of sums that it has not seen."""
    tokenizer = make_tokenizer()
    model, splits, draw = make_model(tokenizer, SEED), make_splits(), random.Random(SEED)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows = []
    for its in splits.warm_start:
        prompt, response = tokens(f"<|user|>{its.question}<|assistant|>"), tokens(f"{its.response}<|end|>")
        rows.append((prompt + response, len(prompt)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    longest = max(len(row) for row, _ in rows)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / STEPS)
        inputs = torch.full((BATCH, longest), tokenizer.pad_token_id)
        targets = torch.full((BATCH, longest), -100)
        for index, (row, begin) in enumerate(draw.sample(rows, BATCH)):
            inputs[index, : len(row)] = torch.tensor(row)
            targets[index, begin : len(row)] = inputs[index, begin : len(row)]
        loss = torch.nn.functional.cross_entropy(model(inputs).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained to a loss of {loss.item():.3f}")
    return model.bfloat16().float(), [
        torch.tensor(tokens(f"<|user|>{its.question}<|assistant|>")) for its in splits.test
    ]


def in_blocks(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with its linear layers' weights through float8; the head stays, as in SGLang."""
    found = deepcopy(model)
    for name, module in found.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            values, scales = quantize(module.weight.data.bfloat16())
            module.weight.data = dequantize(values, scales, torch.float32)
    return found


@contextmanager
def rounded_inputs(model: torch.nn.Module) -> Iterator[None]:
    """Inputs of linear layers in float8, with a float32 scale for each group of 128 of a token."""

    def rounded(_: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        groups = given[0].unflatten(-1, (-1, 128))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        return (((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2),)

    linear = [its for name, its in model.named_modules() if isinstance(its, torch.nn.Linear) and name != "lm_head"]
    hooks = [module.register_forward_pre_hook(rounded) for module in linear]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def sampled(model: torch.nn.Module, prompts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Responses [samples, tokens] at temperature 1 and their logprobs."""
    rows, logprobs = prompts, []
    for _ in range(tokens):
        of_next = model(rows).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(of_next.exp(), 1)
        logprobs.append(of_next.gather(1, chosen))
        rows = torch.cat([rows, chosen], 1)
    return rows, torch.cat(logprobs, 1)


@torch.no_grad()
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with torch.enable_grad():
        model, prompts = trained()
    quantized, tokens, end = in_blocks(model), 8, make_tokenizer().eos_token_id
    torch.manual_seed(SEED)
    rows = torch.stack([prompts[index % len(prompts)] for index in range(SAMPLES)])
    print("| what is in float8 | mean | p99 | max | k3 |\n|---|---|---|---|---|")
    for name, engine, inputs in (
        ("nothing", model, False),
        ("weights", quantized, False),
        ("weights, and inputs of products", quantized, True),
    ):
        if inputs:
            with rounded_inputs(engine):
                found, rollout = sampled(engine, rows, tokens)
        else:
            found, rollout = sampled(engine, rows, tokens)
        of_all = model(found).logits.log_softmax(-1)[:, rows.shape[1] - 1 : -1]
        train = of_all.gather(2, found[:, rows.shape[1] :, None])[..., 0]
        ends = found[:, rows.shape[1] :] == end
        d = (train - rollout)[ends.cumsum(1) - ends.int() == 0]  # up to the end, and with it
        figures = d.abs().mean(), d.abs().quantile(0.99), d.abs().max(), (d.exp() - 1 - d).mean()
        print(f"| {name} | " + " | ".join(f"{figure:.2g}" for figure in figures) + " |")


if __name__ == "__main__":
    main()
