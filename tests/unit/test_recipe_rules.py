"""Rules between the fields of a recipe: each names the field to change, what was given, what is needed, and a fix."""

import re
from pathlib import Path
from typing import Any

import pytest

import megagrpo
from megagrpo.errors import PreflightError, Problem
from megagrpo.plan.advice import IMPOSSIBLE, START_RULES, UNWISE
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from megagrpo.recipe.model_rules import MODEL_RULES
from megagrpo.recipe.problems import is_field
from megagrpo.recipe.schema import Recipe
from megagrpo.section import Section, broken_rules, rule_texts
from tests.tiny_run import make_run, recipe_with

EVAL = "eval.sets={main: {files: [{path: held_out.jsonl}]}}"
SGLANG = ["rollout.engine=sglang"]
EXTERNAL = ["rollout.engine=external", "rollout.urls=[http://a:1]"]
CRITIC = "algorithm.critic={}"
GAE = "algorithm.advantage.name=gae"
GDPO = "algorithm.advantage.name=gdpo"
PLAIN_GDPO = "algorithm.advantage={name: gdpo, standard_deviation: none, epsilon: 0.5}"
TWO_FUNCTIONS = "reward.functions=[{function: gsm8k}, {function: format, arguments: {pattern: a}}]"
WEIGHTS = "algorithm.correction.weights=token"
AS_OLD = "algorithm.rollout_logprobs_as_old=true"
REINFORCE = "algorithm.loss.name=reinforce"
DISCOUNTED = "algorithm.advantage={name: reinforce_plus_plus, discount: 0.9}"
OTB = "algorithm.advantage.name=otb"
KL_IN_REWARD = "algorithm.kl={coefficient: 0.1, placement: reward}"
AGENT = "agent={tools: [python]}"
BY_TURN = "algorithm.credit=discounted"
SERVED = ["rollout.quantization=fp8", "train.quantization=same_as_rollout"]
CARRIES_OVER = "schedule={carry_over: 4, max_staleness: 1}"
ODD_LENGTHS = ["rollout.response_tokens_max=15", "data.prompt_tokens_max=18"]
APART = "cluster.placement=disaggregated"
SPLIT_EXPERTS = "rollout.layout={tensor: 2, expert: 2}"
SERVER = "teachers.t={kind: server, path: x}"
ON_RANKS = "teachers.t={kind: ranks, path: x}"
SECOND = "teachers.u={kind: reference}"
SYSTEM = "algorithm.distillation.system=Add."
DISTILLED = "algorithm.distillation={}"
GIVEN = "algorithm.distillation.given_responses={share: 0.5, column: x}"
GIVEN_TOP = "algorithm.distillation={objective: teacher_top_k, given_responses: {share: 1.0, column: x}}"
NO_REWARD = "reward.functions=[]"

ALONE = """
    train.total_steps=null train.tokens_per_microbatch=31 train.logprob_tokens_per_microbatch=128
    train.layout.virtual_pipeline=2 train.layout.last_stage_layers=2 train.optimizer.min_lr=1e-3
    train.optimizer.min_lr=1e-7 train.optimizer.warmup_steps=3 train.offload=[reference] train.offload=[critic]
    algorithm.minibatches=3 algorithm.advantage.epsilon=0 algorithm.loss.name=kl_cov algorithm.kl.target=0.1
    algorithm.reference.update_every_steps=1 algorithm.correction.weights.high=0.5
    algorithm.correction.weights.low=1.5 rollout.top_k=1 rollout.urls=[http://a:1]
    rollout.api_key_variable=KEY rollout.layout.tensor=2 rollout.samples_per_prompt=1 cluster.engine_devices=1
    eval.samples_per_prompt=4 eval.top_p=0.5 checkpoint.keep_best=main/mean@1 weights.transfer=disk
    weights.directory=/tmp rollout.prompts_per_step=1000000 eval.temperature=0.0005 schedule.max_staleness=1
"""
"""Values that break a rule by themselves."""

