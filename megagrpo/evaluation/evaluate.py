"""`megagrpo eval`: a model, or two, on the recipe's evaluation sets, without training.

OUTPUT/
  MODEL/                  one for each model, named after it
    settings.json         what its responses were made with: model, prompts, sampling, rewards
    responses.jsonl       a line for each response, written as prompts are done: what a killed evaluation keeps
    results.json          metrics, and how many prompts of each file were over-long
    model/                a checkpoint's Hugging Face model, until the evaluation is done
    logs/                 of the engines
  comparison.json         of two models
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from megagrpo import typed_json
from megagrpo.checkpoint.trainer_state import changes
from megagrpo.cluster import runtime
from megagrpo.cluster.engines import EngineActors
from megagrpo.cluster.reward_models import RewardModels
from megagrpo.cluster.reward_nodes import scorer_maker
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.stopping import Stopping, StopRequested, until_stopped
from megagrpo.data.prompts import prompt_reader
from megagrpo.errors import PreflightError, Problem, RunStopped
from megagrpo.evaluation.evaluated_model import EvaluatedModel, evaluated_model, model_identity
from megagrpo.evaluation.metrics import Comparison, Difference, compare, evaluation_metrics, prompts_of_both
from megagrpo.evaluation.responses import Response, ResponseLog, responses_of, write_json
from megagrpo.preflight.model import directories_beside
from megagrpo.preflight.preflight import Preflight, check_model, check_sets
from megagrpo.progress import progress
from megagrpo.recipe.defaults import own_rewards, plan_engines, run_directory, with_absolute_directories
from megagrpo.recipe.load import load
from megagrpo.recipe.reward_functions import executor_of
from megagrpo.recipe.schema import ClassifierConfig, Recipe
from megagrpo.recipe.schema.eval import EvalSet, evaluation_metric_names
from megagrpo.recipe.schema.run import ConsoleMode
from megagrpo.reward.judging.rubric import is_file
from megagrpo.reward.scorer import Scorer
from megagrpo.rollout.pool import Order
from megagrpo.rollout.requests import evaluation_requests
from megagrpo.tokenizer import load_chat_tokenizer
from megagrpo.track.console import JsonConsole, make_console
from megagrpo.track.status import only_process_of
from megagrpo.types import Group, Prompt
from megagrpo.weights.families.reading import read_json

PROMPTS_AT_ONCE = 64
"""The maximum number of prompts scored and logged together."""
NOT_IN_SETTINGS = ("files", "functions", "every_steps", "before_training")
"""Fields of a set that its responses do not depend on, or that settings.json has in another form."""
OF_RESPONSES = ("unscored_share", "reward/errors", "masked", "response_tokens/mean", "response_tokens/truncated_share")
"""Metrics without an interval, shown below the others."""
JUDGED_RESPONSES = 256
"""Responses after which functions that fail on too many of them end the evaluation."""

Say = Callable[[str], None]
Orders = Mapping[Order, str]
"""Orders, each of one prompt's responses, with the name of its set."""


@dataclass(frozen=True)
class Evaluated:
    """The responses and metrics of one model, by set."""

    model: str
    responses: Mapping[str, Sequence[Response]]
    metrics: Mapping[str, Mapping[str, float]]


def evaluate(
    models: Sequence[str],
    recipe_file: Path,
    overrides: Sequence[str],
    output: Path | None,
    api_key_variable: str | None,
    console_mode: ConsoleMode | None,
) -> int:
    """Evaluates the models in turn, prints and writes the results, and compares two; returns 0.

    api_key_variable: the environment variable with the key of a server among them. console_mode: None: the recipe's.
    Resumes an earlier evaluation into the same directory. Raises MegagrpoError; RunStopped if the process was told to
    stop, with all finished prompts kept.
    """
    loaded = load(recipe_file, overrides)
    check_sets(loaded)
    recipe = loaded.recipe.without_teachers()
    console = make_console(console_mode or recipe.track.console)
    output = output or run_directory(recipe) / "eval"
    subjects = [evaluated_model(model, recipe, api_key_variable) for model in models]
    with until_stopped(lambda: None) as stopping:
        try:
            evaluated = [_evaluated(recipe, subject, output, stopping, console.say) for subject in subjects]
        except StopRequested:
            given, fix = f"responses so far are in {output}", "start the same command again: it resumes"
            raise RunStopped(Problem("told to stop", given, fix=fix)) from None
    compared = _compared(recipe, evaluated, output) if len(evaluated) == 2 else None
    if isinstance(console, JsonConsole):
        for one in evaluated:
            console.event("result", model=one.model, sets=one.metrics)
        if compared:
            console.event("comparison", **asdict(compared))
        console.event("end", state="finished", places={"output": str(output)})
        return 0
    screen = Console(highlight=False)
    for one in evaluated:
        screen.print(f"\n{one.model}")
        for name, held_out in recipe.eval.of_sets().items():
            screen.print(metrics_table(held_out, one.responses[name], one.metrics[name]))
    if compared:
        screen.print(f"\n{compared.models[1]} less {compared.models[0]}")
        for name, differences in compared.sets.items():
            screen.print(comparison_table(name, differences))
            if len(set(compared.prompts[name].values())) > 1:
                screen.print("{both} prompts that both have, of {first} and {second}".format(**compared.prompts[name]))
    console.say(f"written to {output}")
    return 0


