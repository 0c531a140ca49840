"""Parts of MAX's own models that compute a softmax in a graph, with and without the drop-in: minutes of compiling."""

import importlib.util
from pathlib import Path

import max.graph
import maxsoftmax
import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax._graph import runtime

MAX = Path(max.graph.__file__).parents[1]
VOCABULARY, WIDTH, EXPERTS = 5000, 64, 32

pytestmark = pytest.mark.slow


def of_pipelines(file):
    """Returns a file of `max.pipelines` as a module, without the package, which imports what need not be here."""
    specification = importlib.util.spec_from_file_location(Path(file).stem, MAX / "pipelines" / file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_router_chooses_the_same_experts(device):
    where = runtime.device(device)
    place = DeviceRef.from_device(where)
    make = of_pipelines("architectures/qwen3/layers/moe.py").Qwen3MoEGate
    random = np.random.default_rng(1)
    weight = random.standard_normal((EXPERTS, WIDTH), np.float32)
    hidden = Buffer.from_numpy(random.standard_normal((7, WIDTH), np.float32)).to(where)
    results = []
    for extensions in ([], [maxsoftmax.dropin()]):
        router = make([place], hidden_dim=WIDTH, num_experts=EXPERTS, num_experts_per_token=4, dtype=DType.float32)
        router.load_state_dict({"gate_score.weight": weight})
        types = [TensorType(DType.float32, ("tokens", WIDTH), place)]
        with Graph("router", input_types=types, custom_extensions=extensions) as graph:
            graph.output(*router(graph.inputs[0].tensor))
        model = InferenceSession(devices=[where]).load(graph, weights_registry=router.state_dict())
        results.append([each.to(runtime.device("cpu")).to_numpy() for each in model.execute(hidden)])
    experts, weights = zip(*results, strict=True)
    np.testing.assert_array_equal(*experts)
    np.testing.assert_allclose(*weights, rtol=1e-5)
    # The graph is the one with the drop-in.
    assert [(kernel.ours, kernel.device) for kernel in maxsoftmax.softmax_kernels(graph)] == [(True, device)]


def test_labels_have_the_same_scores(device):
    make = of_pipelines("sampling/label_scoring.py").LabelScorer
    where = runtime.device(device)
    logits = Buffer.from_numpy(np.random.default_rng(2).standard_normal((2, VOCABULARY), np.float32) * 4).to(where)
    scores = []
    for extensions in ([], [maxsoftmax.dropin()]):
        with max.graph.default_custom_extensions_scope(*extensions):
            scorer = make(InferenceSession(devices=[where]), where, DType.float32, VOCABULARY - 7)
        scores.append(scorer.score(logits, [[0, 17, 4000], [3]]))
    for before, after in zip(*scores, strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5)
