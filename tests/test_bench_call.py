"""The benchmark of whole calls, and of providers in processes of their own."""

import contextlib
import importlib.util
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import Fake, Watch, array, fake, raising, results, softmax, spoilt, timed
from max.driver import CPU, Buffer
from max.dtype import DType
from maxsoftmax._bench import apart, call, chart, command, table
from maxsoftmax._bench import cases as suites
from maxsoftmax._bench.apart import Apart, merged
from maxsoftmax._bench.cases import CALL, CALL_OPS, CALL_SHAPES, SUITES, Case, Entry, entries
from maxsoftmax._bench.clock import HostClock
from maxsoftmax._bench.protocol import Machine, record
from maxsoftmax._bench.providers import CALLERS, Unsupported
from maxsoftmax._bench.results import Results
from maxsoftmax._bench.run import Bench
from maxsoftmax._commands import cli

CASE = Case((4, 8))
ENTRY = Entry("fake")
TORCH = Entry("torch")

# The command with providers of its own, as a file that both it and the processes of its providers run.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakes import Fake, fake, raising, spoilt
from maxsoftmax._commands import cli
from maxsoftmax._bench import apart
from maxsoftmax._bench.providers import CALLERS, PROVIDERS

apart.PROGRAM = (sys.executable, __file__)

def prepare(self, case, entry):
    if {turns}:
        with open("turns", "a") as file:
            file.write(f"{{self.name}} {{'x'.join(map(str, case.shape))}} {{os.getpid()}} {{self.threads}}\\n")
    return Fake.prepare(self, case, entry)

def wait(self, case, entry):
    if case.shape == (3, 3):
        Path("ready").touch()
        # A signal just before a long sleep would not be noticed until its end.
        for _ in range(600):
            time.sleep(0.1)
    return Fake.prepare(self, case, entry)

