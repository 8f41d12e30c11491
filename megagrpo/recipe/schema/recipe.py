"""The recipe: all of a user's settings, in the order the data flows; and the rules between its sections."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.algorithm.advantages import OwnAdvantageConfig
from megagrpo.algorithm.policy_losses import CovarianceLoss, OwnLossConfig
from megagrpo.recipe.reward_functions import executor_of
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.recipe.schema.algorithm import AlgorithmConfig
from megagrpo.recipe.schema.data import DataConfig, overlaps
from megagrpo.recipe.schema.eval import EvalConfig, unknown_metric
from megagrpo.recipe.schema.reward import ClassifierConfig, RewardConfig, RewardFunctionConfig, ServedModelConfig
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, ModelConfig, Pause, TrackConfig, WeightsConfig
from megagrpo.recipe.schema.schedule import AsyncConfig, OneStepOffConfig, ScheduleConfig, SyncConfig
from megagrpo.recipe.schema.teachers import (
    RanksTeacherConfig,
    ReferenceTeacherConfig,
    ServedTeacherConfig,
    TeacherConfig,
)
from megagrpo.recipe.schema.train import TRAINING_RULES, TrainConfig, too_long
from megagrpo.section import Rules, Section, Seed

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]

FLOAT8_GPUS = ("H100", "H100-PCIe", "H100-NVL", "H200", "H20", "H800", "L40S", "L4", "RTX-4090", "RTX-6000-Ada")
"""GPUs on which SGLang keeps float8 blocks as they are sent: Marlin packs them before Ada, DeepGEMM on Blackwell."""


def _asked_teachers(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yields the teachers that answer requests, if the recipe has distillation."""
    for name, teacher in recipe.teachers.items() if recipe.algorithm.distillation else ():
        if not teacher.on_ranks:
            yield {"name": name, "teacher": teacher}


TEACHER_RULES: Rules[Recipe] = {
    "distillation_without_teachers": lambda r: r.algorithm.distillation and not r.teachers,
    "teachers_without_distillation": lambda r: r.teachers and r.algorithm.distillation is None,
    "teachers_of_no_row": lambda r: (
        len(r.teachers) > 1 and (of := r.algorithm.distillation) and not of.by_source and of.column is None
    ),
    "teacher_of_a_source": lambda r: (
        {"source": source, "name": name, "known": ", ".join(r.teachers) or "(none)"}
        for source, name in (r.algorithm.distillation.by_source.items() if r.algorithm.distillation else ())
        if name is not None and name not in r.teachers
    ),
    "teacher_of_no_source": lambda r: (
        (of := r.algorithm.distillation)
        and of.by_source
        and of.column is None
        and [{"name": name} for name in r.teachers.keys() - set(of.by_source.values())]
    ),
    "objective_on_ranks": lambda r: (of := r.algorithm.distillation) and of.objective.on_ranks and _asked_teachers(r),
    "temperature_of_asked_teachers": lambda r: r.rollout.temperature != 1 and _asked_teachers(r),
    "kept_sets_of_asked_teachers": lambda r: (
        at | {"field": field}
        for at in (_asked_teachers(r) if r.algorithm.teachers_advise else ())
        for field in r.rollout.narrowing
    ),
    "teachers_system_with_agent": lambda r: r.teachers_read_more and r.agent,
    "teachers_system_of_cut_prompts": lambda r: r.teachers_read_more and r.data.overlong_prompts == "truncate_left",
    "given_with_agent": lambda r: (of := r.algorithm.distillation) and of.given_responses and r.agent,
    "layout_of_a_teacher": lambda r: (
        {"name": name, "layout": teacher.layout, "parallel": teacher.layout.parallel()}
        for name, teacher in r.teachers.items()
        if isinstance(teacher, RanksTeacherConfig) and teacher.layout and teacher.layout.ranks != r.train.layout.ranks
    ),
}