BROKEN: list[tuple[str, list[str]]] = [
    *((override.partition("=")[0], [override]) for override in ALONE.split()),
    ("reward.functions", ["reward.functions=[]"]),
    ("reward.by_source.a*", ["reward.by_source={a*: [{function: gsm8k, weight: 0}]}"]),
    ("algorithm.advantage.name", [GDPO, "reward.by_source={a: [{function: gsm8k}]}"]),
    (
        "rollout.mismatch.own_routes_every_steps",
        ["algorithm.routing=own", "rollout.mismatch.own_routes_every_steps=1"],
    ),
    ("train.total_steps", ["train.total_epochs=1"]),
    ("train.total_episodes", ["train.total_steps=null", "train.total_episodes=15"]),
    ("train.layout.data", ["algorithm.minibatches=8", "train.layout.data=4"]),
    ("train.tokens_per_microbatch", ["train.tokens_per_microbatch=16", "train.layout.context=2", *ODD_LENGTHS]),
    ("train.logprob_tokens_per_microbatch", ["train.logprob_tokens_per_microbatch=96", "algorithm.minibatches=2"]),
    ("rollout.layout.tensor", ["rollout.engine=vllm", "rollout.layout.tensor=16", "train.layout.tensor=16"]),
    ("rollout.vllm.gpu_memory_utilization", ["rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=2.0"]),
    ("rollout.vllm.kv_cache_memory_bytes", ["rollout.engine=vllm", "rollout.vllm.kv_cache_memory_bytes=8G"]),
    ("train.layout.expert", ["train.layout.tensor=2", "train.layout.expert=2"]),
    ("train.layout.expert", ["train.layout.expert=3", "train.layout.data=2"]),
    ("cluster.engine_devices", ["cluster.engine_devices=2", "cluster.placement=disaggregated"]),
    ("train.offload", ["train.offload=[optimizer, optimizer]"]),
    ("train.offload", ["train.offload=[optimizer]", "cluster.placement=disaggregated"]),
    ("train.layer_spec", ["cluster.device=cpu", "train.layer_spec=transformer_engine"]),
    ("weights.transfer", ["cluster.device=cuda", "weights.transfer=process_group"]),
    ("eval.early_stopping.target", [EVAL, "eval.early_stopping={metric: main/mean@1}"]),
    ("eval.early_stopping.metric", ["eval.early_stopping={metric: main/mean@1, target: 0.9}"]),
    ("checkpoint.keep_best", [EVAL, "checkpoint.keep_best=main/pass@4"]),
    ("schedule.oversample", ["schedule={kind: sync, oversample: 2, carry_over: 2, max_staleness: 1}"]),
    ("schedule.oversample", ["schedule={kind: sync, oversample: 2}", "algorithm.advantage.name=remax"]),
    ("checkpoint.after_export", ["checkpoint.after_export=[ls]", "checkpoint.export_hugging_face=false"]),
    ("checkpoint.keep_best", [EVAL, "checkpoint.keep_best=main/accuracy"]),
    ("checkpoint.keep_best", [EVAL, "checkpoint.keep_best=mean@1"]),
    ("checkpoint.keep_best", [EVAL, "checkpoint.keep_best=other/mean@1"]),
    ("eval.samples_per_prompt", [EVAL, "eval.sets.second={files: [{path: a}]}", "eval.samples_per_prompt=4"]),
    ("eval.sets.main.samples_per_prompt", [EVAL, "eval.sets.main.samples_per_prompt=4"]),
    ("eval.sets.main.top_k", [EVAL, "eval.temperature=1", "eval.sets.main.temperature=0", "eval.sets.main.top_k=4"]),
    ("eval.sets.main.solved_at", [EVAL, "eval.sets.main.solved_at=0.5"]),
    ("eval.sets.a set", ["eval.sets.a set={files: [{path: a}]}"]),
    ("eval.sets.train", ["eval.sets.train={files: [{path: a}]}"]),
    ("rollout.top_k", [*SGLANG, "rollout.top_p=0.9"]),
    ("rollout.top_k", [*EXTERNAL, "rollout.top_k=4097"]),
    ("rollout.top_k", [*SGLANG, "rollout.top_k=101", "rollout.sglang={sampling_mask_max_tokens: 100}"]),
    ("rollout.min_p", [*SGLANG, "rollout.min_p=0.1"]),
    ("rollout.urls", ["rollout.engine=external"]),
    ("rollout.urls", ["rollout.engine=external", "rollout.urls=[http://a:1, http://b:1]"]),
    ("rollout.urls", ["rollout.engine=external", "rollout.engines=2", "rollout.urls=[http://a:1, http://a:1]"]),
    ("rollout.urls", ["rollout.engine=external", "rollout.urls=['http://[x']"]),
    ("rollout.quantization", ["rollout.quantization=fp8", *EXTERNAL]),
    ("train.quantization", ["train.quantization=same_as_rollout"]),
    ("train.quantization", [*SERVED, "train.lora={}"]),
    ("train.overlap", [*SERVED, "train.overlap=[gradients, parameters]"]),
    ("cluster.device", [*SGLANG, "rollout.quantization=fp8", "cluster.device=cpu"]),
    ("cluster.gpu", [*SGLANG, "rollout.quantization=fp8", "cluster.gpu=B200"]),
    ("model.dtype", [*SGLANG, "rollout.quantization=fp8", "model.dtype=float32"]),
    ("weights.transfer", [*SGLANG, "rollout.quantization=fp8", "weights.transfer=disk"]),
    ("deterministic", ["deterministic=true", "cluster.placement=disaggregated", "schedule=async"]),
    ("deterministic", ["deterministic=true", "schedule={oversample: 4}"]),
    ("deterministic", ["deterministic=true", CARRIES_OVER]),
    ("weights.pause", ["deterministic=replayable", CARRIES_OVER, "weights.pause=in_place"]),
    ("rollout.engine", ["deterministic=true", *EXTERNAL]),
    ("train.megatron.deterministic_mode", ["deterministic=true", "train.megatron={deterministic_mode: false}"]),
    ("rollout.sglang", ["rollout.sglang={mem_fraction_static: 0.5}"]),
    ("rollout.layout.expert", [*EXTERNAL, "rollout.layout={tensor: 2, expert: 3}"]),
    ("rollout.layout.attention_data", [*EXTERNAL, "rollout.layout={tensor: 2, attention_data: 3}"]),
    ("rollout.layout.pipeline", ["rollout.layout.pipeline=2"]),
    ("rollout.layout.expert", [*SGLANG, "cluster.device=cpu", "train.layout.data=2", SPLIT_EXPERTS]),
    ("checkpoint.keep_best", [EVAL, "checkpoint.keep_best=main/sums/maen@1"]),
    ("algorithm.advantage.epsilon", ["algorithm.advantage={standard_deviation: none, epsilon: 0.5}"]),
    ("algorithm.advantage.epsilon", ["algorithm.advantage={name: pass_k, standard_deviation: none, epsilon: 0.5}"]),
    ("algorithm.advantage.epsilon", [PLAIN_GDPO, TWO_FUNCTIONS]),
    ("algorithm.advantage.epsilon", ["algorithm.advantage={epsilon: 0, standard_deviation: population}"]),
    ("rollout.dynamic_sampling", ["algorithm.advantage.name=remax", "rollout.dynamic_sampling={}"]),
    ("algorithm.advantage.name", [GDPO]),
    ("reward.overlong", [GDPO, TWO_FUNCTIONS, "reward.overlong={buffer_tokens: 2}"]),
    ("reward.non_stop_score", [GDPO, TWO_FUNCTIONS, "reward.non_stop_score=-1"]),
    ("algorithm.kl.placement", [GDPO, TWO_FUNCTIONS, KL_IN_REWARD]),
    ("algorithm.critic", [GAE]),
    ("algorithm.critic", [CRITIC]),
    ("algorithm.critic.warmup_steps", [GAE, "algorithm.critic.warmup_steps=2"]),
    ("algorithm.critic.warmup_steps", [GAE, "algorithm.critic.warmup_steps=1", "train.optimizer.warmup_steps=2"]),
    ("algorithm.loss.covariance_low", ["algorithm.loss={name: clip_cov, covariance_low: 5.0}"]),
    ("algorithm.loss.name", [GAE, CRITIC, "algorithm.loss.name=gmpo"]),
    ("algorithm.loss.name", [DISCOUNTED, "algorithm.loss.name=gmpo"]),
    ("algorithm.loss.name", [OTB, "algorithm.loss.name=gmpo"]),
    ("algorithm.loss.name", ["algorithm.loss.name=dppo_kl"]),
    ("algorithm.rollout_logprobs_as_old", [OTB, AS_OLD]),
    ("rollout.samples_per_prompt", [OTB, "rollout.samples_per_prompt=1"]),
    ("algorithm.loss.name", [AGENT, BY_TURN, "algorithm.loss.name=gmpo"]),
    ("reward.functions", ["reward.functions=[{function: agent}]"]),
    ("reward.overlong", [AGENT, "reward.overlong={buffer_tokens: 4}"]),
    ("deterministic", [AGENT, "deterministic=replayable"]),
    ("eval.sets.main.response_tokens_max", [AGENT, EVAL, "eval.response_tokens_max=10000"]),
    ("algorithm.credit.name", [BY_TURN]),
    ("algorithm.credit.name", [AGENT, BY_TURN, GAE, CRITIC]),
    ("algorithm.credit.name", [AGENT, BY_TURN, "algorithm.advantage.name=pass_k"]),
    ("algorithm.kl.placement", [AGENT, BY_TURN, KL_IN_REWARD]),
    ("algorithm.kl.horizon", ["algorithm.kl={coefficient: 0.1, horizon: 5}"]),
    ("algorithm.kl.straight_through", ["algorithm.kl={coefficient: 0.1, placement: reward, straight_through: true}"]),
    ("algorithm.kl.estimator", ["algorithm.kl={coefficient: 0.1, estimator: k1}"]),
    ("algorithm.reference.share", ["algorithm.kl.coefficient=0.1", "algorithm.reference.share=0.5"]),
    ("algorithm.rollout_logprobs_as_old", [AS_OLD, WEIGHTS]),
    ("algorithm.rollout_logprobs_as_old", [AS_OLD, REINFORCE]),
    ("algorithm.rollout_logprobs_as_old", [AS_OLD, REINFORCE, "algorithm.kl.coefficient=0.1"]),
    ("algorithm.correction.reject.0.high", ["algorithm.correction.reject=[{level: token}]"]),
    ("algorithm.correction.reject.0.high", ["algorithm.correction.reject=[{level: token, high: 0.5}]"]),
    ("algorithm.correction.reject.0.low", ["algorithm.correction.reject=[{level: token, low: 0.1, statistic: k1}]"]),
    ("algorithm.correction.reject.0.low", ["algorithm.correction.reject=[{level: token, low: 1e-9}]"]),
    ("algorithm.correction.reject.0.high", ["algorithm.correction.reject=[{level: token, statistic: k2, high: 201}]"]),
    (
        "algorithm.correction.reject.0.high",
        ["algorithm.correction.reject=[{level: token, statistic: binary_kl, high: 21}]"],
    ),
    ("algorithm.correction.weights.high", ["algorithm.correction.weights={high: 5e8}"]),
    ("reward.functions", ["reward.functions.0.weight=0"]),
    ("reward.functions", ["reward.functions.0.counts=when_others_score"]),
    ("reward.overlong.buffer_tokens", ["reward.overlong={buffer_tokens: 17}"]),
    ("reward.non_stop_score", ["reward.non_stop_score=-1", "reward.truncated=mask"]),
    ("train.lora.targets", ["train.lora.targets=[q_proj, o_proj, q_proj]"]),
    ("train.overlap", ["train.overlap=[parameters]"]),
    ("train.overlap", ["train.overlap=[gradients, parameters]", "train.distributed_optimizer=false"]),
    ("train.gradient_dtype", ["train.gradient_dtype=bfloat16", "model.dtype=float32"]),
    ("train.optimizer.moment_dtype", ["train.optimizer.moment_dtype=bfloat16", "train.distributed_optimizer=false"]),
    ("train.optimizer.moment_dtype", ["train.optimizer.moment_dtype=bfloat16", "model.dtype=float32"]),
    ("train.optimizer.moment_dtype", ["train.optimizer.moment_dtype=bfloat16", "cluster.device=cpu"]),
    ("train.optimizer.moment_dtype", ["train.optimizer={kind: muon, moment_dtype: bfloat16}", "model.dtype=bfloat16"]),
    ("train.optimizer.muon", ["train.optimizer.muon.momentum=0.9"]),
    ("train.optimizer.kind", ["train.optimizer.kind=muon", "train.lora={}"]),
    ("train.recompute.modules", ["train.recompute={}"]),
    ("train.recompute.modules", ["train.recompute={modules: [mlp], layers: 2}"]),
    ("train.recompute.modules", ["train.recompute={modules: [mlp, mlp]}"]),
    ("train.recompute.modules", ["train.recompute={modules: [moe, shared_experts]}"]),
    ("train.recompute.modules", ["train.recompute={modules: [moe_act]}", "cluster.device=cpu"]),
    ("train.recompute.modules", ["train.recompute={modules: [moe_act]}", "train.layer_spec=local"]),
    ("train.layer_spec", ["train.lora={}", "train.layer_spec=transformer_engine"]),
    ("train.recompute.modules", ["train.lora={}", "train.recompute={modules: [moe_act]}"]),
    ("train.profile.ranks", ["train.profile={steps: [1], ranks: [5]}"]),
    ("train.layout.tensor", ["train.layout={tensor: 65536, pipeline: 3}"]),
    ("rollout.sglang.mem_fraction_static", [*SGLANG, "rollout.sglang.mem_fraction_static=2.0"]),
    ("rollout.sglang.max_running_requests", [*SGLANG, "rollout.sglang.max_running_requests=0"]),
    ("rollout.layout.tensor", [*SGLANG, "rollout.layout.tensor=2"]),
    ("rollout.layout", [*SGLANG, APART, "rollout.layout.tensor=12"]),
    ("rollout.layout.pipeline", [*SGLANG, APART, "rollout.layout={tensor: 12, pipeline: 2}"]),
    ("algorithm.routing", [*SGLANG, APART, "rollout.layout.pipeline=2", "algorithm.routing=replay"]),
    ("cluster.engine_devices", [*EXTERNAL, APART, "cluster.engine_devices=1"]),
    ("schedule.kind", [*SGLANG, "schedule=async"]),
    ("schedule.kind", [APART, "schedule=one_step_off", "rollout.dynamic_sampling={}"]),
    ("weights.pause", [APART, "schedule=one_step_off", "weights.pause=in_place"]),
    ("schedule.prompts_at_once", [APART, "schedule={kind: async, prompts_at_once: 1}"]),
    ("schedule.carry_over", ["schedule={carry_over: 100, max_staleness: 1}"]),
    ("data.decontaminate.against", ["data.decontaminate={}"]),
    ("agent.tools", ["agent={}"]),
    ("agent.arguments", [AGENT, "agent.arguments={a: 1}"]),
    ("agent.python", [AGENT, "agent.python=x"]),
    ("agent.python", ["agent={reasoning_gym: {}, python: x}"]),
    ("agent.tools.0.stateful", ["agent={tools: [{name: 'a.py:b', stateful: true}]}"]),
    ("reward.models.m", ["reward.models={m: {kind: classifier, path: x}}"]),
    ("algorithm.distillation", [DISTILLED]),
    ("teachers", [SERVER]),
    ("teachers.t.url", ["teachers.t={kind: external, url: host, tokenizer: x}", DISTILLED]),
    ("algorithm.distillation.by_source", [SERVER, SECOND, DISTILLED]),
    ("algorithm.distillation.by_source.a", [ON_RANKS, "algorithm.distillation.by_source={a: x, b: t}"]),
    ("teachers.u", [ON_RANKS, SECOND, "algorithm.distillation.by_source={a: t}"]),
    ("teachers.t.kind", [SERVER, "algorithm.distillation.objective=full_vocabulary"]),
    ("teachers.t.kind", [SERVER, "algorithm.distillation.objective=student_top_k"]),
    (
        "algorithm.distillation.objective.beta",
        [ON_RANKS, "algorithm.distillation.objective={name: teacher_top_k, beta: 0.3}"],
    ),
    ("algorithm.distillation.given_responses", [ON_RANKS, GIVEN]),
    ("algorithm.distillation.given_responses", [ON_RANKS, GIVEN_TOP, "algorithm.advantage=remax"]),
    ("algorithm.distillation.given_responses", [ON_RANKS, GIVEN_TOP, "algorithm.advantage=gae", "algorithm.critic={}"]),
    ("algorithm.distillation.given_responses", [ON_RANKS, GIVEN_TOP, AGENT]),
    ("rollout.temperature", [SERVER, DISTILLED, "rollout.temperature=0.9"]),
    ("rollout.top_p", [SERVER, DISTILLED, "rollout.top_p=0.9"]),
    ("rollout.dynamic_sampling", [ON_RANKS, DISTILLED, NO_REWARD, "rollout.dynamic_sampling={}"]),
    ("eval.sets.main.functions", [ON_RANKS, DISTILLED, NO_REWARD, EVAL]),
    ("algorithm.loss.name", [ON_RANKS, DISTILLED, "algorithm.loss.name=gmpo"]),
    ("algorithm.distillation.system", [ON_RANKS, SYSTEM, AGENT]),
    ("teachers.t.layout", ["teachers.t={kind: ranks, path: x, layout: {tensor: 2}}", DISTILLED]),
    ("algorithm.distillation.system", [ON_RANKS, SYSTEM, "data.overlong_prompts=truncate_left"]),
    ("teachers.t.devices", [APART, "teachers.t={kind: server, path: x, devices: 64}", DISTILLED]),
]


