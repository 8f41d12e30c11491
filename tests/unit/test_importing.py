"""Configurations of other frameworks become recipes, and every option is accounted for."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.correction import ImportanceConfig, SequenceRejectionConfig, TokenRejectionConfig
from megagrpo.algorithm.policy_losses import DppoTvConfig
from megagrpo.cli import main
from megagrpo.errors import RecipeError
from megagrpo.importing import rows
from megagrpo.importing.options import TYPES, Given, flags, hydra_overrides
from megagrpo.importing.read import FRAMEWORKS, import_recipe, report
from megagrpo.importing.shell_words import UNKNOWN, Word
from megagrpo.importing.translate import Framework, translate
from megagrpo.plan.parameters import known_models
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.yaml12 import parse
from megagrpo.reward.functions import static_problems
from tests.golden.record_imported import FRAMEWORKS as RECORDED
from tests.golden.record_imported import PEERS, golden, imported
from tests.plans import planned


@pytest.mark.parametrize("name", RECORDED)
def test_a_configuration_becomes_the_recorded_recipe(name: str) -> None:
    assert imported(name).text == golden(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECORDED)
def test_an_imported_recipe_loads_keeps_all_rules_and_has_a_plan(name: str) -> None:
    made = imported(name)
    assert not made.problems
    recipe = load(golden(name), ["cluster.gpu=H100"]).recipe
    assert recipe.model.path in known_models()
    assert not [problem for problem in static_problems(recipe.reward) if ".py" not in problem.given]
    assert planned(recipe).memory


def recipe_of(framework: str, tmp_path: Path, text: str, name: str = "run.sh", **set_to: str) -> Recipe:
    source, output = tmp_path / name, tmp_path / "recipe.yaml"
    source.write_text(text, encoding="utf-8")
    made = import_recipe(framework, source, {key.replace("__", "."): value for key, value in set_to.items()}, {})
    assert not made.problems, made.problems
    output.write_text(made.text, encoding="utf-8")
    return load(output).recipe


VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=models/m "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.total_epochs=1 "
)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OF_SERVERS = (
    f"{ROLLOUT}.enforce_eager=True {ROLLOUT}.enable_prefix_caching=False {ROLLOUT}.enable_chunked_prefill=True "
    f"{ROLLOUT}.max_num_batched_tokens=4096 {ROLLOUT}.max_num_seqs=64 {ROLLOUT}.dtype=bfloat16 "
    f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32 +{ROLLOUT}.engine_kwargs.vllm.hf_overrides.rope_scaling=2 "
    f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3"
)
FILTER, CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("", {"algorithm.minibatches": 4, "algorithm.loss.dual_clip": 3.0, "train.optimizer.beta2": 0.999}),
        (f"{ACTOR}.ppo_epochs=2", {"algorithm.epochs": 2}),
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=mse",
            {"algorithm.kl.coefficient": 0.01, "algorithm.kl.estimator": "k2", "algorithm.kl.placement": "loss"},
        ),
        (f"{ACTOR}.kl_loss_coef=0.01", {"algorithm.kl.coefficient": 0.0}),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02",
            {"algorithm.kl.coefficient": 0.02, "algorithm.kl.estimator": "k1", "algorithm.kl.placement": "reward"},
        ),
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k1+",
            {"algorithm.kl.estimator": "k1", "algorithm.kl.straight_through": True},
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=0.2",
            {"algorithm.loss.name": "cispo", "algorithm.loss.clip_low": 1},
        ),
        (
            "algorithm.adv_estimator=gae critic.optim.lr=2e-5 trainer.critic_warmup=3 algorithm.lam=0.95",
            {
                "algorithm.critic.lr": 2e-5,
                "algorithm.critic.warmup_steps": 3,
                "algorithm.advantage.trace": 0.95,
                "algorithm.advantage.name": "gae",
            },
        ),
        (
            f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=9000",
            {"train.tokens_per_microbatch": 9000, "train.logprob_tokens_per_microbatch": None},
        ),
        (
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=500",
            {"algorithm.aggregation.name": "seq_mean_token_sum_norm", "algorithm.aggregation.divisor": 500},
        ),
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=512", {"weights.bucket_bytes": 512 * 2**20}),
        ("trainer.nnodes=4 trainer.n_gpus_per_node=4", {"train.layout.data": 16, "rollout.engines": 8}),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4", {"train.layout.context": 4, "train.layout.data": 2}),
        (f"{ACTOR}.optim.clip_grad=0.3", {"train.optimizer.clip_grad": 0.3}),
        (
            f"data.val_files=t.jsonl trainer.test_freq=5 {ROLLOUT}.val_kwargs.temperature=0.6 {ROLLOUT}.val_kwargs.n=4",
            {"eval.temperature": 0.6, "eval.samples_per_prompt": 4},
        ),
        (f"{FILTER}.enable=True {FILTER}.max_num_gen_batches=10", {"rollout.dynamic_sampling.rounds_max": 10}),
        (f"{FILTER}.enable=True {FILTER}.max_num_gen_batches=0", {"rollout.dynamic_sampling.rounds_max": 10**6}),
        ("model_engine=veomni", {"train.optimizer.schedule": "cosine"}),
        (f"{CORRECTION}.bypass_mode=true {CORRECTION}.loss_type=reinforce", {"algorithm.loss.name": "reinforce"}),
        (
            f"{ACTOR}.policy_loss.loss_mode=dppo_tv {ACTOR}.clip_ratio_high=0.15 {CORRECTION}.bypass_mode=true",
            {"algorithm.loss": DppoTvConfig(clip_low=0.2), "algorithm.rollout_logprobs_as_old": True},
        ),
        ("algorithm.adv_estimator=tir_optimal_token_baseline", {"algorithm.advantage.name": "otb"}),
        (
            f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5_5.0",
            {"algorithm.correction.weights": ImportanceConfig(low=0.5, high=5.0, outside="zero")},
        ),
        (
            f"{CORRECTION}.rollout_rs=seq_mean_k1,token_k2 {CORRECTION}.rollout_rs_threshold=0.25_2,0.3",
            {
                "algorithm.correction.reject": [
                    SequenceRejectionConfig(level="sequence", statistic="k1", low=math.log(0.25), high=math.log(2)),
                    TokenRejectionConfig(level="token", statistic="k2", high=0.3),
                ]
            },
        ),
        (
            f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_batch_normalize=True",
            {"algorithm.correction.weights": ImportanceConfig(name="sequence", normalize=True)},
        ),
        (f"{ROLLOUT}.name=sglang {ROLLOUT}.enable_rollout_routing_replay=True", {"algorithm.routing": "replay"}),
        (f"{ROLLOUT}.enable_rollout_routing_replay=False", {"algorithm.routing": "own"}),
        (f"{ROLLOUT}.name=sglang {ACTOR}.megatron.router_replay.mode=R3", {"algorithm.routing": "replay"}),
        (f"{ACTOR}.router_replay.mode=R2", {"algorithm.routing": "auto"}),
        (f"model_engine=megatron {ACTOR}.optim.min_lr=1e-6", {"train.optimizer.min_lr": 0.0}),
        (f"{ACTOR}.ulysses_sequence_parallel_size=4", {"train.layout.context": 4, "train.layout.data": 2}),
        (
            f"{ROLLOUT}.name=vllm {ROLLOUT}.gpu_memory_utilization=0.6 {OF_SERVERS}",
            {
                "rollout.engine": "vllm",
                "rollout.requests_at_once": 64,
                "rollout.sglang.model_extra": {},
                "rollout.vllm.model_extra": {
                    "gpu_memory_utilization": 0.6,
                    "enable_sleep_mode": True,
                    "enforce_eager": True,
                    "enable_prefix_caching": False,
                    "max_num_batched_tokens": 4096,
                    "block_size": 32,
                    "hf_overrides": {"rope_scaling": 2},
                },
            },
        ),
        (
            f"{ROLLOUT}.name=sglang {ROLLOUT}.gpu_memory_utilization=0.6 {OF_SERVERS}",
            {
                "rollout.engine": "sglang",
                "rollout.vllm.model_extra": {},
                "rollout.sglang.model_extra": {
                    "mem_fraction_static": 0.6,
                    "enable_memory_saver": True,
                    "disable_cuda_graph": True,
                    "attention_backend": "fa3",
                },
            },
        ),
        (f"{ROLLOUT}.free_cache_engine=False", {"rollout.vllm.model_extra": {"gpu_memory_utilization": 0.5}}),
    ],
)
def test_an_option_of_verl_gets_the_value_and_unit_that_it_has_here(
    tmp_path: Path, more: str, wanted: Mapping[str, Any]
) -> None:
    recipe = recipe_of("verl", tmp_path, VERL + more)
    assert {path: attrgetter(path)(recipe) for path in wanted} == wanted


CHIPS = """
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
TP=${TP:-}
EXTRA=()
case "$DEVICE" in
    npu) CARDS=16; TP=${TP:-4}; EXTRA+=(actor_rollout_ref.rollout.enforce_eager=True) ;;
    gpu) CARDS=8; TP=${TP:-2} ;;
