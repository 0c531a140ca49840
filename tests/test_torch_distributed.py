"""Rows that are split over processes of a CPU, or GPUs, against one process in float64.

All processes of a group are started once, compute all cases, and leave what they found in files.
"""

import contextlib
import datetime
import doctest
import math
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import contract
import ml_dtypes
import numpy as np
import pytest
from torch_tensors import F, classes, in_processes, needs_gpus, normal, torch

dist = pytest.importorskip("torch.distributed")
modes = pytest.importorskip("torch.utils._python_dispatch")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)
sharded_functions = pytest.importorskip("maxsoftmax.torch.distributed")
from maxsoftmax.torch import _exchange as exchange  # noqa: E402
from maxsoftmax.torch import _memory as memory  # noqa: E402
from maxsoftmax.torch import _sharded as sharded  # noqa: E402

LENGTHS = {2: [(5, 3), (0, 9), (700, 1300)], 3: [(4, 0, 6), (3, 3, 3)], 4: [(7, 0, 1, 5)]}
GROUPS = [
    *(pytest.param((world, "cpu"), id=str(world)) for world in LENGTHS),
    pytest.param((2, "cuda"), id="2-gpus", marks=pytest.mark.gpu),
]
"""How many processes there are, and where each computes."""

GATHERS = [name for name in ("all_gather_single", "all_gather_into_tensor", "all_gather") if hasattr(dist, name)]
OTHERS = ["all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_object", "barrier", "send", "recv"]
ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


class Case(NamedTuple):
    """A call, of the logits of all ranks."""

    name: str
    x: torch.Tensor
    lengths: tuple[int, ...]
    dim: int = -1
    target: Any = None
    options: Any = ()
    first: bool = False

    def shard(self, rank):
        part = self.x.split(self.lengths, self.dim)[rank].clone(memory_format=torch.preserve_format)
        return part.to(torch.get_default_device())

    def run(self, functions, x):
        if self.target is None:
            return getattr(functions, self.name)(x, self.dim)
        return functions.cross_entropy(x, self.target.to(x.device), **dict(self.options))


def all_cases(world):
    """Returns the cases of so many ranks, by name."""
    found = {}
    for lengths in LENGTHS[world]:
        n = sum(lengths)
        told = "+".join(map(str, lengths))
        for dtype in ALLOWED:
            kind = str(dtype).removeprefix("torch.")
            x = normal(9, n, dtype=dtype).detach()
            for name in ("softmax", "log_softmax", "logsumexp"):
                found[f"{name} {told} {kind}"] = Case(name, x, lengths)
            target = classes(9, n=n)
            target[2], target[4] = 0, n - 1
            for reduction in ("mean", "sum", "none"):
                for ignored, smoothing in ((-100, 0.0), (int(target[1]), 0.0), (0, 0.2), (-100, 1.0)):
                    options = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
                    name = f"cross_entropy {told} {kind} {reduction} {ignored} {smoothing}"
                    found[name] = Case("cross_entropy", x, lengths, 1, target, tuple(options.items()))
        for shape, dim in (((n, 4), 0), ((3, n, 4), 1), ((n,), 0), ((2, 3, n), -1)):
            for name in ("softmax", "log_softmax", "logsumexp"):
                found[f"{name} {told} along {dim} of {shape}"] = Case(name, normal(*shape).detach(), lengths, dim)
        for shape in ((n,), (3, n, 4), (2, n, 2, 3)):
            target = classes(*shape[:1] * (len(shape) > 1), *shape[2:], n=n, dtype=torch.int32)
            for smoothing in (0.0, 0.2):
                options = (("label_smoothing", smoothing),)
                case = Case("cross_entropy", normal(*shape).detach(), lengths, int(len(shape) > 1), target, options)
                found[f"cross_entropy {told} of {shape} {smoothing}"] = case
        far = normal(5, n).detach() + 3000
        target = classes(5, n=n)
        found[f"log_softmax {told} far"] = Case("log_softmax", far, lengths)
        found[f"cross_entropy {told} far"] = Case("cross_entropy", far, lengths, 1, target, (("label_smoothing", 0.3),))
        transposed = normal(n, 6).detach().t()
        found[f"softmax {told} transposed"] = Case("softmax", transposed, lengths)
        options = (("lengths", lengths), ("label_smoothing", 0.1))
        found[f"cross_entropy {told} lengths"] = Case("cross_entropy", far, lengths, 1, target, options)
    return found


