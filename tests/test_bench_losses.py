"""The suite of losses without logits."""

import json

import pytest
from commands import fails
from maxsoftmax._bench import losses
from maxsoftmax._commands import cli

torch = pytest.importorskip("torch")

SHAPE = 96, 300, 32


@pytest.mark.parametrize("name", ["maxsoftmax.torch", "maxsoftmax", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_measured_is_right(name, dtype):
    if name == "maxsoftmax" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    found = losses.measure(name, SHAPE, dtype, "cpu")
    assert (found.status, found.note) == ("ok", "")
    assert 0 < found.min_s <= found.median_s
    assert found.gradient_error <= losses.LIMIT[dtype]


def test_what_is_wrong_is_told(monkeypatch):
    def halved(hidden, weight, target):
        def step():
            weight.grad = torch.ones_like(weight)
            return torch.nn.functional.cross_entropy(hidden @ weight.t(), target).detach()

        return step

    monkeypatch.setitem(losses.PROVIDERS, "torch", (halved, ("cpu",)))
    assert losses.measure("torch", SHAPE, "float32", "cpu").status == "wrong"


def test_a_provider_that_is_not_there_is_missing(monkeypatch):
    def absent(*given):
        raise ImportError("no such thing")

    monkeypatch.setitem(losses.PROVIDERS, "quack", (absent, ("cpu",)))
    found = losses.measure("quack", SHAPE, "float32", "cpu")
    assert (found.status, found.note, found.median_s) == ("missing", "no such thing", None)
    assert losses.measure("liger", SHAPE, "float32", "cpu").note == "not on a CPU"


def test_the_command_writes_records(tmp_path, capsys):
    path = tmp_path / "losses.json"
    arguments = ["--device=cpu", "--shape=96x300x32", "--providers=products,maxsoftmax.torch", f"--json={path}"]
    assert cli.main(["bench", "losses", *arguments]) == 0
    assert "linear_cross_entropy, forward and backward, 96×300×32 float32" in capsys.readouterr().out
    records = json.loads(path.read_text())["records"]
    assert [(r["provider"], r["status"]) for r in records] == [("products", "ok"), ("maxsoftmax.torch", "ok")]
    assert cli.main(["bench", "report", str(path)]) == 0
    assert "linear_cross_entropy, forward and backward, 96×300×32 float32" in capsys.readouterr().out
    assert cli.main(["bench", "report", str(path), "--markdown", "--plot", str(tmp_path / "chart.svg")]) == 0
    assert "| 96×300×32 float32 | " in capsys.readouterr().out
    assert "maxsoftmax.torch" in (tmp_path / "chart.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape=8x8"], "takes rows, classes and features, such as 512x50257x768"),
        (["--providers=numpy"], "provider 'numpy' does not exist: choose from products, maxsoftmax.torch"),
    ],
)
def test_what_is_not_there_is_refused(capsys, arguments, words):
    assert words in fails(capsys, "bench", "losses", "--device=cpu", *arguments)
