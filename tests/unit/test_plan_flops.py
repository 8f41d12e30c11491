"""Counted matrix products against those that real models do, by torch's own counter."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megagrpo.megatron.heads import VocabularyShard, vocabulary_logprobs
from megagrpo.plan.time.flops import FORWARD, head_flops, layers_flops, sequence_flops, training_pass
from megagrpo.recipe.schema import LoraConfig, TrainConfig
from megagrpo.weights.families import architecture_of
from tests.tiny_models import DIMENSIONS, FAMILIES

LENGTH = 96


def model_of(family, **changes):
    """A transformers model, in memory; and what we read from its config."""
    class_name, own = FAMILIES[family]
    config = getattr(transformers, class_name)(**(DIMENSIONS | own | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("eager")  # the counter does not know grouped products
    return model, architecture_of(config.to_dict())


def counted(model, *, backward):
    tokens = torch.arange(LENGTH)[None] % 131
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def of_all_pairs(arch, over):
    """What transformers' eager attention multiplies besides: it masks half of all pairs after their products."""
    return layers_flops(arch, range(arch.layers), over, 0.0, float(LENGTH) ** 2).attention


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_of_every_family_are_what_torch_counts(family):
    model, arch = model_of(family)
    ours = sequence_flops(arch, FORWARD, LENGTH, LENGTH).total + of_all_pairs(arch, FORWARD)
    assert ours == pytest.approx(counted(model, backward=False), rel=0.002)

    training = training_pass(TrainConfig(total_steps=1))
    ours = sequence_flops(arch, training, LENGTH, LENGTH).total + of_all_pairs(arch, training)
    ours -= head_flops(arch, FORWARD, LENGTH).total  # transformers keeps its logits
    assert ours == pytest.approx(counted(model, backward=True), rel=0.002)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recomputed_layers_are_what_torch_counts(family):
    model, arch = model_of(family)
    model.activation_checkpointing_enable({"use_reentrant": True})  # as Megatron's: whole layers
    model.train()
    full = training_pass(TrainConfig(total_steps=1, recompute="full"))
    ours = sequence_flops(arch, full, LENGTH, LENGTH).total + of_all_pairs(arch, full)
    ours -= head_flops(arch, FORWARD, LENGTH).total
    assert ours == pytest.approx(counted(model, backward=True), rel=0.002)


@pytest.mark.parametrize("trained", [True, False])
def test_the_output_layer_is_counted_as_it_is_computed(trained):
    """At response tokens only, and its logits twice; a frozen one, as with adapters, has no gradient."""
    _, arch = model_of("qwen3")
    hidden = torch.randn(LENGTH, arch.hidden, requires_grad=True)
    weight = torch.randn(arch.vocab, arch.hidden, requires_grad=trained)
    positions = torch.arange(0, LENGTH, 3)
    with FlopCounterMode(display=False) as counter:
        shard = VocabularyShard(arch.vocab, 0, None)
        logprobs, _ = vocabulary_logprobs(
            hidden, positions, positions % 7, weight, shard, temperature=1.0, entropy=False
        )
        logprobs.sum().backward()
    over = training_pass(TrainConfig(total_steps=1, lora=None if trained else LoraConfig()))
    assert counter.get_total_flops() == head_flops(arch, over, float(len(positions))).total


def test_parts_add_up_to_the_whole_model():
    _, arch = model_of("deepseek_v3")
    whole = layers_flops(arch, range(arch.layers), FORWARD, 10.0, 100.0)
    parts = [layers_flops(arch, [layer], FORWARD, 10.0, 100.0) for layer in range(arch.layers)]
    assert sum(part.total for part in parts) == pytest.approx(whole.total)
    assert parts[0].experts == 0.0
    assert all(part.experts > 0.0 for part in parts[1:])


def test_recompute_and_adapters_change_what_is_done():
    arch = model_of("qwen2")[1]

    def flops(**train):
        train = TrainConfig(total_steps=1, **train)
        return sequence_flops(arch, training_pass(train), LENGTH, LENGTH, train.lora)

    none, selective, full = (flops(recompute=kind) for kind in ("none", "selective", "full"))
    assert selective.attention == pytest.approx(none.attention * 4 / 3)
    assert selective.dense == none.dense
    assert full.attention == selective.attention
    assert full.dense > selective.dense
    adapters = flops(lora=LoraConfig(rank=1))
    assert 2 / 3 < adapters.dense / none.dense < 0.8
    assert adapters.attention == none.attention
