import json
import re
import shlex
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from commands import fails, misused
from maxsoftmax._bench import chart
from maxsoftmax._commands import cli, network, train
from maxsoftmax._graph import runtime


def start(task, seed, device):
    return train.TASKS[task](seed).training(seed, runtime.device(device))


def loss(weights, x, target):
    """Returns the mean cross entropy in float64."""
    logits = np.maximum(x @ weights[0] + weights[1], 0) @ weights[2] + weights[3]
    highest = logits.max(axis=1)
    sums = np.exp(logits - highest[:, None]).sum(axis=1)
    return np.mean(highest + np.log(sums) - logits[np.arange(len(x)), target])


@pytest.fixture(scope="session")
def first_step():
    """The published task, its first weights, the loss with them, and the gradients that Adam saw in its first step.

    On a CPU: on a GPU MAX multiplies matrices in TF32, which has 11 bits.
    """
    training = start("sign", 3, "cpu")
    weights = training.weights
    found, _ = training.steps(1)
    gradients = [moment / (1 - network.BETAS[0]) for moment in training.moments]
    return train.sign(3).learn, weights, found.loss, gradients


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fifteen_steps_bring_the_loss_below_a_hundredth(device, seed):
    found = list(start("sign", seed, device).steps(15))
    assert len(found) == 16
    assert found[0].loss > 0.5
    assert found[-1].loss < 0.01
    # Of samples it has not seen it knows most: 256 do not fix 24 features.
    assert found[-1].right > 0.8


def test_a_seed_gives_the_same_bits_and_another_one_does_not(device):
    first, again, other = (list(start("sign", seed, device).steps(2)) for seed in (5, 5, 6))
    assert first == again
    assert first[0].loss != other[0].loss


def test_the_loss_is_that_of_the_weights(first_step):
    (x, target), weights, found, _ = first_step
    assert found == pytest.approx(loss(weights, x.astype(np.float64), target), rel=1e-5)


@pytest.mark.parametrize("layer", range(4))
def test_gradients_are_central_differences(first_step, layer):
    (x, target), weights, _, gradients = first_step
    x, wide = x.astype(np.float64), [w.astype(np.float64) for w in weights]
    places = np.random.default_rng(layer).integers(wide[layer].size, size=40)
    for place in places:
        sides = []
        for step in (1e-6, -1e-6):
            moved = [w.copy() for w in wide]
            moved[layer].flat[place] += step
            sides.append(loss(moved, x, target))
        assert gradients[layer].flat[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-5)


def test_gradients_and_weights_are_torchs(first_step):
    torch = pytest.importorskip("torch")
    (x, target), weights, _, gradients = first_step
    theirs = [torch.tensor(w, requires_grad=True) for w in weights]
    hidden = torch.relu(torch.tensor(x) @ theirs[0] + theirs[1])
    torch.nn.functional.cross_entropy(hidden @ theirs[2] + theirs[3], torch.tensor(target)).backward()
    for ours, weight in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(ours, weight.grad.numpy(), atol=1e-5, rtol=0)


def test_adam_is_torchs():
    torch = pytest.importorskip("torch")
    training = start("sign", 4, "cpu")
    weights = [torch.tensor(w, requires_grad=True) for w in training.weights]
    optimizer = torch.optim.Adam(weights, lr=0.1)
    samples = train.sign(4).learn
    x, target = map(torch.tensor, samples)
    theirs = []
    for _ in range(3):
        optimizer.zero_grad()
        hidden = torch.relu(x @ weights[0] + weights[1])
        found = torch.nn.functional.cross_entropy(hidden @ weights[2] + weights[3], target)
        found.backward()
        optimizer.step()
        theirs.append(found.item())
    *ours, _ = training.steps(3)
    assert [step.loss for step in ours] == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_digits_that_were_held_out_are_known(device):
    pytest.importorskip("sklearn")
    *_, last = start("digits", 0, device).steps(train.digits(0).steps)
    assert last.right >= 0.95
    assert last.loss < 0.1


def test_digits_are_held_out_and_not_learnt_from():
    pytest.importorskip("sklearn")
    task = train.digits(0)
    assert (len(task.learn.x), len(task.held_out.x)) == (1438, 359)
    learnt = {x.tobytes() for x in task.learn.x}
    assert sum(x.tobytes() in learnt for x in task.held_out.x) == 0
    assert set(task.held_out.target) == set(range(10))


