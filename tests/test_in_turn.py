"""`benchmarks/in_turn.py`: another revision's kernels beside this checkout's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "in_turn.py"

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout of git")


def run(*words):
    return subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_last_commit_and_this_checkout_are_timed_and_compared(tmp_path):
    pytest.importorskip("torch")
    done = run("HEAD", "small", "--json", tmp_path / "small.json")
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "small.json").read_text())
    assert len(records) == 18
    # What is not committed yet may have other bits.
    assert all(record["difference"] < 0.01 for record in records)
    assert all(record[who] > 0 for record in records for who in ("other", "this", "copy"))
    assert "small: 18 cases, median" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense", "small"), "nonsense"),
        (("HEAD", "bogus"), "there is no suite bogus: there are small,"),
    ],
)
def test_what_is_not_there_is_one_sentence(words, said):
    pytest.importorskip("torch")
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
