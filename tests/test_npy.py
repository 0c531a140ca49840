import errno
import os
import re
import stat
from pathlib import Path

import maxsoftmax
import numpy as np
import pytest
import scipy.special
from contract import check
from maxsoftmax._commands import npy

SHAPES = [(7,), (5, 9), (4, 3, 5), (2, 3, 4, 5)]
# One column, a few columns, a few whole rows, everything.
SLABS = [1, 60, 250, 2**20]


def logits(shape, dtype=np.float32):
    return (np.random.default_rng(0).standard_normal(shape) * 4).astype(dtype)


def in_scipy(x, axis=-1, *, device, algorithm):
    """Stands in for the kernel, so that nothing has to be compiled."""
    dtype = x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.dtype(np.float64)
    return scipy.special.softmax(x.astype(np.float64), axis=axis).astype(dtype) if x.size else x.astype(dtype)


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(npy, "softmax", in_scipy)


@pytest.fixture(params=SLABS)
def slab(request, monkeypatch):
    monkeypatch.setattr(npy, "SLAB", request.param)
    monkeypatch.setattr(npy, "STRIDED", 1)


def saved(folder, x):
    np.save(folder / "x.npy", x)
    return npy.read(folder / "x.npy")


def transform(x, output, axis=-1):
    """Returns what is in `output` then, and the steps of progress."""
    steps = []
    npy.transform(x, output, axis=axis, device="cpu", algorithm="auto", advance=steps.append)
    assert sum(steps) == x.nbytes
    return np.load(output), steps


def axes(shape):
    return [None, *range(-len(shape), len(shape))]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("slab")
def test_slabs_are_softmax_of_the_whole(tmp_path, shape, order):
    x = saved(tmp_path, np.asarray(logits(shape), order=order))
    for axis in axes(shape):
        y, _ = transform(x, tmp_path / "y.npy", axis)
        assert y.dtype == np.float32
        assert (y.flags.c_contiguous, y.flags.f_contiguous) == (x.flags.c_contiguous, x.flags.f_contiguous)
        check(y, x, axis)
        # A slab may be computed by another kernel than the whole, so the last bits may differ.
        np.testing.assert_array_almost_equal_nulp(y, maxsoftmax.softmax(np.array(x), axis=axis), 8)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slabs_of_whole_rows_are_the_same_to_the_bit(tmp_path, monkeypatch, axis):
    monkeypatch.setattr(npy, "SLAB", 4000)
    monkeypatch.setattr(npy, "STRIDED", 1)
    x = logits((10, 16, 32))
    y, steps = transform(x, tmp_path / "y.npy", axis)
    assert len(steps) > 5
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x, axis=axis))


def test_integers_become_floats(tmp_path, monkeypatch):
    monkeypatch.setattr(npy, "SLAB", 20)
    monkeypatch.setattr(npy, "STRIDED", 1)
    for dtype in (np.int32, bool):
        x = saved(tmp_path, (np.arange(60).reshape(6, 10) % 7).astype(dtype))
        y, steps = transform(x, tmp_path / "y.npy")
        assert y.dtype == np.float64
        assert len(steps) > 1
        check(y, x)
        np.testing.assert_array_equal(y, maxsoftmax.softmax(np.array(x)))


def test_files_from_big_endian_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(npy, "SLAB", 60)
    monkeypatch.setattr(npy, "STRIDED", 1)
    x = logits((6, 10))
    y, _ = transform(saved(tmp_path, x.astype(">f4")), tmp_path / "y.npy")
    assert y.dtype == np.dtype("=f4")
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2"])
def test_the_kernel_accepts_the_dtype_of_files_from_big_endian_machines(dtype):
    assert maxsoftmax.softmax(np.empty(0, dtype), device="cpu").dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", "f2", "i4", "?", ">f4", ">f8", ">i4"])
@pytest.mark.usefixtures("no_kernel", "slab")
def test_every_dtype(tmp_path, dtype, order):
    x = saved(tmp_path, np.asarray(logits((3, 4, 5), dtype), order=order))
    for axis in axes(x.shape):
        y, _ = transform(x, tmp_path / "y.npy", axis)
        expected = in_scipy(x, axis, device="cpu", algorithm="auto")
        assert y.dtype == expected.dtype
        assert y.flags.c_contiguous == x.flags.c_contiguous
        np.testing.assert_allclose(y, expected, rtol=1e-15 + np.finfo(y.dtype).eps)


