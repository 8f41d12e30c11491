"""Looks at everything, and prints it part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from megagrpo.doctor.finding import Finding
from megagrpo.doctor.gpus import gpu_findings
from megagrpo.doctor.machine import machine_findings
from megagrpo.doctor.packages import fit_findings, package_findings, working_findings

CHAPTERS: Mapping[str, Callable[[], Iterable[Finding]]] = {
    "machine": machine_findings,
    "packages": package_findings,
    "do they fit one another": fit_findings,
    "do the optional ones work": working_findings,
    "GPUs": gpu_findings,
}
MARKS = {"ok": "ok", "absent": "-", "doubtful": "?", "wrong": "WRONG"}


def examine(say: Callable[[str], None]) -> bool:
    """Prints each chapter as it is examined. Whether nothing is wrong."""
    found = []
    for title, look in CHAPTERS.items():
        say(f"{title}:")
        for finding in look():
            found.append(finding)
            for line in drawn(finding):
                say(line)
    counts = {state: sum(finding.state == state for finding in found) for state in MARKS}
    say(f"{counts['wrong']} wrong, {counts['doubtful']} doubtful, {counts['absent']} optional parts not installed")
    return counts["wrong"] == 0


def drawn(finding: Finding) -> Iterator[str]:
    yield f"  {MARKS[finding.state]:<5} {finding.part:<24} {finding.found}"
    if finding.remedy:
        label = "for" if finding.state == "absent" else "fix"
        yield f"        {label}: {finding.remedy}"
