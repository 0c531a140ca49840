"""Batches, platforms, threads, and how XLA calls the libraries."""

import ctypes
import struct
import threading
import time
import types

import maxsoftmax
import numpy as np
import pytest
from contract import logits
from jax_arrays import jax, jnp, ours, run, same
from maxsoftmax._native import description, load

primitives = pytest.importorskip("maxsoftmax.jax._primitives")

pytestmark = pytest.mark.usefixtures("place_of_jax")


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "sparsemax"])
@pytest.mark.parametrize("place_of_batch", [0, 1, 2])
def test_vmap_is_rows(device, name, place_of_batch):
    x = jnp.asarray(logits((5, 4, 6)))
    function = getattr(ours, name)
    for axis in (0, 1):
        one_by_one = [function(each, axis=axis) for each in jnp.moveaxis(x, place_of_batch, 0)]
        y = jax.vmap(lambda x, axis=axis: function(x, axis=axis), in_axes=place_of_batch)(x)
        # A batch lies between the elements of a row, which then has other kernels.
        np.testing.assert_allclose(y, np.stack(one_by_one), rtol=1e-6, atol=5e-7)
    if name != "logsumexp":
        y = jax.vmap(jax.vmap(function), in_axes=place_of_batch, out_axes=place_of_batch)(x)
        np.testing.assert_allclose(y, function(x, axis=1 if place_of_batch == 2 else 2), rtol=1e-6, atol=5e-7)


def test_a_batch_of_contiguous_rows_has_their_bits(device):
    x = jnp.asarray(logits((5, 4, 129)))
    same(jax.vmap(ours.softmax)(x), ours.softmax(x))
    same(jax.vmap(ours.softmax, in_axes=1, out_axes=1)(x), ours.softmax(x))


def test_vmap_of_gradients(device):
    x, v = jnp.asarray(logits((4, 6))), jnp.asarray(logits((7, 6), seed=1))
    # Each row's Jacobian: the same probabilities with a batch of gradients.
    y = np.asarray(ours.softmax(x), np.float64)
    expected = np.stack([np.diag(row) - np.outer(row, row) for row in y])
    np.testing.assert_allclose(jax.vmap(jax.jacrev(ours.softmax))(x), expected, atol=1e-6)
    # And one gradient with a batch of probabilities.
    _, pull = jax.vjp(ours.softmax, v)
    many = jax.vmap(lambda x: jax.vjp(ours.softmax, x)[1](v[0])[0])(v)
    np.testing.assert_allclose(many, pull(jnp.broadcast_to(v[0], v.shape))[0], atol=1e-6)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 0), (2, 1), (0, None), (None, 0)])
def test_vmap_of_losses(device, in_axes):
    x, target = jnp.asarray(logits((4, 4, 4))), jnp.asarray(np.random.default_rng(0).integers(0, 4, (4, 4)))
    if in_axes[0] is None:
        x = x[0]
    if in_axes[1] is None:
        target = target[0]

    def loss(x, target, axis):
        return ours.cross_entropy(x, target, axis).mean()

    def theirs(x, target, axis):
        return -jnp.take_along_axis(jax.nn.log_softmax(x, axis), jnp.expand_dims(target, axis), axis).mean()

    for axis in (0, 1):
        found, expected = (
            jax.jit(jax.vmap(jax.value_and_grad(lambda x, t, f=f, axis=axis: f(x, t, axis)), in_axes))(x, target)
            for f in (loss, theirs)
        )
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-6)


def test_other_platforms_are_refused(device):
    lowered = jax.jit(ours.softmax).trace(jnp.ones((2, 3)))
    with pytest.raises(
        NotImplementedError, match=r"softmax of maxsoftmax.jax computes on CPUs and CUDA devices, not on tpu"
    ):
        lowered.lower(lowering_platforms=("tpu",))


def test_several_threads_call_at_a_time(device):
    xs = [jnp.asarray(logits((64, 257), seed=seed)) for seed in range(8)]
    expected = [np.asarray(maxsoftmax.softmax(np.asarray(x), device=device)) for x in xs]
    function, found = jax.jit(ours.softmax), [None] * len(xs)

    def compute(i):
        for _ in range(20):
            found[i] = function(xs[i])

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y, wanted in zip(found, expected, strict=True):
        same(y, wanted)


