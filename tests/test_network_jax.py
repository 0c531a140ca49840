"""The published classifier, trained in JAX."""

import json

import numpy as np
import pytest
from jax_arrays import jax, jnp, losses
from maxsoftmax._commands import cli, train
from maxsoftmax._graph import runtime

network_jax = pytest.importorskip("maxsoftmax._commands.network_jax")

pytestmark = pytest.mark.usefixtures("place_of_jax")


def trained(seed, device):
    return train.sign(seed), train.sign(seed).training_in_jax(seed, runtime.device(device))


@pytest.mark.parametrize("seed", [0, 1])
def test_fifteen_steps_bring_the_published_loss_below_a_hundredth(device, seed):
    _, training = trained(seed, device)
    found = list(training.steps(15))
    assert len(found) == 16
    assert found[0].loss > 0.5
    assert found[-1].loss < 0.01
    assert found[-1].right > 0.8


def test_the_gradient_of_the_classifier_is_that_of_jax_and_of_differences(device):
    task, training = trained(3, device)
    x, target = task.learn.x, task.learn.target.astype(np.int32)

    def theirs(weights):
        log_p = jax.nn.log_softmax(network_jax.logits(weights, x))
        return -jnp.take_along_axis(log_p, target[:, None], -1).mean()

    # A GPU would multiply matrices in TF32, which has 11 bits.
    with jax.default_matmul_precision("highest"):
        value, gradients = jax.jit(jax.value_and_grad(network_jax.loss))(training.weights, x, target)
        expected, expected_gradients = jax.value_and_grad(theirs)(training.weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for ours_, theirs_ in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours_, theirs_, atol=1e-7)

    # Differences of the loss in float64.
    def loss(weights):
        hidden = np.maximum(x.astype(np.float64) @ weights[0] + weights[1], 0)
        return losses(hidden @ weights[2] + weights[3], target).mean()

    wide = [w.astype(np.float64) for w in training.weights]
    for layer, place in ((0, 5), (1, 7), (2, 11), (3, 1)):
        sides = []
        for step in (1e-6, -1e-6):
            moved = [w.copy() for w in wide]
            moved[layer].flat[place] += step
            sides.append(loss(moved))
        assert float(gradients[layer].flatten()[place]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-5)


def test_the_command_trains_in_jax(capsys, device, tmp_path):
    arguments = ["train", "--framework", "jax", "--device", device, "--steps", "2", "--json", str(tmp_path / "x.json")]
    assert cli.main(arguments) == 0
    *steps, last, _ = capsys.readouterr().out.splitlines()
    kept = json.loads((tmp_path / "x.json").read_text())
    assert kept["versions"]["jax"] == jax.__version__
    expected = [step.loss for step in trained(0, device)[1].steps(2)]
    assert kept["losses"] == expected
    assert steps[1] == f"step 2 of 2: loss {expected[1]:.6f}"
    assert last.startswith(f"after 2 steps: loss {expected[2]:.6f}, ")