class Recipe(Section):
    """One experiment, whole."""

    kind: Literal["grpo"] = "grpo"
    """grpo: reinforcement learning, for `megagrpo train`. A recipe of kind sft has other sections: see docs/sft.md."""

    name: RunName
    """Name of the run and of its directory; letters, digits, dot, dash and underscore."""

    seed: Seed = 0
    """Seeds the data order, every sample and the ranks' generators."""

    deterministic: bool | Literal["replayable"] = False
    """true: two runs give the same metrics and weights, bit for bit, on like machines with the same packages. Kernels
    are slower; a sample does not depend on the other requests of its batch. replayable: the same where
    the order depends on speed (async, carry_over, oversample), which train --replay-schedule repeats. See
    docs/debugging.md."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    agent: AgentConfig | None = None
    """Program that asks the policy in several turns: tools, a program of your own, or an environment. See
    docs/agents.md. null: each prompt is answered once."""

    reward: RewardConfig = RewardConfig()
    teachers: dict[TeacherName, TeacherConfig] = {}
    """Models from which the policy learns, by name: algorithm.distillation says how. See docs/distillation.md."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    schedule: ScheduleConfig = SyncConfig(kind="sync")
    """Order of sampling and training: sync, one_step_off, async, or settings of one. See docs/schedules.md."""

    train: TrainConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def sequence_tokens_max(self) -> int:
        """Returns the most tokens of a training sequence: a prompt with its response, or an agent's conversation."""
        if self.agent and self.agent.tokens_max is not None:
            return self.agent.tokens_max
        return self.data.prompt_tokens_max + self.rollout.response_tokens_max

    @property
    def taught_tokens_max(self) -> int:
        """Returns the most tokens of a sequence that teachers read."""
        distillation = self.algorithm.distillation
        added = distillation.system_tokens_max if distillation and distillation.system is not None else 0
        return self.sequence_tokens_max + added

    @property
    def teachers_read_more(self) -> bool:
        """Returns whether teachers read a system message that the policy does not."""
        return self.taught_tokens_max > self.sequence_tokens_max

    @property
    def sequence_described(self) -> str:
        """Returns the longest sequence in words."""
        if self.agent and self.agent.tokens_max is not None:
            return f"conversations of up to {self.agent.tokens_max}"
        return f"prompt + response of up to {self.data.prompt_tokens_max} + {self.rollout.response_tokens_max}"

    @property
    def sequence_limits(self) -> str:
        """Returns the fields that limit the longest sequence, in words."""
        if self.agent and self.agent.tokens_max is not None:
            return "agent.tokens_max"
        return "data.prompt_tokens_max or rollout.response_tokens_max"

    @property
    def prompts_at_once(self) -> int:
        """Returns the most prompts that have begun and that no step has taken."""
        schedule, step = self.schedule, self.rollout.prompts_per_step
        if isinstance(schedule, SyncConfig):
            return step + schedule.beyond
        if isinstance(schedule, OneStepOffConfig):
            return step
        return schedule.prompts_at_once or step * (1 + schedule.max_staleness)

    @property
    def pause(self) -> Pause:
        """Returns the action of engines on requests that run when an update begins."""
        one_step_off = isinstance(self.schedule, OneStepOffConfig)
        return "finish" if one_step_off else self.rollout.layout.pause_of(self.weights.pause)

    @property
    def transfer(self) -> str:
        """Returns weights.transfer, with disk for auto if servers run already."""
        auto_is_disk = self.weights.transfer == "auto" and not self.rollout.kind.started_by_us
        return "disk" if auto_is_disk else self.weights.transfer

    @property
    def one_version(self) -> bool:
        """Returns whether one version of the weights samples a whole group. An interrupted request then begins anew,
        for equal numbers: logprobs after tokens that are read, not sampled, have other last bits."""
        return isinstance(self.schedule, OneStepOffConfig) or not self.schedule.max_staleness

    @property
    def nodes_of_engine(self) -> int:
        """Returns the number of nodes of one engine: one, unless it is larger than a node."""
        return max(1, self.rollout.devices_of_engine // self.cluster.gpus_per_node)

    @property
    def order_varies(self) -> bool:
        """Returns whether the order of samples depends on the machine's speed."""
        schedule = self.schedule
        if isinstance(schedule, SyncConfig):
            return schedule.beyond > 0
        return isinstance(schedule, AsyncConfig) and schedule.max_staleness > 0

    @property
    def policy_steps(self) -> float:
        """Returns the steps after a critic's warm-up; infinity without a critic or a number of steps."""
        critic, steps = self.algorithm.critic, self.train.total_steps
        return steps - critic.warmup_steps if critic and steps else math.inf

    @property
    def metrics_asked(self) -> dict[str, str]:
        """Returns the evaluation metrics that fields ask for, by field."""
        stopping = self.eval.early_stopping
        metrics = {
            "checkpoint.keep_best": self.checkpoint.keep_best,
            "eval.early_stopping.metric": stopping.metric if stopping else None,
        }
        return {field: metric for field, metric in metrics.items() if metric is not None}

    @property
    def functions_by_list(self) -> dict[str, list[RewardFunctionConfig]]:
        """Returns every list of reward functions, also of evaluation sets, by its path."""
        return self.reward.lists() | {
            f"eval.sets.{name}.functions": held_out.functions for name, held_out in self.eval.sets.items()
        }

    @property
    def models_beside(self) -> dict[str, ClassifierConfig | ServedModelConfig]:
        """Returns the models on devices of their own, beside ranks and engines, by their paths in the recipe."""
        rewards = {f"reward.models.{name}": model for name, model in self.reward.models.items()}
        served = {name: teacher for name, teacher in self.teachers.items() if isinstance(teacher, ServedTeacherConfig)}
        return rewards | {f"teachers.{name}": teacher for name, teacher in served.items()}

    @property
    def teachers_on_ranks(self) -> dict[str, TeacherConfig]:
        """Returns the teachers whose weights are on the training ranks, by name."""
        return {name: teacher for name, teacher in self.teachers.items() if teacher.on_ranks}

    @property
    def keeps_reference(self) -> bool:
        """Returns whether the ranks keep a reference policy, for the KL penalty or as a teacher."""
        is_teacher = any(isinstance(teacher, ReferenceTeacherConfig) for teacher in self.teachers.values())
        return self.algorithm.kl.coefficient > 0 or is_teacher

    def without_teachers(self) -> Recipe:
        """Returns the recipe for evaluations, which start no teachers."""
        algorithm = self.algorithm.model_copy(update={"distillation": None})
        return self.model_copy(update={"teachers": {}, "algorithm": algorithm})

    @property
    def teachers_alone(self) -> bool:
        """Returns whether the loss has no other term than the divergence from teachers."""
        algorithm, reward = self.algorithm, self.reward
        rewards = reward.scores or reward.overlong or reward.non_stop_score or algorithm.critic
        rewards = rewards or algorithm.credit.by_turn or isinstance(algorithm.advantage, OwnAdvantageConfig)
        others = rewards or algorithm.kl.coefficient or algorithm.entropy_coefficient
        others = others or isinstance(algorithm.loss, CovarianceLoss | OwnLossConfig)
        return algorithm.distillation is not None and algorithm.distillation.objective.in_loss and not others

    def teacher_of(self, data_source: str, extra_info: Mapping[str, Any]) -> str | None:
        """Returns the name of a row's teacher, None without one. Raises ValueError if the row names another thing."""
        distillation = self.algorithm.distillation
        return distillation.teacher_of(data_source, extra_info, self.teachers) if distillation else None

    # --- values of the rules' problems --------------------------------------------------------------------------------

    def _metrics_of_no_set(self) -> Iterator[dict[str, object]]:
        for field, metric in self.metrics_asked.items() if self.eval.sets else ():
            name, _, rest = metric.partition("/")
            if name not in self.eval.sets:
                near = difflib.get_close_matches(name, self.eval.sets, n=1) if rest else []
                meant = f"{near[0]}/{rest}" if near else f"{next(iter(self.eval.sets))}/{metric}"
                yield {"field": field, "metric": metric, "sets": " or ".join(self.eval.sets), "near": meant}

    def _models_asked(self) -> Iterator[tuple[str, str, str]]:
        """Yields (field, function, model) for each function that asks a model of reward.models."""
        for field, entries in self.functions_by_list.items():
            for index, entry in enumerate(entries):
                if executor_of(entry.function) == "asking":
                    name = entry.arguments.get("model")
                    if entry.arguments.get("url") is None and isinstance(name, str):
                        yield f"{field}.{index}", entry.function, name

    def _wrong_models(self) -> Iterator[dict[str, object]]:
        models = self.reward.models
        for field, function, name in self._models_asked():
            kind = "classifier" if function == "reward_model" else "generative"
            model = models.get(name)
            if model is None or model.kind != kind:
                yield {
                    "field": field,
                    "name": name,
                    "kind": kind,
                    "given": name if model is None else f"{name}, a {model.kind} model",
                    "fitting": ", ".join(other for other in models if models[other].kind == kind) or "(none)",
                    "url": "" if function == "reward_model" else ", or give the url of an endpoint",
                }

    def _devices_of_engines(self) -> Iterator[dict[str, object]]:
        rollout, devices, size = self.rollout, self.cluster.engine_devices, self.rollout.devices_of_engine
        if devices is not None and self.cluster.placement == "disaggregated" and size:
            most = rollout.engines * size
            if devices > most or devices % size:
                multiple = f"a multiple of tensor x pipeline of rollout.layout = {size}, at most {most}"
                needed = "at most one device for each engine" if size == 1 else multiple
                yield {"s": "s" if rollout.engines > 1 else "", "needed": needed, "most": most}

    def _engine_on_parts_of_nodes(self) -> bool:
        size, per_node = self.rollout.devices_of_engine, self.cluster.gpus_per_node
        return size > per_node and size % per_node > 0

    RULES: ClassVar[Rules[Recipe]] = {
        "minibatches_of_different_sizes": lambda r: (
            (samples := r.rollout.samples_per_step) % (minibatches := r.algorithm.minibatches)
            and {"nearest": min(range(1, samples + 1), key=lambda n: (samples % n > 0, abs(n - minibatches)))}
        ),
        "data_ranks_without_samples": lambda r: (
            not (samples := r.rollout.samples_per_step) % (minibatches := r.algorithm.minibatches)
            and samples // minibatches < r.train.layout.data
            and {"each": samples // minibatches}
        ),
        "episodes_below_a_step": lambda r: (r.train.total_episodes or 2**63) < r.rollout.samples_per_step,
        "overlong_buffer": lambda r: (
            r.reward.overlong and r.reward.overlong.buffer_tokens > r.rollout.response_tokens_max
        ),
        "held_out_tasks_overlap": lambda r: (
            {"list": f"eval.sets.{name}.files"} | values
            for name, files in r.eval.files_of_sets().items()
            for values in overlaps(r.data.train, files)
        ),
        "nothing_to_decontaminate_against": lambda r: (
            r.data.decontaminate and not r.data.decontaminate.against and not r.eval.sets
        ),
        "background_sampling_on_shared_devices": lambda r: (
            not isinstance(r.schedule, SyncConfig)
            and r.cluster.placement == "colocated"
            and r.rollout.devices_of_engine
        ),
        "oversample_with_remax": lambda r: (
            isinstance(r.schedule, SyncConfig) and r.schedule.oversample and r.algorithm.greedy_responses
        ),
        "one_step_off_dynamic_sampling": lambda r: (
            r.rollout.dynamic_sampling and isinstance(r.schedule, OneStepOffConfig)
        ),
        "prompts_at_once_of_async": lambda r: (
            isinstance(r.schedule, AsyncConfig)
            and r.schedule.prompts_at_once is not None
            and (most := (least := r.rollout.prompts_per_step) * (1 + r.schedule.max_staleness))
            and not least <= r.schedule.prompts_at_once <= most
            and {"most": most}
        ),
        "carry_over_beyond_staleness": lambda r: (
            isinstance(r.schedule, SyncConfig)
            and r.schedule.carry_over > (most := r.rollout.prompts_per_step * r.schedule.max_staleness)
            and {"most": most}
        ),
        "pause_of_one_step_off": lambda r: r.weights.given("pause") and isinstance(r.schedule, OneStepOffConfig),
        "deterministic_order": lambda r: (
            r.deterministic is True
            and r.order_varies
            and {"settings": ", ".join(f"{key}: {value}" for key, value in r.schedule.model_dump().items())}
        ),
        "deterministic_in_place": lambda r: r.deterministic and r.order_varies and r.weights.pause == "in_place",
        "deterministic_servers_of_others": lambda r: r.deterministic and not r.rollout.kind.started_by_us,
        "agent_function_without_agent": lambda r: (
            {"list": path}
            for path, functions in r.functions_by_list.items()
            if r.agent is None and any(entry.function == "agent" for entry in functions)
        ),
        "overlong_with_agent": lambda r: r.agent and r.reward.overlong,
        "answers_longer_than_an_agents": lambda r: (
            {"name": name, "tokens": held_out.response_tokens_max}
            for name, held_out in r.eval.of_sets().items()
            if r.agent and r.agent.tokens_max is None
            if (held_out.response_tokens_max or 0) > r.rollout.response_tokens_max
        ),
        "replayable_agent": lambda r: r.agent and r.deterministic == "replayable",
        "credit_without_agent": lambda r: r.algorithm.credit.by_turn and r.agent is None,
        "no_reward": lambda r: not r.reward.scores and r.algorithm.distillation is None,
        "sets_without_reward": lambda r: (
            {"name": name} for name, held_out in r.eval.sets.items() if not r.reward.scores and not held_out.functions
        ),
        "groups_of_one_sample": lambda r: (
            r.rollout.samples_per_prompt < 2 and r.algorithm.advantage.by_group and r.reward.scores
        ),
        "dynamic_sampling_without_reward": lambda r: r.rollout.dynamic_sampling and not r.reward.scores,
        **TEACHER_RULES,
        "reference_without_penalty": lambda r: (
            r.algorithm.reference.update_every_steps is not None and not r.keeps_reference
        ),
        "dynamic_sampling_without_groups": lambda r: r.rollout.dynamic_sampling and not r.algorithm.advantage.by_group,
        "gdpo_by_source": lambda r: r.algorithm.advantage.name == "gdpo" and bool(r.reward.by_source),
        "gdpo_of_one_function": lambda r: (
            r.algorithm.advantage.name == "gdpo" and not r.reward.by_source and len(r.reward.functions) < 2
        ),
        "gdpo_with_shaped_rewards": lambda r: (
            {"field": field}
            for field in ("overlong", "non_stop_score")
            if r.algorithm.advantage.name == "gdpo" and getattr(r.reward, field) is not None
        ),
        "critic_that_warms_up_throughout": lambda r: r.policy_steps <= 0,
        "warmups_longer_than_the_run": lambda r: 0 < r.policy_steps < r.train.optimizer.warmup_steps,
        "no_length": lambda r: not r.train.lengths,
        "several_lengths": lambda r: len(r.train.lengths) > 1,
        "context_of_servers": lambda r: (
            isinstance(tokens := r.rollout.server_context, int)
            and tokens < r.sequence_tokens_max
            and {"section": r.rollout.kind.settings, "name": r.rollout.kind.context, "tokens": tokens}
            | {"longest": r.sequence_tokens_max}
        ),
        "longest_sequence": lambda r: too_long(r.train, r.sequence_tokens_max),
        "logprob_tokens_without_passes": lambda r: (
            r.train.logprob_tokens_per_microbatch is not None
            and not (r.algorithm.computes_old_logprobs or r.algorithm.kl.coefficient or r.algorithm.critic)
            and not r.teachers_on_ranks
        ),
        **TRAINING_RULES,
        "offload_without_engines_beside": lambda r: (
            r.cluster.placement == "disaggregated"
            and (parts := [part for part in r.train.offload if part != "reference"])
            and {"for_engines": parts}
        ),
        "offload_of_no_reference": lambda r: "reference" in r.train.offload and not r.keeps_reference,
        "offload_of_no_critic": lambda r: "critic" in r.train.offload and r.algorithm.critic is None,
        "metric_without_sets": lambda r: (
            {"field": f, "metric": m} for f, m in r.metrics_asked.items() if not r.eval.sets
        ),
        "metric_of_another_set": _metrics_of_no_set,
        "metric_of_a_set": lambda r: (
            {"field": field, "metric": metric} | values
            for field, metric in r.metrics_asked.items()
            for values in unknown_metric(metric, r.eval)
        ),
        "model_of_a_function": _wrong_models,
        "model_that_no_function_asks": lambda r: (
            r.reward.models
            and [
                {"name": name}
                for names in [{model for _, _, model in r._models_asked()}]
                for name in r.reward.models
                if name not in names
            ]
        ),
        "model_larger_than_a_node": lambda r: (
            {"path": path, "devices": model.devices}
            for path, model in r.models_beside.items()
            if model.devices > r.cluster.gpus_per_node
        ),
        "devices_of_colocated_engines": lambda r: (
            r.cluster.engine_devices is not None and r.cluster.placement == "colocated"
        ),
        "devices_of_other_engines": lambda r: (
            r.cluster.engine_devices is not None
            and r.cluster.placement == "disaggregated"
            and not r.rollout.devices_of_engine
        ),
        "devices_of_engines": _devices_of_engines,
        "engine_larger_than_training": lambda r: (
            r.cluster.placement == "colocated"
            and r.cluster.engine_devices is None
            and r.rollout.devices_of_engine > r.train.layout.ranks
        ),
        "engine_on_parts_of_nodes": _engine_on_parts_of_nodes,
        "engine_stages_on_parts_of_nodes": lambda r: (
            not r._engine_on_parts_of_nodes()
            and r.nodes_of_engine % r.rollout.layout.pipeline
            and r.rollout.layout.pipeline % r.nodes_of_engine
        ),
        "engine_of_one_node": lambda r: r.nodes_of_engine > 1 and not r.rollout.kind.spans_nodes,
        "experts_of_an_engine_on_cpus": lambda r: (
            r.rollout.kind.started_by_us
            and r.rollout.kind.experts_need_gpus
            and r.rollout.layout.expert > 1
            and r.cluster.device == "cpu"
        ),
        "files_for_the_embedded_engine": lambda r: r.weights.transfer == "disk" and not r.rollout.kind.reads_files,
        "process_group_on_shared_gpus": lambda r: (
            r.weights.transfer == "process_group"
            and r.cluster.placement == "colocated"
            and r.rollout.kind.started_by_us
            and r.cluster.device == "cuda"
        ),
        "directory_without_files": lambda r: r.weights.directory is not None and r.transfer != "disk",
        "replay_without_routes": lambda r: (
            r.algorithm.routing == "replay" and not r.rollout.kind.returns_routes(r.rollout)
        ),
        "own_routes_without_replay": lambda r: (
            r.rollout.mismatch.own_routes_every_steps is not None
            and (r.algorithm.routing == "own" or not r.rollout.kind.returns_routes(r.rollout))
        ),
        "float8_on_cpus": lambda r: r.rollout.multiplies_in_float8 and r.cluster.device == "cpu",
        "float8_on_other_gpus": lambda r: r.rollout.multiplies_in_float8 and r.cluster.gpu not in (None, *FLOAT8_GPUS),
        "float8_of_float32": lambda r: r.rollout.multiplies_in_float8 and r.model.dtype == "float32",
        "float8_through_files": lambda r: r.rollout.quantization and r.weights.transfer == "disk",
        "training_of_what_is_not_quantised": lambda r: r.train.quantization and not r.rollout.quantization,
    }