def test_progress_comes_in_slabs(tmp_path, monkeypatch, no_kernel):
    monkeypatch.setattr(npy, "SLAB", 4 * 10 * 3)
    monkeypatch.setattr(npy, "STRIDED", 1)
    _, steps = transform(logits((7, 10)), tmp_path / "y.npy", 1)
    assert steps == [120, 120, 40]
    _, steps = transform(logits((10, 7)), tmp_path / "y.npy", 0)
    assert steps == [120, 120, 40]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty_arrays(tmp_path, shape):
    x = saved(tmp_path, np.empty(shape, np.float32))
    for axis in axes(shape):
        y, _ = transform(x, tmp_path / "y.npy", axis)
        assert (y.shape, y.dtype) == (shape, np.float32)


@pytest.mark.parametrize("axis", [None, -1, 0])
def test_a_scalar(tmp_path, axis):
    y, _ = transform(saved(tmp_path, np.float32(3)), tmp_path / "y.npy", axis)
    assert (y.shape, y.dtype, y[()]) == ((), np.float32, 1)


def test_an_array_in_neither_order(tmp_path, monkeypatch, no_kernel):
    monkeypatch.setattr(npy, "SLAB", 60)
    monkeypatch.setattr(npy, "STRIDED", 1)
    x = logits((4, 5, 6)).transpose(1, 0, 2)[:, ::2]
    y, _ = transform(x, tmp_path / "y.npy", 1)
    np.testing.assert_allclose(y, scipy.special.softmax(x, axis=1), rtol=1e-6)


def test_the_output_may_be_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(npy, "SLAB", 60)
    monkeypatch.setattr(npy, "STRIDED", 1)
    x = logits((6, 10))
    y, _ = transform(saved(tmp_path, x), tmp_path / "x.npy")
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x))
    assert os.listdir(tmp_path) == ["x.npy"]


def test_reading_leaves_the_input_alone(tmp_path, no_kernel):
    x = saved(tmp_path, logits((6, 10)))
    before = (tmp_path / "x.npy").read_bytes()
    x[:] = 0
    transform(x, tmp_path / "y.npy")
    assert (tmp_path / "x.npy").read_bytes() == before


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path, no_kernel):
    (tmp_path / "folder").mkdir()
    (tmp_path / "y.npy").symlink_to(tmp_path / "folder" / "target.npy")
    transform(logits((2, 3)), tmp_path / "y.npy")
    assert (tmp_path / "y.npy").is_symlink()
    assert os.listdir(tmp_path / "folder") == ["target.npy"]


def test_a_private_output_stays_private(tmp_path, no_kernel):
    output = tmp_path / "y.npy"
    output.touch()
    output.chmod(0o600)
    transform(logits((2, 3)), output)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def test_the_longest_name_will_do(tmp_path, no_kernel):
    transform(logits((2, 3)), tmp_path / ("y" * 251 + ".npy"))


def test_two_that_write_the_same_output_do_not_meet(tmp_path, monkeypatch):
    output = tmp_path / "y.npy"
    first, second = logits((2, 3)), logits((4, 5))

    def overtaken(x, axis=-1, **options):
        if x.size:
            monkeypatch.setattr(npy, "softmax", in_scipy)
            assert transform(second, output)[0].shape == second.shape
        return in_scipy(x, axis, **options)

    monkeypatch.setattr(npy, "softmax", overtaken)
    y, _ = transform(first, output)
    np.testing.assert_allclose(y, scipy.special.softmax(first, axis=-1), rtol=1e-6)
    assert os.listdir(tmp_path) == ["y.npy"]


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_output_appears_whole_or_not_at_all(tmp_path, monkeypatch, error, existing):
    monkeypatch.setattr(npy, "SLAB", 40)
    monkeypatch.setattr(npy, "STRIDED", 1)
    if existing:
        (tmp_path / "y.npy").write_bytes(b"mine")
    there = []

    def failing(x, axis=-1, **options):
        there.append(os.listdir(tmp_path))
        if len(there) > 3:
            raise error("on the way")
        return in_scipy(x, axis, **options)

    monkeypatch.setattr(npy, "softmax", failing)
    with pytest.raises(error, match="on the way"):
        transform(logits((10, 10)), tmp_path / "y.npy")
    assert len(there[-1]) == existing + 1
    assert os.listdir(tmp_path) == ["y.npy"] * existing
    if existing:
        assert (tmp_path / "y.npy").read_bytes() == b"mine"