def test_the_command_reports_every_step_and_draws_the_loss(capsys, tmp_path):
    assert cli.main(["train", "--steps", "3", "--seed", "7", "--plot", str(tmp_path / "loss")]) == 0
    *steps, last, svg, png = capsys.readouterr().out.splitlines()
    expected = [step.loss for step in start("sign", 7, "cpu").steps(3)]
    found = [re.fullmatch(r"step (\d) of 3: loss (\d\.\d{6})", line).groups() for line in steps]
    assert found == [(str(i + 1), f"{value:.6f}") for i, value in enumerate(expected[:-1])]
    assert re.fullmatch(rf"after 3 steps: loss {expected[-1]:.6f}, \d\d\.\d% of 256 samples held out are right", last)
    assert (svg, png) == (f"{tmp_path}/loss.svg: the loss", f"{tmp_path}/loss.png: the loss")
    # A point a loss: before each step, and after the last; the published ones are before each of fifteen.
    assert points(tmp_path / "loss.svg", chart.OURS) == len(expected)
    assert points(tmp_path / "loss.svg", chart.PEER) == 15
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def points(path, colour):
    """Returns how many points of a colour are in a drawing, those of its legend left out."""
    drawing = ElementTree.parse(path)
    legends = [e for e in drawing.iter("{http://www.w3.org/2000/svg}g") if e.get("id", "").startswith("legend")]
    inside = {id(e) for legend in legends for e in legend.iter()}
    uses = [e for e in drawing.iter("{http://www.w3.org/2000/svg}use") if id(e) not in inside]
    return sum(colour in e.get("style", "") for e in uses)


def test_another_task_is_drawn_alone(tmp_path):
    train.plot([0.7, 0.5], tmp_path / "x.svg", "digits, seed 0")
    assert points(tmp_path / "x.svg", chart.OURS) == 2
    assert points(tmp_path / "x.svg", chart.PEER) == 0


def test_the_command_keeps_the_losses(capsys, tmp_path, monkeypatch):
    arguments = ["train", "--steps", "2", "--seed", "7", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["maxsoftmax", *arguments])
    assert cli.main(arguments) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["losses"] == [step.loss for step in start("sign", 7, "cpu").steps(2)]
    assert (found["task"], found["seed"]) == ("sign", 7)
    assert shlex.split(found["command"]) == ["maxsoftmax", *arguments]
    assert found["device"]
    capsys.readouterr()
    assert cli.main(["train", "--steps", "2", "--seed", "7", "--json", "-"]) == 0
    printed, told = capsys.readouterr()
    assert json.loads(printed)["losses"] == found["losses"]
    assert told.splitlines()[-1] == "standard output: the loss"


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """What has to be refused is refused in an empty folder, before anything is compiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Training", lambda *given, **named: pytest.fail("compiles"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "device 'tpu' is not on this machine"),
        (["--plot", "loss.pdf"], "a chart is written as svg or png, not .pdf: loss.pdf"),
        (["--json", "nowhere/loss.json"], "nowhere/loss.json: No such file or directory"),
        (["--plot", "nowhere/loss.svg"], "nowhere/loss.svg: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(capsys, refused, arguments, said):
    assert said in fails(capsys, "train", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "'0' is not a positive integer"),
        (["--steps", "many"], "'many' is not a positive integer"),
        (["--seed", "-1"], "'-1' is not an integer from 0"),
        (["--task", "faces"], "invalid choice: 'faces'"),
    ],
)
def test_what_is_not_understood_is_said(capsys, refused, arguments, said):
    assert said in misused(capsys, "train", *arguments)


def test_without_scikit_learn_there_are_no_digits(capsys, refused, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert "task 'digits' needs scikit-learn: pip install scikit-learn" in fails(capsys, "train", "--task", "digits")


def test_without_matplotlib_there_is_no_chart(capsys, refused, monkeypatch):
    monkeypatch.setattr(chart.importlib.util, "find_spec", lambda name: None)
    assert "a chart needs matplotlib" in fails(capsys, "train", "--plot", "loss.svg")


def test_without_jax_nothing_is_trained_in_it(capsys, refused, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert "framework 'jax' needs JAX: pip install 'maxsoftmax[jax]'" in fails(capsys, "train", "--framework", "jax")
