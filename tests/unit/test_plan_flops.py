"""Counted matrix products against those that real models do, by torch's own counter."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from megagrpo.plan.training_time import FORWARD, head_flops, layers_flops, training_products
from megagrpo.recipe.schema import LoraConfig, TrainConfig
from megagrpo.weights.families import architecture_of
from tests.tiny_models import DIMENSIONS, TINY_FAMILIES, USUAL_FAMILIES

LENGTH = 96


def model_of(family, **changes):
    """A transformers model, in memory; and what we read from its config."""
    class_name, own = TINY_FAMILIES[family]
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


def layers_of(arch, over, lora=None):
    """All layers of the model over one sequence."""
    return layers_flops(arch, arch.kinds, over, float(LENGTH), float(LENGTH) ** 2, lora)


def as_transformers(arch, over):
    """Also what its eager attention multiplies besides: it masks half of all pairs after their products. It keeps its
    logits, where we compute them again."""
    layers = layers_of(arch, over)
    return layers.total + layers.attention + head_flops(arch, over, LENGTH) * (3 / 4 if over.backward else 1)


@pytest.mark.parametrize("family", USUAL_FAMILIES)
def test_forward_and_backward_of_every_family_are_what_torch_counts(family):
    model, arch = model_of(family)
    assert as_transformers(arch, FORWARD) == pytest.approx(counted(model, backward=False), rel=0.002)
    training = training_products(TrainConfig(total_steps=1))
    assert as_transformers(arch, training) == pytest.approx(counted(model, backward=True), rel=0.002)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recomputed_layers_are_what_torch_counts(family):
    model, arch = model_of(family)
    model.activation_checkpointing_enable({"use_reentrant": True})  # as Megatron's: whole layers
    model.train()
    full = training_products(TrainConfig(total_steps=1, recompute="full"), whole=True)
    assert as_transformers(arch, full) == pytest.approx(counted(model, backward=True), rel=0.002)


@pytest.mark.parametrize("trained", [True, False])
def test_the_output_layer_is_counted_as_it_is_computed(trained):
    """At response tokens only, and its logits twice; a frozen one, as with adapters, has no gradient."""
    _, arch = model_of("qwen3")
    hidden = torch.randn(LENGTH, arch.hidden, requires_grad=True)
    weight = torch.randn(arch.vocab, arch.hidden, requires_grad=trained)
    positions = torch.arange(0, LENGTH, 3)
    with FlopCounterMode(display=False) as counter:
        head = Head(weight, VocabularyShard(arch.vocab, 0, None), HeadScale())
        logprobs, _ = vocabulary_logprobs(hidden, positions, positions % 7, head, entropy=False)
        logprobs.sum().backward()
    over = training_products(TrainConfig(total_steps=1, lora=None if trained else LoraConfig()))
    assert counter.get_total_flops() == head_flops(arch, over, float(len(positions)))


def test_recompute_and_adapters_change_what_is_done():
    arch = model_of("qwen2")[1]

    def flops(whole=False, **train):
        train = TrainConfig(total_steps=1, **train)
        return layers_of(arch, training_products(train, whole), train.lora)

    none, selective = (flops(recompute=kind) for kind in ("none", "selective"))
    full = flops(whole=True, recompute="full")
    assert selective.attention == pytest.approx(none.attention * 4 / 3)
    assert selective.dense == none.dense
    assert full.attention == selective.attention
    assert full.dense > selective.dense
    adapters = flops(lora=LoraConfig(rank=1))
    assert 2 / 3 < adapters.dense / none.dense < 0.8
    assert adapters.attention == none.attention
