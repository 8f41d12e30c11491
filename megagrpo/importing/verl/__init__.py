"""verl: how Hydra's YAML, or a script that runs main_ppo, is read, and the answers that rows of verl.yaml compute."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from megagrpo.importing.options import SCRIPT_SUFFIXES, Configuration, command_line, hydra_overrides, yaml_options
from megagrpo.importing.rows import Compute, Condition, Options, by_name, truth
from megagrpo.importing.translate import Framework
from megagrpo.importing.values import kept
from megagrpo.importing.verl import several


def is_program(word: str) -> bool:
    return word.rpartition("/")[2] in ("main_ppo.py", "main_dapo.py") or word.endswith((".main_ppo", ".main_dapo"))


def read(path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Configuration:
    """Reads a script, or Hydra's YAML. Raises RecipeError if it is neither."""
    if path.suffix not in SCRIPT_SUFFIXES:
        return Configuration(path, yaml_options(path))
    words, notes = command_line(path, is_program, set_to, environment, "python3 -m verl.trainer.main_ppo ...")
    return Configuration(path, hydra_overrides(words), notes)


ANSWERS: Mapping[str, Compute] = by_name(
    several.train_files, several.val_files, several.minibatches, several.loss_mode, several.loss_scale,
    several.bypassed, several.importance, several.rounds, several.kl_in_loss, several.kl_in_reward,
    several.kl_loss_type, several.kl_penalty, several.kl_control, several.betas, several.warmup_share,
    several.least, several.least_rate, several.lora_rank, several.lora_targets, several.tokens_of_microbatch,
    several.responses_of_microbatch, several.logprob_tokens, several.recompute, several.strategy, several.nodes,
    several.offload_reference, several.engine, several.greedy, several.reward_file, several.length_in_penalty,
    several.loggers, several.evaluated_each, several.saved_each, several.save_contents, kept, several.own_file,
) | {"clip_low": partial(several.clip, "low"), "clip_high": partial(several.clip, "high")}  # fmt: skip


def of_loss(name: str) -> Condition:
    return Condition(lambda options: several.loss(options) == name, f"only its loss {name} reads it")


def advantage_in(names: Collection[str], otherwise: str) -> Condition:
    return Condition(lambda options: options["algorithm.adv_estimator"] in names, otherwise)


def has_overlong_penalty(options: Options) -> bool:
    kinds = ("reward_model", "reward")
    on = [options[f"{kind}.reward_kwargs.overlong_buffer_cfg.enable"] for kind in kinds]
    return any(truth(one) for one in on if one is not None)


CONDITIONS: Mapping[str, Condition] = {
    "long_prompts": Condition(
        lambda options: not options.true("data.filter_overlong_prompts"),
        "filter_overlong_prompts leaves longer prompts out, as here",
    ),
    "no_megatron": Condition(
        lambda options: not several.is_megatron(options), "with Megatron recompute_granularity counts"
    ),
    "ratio": Condition(lambda options: several.loss(options) != "gpg", "this loss has no ratio"),
    "sapo": of_loss("sapo"),
    "clip_cov": of_loss("clip_cov"),
    "kl_cov": of_loss("kl_cov"),
    "dual_clip": Condition(
        lambda options: several.loss(options) in ("vanilla", "clip_cov"), "only its losses vanilla and clip_cov read it"
    ),
    "grpo": advantage_in(("grpo", "grpo_vectorized", "grpo_passk"), "only GRPO's advantages read it"),
    "discount": advantage_in(("gae", "reinforce_plus_plus"), "this advantage does not discount"),
    "trace": advantage_in(("gae",), "this advantage does not discount"),
    "critic": advantage_in(("gae",), "there is no critic: only gae has one"),
    "kl_in_loss": Condition(several.in_loss, "there is no KL penalty in the loss"),
    "kl_in_reward": Condition(several.in_reward, "there is no KL penalty in the reward"),
    "adaptive_kl": Condition(
        lambda options: several.in_reward(options) and options["algorithm.kl_ctrl.type"] == "adaptive",
        "its coefficient is fixed",
    ),
    "evaluation_samples": Condition(
        lambda options: options.number(f"{several.ROLLOUT}.val_kwargs.temperature") != 0,
        "evaluation is greedy: temperature 0",
    ),
    "overlong_penalty": Condition(has_overlong_penalty, "overlong_buffer_cfg.enable is false"),
    "adapters": Condition(several.has_adapters, "no adapters"),
    "no_clip_of_optim": Condition(
        lambda options: f"{several.ACTOR}.optim.clip_grad" not in options, "optim.clip_grad counts"
    ),
    "no_total_steps": Condition(
        lambda options: options["trainer.total_training_steps"] is None, "total_training_steps is given, and counts"
    ),
}
VERL = Framework("verl", "verl", ANSWERS, CONDITIONS, several.rest)
