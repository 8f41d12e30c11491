"""Shell scripts and YAML are read as bash and other frameworks read them, and nothing in them is run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.importing.options import unknown_in, yaml_options
from megagrpo.importing.shell import read_script
from megagrpo.importing.shell_words import ITEMS_MAX, UNKNOWN, braces

SCRIPTS = {
    "variables": 'A=1; B="x $A"; show $A "$B" $B ${A}y \'$A\' "a\\"b" \\$A',
    "defaults": 'show ${A:-1} "${A:-b c}" ${A-} ${B:=2} ${1:-three} "$@" end',
    "arithmetic": "A=$((1024 * 2)); B=$(((A + 1) * 3)); show $A $B $((B / 7)) $(( $A - ${B} ))",
    "continued": "show a \\\n  b=c \\\n  'd e'   # all\n",
    "arrays": 'A=(one "two three" # not this\n  four)\nA+=(five)\nshow "${A[@]}"',
    "lists": 'F=/a/b.parquet; L="[\'$F\', \'$F\']"; show data="${L}" x=\'["console","wandb"]\'',
    "appended": "A=1; A+=2; export B=$A; show $A$B `echo a` `echo b`",
    "redirected": "show a b 2>&1 >/dev/null\nshow c 2>/dev/null || true; show d",
    "basename": "M=/models/Qwen/Q; show $(basename $M)-x $(basename ${M})",
    "documents": "cat <<EOF >/dev/null\nshow not this\nEOF\nshow this; (cat <<E)>/dev/null;show a\nno\nE\nshow that",
    "two assigned": "A=1 B=2\n! show $A\nA=3 B=4 # c\nif [ $A = 3 ]; then A=5 B=6\nshow $A; fi",
    "last case": "case a in a) show a ;& # c\nesac; show b",
    "joined": 'A=x; show $A/y.$A ${A}_z pre"$A b"post',
    "cases": 'L=(); C=gpu; case "$C" in npu) P=16; L+=(x) ;; g*|tpu) P=8 ;; *) P=1 ;; esac; show $P "${L[@]}"',
    "functions": 'f() { local a=$1; shift; show $a "$@" $#; }; f 1 "2 3" 4',
    "loops": "for i in {1..3} x; do [ $i = 2 ] && continue; show $i; done; for ((j=0; j<2; j++)); do show $j; done",
    "parts": "A=head/tail.sh; show $((2**4)) ${A##*/} ${A%.sh} ${A//a/b} ${A^^} ${#A} ${A:0:4}",
    "probes": 'D=$(false && echo npu || echo gpu); if [[ $D == g* && ! -z "$D" ]]; then show $D; else show no; fi',
    "local": "f() { local N=3 M=4; show $N $M; }; N=16; f; show $N ${M:-none}",
    "sides": "for a in 0 1; do for b in 0 1; do [ a -a $b = 1 ] && show b; [[ $a = 1 || $b = 1 ]] && show 1; done done",
    "operators": "true && show a; false || show b; if true; then show c; fi",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_is_read_as_bash_would_run_it(text: str) -> None:
    shown = 'show() { printf "<%s>" "$@" >&3; echo >&3; }\n' + text
    ran = subprocess.run(["bash", "-c", f"exec 3>&1\n{shown}"], capture_output=True, text=True, check=False)
    commands = [command for command in read_script(text, {}, {}).commands if command[0].text == "show"]
    read = ["".join(f"<{word.text}>" for word in command[1:]) for command in commands]
    assert read == ran.stdout.splitlines()


def test_reading_a_script_runs_nothing_and_what_only_a_shell_can_tell_stays_unknown(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"A=$(touch {mark}); B=`touch {mark}`; python train.py --a $A --b $B --c $NOT_SET --d $((NOT_SET + 1))"
    words = [word.text for word in read_script(text, {}, {}).commands[-1]]
    assert [text.startswith(UNKNOWN) for text in words[3::2]] == [True] * 4
    assert not mark.exists()


@pytest.mark.parametrize("text", ["{1..999999999}", "{1..999}{1..999}{1..999}"])
def test_braces_stand_for_a_limited_number_of_words(text: str) -> None:
    assert len(braces(text)) <= ITEMS_MAX


@pytest.mark.parametrize(
    ("text", "note"),
    [("a | " * 20_000, "read up to"), ("a=(" * 20_000, "read up to"), ('a\nshow "b', "line 2 has a form"), ("a;", "")],
)
def test_what_is_not_read_is_said(text: str, note: str) -> None:
    notes = read_script(text, {}, {}).notes
    assert (note in notes[0]) if note else not notes


def test_what_a_branch_that_cannot_be_chosen_leaves_is_not_known() -> None:
    script = read_script("A=1; L=(a)\nif test $X; then\n  A=2; L+=(b)\n  B=3\nfi\nrun $A ${L[@]}", {}, {})
    assert [word.text for word in script.commands[-1]] == ["run", f"{UNKNOWN}$X", "a", f"{UNKNOWN}${{L[@]}}"]


def test_a_value_that_is_set_by_hand_stands_whatever_the_script_assigns() -> None:
    script = read_script("NNODES=$(nodes)\nrun $NNODES", {}, {"NNODES": "4"})
    assert [word.text for word in script.commands[-1]] == ["run", "4"]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab $\"'\\(){}[]=+#\n;|&<>`@-0:", max_size=60))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    read_script(text, {"a": "b"}, {})


def test_references_in_yaml_are_resolved_where_they_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "a: {n: 4, b: '${a.n}', c: '${.n}', d: 'x-${..e}', f: '${oc.select:a.z,7}', g: '${oc.env:HOME}', h: '${b.c}'}\n"
        "e: ${a.n}\nanchored: &x [1]\nagain: *x\nloop: ${loop}\n"
    )
    found = yaml_options(path)
    values = {name: found[name].value for name in ("a.b", "a.c", "a.d", "a.f", "e", "again")}
    assert values == {"a.b": 4, "a.c": 4, "a.d": "x-4", "a.f": 7, "e": 4, "again": [1]}
    assert unknown_in(found["a.g"].value)
    assert unknown_in(found["a.h"].value)
    assert found["loop"].value
