"""What a plan takes for granted about speeds, lengths and overheads. Each number can be given, or taken from a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.schema import AnyRecipe, SftRecipe


@dataclass(frozen=True)
class Assumptions:
    """Shares are of a maximum, efficiencies of a data sheet's speed, seconds are wall-clock.

    The six `..._factor` say how much longer a phase takes than everything else here predicts: they are 1 until
    `plan --calibrate` takes them from a run.
    """

    prompt_tokens: float | None = None
    """Mean prompt, in tokens. Unless given, `prompt_share` of the longest allowed."""

    prompt_share: float = 0.25
    """Mean prompt over data.prompt_tokens_max. A guess: limits are set for the longest prompts."""

    response_tokens: float | None = None
    """Mean response, in tokens. Unless given, `response_share` of the longest allowed."""

    response_share: float = 0.4
    """Mean response over rollout.response_tokens_max. A guess: published runs have 0.26 to 0.77 of their longest
    sequence, prompts included (NeMo-RL 0.4, performance-summary.md)."""

    longest_response_tokens: float | None = None
    """Longest response of a step, in tokens. Unless given, the longest allowed: some of hundreds reach it."""

    example_share: float = 0.5
    """Mean example of supervised fine-tuning over data.tokens_max."""

    epoch_rows: float | None = None
    """Prompts of one epoch, or examples, in recipes that count epochs. Unless given, the rows of data.train where its
    files are on this machine, over-long ones included."""

    signal_share: float = 0.7
    """Sampled groups whose rewards differ. A guess: they become fewer as prompts are solved (DAPO, arXiv:2503.14476,
    figure 3b). Ours: 0.53 in the median of the demo's steps."""

    packing: float = 0.9
    """Tokens of a microbatch over what it can hold. Ours: our packer over simulated lengths, 0.82 to 0.99 for 128 to
    2,048 responses."""

    imbalance: float = 1.03
    """Work of the busiest data rank over the mean. Ours: at most 1.04 over the same simulated lengths."""

    matrix_efficiency: float = 0.55
    """Dense products in training, of peak FLOPs. Large bfloat16 products reach 0.6 to 0.75 on H100; whole training
    steps of Megatron-LM up to 0.47 (its README), in which communication and attention are not counted apart."""

    expert_efficiency: float = 0.3
    """Grouped products of experts in training, of peak FLOPs. A guess for experts of 768 to 2,048 columns; whole steps
    with large experts and balanced routing reach 0.39 to 0.49 (Megatron-Core, arXiv:2504.14960)."""

    expert_imbalance: float = 1.3
    """Tokens of the busiest expert rank over the mean. A guess: nothing balances routing in reinforcement learning."""

    attention_efficiency: float = 0.4
    """Attention's core in training, of peak FLOPs: FlashAttention-2 reaches 0.35 to 0.4 on H100, version 3 up to 0.75
    forward (arXiv:2407.08608)."""

    layer_seconds: float = 1.5e-4
    """Per layer and forward pass of a microbatch, besides its products: norms, rotary embedding, launches. A guess. A
    backward pass has twice as much."""

    prefill_efficiency: float = 0.45
    """Products over prompts in an engine, of peak FLOPs. A guess, below those of training."""

    decode_efficiency: float = 0.5
    """Reading weights, keys and values in an engine, of the memory's bandwidth. A guess: single kernels reach 0.6 to
    0.8, those of experts less."""

    decode_step_seconds: float = 3e-3
    """Per decoded token of a batch, besides reading and products: scheduling, sampling, detokenising. A guess."""

    collective_seconds: float = 1.5e-5
    """Latency of one collective operation in a node. A guess."""

    network_collective_seconds: float = 5e-5
    """Latency of one collective operation over the network. A guess."""

    node_efficiency: float = 0.75
    """Of the data sheet's bytes per second within a node: NCCL's large all-reduces move 340 to 380 of 450 GB/s on eight
    H100."""

    network_bytes_per_second: float = 50e9
    """Of each GPU's share of its node's network, in each direction: one 400 Gb/s adapter per GPU."""

    network_efficiency: float = 0.75
    """Of the above. A guess."""

    overlap: float = 0.0
    """Share of the data-parallel communication that is hidden behind backward passes. megagrpo hides none."""

    optimizer_efficiency: float = 0.5
    """Adam's reading and writing, of the memory's bandwidth. A guess."""

    host_bytes_per_second: float = 20e9
    """Between a GPU and its host's memory, for train.offload: PCIe 4 at four fifths."""

    disk_bytes_per_second: float = 5e9
    """Of a shared file system, for weights.transfer: disk: all writers together, and all readers together. A guess."""

    sync_efficiency: float = 0.5
    """Of link speeds when weights travel in buckets. Published syncs take 2 to 10 times what links alone need
    (docs/performance.md)."""

    sync_seconds: float = 0.3
    """Per sync, whatever the size: pausing engines, opening and closing an update. Ours on two cores: 0.05; with NCCL
    0.2 to 0.35 s for a whole sync of 4B parameters are published (NeMo-RL, nccl-reshard-refit.md)."""

    digest_bytes_per_second: float = 50e9
    """At which a rank digests what it sends or holds, to verify a sync. A guess: a few passes over 64-bit sums in GPU
    memory."""

    reward_seconds: float = 1.3e-4
    """To score one response by a function that runs on the driver. Ours: 0.034 s for 256 (docs/performance.md)."""

    isolated_reward_seconds: float = 0.01
    """To score one response in one of reward.workers: math and your own functions. A guess; give your own."""

    send_seconds_per_response: float = 6e-5
    """To send the batch to the ranks. Ours: 0.016 s for 256 (docs/performance.md, logprobs without passes)."""

    driver_seconds: float = 0.2
    """Per step on the driver besides the phases: advantages, packing, calls, metrics. A guess for many ranks."""

    driver_seconds_per_response: float = 1e-4
    """The same for each response. Ours: 0.016 s for 256."""

    rollout_factor: float = 1.0
    """Measured over predicted seconds."""

    reward_factor: float = 1.0
    """Measured over predicted seconds."""

    logprobs_factor: float = 1.0
    """Measured over predicted seconds."""

    update_factor: float = 1.0
    """Measured over predicted seconds."""

    weight_sync_factor: float = 1.0
    """Measured over predicted seconds."""

    driver_factor: float = 1.0
    """Measured over predicted seconds, of what is between the phases."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's sequences: the mean prompt, the mean response and the longest response.

    How long responses are follows `alive`. Supervised fine-tuning has examples in their place, and no prompts.
    """

    prompt: float
    response: float
    longest: float

    @property
    def _steepness(self) -> float:
        return self.longest / self.response - 1

    def alive(self, tokens: float) -> float:
        """Share of the responses that are longer than `tokens`: (1 - tokens / longest)^(longest / mean - 1).

        Among curves of this form it is the one with the right mean; 1 up to the end if all are equally long.
        """
        return (1 - tokens / self.longest) ** self._steepness if tokens < self.longest else 0.0

    @property
    def sequence(self) -> float:
        """Mean prompt and response together."""
        return self.prompt + self.response

    @property
    def response_square(self) -> float:
        """Mean of a response's squared length."""
        return 2 * self.longest**2 / ((self._steepness + 1) * (self._steepness + 2))

    @property
    def sequence_square(self) -> float:
        """The same of prompt and response together, which attention's products grow with; all prompts alike."""
        return self.prompt**2 + 2 * self.prompt * self.response + self.response_square


