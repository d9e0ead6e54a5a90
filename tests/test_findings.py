"""Every script of findings/ has the form that its README states. Nothing here runs them."""

import os
import re

import pytest

from tests.support.forked import ROOT

FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
SAYS = ("Guess", "Seen", "Version", "Why", "Means")


def test_there_are_fifteen_and_the_index_names_each_once():
    named = re.findall(r"^\| \[(\w+\.sh)\]\(\1\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == [script.name for script in SCRIPTS]
    assert len(SCRIPTS) >= 15


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_says_what_was_guessed_and_seen_and_cleans_up(script):
    text = script.read_text(encoding="utf-8")
    head = text.partition("\n\n")[0]
    assert head.startswith("#!/usr/bin/env bash\n# ")
    assert re.findall(r"^# (\w+): \S", head, re.MULTILINE) == [*SAYS]
    assert os.access(script, os.X_OK)
    assert not {part for part in ("mktemp -d", "trap '", "exit 77") if part not in text}
    assert "nvme_offload" not in text
