import errno
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
from commands import fails, misused
from fakes import timed
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _files as files
from maxsoftmax import ops
from maxsoftmax._arguments import ALGORITHMS, BLOCK_SIZE, UNROLL, check_block_size, check_unroll
from maxsoftmax._bench import chart, command, tune
from maxsoftmax._bench.cases import SEARCH, TUNE, Case, Entry
from maxsoftmax._bench.configurations import Configuration, configurations
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.providers import ours
from maxsoftmax._bench.providers.base import Unsupported
from maxsoftmax._bench.results import Results
from maxsoftmax._commands import cli
from maxsoftmax._graph import runtime, tuning
from maxsoftmax._graph.tuning import Choice, choice, location, remember
from maxsoftmax._native.description import SEARCHED, Target, library
from maxsoftmax._native.plan import NoPlan

GPU = SimpleNamespace(label="gpu", is_host=False, model_name="A GPU", architecture_name="sm_90a")
OTHER = SimpleNamespace(label="gpu", is_host=False, model_name="Another GPU")
DEFAULT = Choice(BLOCK_SIZE, UNROLL)
BEST = Choice(512, 8)

SMALL, LARGE = Case((8, 100)), Case((8, 1000))

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere XDG says nothing of where the configuration is"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the configuration is, and nothing in it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "maxsoftmax"


@pytest.fixture
def write(folder):
    """Puts what people edited where the configuration is."""

    def write(content):
        folder.mkdir(exist_ok=True)
        path = folder / "tuned.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def chosen(algorithm="online", block_size=None, unroll=None, *, device=GPU, dtype=DType.float32):
    return choice(device, algorithm, dtype, block_size, unroll)


# Without a file.


def test_untuned_is_untuned(folder):
    assert DEFAULT == (128, 4)
    for algorithm in ALGORITHMS["gpu"]:
        assert chosen(algorithm) == DEFAULT
    assert chosen("naive", device=CPU()) == chosen("auto", device=DeviceRef.CPU()) == DEFAULT
    assert not folder.exists()


def test_the_caller_s_choice_is_taken():
    assert chosen("vector", 256, 8) == (256, 8)
    assert chosen("vector", 256) == (256, UNROLL)
    assert chosen("vector", unroll=1) == (BLOCK_SIZE, 1)
    assert chosen("tree", 32) == (32, UNROLL)
    assert chosen("online", 1024, 2, device=DeviceRef.GPU()) == (1024, 2)


