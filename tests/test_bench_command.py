import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from commands import cells, fails, misused
from fakes import fake, raising, results, softmax, spoilt, timed
from max.dtype import DType
from maxsoftmax._bench import chart, command
from maxsoftmax._bench.cases import CALL_OPS, PEERS, SUITES, Case, Entry, entries
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.providers import CALLERS, PROVIDERS
from maxsoftmax._bench.results import Results
from maxsoftmax._bench.run import Bench
from maxsoftmax._commands import cli, parse
from maxsoftmax._graph import runtime

pytestmark = pytest.mark.usefixtures("own_folder")

WAITING = """
import sys, time
from fakes import Fake
from maxsoftmax._commands import cli
from maxsoftmax._bench.providers import PROVIDERS

class Waiting(Fake):
    name = "waiting"

    def prepare(self, case, entry):
        if case.shape == (3, 3):
            open("ready", "w").close()
            # A signal just before a long sleep would not be noticed until its end.
            for _ in range(600):
                time.sleep(0.1)
        return super().prepare(case, entry)

PROVIDERS["waiting"] = Waiting
sys.exit(cli.main())
"""


NO_GPU = pytest.mark.skipif(len(runtime.devices()) > 1, reason="there is a GPU here")


@pytest.fixture(autouse=True)
def _process():
    """Undoes what the command does to the process that it runs in."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    environment = dict(os.environ)
    yield
    if cores:
        os.sched_setaffinity(0, cores)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def no_measuring(monkeypatch):
    monkeypatch.setattr(Bench, "_measure", lambda *what: pytest.fail(f"measures {what}"))


def bench(*arguments):
    """Runs the command in this process, on the CPU and with all providers in it, unless it shows a report."""
    where = [] if arguments[0] == "report" else ["--device", "cpu", "--together"]
    return cli.main(["bench", *arguments, *where])


def read(path):
    return Results.read(Path(path))


# The command.


def test_a_run_prints_tables_and_keeps_records(capsys, monkeypatch):
    arguments = ["--shape", "4x8", "--shape", "2×3×4", "--dtype", "f32", "--dtype", "float64", "--axis", "-2"]
    arguments += ["--providers", "numpy,scipy", "--json", "results.json"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/maxsoftmax", "bench", *arguments])
    assert bench(*arguments) == 0
    printed, message = capsys.readouterr()
    assert message == ""
    assert printed.endswith("results.json: 8 records\n")
    assert [(row[0], row[-1]) for row in cells(printed)] == [("numpy", ""), ("scipy", "")] * 4
    found = read("results.json")
    assert shlex.split(found.command) == ["maxsoftmax", "bench", *arguments]
    assert (found.rounds, found.processor) == (None, None)
    assert [(r.suite, r.shape, r.dtype, r.axis, r.provider, r.status) for r in found.records] == [
        ("custom", shape, dtype, -2, provider, "ok")
        for shape in [(4, 8), (2, 3, 4)]
        for dtype in ("float32", "float64")
        for provider in ("numpy", "scipy")
    ]
    assert {"python", "max", "mojo", "numpy", "scipy"} == set(found.versions)


@pytest.mark.parametrize("size", ["512x1000"])
def test_ours_and_max_s_own(capsys, device, size):
    # The one test that compiles, so that the rest is quick.
    providers = "maxsoftmax:auto,maxsoftmax:naive,max"
    where = ["--device", device, "--together"]
    assert cli.main(["bench", "--shape", size, "--providers", providers, *where, "--json", "x.json"]) == 0
    found = read("x.json").records
    assert [(r.who, r.status, r.note) for r in found] == [("auto", "ok", ""), ("naive", "ok", ""), ("max", "ok", "")]
    for r in found:
        assert 0 < r.min_s <= r.median_s < 1
        assert r.repeats > 5
        assert r.gbps == pytest.approx(2 * 512 * 1000 * 4 / r.median_s * 1e-9)
        assert r.copy_gbps > 0
        assert r.max_rel_error < 1e-5
    naive = cells(capsys.readouterr().out)[1]
    assert naive[5] == "1.00"


def test_a_suite_runs_with_the_providers_asked_for(monkeypatch, capsys, provider):
    small = SUITES["cpu"]._replace(cases=(Case((4, 8)), Case((2, 3), DType.bfloat16)))
    monkeypatch.setitem(SUITES, "cpu", small)
    provider("mine")
    assert bench("cpu", "--providers", "numpy,mine,numpy", "--json", "x.json") == 0
    assert [(r.suite, r.provider, r.status) for r in read("x.json").records] == [
        ("cpu", "numpy", "ok"),
        ("cpu", "mine", "ok"),
        ("cpu", "numpy", "missing"),
        ("cpu", "mine", "ok"),
    ]


def planned(monkeypatch, *arguments):
    """Returns what the command would run."""
    plans = []
    monkeypatch.setattr(Bench, "run", lambda self, suite, cases, ways, progress: plans.append((suite, cases, ways)))
    assert cli.main(["bench", *arguments, "--together"]) == 0
    return plans[0]


@NO_GPU
def test_without_a_gpu_the_suite_is_the_processor_s(monkeypatch):
    assert planned(monkeypatch) == ("cpu", SUITES["cpu"].cases, entries(SUITES["cpu"], "cpu"))


def test_a_suite_for_gpus_may_be_tried_on_a_processor(monkeypatch):
    name, cases, ways = planned(monkeypatch, "ladder", "--device", "cpu")
    assert (name, cases) == ("ladder", SUITES["ladder"].cases)
    assert [way.provider for way in ways] == ["maxsoftmax", "maxsoftmax", *PEERS["cpu"]]


def test_algorithms_are_chosen_by_name(monkeypatch):
    arguments = ["--shape", "4x8", "--device", "cpu", "--providers"]
    assert planned(monkeypatch, *arguments, "maxsoftmax")[2] == [Entry("maxsoftmax", a) for a in ("auto", "naive")]
    assert planned(monkeypatch, *arguments, "scipy,maxsoftmax:naive")[2] == [
        Entry("scipy"),
        Entry("maxsoftmax", "naive"),
    ]


def test_a_shape_given_twice_is_measured_once(monkeypatch):
    _, cases, _ = planned(monkeypatch, "--shape", "4x8", "--shape", "4x8", "--device", "cpu")
    assert cases == (Case((4, 8)),)


def test_block_size_and_unroll_go_where_they_mean_something():
    parser = cli._parser()
    options = parser.parse_args(["bench", "sweep", "--block-size", "256", "--unroll", "8"])
    ways = command._ways(options, SUITES["sweep"], "gpu")
    assert {(way.algorithm, way.block_size, way.unroll) for way in ways if way.provider == "maxsoftmax"} >= {
        ("auto", None, None),
        ("tree", 256, None),
        ("vector", 256, 8),
        ("online", 256, 8),
        ("split", 256, None),
    }
    assert [way for way in ways if way.provider != "maxsoftmax"] == [Entry(name) for name in PEERS["gpu"]]


def test_a_block_size_that_was_asked_for_is_measured_once():
    options = cli._parser().parse_args(["bench", "blocks", "--block-size", "256", "--providers", "maxsoftmax:tree"])
    assert command._ways(options, SUITES["blocks"], "gpu") == [Entry("maxsoftmax", "tree", 256)]
    options = cli._parser().parse_args(["bench", "blocks", "--providers", "maxsoftmax:tree"])
    assert [way.block_size for way in command._ways(options, SUITES["blocks"], "gpu")] == [32, 64, 128, 256, 512, 1024]


def test_threads_are_kept_to(capsys):
    assert bench("--shape", "4x8", "--providers", "numpy", "--threads", "1", "--json", "x.json") == 0
    assert read("x.json").threads == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) == 1


def test_a_provider_is_told_how_many_threads(provider, capsys):
    told = []
    provider("mine", fake(__init__=lambda self, device, threads: told.append(threads)))
    cores = command.usable_cores()
    for arguments in ([], ["--threads", "1"]):
        assert bench("--shape", "4x8", "--providers", "mine", *arguments) == 0
    assert told == [cores, 1]


def test_a_wrong_result_is_said_and_is_status_1(provider, capsys):
    provider("mine", spoilt(lambda y: y * 2))
    assert bench("--shape", "4x8", "--providers", "mine,numpy", "--json", "x.json") == 1
    printed, message = capsys.readouterr()
    assert message == ""
    assert cells(printed)[0][:2] == ["mine", "WRONG"]
    assert [r.status for r in read("x.json").records] == ["wrong", "ok"]


def test_a_provider_that_fails_is_said_and_the_rest_is_measured(provider, capsys):
    provider("mine", fake(prepare=raising(RuntimeError("out of [luck]"))))
    provider("gone", fake(__init__=raising(ImportError("No module named 'gone'"))))
    assert bench("--shape", "4x8", "--providers", "mine,gone,numpy", "--json", "x.json", "--plot", "x.svg") == 0
    rows = cells(capsys.readouterr().out)
    assert rows[0][:2] + rows[0][-1:] == ["mine", "FAILED", "RuntimeError: out of [luck]"]
    assert rows[1][:2] + rows[1][-1:] == ["gone", "MISSING", "not installed: No module named 'gone'"]
    assert rows[2][0] == "numpy"
    assert [r.status for r in read("x.json").records] == ["failed", "missing", "ok"]
    assert Path("x.svg").exists()


def interrupted_at(number):
    numbers = count()

    def prepare(self, case, entry):
        if next(numbers) == number:
            raise KeyboardInterrupt
        return softmax

    return fake(prepare=prepare)


SEVERAL = ["--shape", "2x3", "--shape", "3x3", "--shape", "4x3", "--providers", "mine"]


def test_an_interrupted_run_keeps_what_was_measured(provider, capsys):
    provider("mine", interrupted_at(1))
    assert bench(*SEVERAL, "--json", "x.json", "--plot", "x") == 130
    printed, message = capsys.readouterr()
    assert message == "interrupted after 1 measurement\n"
    assert [row[0] for row in cells(printed)] == ["mine"]
    assert [(r.shape, r.status) for r in read("x.json").records] == [((2, 3), "ok")]
    assert sorted(os.listdir()) == ["x.json", "x.png", "x.svg"]


def test_an_interrupted_run_can_be_resumed(provider, capsys):
    provider("mine", interrupted_at(2))
    assert bench(*SEVERAL[:-1], "mine,numpy", "--json", "x.json") == 130
    first = read("x.json")
    # One of the first case is to be measured again, and of the third one is there.
    first.records.append(replace(first.records.pop(1), shape=(4, 3)))
    first.write(Path("x.json"))
    told = []
    provider("mine", fake(foresee=lambda self, ways: told.extend(ways)))
    capsys.readouterr()
    assert bench(*SEVERAL[:-1], "mine,numpy", "--json", "x.json", "--resume") == 0
    assert capsys.readouterr().err == ""
    whole = read("x.json")
    assert [shape for (shape, *_), _ in told] == [(4, 3)]
    assert [whole.records[i] for i in (0, 2, 3, 5)] == first.records
    assert [(r.shape, r.provider) for r in whole.records] == [
        ((rows, 3), name) for rows in (2, 3, 4) for name in ("mine", "numpy")
    ]
    assert (whole.date, whole.versions) == (first.date, first.versions)


def test_a_resumed_run_keeps_what_it_does_not_ask_for(provider, capsys):
    provider("mine", fake())
    assert bench(*SEVERAL[:-1], "mine", "--json", "x.json") == 0
    kept = read("x.json")
    # A dtype of another version is nothing to be afraid of.
    kept.records[0] = replace(kept.records[0], dtype="float4")
    kept.write(Path("x.json"))
    first = kept.records
    assert bench("--shape", "7x3", "--device", "cpu", "--providers", "mine", "--json", "x.json", "--resume") == 0
    assert capsys.readouterr().out.endswith("x.json: 4 records\n")
    records = read("x.json").records
    assert records[:3] == first
    assert records[3].shape == (7, 3)


@pytest.mark.parametrize(("field", "change"), [("device", "another"), ("threads", 77), ("mine", "0"), ("numpy", "0")])
def test_other_runs_are_not_resumed(provider, capsys, field, change):
    provider("mine", fake())
    arguments = ["bench", *SEVERAL[:-1], "mine,numpy", "--device", "cpu", "--together", "--json", "x.json"]
    assert bench(*arguments[1:]) == 0
    capsys.readouterr()
    run = read("x.json")
    fields = run.versions if field in run.versions else vars(run)
    now, fields[field] = fields[field], change
    run.write(Path("x.json"))
    message = fails(capsys, *arguments, "--resume")
    assert message == f"maxsoftmax: cannot resume a run whose {field} was {change}, not {now}\n"
    assert read("x.json") == run


def test_a_run_without_a_library_is_not_resumed_with_it(provider, capsys):
    arguments = ["bench", *SEVERAL[:-1], "mine", "--device", "cpu", "--json", "x.json"]
    provider("mine", fake(__init__=raising(ImportError("No module named 'mine'"))))
    assert bench(*arguments[1:]) == 0
    provider("mine", fake())
    capsys.readouterr()
    message = fails(capsys, *arguments, "--resume")
    assert message == "maxsoftmax: cannot resume a run whose mine was missing, not 1.2.3\n"


def test_what_cannot_be_resumed(capsys):
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--resume")
    assert message == "maxsoftmax: --resume needs --json FILE, the records of the run to resume\n"
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--resume", "--json", "x.json")
    assert message.endswith("x.json: No such file or directory\n")
    message = fails(capsys, "bench", "report", "x.json", "--resume")
    assert message == "maxsoftmax: --resume is not for 'maxsoftmax bench report', which measures nothing\n"
    assert os.listdir() == []


def test_a_run_interrupted_before_anything_was_measured(provider, capsys):
    provider("mine", interrupted_at(0))
    assert bench(*SEVERAL, "--json", "x.json", "--plot", "x.svg") == 130
    assert read("x.json").records == []
    assert os.listdir() == ["x.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_measured(root, environment, number):
    arguments = ["bench", *SEVERAL[:-1], "waiting", "--device", "cpu", "--json", "x.json"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments],
        env={**environment, "PYTHONPATH": str(root / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    deadline = time.monotonic() + 60
    while not Path("ready").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    printed, message = process.communicate(timeout=60)
    assert message == "interrupted after 1 measurement\n"
    assert process.returncode == 130
    assert printed.endswith("x.json: 1 record\n")
    assert [(r.shape, r.status) for r in read("x.json").records] == [((2, 3), "ok")]


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--json", "nowhere/x.json"], "nowhere/x.json: No such file or directory"),
        (["--json", "x.json", "--plot", "nowhere/x.svg"], "nowhere/x.svg: No such file or directory"),
        (["--json", "x.json", "--plot", "nowhere/x"], "nowhere/x.svg: No such file or directory"),
        (["--json", "folder"], "folder exists and is not a file"),
        (["--plot", "chart"], "chart.png exists and is not a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_could_not_be_written_is_never_measured(capsys, arguments, name):
    Path("folder").mkdir()
    Path("chart.png").mkdir()
    Path("x.json").write_text("mine")
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--providers", "numpy", *arguments)
    assert message.endswith(f"/{name}\n")
    assert Path("x.json").read_text() == "mine"


@pytest.mark.usefixtures("no_measuring")
def test_a_chart_without_matplotlib_is_never_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--json", "x.json", "--plot", "x.svg")
    assert message == "maxsoftmax: a chart needs matplotlib: pip install 'maxsoftmax[bench]'\n"


def test_names_of_files_are_printed_as_they_are(capsys):
    name = "[red]x :cat:"
    assert bench("--shape", "4x8", "--providers", "numpy", "--json", f"{name}.json", "--plot", name) == 0
    printed = capsys.readouterr().out
    assert f"\n{name}.json: 1 record\n{name}.svg, {name}.png: chart\n" in printed


# Reports.


def test_a_report_prints_what_the_run_printed(capsys, monkeypatch, provider):
    provider("mine", spoilt(lambda y: y * 2))
    assert bench(*SEVERAL[:-1], "numpy,scipy,mine", "--json", "x.json") == 1
    printed, _ = capsys.readouterr()
    monkeypatch.setattr(Bench, "_measure", lambda *what: pytest.fail(f"measures {what}"))
    monkeypatch.setattr(command, "PROVIDERS", {})
    assert bench("report", "x.json") == 0
    assert capsys.readouterr() == (printed.removesuffix("x.json: 9 records\n"), "")


@pytest.mark.usefixtures("no_measuring")
def test_a_report_draws_and_copies(capsys):
    given = results(timed(), timed(entry=Entry("scipy")))
    given.write(Path("x.json"))
    assert bench("report", "x.json", "--plot", "x", "--json", "y.json") == 0
    assert capsys.readouterr().out.endswith("y.json: 2 records\nx.svg, x.png: chart\n")
    assert read("y.json") == read("x.json")
    chart.write(given, Path("z"))
    for form in chart.FORMATS:
        assert Path(f"x.{form}").read_bytes() == Path(f"z.{form}").read_bytes()


@pytest.mark.usefixtures("no_measuring")
def test_a_report_of_several_files(capsys):
    results(timed(Case((1, 8)))).write(Path("a.json"))
    results(timed(Case((1, 16)))).write(Path("b.json"))
    results(timed(Case((1, 32))), device="A GPU", threads=None).write(Path("c.json"))
    assert bench("report", "a.json", "b.json", "--plot", "x.svg") == 0
    printed = capsys.readouterr().out
    assert printed.index("1×8 float32") < printed.index("1×16 float32")
    assert Path("x.svg").exists()
    assert bench("report", "a.json", "c.json") == 0
    printed = capsys.readouterr().out
    assert printed.index("A processor, 4 threads;") < printed.index("A GPU;")
    assert "several" in fails(capsys, "bench", "report", "a.json", "c.json", "--plot", "y.svg")
    assert "which file" in fails(capsys, "bench", "report", "a.json", "b.json", "--json", "y.json")


@pytest.mark.usefixtures("no_measuring")
def test_a_report_of_what_cannot_be_read(capsys):
    assert "needs the JSON files" in fails(capsys, "bench", "report")
    assert fails(capsys, "bench", "report", "x.json") == "maxsoftmax: x.json: No such file or directory\n"
    Path("x.json").write_text("{")
    assert "x.json is not a file of benchmark results" in fails(capsys, "bench", "report", "x.json")
    # A good file beside it does not help.
    results(timed()).write(Path("y.json"))
    assert "x.json" in fails(capsys, "bench", "report", "y.json", "x.json")


@pytest.mark.usefixtures("no_measuring")
def test_a_report_of_nothing_timed_cannot_be_drawn(capsys):
    results(record("cpu", Case((4, 8)), Entry("torch"), "missing", note="not installed: torch")).write(Path("x.json"))
    assert bench("report", "x.json", "--plot", "x.svg") == 1
    printed, message = capsys.readouterr()
    assert cells(printed)[0][:2] == ["torch", "MISSING"]
    assert message == "maxsoftmax: nothing was timed, so there is nothing to draw\n"
    assert os.listdir() == ["x.json"]


# Refusals.


SHAPE = ["--shape", "4x8"]


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["everything"], ["'everything'", *SUITES, "report"]),
        ([*SHAPE, "--providers", "numpy,cupy"], ["'cupy'", *PROVIDERS]),
        ([*SHAPE, "--providers", ""], ["''", "numpy"]),
        ([*SHAPE, "--providers", "maxsoftmax:best"], ["'best'", "'auto'", "'naive'"]),
        ([*SHAPE, "--providers", "maxsoftmax:tree", "--device", "cpu"], ["'tree'", "CPU", "'naive'"]),
        ([*SHAPE, "--providers", "numpy:auto"], ["'numpy'", "no algorithms", "'numpy:auto'"]),
        (["cpu", *SHAPE], ["--shape", "'cpu'"]),
        (["cpu", "--dtype", "f32"], ["--dtype", "--shape"]),
        (["--axis", "0"], ["--axis", "--shape"]),
        ([*SHAPE, "--axis", "2"], ["axis 2", "rank 2"]),
        ([*SHAPE, "--shape", "8", "--axis", "1"], ["axis 1", "rank 1"]),
        ([*SHAPE, "--threads", "0"], ["--threads 0", "cores"]),
        ([*SHAPE, "--threads", "-1"], ["--threads -1", "cores"]),
        ([*SHAPE, "--threads", "1000000"], ["--threads 1000000", "cores"]),
        ([*SHAPE, "--device", "tpu"], ["'tpu'", "'cpu'"]),
        (["cpu", "x.json"], ["x.json", "report"]),
        ([*SHAPE, "--plot", "x.pdf"], ["svg or png", "x.pdf"]),
        (["report", "x.json", "--plot", "x.pdf"], ["svg or png", "x.pdf"]),
        ([*SHAPE, "--providers", "maxsoftmax:naive", "--device", "cpu", "--block-size", "64"], ["block_size 64"]),
        ([*SHAPE, "--rounds", "0"], ["--rounds 0", "at least 1"]),
        ([*SHAPE, "--rounds", "2", "--together"], ["--rounds 2", "together"]),
        (["call", "--providers", "cudnn"], ["'cudnn'", *CALLERS]),
        (["call", "--providers", "maxsoftmax:naive"], ["no algorithms", "'maxsoftmax:naive'"]),
        (["call", "--calls", "0"], ["--calls 0", "at least 1"]),
        ([*SHAPE, "--calls", "10"], ["--calls 10", "'call'"]),
        ([*SHAPE, "--beside", "pocket"], ["--beside", "report"]),
        (["call", "--op", "softmax_backward"], ["softmax_backward", *CALL_OPS]),
        (["call", "--op", "cross_entropy", "--shape", "2x3x4"], ["cross_entropy", "2x3x4"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_refused_in_one_sentence(capsys, arguments, words):
    message = fails(capsys, "bench", *arguments)
    assert [word for word in words if word not in message] == []


@NO_GPU
@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("suite", [name for name, suite in SUITES.items() if suite.device == "gpu" and not suite.host])
def test_a_suite_for_gpus_needs_one(capsys, suite):
    message = fails(capsys, "bench", suite)
    assert f"'{suite}'" in message
    assert "'cpu'" in message


@NO_GPU
@pytest.mark.usefixtures("no_measuring")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert "'gpu'" in fails(capsys, "bench", "ladder", "--device", "gpu")


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--shape", text] for text in ("", "4x", "4xa", "0x3", "4x-1", "4.5", "4,8", "x")),
        *(["--dtype", text] for text in ("int8", "float8", "", "F32")),
        ["--axis", "last"],
        ["--threads", "all"],
        ["--block-size", "big"],
        ["--providers"],
        ["--calls", "ten"],
        ["report", "x.json", "--beside", "nobody"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(capsys, arguments):
    assert misused(capsys, "bench", *arguments).startswith("usage: maxsoftmax bench")
    assert os.listdir() == []


@pytest.mark.parametrize(("text", "found"), [("8192x50257", (8192, 50257)), ("2×3×4", (2, 3, 4)), ("7", (7,))])
def test_shapes(text, found):
    assert parse.shape(text) == found


@pytest.mark.parametrize("text", ["bf16", "bfloat16"])
def test_dtypes(text):
    assert parse.dtype(text) == DType.bfloat16
    assert [parse.dtype(t) for t in ("f16", "f32", "f64")] == [DType.float16, DType.float32, DType.float64]


def test_help_names_the_suites_and_the_providers(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["bench", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert [word for word in (*SUITES, *PROVIDERS, "report", "--json", "--plot") if word not in printed] == []


def test_the_json_of_a_run_is_json(capsys):
    assert bench("--shape", "4x8", "--providers", "numpy", "--json", "x.json") == 0
    given = json.loads(Path("x.json").read_text(encoding="utf-8"))
    assert set(given) == {"device", "versions", "date", "command", "threads", "processor", "rounds", "records"}
    (found,) = given["records"]
    assert (found["op"], found["shape"], found["provider"]) == ("softmax", [4, 8], "numpy")


def test_whoever_reads_may_stop_early(root, environment):
    records = root / "benchmarks" / "results" / "h200-sweep.json"
    command = [sys.executable, "-m", "maxsoftmax", "bench", "report", str(records)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