def _evaluated(recipe: Recipe, subject: EvaluatedModel, output: Path, stopping: Stopping, say: Say) -> Evaluated:
    """Evaluates one model. Samples, scores and logs the responses that its log lacks."""
    directory = output / subject.label
    with only_process_of(directory), ExitStack() as closing:
        tokenizer = load_chat_tokenizer(subject.tokenizer_directory(recipe), recipe.model.chat_template)
        read = prompt_reader(recipe)
        data = {name: read(files, tokenizer, name) for name, files in recipe.eval.files_of_sets().items()}
        for of_set in data.values():
            for line in of_set.lines("prompts"):
                say(line)
        prompts = {name: of_set.items for name, of_set in data.items()}
        _require_same(directory, _settings(recipe, subject, prompts))
        log = ResponseLog(directory / "responses.jsonl")
        closing.callback(log.close)
        # Responses that failed or were left out are requested again.
        done = {(one.set, one.prompt_id, one.index) for one in log.responses if one.score is not None}
        orders: Orders = {
            Order(requests, prompt=prompt): name
            for name, one in recipe.eval.of_sets().items()
            for prompt, requests in zip(prompts[name], evaluation_requests(recipe, one, prompts[name]), strict=True)
        }
        left = {
            order: name
            for order, name in orders.items()
            if any((name, request.prompt_id, request.index) not in done for request in order.requests)
        }
        begun = f", {len(orders) - len(left)} of them done before" if len(left) < len(orders) else ""
        say(f"{subject.given}: {len(orders)} prompts{begun}")
        if left:
            _sample(subject.recipe(recipe, directory), directory, left, log, stopping, say)
        shutil.rmtree(directory / "model", ignore_errors=True)
        # A prompt that was asked for again has responses twice.
        kept = {(one.set, one.prompt_id, one.index): one for one in log.responses}
        of_sets = {name: [one for one in kept.values() if one.set == name] for name in prompts}
        metrics = {
            name: evaluation_metrics(of_sets[name], one.samples_per_prompt)
            for name, one in recipe.eval.of_sets().items()
        }
        files = {name: [asdict(file) for file in of_set.files] for name, of_set in data.items()}
        results = {"model": subject.given, "recipe": recipe.name, "sets": metrics, "files": files}
        write_json(directory / "results.json", results)
        return Evaluated(subject.given, of_sets, metrics)


def _sample(recipe: Recipe, directory: Path, orders: Orders, log: ResponseLog, stopping: Stopping, say: Say) -> None:
    """Generates and scores the responses; appends a prompt to the log once all of its responses are scored."""
    checked = check_model(recipe)
    track = recipe.track.model_copy(update={"directory": str(directory.parent)})
    checkpoint = recipe.checkpoint.model_copy(update={"directory": str(directory)})
    placed = with_absolute_directories(
        recipe.model_copy(update={"name": directory.name, "track": track, "checkpoint": checkpoint})
    )
    with ExitStack() as closing:
        with stopping.giving_up(), stopping.while_ray_starts():
            ray = runtime.start(placed, stopping.check, devices_of=plan_engines)
        closing.callback(runtime.stop, ray)
        with stopping.giving_up():
            judging = RewardModels(ray, placed, {at: path.absolute() for at, path in checked.models_beside.items()})
            closing.callback(judging.close)
            rollouts = _started(ray, placed, checked, closing, say)
            scorers = _scorers(ray, placed, judging, orders, closing, stopping, say)
            judging.wait_until_ready()
            complete: deque[Order] = deque()
            for order in orders:
                order.on_complete = complete.append
            rollouts.add(list(orders))
            with progress("sampling and scoring", len(orders), "prompts") as work:
                while work.done < len(orders):
                    rollouts.wait(lambda: bool(complete))
                    rollouts.serve_all()  # including engines that were lost and have restarted
                    batch = [complete.popleft() for _ in range(min(len(complete), PROMPTS_AT_ONCE))]
                    groups: dict[str, list[Group]] = {}
                    for order in batch:
                        groups.setdefault(orders[order], []).append(order.group())
                    scored = {name: scorers[name].score_unshaped(of_set) for name, of_set in groups.items()}
                    log.append([one for name, of_set in scored.items() for one in responses_of(name, of_set)])
                    work.advance(len(batch))


