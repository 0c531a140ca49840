"""The gradient of cross entropy that is computed ahead: its derivatives anywhere, its bits on a GPU."""

import maxsoftmax
import numpy as np
import pytest
from contract import logits
from jax_arrays import DTYPES, jax, jnp, ours, same

differentiable = pytest.importorskip("maxsoftmax.jax._differentiable")

pytestmark = pytest.mark.usefixtures("place_of_jax")


@pytest.fixture
def ahead(device, monkeypatch):
    """Has all losses go the way of long rows on a GPU, which on a CPU is computed by other kernels."""
    if device == "gpu":
        pytest.skip("rows are short")
    monkeypatch.setattr(differentiable, "_has_gradients_ahead", lambda x, axis: True)


def weighted(target):
    return lambda x: (ours.cross_entropy(x, target) * jnp.arange(1.0, 1 + len(target))).sum()


def theirs(target):
    def loss(x):
        found = -jnp.take_along_axis(jax.nn.log_softmax(x), target[:, None], -1)[:, 0]
        return (found * jnp.arange(1.0, 1 + len(target))).sum()

    return loss


@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_derivatives_of_every_order(ahead, under):
    x, target = jnp.asarray(logits((4, 9))), jnp.array([0, 8, 3, 3])
    f, g = weighted(target), theirs(target)
    assert "cross_entropy_unforeseen" in str(jax.make_jaxpr(jax.grad(f))(x))
    np.testing.assert_allclose(under(jax.grad(f))(x), jax.grad(g)(x), atol=1e-6)
    for way in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)), lambda f: jax.jacfwd(jax.jacfwd(f))):
        np.testing.assert_allclose(under(way(f))(x), jax.hessian(g)(x), atol=1e-5)
    xs, targets = jnp.stack([x, -x]), jnp.stack([target, target[::-1]])
    found = under(jax.vmap(jax.grad(lambda x, target: ours.cross_entropy(x, target).sum())))(xs, targets)
    one_by_one = [jax.grad(lambda x, t=t: ours.cross_entropy(x, t).sum())(x) for x, t in zip(xs, targets, strict=True)]
    np.testing.assert_allclose(found, jnp.stack(one_by_one), atol=1e-6)


def test_label_smoothing_and_short_rows_go_the_plain_way(ahead, monkeypatch):
    # Of other shapes than above: JAX keeps what it has made of these.
    x, target = jnp.asarray(logits((4, 11))), jnp.array([0, 8, 3, 3])
    smoothed = jax.make_jaxpr(jax.grad(lambda x: ours.cross_entropy(x, target, label_smoothing=0.1).sum()))(x)
    assert "cross_entropy_backward" in str(smoothed)
    assert "unforeseen" not in str(smoothed)
    monkeypatch.undo()
    of_short_rows = jax.make_jaxpr(jax.grad(lambda x: ours.cross_entropy(x, target).sum()))(x)
    assert "unforeseen" not in str(of_short_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [57352, 128256, "longest"])
def test_bits_are_those_of_two_passes_whatever_was_foreseen(device, n, dtype, place_of_jax):
    if device == "cpu":
        pytest.skip("nothing is foreseen")
    n = (1 << 19) // np.dtype(dtype).itemsize if n == "longest" else n
    rows = 40
    x, target = logits((rows, n), dtype), np.random.default_rng(1).integers(0, n, rows)
    x[1], x[2, 5], x[3, 7], x[4, : n // 2] = -np.inf, np.inf, np.nan, -np.inf
    target[[0, 9]] = -100, n + 3
    x, target = jax.device_put(x, place_of_jax), jax.device_put(target.astype(np.int32), place_of_jax)
    assert differentiable._has_gradients_ahead(x, 1)
    weights = [np.full(rows, 1 / rows), np.arange(rows) % 3 * 0.25, np.ones(rows), -np.ones(rows), np.zeros(rows)]

    @jax.jit
    def step(x, w):
        losses, pull = jax.vjp(lambda x: ours.cross_entropy(x, target), x)
        return losses, pull(w)[0]

    expected = maxsoftmax.cross_entropy_forward(x, target, reduction="none")
    for w in (jnp.asarray(each, x.dtype) for each in weights):
        dx = maxsoftmax.cross_entropy_backward(x, target, expected[1], w, reduction="none")
        # Twice nothing is foreseen, or something else, and from then on what is the case.
        for _ in range(4):
            losses, found = step(x, w)
            same(losses, expected[0])
            same(found, dx)


@pytest.mark.parametrize(
    ("capabilities", "have"), [(["9.0", "10.0"], True), (["9.0", "8.0"], False), (["gfx942"], False)]
)
def test_which_gpus_compute_ahead(monkeypatch, capabilities, have):
    class Gpu:
        local_hardware_id = 0

        def __init__(self, compute_capability):
            self.compute_capability = compute_capability

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu(each) for each in capabilities])
    monkeypatch.setattr(differentiable.devices, "target", lambda device: None)
    monkeypatch.setattr(differentiable.load, "is_there", lambda library: True)
    compute = differentiable._have_gradients_ahead.__wrapped__
    assert compute("float32") == have
    monkeypatch.setattr(differentiable.load, "is_there", _no_compiler)
    assert not compute("float32")


def _no_compiler(library):
    raise differentiable.CompilerError("there is none")