@pytest.mark.parametrize(("field", "overrides"), BROKEN, ids=[" ".join(case[1]) for case in BROKEN])
def test_a_broken_rule_names_the_field_and_a_fix(field: str, overrides: list[str]) -> None:
    (problem,) = broken_rules(recipe_with(*overrides))
    assert problem.where == field
    assert is_field(field, Recipe)
    assert all((problem.given, problem.needed, problem.fix))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.minibatches=16"],
        ["train.layout.data=16"],
        ["train.layout.expert=2", "train.layout.data=2"],
        ["train.layout.tensor=2", "train.layout.expert=2", "train.layout.expert_tensor=1"],
        ["train.layout.tensor=2", "train.layout.pipeline=2"],
        ["cluster.placement=disaggregated", "cluster.engine_devices=2", "rollout.engines=4"],
        ["train.offload=[reference, gradients]", "algorithm.kl.coefficient=0.1"],
        ["algorithm.advantage.standard_deviation=none"],
        [
            EVAL,
            "eval.samples_per_prompt=4",
            "eval.temperature=1",
            "eval.early_stopping={metric: main/maj@4, patience: 2}",
        ],
        [EVAL, "eval.samples_per_prompt=6", "eval.temperature=1", "checkpoint.keep_best=main/openai/gsm8k/pass@4"],
        ["train.optimizer={lr: 1e-5, min_lr: 1e-6, schedule: cosine, warmup_steps: 2}"],
        ["train.total_steps=null", "train.total_episodes=16"],
        ["rollout.engine=sglang", "rollout.sglang={python: /usr/bin/python3, mem_fraction_static: 0.7}"],
        [*SGLANG, "rollout.sglang.mem_fraction_static=null"],
        ["rollout.engine=sglang", SPLIT_EXPERTS, "train.layout.data=2"],
        ["rollout.engine=external", "rollout.urls=[http://a:1]", "weights={transfer: disk, directory: /shared}"],
        [GAE, CRITIC, "rollout.samples_per_prompt=1", "algorithm.critic.warmup_steps=1", "train.offload=[critic]"],
        ["algorithm.advantage={name: gae, trace: 0.0}", CRITIC],  # TD(0)
        ["algorithm.advantage.name=remax", "rollout.samples_per_prompt=1"],
        [DISCOUNTED, "algorithm.loss.name=gspo"],
        ["algorithm.loss.name=dppo_tv", AS_OLD],
        ["algorithm.loss={name: dppo_kl, clip_high: 0.1}", "algorithm.minibatches=2", WEIGHTS],
        [OTB, KL_IN_REWARD],
        ["algorithm.correction.reject=[{level: token, statistic: binary_kl, high: 0.1}]"],
        ["algorithm.correction.weights=geometric"],
        ["algorithm.advantage.name=reinforce_plus_plus", "algorithm.loss.name=gmpo"],
        [GDPO, TWO_FUNCTIONS, "algorithm.kl.coefficient=0.1"],
        ["algorithm.loss={name: gmpo, clip_low: 1.5, clip_high: 1.5}"],
        *([AGENT, BY_TURN, f"algorithm.advantage.name={name}"] for name in ("rloo", "opo", "gpg")),
        [AGENT, "algorithm.credit={name: turn_groups, discount: 0.9}", "algorithm.loss=gspo"],
        ["algorithm.loss={name: cispo, clip_low: 1.0}"],
        ["algorithm.loss={name: kl_cov, covariance_kl: 2.0}", "algorithm.minibatches=2"],
        ["algorithm.loss={name: clip_cov, dual_clip: 3.0}"],
        ["algorithm.kl={coefficient: 0.1, estimator: k1, straight_through: true, target: 0.1, horizon: 5}"],
        ["algorithm.kl={coefficient: 0.1, estimator: k1, placement: reward}"],
        ["algorithm.kl={coefficient: 0.1}", "algorithm.reference={update_every_steps: 2, share: 0.5}"],
        ["algorithm.kl.estimator=k1"],  # switched off by its coefficient
        ["algorithm.aggregation=seq_mean_token_sum_norm", "algorithm.aggregation.divisor=8.0"],
        ["algorithm.correction={weights: {low: 0.5, outside: zero}, veto: 1e-4}"],
        ["algorithm.correction.reject=[{level: sequence, over: max, statistic: k2, high: 0.1}]"],
        ["algorithm.correction.reject=[{level: sequence, over: sum, statistic: k1, high: 50}]"],
        ["algorithm.correction.weights.outside=zero"],  # only large weights are masked
        [AS_OLD, "algorithm.minibatches=2"],
        [SERVER, "algorithm.distillation={objective: {name: teacher_top_k, divergence: jsd, beta: 0.2}, weight: 0.1}"],
        [ON_RANKS, NO_REWARD, "algorithm.distillation.objective=full_vocabulary", "rollout.samples_per_prompt=1"],
        [ON_RANKS, SECOND, "algorithm.distillation={by_source: {a*: t, b: u, c: null}}", "rollout.temperature=0.9"],
        [ON_RANKS, SECOND, "algorithm.distillation.column=teacher", "rollout.top_p=0.9"],
        [SERVER, SYSTEM, "train.layout.context=2", "data.overlong_prompts=error"],
        [ON_RANKS, GIVEN_TOP],
        [SECOND, DISTILLED, "algorithm.reference={update_every_steps: 1, share: 0.01}", "train.offload=[reference]"],
        [AS_OLD, REINFORCE, KL_IN_REWARD],  # reads the old logprobs
        ["rollout.dynamic_sampling={}", "data.no_resampling_pass_rate=0.9", "reward.overlong={buffer_tokens: 16}"],
    ],
)
def test_a_sensible_recipe_breaks_no_rule(overrides: list[str]) -> None:
    assert broken_rules(recipe_with(*overrides)) == []