def _started(ray: Runtime, placed: Recipe, checked: Preflight[Recipe], closing: ExitStack, say: Say) -> Rollouts:
    """Starts engines that sample from the model's own weights."""
    model, tokenizer = checked.model_directory, checked.tokenizer_directory
    check_files(ray, placed, read=(model, tokenizer, *checked.models_beside.values()))
    where = ", ".join(placed.rollout.urls) or f"{placed.rollout.engines} engines ({placed.rollout.engine}) with {model}"
    say(f"starting {where}")
    rollouts = Rollouts(EngineActors(ray, placed, model, tokenizer, keeps_weights=True))
    closing.callback(rollouts.close)
    rollouts.bring_back, rollouts.say = rollouts.serve_all, say
    rollouts.wait_until_ready()
    rollouts.serve_all()
    return rollouts


def _scorers(
    ray: Runtime,
    recipe: Recipe,
    judging: RewardModels,
    orders: Orders,
    closing: ExitStack,
    stopping: Stopping,
    say: Say,
) -> dict[str, Scorer]:
    """Returns scorers by set: one shared by sets with the recipe's reward, one for each set with own functions."""
    of_sets = own_rewards(recipe)
    keys, responses = {name: name if name in of_sets else "" for name in recipe.eval.sets}, Counter[str]()
    for order, name in orders.items():
        responses[keys[name]] += len(order.requests)
    score_with = scorer_maker(recipe, ray, judging.served(), stopping.check, say)
    scorers: dict[str, Scorer] = {}
    for key in dict.fromkeys(keys.values()):
        judged = min(JUDGED_RESPONSES, responses[key])
        scorers[key] = score_with(of_sets.get(key, recipe.reward), judged_responses=judged)
        closing.callback(scorers[key].close)
    return {name: scorers[key] for name, key in keys.items()}


# --- what is written and shown ----------------------------------------------------------------------------------------


