"""What a type checker tells a user."""

import re
import subprocess
import sys
import typing

import pytest
from maxsoftmax._arguments import ALGORITHMS, REDUCTIONS
from maxsoftmax._types import Algorithm, DeviceName, Reduction

pytest.importorskip("mypy")

USER = """
import maxsoftmax
import numpy as np
from typing import Any

x = np.zeros((2, 3), np.float32)
classes = np.array([0, 1])


class Theirs:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


reveal_type(maxsoftmax.softmax(x))  # ndarray
reveal_type(maxsoftmax.log_softmax(x, axis=0, out_dtype="bfloat16"))  # ndarray
reveal_type(maxsoftmax.softmax_backward(x, dy=x))  # ndarray
reveal_type(maxsoftmax.sparsemax(Theirs()))  # Theirs
reveal_type(maxsoftmax.logsumexp(Theirs()))  # Theirs
reveal_type(maxsoftmax.max_sum(Theirs()))  # tuple[Theirs, Theirs]
reveal_type(maxsoftmax.cross_entropy(Theirs(), classes, reduction="none"))  # Theirs
reveal_type(maxsoftmax.softmax([1.0, 2.0]))  # Any
reveal_type(maxsoftmax.cross_entropy_backward(x, classes, maxsoftmax.cross_entropy_forward(x, classes)[1]))  # ndarray
reveal_type(maxsoftmax.softmax_backward(y=Theirs(), dy=x))  # Theirs
reveal_type(maxsoftmax.logsumexp(Theirs(), b=x, keepdims=np.True_))  # Theirs
reveal_type(maxsoftmax.logsumexp(Theirs(), return_sign=True))  # tuple[Theirs, Theirs]
reveal_type(maxsoftmax.logsumexp(x, return_sign=True))  # tuple[Any, Any]
reveal_type(maxsoftmax.token_log_probs(Theirs(), classes))  # Theirs
reveal_type(maxsoftmax.token_log_probs(Theirs(), classes, entropy=True))  # tuple[Theirs, Theirs]
reveal_type(maxsoftmax.linear_cross_entropy(hidden=Theirs(), weight=x, target=classes))  # Theirs
reveal_type(maxsoftmax.linear_token_log_probs(Theirs(), x, classes))  # Theirs
reveal_type(maxsoftmax.linear_token_log_probs(Theirs(), x, classes, entropy=True))  # tuple[Theirs, Theirs]
reveal_type(maxsoftmax.softmax(x, axis=[0, 1], causal=np.False_))  # ndarray
reveal_type(maxsoftmax.softmax(x, axis=np.int64(1)))  # ndarray
lengths: Any = maxsoftmax.ops.token_log_probs(x, classes).shape
logarithms, entropies = maxsoftmax.ops.token_log_probs(x, classes, entropy=True)
total: float = float(maxsoftmax.softmax(x, device="gpu:1", algorithm="online").sum())

maxsoftmax.softmax(x, algorithm="nope")  # wrong
maxsoftmax.softmax(x, device="tpu")  # wrong
maxsoftmax.softmax(x, axes=1)  # wrong
maxsoftmax.cross_entropy(x, classes, reduction="max")  # wrong
maxsoftmax.cross_entropy(x)  # wrong
maxsoftmax.linear_cross_entropy(x, x, classes, reduction="max")  # wrong
maxsoftmax.ops.softmax(x, algorithm="nope")  # wrong
maxsoftmax.ops.linear_cross_entropy(x, x, classes, reduction="max")  # wrong
maxsoftmax.warm_up(device="tpu")  # wrong
text: str = maxsoftmax.softmax(x)  # wrong
"""


@pytest.fixture(scope="module")
def told(root, tmp_path_factory, environment):
    """What mypy says of each line of a user's file."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "user.py").write_text(USER)
    # As installed packages are, ours is not reported about.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "user.py"]
    environment = {**environment, "MYPYPATH": str(root / "python")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"^user\.py:(\d+): (\w+): (.*)$", done.stdout, re.M)
    assert found, done.stdout + done.stderr
    return found


def test_wrong_arguments_are_found(told):
    lines = USER.splitlines()
    wrong = {i for i, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {int(line) for line, kind, _ in told if kind == "error"} == wrong


def test_the_kind_of_array_that_comes_in_comes_out(told):
    lines = USER.splitlines()
    revealed = {int(line): re.sub(r"\b(\w+\.)+", "", text) for line, _, text in told if "Revealed type" in text}
    expected = {i: line.partition("  # ")[2] for i, line in enumerate(lines, 1) if line.startswith("reveal_type")}
    assert revealed.keys() == expected.keys()
    for line, kind in expected.items():
        assert f'Revealed type is "{kind}' in revealed[line], lines[line - 1]


def test_names_are_those_that_exist():
    assert set(typing.get_args(Algorithm)) == {name for names in ALGORITHMS.values() for name in names}
    assert typing.get_args(Reduction) == REDUCTIONS
    assert {"cpu", "gpu"} < set(typing.get_args(DeviceName))
