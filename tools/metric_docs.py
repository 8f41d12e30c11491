"""docs/metrics.md and docs/health.md, made from the table of metrics and the rules of a run's health.

`python -m tools.metric_docs` writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

from megagrpo.report.rules import RULES
from megagrpo.track.metrics import documented

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEALTH = """# Is the run healthy?

Twelve rules look at a run's [metrics](metrics.md). `megagrpo report` marks the steps at which one holds. While a run \
goes on, it warns when one begins to hold; a recipe may also end the run there, or switch a rule off:

```yaml
rollout:
  alerts: {mismatch: stop, entropy_collapse: 'off'}
```

`stop` saves a checkpoint of the step, then ends the run with an error, [exit code](clusters.md#how-a-run-ends) 3. The \
same command continues after that step. It remembers the steps before, so that the rule may end it again at the next \
one: change what was wrong, or let the rule warn, as with `rollout.alerts.mismatch=warn` on the command line.

The metric `alerts` counts the rules that hold. A mean is over the last known values of a metric; a rule is silent \
until there are enough."""


def metrics_page() -> str:
    """Returns the table of all metrics."""
    lines = [
        "# Metrics",
        "",
        "What each step logs, to every tracker. Step 0 is the evaluation before training.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', chr(92) + '|')} |" for m in documented()),
        "",
        "MLflow allows no `@` in a name: there `eval/gsm8k/mean@1` is `eval/gsm8k/mean_at_1`.",
        "In `metrics.jsonl` a value that is not a finite number is `null`.",
        "",
        "Written by `python -m tools.metric_docs` from `megagrpo/track/metrics.yaml`.",
    ]
    return _with_links(lines)


def health_page() -> str:
    """Returns a section for each rule."""
    lines = [HEALTH]
    for name, rule in RULES.items():
        reads = ", ".join(f"`{metric}`" for metric in rule.reads)
        lines += ["", f"## {name}", "", f"{rule.title[:1].upper()}{rule.title[1:]}. Reads {reads}."]
        lines += ["", f"**When.** {rule.meaning}", "", f"**What to do.** {rule.remedy}"]
    return _with_links([*lines, "", "Written by `python -m tools.metric_docs` from `megagrpo/report/rules.yaml`."])


def _with_links(lines: list[str]) -> str:
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n".join(lines)) + "\n"


def written() -> dict[Path, str]:
    """Returns the text of each page."""
    return {DOCS / "metrics.md": metrics_page(), DOCS / "health.md": health_page()}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
        print(path)
