import errno
import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from fakes import CASE, measured, one_off, put, results, spoilt, timed, went
from max.dtype import DType
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.results import Results


@pytest.fixture
def kept():
    return results(
        timed(Case((8, 1024)), Entry("maxsoftmax", "online", 512, 4)),
        timed(Case((2, 3, 5), DType.bfloat16, 1), Entry("torch")),
        record("cpu", CASE, Entry("jax"), "missing", note="not installed: “jax”"),
        record("cpu", CASE, Entry("numpy"), "failed", note="MemoryError: "),
        record("cpu", CASE, Entry("scipy"), "wrong", max_rel_error=0.5),
    )


def test_what_is_written_is_read_again(kept, tmp_path):
    path = tmp_path / "results.json"
    kept.write(path)
    assert Results.read(path) == kept
    assert os.listdir(tmp_path) == ["results.json"]
    assert path.read_text(encoding="utf-8").endswith("}\n")


def test_what_was_measured_is_read_again(bench, provider, tmp_path):
    went(bench, [CASE, Case((2, 3, 4), axis=1)], [provider("a"), provider("b", spoilt(one_off))])
    bench.results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == bench.results


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_json_that_others_can_read(tmp_path, value):
    given = results(measured(spoilt(put(value, 1, 1))))
    given.write(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    # Python alone reads and writes NaN.
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Results.read(tmp_path / "results.json") == given


def test_a_command_that_is_no_text_does_not_cost_the_records(kept, tmp_path):
    # What Python makes of a byte that is not UTF-8.
    kept.command = "maxsoftmax bench --json x\udcff.json"
    kept.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == kept


def edited(**changes):
    """Returns JSON of one record, changed; ... leaves a field out."""
    given = asdict(results(timed()))
    (record,) = given["records"]
    for name, value in changes.items():
        where = given if name in given else record
        if value is ...:
            del where[name]
        else:
            where[name] = value
    return json.dumps(given)


def test_a_file_edited_to_no_effect_is_read(tmp_path):
    (tmp_path / "x.json").write_text(edited(note="mine", shape=[3, 4], threads=None))
    found = Results.read(tmp_path / "x.json")
    assert (found.threads, found.records[0].note, found.records[0].shape) == (None, "mine", (3, 4))
    # What earlier versions did not know.
    (tmp_path / "x.json").write_text(edited(host_s=..., processor=..., rounds=...))
    assert Results.read(tmp_path / "x.json").records[0].host_s is None
    (tmp_path / "x.json").write_text(edited(repeats=...))
    assert Results.read(tmp_path / "x.json").records[0].repeats == 0


NOT_RESULTS = {
    "empty": "",
    "cut short": edited()[:-20],
    "no text": b"\xff\xfe\x00",
    "list": "[]",
    "number": "5",
    "null": "null",
    "nothing": "{}",
    "deep": "[" * 100000,
    "records": edited(records=5),
    "a record": edited(records=[5]),
    "text of a record": edited(records=["abc"]),
    "no device": edited(device=...),
    "no provider": edited(provider=...),
    "no status": edited(status=...),
    "unknown status": edited(status="fine"),
    "no time": edited(median_s=None),
    "text of a time": edited(median_s="fast"),
    "negative time": edited(median_s=-1.0),
    "no time at all": edited(median_s=0.0),
    "number of a shape": edited(shape=5),
    "no shape": edited(shape=None),
    "text of a shape": edited(shape="48"),
    "texts of a shape": edited(shape=["4", "8"]),
    "rank 0": edited(shape=[]),
    "no rate": edited(gbps=None),
    "text of a rate": edited(copy_gbps="fast"),
    "no error": edited(max_rel_error=None),
    "no axis": edited(axis=None),
    "text of an axis": edited(axis="1"),
    "axis that is not there": edited(axis=2),
    "infinite time": edited(median_s=math.inf),
    "error that is no number": edited(max_rel_error=math.nan),
    "text of a wrong error": edited(status="wrong", max_rel_error="large"),
    "number of a provider": edited(provider=5),
    "no note": edited(note=None),
    "text of a call's time": edited(host_s="fast"),
    "no time of a call": edited(host_s=0.0),
    "list of versions": edited(versions=["1"]),
}


@pytest.mark.parametrize("what", NOT_RESULTS)
def test_what_is_not_results_is_refused_in_one_sentence(tmp_path, what):
    path, content = tmp_path / "x.json", NOT_RESULTS[what]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"x\.json is not a file of benchmark results: .") as refused:
        Results.read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (edited(colour="red"), "'colour'"),
        (edited(provider=...), "'provider'"),
        (edited(device=...), "'device'"),
        (edited(status="fine"), "'fine'"),
        (edited(median_s=-1.0), "median_s"),
    ],
)
def test_what_is_wrong_with_it_is_named(tmp_path, content, named):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=named):
        Results.read(tmp_path / "x.json")


def test_an_unknown_field_of_the_whole_is_refused(tmp_path):
    given = {**json.loads(edited()), "colour": "red"}
    (tmp_path / "x.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"x\.json is not a file of benchmark results: .*'colour'"):
        Results.read(tmp_path / "x.json")


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Results.read(tmp_path / "nowhere.json")


def test_results_in_a_missing_folder_leave_nothing(kept, tmp_path):
    with pytest.raises(OSError, match=r"nowhere/x\.json") as refused:
        kept.write(tmp_path / "nowhere" / "x.json")
    assert refused.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_results_in_a_read_only_folder_leave_nothing(kept, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=r"x\.json"):
        kept.write(tmp_path / "x.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_results_appear_whole_or_not_at_all(kept, tmp_path, monkeypatch, error, existing):
    if existing:
        (tmp_path / "x.json").write_text("mine")
    write = Path.write_bytes

    def full(self, content):
        write(self, content[: len(content) // 2])
        assert len(os.listdir(tmp_path)) == existing + 1
        raise error

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(type(error)):
        kept.write(tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["x.json"] * existing
    assert not existing or (tmp_path / "x.json").read_text() == "mine"


def test_results_do_not_replace_what_is_no_file(kept, tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json exists and is not a file"):
        kept.write(tmp_path / "x.json")
    assert os.listdir(tmp_path / "x.json") == []
