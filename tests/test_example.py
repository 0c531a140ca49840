import importlib.util

import numpy as np
import pytest
from maxsoftmax import runtime


@pytest.fixture(scope="module")
def transformer(root):
    specification = importlib.util.spec_from_file_location("transformer", root / "examples" / "transformer.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# Two models of forty kernels each: minutes.
@pytest.mark.slow
def test_a_transformer_gives_the_same_with_the_drop_in(transformer, device):
    sizes = transformer.Sizes(vocabulary=200, width=32, heads=2, layers=1, top_k=5)
    place = runtime.device(device)
    plain, ours = (transformer.load(sizes, place, dropin) for dropin in (False, True))
    for length in (1, 9, 300):
        before, after = (transformer.run(model, sizes, place, length) for model in (plain, ours))
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_allclose(before.probabilities, after.probabilities, rtol=2e-5 if device == "cpu" else 1e-2)
        assert after.probabilities.sum() == pytest.approx(1)
