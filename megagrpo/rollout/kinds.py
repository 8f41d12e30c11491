"""The kinds of engines. A recipe looks `rollout.engine` up in ENGINES once; other folders ask the kind, not the name.

Every recipe imports this module. So methods import an engine, its memory, or its side of the weights, when they are
called. Kinds of servers have theirs in modules of equal names: `package`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagrpo.errors import Problem
    from megagrpo.plan.case import Case
    from megagrpo.plan.engine import EngineMemory
    from megagrpo.recipe.schema import Recipe
    from megagrpo.recipe.schema.rollout import RolloutConfig
    from megagrpo.rollout.arguments import Arguments
    from megagrpo.rollout.engine import Engine, EngineSpec, ServerSpec
    from megagrpo.rollout.token_scores import TokenScores
    from megagrpo.weights.families.architecture import Architecture


CACHES_ELSEWHERE = ("enable_hierarchical_cache", "enable_lmcache")
"""Arguments of SGLang's that store keys and values outside of its cache on the device."""


class EngineKind:
    """A kind of engines. The defaults are those of an engine in the actor's own process that holds the whole model."""

    started_by_us = True
    """True if the run starts the engines, on its devices; False if they run already, at rollout.urls."""

    starts_without_weights = False
    """True if an engine reads no weights from the model's files: the first update brings them."""

    streams = False
    """True if requests join and leave a running batch one by one: each engine gets at most rollout.requests_at_once.
    False: it gets any number, and decodes them in batches of its own choice."""

    splits = False
    """True if rollout.layout may split an engine over devices."""

    spans_nodes = False
    """True if an engine may be larger than a node."""

    experts_need_gpus = False
    """True if rollout.layout.expert must be 1 on CPUs."""

    reads_files = False
    """True if weights may come as files (weights.transfer: disk)."""

    quantizes = False
    """True if the recipe may have rollout.quantization: the run then sends quantised weights."""

    multiplies_in_float8 = False
    """True if quantised engines multiply in float8, on GPUs that do, in place of bfloat16. False: they compute with the
    values that blocks stand for, on any device, in the model's dtype."""

    returns_kept_sets = False
    """True if samples can have their kept sets: the ids among which rollout.top_p, top_k and min_p drew each token."""

    returns_sets_of_min_p = True
    """False if rollout.min_p must be 0."""

    answers_chats = False
    """True if its servers answer conversations, as those of generative reward models do."""

    package: str = ""
    """Name of the folder of its servers beside this file, and of their side, a module of weights/sides. `engine` there
    has ENGINE, `client` SCORES and served_model; of a kind with `settings`, `arguments` ARGUMENTS and start_server, and
    `memory` engine_memory."""

    settings: str | None = None
    """Name of the section of `rollout` that has the settings of its servers, which recipes of other kinds leave out."""

    context: str | None = None
    """Name of the argument of its servers that limits a prompt with its response."""

    def route_bytes(self, arch: Architecture) -> float:
        """Returns the bytes of a token's routes in a server's answer."""
        return 0.0

    def route_buffer_bytes(self, case: Case) -> int:
        """Returns the bytes of routes that the engines of the fullest node keep in host memory."""
        return 0

    def set_bytes(self, ids: int, arch: Architecture) -> float:
        """Returns the bytes of a kept set of so many ids in a server's answer."""
        return 0.0

    def options(self, rollout: RolloutConfig) -> Mapping[str, Any]:
        """Returns the arguments that the recipe gives to the servers."""
        return getattr(rollout, self.settings).model_extra or {} if self.settings else {}

    def module(self, name: str) -> Any:
        """Imports a module of its package."""
        return import_module(f"megagrpo.rollout.{self.package}.{name}")

    @property
    def arguments(self) -> Arguments:
        """Returns what is known of the arguments of its servers, of a kind with `settings`."""
        return self.module("arguments").ARGUMENTS

    def requests_at_once(self, recipe: Recipe) -> int:
        """Returns the number of responses that an engine decodes in one batch: rollout.requests_at_once or fewer."""
        return recipe.rollout.requests_at_once

    def returns_routes(self, rollout: RolloutConfig) -> bool:
        """Returns whether samples can have the experts that an engine chose (routes.py)."""
        return False

    def kept_ids_max(self, rollout: RolloutConfig) -> int | None:
        """Returns the largest rollout.top_k with which an engine returns kept sets. None: it needs no top_k."""
        return None

    def keeps_prefixes(self, rollout: RolloutConfig) -> bool:
        """Returns whether an engine caches the tokens of earlier requests."""
        return False

    def releases_memory(self, rollout: RolloutConfig) -> bool:
        """Returns whether an engine can free device memory while it does not sample."""
        return False

    def beside_training(self, share: float) -> dict[str, Any]:
        """Returns recipe values, by dotted path, of engines that take `share` of a GPU and free it for training."""
        return {}

    def nccl_environment(self, rollout: RolloutConfig) -> dict[str, str]:
        """Returns the NCCL variables that training ranks must share with engines that NCCL joins to them."""
        return {}

    def extras(self, rollout: RolloutConfig) -> Sequence[str]:
        """Returns the extras of megagrpo whose packages must be installed here."""
        return ()

    def problems(self, section: Any, where: str, named_by: str, *, plan_only: bool) -> Sequence[Problem]:
        """Finds problems of its packages and settings. `section`: `rollout`, or of a reward model, at `where` in the
        recipe; `named_by`: the field there that names the engine. With `plan_only` the packages may be missing."""
        if self.settings is None:
            return ()
        settings, places = getattr(section, self.settings), (f"{where}.{self.settings}", f"{where}.{named_by}")
        return self.arguments.problems(settings, *places, plan_only=plan_only)

    def model_problems(self, directory: Path) -> Sequence[Problem]:
        """Finds reasons for which an engine cannot start with the model in this directory."""
        return self.arguments.model_problems(directory) if self.settings else ()

    def context_problems(self, architecture: Architecture, rollout: RolloutConfig) -> Sequence[Problem]:
        """Finds problems of the context length that the recipe gives to servers of this model."""
        return ()

    @property
    def side(self) -> Any:
        """Returns the side of the weights of a kind that splits: a module of weights/sides with `split_problems`."""
        return import_module(f"megagrpo.weights.sides.{self.package}")

    def memory(self, case: Case) -> EngineMemory:
        """Returns the memory of an engine on its fullest device. Raises ModelError if it cannot hold the model."""
        if self.settings:
            return self.module("memory").engine_memory(case)
        from megagrpo.plan.engine import memory_of_whole_model

        return memory_of_whole_model(case)

    def server(self, spec: ServerSpec) -> Any:
        """Starts a Server, or its process on `spec.node`. None: this kind starts none."""
        return self.module("arguments").start_server(spec) if self.settings else None

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        """Makes an engine, which answers requests on return. Raises ModelError or EngineError."""
        return self.module("engine").ENGINE(spec, server)

    def served_model(self, url: str, api_key: str) -> Mapping[str, Any]:
        """Asks the server at `url` about its model and weights, for kinds that the run does not start. Raises
        EngineError if no server of this kind answers."""
        return self.module("client").served_model(url, api_key)

    @property
    def token_scores(self) -> TokenScores:
        """Returns requests for the logprobs of given tokens, for kinds of servers."""
        return self.module("client").SCORES


