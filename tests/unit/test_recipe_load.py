"""Reading recipes: YAML's numbers and words, places, overrides, and all mistakes in one error."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from megagrpo.errors import RecipeError
from megagrpo.recipe.load import dump, load
from megagrpo.recipe.problems import moved
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.yaml12 import parse, to_text
from megagrpo.section import broken_rules
from tests.tiny_run import recipe

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner), max_leaves=12
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump(recipe(tmp_path), sort_keys=False))
    return written


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if line.startswith(text))


def problems_of(path: Path, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return [(problem.where, problem.fix) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-6", 1e-6), ("2.E3", 2000.0), ("010", 10), ("0o17", 15), ("0x1F", 31), ("-.inf", float("-inf"))],
        *[("off", "off"), ("yes", "yes"), ("1:30", "1:30"), ("1_000", "1_000"), ("2024-01-01", "2024-01-01")],
        *[("~", None), ("True", True)],
    ],
)
def test_scalars_are_read_as_yaml_1_2_says(text: str, value: object) -> None:
    assert parse(text, str).tree == value
    assert type(parse(text, str).tree) is type(value)


@settings(max_examples=60)
@given(trees)
def test_what_is_written_is_read_back(tree: object) -> None:
    document = parse(to_text({"tree": tree}), str)
    assert not document.problems
    assert document.tree == {"tree": tree}
    assert repr(document.tree) == repr({"tree": tree})


def test_the_resolved_recipe_has_every_default_and_loads_to_an_equal_recipe(path: Path, tmp_path: Path) -> None:
    of_file = ["data.train.0.amount=0.5", "data.train.0.columns.ground_truth.value=sum"]
    first = load(path, [*of_file, "track.wandb={}", "train.megatron.moe_z_loss_coeff=1e-6"]).recipe
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(first))
    assert "clip_high: 0.2" in resolved.read_text()
    assert load(resolved).recipe == first


def test_integers_stand_for_numbers_and_amounts_keep_their_kind(path: Path) -> None:
    loaded = load(path, ["train.optimizer.lr=1", "data.train=[{path: a, amount: 1}, {path: b, amount: 1.0}]"]).recipe
    assert isinstance(loaded.train.optimizer.lr, float)
    assert [type(file.amount) for file in loaded.data.train] == [int, float]


def test_overrides_reach_sections_lists_and_options_and_the_last_one_wins(path: Path) -> None:
    overrides = ["train.layout.tensor=4", "train.layout.tensor=2", "data.train.0.path=other.parquet"]
    overrides += [
        "eval.early_stopping={metric: a/mean@1}",
        "eval.early_stopping.patience=3",
        "train.megatron.a_field=[1, x]",
        "model.revision=null",
    ]
    loaded = load(path, [*overrides, "rollout.sglang.mem_fraction_static=0.7"]).recipe
    assert (loaded.train.layout.tensor, loaded.data.train[0].path) == (2, "other.parquet")
    assert loaded.eval.early_stopping.patience == 3
    assert (loaded.train.megatron, loaded.model.revision) == ({"a_field": [1, "x"]}, None)
    assert loaded.rollout.sglang.model_extra == {"mem_fraction_static": 0.7}, "arguments of SGLang are no fields"
    with pytest.raises(RecipeError, match=r"rollout.sglang.python"):
        load(path, ["rollout.sglang.python.version=3"])


def test_places_are_lines_of_the_file_or_the_override(path: Path) -> None:
    places = load(path, ["train.layout.context=1"]).places
    assert places.where("train.layout.tensor") == f"{path}:{line_of(path, '    tensor:')} train.layout.tensor"
    assert places.where("train.optimizer.lr") == f"{path}:{line_of(path, 'train:')} train.optimizer.lr"
    assert places.where("train.layout.context") == "override train.layout.context=1"
    assert places.where("cluster.device") == f"{path} cluster.device"
    places = load(path, ["track.wandb.project=sums"]).places
    assert places.where("track.wandb") == "override track.wandb.project=sums (track.wandb)"


def test_all_mistakes_come_at_once_with_line_and_nearest_name(path: Path) -> None:
    text = path.read_text().replace("tensor: 1", "tensr: 4").replace("total_steps: 2", "total_steps: two")
    path.write_text(text + "trak: {}\n")
    inside = "eval={sets: {}, tpo_k: 1}"
    found = problems_of(path, "rollout.top_p=0", "rollout.prompts_per_step=1.0", inside, "train.optimiser.lr=1")
    assert found == [
        ("override train.optimiser.lr=1", "did you mean `optimizer`?"),
        ("override rollout.prompts_per_step=1.0", "write 1"),
        ("override rollout.top_p=0", ""),
        (f"{path}:{line_of(path, '    tensr:')} train.layout.tensr", "did you mean `tensor`?"),
        (f"{path}:{line_of(path, '  total_steps:')} train.total_steps", ""),
        (f"override {inside} (eval.tpo_k)", "did you mean `top_k`?"),
        (f"{path}:{line_of(path, 'trak:')} trak", "did you mean `track`?"),
    ]


def test_rules_between_fields_wait_until_every_field_is_right(path: Path) -> None:
    wheres = [where for where, _ in problems_of(path, "algorithm.entropy_coefficient=-1", "rollout.top_k=1")]
    assert wheres == ["override algorithm.entropy_coefficient=-1"]
    assert [problem.where for problem in broken_rules(load(path, ["rollout.top_k=1"]).recipe)] == ["rollout.top_k"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["algorithm.advantage.epsilon=1e-4"], "grpo"),
        (["algorithm.advantage=rloo"], "rloo"),
        (["algorithm.advantage=gae", "algorithm.advantage.trace=0.9"], "gae"),
        (["algorithm.advantage.trace=0.9", "algorithm.advantage.name=gae"], "gae"),
        (["algorithm.advantage={name: pass_k, epsilon: 1e-4}"], "pass_k"),
        (["algorithm.advantage=mine.py:best"], "mine.py:best"),
    ],
)
def test_a_name_or_its_settings_choose_a_method(path: Path, overrides: list[str], name: str) -> None:
    by_name = ["algorithm.aggregation=token_sum", "algorithm.correction={weights: sequence}"]
    method = load(path, [*overrides, *by_name]).recipe.algorithm
    chosen = (method.advantage.name, method.aggregation.name, method.correction.weights.name)
    assert chosen == (name, "token_sum", "sequence")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("advantage={name: rloo, epsilon: 1e-6}", "grpo, pass_k and gdpo"),
        ("loss={name: cispo, clip_lo: 0.1}", "`clip_low`"),
        ("correction.reject=[{level: token, over: sum, high: 2.0}]", "level: sequence"),
        ("loss.name=ppo_clp", "`ppo_clip`"),
        ("loss=ppo_clp", "`ppo_clip`"),
        *((override, "mine.py:FUNCTION") for override in ("loss=mine.py", "advantage.name=mine.py")),
        ("loss=", "`loss`"),
        ("correction.reject=[{high: 2.0}]", "`level:`"),
        *((f"loss{value}", "") for value in (".name=nothing_like_it", ".name=mine.py:", "=3", ".name=[]")),
        *((override, "") for override in ("correction.veto=1.0", "loss.clip_low=1.5", "advantage.discount=0.9")),
        *((override, "") for override in ("loss={name: gspo, dual_clip: 3.0}", "aggregation={divisor: 8.0}")),
    ],
)
def test_a_setting_that_a_method_does_not_have_is_an_unknown_key(path: Path, override: str, fix: str) -> None:
    ((where, found),) = problems_of(path, f"algorithm.{override}")
    assert where.startswith(f"override algorithm.{override}")
    assert fix in found
    assert "letters" not in found


def test_an_item_that_may_be_a_text_too_has_the_problems_of_its_keys(path: Path) -> None:
    override = "agent={tools: [{nam: python, calls_at_once: 0}]}"
    inside = f"override {override} (agent.tools.0"
    assert [where for where, _ in problems_of(path, override)] == [f"{inside}.calls_at_once)", f"{inside}.nam)"]
    ((where, _),) = problems_of(path, "agent={tools: [3]}")
    assert where.endswith("(agent.tools.0)")
    for wrong in ("schedule.prompts_at_once=4", "agent={verifiers: {environment: a, harness: 3}}"):
        ((where, _),) = problems_of(path, wrong)
        assert where.startswith(f"override {wrong}")


def test_a_very_long_index_is_no_item(path: Path) -> None:
    ((where, found),) = problems_of(path, f"data.train.{'9' * 5000}.path=a")
    assert where.startswith("override data.train.999")
    assert len(found) < 1000
    for overrides in (["data.train.0.arguments={a: [1]}", "data.train.0.arguments.a.x=2"], ["agent.tools.0.name=x"]):
        assert len(problems_of(path, *overrides)) == 1


@pytest.mark.parametrize("old", moved())
def test_what_the_last_version_had_is_answered_with_todays(path: Path, old: str) -> None:
    key, _, value = old.partition(": ")
    override = f"{key}={value or 2.0}"
    assert problems_of(path, override) == [(f"override {override}", moved()[old].replace("VALUE", "2.0"))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_recipe_it_loads_or_is_a_recipe_error(
    data: st.DataObject, path: Path, tmp_path: Path
) -> None:
    tree = recipe(tmp_path)
    for _ in range(data.draw(st.integers(1, 3))):
        container: Any = tree
        while True:
            key = data.draw(
                st.sampled_from([*(range(len(container)) if isinstance(container, list) else container), "new"])
            )
            inner = container[key] if key != "new" else None
            if not isinstance(inner, list | dict) or not inner or data.draw(st.booleans()):
                break
            container = inner
        if isinstance(container, list) and key == "new":
            container.append(data.draw(trees))
        elif key != "new" and data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = data.draw(trees)
        if not container:
            break
    path.write_text(to_text(tree), encoding="utf-8")
    with contextlib.suppress(RecipeError):
        assert isinstance(load(path).recipe, Recipe)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("prompts_per_step", "prompt_per_step", "`prompts_per_step`"),  # and it is not also reported as missing
        ("name: tiny", "name: tiny\nclip_grad: 0.5", "train.optimizer.clip_grad"),
    ],
)
def test_a_key_that_is_misspelt_or_misplaced_is_sent_to_the_right_one(
    path: Path, old: str, new: str, field: str
) -> None:
    path.write_text(path.read_text().replace(old, new))
    ((_, fix),) = problems_of(path)
    assert field in fix


def test_every_field_has_a_description() -> None:
    def undescribed(section: type[BaseModel]) -> list[str]:
        found = []
        for name, info in section.model_fields.items():
            inner = info.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found += undescribed(inner) if inner.__doc__ else [inner.__name__]
            elif not info.description:
                found.append(f"{section.__name__}.{name}")
        return found

    assert undescribed(Recipe) == []
