"""Configurations of other frameworks become recipes, and every option is accounted for."""

from __future__ import annotations

import inspect
import math
import re
import shutil
import subprocess
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
from megagrpo.importing.options import Given, flags, hydra_overrides, unknown_in, yaml_options
from megagrpo.importing.read import FRAMEWORKS, import_recipe, report
from megagrpo.importing.shell import read_script
from megagrpo.importing.shell_words import ITEMS_MAX, UNKNOWN, Word, braces
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
        (f"{ROLLOUT}.enable_rollout_routing_replay=True", {"algorithm.routing": "replay"}),
        (f"{ROLLOUT}.enable_rollout_routing_replay=False", {"algorithm.routing": "own"}),
        (f"{ACTOR}.megatron.router_replay.mode=R3", {"algorithm.routing": "replay"}),
        (f"{ACTOR}.router_replay.mode=R2", {"algorithm.routing": "auto"}),
        (f"model_engine=megatron {ACTOR}.optim.min_lr=1e-6", {"train.optimizer.min_lr": 0.0}),
        (f"{ACTOR}.ulysses_sequence_parallel_size=4", {"train.layout.context": 4, "train.layout.data": 2}),
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
    assert recipe.rollout.sglang.model_dump().get("disable_cuda_graph") is None
    assert recipe.reward.functions[0].function == "mine.py:judge"


OPEN_INSTRUCT = "python open_instruct/grpo_fast.py --model_name_or_path models/m --dataset_mixer_list org/ds 1.0 "
SLIME, REPLAY = "python train.py --hf-checkpoint m --rollout-batch-size 8", "--use-rollout-routing-replay"
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


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_every_row_is_read_and_every_function_and_condition_is_named(framework: Framework) -> None:
    trees = parse((Path(rows.__file__).with_name(f"{framework.name}.yaml")).read_text(encoding="utf-8"), str).tree
    conditions = trees.pop("conditions")
    assert {row["when"] for row in trees.values() if "when" in row} == conditions.keys()
    functions = re.findall(r"\ndef (\w+)\(\w+: Any, \w+: Options\) -> Answer:", inspect.getsource(framework.module))
    assert {row["answer"] for row in trees.values() if "answer" in row} == set(functions)


WRONG_ROWS = """to: seed, type: hole
to: seed, answer: hole
to: seed, type: whole, when: hole
to: seed, type: whole, deafult: 1
to: [seed], type: whole
to: seed
same: here, missing: not here"""


@pytest.mark.parametrize("row", WRONG_ROWS.splitlines())
def test_a_wrong_row_is_refused_with_its_file_and_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(f"# rows\nseed: {{same: here}}\nlr: {{{row}}}\n")
    with pytest.raises(RecipeError, match=f"{path}:3 lr"):
        rows.read_table(path, {})


# --- shell and YAML ---------------------------------------------------------------------------------------------------