def _settings(recipe: Recipe, subject: EvaluatedModel, prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """Returns all settings that responses and scores depend on, as JSON values."""
    sets = {
        name: {
            **{key: value for key, value in asdict(one).items() if key not in NOT_IN_SETTINGS},
            "functions": [function.model_dump(mode="json") for function in one.functions],
            "prompts": _digest(map(_content, prompts[name])),
        }
        for name, one in recipe.eval.of_sets().items()
    }
    agent: dict[str, Any] = {}
    if recipe.agent:
        given = recipe.agent.model_dump(mode="json", exclude={"processes", "rollouts_at_once"})
        named = (tool.arguments.get("corpus") for tool in recipe.agent.tool_configs)
        # Size and mtime identify a corpus, which may be large.
        corpora = {corpus: Path(corpus).stat() for corpus in named if isinstance(corpus, str) and Path(corpus).exists()}
        changed = {corpus: [stat.st_size, stat.st_mtime_ns] for corpus, stat in corpora.items()}
        agent = {"agent": given | {"tokens_max": recipe.sequence_tokens_max, "corpora": changed}}
    return {
        "model": dict(subject.identity(recipe)),
        "seed": recipe.seed,
        "dtype": recipe.model.dtype,
        "response_tokens_max": recipe.rollout.response_tokens_max,
        "stop_token_ids": recipe.rollout.stop_token_ids,
        **agent,
        "reward": recipe.reward.model_dump(mode="json", exclude={"workers"}),
        "reward_models": {
            where.removeprefix("reward.models."): model_identity(recipe.models_beside[where].path, directory)
            for where, directory in directories_beside(recipe, plan_only=False).items()
        },
        "files": {file: _digest([Path(file).read_bytes()]) for file in sorted(_own_files(recipe))},
        "sets": sets,
    }


def _content(prompt: Prompt) -> bytes:
    row = "\0".join((prompt.id, prompt.data_source, prompt.ability, typed_json.dumps(dict(prompt.extra_info))))
    return f"{row}\0".encode(errors="surrogatepass") + prompt.content()


def _own_files(recipe: Recipe) -> Iterator[str]:
    """Yields the user's own files: the agent's, reward functions, rubrics, chat templates of reward models."""
    named: list[str | None] = []
    if agent := recipe.agent:
        named += [agent.function, *(tool.name for tool in agent.tool_configs if tool.own)]
        named += [agent.verifiers.environment] if agent.verifiers else []
        named += [agent.openenv.action, agent.openenv.observation] if agent.openenv else []
    for reward in (recipe.reward, *own_rewards(recipe).values()):
        for function in (function for functions in reward.lists().values() for function in functions):
            named.append(function.function)
            rubric = function.arguments.get("rubric")
            if executor_of(function.function) == "asking" and isinstance(rubric, str) and is_file(rubric):
                yield rubric
    yield from (name.rpartition(":")[0] for name in named if name and ".py:" in name)
    for model in recipe.reward.models.values():
        if isinstance(model, ClassifierConfig) and model.chat_template is not None:
            yield model.chat_template


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def _require_same(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raises PreflightError if the directory has responses of other settings, ModelError if its settings cannot be
    read."""
    path, settings = directory / "settings.json", json.loads(json.dumps(settings))
    if path.exists():
        fix = f"give another --output, or remove {directory}"
        before = read_json(path, fix=fix)
        if differing := changes(before, settings):
            needed = "the model, prompts, sampling and rewards of the responses that are in it"
            raise PreflightError(Problem(str(directory), "; ".join(differing), needed, fix))
    write_json(path, settings)


def metrics_table(held_out: EvalSet, responses: Sequence[Response], metrics: Mapping[str, float]) -> Table:
    """Draws one set: a row for each metric with its interval, a column for each data source if there are several."""
    prompts, sources = ({getattr(one, name) for one in responses} for name in ("prompt_id", "data_source"))
    size = f"{len(prompts)} prompts x {held_out.samples_per_prompt}"
    shown = sorted(sources) if len(sources) > 1 else ()
    numbers = [Column(heading, justify="right") for heading in ("mean", "95 % interval", *shown)]
    table = Table("metric", *numbers, title=f"{held_out.name}: {size}", title_justify="left")
    parts = [name for name in metrics if name.startswith("reward/") and name != "reward/errors"]
    for name in (*evaluation_metric_names(held_out.samples_per_prompt), *parts):
        interval = ""
        if f"{name}/low" in metrics:
            interval = f"{_number(metrics[f'{name}/low'])} to {_number(metrics[f'{name}/high'])}"
        of_sources = (_number(metrics.get(f"{source}/{name}", math.nan)) for source in shown)
        table.add_row(name, _number(metrics[name]), interval, *of_sources)
    for name in OF_RESPONSES:
        table.add_row(name, f"{metrics[name]:.4g}", "", *("" for _ in shown))
    return table


def _compared(recipe: Recipe, evaluated: Sequence[Evaluated], output: Path) -> Comparison:
    """Compares two models, and writes the result to comparison.json."""
    pairs = {name: [one.responses[name] for one in evaluated] for name in recipe.eval.sets}
    samples = {name: one.samples_per_prompt for name, one in recipe.eval.of_sets().items()}
    compared = Comparison(
        models=[one.model for one in evaluated],
        recipe=recipe.name,
        sets={name: compare(first, second, samples[name]) for name, (first, second) in pairs.items()},
        prompts={name: prompts_of_both(first, second) for name, (first, second) in pairs.items()},
    )
    write_json(output / "comparison.json", asdict(compared))
    return compared


def comparison_table(held_out: str, differences: Sequence[Difference]) -> Table:
    """Draws one set: a row for each metric of two models."""
    numbers = [Column(name, justify="right") for name in ("first", "second", "difference", "95 % interval", "p")]
    prompts = max((one.prompts for one in differences), default=0)
    table = Table("metric", *numbers, "test", title=f"{held_out}: the same {prompts} prompts", title_justify="left")
    for one in differences:
        found = f"{one.difference:+.3f}", f"{one.low:+.3f} to {one.high:+.3f}", f"{one.p_value:.2g}"
        table.add_row(one.metric, _number(one.first), _number(one.second), *found, one.test)
    return table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
