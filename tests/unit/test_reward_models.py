"""Reward models with a head for classification, against plain transformers; what is wrong with one; who asks which."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load_file

from megagrpo.cluster.classifier import Classifier, batches_of
from megagrpo.errors import MegagrpoError, ModelError, PreflightError, RewardError
from megagrpo.plan.other_models import bytes_beside
from megagrpo.preflight.machine import engine_problems
from megagrpo.preflight.model import directories_beside
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.schema import ClassifierConfig, Recipe
from megagrpo.reward.scorer import Scorer
from megagrpo.reward.verifiers.judges import StandardConfig, label_of, score_of
from megagrpo.section import broken_rules
from megagrpo.tokenizer import encode, encode_conversation, load_chat_tokenizer
from megagrpo.track.metrics import undocumented
from tests import tiny_run
from tests.judge_server import asking
from tests.reward_models import conversation, make_reward_model, reference_logits
from tests.unit.test_reward_judges import group_of, section, values

RESPONSES = ["7", "abcdefgh", "12ab", "", "123456789012345678901234567890", "a1", "7"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "llama")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> dict[str, Path]:
    """Other shapes, whose logits differ between responses all the same."""
    root = tmp_path_factory.mktemp("shapes")
    return {
        "bert": make_reward_model(root / "bert", "bert", steps=2),
        "no padding token": make_reward_model(root / "plain", pad=False, steps=2),
        "three labels": make_reward_model(root / "labels", labels=3, steps=2),
    }


def classifier(directory: Path, one_by_one: bool = False, **changes: object) -> Classifier:
    config = ClassifierConfig(path=str(directory), **{"tokens_per_batch": 128, **changes})
    return Classifier(directory, config, device="cpu", dtype="float32", one_by_one=one_by_one)


def check_logits(directory: Path, **changes: object) -> None:
    found = classifier(directory, **changes).logits([conversation(text) for text in RESPONSES])
    for logits, expected in zip(found, reference_logits(directory, RESPONSES), strict=True):
        assert logits == pytest.approx(expected, abs=1e-5)
    assert len({tuple(logits) for logits in found}) > 3


def test_a_trained_model_prefers_what_it_was_trained_on_as_transformers_does(trained):
    check_logits(trained)
    more, less = classifier(trained).logits([conversation("4071"), conversation("word")])
    assert more[0] > less[0] + 0.5


@pytest.mark.parametrize("shape", ["bert", "no padding token", "three labels"])
@pytest.mark.parametrize("tokens_per_batch", [1, 100_000])
def test_every_shape_of_model_gives_transformers_logits_in_batches_of_any_size(untrained, shape, tokens_per_batch):
    check_logits(untrained[shape], tokens_per_batch=tokens_per_batch)


def test_one_by_one_a_conversation_has_equal_bits_whatever_is_beside_it(trained):
    alone = classifier(trained, one_by_one=True)
    together = alone.logits([conversation(text) for text in RESPONSES])
    assert [alone.logits([conversation(text)])[0] for text in RESPONSES] == together


def test_a_conversation_that_is_too_long_has_no_score_and_the_others_have(trained):
    long, short = classifier(trained).logits([conversation("1" * 200), conversation("1")])
    assert isinstance(long, str)
    assert "96" in long
    assert isinstance(short, list)


def test_a_special_token_that_a_message_names_is_text_and_forges_no_turn(trained):
    tokenizer = load_chat_tokenizer(trained)
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    plain = encode_conversation(tokenizer, conversation("abc"))
    assert plain == encode(tokenizer, [str(tokenizer.apply_chat_template(conversation("abc"), tokenize=False))])[0]
    named = [*tokenizer.get_added_vocab(), "\ue0000\ue001"]
    for typed in (*named, "".join(named), named[0][:2] + named[0] + named[0][2:]):
        found = encode_conversation(tokenizer, conversation(typed))
        assert [token for token in found if token in special] == [token for token in plain if token in special]
    assert tokenizer.decode(encode_conversation(tokenizer, conversation(named[0]))).count(named[0]) >= 1


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_batches_hold_each_conversation_once_within_their_tokens(lengths, tokens_max):
    batches = batches_of(dict(enumerate(lengths)), tokens_max)
    assert sorted(key for batch in batches for key in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[key] for key in batch) <= tokens_max


def test_a_model_without_a_trained_head_is_refused(trained, tmp_path):
    import transformers

    config = transformers.AutoConfig.from_pretrained(trained)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in trained.glob("*token*"):
        shutil.copy(file, tmp_path)
    shutil.copy(trained / "chat_template.jinja", tmp_path)
    with pytest.raises(ModelError, match="score"):
        classifier(tmp_path)
    with pytest.raises(ModelError, match="no usable"):
        classifier(tmp_path / "nothing")


# --- as a reward function ---------------------------------------------------------------------------------------------


class Served:
    """A classifier as an actor serves it."""

    def __init__(self, made: Classifier | None) -> None:
        self.made = made
        self.batches: list[int] = []

    async def labels(self) -> list[str]:
        if self.made is None:
            raise OSError("the actor died")
        return self.made.labels

    async def logits(self, conversations):
        self.batches.append(len(conversations))
        await asyncio.sleep(0)
        return self.made.logits(conversations)


def scorer_of(served: Served, **arguments: object) -> Scorer:
    reward = section("reward_model", model="digits", **arguments)
    return Scorer(reward, 8, executors=asking(served={"digits": served}))


@pytest.mark.parametrize(("shows", "seen"), [("answer", "42"), ("response", "<think>ab</think>42")])
def test_the_model_sees_what_follows_the_reasoning_or_all_of_it(trained, shows, seen):
    scorer = scorer_of(Served(classifier(trained)), shows=shows)
    user = ({"role": "user", "content": "1+1="},)
    (group,) = scorer.score([group_of("<think>ab</think>42", messages=user)])
    assert group.scores[0].value == pytest.approx(reference_logits(trained, [seen])[0][0], abs=1e-5)
    scorer.close()


def test_the_function_asks_for_all_responses_of_a_step_in_one_batch(trained):
    served = Served(classifier(trained))
    scorer = scorer_of(served)
    user = ({"role": "user", "content": "1+1="},)
    groups = [group_of("42", "ab", messages=user), group_of("1" * 200, "7", messages=user)]
    (one, two) = scorer.score(groups)
    assert served.batches == [4]
    scores = [score.value for score in (*one.scores, *two.scores)]
    expected = [logits[0] for logits in reference_logits(trained, ["42", "ab", "7"])]
    assert [scores[0], scores[1], scores[3]] == pytest.approx(expected, abs=1e-5)
    assert scores[2] is None
    assert two.scores[0].error
    spent = scorer.take_metrics()
    assert spent["judge/reward_model/scored"] == 4
    assert not undocumented(spent)
    scorer.close()


def test_a_model_that_does_not_answer_masks_its_samples():
    scorer = scorer_of(Served(None))
    assert values(scorer, group_of("a", "b")) == [None, None]
    scorer.close()


def test_a_command_that_starts_no_models_says_so():
    with pytest.raises(RewardError, match="digits"):
        Scorer(section("reward_model", model="digits"), 8)


def test_a_score_is_one_of_the_logits():
    labels = ["bad", "good"]
    assert (label_of("good", labels), label_of(0, labels), label_of(None, ["x"])) == (1, 0, 0)
    for wrong in (None, 2, -1, "best"):
        with pytest.raises(ValueError, match="good"):
            label_of(wrong, labels)
    assert score_of([0.0, 3.0], 1, StandardConfig(mean=1, std=4)) == 0.5


@given(st.lists(st.floats(-1000, 1000), min_size=1, max_size=4))
def test_sigmoid_gives_probabilities(logits):
    found = [score_of(logits, label, "sigmoid") for label in range(len(logits))]
    assert all(0 <= value <= 1 for value in found)
    if len(logits) > 1:
        assert sum(found) == pytest.approx(1)


# --- in a recipe ------------------------------------------------------------------------------------------------------


def recipe_of(models: dict, *functions: dict, **changes: object) -> Recipe:
    base = tiny_run.recipe(Path("tiny")) | changes
    return Recipe.model_validate({**base, "reward": {"models": models, "functions": list(functions)}})


def ask(function: str, model: str, **arguments: object) -> dict:
    return {"function": function, "arguments": {"model": model, **arguments}}


CLASSIFIER = {"kind": "classifier", "path": "rm"}
GENERATIVE = {"kind": "generative", "path": "judge", "devices": 2}


@pytest.mark.parametrize(
    ("models", "function", "where"),
    [
        ({}, ask("reward_model", "digits"), "reward.functions.0.arguments.model"),
        ({"digits": GENERATIVE}, ask("reward_model", "digits"), "reward.functions.0.arguments.model"),
        ({"digits": CLASSIFIER}, ask("judge", "digits"), "reward.functions.0.arguments.model"),
        ({"digits": CLASSIFIER}, ask("judge", "x", url="http://x/v1"), "reward.models.digits"),
        ({"digits": CLASSIFIER}, ask("reward_model", "digits"), None),
        ({"grader": GENERATIVE}, ask("judge_pairs", "grader"), None),
        ({"grader": GENERATIVE | {"devices": 16}}, ask("judge", "grader"), "reward.models.grader.devices"),
    ],
)
def test_functions_ask_models_of_their_kind_and_every_model_is_asked(models, function, where):
    problems = [problem.where for problem in broken_rules(recipe_of(models, function))]
    assert problems == ([] if where is None else [where] * len(problems))
    assert bool(problems) == (where is not None)


def test_models_have_devices_behind_those_of_ranks_and_engines():
    models = {"a": CLASSIFIER, "b": CLASSIFIER | {"device": "cpu"}, "c": GENERATIVE}
    for placement, first in (("colocated", 1), ("disaggregated", 2)):
        recipe = recipe_of(models, ask("judge", "c"), cluster={"placement": placement})
        plan = plan_devices(recipe, "cuda")
        assert plan.bundles_of_model == ((first,), (), (first + 1, first + 2))
        assert plan.bundles == first + 3
        assert plan_devices(recipe, "cuda", engines_too=False).bundles == 1


def test_arguments_of_a_judges_server_are_checked_as_those_of_engines():
    models = {"grader": {**GENERATIVE, "sglang": {"port": 1, "contxt_length": 2}}}
    found = list(engine_problems(recipe_of(models, ask("judge", "grader")), None, plan_only=True))
    assert "reward.models.grader.sglang.port" in [problem.where for problem in found]
    assert not [problem for problem in found if "rollout" in f"{problem.where}{problem.fix}"]


def test_a_judges_server_may_be_of_either_engine_and_has_the_settings_of_its_own():
    def found(**fields):
        models = {"grader": {**GENERATIVE, **fields}}
        return [problem.where for problem in broken_rules(recipe_of(models, ask("judge", "grader")))]

    assert found(engine="vllm", vllm={"max_model_len": 4096}) == []
    assert found(engine="vllm", sglang={"context_length": 4096}) == ["reward.models.grader.sglang"]
    with pytest.raises(ValidationError, match=r"reward\.models\.grader\.generative\.engine"):
        found(engine="external_vllm")
    wrong = {"grader": {**GENERATIVE, "engine": "vllm", "vllm": {"served_model_name": "x"}}}
    problems = engine_problems(recipe_of(wrong, ask("judge", "grader")), None, plan_only=True)
    assert [problem.where for problem in problems] == ["reward.models.grader.vllm.served_model_name"]


def test_a_plan_counts_the_weights_of_models_that_are_here(trained):
    recipe = recipe_of({"digits": {"kind": "classifier", "path": str(trained)}}, ask("reward_model", "digits"))
    held = sum(tensor.nbytes for tensor in load_file(trained / "model.safetensors").values())
    assert bytes_beside(recipe, "reward.models.digits", "cpu") == held
    assert bytes_beside(recipe, "reward.models.digits", "cuda") == held // 2
    assert bytes_beside(recipe_of({"digits": CLASSIFIER}), "reward.models.digits", "cpu") is None


def test_preflight_names_what_is_wrong_with_a_model(trained, untrained, tmp_path):
    def problems(path: Path | str, kind: str = "classifier", **arguments: object) -> list[str]:
        function = ask("reward_model" if kind == "classifier" else "judge", "m", **arguments)
        try:
            directories_beside(recipe_of({"m": {"kind": kind, "path": str(path)}}, function), plan_only=False)
        except MegagrpoError as error:
            return [problem.where for problem in error.problems]
        return []

    assert problems(trained) == []
    assert problems(trained, "generative") == ["reward.models.m.kind"]
    assert problems(tmp_path / "nothing") == ["reward.models.m.path"]
    assert problems(untrained["three labels"]) == ["reward.functions[0].arguments.label"]
    assert problems(untrained["three labels"], label=2) == []
    assert problems(untrained["three labels"], label="LABEL_1") == []
    bare = shutil.copytree(trained, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    assert problems(bare) == [str(bare)]
    (bare / "model.safetensors").unlink()
    assert len(problems(bare)) == 1
    with pytest.raises(PreflightError):
        directories_beside(recipe_of({"m": {"path": str(bare), "kind": "classifier"}}), plan_only=True)
