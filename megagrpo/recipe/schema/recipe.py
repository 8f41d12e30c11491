"""The recipe: all of a user's settings, in the order the data flows; and the rules between its sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.recipe.schema.algorithm import AlgorithmConfig
from megagrpo.recipe.schema.data import DataConfig, overlap_rules
from megagrpo.recipe.schema.eval import EvalConfig, metric_rules
from megagrpo.recipe.schema.reward import RewardConfig
from megagrpo.recipe.schema.reward_models import use_rules
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.recipe.schema.run import CheckpointConfig, ClusterConfig, ModelConfig, Pause, TrackConfig, WeightsConfig
from megagrpo.recipe.schema.schedule import AsyncConfig, OneStepOffConfig, ScheduleConfig, SyncConfig
from megagrpo.recipe.schema.train import (
    TrainConfig,
    deterministic_rules,
    device_rules,
    dtype_rules,
    length_rules,
    longest_rules,
)
from megagrpo.section import Section, Seed

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


FLOAT8_GPUS = ("H100", "H100-PCIe", "H100-NVL", "H200", "H20", "H800", "L40S", "L4", "RTX-4090", "RTX-6000-Ada")
"""GPUs on which SGLang keeps float8 blocks as they are sent: Marlin packs them before Ada, DeepGEMM on Blackwell."""


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
    are slower, and what an engine samples does not depend on what it samples beside it. replayable: the same where
    the order depends on speed (async, carry_over, oversample), which train --replay-schedule repeats. See
    docs/debugging.md."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    agent: AgentConfig | None = None
    """Program that asks the policy in several turns: tools, a program of your own, or an environment. See
    docs/agents.md. null: each prompt is answered once."""

    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    schedule: ScheduleConfig = SyncConfig(kind="sync")
    """Order of sampling and training: sync, one_step_off, async, or settings of one. See docs/schedules.md."""

    train: TrainConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    def rules(self) -> Iterator[Problem]:
        yield from self._batch()
        for name, files in self.eval.files_of_sets().items():
            yield from overlap_rules(f"eval.sets.{name}.files", self.data.train, files)
        told = self.data.decontaminate
        if told is not None and not told.against and not self.eval.files_of_sets():
            fix = "name held-out files there, add eval.sets, or remove data.decontaminate"
            yield Problem("data.decontaminate.against", "none, and no eval.sets", "prompts to compare with", fix)
        yield from self._schedule()
        yield from self._deterministic()
        yield from self._agent()
        yield from self._advantage()
        yield from self._critic()
        yield from length_rules(self.train, ("total_steps", "total_epochs", "total_episodes"), "add total_steps: N")
        yield from longest_rules(
            self.train,
            self.sequence_tokens_max,
            described=self.sequence_described,
            what="sequence",
            limits=self.sequence_limits,
        )
        yield from self._passes()
        yield from device_rules(self.train, self.cluster)
        yield from dtype_rules(self.train, self.model.dtype)
        yield from self._offload()
        yield from self._evaluation()
        yield from self._reward_models()
        yield from self._devices()
        yield from self._transfer()
        yield from self._quantization()

    @property
    def sequence_tokens_max(self) -> int:
        """Returns the most tokens of a training sequence: a prompt with its response, or an agent's conversation."""
        if self.agent and self.agent.tokens_max is not None:
            return self.agent.tokens_max
        return self.data.prompt_tokens_max + self.rollout.response_tokens_max

    @property
    def sequence_described(self) -> str:
        """Returns the longest sequence in words."""
        if self.agent and self.agent.tokens_max is not None:
            return f"conversations of up to {self.agent.tokens_max}"
        return f"prompt + response of up to {self.data.prompt_tokens_max} + {self.rollout.response_tokens_max}"

    @property
    def sequence_limits(self) -> tuple[str, ...]:
        """Returns the fields that limit the longest sequence."""
        if self.agent and self.agent.tokens_max is not None:
            return ("agent.tokens_max",)
        return ("data.prompt_tokens_max", "rollout.response_tokens_max")

    def _batch(self) -> Iterator[Problem]:
        rollout, minibatches, data = self.rollout, self.algorithm.minibatches, self.train.layout.data
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        product = f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = {samples}"
        if samples % minibatches:
            divisors = [n for n in range(1, samples + 1) if samples % n == 0]
            given = f"{minibatches} minibatches of {product}"
            fix = f"minibatches: {min(divisors, key=lambda n: abs(n - minibatches))}"
            yield Problem("algorithm.minibatches", given, "minibatches of equal size", fix)
        elif samples // minibatches < data:
            each = samples // minibatches
            given = f"{data} data ranks, and {product} in {minibatches} minibatches, so {each} samples in each"
            needed = "at least one sample of every minibatch for each data rank"
            fix = f"lower train.layout.data to {each}, lower algorithm.minibatches, or sample more"
            yield Problem("train.layout.data", given, needed, fix)
        if self.train.total_episodes is not None and self.train.total_episodes < samples:
            given = f"{self.train.total_episodes}, and one step takes {samples} responses"
            fix = "raise it, or lower rollout.prompts_per_step or rollout.samples_per_prompt"
            yield Problem("train.total_episodes", given, f"at least {samples}", fix)
        overlong = self.reward.overlong
        if overlong and overlong.buffer_tokens > rollout.response_tokens_max:
            given = f"{overlong.buffer_tokens}, and responses of up to {rollout.response_tokens_max} tokens"
            fix = "lower it, or raise rollout.response_tokens_max"
            yield Problem("reward.overlong.buffer_tokens", given, f"at most {rollout.response_tokens_max}", fix)

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
    def one_version(self) -> bool:
        """Returns whether one version of the weights samples a whole group. An interrupted request then begins anew,
        for equal numbers: logprobs after tokens that are read, not sampled, have other last bits."""
        return isinstance(self.schedule, OneStepOffConfig) or not self.schedule.max_staleness

    def _schedule(self) -> Iterator[Problem]:
        schedule, step, cluster = self.schedule, self.rollout.prompts_per_step, self.cluster
        if isinstance(schedule, SyncConfig) and not schedule.beyond:
            return
        kind: str = schedule.kind
        if isinstance(schedule, SyncConfig):
            kind = "sync with carry_over" if schedule.carry_over else "sync with oversample"
        if not isinstance(schedule, SyncConfig) and cluster.placement == "colocated" and self.rollout.devices_of_engine:
            given = f"{kind}, with cluster.placement: colocated"
            needed = "engines with devices of their own: they sample while the ranks train"
            fix = "placement: disaggregated, or {kind: sync, carry_over: N, max_staleness: 2}"
            yield Problem("schedule.kind", given, needed, fix)
        if isinstance(schedule, SyncConfig) and schedule.oversample and self.algorithm.greedy_responses:
            given = f"{schedule.oversample}, with algorithm.advantage.name: remax"
            needed = "0: a greedy response, the baseline of its prompt, could be what is cut"
            yield Problem("schedule.oversample", given, needed, "carry_over in its place, or another advantage")
        if self.rollout.dynamic_sampling and isinstance(schedule, OneStepOffConfig):
            given = "one_step_off, with rollout.dynamic_sampling"
            needed = "sync or async: replacements would be sampled while the ranks wait"
            yield Problem("schedule.kind", given, needed, "kind: async, with max_staleness: 1")
        if isinstance(schedule, AsyncConfig) and schedule.prompts_at_once is not None:
            least, most = step, step * (1 + schedule.max_staleness)
            if not least <= schedule.prompts_at_once <= most:
                given = f"{schedule.prompts_at_once}, with {step} prompts in a step"
                needed = f"from {least}, which a step trains on, to {most}, which max_staleness lets begin"
                yield Problem("schedule.prompts_at_once", given, needed, "remove it, or raise max_staleness")
        if isinstance(schedule, SyncConfig) and schedule.carry_over > step * schedule.max_staleness:
            given = f"{schedule.carry_over}, with {step} prompts in a step"
            needed = f"at most prompts_per_step x max_staleness = {step * schedule.max_staleness}"
            yield Problem("schedule.carry_over", given, needed, "lower it, or raise max_staleness")
        if self.weights.given("pause") and isinstance(schedule, OneStepOffConfig):
            needed = "nothing: with one_step_off engines finish what runs before an update"
            yield Problem("weights.pause", self.weights.pause, needed, "remove it")

    def _deterministic(self) -> Iterator[Problem]:
        if not self.deterministic:
            return
        schedule, key = self.schedule, f"deterministic: {'true' if self.deterministic is True else self.deterministic}"
        order_varies = isinstance(schedule, AsyncConfig) and schedule.max_staleness > 0
        order_varies |= isinstance(schedule, SyncConfig) and schedule.beyond > 0
        if order_varies and self.deterministic is True:
            given = f"true, with {', '.join(f'{key}: {value}' for key, value in schedule.model_dump().items())}"
            needed = "a schedule whose order does not depend on the machine's speed"
            fix = "replayable, which logs the order, so that train --replay-schedule repeats it; or kind: one_step_off"
            yield Problem("deterministic", given, needed, fix)
        if order_varies and self.weights.pause == "in_place":
            given, needed = f"in_place, with {key}", "retract or finish: a replay cannot make keys of older weights"
            yield Problem("weights.pause", given, needed, "pause: retract")
        if self.rollout.engine == "external":
            given, needed = f"external, with {key}", "engines that the run starts: it chooses their kernels"
            yield Problem("rollout.engine", given, needed, "engine: sglang, or remove deterministic")
        yield from deterministic_rules(self.train)

    def _agent(self) -> Iterator[Problem]:
        of_sets = {f"eval.sets.{name}.functions": one.functions for name, one in self.eval.sets.items()}
        for where, functions in (self.reward.lists() | of_sets).items():
            if self.agent is None and any(function.function == "agent" for function in functions):
                needed = "an agent: this function reads what one gave"
                yield Problem(
                    where, "function: agent, without agent", needed, "name another function, or give an agent"
                )
        if self.agent and self.reward.overlong:
            needed = "nothing, with agent: a rollout has several answers"
            yield Problem(
                "reward.overlong", "given", needed, "remove it; agent.turns_max and agent.tokens_max are limits"
            )
        if self.agent and self.agent.tokens_max is None:
            for name, one in self.eval.of_sets().items():
                if (one.response_tokens_max or 0) > self.rollout.response_tokens_max:
                    given = f"{one.response_tokens_max}, with an agent whose conversations are those of training"
                    needed = f"at most rollout.response_tokens_max = {self.rollout.response_tokens_max}"
                    yield Problem(
                        f"eval.sets.{name}.response_tokens_max", given, needed, "lower it, or set agent.tokens_max"
                    )
        if self.agent and self.deterministic == "replayable":
            needed = "true or false, with agent: what agents do and when is not logged"
            yield Problem("deterministic", "replayable", needed, "deterministic: true, for an agent that is so itself")

    def _advantage(self) -> Iterator[Problem]:
        advantage, rollout, reward = self.algorithm.advantage, self.rollout, self.reward
        if self.algorithm.credit.by_turn and self.agent is None:
            given = f"{self.algorithm.credit.name}, without agent"
            needed = "outcome: a response that is one answer has one turn"
            yield Problem("algorithm.credit.name", given, needed, "remove it, or give an agent")
        if rollout.samples_per_prompt < 2 and advantage.by_group:
            given = f"{rollout.samples_per_prompt}, with algorithm.advantage.name: {advantage.name}"
            needed = "at least 2: this advantage compares the samples of one prompt, and is 0 for a single one"
            fix = "samples_per_prompt: 8, or an advantage such as reinforce_plus_plus, remax or gae"
            yield Problem("rollout.samples_per_prompt", given, needed, fix)
        if rollout.dynamic_sampling and not advantage.by_group:
            given = f"given, with algorithm.advantage.name: {advantage.name}"
            needed = "an advantage that compares the samples of one prompt: with this one, equal scores teach too"
            fix = "remove it, or write another advantage, such as grpo"
            yield Problem("rollout.dynamic_sampling", given, needed, fix)
        if advantage.name != "gdpo":
            return
        if reward.by_source:
            needed = "reward.functions alone: gdpo normalises each function over rows that all have it"
            yield Problem("algorithm.advantage.name", "gdpo with reward.by_source", needed, "name: grpo")
        elif len(reward.functions) < 2:
            needed = "at least 2: it normalises each function apart; of one function it is grpo, whitened"
            yield Problem("algorithm.advantage.name", "gdpo with one reward function", needed, "name: grpo")
        for field, value in (("overlong", reward.overlong), ("non_stop_score", reward.non_stop_score)):
            if value is not None:
                given = "given, with algorithm.advantage.name: gdpo"
                needed = "nothing that changes the sum of all rewards: gdpo never forms it"
                yield Problem(f"reward.{field}", given, needed, "remove it, or write another advantage")

    def _critic(self) -> Iterator[Problem]:
        critic, steps, warmup = self.algorithm.critic, self.train.total_steps, self.train.optimizer.warmup_steps
        if critic is None or steps is None:
            return
        if critic.warmup_steps >= steps:
            given = f"{critic.warmup_steps} of {steps} steps in all"
            needed = "less than train.total_steps: the policy learns nothing before"
            yield Problem("algorithm.critic.warmup_steps", given, needed, "lower it")
        elif steps < critic.warmup_steps + warmup:
            given = f"{critic.warmup_steps} steps, then {warmup} of the learning rate's warm-up, of {steps} in all"
            needed = "together at most train.total_steps: the policy's warm-up begins when the critic's is over"
            yield Problem("algorithm.critic.warmup_steps", given, needed, "lower one of them")

    def _passes(self) -> Iterator[Problem]:
        tokens, algorithm = self.train.logprob_tokens_per_microbatch, self.algorithm
        if tokens is None or algorithm.computes_old_logprobs or algorithm.kl.coefficient or algorithm.critic:
            return
        given = f"{tokens}, and no pass without gradients"
        needed = "nothing: the update's own pass gives all logprobs"
        yield Problem("train.logprob_tokens_per_microbatch", given, needed, "remove it")

    def _offload(self) -> Iterator[Problem]:
        offload = self.train.offload
        for_engines = [part for part in offload if part != "reference"]
        if for_engines and self.cluster.placement == "disaggregated":
            given = f"{', '.join(for_engines)}, with cluster.placement: disaggregated"
            needed = "nothing: training has its devices to itself, with no engine to make room for"
            yield Problem("train.offload", given, needed, "remove it, or write cluster.placement: colocated")
        if "reference" in offload and self.algorithm.kl.coefficient == 0:
            given = "reference, with algorithm.kl.coefficient 0"
            needed = "a reference policy: there is none without a KL penalty"
            yield Problem("train.offload", given, needed, "remove reference from the list, or give a coefficient")
        if "critic" in offload and self.algorithm.critic is None:
            given = "critic, without algorithm.critic"
            yield Problem("train.offload", given, "a critic", "remove critic from the list")

    def _evaluation(self) -> Iterator[Problem]:
        best = self.checkpoint.keep_best
        if best is not None:
            yield from metric_rules("checkpoint.keep_best", best, self.eval)

    def _reward_models(self) -> Iterator[Problem]:
        lists = self.reward.lists()
        lists |= {f"eval.sets.{name}.functions": one.functions for name, one in self.eval.sets.items()}
        asked = {
            f"{field}.{index}": (entry.function, entry.arguments)
            for field, entries in lists.items()
            for index, entry in enumerate(entries)
            if entry.function in ("judge", "judge_pairs", "judge_ranking", "reward_model")
        }
        yield from use_rules(self.reward.models, asked)
        for name, model in self.reward.models.items():
            if model.devices > (most := self.cluster.gpus_per_node):
                needed = f"a server within one node: at most {most} (cluster.gpus_per_node)"
                yield Problem(f"reward.models.{name}.devices", str(model.devices), needed, f"devices: {most}")

    def _devices(self) -> Iterator[Problem]:
        rollout, own, each = self.rollout, self.cluster.engine_devices, self.rollout.devices_of_engine
        ranks, colocated = self.train.layout.parallel().ranks, self.cluster.placement == "colocated"
        if own is not None and (colocated or each == 0):
            given, reason, fix = f"{own}, with rollout.engine: external", "the run does not start them", "remove it"
            if colocated:
                given, reason = f"{own}, with placement: colocated", "colocated engines share the trainer's devices"
                fix = "remove it, or write placement: disaggregated"
            yield Problem("cluster.engine_devices", given, f"nothing: {reason}", fix)
        elif own is not None and (own > rollout.engines * each or own % each):
            most = rollout.engines * each
            given = f"{own} devices for {rollout.engines} engine{'s' if rollout.engines > 1 else ''} of {each}"
            multiple = f"a multiple of tensor x pipeline of rollout.layout = {each}, at most {most}"
            needed = "at most one device for each engine" if each == 1 else multiple
            yield Problem("cluster.engine_devices", given, needed, f"engine_devices: {most}")
        elif colocated and each > ranks:
            given = f"{each}, with {ranks} training rank{'s' if ranks > 1 else ''} and placement: colocated"
            needed = f"at most {ranks}: colocated engines share the trainer's devices"
            fix = "smaller engines, more training ranks, or placement: disaggregated"
            yield Problem("rollout.layout.tensor", given, needed, fix)
        yield from self._nodes_of_engine()
        expert = rollout.layout.expert
        if rollout.engine == "sglang" and expert > 1 and self.cluster.device == "cpu":
            needed = "1: on a CPU, SGLang ends at the first token if experts are shared"
            yield Problem("rollout.layout.expert", f"{expert}, with cluster.device: cpu", needed, "expert: 1")

    @property
    def nodes_of_engine(self) -> int:
        """Returns the number of nodes of one engine: one, unless it is larger than a node."""
        return max(1, self.rollout.devices_of_engine // self.cluster.gpus_per_node)

    def _nodes_of_engine(self) -> Iterator[Problem]:
        each, per_node, pipeline = (
            self.rollout.devices_of_engine,
            self.cluster.gpus_per_node,
            self.rollout.layout.pipeline,
        )
        nodes = self.nodes_of_engine
        if each <= per_node:
            return
        given = f"an engine of {each} devices on nodes of {per_node}"
        if each % per_node:
            needed = "engines within a node, or of whole ones (cluster.gpus_per_node)"
            yield Problem("rollout.layout", given, needed, f"tensor x pipeline as a multiple of {per_node}")
        elif nodes % pipeline and pipeline % nodes:
            needed = f"stages of whole nodes, or whole stages on each of its {nodes} nodes, as SGLang places them"
            yield Problem("rollout.layout.pipeline", f"{pipeline}, in {given}", needed, f"pipeline: 1, or {nodes}")

    def _transfer(self) -> Iterator[Problem]:
        transfer, engine = self.weights.transfer, self.rollout.engine
        if engine == "transformers" and transfer == "disk":
            given = "disk, with rollout.engine: transformers"
            needed = "auto, shared_memory or process_group: files go through SGLang's loader"
            yield Problem("weights.transfer", given, needed, "transfer: auto, or rollout.engine: sglang")
        shared = self.cluster.placement == "colocated" and engine != "external"
        if transfer == "process_group" and shared and self.cluster.device == "cuda":
            needed = "one process on each GPU, for NCCL"
            yield Problem("weights.transfer", "process_group, with placement: colocated", needed, "transfer: auto")
        through_files = self.weights.transfer_to(external=engine == "external") == "disk"
        if self.weights.directory is not None and not through_files:
            given = f"{self.weights.directory}, with transfer: {transfer}"
            needed = "nothing: no files are written"
            yield Problem("weights.directory", given, needed, "remove it, or write transfer: disk")

    def _quantization(self) -> Iterator[Problem]:
        if self.rollout.quantization is None:
            return
        gpu, device, dtype, transfer = self.cluster.gpu, self.cluster.device, self.model.dtype, self.weights.transfer
        other = gpu is not None and gpu not in FLOAT8_GPUS
        for field, given, wrong, needed in (
            ("cluster.device", device, device == "cpu", "cuda: SGLang's kernels for float8 are for GPUs"),
            ("cluster.gpu", gpu, other, "a Hopper or Ada GPU: on others SGLang packs blocks in ways of their own"),
            ("model.dtype", dtype, dtype == "float32", "bfloat16: blocks are made of it"),
            ("weights.transfer", transfer, transfer == "disk", "another: files are not quantised"),
        ):
            if wrong:
                given = f"{given}, with rollout.quantization: {self.rollout.quantization}"
                yield Problem(field, given, needed, f"{needed.split(':')[0]}, or quantization: null")
