"""The suite of rows that are split over processes."""

import json

import pytest
from commands import fails
from maxsoftmax._bench import sharded, sharded_ranks
from maxsoftmax._commands import cli

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

CASES = [("cross_entropy", "float32", (12, 301)), ("log_softmax", "bfloat16", (7, 301))]


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/file", rank=0, world_size=1)
    yield torch.device("cpu")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["maxsoftmax", "megatron", "gather", "loss_parallel"])
def test_what_is_measured_is_right(name, alone):
    found = sharded_ranks.measure(name, *CASES[0], alone)
    assert found["status"] == "ok"
    assert 0 < found["min_s"] <= found["median_s"]
    if name == "loss_parallel":
        with pytest.raises(ImportError, match="has the loss only"):
            sharded_ranks.measure(name, *CASES[1], alone)
    else:
        assert sharded_ranks.measure(name, *CASES[1], alone)["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maxsoftmax", "megatron", "gather", "loss_parallel"])
def test_what_three_processes_measure_is_right(name):
    found = sharded.measured(name, 3, CASES, "cpu")
    assert [m.status for m in found] == ["ok", "missing" if name == "loss_parallel" else "ok"], found


def test_what_is_wrong_is_told(monkeypatch, alone):
    def halved(op, shard, target, lengths):
        def step():
            shard.grad = shard.detach().softmax(1) / len(shard)
            return torch.nn.functional.cross_entropy(shard.detach(), target)

        return step

    monkeypatch.setitem(sharded_ranks.PROVIDERS, "megatron", halved)
    assert sharded_ranks.measure("megatron", *CASES[0], alone)["status"] == "wrong"


def test_a_provider_that_fails_takes_nobody_with_it():
    (found,) = sharded.measured("no such provider", 1, CASES[:1], "cpu")
    assert (found.status, found.median_s) == ("failed", None)
    assert "no such provider" in found.note


def test_the_command_writes_records(tmp_path, capsys):
    path = tmp_path / "sharded.json"
    arguments = ["--device=cpu", "--processes=2", "--shape=12x301", "--providers=megatron"]
    assert cli.main(["bench", "sharded", *arguments, f"--json={path}"]) == 0
    assert "cross_entropy, forward and backward, 12×301 float32" in capsys.readouterr().out
    records = json.loads(path.read_text())["records"]
    known = [(r["provider"], r["processes"], r["status"]) for r in records]
    assert known == [("megatron", 1, "ok"), ("megatron", 2, "ok")]
    assert cli.main(["bench", "report", str(path), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| | provider | 1 process | 2 processes |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sharded", "--shape=8x8x8"], "takes rows and classes, such as 512x50257"),
        (["sharded", "--providers=numpy"], "provider 'numpy' does not exist: choose from maxsoftmax, maxsoftmax.ops"),
        (["sharded", "--processes=0"], "--processes 0: at least 1"),
        (["sharded", "--op=softmax_backward"], "suite 'sharded' does not time softmax_backward"),
        (["losses", "--processes=2"], "--processes 2: for suite 'sharded'"),
    ],
)
def test_what_is_not_there_is_refused(capsys, arguments, words):
    assert words in fails(capsys, "bench", *arguments, "--device=cpu")
