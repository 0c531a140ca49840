"""The benchmark of gradients and losses: what it gives out, what it takes for right, and what it counts."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.special
from commands import fails
from fakes import Fake, array, fake, results, timed
from max.driver import CPU, Buffer
from max.dtype import DType
from maxsoftmax._bench import command, data, reference
from maxsoftmax._bench.cases import ATTENTION, OPS, PEERS, SPELLED, SUITES, Case, Entry
from maxsoftmax._bench.clock import HostClock
from maxsoftmax._bench.data import Inputs, check
from maxsoftmax._bench.protocol import Machine, measure
from maxsoftmax._bench.providers import PROVIDERS
from maxsoftmax._bench.results import Results
from maxsoftmax._bench.run import Bench
from maxsoftmax._bench.table import markdown
from maxsoftmax._commands import cli
from maxsoftmax._graph import runtime

RELATIVES = [op for op in OPS if op != "softmax"]
LIBRARIES = {"torch": "torch", "torch.compile": "torch", "jax": "jax", "maxsoftmax.jax": "jax", "onnxruntime": "onnx"}


def case(op, shape=(6, 40), dtype=DType.float32, axis=-1):
    return Case(shape, dtype, axis, op)


def exact(given, wanted):
    """Returns what an op makes of arrays, in float64, as a tuple of arrays."""
    if wanted.op == "softmax_backward":
        y, dy = given
        return (y * (dy - (y * dy).sum(wanted.axis, keepdims=True)),)
    if wanted.op in ("scaled_softmax", "rescaled_softmax"):
        given = [given[0] * 0.125]
    if wanted.op == "causal_softmax":
        given = [np.where(np.tri(*wanted.shape[-2:], dtype=bool), given[0], -np.inf)]
    if wanted.op == "masked_softmax":
        hidden = np.add.outer(*map(np.arange, wanted.shape[-2:])) % 4 == 0
        given = [np.where(hidden, -np.inf, given[0])]
    log_p = scipy.special.log_softmax(given[0], axis=wanted.axis)
    if not OPS[wanted.op].losses:
        kept = 2 if wanted.op == "rescaled_softmax" else 1
        return (log_p if wanted.op == "log_softmax" else kept * np.exp(log_p),)
    rows = np.arange(len(log_p))
    loss = -log_p[rows, given[1]].mean()
    gradient = np.exp(log_p)
    gradient[rows, given[1]] -= 1
    return (np.asarray(loss), gradient / len(rows))[: 1 + OPS[wanted.op].writes]


def computing(spoil=lambda found: None, **members):
    """Returns a provider that computes any op, and spoils the first result that `spoil` is given."""

    def prepare(self, wanted, entry):
        def function(given):
            given = given if isinstance(given, tuple) else (given,)
            wide = [array(x) if x.dtype == DType.int64 else array(x).astype(np.float64) for x in given]
            found = []
            for value in exact(wide, wanted):
                y = Buffer(wanted.dtype, value.shape)
                array(y)[...] = value
                found.append(y)
            spoil([array(y) for y in found])
            return tuple(found) if len(found) > 1 else found[0]

        return function

    return fake(prepare=prepare, ops=tuple(OPS), **members)


def measured(kind, wanted, clock=None):
    return measure("grad", wanted, Entry("fake"), kind(CPU(), 1), Machine(CPU(), clock or HostClock()))


# What is right and what is not.


@pytest.mark.parametrize("op", RELATIVES)
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.float64])
def test_what_is_exact_is_right(op, dtype):
    found = measured(computing(), case(op, dtype=dtype))
    assert (found.status, found.note, found.op) == ("ok", "", op)
    limit = {DType.float32: 1e-6, DType.bfloat16: 0.01, DType.float64: 1e-12}[dtype]
    assert found.max_rel_error < (max(limit, reference.RUNNING_SUM) if OPS[op].losses else limit)


@pytest.mark.parametrize("op", ["log_softmax", "softmax_backward", "scaled_softmax", "rescaled_softmax"])
@pytest.mark.parametrize("shape", [(4, 30, 5), (2, 3, 4, 5)])
def test_along_another_axis(op, shape):
    assert measured(computing(), case(op, shape, axis=1)).status == "ok"
    # A kernel that takes the last axis for it is found out.
    wrong = computing()
    prepare = wrong.prepare
    wrong.prepare = lambda self, wanted, entry: prepare(self, wanted._replace(axis=-1), entry)
    assert measured(wrong, case(op, shape, axis=1)).status == "wrong"


def percent(found):
    found[-1][...] *= 1.01


def rows_apart(found):
    found[-1][:] = found[-1][::-1].copy()


def without_the_sum(found):
    """As if Σ y·dy, about 1, had been left out."""
    found[-1][...] *= 2


def of_the_sum_of_losses(found):
    found[0][...] *= 6


def nothing(found):
    found[-1][...] = 0


@pytest.mark.parametrize("op", RELATIVES)
@pytest.mark.parametrize("spoil", [percent, rows_apart, without_the_sum, of_the_sum_of_losses, nothing])
@pytest.mark.parametrize("dtype", [DType.float32, DType.float64])
def test_wrong_results_are_found_and_not_timed(op, spoil, dtype):
    if spoil is rows_apart and op == "cross_entropy":
        pytest.skip("a loss has no rows")
    found = measured(computing(spoil), case(op, dtype=dtype))
    assert (found.status, found.median_s) == ("wrong", None)
    assert found.max_rel_error > 1e-3


def test_a_loss_of_narrow_logits_may_be_in_float32():
    kind = computing()
    prepare = kind.prepare

    def widened(self, wanted, entry):
        function = prepare(self, wanted, entry)
        return lambda given: Buffer.from_numpy(array(function(given)).astype(np.float32))

    kind.prepare = widened
    assert measured(kind, case("cross_entropy", dtype=DType.bfloat16)).status == "ok"
    found = measured(kind, case("cross_entropy", dtype=DType.float64))
    assert found.note == "ValueError: the result is scalar float32 where its loss was asked for"


def test_probabilities_may_have_been_rounded_as_logarithms():
    x = np.random.default_rng(0).standard_normal((50, 1))
    below = reference.cross_entropy_gradient(x, 3, rows=6).below
    np.testing.assert_allclose(below, -scipy.special.log_softmax(x, axis=0))


def test_the_target_of_every_row_counts():
    def misplace(found):
        # What should have been taken from one class was taken from its neighbour.
        gradient = found[1]
        gradient[2] = np.roll(gradient[2], 1)

    assert measured(computing(misplace), case("cross_entropy_gradient")).status == "wrong"


def test_a_loss_that_is_not_a_number_is_found():
    def spoil(found):
        found[0][...] = math.nan

    found = measured(computing(spoil), case("cross_entropy"))
    assert (found.status, found.max_rel_error) == ("wrong", None)


def test_every_query_sees_as_far_as_its_place():
    wanted = case("causal_softmax", (2, 5, 7))
    assert measured(computing(), wanted).status == "ok"

    def see_one_more(found):
        found[0][1, 2, 3] = 1e-3

    assert measured(computing(see_one_more), wanted).status == "wrong"


@pytest.mark.parametrize("parts", [1, 3])
def test_another_number_of_results_is_refused(parts):
    def prepare(self, wanted, entry):
        return lambda given: tuple([given[0]] * parts)

    found = measured(fake(prepare=prepare, ops=tuple(OPS)), case("cross_entropy_gradient"))
    assert found.status == "failed"
    assert f"there are {parts} results where cross_entropy_gradient 6×40 float32 has 2" in found.note


def test_a_loss_of_each_row_is_not_the_loss():
    def prepare(self, wanted, entry):
        return lambda given: Buffer.zeros((6,), DType.float32)

    found = measured(fake(prepare=prepare, ops=tuple(OPS)), case("cross_entropy"))
    assert found.note == "ValueError: the result is 6 float32 where its loss was asked for"


@pytest.mark.parametrize("shape", [(3, 7), (700, 6007)])
def test_the_loss_is_that_of_all_rows_however_long(shape):
    """Rows that go over the end of the block, and around it, as NumPy has them."""
    wanted = case("cross_entropy", shape, DType.float64)
    for offset in (5, data.BLOCK - 10):
        inputs = Inputs.place(wanted, 1, CPU())._replace(offsets=[offset])
        at = (offset + np.arange(wanted.size)) % data.BLOCK
        x = array(data._block(wanted.dtype)).reshape(-1)[at].reshape(shape)
        target = data._targets(wanted, offset)
        (loss,) = exact([x, target], wanted)
        found = check(inputs, 0, Buffer.from_numpy(loss))
        assert found.correct
        assert found.error < reference.RUNNING_SUM


# What is given out.


def test_what_is_given_are_probabilities_and_a_gradient():
    inputs = Inputs.place(case("softmax_backward", (50, 1000)), 3, CPU())
    assert len(inputs.buffers) == len(inputs.others) == 3
    for y, (dy,) in zip(inputs.buffers, inputs.others, strict=True):
        assert (array(y) >= 0).all()
        assert 0.6 < array(y).sum(axis=1).mean() < 1
        # Their products add up to something, which a kernel has to take off.
        assert (np.abs((array(y) * array(dy)).sum(axis=1)) > 0.3).all()
    assert len({array(y).tobytes() for y in inputs.buffers}) == 3


def test_what_is_given_are_logits_and_targets():
    inputs = Inputs.place(case("cross_entropy", (500, 40)), 2, CPU())
    for (target,) in inputs.others:
        assert target.dtype == DType.int64
        assert set(array(target)) == set(range(40))


def test_logits_alone_are_given_alone():
    assert Inputs.place(case("log_softmax"), 2, CPU()).others == ()


# What is counted.


@pytest.mark.parametrize(
    ("op", "tensors"),
    [("softmax", 2), ("log_softmax", 2), ("softmax_backward", 3), ("cross_entropy", 1), ("cross_entropy_gradient", 3)]
    + [(op, 2) for op in ATTENTION],
)
def test_bytes_are_those_that_have_to_be_moved(op, tensors):
    assert case(op).moved == tensors * 6 * 40 * 4

    class Second(HostClock):
        """A call takes two seconds, a copy one."""

        def __init__(self):
            self.copies = set()

        def seconds(self, lap, repeats, replay):
            lap()
            return [1.0 if lap in self.copies else 2.0] * repeats

        def copy(self, inputs):
            lap = super().copy(inputs)
            self.copies.add(lap)
            return lap

    found = measured(computing(), case(op), Second())
    assert found.gbps == pytest.approx(tensors * 960 / 2 * 1e-9)
    assert found.copy_gbps == pytest.approx(2 * 960 * 1e-9)
    assert found.copy_s == pytest.approx(tensors / 2)
    assert (found.gflops is None) == (op != "softmax")


def test_who_overwrites_the_logits_gets_them_anew_for_the_check():
    seen = []

    def prepare(self, wanted, entry):
        inner = computing().prepare(self, wanted, entry)

        def function(given):
            seen.append(array(given[0]).copy())
            found = inner(given)
            array(given[0])[...] = array(found[1])
            return found

        return function

    kind = fake(prepare=prepare, ops=tuple(OPS), lazy=True)
    assert measured(kind, case("cross_entropy_gradient")).status == "wrong"
    seen.clear()
    kind.in_place = ("cross_entropy_gradient",)
    found = measured(kind, case("cross_entropy_gradient"))
    assert (found.status, found.note) == ("ok", "overwrites the logits")
    assert not np.array_equal(seen[0], seen[1])


# Who takes part.


def test_an_op_that_a_provider_does_not_have_is_missing():
    found = measured(Fake, case("softmax_backward"))
    assert (found.status, found.note) == ("missing", "has no softmax_backward here")


@pytest.mark.parametrize("name", [name for name in PEERS["cpu"] if name != "max"])
@pytest.mark.parametrize("op", RELATIVES)
def test_every_peer_computes_it_or_says_why_not(name, op):
    bench = Bench(CPU(), ["maxsoftmax", "bench", "grad"], 1)
    cases = [case(op)] if OPS[op].losses else [case(op), case(op, (2, 3, 4), axis=-1 if OPS[op].queries else 1)]
    if name == "torch":
        cases.append(case(op, dtype=DType.bfloat16))
    bench.run("grad", cases, [Entry(name)], lambda *what: None)
    for found in bench.results.records:
        if op not in PROVIDERS[name].ops or (name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None):
            assert (found.status, bool(found.note)) == ("missing", True)
        else:
            assert (found.status, found.note) == ("ok", "")


# Graphs of their own, ours and MAX's: a minute.
@pytest.mark.parametrize("op", [pytest.param(op, marks=[pytest.mark.slow] * (op in SPELLED)) for op in RELATIVES])
def test_ours_computes_it(op, device):
    bench = Bench(runtime.device(device), ["maxsoftmax", "bench", "grad"], 1)
    cases = [case(op, (3, 6, 40) if op in ATTENTION else (6, 40))]
    ways = [Entry("maxsoftmax", "auto"), *([Entry("max")] if op in SPELLED else [])]
    bench.run("grad", cases, ways, lambda *what: None)
    for found in bench.results.records:
        assert found.status == "ok"
        assert found.max_rel_error < 1e-5


def test_every_provider_names_ops_that_exist():
    for provider in PROVIDERS.values():
        assert set(provider.in_place) <= set(provider.ops) <= set(OPS)
        assert "softmax" in provider.ops


# The suite.


@pytest.mark.parametrize(("name", "ops"), [("grad", set(RELATIVES) - set(ATTENTION)), ("attention", set(ATTENTION))])
def test_the_suite_is_of_every_relative_and_of_a_size(name, ops):
    suite = SUITES[name]
    for cases in (suite.cases, suite.host):
        assert {c.op for c in cases} == ops
        assert len(set(cases)) == len(cases) < 40
        # Logits, the other input and the result, of float32 at most, in the memory of a GPU.
        assert max(3 * c.nbytes for c in cases) < 30e9
    assert max(c.nbytes for c in suite.host) < 200e6
    assert suite.on("cpu") == suite.host
    assert suite.on("gpu") == suite.cases
    assert SUITES["llm"].on("cpu") == SUITES["llm"].cases


@pytest.fixture
def planned(monkeypatch):
    """Runs the command, which measures nothing, and returns the cases that it would have measured."""
    cases = []

    def run(self, suite, given, entries, progress):
        cases.extend(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", run)

    def plan(*arguments):
        assert cli.main(["bench", *arguments, "--together"]) == 130
        return tuple(cases)

    return plan


def test_on_a_cpu_the_cases_are_smaller(planned):
    assert planned("grad", "--device", "cpu") == SUITES["grad"].host


@pytest.mark.skipif(len(runtime.devices()) > 1, reason="there is a GPU")
def test_without_a_gpu_the_suite_is_that_of_a_cpu(planned):
    assert planned("grad") == SUITES["grad"].host


def test_an_op_goes_with_a_shape(planned):
    found = planned("--shape", "4x8", "--op", "cross_entropy_gradient", "--device", "cpu")
    assert found == (case("cross_entropy_gradient", (4, 8)),)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["grad", "--op", "log_softmax"], "--dtype, --axis and --op go with --shape"),
        (
            ["--shape", "4x8x2", "--op", "cross_entropy"],
            "--op cross_entropy takes rows and classes, such as 8192x50257",
        ),
        (["--shape", "4x8", "--axis", "0", "--op", "cross_entropy"], "not 4x8 along axis 0"),
        (
            ["--shape", "8", "--op", "causal_softmax"],
            "--op causal_softmax takes queries and keys, such as 16x1024x1024",
        ),
        (["--shape", "4x8", "--axis", "0", "--op", "causal_softmax"], "not 4x8 along axis 0"),
    ],
)
def test_what_does_not_fit_is_refused(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, "bench", *arguments)


# Tables and files.


def test_tables_name_the_op():
    first = timed(case("softmax_backward"), suite="grad")
    second = timed(case("log_softmax"), suite="grad")
    given = results(first, second)
    titles = [table.title for table in command.tables(given)]
    assert titles == ["grad: softmax_backward 6×40 float32", "grad: log_softmax 6×40 float32"]
    text = markdown(given)
    assert "| softmax_backward 6×40 float32 | time |" in text
    # GFLOP/s are those of softmax.
    assert all(line.split("|")[5].strip() == "" for line in text.splitlines() if line.startswith("| *numpy*"))


def test_what_is_written_is_read_again(tmp_path):
    given = results(timed(case("softmax_backward"), suite="grad"), timed())
    given.write(tmp_path / "x.json")
    assert Results.read(tmp_path / "x.json") == given


def test_a_chart_has_a_place_for_every_op(tmp_path):
    ways = [Entry("maxsoftmax", "auto"), Entry("torch")]
    given = results(*(timed(case(op, (1, 40)), way, suite="grad") for op in RELATIVES for way in ways))
    figure = command.chart.draw(given)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == [f"{op} 1×40" for op in RELATIVES]
    assert command.chart.write(given, tmp_path / "x.svg") == [Path(tmp_path / "x.svg")]
