"""Arrays that are divided over devices: each test is a process of its own, of several devices of a CPU or two GPUs."""

import textwrap

import pytest
from jax_arrays import run
from max.driver import accelerator_count


def flags(device, count):
    """Returns what XLA has to be told of so many devices."""
    if device == "cpu":
        return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    if accelerator_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    return {"JAX_PLATFORMS": "cuda"}


def test_sharded_arrays_under_shard_map(environment, device):
    program = """
        import jax, maxsoftmax.jax as ours, numpy as np
        from jax import numpy as jnp
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
        x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4, 5), dtype=np.float32))
        target = jnp.asarray(np.random.default_rng(0).integers(0, 5, (6, 4)))
        rows = P("rows")

        def sharded(f, specs, out=rows):
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))

        for f in (ours.softmax, ours.log_softmax, lambda x: ours.logsumexp(x, axis=-1)):
            g = sharded(f, (rows,))
            assert (g(x) == f(x)).all()
            dx, expected = (jax.grad(lambda x: (f(x) ** 2).sum())(x) for f in (g, f))
            np.testing.assert_allclose(dx, expected, atol=1e-6)
        g = sharded(ours.cross_entropy, (rows, rows))
        assert (g(x, target) == ours.cross_entropy(x, target)).all()
        # The same logits everywhere, and labels that differ: gradients of all devices add up.
        g = sharded(lambda x, t: jax.lax.psum(ours.cross_entropy(x, t[0]).sum(), "rows"), (P(), rows), P())
        both = target.reshape(2, 3, 4)
        dx = jax.grad(g)(x[:3], both)
        expected = sum(jax.grad(lambda x: ours.cross_entropy(x, t).sum())(x[:3]) for t in both)
        np.testing.assert_allclose(dx, expected, atol=1e-6)
        # Without shard_map XLA brings the rows together, and the result is the same.
        split = jax.device_put(x, jax.sharding.NamedSharding(mesh, rows))
        assert (jax.jit(ours.softmax)(split) == ours.softmax(x)).all()
        print("done")
    """
    assert "done" in run(program, environment, **flags(device, 2))


DIVIDED = """
    import re
    import jax, maxsoftmax.jax as ours, ml_dtypes, numpy as np, scipy.special
    from jax import lax, numpy as jnp
    from jax.sharding import AxisType, PartitionSpec as P

    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("v",), axis_types=(AxisType.Auto,))
    square = jax.make_mesh((count // 2, 2), ("rows", "v"), axis_types=(AxisType.Auto,) * 2)
    V = P(None, "v")
    rng = np.random.default_rng(0)

    def sharded(f, specs, out, mesh=mesh, **choices):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, **choices))

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * 3)

    def collectives(f, *arrays):
        told = f.lower(*arrays).compile().as_text()
        names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
        return {name: n for name in names if (n := len(re.findall(rf" {name}(?:-start)?\\(", told)))}

    x, labels = normal(6, 40), jnp.asarray(rng.integers(0, 40, 6)).at[1].set(-100)
"""
"""What programs on several devices begin with."""


@pytest.fixture
def divided(environment, device):
    """Runs a program on four devices of a CPU, or two GPUs."""
    told = flags(device, {"cpu": 4, "gpu": 2}[device])

    def divided(program):
        assert "done" in run(textwrap.dedent(DIVIDED) + textwrap.dedent(program) + "print('done')", environment, **told)

    return divided


