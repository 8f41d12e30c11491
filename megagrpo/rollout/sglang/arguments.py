"""The arguments of a server: those that megagrpo sets, and the recipe's (SglangConfig), checked before a run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.recipe.defaults import cpu_cache_tokens
from megagrpo.rollout.arguments import Arguments, cores_of_ranks, owned
from megagrpo.rollout.server import Program, Server
from megagrpo.rollout.sglang.launch import DEVICE_VARIABLE, MEETING_SCHEME, MEETING_VARIABLE
from megagrpo.weights.blocks import BLOCK
from megagrpo.weights.families import FAMILIES
from megagrpo.weights.transport import LOAD_FORMAT

if TYPE_CHECKING:
    from megagrpo.rollout.engine import EngineNode, ServerSpec


def cache_variables() -> dict[str, str]:
    """Returns the variable with the directory for what SGLang compiles. Empty if it is set, or SGLang can write below
    the home directory: SGLang needs one of these to start."""
    caches = Path("~/.cache/sglang").expanduser()
    nearest = next(directory for directory in (caches, *caches.parents) if directory.exists())
    if "SGLANG_CACHE_DIR" in os.environ or os.access(nearest, os.W_OK):
        return {}
    return {"SGLANG_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"sglang_{os.getuid()}")}


PROGRAM = Program(
    "sglang",
    Path(__file__).with_name("launch.py"),
    generates=("/health", None),
    shared_memory=("sgl_", "sglang_", "sem.mp-"),
    noise=("server_args=",),
    later_ports=range(233, 240),  # of groups of attention data parallelism
)
WATCHDOG_SECONDS = 300.0  # SGLang's own default


ARGUMENTS = Arguments(
    "SGLang",
    "megagrpo.rollout.sglang.check_arguments",
    owned(__file__),
    install="make sglang-cpu on a CPU machine, pip install megagrpo[sglang] on GPUs",
    interpreter=lambda settings: settings.python or sys.executable,
    classes={name: family.sglang for name, family in FAMILIES.items()},
    environment=cache_variables,
)


def server_arguments(spec: ServerSpec) -> dict[str, Any]:
    """Returns fields of ServerArgs; the recipe's settings override the defaults.

    A server starts with meaningless weights, which the first update replaces by the policy's, unless it keeps those of
    the model directory. SGLang's watchdog, which ends a scheduler that does nothing, waits longer than an update.
    """
    layout, options, on_cpus = spec.layout, spec.settings.model_extra or {}, spec.device == "cpu"
    if on_cpus:
        defaults: dict[str, Any] = {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "max_total_tokens": cpu_cache_tokens(spec.requests_at_once, spec.tokens_per_request),
            "skip_server_warmup": True,
        }
    else:
        defaults = {"enable_fp32_lm_head": True}  # as the trainer; in bfloat16 each side would round in its own way
        if not options.keys() & {"cuda_graph_bs_decode", "cuda_graph_config"}:
            # By itself SGLang captures as it thinks fit for the card; more requests would run without a graph.
            most = options.get("max_running_requests") or spec.requests_at_once
            defaults["cuda_graph_max_bs_decode"] = -(-most // layout.attention_data)
    arguments = {
        "watchdog_timeout": spec.pause_seconds + WATCHDOG_SECONDS,
        "max_running_requests": spec.requests_at_once,
        "sleep_on_idle": True,  # otherwise each idle scheduler takes a core
        **defaults,
        **options,
        "model_path": spec.model_directory,
        "dtype": spec.dtype,
        "device": spec.device,
        "tp_size": layout.tensor,
        "ep_size": layout.expert,
        "pp_size": layout.pipeline,
        "attn_dp_size": layout.attention_data,
        # Otherwise each rank gathers the hidden states of all groups, and the logits after that.
        "enable_dp_lm_head": layout.attention_data > 1,
        "load_format": "auto" if spec.keeps_weights else "dummy",
        "enable_deterministic_inference": spec.deterministic or on_cpus,  # to sample by seed
        "skip_tokenizer_init": not spec.chat_model,  # token ids in, token ids out
        "incremental_streaming_output": not spec.chat_model,  # each token of a stream comes once
    }
    if spec.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if spec.chat_model:
        return arguments | ({} if on_cpus else {"enable_fp32_lm_head": False})
    if spec.top_ids is not None:
        return arguments
    if not on_cpus:
        arguments["moe_runner_backend"] = "triton"
    # The recipe's own changes stay. Updates have no vision tower, and blocks as the recipe says, not as the files.
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    changes = {"language_model_only": True, "quantization_config": blocks if spec.quantization else None}
    return arguments | {
        "json_model_override_args": json.dumps(json.loads(options.get("json_model_override_args") or "{}") | changes),
        "weight_version": "0",
        "disable_shared_experts_fusion": True,  # weights are sent to them as they are (weights/sides/sglang.py)
        "custom_weight_loader": [LOAD_FORMAT],
    }


def node_settings(node: EngineNode) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns one node's fields of ServerArgs, and its environment variables."""
    host = f"[{node.meeting.host}]" if ":" in node.meeting.host else node.meeting.host
    environment = {
        MEETING_VARIABLE: json.dumps(asdict(node.meeting)),
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"{MEETING_SCHEME}://",
        "SGLANG_ZMQ_ALLOWED_PEERS": ",".join(node.addresses),
        "SGLANG_ZMQ_SOURCE_IP": node.addresses[node.rank],
        "SGLANG_HOST_IP": node.addresses[node.rank],
    }
    return {"nnodes": node.nodes, "node_rank": node.rank, "dist_init_addr": f"{host}:{node.port}"}, environment


def start_server(spec: ServerSpec) -> Server:
    """Starts a server, or its process on one of several nodes. Raises EngineError."""
    arguments = server_arguments(spec)
    environment = server_environment(spec.device, spec.layout.ranks, spec.threads, spec.index)
    if spec.node is not None:
        of_node, variables = node_settings(spec.node)
        arguments, environment = arguments | of_node, environment | variables
    more = {"log": spec.log, "python": spec.settings.python, "environment": environment}
    return Server(PROGRAM, arguments, name=spec.name, **more)


def server_environment(device: str, ranks: int, threads: int, engine: int = 0) -> dict[str, str]:
    """Returns the environment variables of a server of `ranks`, besides those of this process. On CPUs the ranks share
    `threads`. Engines, counted by `engine`, get different cores if there are enough."""
    if device != "cpu":
        return cache_variables()
    per_rank = max(1, threads // ranks)
    common = {
        **cache_variables(),
        DEVICE_VARIABLE: "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # compiling for a CPU gains nothing
        "OMP_NUM_THREADS": str(per_rank),
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # before it ends, it would wait five seconds for GPUs
    }
    if ranks == 1:
        return common
    # With fewer memory nodes than ranks, SGLang needs the cores of each rank.
    return common | {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(ranks, per_rank, engine)}