def lengths_of(recipe: AnyRecipe, assumptions: Assumptions) -> Lengths:
    """As given, else shares of what the recipe allows at most. A mean is never above the longest."""
    if isinstance(recipe, SftRecipe):
        most = float(recipe.data.tokens_max)
        mean = min(most, assumptions.response_tokens or assumptions.example_share * most)
        return Lengths(0.0, mean, min(most, max(mean, assumptions.longest_response_tokens or most)))
    most_prompt, most = float(recipe.data.prompt_tokens_max), float(recipe.rollout.response_tokens_max)
    prompt = min(most_prompt, assumptions.prompt_tokens or assumptions.prompt_share * most_prompt)
    mean = min(most, assumptions.response_tokens or assumptions.response_share * most)
    return Lengths(prompt, mean, min(most, max(mean, assumptions.longest_response_tokens or most)))


def assumptions_from(given: Iterable[str]) -> Assumptions:
    """The defaults with each "name=value" of `given` in their place. Raises RecipeError naming every bad one."""
    values: dict[str, float] = {}
    problems: list[Problem] = []
    for text in given:
        name, _, written = text.partition("=")
        problem = _problem(name.strip(), written.strip())
        if problem is None:
            values[name.strip()] = float(written)
        else:
            problems.append(problem)
    if problems:
        raise RecipeError(problems)
    return replace(Assumptions(), **values)


def _problem(name: str, written: str) -> Problem | None:
    where = f"assumption {name}"
    names = [field.name for field in fields(Assumptions)]
    if name not in names:
        near = get_close_matches(name, names, n=1)
        return Problem(
            where,
            given=f"{name}={written}" if written else name,
            needed=f"NAME=VALUE with one of {', '.join(names)}",
            fix=f"did you mean {near[0]}?" if near else "",
        )
    try:
        value = float(written)
    except ValueError:
        return Problem(where, given=written or "nothing", needed=f"a number, as in {name}=0.5")
    share = name in ("packing", "overlap") or name.endswith(("_share", "_efficiency"))
    least = "at least 0" if name == "overlap" or "seconds" in name.split("_per_")[0] else "more than 0"
    if not math.isfinite(value) or value < 0 or (value == 0 and least == "more than 0") or (share and value > 1):
        return Problem(where, given=written, needed=f"{least}{' and at most 1' if share else ''}")
    return None