def die(self, case, entry):
    if case.shape == (3, 3):
        print("out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return Fake.prepare(self, case, entry)

KINDS = dict(
    a=fake(prepare=prepare),
    b=fake(prepare=prepare),
    gone=fake(__init__=raising(ImportError("No module named 'gone'"))),
    broken=fake(prepare=raising(RuntimeError("no luck"))),
    wrong=spoilt(lambda y: y * 2),
    waiting=fake(prepare=wait),
    dying=fake(prepare=die),
)
for name, kind in KINDS.items():
    PROVIDERS[name] = CALLERS[name] = type("Named", (kind,), dict(name=name))
if __name__ == "__main__":
    sys.exit(cli.main())
"""


def measured(kind=Fake, case=CASE):
    return call.measure(CALL, case, ENTRY, kind(CPU(), 1), Machine(CPU(), HostClock()))


class Nanoseconds(Watch):
    """Stands in for the module `time`, where whole calls are timed."""

    def perf_counter_ns(self):
        return round(self.now * 1e9)


@pytest.fixture
def watch(monkeypatch):
    """Time that passes only where a provider lets it."""
    stopped = Nanoseconds()
    monkeypatch.setattr(call, "time", stopped)
    return stopped


def spending(watch, returns, finishes, **members):
    """Returns a provider whose calls take so many seconds to return, and so many more until all are finished."""
    log = []

    def prepare(self, case, entry):
        def function(x):
            log.append("call")
            watch.now += returns
            return softmax(x, case.axis)

        return function

    def wait(self, y):
        log.append("wait")
        watch.now += finishes

    return fake(prepare=prepare, wait=wait, **members), log


# The protocol.


def test_a_call_on_a_cpu_is_finished_when_it_returns(watch):
    kind, log = spending(watch, 1e-4, 5.0)
    found = measured(kind)
    assert (found.status, found.note) == ("ok", "")
    assert found.host_s == found.median_s == pytest.approx(1e-4)
    assert found.repeats == call.MOST
    # The result that is checked is waited for, whoever it is of.
    assert log.count("wait") == 1


def test_as_many_calls_as_were_asked_for_after_the_one_that_is_checked(watch):
    kind, log = spending(watch, 1e-4, 3e-4, late=True)
    found = call.measure(CALL, CASE, ENTRY, kind(CPU(), 1), Machine(CPU(), HostClock()), count=10)
    assert found.repeats == 10
    # To the finished result, and then to the return, with a wait at the end; a CPU's batch is one call.
    assert log == ["call", "wait"] * 21 + ["wait"]
    assert found.median_s == pytest.approx(4e-4)


def test_who_returns_early_is_waited_for(watch):
    kind, log = spending(watch, 1e-4, 3e-4, late=True)
    found = measured(kind)
    assert found.host_s == pytest.approx(1e-4)
    assert found.median_s == found.min_s == pytest.approx(4e-4)
    assert found.repeats == pytest.approx(call.BUDGET_S / 4e-4, abs=1)
    assert found.gbps == pytest.approx(CASE.moved / 4e-4 * 1e-9)
    # On a CPU, what was not waited for would be in the way of the next.
    assert log[:-1] == ["call", "wait"] * (len(log) // 2)


def test_calls_come_in_batches_that_a_queue_has_room_for():
    log = []
    times = call._returned(lambda x: log.append("call"), None, lambda y: log.append("wait"), 40, 16)
    assert len(times) == 40
    assert log == [*["call"] * 16, "wait", *["call"] * 16, "wait", *["call"] * 8, "wait"]


def test_what_a_batch_waits_for_is_not_timed(watch):
    kind, _ = spending(watch, 1e-3, 7.0)
    provider = kind(CPU(), 1)
    function = provider.prepare(CASE, ENTRY)
    x = Buffer.zeros(CASE.shape, CASE.dtype)
    assert call._returned(function, x, provider.wait, 10, 4) == [pytest.approx(1e-3)] * 10


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 1000), (1e-3, 200), (0.02, 10), (0.2, 3), (7.0, 3)])
def test_longer_calls_are_made_less_often(watch, seconds, calls):
    kind, log = spending(watch, seconds, 0.0)
    assert measured(kind).repeats == calls
    # Besides the one that is checked, and the wait for it.
    warm = len(log) - 2 - calls
    assert warm == pytest.approx(min(call.MOST, call.WARM_S / seconds), abs=1)
    assert warm > 0


def test_no_more_than_one_result_is_there_at_a_time():
    alive, there = weakref.WeakSet(), []

    class Result:
        def __init__(self):
            there.append(len(alive))
            alive.add(self)

    call._finished(lambda x: Result(), None, None, 5)
    call._returned(lambda x: Result(), None, lambda y: None, 5, 2)
    assert there == [0] * 10


def test_calls_are_made_as_their_users_surround_them():
    inside = []

    @contextlib.contextmanager
    def calling(self, case):
        inside.append(case)
        yield
        inside.clear()

    def seen(self, x):
        assert inside == [CASE]
        return x

    assert measured(fake(calling=calling, share=seen)).status == "ok"
    assert inside == []


@pytest.mark.parametrize(
    ("kind", "status", "note"),
    [
        (spoilt(lambda y: y * 2), "wrong", ""),
        (fake(prepare=raising(RuntimeError("no\n luck"))), "failed", "RuntimeError: no luck"),
        (fake(share=raising(Unsupported("takes no such case"))), "missing", "takes no such case"),
        (fake(ops=("log_softmax",)), "missing", "has no softmax here"),
    ],
)
def test_what_goes_wrong_is_not_timed(kind, status, note):
    found = measured(kind)
    assert (found.status, found.note, found.median_s, found.host_s) == (status, note, None, None)


def test_what_was_measured_is_read_again(tmp_path):
    given = results(measured(), measured(spoilt(lambda y: y * 2)))
    given.rounds, given.processor = 3, "A processor"
    given.write(tmp_path / "x.json")
    assert Results.read(tmp_path / "x.json") == given


# The suite.


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_suite_names_what_there_is(kind):
    ways = entries(SUITES[CALL], kind)
    assert [way.provider for way in ways] == list(suites.CALLERS[kind])
    for way in ways:
        assert way == Entry(way.provider)
        assert kind in CALLERS[way.provider].devices
        assert CALLERS[way.provider].name == way.provider
    assert {name for names in suites.CALLERS.values() for name in names} == set(CALLERS)


def test_its_shapes_go_from_nothing_but_overhead_to_none():
    sizes = [case.size for case in SUITES[CALL].cases]
    assert (len(sizes), sizes[0], sizes[-1]) == (12, 64, 2**26)
    assert {(8, 64), (256, 1024), (1024, 1024), (1, 151936), (8, 128256)} <= {*CALL_SHAPES}


@pytest.fixture
def planned(monkeypatch):
    """Returns what the command would run."""

    def plan(*arguments):
        plans = []

        def run(self, suite, cases, ways, progress):
            plans.append((suite, cases, ways, self))

        monkeypatch.setattr(Bench, "run", run)
        monkeypatch.setattr(Apart, "run", run)
        assert cli.main(["bench", *arguments, "--device", "cpu"]) == 0
        return plans[0]

    return plan


def test_what_is_asked_for(planned, capsys):
    suite, cases, ways, bench = planned(CALL)
    assert (suite, cases, ways) == (CALL, SUITES[CALL].cases, entries(SUITES[CALL], "cpu"))
    assert isinstance(bench, Apart)
    assert bench.results.rounds == apart.ROUNDS
    _, cases, ways, bench = planned(CALL, "--op", "log_softmax", "--dtype", "bf16", "--providers", "torch", "--axis=0")
    assert cases == tuple(Case(shape, DType.bfloat16, 0, "log_softmax") for shape in CALL_SHAPES)
    assert ways == [Entry("torch")]
    # Alone it needs no process of its own.
    assert not isinstance(bench, Apart)
    assert bench.calls
    _, cases, *_ = planned(CALL, "--op", "cross_entropy", "--shape", "4x8", "--dtype", "f32", "--dtype", "bf16")
    assert cases == tuple(
        Case((4, 8), dtype, op=op) for dtype in (DType.float32, DType.bfloat16) for op in CALL_OPS["cross_entropy"]
    )


@pytest.mark.parametrize(
    ("arguments", "rounds"),
    [(["cpu"], 3), (["cpu", "--rounds", "5"], 5), (["cpu", "--together"], None), ([CALL, "--together"], None)],
)
def test_on_a_cpu_each_has_a_process_of_its_own(planned, capsys, arguments, rounds):
    *_, bench = planned(*arguments)
    assert isinstance(bench, Apart) == (rounds is not None)
    assert bench.results.rounds == rounds


def test_a_process_is_told_how_many_calls(planned, capsys):
    *_, ways, bench = planned(CALL, "--shape", "4x8", "--calls", "10", "--providers", "numpy,scipy")
    *_, alone = planned(*bench.arguments(ways[:1])[1:])
    assert alone.count == 10


def test_a_process_is_told_what_was_asked_for(planned, capsys, monkeypatch):
    asked = ["--shape", "4x8", "--shape", "2x3x4", "--dtype", "f32", "--axis=-2", "--threads", "1"]
    suite, cases, ways, bench = planned(*asked, "--providers", "maxsoftmax,numpy")
    told = bench.arguments([way for way in ways if way.provider == "maxsoftmax"])
    again, same, mine, _ = planned(*told[1:], "--together")
    assert (again, same) == (suite, cases)
    assert mine == ways[:2]
    suite, cases, ways, bench = planned(CALL, "--op", "cross_entropy", "--dtype", "bf16")
    again, same, mine, _ = planned(*bench.arguments([Entry("torch+grad")])[1:])
    assert (again, same, mine) == (suite, cases, [Entry("torch+grad")])


# What takes part.


@pytest.mark.parametrize("name", ["torch", "torch+grad", "onnxruntime", "scipy", "numpy"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_others_compute_or_say_why_not(name, op, axis):
    library = name.split("+", maxsplit=1)[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    found = call.measure(CALL, Case((6, 40), axis=axis, op=op), Entry(name), *there(name))
    assert (found.status, found.note) == ("ok", "")
    assert 0 < found.host_s <= found.median_s * 1.5


def there(name):
    return CALLERS[name](CPU(), 1), Machine(CPU(), HostClock())


def test_torch_has_gradients_where_they_are_asked_for():
    torch = pytest.importorskip("torch")
    case = Case((6, 40))
    loss = case._replace(op="cross_entropy_gradient")
    for name, op, grad in (("torch", case, False), ("torch+grad", case, True), ("torch", loss, True)):
        provider, _ = there(name)
        with provider.calling(op):
            x = provider.share(Buffer.zeros((6, 40), DType.float32))
            given = (x, torch.zeros(6, dtype=torch.int64)) if op is loss else x
            y = provider.prepare(op, Entry(name))(given)
            assert x.requires_grad == grad
            assert op is loss or y.requires_grad == grad
        assert not provider.share(Buffer.zeros((6,), DType.int64)).requires_grad
    for op in CALL_OPS["cross_entropy"]:
        found = call.measure(CALL, case._replace(op=op), Entry("torch"), *there("torch"))
        assert (found.status, found.note) == ("ok", "")
    found = call.measure(CALL, loss, Entry("torch+grad"), *there("torch+grad"))
    assert (found.status, found.note) == ("missing", "computes what torch does")


def test_ours_take_arrays_and_graphs(device):
    # The one test here that compiles.
    from maxsoftmax._graph import runtime

    where = runtime.device(device)
    (machine, shapes) = Bench(where, ["maxsoftmax"], 1, calls=True).machine, [(8, 64), (3, 1000)]
    for name in ("maxsoftmax", "maxsoftmax.ops"):
        provider = CALLERS[name](where, 1)
        for shape in shapes:
            found = call.measure(CALL, Case(shape), Entry(name), provider, machine)
            assert (found.status, found.note) == ("ok", "")
    shared = CALLERS["maxsoftmax"](where, 1).share(Buffer.zeros((2, 3), DType.float32, device=where))
    assert isinstance(shared, np.ndarray) == where.is_host


# Processes.


@pytest.fixture
def program(tmp_path, monkeypatch, root):
    """Returns the command with providers of its own, which `run` runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(tests=str(root / "tests"), turns=True))
    return path


