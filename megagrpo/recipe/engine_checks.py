"""Rules between fields about engines: who runs them, how they are split, how weights reach them. Pure, as checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from megagrpo.recipe.rule_problem import RuleProblem, broken
from megagrpo.recipe.schema import Recipe

WAYS_INTO_TRANSFORMERS = ("auto", "shared_memory", "process_group")


def _urls(recipe: Recipe) -> Iterator[RuleProblem]:
    rollout = recipe.rollout
    if rollout.engine != "external":
        for field, given in (("urls", rollout.urls), ("api_key_variable", rollout.api_key_variable)):
            if given:
                yield broken(
                    f"rollout.{field}",
                    reads=("rollout.engine",),
                    given=f"{given}, with engine: {rollout.engine}",
                    needed="nothing: they are for servers that somebody else runs",
                    fix="remove it, or write engine: external",
                )
        return
    if len(rollout.urls) != rollout.engines:
        yield broken(
            "rollout.urls",
            reads=("rollout.engines", "rollout.engine"),
            given=f"{len(rollout.urls)} urls for {rollout.engines} engine{'s' if rollout.engines > 1 else ''}",
            needed="the url of each engine",
            fix=f"engines: {len(rollout.urls)}" if rollout.urls else "urls: [http://host:30000]",
        )
    if twice := sorted({url for url in rollout.urls if rollout.urls.count(url) > 1}):
        yield broken(
            "rollout.urls", given=f"{', '.join(twice)} more than once", needed="each server once", fix="remove one"
        )
    for url in rollout.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield broken(
                "rollout.urls", given=url, needed="http:// or https://, and a host", fix="write http://host:30000"
            )


def _engine_settings(recipe: Recipe) -> Iterator[RuleProblem]:
    rollout = recipe.rollout
    own = rollout.sglang.python is not None or bool(rollout.sglang.model_extra)
    if own and rollout.engine != "sglang":
        yield broken(
            "rollout.sglang",
            reads=("rollout.engine",),
            given=f"settings, with engine: {rollout.engine}",
            needed="nothing: they are for servers that the run starts",
            fix="remove them, or write engine: sglang",
        )


def _sglang_numbers(recipe: Recipe) -> Iterator[RuleProblem]:
    """Of the arguments that plans calculate with; SGLang itself judges all of them before a run."""
    options = recipe.rollout.sglang.model_extra or {}
    share = options.get("mem_fraction_static")
    if share is not None and not (isinstance(share, float) and 0 < share < 1):
        yield broken(
            "rollout.sglang.mem_fraction_static",
            given=f"{share}",
            needed="a share of a GPU's memory, above 0 and below 1",
            fix="mem_fraction_static: 0.5",
        )
    for name in ("max_running_requests", "max_total_tokens", "chunked_prefill_size"):
        value = options.get(name)
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        if not whole and not (name == "chunked_prefill_size" and value == -1):
            yield broken(f"rollout.sglang.{name}", given=f"{value}", needed="a whole number above 0", fix="remove it")


def _engine_layout(recipe: Recipe) -> Iterator[RuleProblem]:
    rollout, layout = recipe.rollout, recipe.rollout.layout
    if rollout.engine == "transformers":
        for field, size in (("tensor", layout.tensor), ("expert", layout.expert)):
            if size > 1:
                yield broken(
                    f"rollout.layout.{field}",
                    reads=("rollout.engine",),
                    given=f"{size}, with engine: transformers",
                    needed="1: the embedded engine is one process",
                    fix=f"{field}: 1, or engine: sglang",
                )
    elif layout.tensor % layout.expert:
        yield broken(
            "rollout.layout.expert",
            reads=("rollout.layout.tensor",),
            given=f"{layout.expert}, with tensor {layout.tensor}",
            needed=f"a divisor of tensor: experts are shared by the same {layout.tensor} ranks",
            fix="expert: 1, or expert: as tensor",
        )
    elif layout.expert > 1 and recipe.cluster.device == "cpu" and rollout.engine == "sglang":
        yield broken(
            "rollout.layout.expert",
            reads=("cluster.device", "rollout.engine"),
            given=f"{layout.expert}, with cluster.device: cpu",
            needed="1: on a CPU, SGLang ends at the first token if experts are shared",
            fix="expert: 1",
        )


def _transfer(recipe: Recipe) -> Iterator[RuleProblem]:
    transfer, engine = recipe.weights.transfer, recipe.rollout.engine
    if engine == "transformers" and transfer not in WAYS_INTO_TRANSFORMERS:
        yield broken(
            "weights.transfer",
            reads=("rollout.engine",),
            given=f"{transfer}, with rollout.engine: transformers",
            needed=f"{', '.join(WAYS_INTO_TRANSFORMERS[:-1])} or {WAYS_INTO_TRANSFORMERS[-1]}: "
            "the others go through SGLang's loaders",
            fix="transfer: auto, or rollout.engine: sglang",
        )
    through_files = transfer == "disk" or (transfer == "auto" and engine == "external")
    if recipe.weights.directory is not None and not through_files:
        yield broken(
            "weights.directory",
            reads=("weights.transfer", "rollout.engine"),
            given=f"{recipe.weights.directory}, with transfer: {transfer}",
            needed="nothing: no files are written",
            fix="remove it, or write transfer: disk",
        )


ENGINE_RULES: tuple[Callable[[Recipe], Iterator[RuleProblem]], ...] = (
    _urls,
    _engine_settings,
    _sglang_numbers,
    _engine_layout,
    _transfer,
)