@contextlib.contextmanager
def counted():
    """Counts collectives."""
    calls, originals = [], {}

    def counting(name, original):
        def call(*arguments, **options):
            calls.append(name)
            return original(*arguments, **options)

        return call

    for name in (*GATHERS, *OTHERS):
        originals[name] = getattr(dist, name)
        setattr(dist, name, counting(name, originals[name]))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Allocations(modes.TorchDispatchMode):
    """Keeps the memory of all that is computed."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.storages.append(x.untyped_storage())
        return result


def upstream(case):
    """Returns the gradient of a result of all ranks, in float64."""
    like = case.run(torch if case.target is None else Reference, case.x.double())
    return normal(*like.shape, dtype=torch.float64, seed=7, scale=1).detach()


class Reference:
    """Torch's own."""

    @staticmethod
    def cross_entropy(x, target, lengths=None, **options):
        return F.cross_entropy(x, target.long(), **options)


def computed(case, rank):
    """Returns a shard's result and gradient, and the collectives of both."""
    x = case.shard(rank).requires_grad_()
    dy = upstream(case)
    if case.name in ("softmax", "log_softmax"):
        dy = dy.split(case.lengths, case.dim)[rank]
    with counted() as forward:
        y = case.run(sharded_functions, x)
    with counted() as backward:
        (dx,) = torch.autograd.grad(y, x, dy.to(y))
    return {"y": y.detach(), "dx": dx, "forward": forward, "backward": backward, "strides": y.stride() == x.stride()}


