import re

import pytest


def blocks(root, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_examples_run(root, number):
    exec(compile(blocks(root, "python")[number], f"README.md, example {number}", "exec"), {})


def test_every_example_is_run(root):
    assert len(blocks(root, "python")) == 3
