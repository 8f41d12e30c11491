"""The recipe: everything a user can say, in the order the data flows. One class per section, one docstring per field.

Rules inside one field are in its type; rules between fields are in recipe/checks.py. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megagrpo.layout.parallel import ParallelLayout

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# --- model ------------------------------------------------------------------------------------------------------------


class Model(Section):
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


# --- data -------------------------------------------------------------------------------------------------------------


class DataFile(Section):
    """One parquet or JSONL file of prompts and how much of it to use."""

    path: str
    """File with the columns data_source, prompt, ability, reward_model, extra_info (see docs/data.md)."""

    amount: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0)] | Literal["all"] = "all"
    """Rows taken per epoch: an integer counts rows, a float is a share of the rows (2.0: each row twice), or all."""


class Data(Section):
    """Prompts to train on."""

    train: Annotated[list[DataFile], Field(min_length=1)]
    """Files to mix, each with its amount. Rows are shuffled together."""

    prompt_tokens_max: PositiveInt = 1024
    """Longest prompt, in tokens after the chat template."""

    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"
    """What happens to a longer prompt. The count is always reported."""

    shuffle: bool = True
    """Shuffle every epoch, seeded by the recipe's seed and the epoch."""

    chat_template_arguments: dict[str, Any] = {}
    """Extra variables for the chat template, such as enable_thinking."""


# --- rollout ----------------------------------------------------------------------------------------------------------


class EngineLayout(Section):
    """Parallel sizes of one SGLang engine."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix."""

    expert: PositiveInt = 1
    """Ranks that share the experts of a layer; a divisor of tensor, as in SGLang."""


class Sglang(BaseModel):
    """SGLang servers. Every key but `python` is an argument of `sglang.launch_server`, with underscores."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    python: str | None = None
    """Interpreter of another environment that has SGLang; the default is the one that runs megagrpo."""


class Mismatch(Section):
    """When the trainer's logprobs of the sampled tokens differ from the engines': what is reported, and what is done.

    Both are always compared; `megagrpo report` shows it.
    """

    metric: Literal["mean", "p99", "max", "k3"] = "p99"
    """Which figure `above` is for: logprob_difference/METRIC of the metrics table, in nats."""

    above: NonNegativeFloat | None = None
    """Threshold of the metric. null: nothing is done, whatever the difference."""

    then: Literal["warn", "stop"] = "warn"
    """Past the threshold. warn: say so. stop: save a checkpoint of the step, then end the run with an error."""

    worst_tokens: Annotated[int, Field(ge=1, le=256)] = 8
    """Tokens with the largest differences that each step writes to mismatch.jsonl, with their text."""


class Rollout(Section):
    """How responses are generated for training."""

    engine: Literal["transformers", "sglang", "external"] = "transformers"
    """What generates. transformers: embedded, for CPUs and tests. sglang: servers that the run starts and ends.
    external: SGLang servers that somebody else runs, at `urls`."""

    engines: PositiveInt = 1
    """Number of engines; requests are spread over them. With external, the number of `urls`."""

    layout: EngineLayout = EngineLayout()
    """How each SGLang engine is split over devices."""

    sglang: Sglang = Sglang()
    """The SGLang servers that the run starts: an interpreter, and any server argument."""

    urls: list[str] = []
    """Servers of an external engine, such as http://host:30000, one for each engine."""

    api_key_variable: str | None = None
    """Environment variable with the API key of external servers."""

    prompts_per_step: PositiveInt
    """Prompts sampled in each step."""

    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    """Responses for each prompt: the size of a group."""

    response_tokens_max: PositiveInt = 1024
    """Longest response, in tokens. A response that reaches it is truncated and counted."""

    temperature: PositiveFloat = 1.0
    """Divides the logits when sampling, and again when training, so that both see one distribution."""

    top_p: Fraction = 1.0
    """Nucleus sampling. Must be 1 in training rollouts: the trainer does not renormalise over the nucleus."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all. Must be 0 in training rollouts, for the same reason."""

    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response, besides the model's own end-of-sequence tokens."""

    requests_at_once: PositiveInt = 256
    """Responses that one engine decodes in one batch."""

    timeout_seconds: PositiveFloat = 600.0
    """Longest wait for all responses of a step, and for those of an evaluation. What an SGLang server still samples
    then is returned as it is. An engine that has not answered a minute after that is taken to have failed."""

    mismatch: Mismatch = Mismatch()
    """How far trainer and engines may differ."""


# --- reward -----------------------------------------------------------------------------------------------------------


class RewardFunction(Section):
    """One reward, its weight, and its own arguments."""

    function: str
    """gsm8k, math, format, or FILE.py:FUNCTION, called with data_source, response, ground_truth and extra_info."""

    weight: float = 1.0
    """The sample's reward is the weighted sum over all functions."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function, such as method: flexible for gsm8k or pattern for format."""