def test_every_rule_has_its_text() -> None:
    sections = [Section]
    for section in sections:
        sections += section.__subclasses__()
    source = "".join(file.read_text() for file in Path(megagrpo.__file__).parent.rglob("*.py"))
    of_plans = {name for rules in (IMPOSSIBLE, START_RULES, *UNWISE.values()) for name in rules}
    assert {
        name for section in sections for name in section.RULES
    } | of_plans | MODEL_RULES.keys() <= rule_texts().keys()
    assert set(re.findall(r'\b(?:problem|report)\("(\w+)"', source)) <= rule_texts().keys()
    assert rule_texts().keys() <= set(re.findall(r'"(\w+)"', source))


@pytest.mark.parametrize("found", [list, iter, lambda values: values[0]])
def test_a_rule_is_a_line_and_its_text(found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Recipe.RULES, "short", lambda r: found([{"least": 100}]))
    text = Problem("rollout.response_tokens_max", "{rollout.response_tokens_max}", "at least {{{least}}}", "raise it")
    monkeypatch.setitem(rule_texts(), "short", text)
    with pytest.raises(PreflightError) as refused:
        preflight(load(make_run(tmp_path)), plan_only=True)
    (found,) = refused.value.problems
    assert (found.where.split()[-1], found.given, found.needed) == (text.where, "16", "at least {100}")


def test_all_broken_rules_are_found_at_once_in_every_section() -> None:
    broken = recipe_with("rollout.top_k=1", "train.total_steps=null", "train.layout.last_stage_layers=2")
    wheres = ["rollout.top_k", "train.layout.last_stage_layers", "train.total_steps"]
    assert [problem.where for problem in broken_rules(broken)] == wheres


def test_only_these_give_the_tokens_of_a_response_advantages_of_their_own() -> None:
    overrides = {
        GAE: True,
        OTB: True,
        "algorithm.advantage=reinforce_plus_plus": False,
        DISCOUNTED: True,
        "seed=1": False,
    }
    assert {each: recipe_with(each).algorithm.advantages_by_token != [] for each in overrides} == overrides


def test_gmpo_with_teachers_names_their_objective_not_the_advantage() -> None:
    (problem,) = broken_rules(recipe_with(ON_RANKS, DISTILLED, "algorithm.loss.name=gmpo"))
    assert "sampled_token" in problem.given
    assert "grpo" not in problem.given