esac
PARTS=(data.train_files=a.parquet actor_rollout_ref.model.path=m reward.custom_reward_function.path=mine.py
    reward.custom_reward_function.name=judge actor_rollout_ref.rollout.tensor_model_parallel_size=$TP)
python3 -m verl.trainer.main_ppo "${PARTS[@]}" trainer.nnodes=1 trainer.n_gpus_per_node=$CARDS \\
    trainer.total_epochs=1 "${EXTRA[@]}" "$@"
"""


def test_a_script_for_several_chips_becomes_the_run_that_it_starts_on_nvidia_gpus(tmp_path: Path) -> None:
    recipe = recipe_of("verl", tmp_path, CHIPS)
    assert (recipe.cluster.gpus_per_node, recipe.train.layout.data) == (8, 8)
    assert (recipe.rollout.engines, recipe.rollout.layout.tensor) == (4, 2)
    assert "enforce_eager" not in recipe.rollout.vllm.model_dump()
    assert recipe.reward.functions[0].function == "mine.py:judge"


OPEN_INSTRUCT = "python open_instruct/grpo_fast.py --model_name_or_path models/m --dataset_mixer_list org/ds 1.0 "
SLIME, REPLAY = "python train.py --hf-checkpoint m --rollout-batch-size 8", "--use-rollout-routing-replay"
KWARGS = f"{ROLLOUT}.engine_kwargs"
LONGER, ESTIMATOR, OPTIM = "reward.reward_kwargs.max_resp_len", f"{ACTOR}.kl_loss_type", f"{ACTOR}.optim"


@pytest.mark.parametrize(
    ("framework", "text", "option", "said"),
    [
        (
            "verl",
            f"{VERL} reward.reward_manager.name=dapo +{LONGER}=2048 data.max_response_length=4096 "
            "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=512",
            LONGER,
            "missing",
        ),
        ("verl", f"{VERL} --config-path=config --config-name=my_trainer", "--config-name", "missing"),
        ("verl", f"{VERL} {ACTOR}.use_kl_loss=True {ESTIMATOR}=full", ESTIMATOR, "missing: estimators here are"),
        ("verl", f"{VERL} {ACTOR}.use_kl_loss=True {ESTIMATOR}=k1", ESTIMATOR, "missing: k1 has no gradient"),
        ("verl", f"{VERL} {OPTIM}.lr_scheduler_type=$KIND {OPTIM}.min_lr=0", f"{OPTIM}.min_lr", "same: 0, as here"),
        (
            "verl",
            f"{VERL} +{KWARGS}.sglang.attention_backend=fa3",
            f"{KWARGS}.sglang.attention_backend",
            "same: it is of",
        ),
        (
            "verl",
            f"{VERL} +{KWARGS}.vllm.tensor_parallel_size=2",
            f"{KWARGS}.vllm.tensor_parallel_size",
            "missing: rollout.layout.tensor decides it",
        ),
        ("verl", f"{VERL} +{KWARGS}.vllm.port=8000", f"{KWARGS}.vllm.port", "missing: megagrpo starts the server"),
        (
            "verl",
            f"{VERL} {ROLLOUT}.name=sglang +{KWARGS}.sglang.tp_size=2",
            f"{KWARGS}.sglang.tp_size",
            "missing: rollout.layout.tensor decides it",
        ),
        ("open_instruct", f"{OPEN_INSTRUCT} --vllm_enforce_eager", "vllm_enforce_eager", "translated: rollout.vllm"),
        ("open_instruct", f"{OPEN_INSTRUCT} --keep_last_n_checkpoints -1", "keep_last_n_checkpoints", "missing"),
        ("verl", f"{VERL} {ACTOR}.router_replay.mode=R2", f"{ACTOR}.router_replay.mode", "missing: R2 replays"),
        ("slime", f"{SLIME} {REPLAY}", "use_rollout_routing_replay", "translated: algorithm.routing"),
        ("slime", f"{SLIME} --use-routing-replay", "use_routing_replay", "missing: routes of old logprobs"),
        ("slime", f"{SLIME} {REPLAY} --use-routing-replay", "use_routing_replay", "same: use_rollout_routing_replay"),
        ("open_instruct", f"{OPEN_INSTRUCT} --loss_fn dppo", "loss_fn", "missing: dapo or cispo; for dppo see"),
        ("slime", f"{SLIME} --tis-clip 3.0", "tis_clip", "same"),
        ("slime", f"{SLIME} --tis-clip 3.0 --use-tis", "tis_clip", "translated"),
    ],
)
def test_what_becomes_of_an_option_is_said(tmp_path: Path, framework: str, text: str, option: str, said: str) -> None:
    (source := tmp_path / "run.sh").write_text(text)
    outcomes = import_recipe(framework, source, {}, {}).translation.outcomes
    assert {one.option: f"{one.kind}: {one.why}" for one in outcomes}[option].startswith(said)


def test_steps_that_open_instruct_is_given_count_before_its_episodes(tmp_path: Path) -> None:
    assert recipe_of("open_instruct", tmp_path, f"{OPEN_INSTRUCT} --max_train_steps 50").train.total_steps == 50


def test_every_default_of_a_framework_that_differs_is_written(tmp_path: Path) -> None:
    recipe = recipe_of("open_instruct", tmp_path, OPEN_INSTRUCT.replace("org/ds 1.0", "data/a.jsonl 0.5"))
    assert recipe.algorithm.kl.coefficient == 0.05
    assert recipe.algorithm.loss.model_dump()["clip_high"] == 0.272
    assert recipe.algorithm.advantage.model_dump()["standard_deviation"] == "none"
    assert recipe.algorithm.correction.weights is not None
    assert recipe.train.optimizer.schedule == "linear"
    assert recipe.train.optimizer.beta2 == 0.999
    assert recipe.schedule.max_staleness == 8
    assert recipe.data.train[0].amount == 0.5


# --- nothing is lost --------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10**6),
    st.floats(0, 10, allow_nan=False),
    st.sampled_from(["grpo", "sglang", "a/b.parquet", "", "k1", f"{UNKNOWN}$X", "???", "true"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=2))


def options_of(framework: Framework) -> st.SearchStrategy[str]:
    named = [name.replace("*", "any_option") for name in framework.table]
    return st.one_of(st.sampled_from(named), st.from_regex(r"[a-z_]{1,9}(\.[a-z_]{1,9}){0,2}", fullmatch=True))


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_an_option_of_0_by_which_others_are_divided_is_no_crash(framework: Framework) -> None:
    for option in [name for name, row in framework.table.items() if type(row.default) is int]:
        found = translate(framework, Path("run"), {option: Given(option, 0, 1)})
        assert [outcome.option for outcome in found.outcomes] == [option]


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_option_is_lost_whatever_its_value(framework: Framework, data: st.DataObject) -> None:
    drawn = data.draw(st.dictionaries(options_of(framework), VALUES, max_size=12))
    given_ = {name: Given(name, value, line) for line, (name, value) in enumerate(drawn.items(), start=1)}
    found = translate(framework, Path("run"), given_)
    assert [outcome.option for outcome in found.outcomes] == list(given_)
    for outcome in found.outcomes:
        assert outcome.why
        if outcome.kind == "translated":
            assert any(outcome.option in field.source for field in found.fields)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.from_regex(r"[a-z][a-z_]{1,9}", fullmatch=True), max_size=6), st.sampled_from(["1", "a b", ""]))
def test_every_word_of_a_command_is_an_option_or_its_value(names: list[str], value: str) -> None:
    words = [Word(text, 1) for name in names for text in (f"--{name}", value)]
    assert set(flags(words)) == set(names)
    assert set(hydra_overrides([Word(f"+a.{name}={value}", 1) for name in names])) == {f"a.{name}" for name in names}


FORMS: list[tuple[set[str], set[str]]] = [
    ({"to", "type"}, {"nothing", "same", "instead", "note", "shown", "when"}),
    ({"to", "type", "least", "same"}, set()),
    ({"to", "type", "least", "missing"}, set()),
    ({"to", "choices", "otherwise"}, {"type", "nothing", "same", "shown", "when"}),
    ({"to", "nothing", "same", "otherwise"}, {"when"}),
    ({"to", "if_true", "if_false"}, {"when"}),
    ({"to", "if_true", "same"}, {"shown", "when"}),
    ({"to", "if_false", "same"}, {"shown", "when"}),
    ({"same"}, {"to"}),
    ({"missing"}, {"to", "nothing", "when"}),
    ({"part_of"}, set()),
    ({"part_of", "nothing", "otherwise"}, set()),
    ({"answer"}, {"to", "when"}),
    ({"answer", "same"}, {"to", "nothing", "when"}),
]
"""Keys that a row of each form has, and those that it may have beside `default` and `page_note`."""


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_every_row_has_a_form_and_every_function_and_condition_is_named(framework: Framework) -> None:
    document = parse((Path(rows.__file__).with_name(f"{framework.name}.yaml")).read_text(encoding="utf-8"), str)
    assert not document.problems
    trees, kinds = document.tree, {"choices": dict, "nothing": list, "least": int}
    conditions = trees.pop("conditions")
    assert {row["when"] for row in trees.values() if "when" in row} == conditions.keys()
    functions = re.findall(r"\ndef (\w+)\(\w+: Any, \w+: Options\) -> Answer:", inspect.getsource(framework.module))
    assert {row["answer"] for row in trees.values() if "answer" in row} == set(functions)
    for option, row in trees.items():
        keys = row.keys() - {"default", "page_note"}
        assert any(needed <= keys <= needed | more for needed, more in FORMS), f"{option}: {row}"
        for key in row.keys() - {"default", "if_true", "if_false"}:
            assert isinstance(row[key], kinds.get(key, str)), f"{option}: {key}"
            assert row[key], f"{option}: {key}"
        assert row.get("type", "any") in TYPES, option


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_recipe_says_what_is_missing_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    output = tmp_path / "made" / "recipe.yaml"
    command = ["import", "verl", str(PEERS / "verl_megatron.sh"), "-o", str(output), "--set", "CKPTS_DIR=/ckpt"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "an_option_of_tomorrow" in told
    assert "trust_remote_code" in told
    assert load(output).recipe.checkpoint.directory == "/ckpt"
    output.write_text("mine")
    assert main(command) == 2
    assert output.read_text() == "mine"
    assert main([*command, "--overwrite"]) == 0


def test_a_recipe_that_cannot_run_is_written_and_refused_with_the_options_that_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    source.write_text(f"{VERL} {ACTOR}.optim.lr=-3")
    assert main(["import", "verl", str(source), "-o", str(output)]) == 2
    place = f"train.optimizer.lr, from {ACTOR}.optim.lr"
    assert place in capsys.readouterr().err
    assert place in output.read_text()


def test_without_a_place_the_recipe_is_all_of_the_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "slime", str(PEERS / "slime_math.sh")]) == 0
    printed = tmp_path / "recipe.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load(printed).recipe.model.path == "Qwen/Qwen3-8B"


def test_an_option_that_is_set_by_hand_counts_and_keys_are_not_shown(tmp_path: Path) -> None:
    source = tmp_path / "run.sh"
    source.write_text("python train.py --hf-checkpoint models/m --wandb-key abc123 --prompt-data data.jsonl")
    made = import_recipe("slime", source, {"rollout_batch_size": "16", "num_rollout": "5"}, {})
    assert "rollout.prompts_per_step" in {field.path for field in made.translation.fields}
    assert "abc123" not in made.text + report(made.translation)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    script, python = tmp_path / "run.sh", tmp_path / "train.py"
    script.write_text("echo nothing here")
    python.write_text("print('no configuration')")
    for framework, path in (("verl", script), ("open_instruct", script), ("trl", python), ("verl", tmp_path / "none")):
        with pytest.raises(RecipeError):
            import_recipe(framework, path, {}, {})