@pytest.mark.parametrize(
    ("algorithm", "block_size", "unroll", "where", "error"),
    [
        ("online", 16, None, GPU, ValueError),
        ("online", None, 3, GPU, ValueError),
        ("tree", 32, 4, GPU, ValueError),
        ("auto", 128, None, GPU, ValueError),
        ("naive", 128, None, CPU(), ValueError),
        ("naive", 128, None, DeviceRef.CPU(), ValueError),
        ("online", "128", None, GPU, TypeError),
        ("online", None, True, GPU, TypeError),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(algorithm, block_size, unroll, where, error):
    # What was found does not excuse it.
    remember(GPU, "online", DType.float32, BEST)
    with pytest.raises(error, match=r"block_size|unroll"):
        chosen(algorithm, block_size, unroll, device=where)


# With one.


@pytest.mark.parametrize("algorithm", ["vector", "online"])
def test_what_was_found_is_used_where_nothing_was_chosen(folder, algorithm):
    # Whoever asked before does not get the old answer for ever.
    assert chosen(algorithm) == DEFAULT
    assert remember(GPU, algorithm, DType.float32, BEST) == location() == folder / "tuned.json"
    assert chosen(algorithm) == BEST
    assert chosen(algorithm, 256, 2) == (256, 2)
    assert chosen(algorithm, 256) == (256, UNROLL)
    assert chosen(algorithm, unroll=2) == (BLOCK_SIZE, 2)


def test_what_was_found_is_for_this_gpu_algorithm_and_dtype():
    remember(GPU, "online", DType.float32, BEST)
    assert chosen(device=OTHER) == DEFAULT
    assert chosen("vector") == DEFAULT
    assert chosen(dtype=DType.bfloat16) == DEFAULT
    assert chosen() == BEST


def test_everything_found_is_kept():
    remember(GPU, "online", DType.float32, BEST)
    remember(GPU, "online", DType.bfloat16, Choice(256, 1))
    remember(GPU, "vector", DType.float32, Choice(1024, 2))
    remember(OTHER, "online", DType.float32, Choice(128, 1))
    remember(GPU, "online", DType.float32, Choice(256, 8))
    assert chosen() == (256, 8)
    assert chosen(dtype=DType.bfloat16) == (256, 1)
    assert chosen("vector") == (1024, 2)
    assert chosen(device=OTHER) == (128, 1)


def test_what_was_found_outlives_the_process(monkeypatch):
    remember(GPU, "online", DType.float32, BEST)
    monkeypatch.setattr(tuning, "_loaded", {})
    assert chosen() == BEST
    assert json.loads(location().read_text())["A GPU"]["online"]["float32"] == {"block_size": 512, "unroll": 8}


def test_only_algorithms_that_leave_both_are_tuned(write):
    tuned = {name: {"float32": {"block_size": 256, "unroll": 8}} for name in ALGORITHMS["gpu"]}
    write(json.dumps({"A GPU": tuned, "cpu": tuned}))
    assert {name for name in ALGORITHMS["gpu"] if chosen(name) != DEFAULT} == {"vector", "online"} == set(tune.TUNED)
    assert chosen("naive", device=CPU()) == DEFAULT


def test_the_file_is_read_once(write):
    path = write(json.dumps({"A GPU": {"online": {"float32": {"block_size": 512, "unroll": 8}}}}))
    assert chosen() == BEST
    path.unlink()
    assert chosen() == BEST


def test_a_graph_is_built_with_what_was_found(monkeypatch):
    monkeypatch.setattr(DeviceRef, "to_device", lambda self: GPU)
    # One graph for all, because the first kernel in each takes seconds.
    with Graph("gpu", input_types=[TensorType(DType.float32, ("n",), DeviceRef.GPU())]) as graph:
        x = graph.inputs[0].tensor
        untuned = ops.softmax(x, algorithm="online")
        remember(GPU, "online", DType.float32, BEST)
        graph.output(untuned, ops.softmax(x, algorithm="online"), ops.softmax(x, algorithm="online", unroll=2))
    found = [map(int, re.findall(rf"{name} = (\d+)", str(graph))) for name in ("block_size", "unroll")]
    assert list(zip(*found, strict=True)) == [DEFAULT, BEST, (BLOCK_SIZE, 2)]


def test_a_graph_may_be_built_for_a_gpu_that_is_not_here():
    remember(GPU, "online", DType.float32, BEST)
    # Where there is one, it is another.
    assert chosen(device=DeviceRef.GPU(7)) == DEFAULT


# With a damaged one.


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", "null", b"\xff\xfe\x00", "[" * 100000], ids=lambda c: str(c)[:9]
)
def test_a_damaged_file_is_said_once_and_ignored(write, content):
    path = write(content)
    with pytest.warns(RuntimeWarning, match=re.escape(str(path))) as said:
        assert chosen() == DEFAULT
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert chosen() == DEFAULT


def test_a_folder_in_its_place_is_said_and_ignored(folder):
    (folder / "tuned.json").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="Is a directory"):
        assert chosen() == DEFAULT


def test_a_damaged_file_is_no_matter_to_who_chooses(write):
    write("{")
    assert chosen("online", 256, 8) == (256, 8)
    assert chosen("tree") == chosen("naive", device=CPU()) == DEFAULT


@pytest.mark.parametrize(
    "entry",
    [
        {"block_size": 100, "unroll": 4},
        {"block_size": 16, "unroll": 4},
        {"block_size": 512, "unroll": 3},
        {"block_size": 512},
        {"block_size": 512, "unroll": 8, "colour": "red"},
        {"block_size": "512", "unroll": 8},
        {"block_size": 512, "unroll": True},
        {"block_size": 512.0, "unroll": 8},
        {"block_size": None, "unroll": None},
        {},
        [512, 8],
        512,
        None,
    ],
    ids=str,
)
def test_an_entry_that_makes_no_sense_is_ignored(write, entry):
    write(json.dumps({"A GPU": {"online": {"float32": entry}}}))
    assert chosen() == DEFAULT


@pytest.mark.parametrize(
    "content", [{"A GPU": []}, {"A GPU": 5}, {"A GPU": {"online": "fast"}}, {"A GPU": None}], ids=str
)
def test_entries_that_make_no_sense_are_ignored_and_replaced(write, content):
    write(json.dumps(content))
    assert chosen() == DEFAULT
    remember(GPU, "online", DType.float32, BEST)
    assert chosen() == BEST


def test_a_damaged_file_is_replaced(write):
    path = write("{")
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        remember(GPU, "online", DType.float32, BEST)
    assert chosen() == BEST
    assert os.listdir(path.parent) == ["tuned.json"]


def test_what_cannot_be_kept_leaves_the_old(monkeypatch):
    remember(GPU, "online", DType.float32, BEST)

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        remember(GPU, "online", DType.float32, DEFAULT)
    assert chosen() == BEST


# The best.


def tried(*given):
    """Returns records of (choice, seconds of the small case, seconds of the large one); None was not timed."""
    return [
        timed(case, Entry("maxsoftmax", "online", *pair), seconds, suite="tune")
        if seconds
        else record("tune", case, Entry("maxsoftmax", "online", *pair), "failed", note="out of memory")
        for pair, *times in given
        for case, seconds in zip((SMALL, LARGE), times, strict=True)
    ]


def test_the_best_has_the_least_geometric_mean():
    # The arithmetic mean would prefer (512, 4).
    records = tried((DEFAULT, 2.0, 40.0), (Choice(256, 2), 1.0, 20.0), (Choice(512, 4), 5.0, 15.0))
    found = tune.best(records)
    assert list(found) == ["online"]
    assert found["online"][0] == (256, 2)
    assert found["online"][1] == pytest.approx(2)
    assert tune.best(records[::-1]) == found


def test_who_was_not_timed_everywhere_is_not_the_best():
    records = tried((DEFAULT, 2.0, 40.0), (Choice(256, 2), 1e-3, None), (Choice(512, 1), None, 1e-3), (BEST, 2.0, 30.0))
    assert tune.best(records)["online"] == (BEST, pytest.approx(math.sqrt(4 / 3)))


def test_wrong_results_are_never_the_best():
    wrong = record("tune", LARGE, Entry("maxsoftmax", "online", 1024, 8), "wrong", max_rel_error=1.0)
    records = [*tried((DEFAULT, 2.0, 40.0)), timed(SMALL, Entry("maxsoftmax", "online", 1024, 8), 1e-6), wrong]
    assert tune.best(records) == {"online": (DEFAULT, 1.0)}


def test_each_algorithm_has_its_own_best():
    records = [
        timed(SMALL, Entry("maxsoftmax", name, *pair), seconds)
        for name, pair, seconds in [
            ("online", DEFAULT, 3.0),
            ("vector", DEFAULT, 1.0),
            ("online", BEST, 2.0),
            ("vector", BEST, 4.0),
        ]
    ]
    assert tune.best(records) == {"online": (BEST, pytest.approx(1.5)), "vector": (DEFAULT, 1.0)}


def test_without_the_untuned_there_is_nothing_to_gain_on():
    assert tune.best(tried((BEST, 1.0, 2.0))) == {"online": (BEST, 1.0)}


@pytest.mark.parametrize("records", [[], tried((DEFAULT, None, None)), tried((DEFAULT, 1.0, None), (BEST, None, 1.0))])
def test_nothing_timed_everywhere_is_no_best(records):
    assert tune.best(records) == {}


def test_candidates_are_all_there_are():
    found = tune.candidates(tune.TUNED)
    assert len(set(found)) == len(found) == 2 * 4 * 4
    for entry in found:
        assert check_block_size(entry.block_size, entry.algorithm, "gpu") == entry.block_size
        assert check_unroll(entry.unroll, entry.algorithm, "gpu") == entry.unroll
    assert Entry("maxsoftmax", "online", *DEFAULT) in found
    assert {entry.algorithm for entry in tune.candidates(["vector"])} == {"vector"}


# The command.


@pytest.fixture
def tuner(monkeypatch):
    """A GPU that takes the time that `seconds` says of a case and an entry; what was asked of it comes back."""
    asked = []

    def measured(seconds, complete=True):
        def watch(bench, name, cases, ways):
            asked.extend(now := [(case, way) for case in cases for way in ways])
            for case, way in now:
                time = seconds(case, way)
                found = timed(case, way, time, suite=name) if time else record(name, case, way, "failed")
                bench.results.records.append(found)
            return complete

        monkeypatch.setattr(command, "watch", watch)
        # The run itself needs a device; that of the host will do.
        monkeypatch.setattr(runtime, "device", lambda spec: SimpleNamespace(**vars(GPU), spec=spec))
        bench = tune.Bench
        monkeypatch.setattr(tune, "Bench", lambda device, *rest: bench(CPU(), *rest))
        return asked

    return measured


def test_tune_keeps_the_best(tuner, capsys):
    def seconds(case, way):
        best = Choice(256, 2) if way.algorithm == "online" else BEST
        return (1.0 if way[2:] == best else 2.0) * case.size * 1e-9

    asked = tuner(seconds)
    assert cli.main(["tune", "--dtype", "bf16"]) == 0
    printed, message = capsys.readouterr()
    assert message == ""
    assert {case for case, _ in asked} == {Case(shape, DType.bfloat16) for shape in tune.SHAPES}
    assert {way for _, way in asked if way.algorithm in tune.TUNED} == set(tune.candidates(tune.TUNED))
    assert {way for _, way in asked} > {Entry("maxsoftmax", "auto")}
    path = location()
    assert f"online: block_size=256, unroll=2, 2.00 times as fast as untuned; kept in {path}\n" in printed
    assert f"vector: block_size=512, unroll=8, 2.00 times as fast as untuned; kept in {path}\n" in printed
    assert chosen("online", dtype=DType.bfloat16) == (256, 2)
    assert chosen("vector", dtype=DType.bfloat16) == BEST
    assert chosen("online") == DEFAULT


def test_tune_takes_shapes_and_algorithms(tuner, capsys):
    asked = tuner(lambda case, way: 1.0)
    assert cli.main(["tune", "--shape", "8x100", "--shape", "8x1000", "--algorithm", "vector"]) == 0
    assert asked == [(case, way) for case in (SMALL, LARGE) for way in tune.candidates(["vector"])]
    assert list(json.loads(location().read_text())["A GPU"]) == ["vector"]


def test_tune_keeps_its_records_and_draws_the_search(tuner, folder, capsys, tmp_path):
    asked = tuner(lambda case, way: 1.0)
    given = ["--shape", "8x100", "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.svg")]
    assert cli.main(["tune", *given]) == 0
    found = Results.read(tmp_path / "x.json")
    assert [(r.suite, r.algorithm, r.block_size, r.unroll) for r in found.records] == [
        (TUNE if way.algorithm in tune.TUNED else SEARCH, *way[1:]) for _, way in asked
    ]
    chart.write(found, tmp_path / "y.svg")
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "y.svg").read_bytes()