class Reward(Section):
    """How responses are scored."""

    functions: Annotated[list[RewardFunction], Field(min_length=1)]
    """One or several functions."""

    workers: NonNegativeInt = 2
    """Processes that run rewards needing isolation (math, your own functions)."""

    timeout_seconds: PositiveFloat = 10.0
    """Longest time for one response. Past it the sample is masked and counted, never scored 0."""


# --- algorithm --------------------------------------------------------------------------------------------------------


class Advantage(Section):
    """From the scores of a group to the advantages of its samples (GRPO, arXiv:2402.03300, eq. 1)."""

    name: Literal["grpo"] = "grpo"
    """grpo: (score - mean of the group) / (standard deviation of the group + epsilon)."""

    standard_deviation: Literal["sample", "none"] = "sample"
    """sample: divide by the sample standard deviation (n - 1). none: only subtract the mean."""

    epsilon: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""


class KL(Section):
    """Penalty for leaving the reference policy."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 switches the reference policy off altogether."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Per-token estimate from the two logprobs (http://joschu.net/blog/kl-approx.html); k3 is the low-variance one."""

    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: subtracted from each sample's score before the advantages."""


class Algorithm(Section):
    """The objective."""

    advantage: Advantage = Advantage()
    """How advantages are made from scores."""

    clip_low: NonNegativeFloat = 0.2
    """The probability ratio is clipped at 1 - clip_low."""

    clip_high: NonNegativeFloat = 0.2
    """The probability ratio is clipped at 1 + clip_high."""

    kl: KL = KL()
    """Penalty against the reference policy."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: over all response tokens of a minibatch. sequence_mean: over responses, of each one's token mean."""

    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a step's samples. Must divide prompts_per_step x samples_per_prompt."""

    epochs: PositiveInt = 1
    """Passes over a step's samples."""

    skip_groups_without_signal: bool = True
    """Leave out groups whose advantages are all zero: they add no policy gradient, but their KL and entropy terms are
    left out too. No effect when the KL penalty is in the reward. They are counted either way."""


# --- train ------------------------------------------------------------------------------------------------------------


class Layout(Section):
    """How the policy is split over ranks: tensor x pipeline x context x data ranks in all."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix. Sequence parallelism comes with it."""

    pipeline: PositiveInt = 1
    """Stages of consecutive layers."""

    virtual_pipeline: PositiveInt = 1
    """Model chunks per stage; more than 1 interleaves them and shrinks the pipeline bubble."""

    context: PositiveInt = 1
    """Ranks that share each sequence."""

    expert: PositiveInt = 1
    """Ranks that share the experts of a layer."""

    expert_tensor: PositiveInt | None = None
    """Ranks that share each expert's matrices; the default is the same as tensor."""

    data: PositiveInt = 1
    """Replicas that each train on their part of the batch."""

    def parallel(self) -> ParallelLayout:
        sizes = self.model_dump()
        sizes["expert_tensor"] = self.expert_tensor or self.tensor
        return ParallelLayout(**sizes)


class Optimizer(Section):
    """Adam with decoupled weight decay."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a linear or cosine schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over the whole run."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear increase from 0."""

    weight_decay: NonNegativeFloat = 0.0
    """Decay of the matrices; norms and biases have none."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""

    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""


class Train(Section):
    """The training ranks."""

    layout: Layout = Layout()
    """Parallel sizes."""

    total_steps: PositiveInt | None = None
    """Length of the run in steps. Give exactly one of total_steps, total_epochs, total_episodes."""

    total_epochs: PositiveInt | None = None
    """Length of the run in passes over the data."""

    total_episodes: PositiveInt | None = None
    """Length of the run in generated responses."""

    tokens_per_microbatch: PositiveInt = 8192
    """Tokens packed into one forward pass, per context rank. Must hold the longest prompt plus response."""

    optimizer: Optimizer = Optimizer()
    """Adam and its schedule."""

    distributed_optimizer: bool = True
    """Split optimizer states over the data ranks."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, the attention core, or whole layers."""

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """Megatron's layers: transformer_engine's fused ones, or its local ones. auto: the former where they can run."""

    offload: list[Literal["parameters", "gradients", "optimizer", "reference"]] = []
    """Parts moved to host memory while they are not needed. Numbers do not change. Colocated placement only."""

    megatron: dict[str, Any] = {}
    """Any other field of Megatron's TransformerConfig, checked against the installed version."""


# --- weights ----------------------------------------------------------------------------------------------------------


