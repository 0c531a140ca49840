"""torch.nn.functional on the kernels of this package, for a while."""

import threading

import pytest
from torch_tensors import F, classes, close, normal, ours, torch, torch_device

NAMES = ("softmax", "log_softmax", "cross_entropy")


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


@pytest.fixture
def calls(monkeypatch):
    """The names of our functions, in the order in which they are called."""
    called = []
    for name in NAMES:
        function = getattr(ours, name)
        monkeypatch.setattr(
            ours, name, lambda *args, f=function, name=name, **kwargs: (called.append(name), f(*args, **kwargs))[1]
        )
    return called


def functions():
    return [getattr(F, name) for name in NAMES]


def test_modules_call_our_kernels(place, calls):
    x, target = normal(6, 5, device=place), classes(6, n=5, device=place)
    modules = (torch.nn.Softmax(-1), torch.nn.LogSoftmax(-1))
    expected = [module(x).detach() for module in modules]
    loss = torch.nn.CrossEntropyLoss(torch.ones(5, device=place), label_smoothing=0.1)(x, target)
    with ours.patch():
        for module, theirs in zip(modules, expected, strict=True):
            close(module(x).detach(), theirs)
        mine = torch.nn.CrossEntropyLoss(torch.ones(5, device=place), label_smoothing=0.1)(x, target)
        close(F.softmax(input=x, dim=0, dtype=torch.float64).detach(), x.detach().softmax(0, torch.float64))
    close(mine.detach(), loss.detach())
    assert calls == ["softmax", "log_softmax", "cross_entropy", "softmax"]


def test_what_was_there_comes_back():
    before = functions()
    with ours.patch():
        inside = functions()
        assert not set(inside) & set(before)
        with ours.patch():
            assert functions() == inside
        assert functions() == inside
    assert functions() == before
    with pytest.raises(KeyError), ours.patch():
        raise KeyError
    assert functions() == before


def test_it_decorates(calls):
    @ours.patch()
    def function(x):
        return F.softmax(x, -1)

    before = functions()
    for _ in range(2):
        function(torch.zeros(3))
    assert calls == ["softmax"] * 2
    assert functions() == before


def test_threads_that_leave_in_another_order():
    before, entered, left = functions(), threading.Event(), threading.Event()

    def other():
        with ours.patch():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with ours.patch():
        thread.start()
        entered.wait(10)
    assert functions() != before
    left.set()
    thread.join()
    assert functions() == before


def test_what_is_not_ours_is_torchs(calls):
    seen = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    x, before = torch.randn(3, 4), functions()
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with ours.patch():
        assert F.softmax(nested, -1).is_nested
        assert F.softmax(torch.arange(3), -1, dtype=torch.float32).dtype == torch.float32
        assert F.softmax(torch.empty(3, device="meta"), -1).is_meta
        assert type(F.log_softmax(x.as_subclass(Mine), -1)) is Mine
        assert type(F.cross_entropy(x.as_subclass(Mine), torch.arange(3))) is Mine
        torch.func.jvp(lambda x: F.softmax(x, -1), (x,), (x,))
        with pytest.raises(RuntimeError, match="softmax"):
            F.softmax(torch.arange(3), -1)
    assert before[1] in seen
    assert before[2] in seen
    assert not calls


def test_a_default_device_is_no_hindrance(calls):
    with ours.patch(), torch.device("meta"):
        close(F.softmax(torch.zeros(2, 2, device="cpu"), -1), torch.full((2, 2), 0.5, device="cpu"))
    assert calls == ["softmax"]


def test_no_dimension_is_chosen_with_a_warning(calls):
    with ours.patch(), pytest.warns(UserWarning, match="Implicit dimension choice for softmax") as warned:
        close(F.softmax(torch.zeros(3, 4)), torch.full((3, 4), 0.25))
    assert warned[0].filename == __file__
    assert calls == ["softmax"]


def test_compiled_functions_may_be_patched():
    torch.compiler.reset()
    x = normal(3, 4)
    with ours.patch():
        close(torch.compile(lambda x: F.softmax(x, -1), backend="aot_eager")(x).detach(), x.detach().softmax(-1))