SEVERAL = ["--shape", "2x3", "--shape", "3x3", "--shape", "4x3", "--device", "cpu", "--json", "x.json", "--providers"]


def run(program, environment, *arguments):
    command = [sys.executable, str(program), "bench", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)


def statuses(path="x.json"):
    return [(r.shape[0], r.provider, r.status) for r in Results.read(Path(path)).records]


def test_each_has_turns_in_processes_of_its_own(program, environment):
    done = run(program, environment, CALL, *SEVERAL, "a,b,gone,broken", "--rounds", "2", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    turns = [line.split() for line in Path("turns").read_text().splitlines()]
    shapes = ["2x3", "3x3", "4x3"]
    assert [(name, shape) for name, shape, *_ in turns] == [(n, s) for n in ("a", "b", "a", "b") for s in shapes]
    pids = [pid for _, shape, pid, _ in turns if shape == "2x3"]
    assert len(set(pids)) == 4
    assert {threads for *_, threads in turns} == {"1"}
    found = Results.read(Path("x.json"))
    assert (found.rounds, found.threads, found.versions["a"]) == (2, 1, "1.2.3")
    assert statuses() == [
        (rows, name, status)
        for rows in (2, 3, 4)
        for name, status in (("a", "ok"), ("b", "ok"), ("gone", "missing"), ("broken", "failed"))
    ]
    notes = {r.provider: r.note for r in found.records}
    assert notes["gone"] == "not installed: No module named 'gone'"
    assert notes["broken"] == "RuntimeError: no luck"
    assert all(r.host_s and r.repeats > call.LEAST for r in found.records if r.status == "ok")
    assert "2 rounds of processes" in done.stdout


def test_a_process_that_dies_takes_only_its_own_with_it(program, environment):
    done = run(program, environment, *SEVERAL, "dying,wrong,b", "--rounds", "1")
    assert (done.returncode, done.stderr) == (1, "")
    assert statuses() == [
        (rows, name, status)
        for rows, dying in ((2, "ok"), (3, "failed"), (4, "failed"))
        for name, status in (("dying", dying), ("wrong", "wrong"), ("b", "ok"))
    ]
    assert Results.read(Path("x.json")).records[3].note == "its process ended with SIGKILL: out of luck"


def test_a_signal_ends_the_process_and_keeps_what_it_measured(program, environment):
    command = [sys.executable, str(program), "bench", CALL, *SEVERAL, "a,waiting", "--rounds", "2"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    deadline = time.monotonic() + 60
    while not Path("ready").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert (process.returncode, message) == (130, "interrupted after 4 measurements\n")
    assert statuses() == [(2, "a", "ok"), (2, "waiting", "ok"), (3, "a", "ok"), (4, "a", "ok")]
    assert Results.read(Path("x.json")).rounds == 1
    before = Results.read(Path("x.json"))
    # Nothing that is there is measured again, and the rest is.
    Path("turns").unlink()
    program.write_text(program.read_text().replace("case.shape == (3, 3)", "False"))
    done = run(program, environment, CALL, *SEVERAL, "a,waiting", "--rounds", "2", "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path("turns").exists()
    after = Results.read(Path("x.json"))
    assert [r for r in after.records if (r.shape[0], r.provider) != (3, "waiting") and r in before.records] == [
        *before.records
    ]
    assert {r.status for r in after.records} == {"ok"}
    assert after.rounds == 1


def test_a_refusal_of_a_process_is_the_command_s(program, environment):
    assert run(program, environment, *SEVERAL, "a,b", "--rounds", "1").returncode == 0
    kept = Results.read(Path("x.json"))
    kept.versions["b"] = "0"
    kept.records.pop()
    kept.write(Path("x.json"))
    done = run(program, environment, *SEVERAL, "a,b", "--rounds", "1", "--resume")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "maxsoftmax: cannot resume a run whose b was 0, not 1.2.3\n"


def timed_call(case=CASE, entry=TORCH, seconds=1e-3, host=None, **members):
    return replace(timed(case, entry, seconds, suite=CALL), host_s=host or seconds, **members)


def test_the_figure_is_the_median_of_the_rounds():
    turns = [[timed_call(seconds=s, host=s / 10, max_rel_error=s)] for s in (4e-3, 1e-3, 2e-3)]
    (found,) = merged(turns)
    assert (found.median_s, found.host_s, found.min_s) == (2e-3, pytest.approx(2e-4), 5e-4)
    assert (found.repeats, found.max_rel_error) == (300, 4e-3)
    assert found.gbps == pytest.approx(CASE.moved / 2e-3 * 1e-9)
    assert merged([[timed(seconds=1.0)], [timed(seconds=3.0)]])[0].host_s is None


@pytest.mark.parametrize(
    ("others", "status"), [(["ok", "wrong"], "wrong"), (["failed", "ok"], "failed"), (["ok", "missing"], "ok")]
)
def test_what_went_wrong_once_went_wrong(others, status):
    def of(status):
        return timed_call() if status == "ok" else record(CALL, CASE, Entry("torch"), status)

    (found,) = merged([[of(other)] for other in others])
    assert found.status == status


# What is shown.


def calls(where="A processor"):
    names = suites.CALLERS["cpu"]
    return results(
        *(
            timed_call(Case(shape), Entry(name), 1e-6 * (i + 1) + 1e-9 * Case(shape).size, host=1e-6 * (i + 1))
            for shape in CALL_SHAPES
            for i, name in enumerate(names)
        ),
        device=where,
        threads=None if where == "A GPU" else 2,
    )


def test_tables_say_when_a_call_returns_and_when_its_result_is_there(capsys):
    given = results(
        timed_call(seconds=2e-6, host=1e-6),
        timed_call(entry=Entry("maxsoftmax.torch")),
        record(CALL, CASE, Entry("liger"), "missing", note="not installed"),
        device="A GPU",
        threads=None,
    )
    given.processor, given.rounds = "A processor", 3
    command.show(given)
    printed = capsys.readouterr().out
    assert printed.startswith("A GPU, called by A processor, 3 rounds of processes; ")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line[:1] == "│"]
    assert rows == [
        ["torch", "1 µs", "2 µs", "0.1", "0%", "1.0e-07", ""],
        ["maxsoftmax.torch", "1 ms", "1 ms", "0.0", "0%", "1.0e-07", ""],
        ["liger", "MISSING", "", "", "", "", "not installed"],
    ]
    assert table.markdown(given).splitlines() == [
        "| 4×8 float32 | returns after | result after | GB/s | of a copy | error |",
        "|---|---:|---:|---:|---:|---:|",
        "| *torch* | 1 µs | 2 µs | 0.1 | 0% | 1.0e-07 |",
        "| maxsoftmax.torch | 1 ms | 1 ms | 0.0 | 0% | 1.0e-07 |",
        "| *liger* | MISSING |  |  |  |  |",
    ]
    assert table.overview(given).splitlines()[2:] == ["| 4×8 float32 | 1 µs, 2 µs | 1 ms |"]


@pytest.mark.parametrize(("where", "panels"), [("A processor", 1), ("A GPU", 2)])
def test_a_chart_has_a_line_for_each_and_a_panel_for_each_time(where, panels):
    given = calls(where)
    figure = chart.draw(given)
    assert len(figure.axes) == panels
    times = [lambda r: r.host_s, lambda r: r.median_s][-panels:]
    for axes, of in zip(figure.axes, times, strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [line.get_label() for line in axes.lines] == list(suites.CALLERS["cpu"])
        for line in axes.lines:
            mine = sorted((r for r in given.records if r.provider == line.get_label()), key=lambda r: r.size)
            np.testing.assert_array_equal(line.get_xdata(), [r.size for r in mine])
            np.testing.assert_array_equal(line.get_ydata(), [of(r) for r in mine])
        looks = {(line.get_color(), line.get_marker()) for line in axes.lines}
        assert len(looks) == len(axes.lines)
        # Ours are the thick ones.
        thick = {line.get_label() for line in axes.lines if line.get_linewidth() > 1.5}
        assert thick == {name for name in suites.CALLERS["cpu"] if name.startswith("maxsoftmax")}
    legend = figure.axes[-1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == list(suites.CALLERS["cpu"])


def test_a_chart_has_a_row_of_panels_for_each_op_and_dtype():
    more = [
        replace(r, dtype=dtype, op=op)
        for r in calls().records
        for op, dtype in (("softmax", "bfloat16"), ("log_softmax", "float32"))
    ]
    figure = chart.draw(results(*calls().records, *more))
    assert [axes.get_ylabel().split(":")[0] for axes in figure.axes] == [
        "softmax float32",
        "softmax bfloat16",
        "log_softmax float32",
    ]


def test_a_report_draws_it_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = calls("A GPU")
    given.write(Path("x.json"))
    assert cli.main(["bench", "report", "x.json", "--plot", "x.svg", "--markdown"]) == 0
    assert "| 8×64 float32 | 1 µs, 1.512 µs | 2 µs, 2.512 µs |" in capsys.readouterr().out
    chart.write(given, Path("y.svg"))
    assert Path("x.svg").read_bytes() == Path("y.svg").read_bytes()


def test_a_single_case_makes_bars():
    (axes,) = chart.draw(results(timed_call(), timed_call(entry=Entry("maxsoftmax.torch")))).axes
    assert len(axes.patches) == 2


def test_inputs_are_not_changed_by_those_who_share_them():
    x = Buffer.zeros((2, 3), DType.float32)
    assert CALLERS["maxsoftmax"](CPU(), 1).share(x).ctypes.data == array(x).ctypes.data
