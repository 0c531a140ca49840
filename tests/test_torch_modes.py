"""torch.compile, torch.func, autocast, modes, graphs, streams, threads and forks around the functions for torch."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch_tensors import ALONG, F, classes, close, needs_gpus, normal, ours, probabilities, same, torch, torch_device

TorchFunctionMode = torch.overrides.TorchFunctionMode
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode

OPERATORS = ("softmax", "log_softmax", "cross_entropy")
TARGET = torch.tensor([0, 4, 1])


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


def together(softmax, log_softmax, cross_entropy):
    """Returns a function that calls all of them."""
    return lambda x, t: cross_entropy(x * 2, t, label_smoothing=0.1) + (softmax(x, 1) * log_softmax(x, 1)).mean()


MINE = together(ours.softmax, ours.log_softmax, ours.cross_entropy)
THEIRS = together(torch.softmax, torch.log_softmax, F.cross_entropy)


# torch.compile


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_keep_the_operators(place, dynamic):
    kept = []

    def backend(graph, inputs):
        kept.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(MINE, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (6, 8):
        target = classes(rows, n=10, device=place)
        same(lambda x, t=target: compiled(x, t), lambda x, t=target: THEIRS(x, t), normal(rows, 10, device=place))
    for name in OPERATORS:
        assert f"maxsoftmax.{name}.default" in " ".join(kept)


CALLS = {
    "the last": lambda x, t: ours.softmax(x),
    "dtype": lambda x, t: ours.log_softmax(x, 0, torch.float64),
    "none": lambda x, t: ours.cross_entropy(x, t, reduction="none"),
    "weights": lambda x, t: ours.cross_entropy(x, t, x.new_ones(10), label_smoothing=0.1),
    "probabilities": lambda x, t: ours.cross_entropy(x, x.softmax(1)),
    "transposed": lambda x, t: ours.softmax(x.t() * 2, 0),
    "steps": lambda x, t: ours.log_softmax(x[:, ::2], 0),
    "small targets": lambda x, t: ours.cross_entropy(x, t.int()),
    "autocast": lambda x, t: autocast(ours.cross_entropy, x, t),
}


def autocast(function, *arguments):
    with torch.autocast(arguments[0].device.type, dtype=torch.bfloat16):
        return function(*arguments)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_call_is_compiled_whole(place, name, backend):
    torch.compiler.reset()
    target = classes(6, n=10, device=place)
    x = normal(6, 10, dtype=torch.bfloat16 if name == "autocast" else torch.float32, device=place)
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=backend)
    same(lambda x: compiled(x, target), lambda x: CALLS[name](x, target), x)


@pytest.mark.gpu
def test_compiled_functions_are_replayed_as_graphs():
    torch.compiler.reset()
    compiled = torch.compile(MINE, fullgraph=True, mode="reduce-overhead")
    target = classes(64, n=1000, device="cuda")
    for seed in range(5):
        x = normal(64, 1000, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        same(lambda x: compiled(x, target).clone(), lambda x: THEIRS(x, target), x)


# torch.func, and derivatives in batches


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("place_of_batch", [0, 1, -1])
def test_batches_along_a_dimension(place, name, place_of_batch):
    mine, theirs = ALONG[name]
    x = normal(3, 4, 5, device=place).detach()
    for dim in (0, 1, -1):
        close(*(torch.func.vmap(lambda x, f=f, d=dim: f(x, d), place_of_batch)(x) for f in (mine, theirs)))
    scalars = normal(4, device=place).detach()
    close(torch.func.vmap(lambda x: mine(x, 0))(scalars), torch.func.vmap(lambda x: theirs(x, 0))(scalars))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("shape", "of_target"), [((3, 9), (3,)), ((3, 4, 9), (3, 4)), ((3, 2, 9, 4), (3, 2, 4))])
def test_batches_of_losses_and_their_gradients(place, reduction, shape, of_target):
    x, target = normal(*shape, device=place).detach(), classes(*of_target, n=9, device=place)
    if target.ndim > 1:
        target[0, 0] = -100
    for what in (
        lambda f: lambda x, t: f(x, t, reduction=reduction, label_smoothing=0.1),
        lambda f: torch.func.grad(lambda x, t: f(x, t, reduction=reduction).sum()),
    ):
        close(*(torch.func.vmap(what(f))(x, target) for f in (ours.cross_entropy, F.cross_entropy)))
    for dims in ((0, None), (None, 0)):
        tensors = [t if place is not None else t[0] for t, place in zip((x, target), dims, strict=True)]
        close(
            *(
                torch.func.vmap(lambda x, t, f=f: f(x, t, reduction=reduction), dims)(*tensors)
                for f in (ours.cross_entropy, F.cross_entropy)
            )
        )


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_transforms(place, transform, name):
    x = normal(3, 5, dtype=torch.float64, device=place).detach()
    target = TARGET.to(place)
    mine, theirs = (
        (lambda x, f=f: f(x, target)) if name == "cross_entropy" else (lambda x, f=f: f(x, 0))
        for f in (getattr(ours, name), getattr(F, name))
    )
    torch.testing.assert_close(*(getattr(torch.func, transform)(f)(x) for f in (mine, theirs)))


@pytest.mark.parametrize("name", ALONG)
def test_dual_numbers(place, name):
    forward = torch.autograd.forward_ad
    x, t = normal(3, 5, device=place).detach(), normal(3, 5, seed=1, device=place).detach()
    with forward.dual_level():
        tangents = [forward.unpack_dual(f(forward.make_dual(x, t), -1)).tangent for f in ALONG[name]]
    close(*tangents)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_batches():
    x = normal(3, 5, dtype=torch.float64)
    for f in (ours.softmax, ours.log_softmax, lambda x: ours.cross_entropy(x, TARGET, reduction="none")):
        assert torch.autograd.gradcheck(f, x, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(f, x, check_batched_grad=True)


# Modes, fakes and traces


def test_modes_see_operators():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    x = torch.randn(3, 5)
    for mode in (Functions(), Dispatches()):
        seen.clear()
        with mode:
            close(ours.softmax(x), x.softmax(-1))
        assert "maxsoftmax.softmax.default" in seen


def test_a_default_device_changes_nothing(place):
    x = normal(3, 5, device=place)
    with torch.device("meta"):
        close(ours.softmax(x).detach(), x.detach().softmax(-1))


def test_fakes_and_traces():
    x = torch.randn(5, 3).t()
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: ours.softmax(x, -1))(x)
    assert "maxsoftmax.softmax.default" in graph.code
    close(graph(x), x.softmax(-1))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert ours.softmax(fake).stride() == x.stride()
        assert ours.cross_entropy(fake, torch.zeros(3, dtype=torch.int64), reduction="none").shape == (3,)


def test_subclasses_see_operators():
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs)

    y = ours.softmax(torch.randn(3, 5).as_subclass(Mine))
    assert type(y) is Mine


# Autocast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(place, dtype, low):
    x, target = normal(6, 5, dtype=dtype, device=place), classes(6, n=5, device=place)
    shares, weight = probabilities(6, 5, dtype=dtype, device=place), torch.ones(5, dtype=dtype, device=place)
    with torch.autocast(place, dtype=low):
        for mine, theirs in ALONG.values():
            same(lambda x, f=mine: f(x, -1), lambda x, f=theirs: f(x, -1), x)
            assert mine(x, -1, torch.float64).dtype == torch.float64
        for t, options in (
            (target, {}),
            (target, {"label_smoothing": 0.1, "reduction": "none"}),
            (target, {"weight": weight}),
            (shares, {}),
            (shares, {"weight": weight}),
        ):
            mine, theirs = (f(x, t, **options) for f in (ours.cross_entropy, F.cross_entropy))
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


# Threads, forks, streams and graphs


def test_threads(place):
    """Many shapes at once, each for the first time in some thread."""
    barrier = threading.Barrier(4)

    def work(seed):
        barrier.wait()
        for n in range(1, 60):
            x = normal(3, n, seed=seed, device=place)
            same(ours.softmax, lambda x: torch.softmax(x, -1), x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def _in_a_fork(connection):
    x = torch.arange(12.0).view(3, 4)
    connection.send(ours.softmax(x).sum(1).tolist())


def test_a_fork_has_its_own_calls():
    ours.softmax(torch.arange(12.0).view(3, 4))
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(its,))
    process.start()
    try:
        assert mine.poll(60)
        assert mine.recv() == pytest.approx([1, 1, 1])
    finally:
        process.kill()
        process.join()


@pytest.mark.gpu
def test_work_is_done_in_the_order_of_the_current_stream():
    """A kernel reads what a slow one before it on torch's stream wrote, and is read by one after it, unsynchronized."""
    expected = torch.softmax(torch.ones(512, 4096), -1).sum().item() * 2
    stream = torch.cuda.Stream()
    ours.softmax(torch.ones(2, 2, device="cuda"))
    for _ in range(20):
        with torch.cuda.stream(stream):
            x = torch.zeros(512, 4096, device="cuda")
            torch.cuda._sleep(10_000_000)
            x += 1
            y = ours.softmax(x)
            total = (y * 2).sum()
            # What was let go of must not be given to others before it has been read.
            del x, y
        ours.softmax(torch.randn(512, 4096, device="cuda"))
        stream.synchronize()
        assert total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1000), (4, 150_000), (1, 1_000_000)])
def test_a_cuda_graph_captures_a_step_of_training(shape):
    x, target = normal(*shape, device="cuda"), classes(shape[0], n=shape[1], device="cuda")

    def step():
        loss = ours.cross_entropy(x, target) + ours.softmax(x).square().sum()
        return loss, *torch.autograd.grad(loss, x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(normal(*shape, seed=seed))
        graph.replay()
        for mine, expected in zip(results, step(), strict=True):
            close(mine.detach(), expected.detach())


@pytest.mark.gpu
def test_the_host_does_not_wait():
    x, target = normal(256, 4096, device="cuda"), classes(256, n=4096, device="cuda")
    ours.cross_entropy(x, target).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        ours.cross_entropy(x, target).backward()
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_tensor_is_computed_on_its_own_gpu():
    needs_gpus(2)
    x = normal(40, 500, device="cuda:1")
    assert torch.cuda.current_device() == 0
    same(ours.softmax, lambda x: torch.softmax(x, -1), x)
    assert torch.cuda.current_device() == 0
