"""model, weights, checkpoint, track, cluster: the start, the outputs and the machines of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, create_model

from megagrpo.section import Count, NonNegativeInt, PositiveInt, Rules, Seconds, Section
from megagrpo.track.trackers import TRACKERS

Pause = Literal["retract", "in_place", "finish"]


class ModelConfig(Section):
    """The policy to start from; the reference policy is a frozen copy of the same weights."""

    path: str
    """Directory with config.json, safetensors and tokenizer files, or a Hugging Face hub id."""

    revision: str | None = None
    """Branch, tag or commit when `path` is a hub id."""

    tokenizer: str | None = None
    """Directory or hub id of the tokenizer, if it is not with the model."""

    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's own chat template."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Weights and activations. auto: bfloat16 on GPUs (gradients and master weights stay float32), float32 on CPUs."""


class WeightsConfig(Section):
    """The transfer of new weights from the training ranks to the engines after every step."""

    transfer: Literal["auto", "shared_memory", "two_hops", "process_group", "disk"] = "auto"
    """Transport of weights to the engines. shared_memory: exact shards within one node (CUDA IPC on GPUs). two_hops:
    exact shards between nodes on which engines share devices with training ranks (gloo or NCCL between training ranks,
    and shared memory on each node). process_group: exact shards between any nodes (gloo; NCCL on GPUs that are not
    shared). disk: safetensors files in `directory`. auto: disk for external engines, shared_memory if everything is on
    one node, two_hops if there is a training rank beside each engine, otherwise process_group."""

    bucket_bytes: Annotated[int, Field(ge=4096, le=2**40)] = 256 * 1024 * 1024
    """Largest size of a bucket. A process sends at most two buckets at once, and forwards at most two with two_hops."""

    directory: str | None = None
    """Only for transfer: disk. A directory that all training ranks and engines reach. The default is weights/ in the
    run's directory."""

    pause: Pause = "retract"
    """Treatment of requests that still run when an update begins. retract: the engine computes
    their keys and values again with the new weights. in_place: the engine keeps the old ones.
    finish: the update waits for their ends. With schedule: sync no request is left then."""

    timeout_seconds: Seconds = 600.0
    """Longest time of one attempt at a sync, and of any wait in it."""

    attempts: PositiveInt = 2
    """Most restarts of engines, each with a new update, in one sync that has failed on all of them.
    Then the run stops."""


class CheckpointConfig(Section):
    """The files that are saved so that a run can resume, and the steps at which they are saved."""

    every_steps: PositiveInt = 50
    """Steps between checkpoints. The last step is always saved."""

    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept; also the newest whose weights a step or an evaluation has used."""

    keep_best: str | None = None
    """Evaluation metric whose best checkpoint is kept as well, such as mean@1. A step between two checkpoints whose
    evaluation is a new best is saved too."""

    keep_batches: NonNegativeInt = 0
    """Newest steps whose prompts, responses and scores are kept in batches/ in the run's directory, for
    `megagrpo replay` and `megagrpo train --train-only` (docs/debugging.md); a replay begins at a checkpoint, so keep at
    least every_steps."""

    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest complete checkpoint of this run. never: refuse to start if there is one."""

    directory: str | None = None
    """Directory of checkpoints; the default is checkpoints/ in the run's directory."""

    export_hugging_face: bool = True
    """Write the final weights as a Hugging Face model, with config and tokenizer."""

    export_every_steps: PositiveInt | None = None
    """Steps between Hugging Face models on the way; all are kept, in hugging_face_steps/ of the run's directory."""

    after_export: list[str] = []
    """Command started for each exported model, also the final one, such as ["bash", "evaluate.sh", "{directory}"]."""

    RULES: ClassVar[Rules[CheckpointConfig]] = {
        "command_without_exports": lambda c: (
            c.after_export and not c.export_hugging_face and c.export_every_steps is None
        )
    }


ConsoleMode = Literal["auto", "live", "lines", "off", "json"]


class RolloutFilesConfig(Section):
    """The samples that are kept as parquet, with prompt, response, score and advantage (docs/rollouts.md)."""

    samples_per_step: PositiveInt | None = 128
    """Most samples of each step and of each evaluation set: whole groups, the first ones, at least one. null: all."""

    token_samples_per_step: NonNegativeInt | None = 16
    """Number of these samples that are kept with the text, version, logprobs, entropy and advantage of each token.
    Whole groups, the first ones, at least one unless it is 0. null: all, some 14 bytes for each token."""


class _Output(Section):
    directory: str = "runs"
    """Parent of all runs; this one's directory is DIRECTORY/NAME."""

    console: ConsoleMode = "auto"
    """Output of the command. auto: a live table on a terminal, plain lines elsewhere. off: nothing but errors, as
    --quiet. json: a JSON object per line, as --json."""


if TYPE_CHECKING:
    _Trackers = _Output
else:
    _OF_TRACKERS = {
        name: (tracker.section if tracker.section is bool else tracker.section | None, tracker.field)
        for name, tracker in sorted(TRACKERS.items())
    }
    _Trackers = create_model("_Trackers", __base__=_Output, **_OF_TRACKERS)


class TrackConfig(_Trackers):
    """The destinations of metrics. metrics.jsonl in the run's directory is always written."""

    rollouts: RolloutFilesConfig | None = RolloutFilesConfig()
    """Samples of each step in rollouts/, for `megagrpo report`. null: none."""

    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on loopback where the driver serves the last step's metrics to Prometheus. Off unless given."""


class ClusterConfig(Section):
    """The machines and devices on which the processes run."""

    address: str | None = None
    """Ray cluster to join: auto, or HOST:PORT. Default: RAY_ADDRESS, else one started here. See docs/clusters.md."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of ranks and engines. auto: cuda where there is one."""

    gpu: str | None = None
    """Kind of the cluster's GPUs for `megagrpo plan`, such as H100; docs/plan.md lists those that it knows."""

    gpus_per_node: Count = 8
    """GPUs of each node, for `megagrpo plan`."""

    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: engines share the trainer's devices and take turns. disaggregated: they have their own."""

    engine_devices: Count | None = None
    """Devices for engines when disaggregated; the default is one per engine."""

    start_timeout_seconds: Seconds = 900.0
    """Longest wait for all processes to start. A first start on GPUs compiles kernels and captures graphs."""

    restarts_max: NonNegativeInt = 3
    """Most restarts of lost training ranks without a new step between them. 0: the run ends. Ranks are lost that are
    killed, out of memory, or silent for step_timeout_seconds; they resume from the newest checkpoint."""

    step_timeout_seconds: Seconds = 3600.0
    """Longest wait for one phase of a step (logprobs, update, weight sync, checkpoint)."""
