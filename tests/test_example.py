import importlib.util
import subprocess

import maxsoftmax
import numpy as np
import pytest
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax._graph import runtime
from maxsoftmax._graph.extension import run_mojo, source


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


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], [maxsoftmax.drop_into]], ids=["plain", "dropin"])
def test_no_token_sees_what_comes_after_it(transformer, device, changes):
    where = runtime.device(device)
    place = DeviceRef.from_device(where)
    attention = transformer.Attention(transformer.Sizes(width=16, heads=2), place)
    random = np.random.default_rng(0)
    attention.load_state_dict(
        {
            name: random.standard_normal(weight.shape.static_dims, np.float32)
            for name, weight in attention.raw_state_dict().items()
        }
    )
    kind = TensorType(transformer.FLOAT, ("length", 16), place)
    graph = Graph("attention", attention, [kind])
    for change in changes:
        change(graph)
    model = InferenceSession(devices=[where]).load(graph, weights_registry=attention.state_dict())
    x = random.standard_normal((20, 16), np.float32)
    changed = x.copy()
    changed[12:] += 1
    before, after = (model.execute(Buffer.from_numpy(a).to(where))[0].to(runtime.device("cpu")) for a in (x, changed))
    same = (before.to_numpy() == after.to_numpy()).all(axis=1)
    assert same.tolist() == [True] * 12 + [False] * 8


@pytest.mark.slow
def test_a_language_model_learns_as_in_torch(root, device):
    pytest.importorskip("torch")
    specification = importlib.util.spec_from_file_location("language_model", root / "examples" / "language_model.py")
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    sizes = {"vocabulary": 50, "width": 8, "rows": 40, "steps": 12, "chunk": 16, "rate": 0.5}
    options = example.parse([f"--{name}={value}" for name, value in sizes.items()])
    losses = example.train(options, runtime.device(device))
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, example.train_in_torch(options), rtol=1e-4 if device == "cpu" else 1e-2)


def test_a_mojo_program(root, tmp_path):
    program = tmp_path / "softmax"
    run_mojo("build", "-I", str(source().parent), str(root / "examples" / "softmax.mojo"), "-o", str(program))
    lines = subprocess.run([program], check=True, capture_output=True, encoding="utf-8").stdout.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [f"row {row} sums to" for row in range(3)]
    assert all(abs(float(line.split()[-1]) - 1) < 1e-6 for line in lines)