def failure(function, *arguments, **options):
    """Returns what a call fails with."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def process(rank, world, kind, folder):
    """Computes all cases on one rank, on its GPU or the CPU."""
    torch.set_num_threads(1)
    backend, extras = "gloo", [again, rows, special, beside, nothing, compiled]
    if kind == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    else:
        extras += [refused, in_lists, in_groups]
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {name: computed(case, rank) for name, case in all_cases(world).items()}
    for extra in extras:
        found[extra.__name__] = extra(rank, world)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def again(rank, world):
    """Counts the gathers of a loss of lengths that the group has not had, and of the next ones."""
    lengths = tuple(40 + 3 * each for each in range(world))
    counts = []
    for shift in (0, 0, 1, 1):
        x, target = torch.zeros(2, lengths[rank] + shift * (rank == 0)), torch.tensor([0, sum(lengths) - 1])
        with counted() as calls:
            sharded_functions.cross_entropy(x, target)
        counts.append(len(calls))
    return counts


def rows(rank, world):
    """Returns results for all rows, and for some alone."""
    case = Case("", normal(40, 100 * world).detach(), (100,) * world)
    x = case.shard(rank)
    target = classes(40, n=100 * world, device=x.device)
    results = []
    for part in (slice(None), slice(11, 14)):
        probabilities = sharded_functions.softmax(x[part])
        logarithms = sharded_functions.log_softmax(x[part])
        sums = sharded_functions.logsumexp(x[part])
        losses = sharded_functions.cross_entropy(x[part], target[part], reduction="none", label_smoothing=0.1)
        results.append([probabilities, logarithms, sums, losses])
    return [(whole[11:14], some) for whole, some in zip(*results, strict=True)]


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf])


def special_logits(world):
    """Returns rows with each special value at each place, of nothing but -inf, with NaN beside -inf, and usual ones."""
    x = normal(3 * 2 * world + 3, 2 * world).detach()
    for place in range(2 * world):
        x[3 * place : 3 * place + 3, place] = SPECIAL
    x[-3], x[-2], x[-2, 0] = -math.inf, -math.inf, math.nan
    return x


def special(rank, world):
    x = Case("", special_logits(world), (2,) * world).shard(rank).requires_grad_()
    target = torch.zeros(len(x), dtype=torch.int64)
    found = {name: getattr(sharded_functions, name)(x) for name in ("softmax", "log_softmax", "logsumexp")}
    for smoothing in (0.0, 0.2):
        found[f"loss {smoothing}"] = sharded_functions.cross_entropy(
            x, target, reduction="none", label_smoothing=smoothing
        )
    return {name: y.detach() for name, y in found.items()}


def beside(rank, world):
    """Returns the most memory that a call or its gradient takes beside arguments and results, and that of a shard."""
    x = Case("", normal(64, 512 * world, dtype=torch.bfloat16).detach(), (512,) * world).shard(rank)
    target, largest = classes(64, n=512 * world, device=x.device), {}
    group = exchange.group_of(None)

    def softmax(log):
        y = sharded.softmax(x, log, group)
        return [x, y, sharded.softmax_backward(y, x, log, group)]

    def logsumexp():
        y, pairs = sharded.logsumexp(x, group)
        return [x, y, sharded.logsumexp_backward(x, pairs, y)]

    def cross_entropy():
        y, pairs, own, total = sharded.cross_entropy(x, target, -100, 0.1, "mean", None, group)
        return [x, y, sharded.cross_entropy_backward(x, pairs, own, y, total, 0.1, "mean")]

    for function, *arguments in ((softmax, False), (softmax, True), (logsumexp,), (cross_entropy,)):
        # Operators of torch hide from a mode what they do.
        with Allocations() as made:
            given = {t.untyped_storage().data_ptr() for t in function(*arguments)}
        largest[function.__name__] = max(s.nbytes() for s in made.storages if s.data_ptr() not in given)
    return {"largest": largest, "shard": x.nbytes}


def refused(rank, world):
    """Returns what the ranks fail with where all see it."""
    x, target = torch.zeros(2, 3), torch.tensor([0, 1])
    loss = sharded_functions.cross_entropy
    return [
        failure(loss, x, torch.tensor([0, 3 * world])),
        failure(loss, x, torch.tensor([-1, 0])),
        failure(loss, x, target, ignore_index=-100 - rank),
        failure(loss, x, target, label_smoothing=0.1 + 0.1 * rank),
        failure(loss, x.to([torch.float32, torch.bfloat16][rank % 2]), target),
        failure(loss, x[:, : 3 - rank % 2], target, lengths=tuple(3 - r % 2 for r in range(world))),
        failure(loss, x, target, lengths=tuple(3 + (r != rank) for r in range(world))),
        failure(loss, x, target, lengths=(3,)),
        failure(loss, x, target, lengths=(3, -1, *[3] * (world - 2))),
        failure(loss, x, target, lengths=3),
    ]


def nothing(rank, world):
    """Returns results without rows, and without classes."""
    none = torch.zeros(0, dtype=torch.int64)
    return {
        "softmax": sharded_functions.softmax(torch.zeros(0, 3)).shape,
        "logsumexp": sharded_functions.logsumexp(torch.zeros(2, 0)),
        "mean": sharded_functions.cross_entropy(torch.zeros(0, 3), none),
        "sum": sharded_functions.cross_entropy(torch.zeros(0, 3), none, reduction="sum"),
        "ignored": sharded_functions.cross_entropy(torch.zeros(2, 0), torch.tensor([-100, -100]), reduction="none"),
    }


def in_lists(rank, world):
    """Returns a result of a backend that gathers into lists."""
    x = normal(4, 5 * world).detach()[:, 5 * rank : 5 * rank + 5]
    usual = sharded_functions.softmax(x)
    exchange.IN_LISTS.add("gloo")
    with counted() as calls:
        listed = sharded_functions.softmax(x)
    exchange.IN_LISTS.remove("gloo")
    return usual, listed, calls


def in_groups(rank, world):
    """Returns a loss and its gradient in two groups, each with rows of its own, and those of all rows on one process.

    Ranks 0 and 2 have the classes of the first half of the rows, 1 and 3 those of the second; 0 and 1 have the same
    classes, as have 2 and 3.
    """
    if world < 4:
        return None
    models, data = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([(0, 2), (1, 3)], [(0, 1), (2, 3)]))
    hidden, weight, target = normal(8, 5).detach(), normal(10, 5, seed=9).detach(), classes(8, n=10)
    mine, part = slice(4 * (rank % 2), 4 * (rank % 2) + 4), weight.split((4, 6))[rank // 2].clone().requires_grad_()
    group = models[rank % 2]
    loss = sharded_functions.cross_entropy(hidden[mine] @ part.T, target[mine], group=group)
    loss.backward()
    for x in (loss.detach(), part.grad):
        dist.all_reduce(x, group=data[rank // 2])
    weight.requires_grad_()
    want = F.cross_entropy(hidden @ weight.T, target)
    want.backward()
    outside = failure(sharded_functions.softmax, hidden, group=models[1 - rank % 2])
    found = loss.detach() / 2, part.grad / 2, want.detach(), weight.grad.split((4, 6))[rank // 2]
    return [*found, outside]


def compiled(rank, world):
    """Returns results and gradients, compiled as one graph, and not, on two ranks."""
    if world > 2:
        return None
    x = normal(4, 6, seed=rank, device=torch.get_default_device())
    target, group = torch.tensor([0, 5, 6, 11]), dist.new_group([0, 1])

    def functions():
        for name in ("softmax", "log_softmax", "logsumexp"):
            yield lambda x, name=name: getattr(sharded_functions, name)(x * 2) * x.sum()
        for options in ({}, {"group": group, "label_smoothing": 0.1}, {"lengths": [6, 6], "reduction": "none"}):
            yield lambda x, options=options: sharded_functions.cross_entropy(x * 2, target, **options) * 3

    found = []
    for function in functions():
        results = [f(x) for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True))]
        found.append([(y.detach(), *torch.autograd.grad(y.sum(), x)) for y in results])
    return found


@pytest.fixture(scope="session", params=GROUPS)
def ranks(request, tmp_path_factory):
    """What each rank found."""
    (world, kind), folder = request.param, tmp_path_factory.mktemp("ranks")
    if kind == "cuda":
        needs_gpus(world)
    # Their libraries are built before, not by processes that wait for each other.
    for dtype in ALLOWED:
        for name in ("statistics", "shard", "shard_loss"):
            memory.plan(name, torch.zeros(1, dtype=dtype, device=kind), (1, 1, 1))
    in_processes(process, world, world, kind, str(folder))
    return [torch.load(folder / str(rank), map_location="cpu", weights_only=False) for rank in range(world)]


def numpy_of(x):
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()


def close(mine, theirs, dtype):
    scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
    torch.testing.assert_close(
        mine.double(), theirs.double(), rtol=ALLOWED[dtype], atol=ALLOWED[dtype] * scale, equal_nan=True
    )


def test_results_and_gradients_are_those_of_one_process(ranks):
    for name, case in all_cases(len(ranks)).items():
        found, x = [each[name] for each in ranks], case.x.double().clone().requires_grad_()
        y = case.run(torch if case.target is None else Reference, x)
        (dx,) = torch.autograd.grad(y, x, upstream(case).to(case.x.dtype).double())
        if case.name in ("softmax", "log_softmax"):
            mine = torch.cat([each["y"] for each in found], case.dim)
            assert all(each["strides"] for each in found), name
        else:
            mine = found[0]["y"]
        assert mine.dtype is case.x.dtype, name
        assert mine.shape == y.shape, name
        try:
            if case.name == "softmax":
                contract.check(numpy_of(mine), numpy_of(case.x), case.dim)
            close(mine, y.detach(), case.x.dtype)
            close(torch.cat([each["dx"] for each in found], case.dim), dx, case.x.dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_what_all_ranks_have_has_the_same_bits(ranks):
    for name, case in all_cases(len(ranks)).items():
        if case.name not in ("softmax", "log_softmax"):
            assert all(each[name]["y"].equal(ranks[0][name]["y"]) for each in ranks), name
    for name in ("logsumexp", "loss 0.0", "loss 0.2"):
        bits = [each["special"][name].view(torch.int32) for each in ranks]
        assert all(each.equal(bits[0]) for each in bits), name


def test_one_collective_forward_and_one_back_for_softmax_alone(ranks):
    seen = set()
    for name, case in all_cases(len(ranks)).items():
        for each in ranks:
            # Lengths that the group has not had take another one, which a test of its own counts.
            is_new = case.name == "cross_entropy" and case.lengths not in seen and "lengths" not in dict(case.options)
            assert len(each[name]["forward"]) == 1 or is_new, name
            assert len(each[name]["backward"]) == (case.name in ("softmax", "log_softmax")), name
            assert set(each[name]["forward"] + each[name]["backward"]) <= {GATHERS[0]}, name
        if case.name == "cross_entropy":
            seen.add(case.lengths)


def test_new_lengths_are_learned_by_a_second_gather(ranks):
    assert [each["again"] for each in ranks] == [[2, 1, 2, 1]] * len(ranks)


def test_a_row_has_its_own_bits(ranks):
    for each in ranks:
        for whole, some in each["rows"]:
            assert whole.equal(some)


def test_special_values(ranks):
    x = special_logits(len(ranks)).double()
    found = [each["special"] for each in ranks]
    with np.errstate(invalid="ignore"):
        for name in ("softmax", "log_softmax"):
            mine = torch.cat([each[name] for each in found], -1)
            close(mine, getattr(torch, name)(x, -1), torch.float32)
    alone = [sharded._pairs(x[i : i + 1].float()) for i in range(len(x))]
    sums = torch.stack([pair[0, 0] + pair[0, 1].log() for pair in alone])
    sums = torch.where(torch.isposinf(x).any(-1), math.inf, sums)
    sums[-3] = -math.inf
    close(found[0]["logsumexp"], sums, torch.float32)
    target = torch.zeros(len(x), dtype=torch.int64)
    from maxsoftmax import torch as ours

    for smoothing in (0.0, 0.2):
        loss = ours.cross_entropy(x.float(), target, reduction="none", label_smoothing=smoothing)
        close(found[0][f"loss {smoothing}"], loss, torch.float32)


def test_nothing_else_is_of_the_size_of_a_shard(ranks):
    for each in ranks:
        for name, most in each["beside"]["largest"].items():
            # Numbers of rows, of all ranks.
            assert 0 < most < each["beside"]["shard"] / 4, name


def test_what_cannot_be_is_refused_on_all_ranks(ranks):
    if "refused" not in ranks[0]:
        pytest.skip("a host does not wait for its GPU")
    for each in ranks:
        (first, below, ignored, smoothed, dtypes, lengths, other, few, negative, number) = each["refused"]
        n = 3 * len(ranks)
        assert first == (
            "TargetError",
            f"target[1] is {n}, which is neither a class from 0 to {n - 1} of all shards nor ignore_index -100",
        )
        assert below[1].startswith("target[0] is -1")
        for error in (ignored, smoothed, dtypes, other):
            assert error[0] == "ValueError"
            assert "all of them have to be the same" in error[1]
        assert lengths is None
        assert few[0] == negative[0] == "ValueError"
        assert number == ("TypeError", "lengths must be an integer for each rank, not 3")


def test_without_rows_and_without_classes(ranks):
    for each in ranks:
        found = each["nothing"]
        assert found["softmax"] == (0, 3)
        assert found["logsumexp"].tolist() == [-math.inf] * 2
        assert found["mean"].isnan()
        assert found["sum"] == 0
        assert found["ignored"].tolist() == [0, 0]


def test_a_backend_may_gather_into_lists(ranks):
    if "in_lists" not in ranks[0]:
        pytest.skip("NCCL gathers into one tensor")
    for each in ranks:
        usual, listed, calls = each["in_lists"]
        assert usual.equal(listed)
        assert calls == ["all_gather"]


def test_groups_of_classes_inside_groups_of_rows(ranks):
    for each in ranks:
        if each.get("in_groups"):
            loss, gradient, want, wanted, outside = each["in_groups"]
            close(loss, want, torch.float32)
            close(gradient, wanted, torch.float32)
            assert outside == ("ValueError", "group does not have this process among its ranks")


def test_compiled_without_a_break(ranks):
    for each in ranks:
        for plain, compiled in each["compiled"] or []:
            assert all(a.equal(b) for a, b in zip(plain, compiled, strict=True))


def failing(rank, folder):
    """Keeps what ranks fail with that send different numbers of bytes, and then what is left of them when one dies."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timeout)
    target = torch.zeros(2 + rank, dtype=torch.int64)
    found = [
        failure(sharded_functions.softmax, torch.zeros(2 + rank, 3)),
        failure(sharded_functions.cross_entropy, torch.zeros(2 + rank, 3), target),
        failure(
            sharded_functions.cross_entropy, torch.zeros(2, 3, dtype=[torch.float32, torch.float64][rank]), target[:2]
        ),
        failure(sharded_functions.softmax, torch.zeros(2, 3)),
    ]
    torch.save(found, f"{folder}/{rank}")
    if rank == 0:
        torch.save(failure(sharded_functions.softmax, torch.zeros(2, 3)), f"{folder}/alone")


