"""The kinds of engines. A recipe looks `rollout.engine` up in ENGINES once; other folders ask the kind, not the name.

Every recipe imports this module. So methods import an engine, or its side of the weights, when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagrpo.errors import Problem
    from megagrpo.recipe.schema import EngineLayoutConfig, Recipe
    from megagrpo.recipe.schema.rollout import RolloutConfig
    from megagrpo.rollout.engine import Engine, EngineSpec
    from megagrpo.weights.families.architecture import Architecture


class EngineKind:
    """A kind of engines. The defaults are those of an engine in the actor's own process that holds the whole model."""

    started_by_us = True
    """The run starts the engines, on its devices. Others run already, at rollout.urls."""

    starts_servers = False
    """An engine is a server that the run starts, without weights, and with a cache that it reserves at its start."""

    streams = False
    """Requests join and leave a running batch one by one. Other engines decode all that they were handed in batches of
    their own choice."""

    splits = False
    """rollout.layout may split an engine over devices."""

    reads_files = False
    """Weights may come as files: weights.transfer: disk."""

    def options(self, rollout: RolloutConfig) -> Mapping[str, Any]:
        """Returns the arguments of the servers that the recipe gives."""
        return {}

    def requests_at_once(self, recipe: Recipe) -> int:
        """Returns the number of responses that an engine decodes in one batch."""
        return recipe.rollout.requests_at_once

    def keeps_prefixes(self, rollout: RolloutConfig) -> bool:
        """Returns whether an engine caches the tokens of earlier requests."""
        return False

    def releases_memory(self, rollout: RolloutConfig) -> bool:
        """Returns whether an engine can free device memory while it does not sample."""
        return False

    def nccl_environment(self, rollout: RolloutConfig) -> dict[str, str]:
        """Returns the NCCL variables that training ranks must share with engines that NCCL joins to them."""
        return {}

    def extras(self, rollout: RolloutConfig) -> Sequence[str]:
        """Returns the extras of megagrpo whose packages must be installed here."""
        return ()

    def problems(self, rollout: RolloutConfig, *, plan_only: bool) -> Sequence[Problem]:
        """Finds problems of its packages and settings. With `plan_only` the packages may be missing."""
        return ()

    def split_problems(
        self, architecture: Architecture, layout: EngineLayoutConfig, device: str, quantization: str | None
    ) -> Sequence[Problem]:
        """Finds reasons for which an engine of this layout cannot hold the model."""
        return ()

    def server(self, spec: EngineSpec) -> Any:
        """Starts the server of an engine, or its process on `spec.node`. It has `check_running`, `end` and `close`.
        None: this kind starts none."""
        return None

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        """Makes an engine, which answers requests on return. Raises ModelError or EngineError."""
        raise NotImplementedError


class Transformers(EngineKind):
    """The embedded engine, for CPUs and tests."""

    def requests_at_once(self, recipe: Recipe) -> int:
        # The last bits of a product depend on its number of rows.
        return 1 if recipe.deterministic else recipe.rollout.requests_at_once

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        from megagrpo.processes import importing

        with importing():
            from megagrpo.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(spec)


class External(EngineKind):
    """SGLang servers that run already."""

    started_by_us = False
    streams = splits = reads_files = True

    def keeps_prefixes(self, rollout: RolloutConfig) -> bool:
        return not self.options(rollout).get("disable_radix_cache")

    def split_problems(
        self, architecture: Architecture, layout: EngineLayoutConfig, device: str, quantization: str | None
    ) -> Sequence[Problem]:
        from megagrpo.weights.sides.sglang import split_problems

        return split_problems(architecture, layout, device, quantization)

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        from megagrpo.rollout.sglang.engine import SglangEngine

        return SglangEngine(spec, server)


class Sglang(External):
    """SGLang servers that the run starts and ends."""

    started_by_us = starts_servers = True

    def options(self, rollout: RolloutConfig) -> Mapping[str, Any]:
        return rollout.sglang.model_extra or {}

    def releases_memory(self, rollout: RolloutConfig) -> bool:
        return bool(self.options(rollout).get("enable_memory_saver"))

    def nccl_environment(self, rollout: RolloutConfig) -> dict[str, str]:
        """Returns what SGLang sets in its servers, unless it is set."""
        options = self.options(rollout)
        symmetric = bool(options.get("enable_symm_mem"))
        multicast = symmetric or bool(options.get("enable_nccl_nvls"))
        return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}

    def extras(self, rollout: RolloutConfig) -> Sequence[str]:
        return ("sglang",) if rollout.sglang.python is None else ()

    def problems(self, rollout: RolloutConfig, *, plan_only: bool) -> Sequence[Problem]:
        from megagrpo.rollout.sglang.arguments import sglang_problems

        return sglang_problems(rollout.sglang, plan_only=plan_only)

    def server(self, spec: EngineSpec) -> Any:
        from megagrpo.rollout.sglang.arguments import start_server

        return start_server(spec)


ENGINES: dict[str, EngineKind] = {"transformers": Transformers(), "sglang": Sglang(), "external": External()}
