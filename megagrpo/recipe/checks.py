"""Rules between fields of a recipe. Pure: nothing else is read. Those that need the model are in model_checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.recipe.algorithm_checks import ALGORITHM_RULES
from megagrpo.recipe.correction_checks import CORRECTION_RULES
from megagrpo.recipe.defaults import engine_devices
from megagrpo.recipe.engine_checks import ENGINE_RULES
from megagrpo.recipe.fields import nearest
from megagrpo.recipe.passes import computes_old_logprobs
from megagrpo.recipe.rank_checks import RANK_RULES, longest_fits
from megagrpo.recipe.rule_problem import RuleProblem, broken
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.sft_checks import SFT_RULES

RUN_LENGTHS = ("total_steps", "total_epochs", "total_episodes")


def recipe_problems(recipe: AnyRecipe) -> list[RuleProblem]:
    """Every broken rule of the recipe alone; `where` is a dotted path."""
    if isinstance(recipe, SftRecipe):
        return [problem for rule in SFT_RULES for problem in rule(recipe)]
    return [problem for rule in RULES for problem in rule(recipe)]


def _run_length(recipe: Recipe) -> Iterator[RuleProblem]:
    given = [name for name in RUN_LENGTHS if getattr(recipe.train, name) is not None]
    if len(given) != 1:
        yield broken(
            f"train.{(given or RUN_LENGTHS)[0]}",
            reads=tuple(f"train.{name}" for name in RUN_LENGTHS),
            given=f"{' and '.join(given)}" if given else "no length of the run",
            needed="exactly one of total_steps, total_epochs, total_episodes",
            fix="keep one of them" if given else "add total_steps: N",
        )
    samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    if recipe.train.total_episodes is not None and recipe.train.total_episodes < samples:
        yield broken(
            "train.total_episodes",
            reads=("rollout.prompts_per_step", "rollout.samples_per_prompt"),
            given=f"{recipe.train.total_episodes}, and one step takes {samples} responses",
            needed=f"at least {samples}",
            fix="raise it, or lower rollout.prompts_per_step or rollout.samples_per_prompt",
        )


def _batch(recipe: Recipe) -> Iterator[RuleProblem]:
    rollout, minibatches, data = recipe.rollout, recipe.algorithm.minibatches, recipe.train.layout.data
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    product = f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = {samples}"
    if samples % minibatches:
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        yield broken(
            "algorithm.minibatches",
            reads=("rollout.prompts_per_step", "rollout.samples_per_prompt"),
            given=f"{minibatches} minibatches of {product}",
            needed="minibatches of equal size",
            fix=f"minibatches: {min(divisors, key=lambda n: abs(n - minibatches))}",
        )
    elif samples // minibatches < data:
        yield broken(
            "train.layout.data",
            reads=("algorithm.minibatches", "rollout.prompts_per_step", "rollout.samples_per_prompt"),
            given=f"{data} data ranks, and {product} in {minibatches} minibatches, "
            f"so {samples // minibatches} samples in each",
            needed="at least one sample of every minibatch for each data rank",
            fix=f"lower train.layout.data to {samples // minibatches}, lower algorithm.minibatches, or sample more",
        )


def _sampling(recipe: Recipe) -> Iterator[RuleProblem]:
    reason = "training divides by the probabilities of the whole vocabulary, so sampling must draw from all of it"
    if recipe.rollout.top_p != 1:
        yield broken(
            "rollout.top_p", given=f"{recipe.rollout.top_p}", needed=f"1: {reason}", fix="top_p: 1.0, or remove it"
        )
    if recipe.rollout.top_k:
        yield broken(
            "rollout.top_k", given=f"{recipe.rollout.top_k}", needed=f"0: {reason}", fix="top_k: 0, or remove it"
        )


def _lengths(recipe: Recipe) -> Iterator[RuleProblem]:
    prompt, response = recipe.data.prompt_tokens_max, recipe.rollout.response_tokens_max
    yield from longest_fits(
        recipe.train,
        prompt + response,
        described=f"prompt + response of up to {prompt} + {response}",
        what="sequence",
        limits=("data.prompt_tokens_max", "rollout.response_tokens_max"),
    )


def _logprob_microbatches(recipe: Recipe) -> Iterator[RuleProblem]:
    trained, tokens = recipe.train.tokens_per_microbatch, recipe.train.logprob_tokens_per_microbatch
    algorithm = recipe.algorithm
    if tokens is None:
        return
    if tokens % trained or tokens == trained:
        yield broken(
            "train.logprob_tokens_per_microbatch",
            reads=("train.tokens_per_microbatch",),
            given=f"{tokens}, and {trained} with gradients",
            needed=f"a multiple of {trained}: whole microbatches pass together",
            fix=f"{max(2, tokens // trained) * trained}, or remove it",
        )
    old = computes_old_logprobs(algorithm)
    if not old and algorithm.kl.coefficient == 0 and algorithm.critic is None:
        yield broken(
            "train.logprob_tokens_per_microbatch",
            reads=("algorithm.minibatches", "algorithm.epochs", "algorithm.kl.coefficient"),
            given=f"{tokens}, and no pass without gradients",
            needed="nothing: the update's own pass gives all logprobs",
            fix="remove it",
        )


def _placement(recipe: Recipe) -> Iterator[RuleProblem]:
    own, engines, each = recipe.cluster.engine_devices, recipe.rollout.engines, engine_devices(recipe)
    ranks = recipe.train.layout.parallel().ranks
    colocated = recipe.cluster.placement == "colocated"
    if own is not None and (colocated or each == 0):
        yield broken(
            "cluster.engine_devices",
            reads=("cluster.placement", "rollout.engine"),
            given=f"{own}, with " + ("placement: colocated" if colocated else "rollout.engine: external"),
            needed="nothing: "
            + ("colocated engines share the trainer's devices" if colocated else "somebody else runs the engines"),
            fix="remove it, or write placement: disaggregated" if colocated else "remove it",
        )
    elif own is not None and (own > engines * each or own % each):
        yield broken(
            "cluster.engine_devices",
            reads=("rollout.engines", "rollout.layout.tensor", "cluster.placement"),
            given=f"{own} devices for {engines} engine{'s' if engines > 1 else ''} of {each}",
            needed="at most one device for each engine"
            if each == 1
            else f"a multiple of rollout.layout.tensor = {each}, at most {engines * each}",
            fix=f"engine_devices: {engines * each}",
        )
    elif colocated and each > ranks:
        yield broken(
            "rollout.layout.tensor",
            reads=("cluster.placement", "train.layout.data"),
            given=f"{each}, with {ranks} training rank{'s' if ranks > 1 else ''} and placement: colocated",
            needed=f"at most {ranks}: colocated engines share the trainer's devices",
            fix="a smaller tensor size, more training ranks, or placement: disaggregated",
        )


def _offload(recipe: Recipe) -> Iterator[RuleProblem]:
    offload = recipe.train.offload
    if repeated := sorted({part for part in offload if offload.count(part) > 1}):
        yield broken(
            "train.offload", given=f"{', '.join(repeated)} more than once", needed="each part once", fix="remove one"
        )
    if offload and recipe.cluster.placement == "disaggregated":
        yield broken(
            "train.offload",
            reads=("cluster.placement",),
            given=f"{', '.join(offload)}, with cluster.placement: disaggregated",
            needed="nothing: training has its devices to itself, with no engine to make room for",
            fix="remove it, or write cluster.placement: colocated",
        )
    if "reference" in offload and recipe.algorithm.kl.coefficient == 0:
        yield broken(
            "train.offload",
            reads=("algorithm.kl.coefficient",),
            given="reference, with algorithm.kl.coefficient 0",
            needed="a reference policy: there is none without a KL penalty",
            fix="remove reference from the list, or give a coefficient",
        )
    if "critic" in offload and recipe.algorithm.critic is None:
        yield broken(
            "train.offload",
            reads=("algorithm.critic",),
            given="critic, without algorithm.critic",
            needed="a critic",
            fix="remove critic from the list",
        )


def _evaluation(recipe: Recipe) -> Iterator[RuleProblem]:
    evaluation = recipe.eval
    if evaluation.samples_per_prompt > 1 and evaluation.temperature == 0:
        yield broken(
            "eval.samples_per_prompt",
            reads=("eval.temperature",),
            given=f"{evaluation.samples_per_prompt} with temperature 0",
            needed="1: greedy decoding gives the same response every time",
            fix="eval.temperature: 1.0, or samples_per_prompt: 1",
        )
    for name, value, off in (("top_p", evaluation.top_p, 1.0), ("top_k", evaluation.top_k, 0)):
        if evaluation.temperature == 0 and value != off:
            yield broken(
                f"eval.{name}",
                reads=("eval.temperature",),
                given=f"{value} with temperature 0",
                needed=f"{off:g}: greedy decoding takes the most likely token",
                fix=f"give eval.temperature, or remove {name}",
            )


def _evaluation_metrics(recipe: Recipe) -> Iterator[RuleProblem]:
    stopping = recipe.eval.early_stopping
    asked = {
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
        "eval.early_stopping.metric": stopping.metric if stopping else None,
    }
    if stopping and stopping.target is None and stopping.patience is None:
        yield broken(
            "eval.early_stopping",
            reads=("eval.early_stopping.target", "eval.early_stopping.patience"),
            given="neither target nor patience",
            needed="at least one of them: when to stop",
            fix="add target: 0.9 or patience: 5",
        )
    for field, metric in asked.items():
        if metric is None:
            continue
        if not recipe.eval.files:
            yield broken(
                field,
                reads=("eval.files",),
                given=f"{metric}, and no eval.files",
                needed="prompts to evaluate on",
                fix="give eval.files",
            )
        yield from _metric_name(field, metric, recipe.eval.samples_per_prompt)


def _metric_name(field: str, metric: str, samples: int) -> Iterator[RuleProblem]:
    valid = evaluation_metrics(samples)
    source, slash, name = metric.rpartition("/")
    if name in valid:
        return
    stem = name.partition("@")[0]
    guess = f"{stem}@{samples}" if f"{stem}@{samples}" in valid else nearest(name, valid)
    yield broken(
        field,
        reads=("eval.samples_per_prompt",),
        given=metric,
        needed=f"one of {', '.join(valid)} (with eval.samples_per_prompt {samples}), "
        f"or of a single data source, as SOURCE/{valid[0]}",
        fix=f"did you mean `{source}{slash}{guess}`?" if guess else f"write {valid[0]}",
    )


def evaluation_metrics(samples: int) -> list[str]:
    """Names that an evaluation with `samples` per prompt gives to its scores (see trainer/evaluation.py)."""
    return [f"mean@{samples}", *(f"pass@{k}" for k in pass_at(samples)), f"maj@{samples}"]


def pass_at(samples: int) -> list[int]:
    """Every k for which pass@k is reported: 1, 2, 4, … and `samples`."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


RULES: tuple[Callable[[Recipe], Iterator[RuleProblem]], ...] = (
    _sampling, _batch, *ALGORITHM_RULES, *CORRECTION_RULES, _run_length, _lengths, _logprob_microbatches, *RANK_RULES,
    _offload, _evaluation, _evaluation_metrics, _placement, *ENGINE_RULES,
)  # fmt: skip