class Transformers(EngineKind):
    """The embedded engine, for CPUs and tests."""

    quantizes = returns_kept_sets = True

    def returns_routes(self, rollout: RolloutConfig) -> bool:
        return True

    def model_problems(self, directory: Path) -> Sequence[Problem]:
        from megagrpo.section import problem
        from megagrpo.weights.families import FAMILIES, sglang_classes
        from megagrpo.weights.families.reading import read_json

        path = directory / "config.json"
        name = str(read_json(path).get("model_type"))
        lacks = name in FAMILIES and FAMILIES[name].sglang is sglang_classes.NO_ENGINE
        return [problem("model_that_transformers_lacks", config=path, model_type=name)] if lacks else []

    def requests_at_once(self, recipe: Recipe) -> int:
        # The last bits of a product depend on its number of rows.
        return 1 if recipe.deterministic else recipe.rollout.requests_at_once

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        from megagrpo.processes import importing

        with importing():
            from megagrpo.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(spec)


class External(EngineKind):
    """SGLang servers that run already. The recipe does not know their options."""

    started_by_us, package = False, "sglang"
    streams = splits = spans_nodes = experts_need_gpus = reads_files = returns_kept_sets = True
    returns_sets_of_min_p = False  # its sampler by seeds fails

    def returns_routes(self, rollout: RolloutConfig) -> bool:
        # SGLang's first stage answers, with 0 for the layers of others. It keeps routes by slots of its cache, and
        # does not move them with keys and values that it stores elsewhere.
        return rollout.layout.pipeline == 1 and not any(self.options(rollout).get(name) for name in CACHES_ELSEWHERE)

    def route_bytes(self, arch: Architecture) -> float:
        return 4 / 3 * 4 * len(arch.layers) * arch.experts_per_token  # base64 of int32, of layers without experts too

    def set_bytes(self, ids: int, arch: Architecture) -> float:
        return ids * (len(str(arch.vocab)) + 1)  # JSON

    def kept_ids_max(self, rollout: RolloutConfig) -> int | None:
        most = self.options(rollout).get("sampling_mask_max_tokens")
        return most if isinstance(most, int) and most > 0 else 4096  # SGLang's default

    def keeps_prefixes(self, rollout: RolloutConfig) -> bool:
        return not self.options(rollout).get("disable_radix_cache")