def test_what_the_group_itself_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    in_processes(failing, 2, str(tmp_path))
    for rank in range(2):
        *different, same = torch.load(tmp_path / str(rank), weights_only=False)
        for error, text in different:
            assert error == "RuntimeError"
            assert "shape" in text
        assert same is None
    # Nobody waits for who has gone.
    assert torch.load(tmp_path / "alone", weights_only=False)[0] == "RuntimeError"


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "shard must be a torch.Tensor, not a list", ([1.0],)),
        (TypeError, "shard has dtype int64, but it has to be", (torch.zeros(2, dtype=torch.int64),)),
        (ValueError, "shard has rank 0", (torch.zeros(()),)),
        (TypeError, "dim must be an integer, not None", (torch.zeros(2), None)),
        (IndexError, "dim 1 is out of bounds", (torch.zeros(2), 1)),
        (RuntimeError, "there is no process group", (torch.zeros(2),)),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_what_is_refused_by_one_rank(name, error, text, arguments):
    with pytest.raises(error, match=text):
        getattr(sharded_functions, name)(*arguments)


@pytest.mark.parametrize(
    ("error", "text", "target", "options"),
    [
        (TypeError, "target must be a torch.Tensor, not a list", [0, 1], {}),
        (TypeError, "target has dtype float32", torch.zeros(2), {}),
        (ValueError, "target has shape", torch.zeros(3, dtype=torch.int64), {}),
        (ValueError, "reduction 'max' does not exist", torch.tensor([0, 1]), {"reduction": "max"}),
        (ValueError, "label_smoothing 2 is not from 0 to 1", torch.tensor([0, 1]), {"label_smoothing": 2}),
        (TypeError, "ignore_index must be an integer", torch.tensor([0, 1]), {"ignore_index": 0.5}),
        (RuntimeError, "there is no process group", torch.tensor([0, 1]), {}),
    ],
)
def test_losses_that_are_refused_by_one_rank(error, text, target, options):
    with pytest.raises(error, match=text):
        sharded_functions.cross_entropy(torch.zeros(2, 3), target, **options)


def test_the_example_of_the_module():
    parsed = doctest.DocTestParser().get_doctest(sharded_functions.__doc__, {}, "distributed", None, 0)
    assert parsed.examples
    assert doctest.DocTestRunner().run(parsed).failed == 0


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_a_head_that_is_split_has_the_losses_of_one_that_is_not(root, backend):
    if backend == "nccl":
        needs_gpus(2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = str(root / "examples" / "tensor_parallel.py")
    found = subprocess.run(
        [*command, program, "--backend", backend],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert found.returncode == 0, found.stderr
    first, second = found.stdout.splitlines()
    before, after = (float(each) for each in re.findall(r"\d+\.\d+", first))
    assert first.startswith("2 ranks")
    assert after < before - 0.5
    assert float(second.split()[-1]) < 5e-6