def test_threads_share_the_memory_in_which_calls_leave_word(device, monkeypatch):
    context, together, put = ctypes.c_int64(0), threading.Barrier(4), jax.device_put

    def functions(*_):
        together.wait()
        return types.SimpleNamespace(context=ctypes.addressof(context))

    def slowly(*arguments):
        time.sleep(0.1)
        return put(*arguments)

    monkeypatch.setattr(load, "functions", functions)
    monkeypatch.setattr(jax, "device_put", slowly)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [jax.devices(device)[0]])
    monkeypatch.setattr(primitives, "_expected", [])
    primitives._expect.cache_clear()
    threads = [threading.Thread(target=primitives._expect, args=(device, str(i), "float32")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (words,) = primitives._expected
    assert context.value == words.unsafe_buffer_pointer()


@pytest.mark.parametrize("scratch", [0, 8])
def test_what_was_compiled_with_too_little_scratch_memory_is_refused(device, scratch):
    if device == "cpu":
        pytest.skip("no call on a CPU has scratch memory")
    x = jnp.zeros((1, 2**20), np.float32)
    target = primitives._target("softmax", "float32", "cuda")
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((scratch,), np.uint8)]
    call = jax.ffi.ffi_call(target, results if scratch else results[:1])
    with pytest.raises(Exception, match=f"bytes of scratch memory or more, and has {scratch or 1}"):
        jax.block_until_ready(call(x, call=np.array([2**20, 1], np.int64)))
    same(ours.softmax(x), np.full(x.shape, 2.0**-20, x.dtype))


def test_ops_are_the_libraries_that_have_a_handler(device):
    assert {op.library for op in primitives.OPS.values()} == set(description.XLA)
    assert load.functions("softmax", "float32", -1, "auto", primitives.CHOICES).xla


def test_what_xla_keeps_for_other_processes_works_there(environment, device, tmp_path):
    if device == "gpu":
        pytest.skip("the same on any device")
    program = """
        import jax, maxsoftmax, maxsoftmax.jax, numpy as np
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        x = np.random.default_rng(0).standard_normal((6, 5), dtype=np.float32)
        assert (jax.jit(maxsoftmax.jax.softmax)(x) == maxsoftmax.softmax(x)).all()
        print("done")
    """
    for _ in range(2):
        assert "done" in run(program, environment, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
        assert any(tmp_path.iterdir())


@pytest.mark.parametrize(("theirs", "answered"), [(None, 1), (2, 2), (3, 3)])
def test_the_handler_is_for_the_version_that_xla_has(theirs, answered):
    # As c_api.h has them: the API table, the metadata, the extension that asks for these, and the call frame.
    api = struct.pack("<qqqqii", 192, 0, 24, 0, 0, theirs or 0)
    api = ctypes.create_string_buffer(api)
    metadata = ctypes.create_string_buffer(struct.pack("<qqqiiIxxxxq", 48, 24, 0, -1, -1, 7, 0))
    asking = ctypes.create_string_buffer(struct.pack("<qixxxxqq", 32, 1, 0, ctypes.addressof(metadata)))
    place = 0 if theirs is None else ctypes.addressof(api)
    frame = ctypes.create_string_buffer(struct.pack("<qqq", 168, ctypes.addressof(asking), place).ljust(168, b"\0"))
    handler = load.functions("softmax", "float32", -1, "auto", primitives.CHOICES).xla
    handler.argtypes, handler.restype = (ctypes.c_void_p,), ctypes.c_void_p
    assert handler(ctypes.addressof(frame)) is None
    assert struct.unpack("<qqqiiI", metadata.raw[:36]) == (48, 24, 0, 0, answered, 0)


def test_kernels_are_recorded_in_command_buffers_with_whatever_memory_there_is(place_of_jax):
    def several(x):
        for _ in range(8):
            x = ours.softmax(x * 1.5)
        return x + ours.logsumexp(x, axis=-1)[..., None]

    together, kept = jax.jit(several), []
    for i in range(12):
        x = jax.device_put(np.float32(np.random.default_rng(i).standard_normal((64, 1000 + i % 2))), place_of_jax)
        kept.append((together(x), several(x)))
        if i % 3 == 0:
            kept.append(kept.pop(0))
    for found, expected in kept:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
