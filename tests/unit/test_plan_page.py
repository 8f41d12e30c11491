"""The page of a plan: well-formed, whole, without anything from elsewhere."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megagrpo.plan.plan import Plan, plan_of
from megagrpo.plan.show.page import page, stage_colour
from tests.plans import ON_2048, architecture, plan, recipe, searched


class Balance(HTMLParser):
    """Whether every element that is opened is closed, in order."""

    empty = ("meta", "br", "rect", "circle", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [tag] if tag not in self.empty else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.empty and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def of_70b() -> Plan:
    return plan()


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_is_well_formed_and_needs_nothing_else(of_70b: Plan) -> None:
    text = page(of_70b, searched(of_70b.recipe, 128))
    balance = Balance()
    balance.feed(text)
    assert (balance.open, balance.wrong) == ([], [])
    assert "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_every_gpu_is_a_square_that_says_what_it_holds(of_70b: Plan) -> None:
    grid = pictures(page(of_70b))[0]
    titles = [title.text or "" for title in grid.iter("title")]
    assert len(titles) == 128
    assert titles[-1].splitlines() == [
        "node 15, GPU 7",
        "rank 127: tensor 7, context 0, data 7",
        "pipeline stage 1: 40-79, head",
        "expert 0, expert_tensor 7, expert_data 7",
        "engine 15, its tensor rank 7",
    ]
    assert len(list(grid.iter("circle"))) == 16  # an engine begins
    fills = {rect.get("fill") for rect in grid.iter("rect")} - {None}
    assert fills == {stage_colour(0, 2), stage_colour(1, 2)}


def test_squares_lie_apart_and_inside_the_picture() -> None:
    grid = pictures(page(plan(ON_2048)))[0]
    _, _, width, height = map(float, (grid.get("viewBox") or "").split())
    squares = [rect for rect in grid.iter("rect") if rect.get("rx") == "3"]
    corners = {(float(r.get("x") or -1), float(r.get("y") or -1)) for r in squares}
    size = float(squares[0].get("width") or 0)
    assert len(squares) == len(corners) == 2048
    assert min(x for x, _ in corners) >= 0
    assert max(x for x, _ in corners) + size <= width
    assert max(y for _, y in corners) + size <= height


def test_bars_are_in_proportion_and_stay_inside_the_picture() -> None:
    of = plan(train__recompute="none", cluster__gpu="A100-40GB")
    assert of.problems
    text = page(of)
    assert "This cannot run" in text
    bars = pictures(text)[1]
    kind = max(of.memory, key=lambda kind: kind.fullest.bytes)
    assert of.machines is not None
    first = kind.phases[0]
    line = bars.find("line")
    assert line is not None
    card = float(line.get("x1") or 0) - 110
    total = sum(float(rect.get("width") or 0) + 1 for rect in bars.iter("rect") if rect.get("y") == "4")
    assert total / card == pytest.approx(first.bytes / of.machines.gpu.memory_bytes, rel=0.02)
    assert all(float(rect.get("x") or 0) + float(rect.get("width") or 0) <= 960 for rect in bars.iter("rect"))


def test_names_are_escaped_and_the_recipe_is_there(of_70b: Plan) -> None:
    assert "tokens_per_microbatch: 5120" in page(of_70b)
    of = recipe({"data.train": [{"path": "data/<b>.parquet"}]})
    text = page(plan_of(of, architecture(of), unchecked=["data/<b>.parquet: no such file on this machine"]))
    assert "<b>.parquet" not in text
    assert "not checked</dt><dd>data/&lt;b&gt;.parquet: no such file on this machine" in text


def test_pages_without_a_kind_of_gpu_or_without_gpus_have_no_time() -> None:
    for changes in (
        {"cluster.gpu": None},
        {"cluster": {"device": "cpu"}, "train.offload": [], "rollout.layout": {"tensor": 2}, "rollout.engines": 1},
    ):
        text = page(plan(changes))
        assert "A step:" not in text
        assert "Memory of each" in text