SCRIPTS = {
    "variables": 'A=1; B="x $A"; show $A "$B" $B ${A}y \'$A\' "a\\"b" \\$A',
    "defaults": 'show ${A:-1} "${A:-b c}" ${A-} ${B:=2} ${1:-three} "$@" end',
    "arithmetic": "A=$((1024 * 2)); B=$(((A + 1) * 3)); show $A $B $((B / 7)) $(( $A - ${B} ))",
    "continued": "show a \\\n  b=c \\\n  'd e'   # all\n",
    "arrays": 'A=(one "two three" # not this\n  four)\nA+=(five)\nshow "${A[@]}"',
    "lists": 'F=/a/b.parquet; L="[\'$F\', \'$F\']"; show data="${L}" x=\'["console","wandb"]\'',
    "appended": "A=1; A+=2; export B=$A; show $A$B `echo a` `echo b`",
    "redirected": "show a b 2>&1 >/dev/null\nshow c 2>/dev/null || true; show d",
    "basename": "M=/models/Qwen/Q; show $(basename $M)-x $(basename ${M})",
    "documents": "cat <<EOF >/dev/null\nshow not this\nEOF\nshow this; (cat <<E)>/dev/null;show a\nno\nE\nshow that",
    "two assigned": "A=1 B=2\n! show $A\nA=3 B=4 # c\nif [ $A = 3 ]; then A=5 B=6\nshow $A; fi",
    "last case": "case a in a) show a ;& # c\nesac; show b",
    "joined": 'A=x; show $A/y.$A ${A}_z pre"$A b"post',
    "cases": 'L=(); C=gpu; case "$C" in npu) P=16; L+=(x) ;; g*|tpu) P=8 ;; *) P=1 ;; esac; show $P "${L[@]}"',
    "functions": 'f() { local a=$1; shift; show $a "$@" $#; }; f 1 "2 3" 4',
    "loops": "for i in {1..3} x; do [ $i = 2 ] && continue; show $i; done; for ((j=0; j<2; j++)); do show $j; done",
    "parts": "A=head/tail.sh; show $((2**4)) ${A##*/} ${A%.sh} ${A//a/b} ${A^^} ${#A} ${A:0:4}",
    "probes": 'D=$(false && echo npu || echo gpu); if [[ $D == g* && ! -z "$D" ]]; then show $D; else show no; fi',
    "local": "f() { local N=3 M=4; show $N $M; }; N=16; f; show $N ${M:-none}",
    "sides": "for a in 0 1; do for b in 0 1; do [ a -a $b = 1 ] && show b; [[ $a = 1 || $b = 1 ]] && show 1; done done",
    "operators": "true && show a; false || show b; if true; then show c; fi",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_is_read_as_bash_would_run_it(text: str) -> None:
    shown = 'show() { printf "<%s>" "$@" >&3; echo >&3; }\n' + text
    ran = subprocess.run(["bash", "-c", f"exec 3>&1\n{shown}"], capture_output=True, text=True, check=False)
    commands = [command for command in read_script(text, {}, {}).commands if command[0].text == "show"]
    read = ["".join(f"<{word.text}>" for word in command[1:]) for command in commands]
    assert read == ran.stdout.splitlines()


def test_reading_a_script_runs_nothing_and_what_only_a_shell_can_tell_stays_unknown(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"A=$(touch {mark}); B=`touch {mark}`; python train.py --a $A --b $B --c $NOT_SET --d $((NOT_SET + 1))"
    words = [word.text for word in read_script(text, {}, {}).commands[-1]]
    assert [text.startswith(UNKNOWN) for text in words[3::2]] == [True] * 4
    assert not mark.exists()


@pytest.mark.parametrize("text", ["{1..999999999}", "{1..999}{1..999}{1..999}"])
def test_braces_stand_for_a_limited_number_of_words(text: str) -> None:
    assert len(braces(text)) <= ITEMS_MAX


@pytest.mark.parametrize(
    ("text", "note"),
    [("a | " * 20_000, "read up to"), ("a=(" * 20_000, "read up to"), ('a\nshow "b', "line 2 has a form"), ("a;", "")],
)
def test_what_is_not_read_is_said(text: str, note: str) -> None:
    notes = read_script(text, {}, {}).notes
    assert (note in notes[0]) if note else not notes


def test_what_a_branch_that_cannot_be_chosen_leaves_is_not_known() -> None:
    script = read_script("A=1; L=(a)\nif test $X; then\n  A=2; L+=(b)\n  B=3\nfi\nrun $A ${L[@]}", {}, {})
    assert [word.text for word in script.commands[-1]] == ["run", f"{UNKNOWN}$X", "a", f"{UNKNOWN}${{L[@]}}"]


def test_a_value_that_is_set_by_hand_stands_whatever_the_script_assigns() -> None:
    script = read_script("NNODES=$(nodes)\nrun $NNODES", {}, {"NNODES": "4"})
    assert [word.text for word in script.commands[-1]] == ["run", "4"]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab $\"'\\(){}[]=+#\n;|&<>`@-0:", max_size=60))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    read_script(text, {"a": "b"}, {})


def test_references_in_yaml_are_resolved_where_they_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "a: {n: 4, b: '${a.n}', c: '${.n}', d: 'x-${..e}', f: '${oc.select:a.z,7}', g: '${oc.env:HOME}', h: '${b.c}'}\n"
        "e: ${a.n}\nanchored: &x [1]\nagain: *x\nloop: ${loop}\n"
    )
    found = yaml_options(path)
    values = {name: found[name].value for name in ("a.b", "a.c", "a.d", "a.f", "e", "again")}
    assert values == {"a.b": 4, "a.c": 4, "a.d": "x-4", "a.f": 7, "e": 4, "again": [1]}
    assert unknown_in(found["a.g"].value)
    assert unknown_in(found["a.h"].value)
    assert found["loop"].value


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