def test_divided_rows(divided):
    divided("""
        functions = {
            "softmax": (V, scipy.special.softmax), "log_softmax": (V, scipy.special.log_softmax),
            "logsumexp": (P(), scipy.special.logsumexp),
        }
        for name, (out, reference) in functions.items():
            f = sharded(lambda x: getattr(ours, name)(x, axis=1, axis_name="v"), (V,), out)
            for dtype, limit in ((np.float32, 2e-6), (ml_dtypes.bfloat16, 1e-2), (np.float16, 1e-3)):
                for array in (normal(6, 40), normal(3, 200_004), 1000 + 100 * normal(6, 40)):
                    array = array.astype(dtype)
                    y = f(array)
                    assert y.dtype == dtype
                    # Tiny probabilities are subnormal in 16 bits.
                    expected = reference(np.asarray(array, np.float64), axis=1)
                    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=limit, atol=limit * 1e-3)
            assert collectives(f, x) == {"all-gather": 1}

        # Other axes, several axes of the mesh, a mask, a batch.
        f = sharded(lambda x: ours.softmax(x, axis=0, axis_name="v"), (P("v"),), P("v"))
        np.testing.assert_allclose(f(x.T), jax.nn.softmax(x.T, 0), rtol=1e-5)
        names = ("rows", "v")
        f = sharded(lambda x: ours.logsumexp(x, axis=1, axis_name=names), (P(None, names),), P(), square)
        np.testing.assert_allclose(f(x), ours.logsumexp(x, axis=1), rtol=1e-6)
        f = sharded(lambda x, w: ours.softmax(x, where=w, axis_name="v"), (V, V), V)
        where = jnp.arange(40) < 37
        np.testing.assert_allclose(f(x, where[None]), jax.nn.softmax(x, where=where), rtol=1e-5)
        b = normal(6, 40)
        f = sharded(lambda x, b: ours.logsumexp(x, 1, b, return_sign=True, axis_name="v"), (V, V), (P(), P()))
        for one, other in zip(f(x, b), jax.nn.logsumexp(x, 1, b, return_sign=True)):
            np.testing.assert_allclose(one, other, rtol=1e-5)
        deep = normal(3, 6, 40)
        last = P(None, None, "v")
        f = sharded(jax.vmap(lambda x: ours.log_softmax(x, axis_name="v")), (last,), last)
        np.testing.assert_allclose(f(deep), jax.nn.log_softmax(deep), rtol=1e-5)
        f = jax.vmap(lambda x: ours.softmax(x, axis_name="v"), in_axes=1, out_axes=1, axis_name="v")
        np.testing.assert_allclose(f(x.reshape(6, 4, 10)).reshape(6, 40), jax.nn.softmax(x), rtol=1e-5)

        # Special values, anywhere in a row; the same bits on all devices.
        odd = np.array(normal(8, 40))
        odd[0, 3], odd[1, 33], odd[2], odd[3, :30], odd[4, 1:] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
        odd[5], odd[5, 25] = -np.inf, np.nan
        for name, (out, reference) in functions.items():
            f = sharded(lambda x: getattr(ours, name)(x, axis=1, axis_name="v"), (V,), out)
            np.testing.assert_allclose(f(odd), getattr(ours, name)(odd, axis=1), rtol=2e-6, atol=1e-37)
        f = sharded(lambda x: ours.logsumexp(x, axis=1, axis_name="v")[None], (V,), P("v"), check_vma=False)
        assert len({row.tobytes() for row in np.asarray(f(x))}) == 1
        assert f(x[:0]).shape == (count, 0)
    """)


def test_gradients_of_divided_rows(divided):
    divided("""
        change = normal(6, 40)
        for check in (True, False):
            for name in ("softmax", "log_softmax", "logsumexp"):
                out = P() if name == "logsumexp" else V
                f = sharded(lambda x: getattr(ours, name)(x, axis=1, axis_name="v"), (V,), out, check_vma=check)
                g = lambda x: getattr(jax.nn, name)(x, axis=1)
                w = normal(*g(x).shape)
                first = [jax.jit(jax.grad(lambda x, h=h: (h(x) ** 2 * w).sum())) for h in (f, g)]
                np.testing.assert_allclose(first[0](x), first[1](x), rtol=1e-5, atol=3e-5)
                if check or name == "softmax":
                    second = [jax.jit(jax.grad(lambda x: (d(x) ** 2).sum()))(x) for d in first]
                    np.testing.assert_allclose(*second, rtol=1e-3, atol=1e-2)
                if check:
                    changes = [jax.jit(lambda x, t: jax.jvp(h, (x,), (t,))[1])(x, change) for h in (f, g)]
                    np.testing.assert_allclose(*changes, rtol=1e-4, atol=3e-5)
                    expected = {"all-gather": 1} if name == "logsumexp" else {"all-gather": 1, "all-reduce": 1}
                    assert collectives(first[0], x) == expected
    """)