def test_tune_measures_nothing_that_it_could_not_write(tuner, folder, capsys, tmp_path):
    asked = tuner(lambda case, way: 1.0)
    assert "nowhere/x.json" in fails(capsys, "tune", "--json", str(tmp_path / "nowhere" / "x.json"))
    assert asked == []


def test_tune_of_nothing_timed_keeps_nothing(tuner, folder, capsys):
    tuner(lambda case, way: None)
    assert cli.main(["tune", "--shape", "8x100"]) == 1
    assert not folder.exists()


def test_an_interrupted_tune_chooses_nothing_and_shows_what_it_has(tuner, folder, capsys, tmp_path):
    tuner(lambda case, way: 1.0, complete=False)
    assert cli.main(["tune", "--shape", "8x100", "--json", str(tmp_path / "x.json")]) == 130
    assert not folder.exists()
    printed = capsys.readouterr().out
    assert "maxsoftmax:vector,128,1" in printed
    assert "times as fast" not in printed
    assert len(Results.read(tmp_path / "x.json").records) == len(tune.candidates(tune.TUNED))


def test_tune_says_what_is_faster_than_auto(tuner, folder, capsys):
    best = Configuration("whole", (64, 8, 4, 16))

    def seconds(case, way):
        return None if "whole 64 8 6" in way.algorithm else 2e-6 if way == best.entry else 3e-6

    asked = tuner(seconds)
    assert cli.main(["tune", "--algorithm", "auto", "--shape", "8x100"]) == 0
    ways = [way for _, way in asked]
    assert ways == [Entry("maxsoftmax", "auto"), *(found.entry for found in configurations(SMALL, "sm_90a"))]
    others = sum(way != ways[0] and seconds(SMALL, way) is not None for way in ways)
    printed = capsys.readouterr().out
    said = (
        f"auto, 8×100 float32: 3 µs; the fastest of {others} others is Team.whole(32, 64, 8, 4, 16), 1.50 times as fast"
    )
    assert said in printed
    # It would be other bits.
    assert not folder.exists()


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 64, 100, 4096, 12_345, 50_257, 128_256, 1 << 20])
def test_configurations_are_there_for_all_lengths_that_tables_have(n, dtype):
    case = Case((8, n), dtype)
    found, without = configurations(case, "sm_90a"), configurations(case, "sm_80")
    assert len(set(found)) == len(found)
    assert set(without) <= set(found)
    assert not any(one.kind in ("cluster", "units") for one in without)
    assert bool(found) == (n * dtype.size_in_bytes > 128)
    for one in found:
        assert Configuration.of(one.entry.algorithm) == one
        wanted = library("softmax", dtype.name, Target("gpu", "sm_90a"), one.entry.algorithm)
        told = wanted.defines()
        assert told.pop("CONFIGURATION") == one.kind
        assert "ALGORITHM" not in told
        assert [int(told[f"CONFIGURATION_{i}"]) for i in range(len(one.numbers))] == list(one.numbers)
        if one.kind == "whole":
            _, team, vectors, _ = one.numbers
            assert team * vectors * 16 // dtype.size_in_bytes >= n
        if one.kind == "units":
            _, rounds, threads, blocks = one.numbers
            units = -(-n // (rounds * 32 * 16 // dtype.size_in_bytes))
            assert units <= 128
            assert -(-units // blocks) * 32 <= threads


@pytest.mark.skipif(len(runtime.devices()) > 1, reason="there is a GPU here")
def test_tune_needs_a_gpu(capsys):
    assert "'gpu'" in fails(capsys, "tune")


def test_tune_is_not_for_the_processor(capsys):
    assert "which only GPU kernels have" in fails(capsys, "tune", "--device", "cpu")


@pytest.mark.parametrize(
    "arguments",
    [["--algorithm", "tree"], ["--shape", "big"], ["--dtype", "int8"], ["--algorithm", "naive"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(capsys, arguments):
    assert misused(capsys, "tune", *arguments).startswith("usage: maxsoftmax tune")


def test_a_configuration_without_room_is_said_to_have_none(monkeypatch):
    def run(*_):
        raise NoPlan("softmax cannot be planned")

    monkeypatch.setattr(ours.Call, "run", run)
    with pytest.raises(Unsupported, match="has no room for such rows"):
        ours.MaxSoftmax(CPU(), 1).prepare(Case((1, 9)), Entry("maxsoftmax", f"{SEARCHED}slotted"))