class Weights(Section):
    """How new weights travel from the training ranks to the engines after every step."""

    transfer: Literal["auto", "shared_memory", "process_group", "direct", "tensors", "broadcast", "disk"] = "auto"
    """auto chooses by the plan. Exact shards: shared_memory (same node; CUDA IPC on GPUs), process_group (any node),
    direct (SGLang's own loader of whole local parameters, in shared memory). Whole tensors: tensors (flattened buckets
    in shared memory), broadcast (from one training rank), disk (safetensors files in `directory`)."""

    bucket_bytes: PositiveInt = 256 * 1024 * 1024
    """Largest bucket. Two buckets at once are on the way between a training rank and an engine."""

    directory: str | None = None
    """For transfer: disk. A directory that training ranks and engines both reach; the default is weights/ in the run's
    directory."""

    pause: Literal["abort", "retract", "in_place"] = "retract"
    """What an engine does with requests that still run when an update begins: abort returns them as they are, retract
    computes their keys and values again with the new weights, in_place goes on with those of the old weights."""

    timeout_seconds: PositiveFloat = 600.0
    """Longest wait for one sync, and for anyone in it."""

    attempts: PositiveInt = 2
    """How often an engine may be restarted and brought up to date in one sync before the run stops."""


# --- eval -------------------------------------------------------------------------------------------------------------


class EarlyStopping(Section):
    """End the run when an evaluation metric is good enough or stops improving."""

    metric: str = "mean@1"
    """Name as in the metrics table, without the eval/ prefix. Larger is better."""

    target: float | None = None
    """Stop once the metric reaches this."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a new best."""


class Eval(Section):
    """Evaluation on held-out prompts."""

    files: list[DataFile] = []
    """Prompt files, in the same format as data.train. Empty: no evaluation."""

    every_steps: PositiveInt = 10
    """Steps between evaluations. The last step is always evaluated."""

    before_training: bool = True
    """Evaluate the starting weights too."""

    samples_per_prompt: PositiveInt = 1
    """Responses for each prompt: the k of mean@k, pass@k and maj@k."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""

    top_p: Fraction = 1.0
    """Nucleus sampling."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all."""

    response_tokens_max: PositiveInt | None = None
    """Longest response; the default is the rollout's."""

    early_stopping: EarlyStopping | None = None
    """Off unless given."""


# --- checkpoint, track, cluster ---------------------------------------------------------------------------------------


class Checkpoint(Section):
    """What is saved so that a run can continue, and when."""

    every_steps: PositiveInt = 50
    """Steps between checkpoints. The last step is always saved."""

    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept."""

    keep_best: str | None = None
    """Evaluation metric whose best checkpoint is kept as well, such as mean@1. A step between two checkpoints whose
    evaluation is a new best is saved too."""

    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest complete checkpoint of this run. never: refuse to start if there is one."""

    directory: str | None = None
    """Where checkpoints go; the default is checkpoints/ in the run's directory."""

    export_hugging_face: bool = True
    """Write the final weights as a Hugging Face model, with config and tokenizer."""


class MLflow(Section):
    """MLflow tracking."""

    uri: str | None = None
    """Tracking server; the default is a local sqlite file, mlflow.db, in track.directory."""

    experiment: str = "megagrpo"
    """Experiment's name."""


class WandB(Section):
    """Weights & Biases tracking; needs `pip install megagrpo[wandb]`."""

    project: str = "megagrpo"
    """Project's name."""

    entity: str | None = None
    """Team or user; the default is wandb's own."""


class Track(Section):
    """Where metrics go. metrics.jsonl in the run's directory is always written."""

    directory: str = "runs"
    """Parent of all runs; this one's directory is DIRECTORY/NAME."""

    console: Literal["auto", "live", "lines", "off"] = "auto"
    """Progress on the terminal. auto: a live table on a terminal, plain lines elsewhere."""

    mlflow: MLflow | None = MLflow()
    """null switches it off."""

    tensorboard: bool = False
    """Write TensorBoard events; needs `pip install megagrpo[tensorboard]`."""

    wandb: WandB | None = None
    """Off unless given."""

    rollouts_per_step: NonNegativeInt = 2
    """Whole prompts, responses and scores written to rollouts.jsonl in each step."""


class Cluster(Section):
    """Where the processes run."""

    address: str | None = None
    """Ray cluster to join, such as auto or ray://host:10001; default: RAY_ADDRESS, else one started on this machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What ranks and engines compute on. auto: cuda where there is one."""

    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: engines share the trainer's devices and take turns. disaggregated: they have their own."""

    trainer_devices: PositiveInt | None = None
    """Devices for training; the default, and the only legal value, is the number of ranks of train.layout."""

    engine_devices: PositiveInt | None = None
    """Devices for engines when disaggregated; the default is one per engine."""

    start_timeout_seconds: PositiveFloat = 300.0
    """Longest wait for all processes to start."""

    step_timeout_seconds: PositiveFloat = 3600.0
    """Longest wait for one phase of a step (logprobs, update, weight sync, checkpoint)."""


class Recipe(Section):
    """One experiment, whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its directory; letters, digits, dot, dash and underscore."""

    seed: NonNegativeInt = 0
    """Seeds the data order, every sample and the ranks' generators."""

    model: Model
    data: Data
    rollout: Rollout
    reward: Reward
    algorithm: Algorithm = Algorithm()
    train: Train
    weights: Weights = Weights()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()
    cluster: Cluster = Cluster()
