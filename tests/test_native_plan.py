import ctypes
import types

import numpy as np
import pytest
from contract import check
from libraries import ROWS, computed
from maxsoftmax import _native
from maxsoftmax._native import load


def test_a_call_computes(x):
    check(computed(x), x)


def test_a_plan_is_made_once():
    made = _native.plan("softmax", "float32", -1, ROWS)
    assert _native.plan("softmax", "float32", -1, ROWS) is made
    assert made.scratch == 0
    others = {_native.plan("softmax", "float32", -1, (6, 5, i)).call for i in range(10)}
    assert len(others) == 10
    assert made.call in others


def test_a_call_says_what_it_was_told():
    made = _native.plan("softmax", "float32", -1, (2, 3, 4), (7, _native.bits(0.5), -(2**63)))
    told = (ctypes.c_int64 * 8).from_address(made.call)
    assert list(told) == [load._contexts[-1], 2, 3, 4, 0, 7, 0x3FE0000000000000, -(2**63)]


@pytest.mark.parametrize("counted", [0, 4096])
def test_a_call_of_a_gpu_says_how_much_scratch_memory_it_has(counted, monkeypatch):
    found = types.SimpleNamespace(context=1, run=None, scratch=lambda call: counted)
    monkeypatch.setitem(_native.plan.__wrapped__.__globals__, "functions", lambda *told, **choices: found)
    made = _native.plan.__wrapped__("softmax", "float32", 0, (2, 3, 4), (7,))
    told = (ctypes.c_int64 * 7).from_address(made.call)
    # 0 would say that nobody has counted.
    assert list(told) == [1, 2, 3, 4, max(1, counted), 7, 0]


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1e-300, float("inf")])
def test_bits_are_those_of_a_double(number):
    assert _native.bits(number) == int(np.float64(number).view(np.int64))


@pytest.mark.parametrize(("status", "kind"), [("V", ValueError), ("R", RuntimeError)])
def test_an_error_is_raised_and_released(monkeypatch, status, kind):
    freed = []
    free = load._free
    monkeypatch.setattr(load, "_free", lambda address: (freed.append(address), free(address)))
    duplicate = ctypes.CDLL(None).strdup
    duplicate.restype = ctypes.c_void_p
    address = duplicate(f"{status}target[3] is 7 × 1".encode())
    with pytest.raises(kind, match=r"^target\[3\] is 7 × 1$"):
        _native.fail(address)
    assert freed == [address]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("what", "float32"), {}),
        (("softmax", "int8"), {}),
        (("statistics", "float32"), {"algorithm": "naive"}),
    ],
)
def test_what_there_is_no_library_for_is_refused(arguments, options):
    with pytest.raises(ValueError, match=r"there is no library|is one of softmax"):
        _native.plan(*arguments, -1, ROWS, **options)


# Devices


def test_a_device_has_an_index(device):
    assert _native.index(device) == {"cpu": -1, "gpu": 0}[device]


def test_a_device_of_max_has_an_index():
    from max.driver import CPU

    assert _native.index(CPU()) == -1


@pytest.mark.parametrize("name", ["tpu", "gpu:01", "gpu:9999", "cpu:0", ""])
def test_an_unknown_device_is_refused_with_those_present(name):
    with pytest.raises(ValueError, match=rf"device '{name}' is not on this machine, which has 'cpu'"):
        _native.index(name)


def test_what_is_no_device_is_refused():
    with pytest.raises(TypeError, match="device must be a string"):
        _native.index(0)


def test_a_gpu_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match="there is no GPU 99"):
        _native.plan("softmax", "float32", 99, ROWS)
