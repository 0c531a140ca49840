import re

import pytest


def examples(root, document):
    return re.findall(r"^```python\n(.*?)^```", (root / document).read_text(), re.M | re.S)


@pytest.mark.parametrize(("document", "number"), [*(("README.md", i) for i in range(4)), ("docs/dropin.md", 0)])
def test_examples_run(root, document, number):
    exec(compile(examples(root, document)[number], f"{document}, example {number}", "exec"), {})


@pytest.mark.parametrize(("document", "count"), [("README.md", 4), ("docs/dropin.md", 1)])
def test_every_example_is_run(root, document, count):
    assert len(examples(root, document)) == count