class Sglang(External):
    """SGLang servers that the run starts and ends: the same engine and side, with options, problems and memory."""

    started_by_us = starts_without_weights = quantizes = multiplies_in_float8 = answers_chats = True
    settings, context = "sglang", "context_length"

    def releases_memory(self, rollout: RolloutConfig) -> bool:
        return bool(self.options(rollout).get("enable_memory_saver"))

    def beside_training(self, share: float) -> dict[str, Any]:
        return {"rollout.sglang.enable_memory_saver": True, "rollout.sglang.mem_fraction_static": share}

    def nccl_environment(self, rollout: RolloutConfig) -> dict[str, str]:
        """Returns what SGLang sets in its servers, unless it is set."""
        options = self.options(rollout)
        symmetric = bool(options.get("enable_symm_mem"))
        multicast = symmetric or bool(options.get("enable_nccl_nvls"))
        return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}

    def extras(self, rollout: RolloutConfig) -> Sequence[str]:
        return ("sglang",) if rollout.sglang.python is None else ()

    def route_buffer_bytes(self, case: Case) -> int:
        return self.module("memory").route_buffer_bytes(case)


class ExternalVllm(EngineKind):
    """vLLM servers that run already. The recipe does not know their options.

    Without routes and kept sets: vLLM 0.32 returns both only by its second model runner, which CPUs lack and which was
    not tried.
    """

    started_by_us, package = False, "vllm"
    streams = splits = reads_files = True

    def keeps_prefixes(self, rollout: RolloutConfig) -> bool:
        return self.options(rollout).get("enable_prefix_caching") is not False


class Vllm(ExternalVllm):
    """vLLM servers that the run starts and ends, in an environment of their own."""

    started_by_us = starts_without_weights = answers_chats = True
    settings, context = "vllm", "max_model_len"

    def releases_memory(self, rollout: RolloutConfig) -> bool:
        return bool(self.options(rollout).get("enable_sleep_mode"))

    def beside_training(self, share: float) -> dict[str, Any]:
        return {"rollout.vllm.enable_sleep_mode": True, "rollout.vllm.gpu_memory_utilization": share}

    def context_problems(self, architecture: Architecture, rollout: RolloutConfig) -> Sequence[Problem]:
        return self.module("arguments").context_problems(architecture, rollout.server_context)


ENGINES: dict[str, EngineKind] = {
    "transformers": Transformers(),
    "sglang": Sglang(),
    "external": External(),
    "vllm": Vllm(),
    "external_vllm": ExternalVllm(),
}
