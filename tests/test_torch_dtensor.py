"""DTensors, split over meshes of two and of four processes, against torch's own functions on one."""

import pytest
from torch_tensors import F, classes, in_processes, normal, ours, torch

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)
tensors = pytest.importorskip("torch.distributed.tensor")
from maxsoftmax.torch import _memory as memory  # noqa: E402

ROWS, N = 6, 13
MESHES = {2: (2,), 4: (2, 2)}
SPLIT, BY_ROW, WHOLE = tensors.Shard(1), tensors.Shard(0), tensors.Replicate()
PLACEMENTS = {
    2: [(SPLIT,), (BY_ROW,), (WHOLE,)],
    4: [(BY_ROW, SPLIT), (WHOLE, SPLIT), (SPLIT, WHOLE), (SPLIT, BY_ROW), (BY_ROW, WHOLE)],
}
LOGITS, UPSTREAM, TARGET = normal(ROWS, N).detach(), normal(ROWS, N, seed=3).detach(), classes(ROWS, n=N)
TARGET[2] = -100


def process(rank, world, folder):
    """Computes everything on one rank, and compares it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    names = ("data", "model")[-len(MESHES[world]) :]
    mesh = dist.device_mesh.init_device_mesh("cpu", MESHES[world], mesh_dim_names=names)
    for placements in PLACEMENTS[world]:
        along(mesh, placements)
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                loss(mesh, placements, reduction, smoothing)
    compiled(mesh, PLACEMENTS[world][0])
    partial(mesh)
    if world == 4:
        refused(mesh)
    dist.destroy_process_group()


def compare(mine, theirs, x, leaf, placements):
    """Asserts that results and gradients are the same, and gradients placed as logits are."""
    torch.testing.assert_close(mine.full_tensor(), theirs.detach())
    assert x.grad.placements == placements
    torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)


def leaves(mesh, placements):
    """Returns logits that are split, and whole ones, with gradients."""
    x = tensors.distribute_tensor(LOGITS, mesh, placements).requires_grad_()
    return x, LOGITS.clone().requires_grad_()


def along(mesh, placements):
    for name in ("softmax", "log_softmax"):
        x, leaf = leaves(mesh, placements)
        y, want = getattr(ours, name)(x, -1), getattr(torch, name)(leaf, -1)
        assert y.placements == placements
        assert y.shape == LOGITS.shape
        assert y.to_local().shape == x.to_local().shape
        y.backward(tensors.distribute_tensor(UPSTREAM, mesh, placements))
        want.backward(UPSTREAM)
        compare(y, want, x, leaf, placements)


def loss(mesh, placements, reduction, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    for target in (TARGET, tensors.distribute_tensor(TARGET, mesh, [*[WHOLE] * (mesh.ndim - 1), BY_ROW])):
        x, leaf = leaves(mesh, placements)
        y, want = ours.cross_entropy(x, target, **options), F.cross_entropy(leaf, TARGET, **options)
        if reduction != "none":
            assert all(placement.is_replicate() for placement in y.placements)
        y.sum().backward()
        want.sum().backward()
        compare(y, want, x, leaf, placements)


def compiled(mesh, placements):
    """Compares a loss that is compiled as one graph."""
    x, leaf = leaves(mesh, placements)
    y = torch.compile(lambda x: ours.cross_entropy(x * 2, TARGET) * 3, backend="aot_eager", fullgraph=True)(x)
    want = F.cross_entropy(leaf * 2, TARGET) * 3
    y.backward()
    want.backward()
    compare(y, want, x, leaf, placements)


def partial(mesh):
    """Compares logits that are sums over a mesh."""
    x = tensors.DTensor.from_local(LOGITS / mesh.size(), mesh, [tensors.Partial()] * mesh.ndim, run_check=False)
    torch.testing.assert_close(ours.softmax(x, -1).full_tensor(), LOGITS.softmax(-1))


def refused(mesh):
    x = tensors.distribute_tensor(LOGITS, mesh, [SPLIT, SPLIT])
    with pytest.raises(ValueError, match=r"x has dimension 1 split by dimensions \[0, 1\] of its mesh"):
        ours.softmax(x, -1)


@pytest.mark.parametrize("world", MESHES)
def test_results_and_gradients_are_those_of_one_process(world, tmp_path):
    # Libraries are built before, not by processes that wait for each other.
    x = LOGITS.clone().requires_grad_()
    for name in ("softmax", "log_softmax"):
        getattr(ours, name)(x, -1).sum().backward()
    ours.cross_entropy(x, TARGET).backward()
    for name in ("statistics", "shard", "shard_loss"):
        memory.plan(name, LOGITS, (1, 1, 1))
    in_processes(process, world, world, str(tmp_path))