def refused(output, number):
    """Asserts that `output` cannot be written and that the reason names it."""
    with pytest.raises(OSError, match=re.escape(str(output))) as caught:
        transform(logits((2, 3)), output)
    assert caught.value.errno == number


def test_a_folder_is_not_replaced(tmp_path, no_kernel):
    (tmp_path / "y.npy").mkdir()
    refused(tmp_path / "y.npy", None)
    assert os.listdir(tmp_path) == ["y.npy"]
    assert os.listdir(tmp_path / "y.npy") == []


def test_a_pipe_is_not_replaced(tmp_path, no_kernel):
    os.mkfifo(tmp_path / "y.npy")
    refused(tmp_path / "y.npy", None)
    assert (tmp_path / "y.npy").is_fifo()


def test_a_device_is_not_replaced(monkeypatch, no_kernel):
    # Should the check be lost, this must not cost the machine its device.
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("replaced"))
    refused(Path("/dev/null"), None)
    assert Path("/dev/null").is_char_device()


def test_a_missing_folder_is_not_made(tmp_path, no_kernel):
    refused(tmp_path / "nowhere" / "y.npy", errno.ENOENT)
    assert os.listdir(tmp_path) == []


def test_a_file_is_no_folder(tmp_path, no_kernel):
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "y.npy", errno.ENOTDIR)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path, no_kernel):
    tmp_path.chmod(0o500)
    refused(tmp_path / "y.npy", errno.EACCES)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot take space in advance")
def test_a_full_disk_is_noticed_at_once(tmp_path, monkeypatch):
    sizes = []

    def full(descriptor, offset, size):
        sizes.append(offset + size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def computing(x, axis=-1, **options):
        assert x.size == 0
        return in_scipy(x, axis, **options)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(npy, "softmax", computing)
    (tmp_path / "y.npy").write_bytes(b"mine")
    refused(tmp_path / "y.npy", errno.ENOSPC)
    assert sizes == [128 + 6 * 4]
    assert os.listdir(tmp_path) == ["y.npy"]
    assert (tmp_path / "y.npy").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("dtype", "options", "error"),
    [
        ("c16", {}, TypeError),
        ("M8[s]", {}, TypeError),
        ("U3", {}, TypeError),
        ("f4", {"axis": 2}, ValueError),
        ("f4", {"device": "tpu"}, ValueError),
        ("f4", {"algorithm": "tree"}, ValueError),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(tmp_path, dtype, options, error):
    options = {"axis": -1, "device": "cpu", "algorithm": "auto", **options}
    with pytest.raises(error):
        npy.transform(np.zeros((2, 3), dtype), tmp_path / "y.npy", advance=lambda done: None, **options)
    assert os.listdir(tmp_path) == []


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1 2 3\n",
        b"PK\x03\x04 a zip archive",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00",
        b"\x93NUMPY\x01\x00\xff\xff{",
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (9,), }\n") + bytes(35),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-9,), }\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (2**62,), }\n"),
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**62}, {2**62}), }}\n"),
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},), }}\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': ((((9,), }\n"),
        header("{'descr': 'what', 'fortran_order': False, 'shape': (9,), }\n"),
        header("{'descr': '<f4', 'shape': (9,), }\n"),
        header(" " * 20000 + "\n"),
    ],
    ids=lambda content: content[:24].hex(" ") if content else "empty",
)
@pytest.mark.filterwarnings("error")
def test_what_is_not_an_array_is_said_in_one_line(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.npy (is not a \.npy file|cannot be read as an array: .)") as caught:
        npy.read(tmp_path / "x.npy")
    assert "\n" not in str(caught.value)


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}, 1], object))
    with pytest.raises(ValueError, match="cannot be read as an array"):
        npy.read(tmp_path / "x.npy")


def test_reading_maps_the_file(tmp_path):
    x = logits((5, 9))
    mapped = saved(tmp_path, x)
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, x)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(tmp_path, version):
    x = logits((5, 9))
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, x, version=version)
    np.testing.assert_array_equal(npy.read(tmp_path / "x.npy"), x)