def test_losses_of_divided_rows(divided):
    divided("""
        def losses(share, **choices):
            f = lambda x, t: ours.cross_entropy(x, t, axis_name="v", label_smoothing=share)
            return sharded(f, (V, P()), P(), **choices)

        for check in (True, False):
            for share in (0.0, 0.2, 1.0):
                f, g = losses(share, check_vma=check), lambda x, t: ours.cross_entropy(x, t, label_smoothing=share)
                np.testing.assert_allclose(f(x, labels), g(x, labels), rtol=1e-5)
                w = normal(6)
                first = [jax.jit(jax.grad(lambda x, h=h: (h(x, labels) ** 2 * w).sum())) for h in (f, g)]
                np.testing.assert_allclose(first[0](x), first[1](x), rtol=1e-5, atol=3e-5)
                if check and share < 1:
                    second = [jax.jit(jax.grad(lambda x: (d(x) ** 2).sum()))(x) for d in first]
                    np.testing.assert_allclose(*second, rtol=1e-3, atol=1e-2)
                    changes = [jax.jit(lambda x: jax.jvp(lambda x: h(x, labels), (x,), (x,))[1])(x) for h in (f, g)]
                    np.testing.assert_allclose(*changes, rtol=1e-4, atol=1e-4)
                # Nothing is told for gradients, where JAX knows that all devices have one loss.
                assert collectives(first[0], x) == {"all-gather": 1} | ({} if check else {"all-reduce": 1})

        # A vocabulary of a language model, in 16 bits, against float64.
        wide = (normal(5, 50_260) + 10).astype(ml_dtypes.bfloat16)
        target = rng.integers(0, 50_260, 5)
        log_p = scipy.special.log_softmax(np.asarray(wide, np.float64), -1)
        for share in (0.0, 0.1):
            value, dx = jax.value_and_grad(lambda x: losses(share)(x, target).astype(np.float32).sum())(wide)
            expected = -(1 - share) * log_p[np.arange(5), target] - share * log_p.mean(1)
            np.testing.assert_allclose(np.asarray(losses(share)(wide, target), np.float64), expected, rtol=8e-3)
            wanted = (1 - share) * (np.arange(50_260) == target[:, None]) + share / 50_260
            np.testing.assert_allclose(np.asarray(dx, np.float64), np.exp(log_p) - wanted, rtol=1e-2, atol=1e-8)

        # Labels that are no classes of the whole vocabulary, in any integers; and those that differ.
        for bad in (40, -1):
            t = labels.at[3].set(bad)
            assert np.isnan(losses(0.0)(x, t)).tolist() == [False] * 3 + [True] + [False] * 2
            dx = jax.grad(lambda x: losses(0.0)(x, t).sum())(x)
            assert np.isnan(dx).all(1).tolist() == [i == 3 for i in range(6)]
        small = jnp.arange(6, dtype=np.uint8) * 7
        np.testing.assert_allclose(losses(0.0)(x, small), ours.cross_entropy(x, small), rtol=1e-5)
        f = sharded(lambda x, t: ours.cross_entropy(x, t[0], axis_name="v"), (V, P("v")), P())
        try:
            f(x, jnp.zeros((count, 6), int))
        except ValueError as error:
            assert str(error) == "labels may differ along v, but devices with shards of a row need its label"
        else:
            raise AssertionError

        # Rows along one axis of a mesh, the vocabulary along the other.
        both = P("rows", "v"), P("rows")
        f = sharded(lambda x, t: ours.cross_entropy(x, t, axis_name="v"), both, P("rows"), square)
        np.testing.assert_allclose(f(x, labels), ours.cross_entropy(x, labels), rtol=1e-5)
        first = [jax.grad(lambda x: h(x, labels).mean())(x) for h in (f, ours.cross_entropy)]
        np.testing.assert_allclose(*first, atol=1e-6)
        with jax.set_mesh(jax.make_mesh((count // 2, 2), ("rows", "v"), axis_types=(AxisType.Explicit,) * 2)):
            f = lambda x, t: ours.cross_entropy(x, t, axis_name="v")
            f = jax.jit(jax.shard_map(f, in_specs=both, out_specs=both[1]))
            mesh = jax.sharding.get_mesh()
            given = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, labels), both)]
            np.testing.assert_allclose(f(*given), ours.cross_entropy(x, labels), rtol=1e-5)
    """)
