"""Predicted seconds of a step: how they follow from a recipe, and that they are of the right size."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.plan.assumptions import Assumptions, Lengths
from megagrpo.plan.case import A_CPU, Case, Machines
from megagrpo.plan.engine import EngineSpeed
from megagrpo.plan.time import Sampling, prompts_of_rounds, rollout_seconds, step_time
from megagrpo.plan.training_time import BatchSize, TrainingRanks
from megagrpo.recipe.schema import EngineLayoutConfig, Recipe
from tests import plans
from tests.plans import H100

PHASES = ("rollout", "reward", "logprobs", "update", "weight_sync", "driver")


LLAMA_8B, QWEN_32B, QWEN_30B, QWEN_235B = map(
    plans.known_model, (plans.LLAMA_8B, plans.QWEN_32B, plans.QWEN_30B, plans.QWEN_235B)
)


BASE = {
    "name": "planned",
    "model": {"path": "model"},
    "data": {"train": [{"path": "train.parquet"}], "prompt_tokens_max": 512},
    "rollout": {
        "engine": "sglang",
        "engines": 8,
        "prompts_per_step": 64,
        "samples_per_prompt": 8,
        "response_tokens_max": 2048,
    },
    "reward": {"functions": [{"function": "math"}], "workers": 16},
    "train": {"layout": {"tensor": 2, "data": 4}, "total_steps": 100, "tokens_per_microbatch": 8192},
}


def case(arch=LLAMA_8B, machines=H100, assumed=Assumptions(), **sections):  # noqa: B008  (frozen)
    """BASE with values merged into its sections."""
    values = BASE | {name: BASE.get(name, {}) | section for name, section in sections.items()}
    return Case(Recipe.model_validate(values), arch, machines, assumed)


def parts(of, phase):
    return next(found.parts for found in step_time(of).phases if found.phase == phase)


def seconds(of, phase):
    return sum(parts(of, phase).values())


def test_phases_and_their_parts_add_up():
    time = step_time(case())
    assert tuple(phase.phase for phase in time.phases) == PHASES
    assert time.seconds == pytest.approx(sum(seconds for phase in time.phases for seconds in phase.parts.values()))
    assert all(seconds > 0 for phase in time.phases for seconds in phase.parts.values())
    assert time.gpus == 8
    assert time.tokens == pytest.approx(64 * 8 * (0.25 * 512 + 0.4 * 2048))
    assert time.days == pytest.approx(100 * time.seconds / 86400)
    for length, steps in (({"total_episodes": 1025}, 3), ({"total_epochs": 2}, None)):
        assert step_time(case(train={"total_steps": None, **length})).steps == steps


# Layout, engine, minibatches and responses; mean length and seconds of a step, measured by others: NeMo-RL 0.4,
# docs/about/performance-summary.md, DGX H100, bfloat16, Megatron, on policy. Their engines are vLLM; a step has an old
# and a reference pass. Where it is known, seconds of a whole sync by the fastest and by the slowest way: NeMo-RL's
# nccl-reshard-refit.md, miles' p2p-weight-transfer.md, verl's checkpoint_engine.
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA_8B, {"pipeline": 2, "data": 8}, 1, 16, (64, 4, 3584), (1060, 97.7), None),
    "Qwen3-32B": (QWEN_32B, {"tensor": 4, "pipeline": 4, "data": 2}, 4, 8, (64, 4, 3584), (3206, 393), None),
    "Qwen3-30B-A3B": (
        QWEN_30B, {"tensor": 2, "expert": 8, "expert_tensor": 1, "data": 16}, 4, 8, (64, 4, 3584), (3154, 225),
        (0.74, 7.0),
    ),
    "Qwen3-235B-A22B": (
        QWEN_235B,
        {"tensor": 2, "context": 2, "pipeline": 8, "expert": 16, "expert_tensor": 1, "data": 4,
         "first_stage_layers": 11, "last_stage_layers": 11},
        16, 8, (16, 1, 7680), (5671, 506), (3.2, 10.8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_are_about_as_long_as_published_ones(name):
    arch, layout, tensor, engines, (prompts, minibatches, longest), (mean, published), sync = PUBLISHED[name]
    of = case(
        arch,
        assumed=Assumptions(signal_share=1.0, prompt_tokens=130, response_tokens=mean - 130),
        algorithm={"kl": {"coefficient": 0.001}, "minibatches": minibatches},
        train={"layout": layout, "recompute": "full"},
        rollout={
            "engines": engines,
            "layout": {"tensor": tensor},
            "prompts_per_step": prompts,
            "samples_per_prompt": 32,
            "response_tokens_max": longest,
        },
    )
    assert published / 2.2 < step_time(of).seconds < published * 1.5
    if sync is not None:
        fastest, slowest = sync
        assert fastest / 2 < seconds(of, "weight_sync") < slowest


def test_training_alone_reaches_a_usual_share_of_the_peak():
    """Published for dense models with long microbatches on H100: 41 to 48 % (Megatron-LM), at most 60 % elsewhere."""
    ranks = TrainingRanks(case(QWEN_32B, train={"layout": {"tensor": 8, "pipeline": 4, "data": 2}}))
    batch = BatchSize(512, 512 * 4096, 512 * 4096.0**2, 512 * 4096)
    flops = 6 * 32e9 * batch.tokens
    share = flops / (64 * H100.gpu.flops * sum(ranks.update_seconds(batch).values()))
    assert 0.25 < share < 0.5


@settings(max_examples=60)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 4, 8]),
    longer=st.floats(1.1, 4),
)
def test_longer_responses_take_longer_and_more_replicas_no_longer(tensor, pipeline, data, longer):
    def of(replicas, response_tokens):
        layout = {"tensor": tensor, "pipeline": pipeline, "data": replicas}
        engines, assumed = tensor * pipeline * replicas, Assumptions(response_tokens=response_tokens)
        return case(assumed=assumed, train={"layout": layout}, rollout={"engines": engines})

    plain, other, twice = of(data, 500), of(data, 500 * longer), of(2 * data, 500)
    for phase in ("rollout", "update"):
        assert seconds(other, phase) > seconds(plain, phase)
    assert seconds(twice, "rollout") <= seconds(plain, "rollout")
    # Gradients begin to travel between replicas; a second may be lost to that, not more.
    assert seconds(twice, "update") <= seconds(plain, "update") + 1.0


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_bubble_is_what_a_pipeline_of_equal_stages_loses(virtual):
    train = {"layout": {"pipeline": 4, "virtual_pipeline": virtual}, "tokens_per_microbatch": 4096}
    ranks = TrainingRanks(case(assumed=Assumptions(packing=1.0), train=train))
    batch = BatchSize(256, 16 * 4096, 256 * 256.0**2, 0)
    assert ranks.microbatches(batch) == 16
    seconds = ranks.forward_seconds(batch)
    besides = ("pipeline bubble", "pipeline communication (node)")
    busy = sum(spent for name, spent in seconds.items() if name not in besides)
    assert seconds["pipeline bubble"] == pytest.approx(busy * 3 / (virtual * 16))


def test_few_sequences_are_still_enough_microbatches_to_fill_the_pipeline():
    def microbatches(batch, **layout):
        train = {"layout": {"pipeline": 4, **layout}, "tokens_per_microbatch": 1 << 20}
        return TrainingRanks(case(train=train)).microbatches(batch)

    few = BatchSize(5, 5e3, 5e6, 0)
    assert microbatches(BatchSize(100, 1e5, 1e8, 0)) == 8
    assert microbatches(few) == 5
    # The interleaved schedule takes rounds of as many as there are stages.
    assert microbatches(few, virtual_pipeline=2) == 8


def test_passes_without_gradients_may_take_more_tokens_at_once():
    def overhead(at_once):
        of = case(train={"logprob_tokens_per_microbatch": at_once}, algorithm={"kl": {"coefficient": 0.1}})
        return parts(of, "logprobs")["reference: between products"]

    assert overhead(4 * 8192) == pytest.approx(overhead(None) / 4, rel=0.1)


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({}, set()),
        ({"kl": {"coefficient": 0.1}}, {"reference"}),
        ({"minibatches": 2}, {"old"}),
        ({"minibatches": 2, "rollout_logprobs_as_old": True}, set()),
        ({"epochs": 2, "kl": {"coefficient": 0.1}}, {"old", "reference"}),
        ({"advantage": {"name": "gae"}, "critic": {}}, {"values"}),
    ],
)
def test_the_passes_are_those_that_the_recipe_asks_for(algorithm, passes):
    of = case(algorithm=algorithm)
    assert {name.split(":")[0] for name in parts(of, "logprobs") if ":" in name} == passes
    critic = {name for name in parts(of, "update") if name.startswith("critic: ")}
    assert bool(critic) == ("critic" in algorithm)


def test_groups_without_signal_are_not_trained_on_unless_they_have_to_be():
    def update(**algorithm):
        return parts(case(assumed=Assumptions(signal_share=0.5), algorithm=algorithm), "update")["attention"]

    every = update(skip_groups_without_signal=False)
    assert update() == pytest.approx(every / 2)
    for all_groups in ({"advantage": {"name": "gpg"}}, {"kl": {"coefficient": 0.1, "placement": "reward"}}):
        assert update(**all_groups) == pytest.approx(every)


@pytest.mark.parametrize(
    ("share", "rounds"), [(1.0, [60]), (0.9, [60, 7]), (0.5, [60, 60]), (0.25, [60] * 4), (0.0, [60] * 4)]
)
def test_rounds_of_dynamic_sampling_bring_the_groups_that_are_missing(share, rounds):
    for dynamic, expected in (({"rounds_max": 4}, rounds), (None, [60])):
        rollout = {"dynamic_sampling": dynamic, "prompts_per_step": 60}
        assert list(prompts_of_rounds(case(assumed=Assumptions(signal_share=share), rollout=rollout))) == expected


def test_rewards_take_workers_or_the_driver():
    found = parts(case(reward={"functions": [{"function": name} for name in ("gsm8k", "math")]}), "reward")
    assert found["on the driver"] == pytest.approx(512 * Assumptions().reward_seconds)
    assert found["in workers"] == pytest.approx(512 * Assumptions().isolated_reward_seconds / 16)


def test_offloading_takes_time_between_the_phases():
    # Main weights and two moments in float32, of 8e9 parameters on 8 ranks, both ways.
    expected = 2 * 12 * 8.03e9 / 8 / Assumptions().host_bytes_per_second
    found = parts(case(train={"offload": ["optimizer", "gradients"]}), "driver")
    assert found["to the host and back"] == pytest.approx(expected, rel=0.02)


def test_exchanges_beside_passes_and_gradients_in_bfloat16_take_less_time():
    def exchanged(**train):
        found = parts(case(train={"layout": {"tensor": 2, "data": 4}, **train}), "update")
        return [sum(spent for name, spent in found.items() if what in name) for what in ("gradients", "weights")]

    alone, beside = exchanged(), exchanged(overlap=["gradients", "parameters"])
    narrow = exchanged(gradient_dtype="bfloat16")
    assert beside[0] < alone[0]
    assert beside[1] == alone[1]  # of one optimizer step, the last of its update
    assert narrow == [pytest.approx(alone[0] / 2, rel=0.01), alone[1]]


def test_supervised_fine_tuning_has_updates_only():
    time = step_time(Case(plans.sft_recipe(examples=128, layout={"data": 8}), LLAMA_8B, H100))
    assert [phase.phase for phase in time.phases] == ["update", "driver"]
    assert time.tokens == 128 * 2048
    assert time.steps is None


def engine(arch=LLAMA_8B, tensor=1, **assumed):
    return EngineSpeed(arch, EngineLayoutConfig(tensor=tensor), H100, Assumptions(**assumed), 2)


def test_a_batch_reads_the_experts_that_its_tokens_meet():
    alone = engine(decode_efficiency=1.0, decode_step_seconds=0.0).decode_seconds(1, 100)
    assert alone == pytest.approx((8.03e9 - 128256 * 4096) * 2 / 3.35e12, rel=0.01)  # as fast as weights are read
    mixture = engine(QWEN_30B)
    assert mixture.experts_read(1) == pytest.approx(8 / 128)
    assert mixture.experts_read(2) == pytest.approx(1 - (120 / 128) ** 2)
    assert mixture.experts_read(1000) == pytest.approx(1.0)
    assert mixture.decode_seconds(1, 100) < mixture.decode_seconds(64, 100) / 4
    assert mixture.dense_bytes + mixture.expert_bytes == pytest.approx(2 * (30.5e9 - 151936 * 2048), rel=0.01)


def test_a_quantised_engine_reads_a_byte_for_each_weight():
    plain, small = engine(), replace(engine(), quantized=True)
    assert plain.dense_bytes - small.dense_bytes == pytest.approx(6.98e9, rel=0.001)  # linear layers: all but the head
    assert small.decode_seconds(1, 100) < 0.66 * plain.decode_seconds(1, 100)
    mixture, its_bytes = engine(QWEN_30B), replace(engine(QWEN_30B), quantized=True).expert_bytes
    assert its_bytes == pytest.approx(0.5001 * mixture.expert_bytes, rel=1e-4)


def test_responses_that_do_not_fit_at_once_take_longer_but_the_same_tokens_are_decoded():
    """With no cost but a fixed one per token of a batch, seconds count batches of tokens."""
    free = Machines(replace(H100.gpu, flops=1e30, memory_bytes_per_second=1e30), 8, 50e9)
    counting = replace(engine(decode_step_seconds=1.0), machines=free)

    def batches(at_once):
        found = rollout_seconds(Sampling(counting, 1, at_once, 8), Lengths(100, 400, 1000), 64)
        return found["full batches"], found["last batch"]

    assert batches(512) == (0, pytest.approx(1000))
    assert batches(256) == (pytest.approx(400), pytest.approx(1000))
    assert batches(128)[0] == pytest.approx((512 - 128) * 400 / 128)


def test_a_smaller_share_of_the_memory_makes_responses_wait():
    def rollout(**sglang):
        of = case(rollout={"response_tokens_max": 8192, "prompts_per_step": 256, "sglang": sglang})
        return seconds(of, "rollout")

    assert rollout() < rollout(mem_fraction_static=0.5) < rollout(mem_fraction_static=0.3)


def test_engines_that_share_a_device_take_turns():
    one, several = (
        case(train={"layout": {"data": 1}}, rollout={"engines": count, "requests_at_once": 256 // count})
        for count in (1, 4)
    )
    assert seconds(one, "rollout") == seconds(several, "rollout")


def test_a_step_on_cpus_is_planned_in_float32():
    single, half = (
        case(
            machines=A_CPU,
            model={"dtype": dtype},
            train={"layout": {"data": 2}},
            rollout={"engine": "transformers", "engines": 2, "prompts_per_step": 2},
        )
        for dtype in ("auto", "bfloat16")
    )
    assert seconds(half, "rollout") < seconds(single, "rollout")
