import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import maxsoftmax
import numpy as np
import pytest
import scipy.special
from commands import fails, misused
from contract import check
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import DeviceRef
from maxsoftmax import _cache as cache
from maxsoftmax import _native
from maxsoftmax._commands import cli, demo, npy
from maxsoftmax._commands.console import Console
from maxsoftmax._graph import runtime
from rich.progress import Progress

COMMAND = [sys.executable, "-m", "maxsoftmax"]

# The command with a kernel that takes its time, so that nothing has to be compiled and there is time to interrupt.
SLOW = """
import sys, time
from maxsoftmax._commands import cli, npy

def slow(x, axis=-1, **options):
    if x.size:
        time.sleep(0.2)
    return x

npy.softmax = slow
npy.SLAB = 4
sys.exit(cli.main())
"""


@pytest.fixture
def plain(environment):
    """The environment without what makes rich believe in a terminal, or in none."""
    forced = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    return {name: value for name, value in environment.items() if name not in forced}


@pytest.fixture
def x(tmp_path, monkeypatch):
    """Logits in x.npy of the current folder."""
    monkeypatch.chdir(tmp_path)
    array = (np.random.default_rng(0).standard_normal((6, 5, 4)) * 4).astype(np.float32)
    np.save("x.npy", array)
    return array


@pytest.fixture
def no_compiling(monkeypatch):
    monkeypatch.setattr(_native.build, "built", lambda *what: pytest.fail(f"builds {what}"))


def command(*arguments, environment):
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False
    )


def test_demo_shows_both_cases_on_every_device(plain):
    result = command("demo", environment=plain)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for device in runtime.devices():
        for case in demo.cases():
            assert re.search(rf"\b{case}\b.*\b{runtime.name(device)}\b.*\bms\b", result.stdout)
    assert "WRONG" not in result.stdout


def test_demo_s_first_row_is_puzzle_18():
    name, case = next(iter(demo.cases().items()))
    assert name.startswith("puzzle 18")
    x, dims = case
    assert (x.shape, x.dtype, dims) == ((128,), np.float32, (128,))
    for device in runtime.devices():
        graphs = demo.graphs(DeviceRef.from_device(device), demo.cases().values())
        model = InferenceSession(devices=[device]).load_all(graphs, custom_extensions=[maxsoftmax.extension()])[
            "softmax_0"
        ]
        (result,) = model.execute(Buffer.from_numpy(x).to(device))
        # As the puzzle checks it.
        y = result.to_numpy()
        np.testing.assert_allclose(y, scipy.special.softmax(x), rtol=1e-5)
        assert np.round(np.sum(y), 5) == 1
        assert demo.measure(device)[0].correct


def test_demo_fails_where_a_softmax_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_softmax", lambda model, x, device: np.full_like(x, 1 / x.shape[-1]))
    assert cli.main(["demo"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_run_writes_beside_the_input_and_is_quiet_without_a_terminal(x, plain):
    result = command("run", "x.npy", environment=plain)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "x.softmax.npy: softmax of 6×5×4 float32, as float32\n"
    assert result.stderr == ""
    assert sorted(os.listdir()) == ["x.npy", "x.softmax.npy"]
    y = np.load("x.softmax.npy")
    check(y, x)
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x))


def test_run_shows_its_progress_on_a_terminal_and_wipes_it(x, plain, tmp_path):
    terminal, theirs = pty.openpty()
    arguments = [*COMMAND, "run", "x.npy", "-o", "y.npy"]
    env = {**plain, "TERM": "xterm", cache.VARIABLE: str(tmp_path / "empty")}
    process = subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 300
    while select.select([terminal], [], [], deadline - time.monotonic())[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # How Linux says that the other side is closed.
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    assert process.communicate(timeout=60)[0].decode() == "y.npy: softmax of 6×5×4 float32, as float32\n"
    assert process.returncode == 0
    assert "compiling softmax of float32 for the CPU" in shown.decode()
    # The cursor comes back, on a line that was erased.
    assert b"\x1b[?25h" in shown
    assert shown.rstrip().endswith(b"\x1b[2K")
    check(np.load("y.npy"), x)


def piped(x, *arguments, environment, output=subprocess.PIPE):
    """Runs the command with an array, or bytes, as standard input."""
    given = x
    if isinstance(x, np.ndarray):
        file = io.BytesIO()
        np.save(file, x)
        given = file.getvalue()
    return subprocess.run(
        [*COMMAND, "run", *arguments], input=given, env=environment, stdout=output, stderr=subprocess.PIPE, timeout=300,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("output", [[], ["-o", "-"]])
def test_run_reads_and_writes_pipes(x, plain, output):
    result = piped(x, "-", *output, "--axis", "1", environment=plain)
    assert result.stderr == "standard output: softmax of 6×5×4 float32, as float32\n".encode()
    y = np.load(io.BytesIO(result.stdout))
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x, axis=1))
    assert os.listdir() == ["x.npy"]


def test_run_reads_a_pipe_or_writes_one(x, plain):
    result = piped(x, "-", "-o", "y.npy", environment=plain)
    assert (result.stdout, result.stderr) == ("y.npy: softmax of 6×5×4 float32, as float32\n".encode(), b"")
    result = piped(b"", "x.npy", "-o", "-", environment=plain)
    np.testing.assert_array_equal(np.load(io.BytesIO(result.stdout)), np.load("y.npy"))
    np.testing.assert_array_equal(np.load("y.npy"), maxsoftmax.softmax(x))


def test_a_pipe_that_brings_no_array_is_named(x, plain):
    result = piped(b"1 2 3\n", "-", environment=plain)
    assert result.returncode == 1
    assert result.stderr == b"maxsoftmax: standard input is not a .npy file, as numpy.save writes them\n"
    assert result.stdout == b""


def test_an_array_is_not_written_to_a_terminal(x, plain):
    terminal, theirs = pty.openpty()
    result = piped(b"", "x.npy", "-o", "-", environment=plain, output=theirs)
    os.close(theirs)
    os.close(terminal)
    assert result.returncode == 1
    assert b"standard output is a terminal: send it to a file or a pipe" in result.stderr


@pytest.fixture
def on_terminal(monkeypatch):
    """Returns the lines that a function leaves on a terminal of so many columns, given its console."""
    for name, value in {"TERM": "xterm", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}.items():
        monkeypatch.setenv(name, value)

    def shown(width, show):
        console = Console(stderr=True, width=width)
        console.file = io.StringIO()
        show(console)
        drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
        return [line for line in re.split(r"[\r\n]", drawn) if line.strip()]

    return shown


@pytest.mark.parametrize("width", [30, 80])
def test_what_is_compiled_is_shown_with_the_time_on_one_line(on_terminal, width):
    def show(console):
        with console.working("compiling softmax of float32 for the CPU: seconds the first time"):
            time.sleep(1.2)

    lines = on_terminal(width, show)
    assert max(map(len, lines)) <= width
    assert all("compiling" in line and re.search(r"0:00:0\d *$", line) for line in lines)
    assert any("0:00:01" in line for line in lines)


@pytest.mark.parametrize("width", [30, 80])
def test_the_bar_of_a_file_fits_the_terminal(x, monkeypatch, capsys, on_terminal, width):
    def show(console):
        monkeypatch.setattr(cli, "log", console)
        assert cli.main(["run", "x.npy"]) == 0

    lines = on_terminal(width, show)
    assert max(map(len, lines)) <= width
    assert all("━" in line for line in lines)
    assert any("480/480 bytes" in line for line in lines) == (width == 80)


def test_without_a_terminal_nothing_is_drawn(capsys):
    with Console(stderr=True).working("compiling"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["-o", "y.npy"], ["--output=y.npy"]])
def test_run_writes_where_it_is_told(x, capsys, arguments):
    assert cli.main(["run", "x.npy", *arguments]) == 0
    assert capsys.readouterr() == ("y.npy: softmax of 6×5×4 float32, as float32\n", "")
    assert sorted(os.listdir()) == ["x.npy", "y.npy"]


@pytest.mark.parametrize(("argument", "axis"), [("0", 0), ("1", 1), ("-1", -1), ("-2", -2), ("all", None)])
def test_run_takes_an_axis(x, capsys, argument, axis):
    assert cli.main(["run", "x.npy", "--axis", argument]) == 0
    y = np.load("x.softmax.npy")
    check(y, x, axis)
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x, axis=axis))


def test_run_takes_a_device(x, device, capsys):
    assert cli.main(["run", "x.npy", "--device", device]) == 0
    np.testing.assert_array_equal(np.load("x.softmax.npy"), maxsoftmax.softmax(x, device=device))


def test_run_takes_an_algorithm(x, device, capsys):
    algorithm = {"cpu": "naive", "gpu": "tree"}[device]
    assert cli.main(["run", "x.npy", "--device", device, "--algorithm", algorithm]) == 0
    np.testing.assert_array_equal(np.load("x.softmax.npy"), maxsoftmax.softmax(x, device=device, algorithm=algorithm))
    check(np.load("x.softmax.npy"), x)


def test_run_takes_scalars_and_empty_arrays(x, capsys):
    np.save("x.npy", np.float32(3))
    assert cli.main(["run", "x.npy"]) == 0
    assert capsys.readouterr().out == "x.softmax.npy: softmax of a scalar float32, as float32\n"
    np.save("x.npy", np.empty((0, 3), np.float32))
    assert cli.main(["run", "x.npy"]) == 0
    assert np.load("x.softmax.npy").shape == (0, 3)


def test_file_names_are_printed_as_they_are(x, capsys):
    assert cli.main(["run", "x.npy", "-o", "[red]y :cat:.npy"]) == 0
    assert capsys.readouterr().out.startswith("[red]y :cat:.npy: ")


@pytest.mark.usefixtures("no_compiling")
def test_a_missing_file_is_named(x, capsys):
    assert fails(capsys, "run", "nowhere.npy") == "maxsoftmax: nowhere.npy: No such file or directory\n"


@pytest.mark.usefixtures("no_compiling")
def test_a_folder_is_no_input(x, capsys):
    assert "Is a directory" in fails(capsys, "run", ".")


@pytest.mark.usefixtures("no_compiling")
def test_what_is_not_an_array_is_refused(x, capsys):
    Path("text.npy").write_text("1 2 3\n")
    np.savez("archive.npz", x=x)
    np.save("objects.npy", np.array([{}, 1], object))
    Path("short.npy").write_bytes(Path("x.npy").read_bytes()[:-1])
    Path("header.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b" " * 0xFFFF)
    for name in ("text.npy", "archive.npz", "objects.npy", "short.npy", "header.npy"):
        assert name in fails(capsys, "run", name)
    assert "it holds Python objects, not numbers" in fails(capsys, "run", "objects.npy")
    assert "the file is shorter than its header says" in fails(capsys, "run", "short.npy")


@pytest.mark.usefixtures("no_compiling")
@pytest.mark.parametrize("output", ["text/y.npy", "nowhere/y.npy", "folder", "pipe", "y" * 300])
def test_an_output_that_cannot_be_written_is_named(x, capsys, output):
    Path("text").touch()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    assert output in fails(capsys, "run", "x.npy", "-o", output)
    assert os.listdir("folder") == []
    assert Path("pipe").is_fifo()


@pytest.mark.usefixtures("no_compiling")
def test_an_unknown_device_is_refused_with_those_present(x, capsys):
    message = fails(capsys, "run", "x.npy", "--device", "tpu")
    for device in ("tpu", *map(runtime.name, runtime.devices())):
        assert f"'{device}'" in message


@pytest.mark.usefixtures("no_compiling")
def test_an_unknown_algorithm_is_refused_with_those_there_are(x, capsys, device):
    message = fails(capsys, "run", "x.npy", "--algorithm", "fastest", "--device", device)
    for algorithm in {"cpu": ["auto"], "gpu": ["auto", "tree"]}[device]:
        assert f"'{algorithm}'" in message
    assert ("'tree'" in message) == (device == "gpu")


@pytest.mark.usefixtures("no_compiling")
@pytest.mark.parametrize("axis", ["3", "-4", str(10**30)])
def test_an_axis_out_of_range_is_refused(x, capsys, axis):
    assert axis in fails(capsys, "run", "x.npy", "--axis", axis)


@pytest.mark.usefixtures("no_compiling")
@pytest.mark.parametrize("dtype", ["c8", "m8[s]", "U3", "f4,i4"])
def test_an_unsupported_dtype_is_refused(x, capsys, dtype):
    np.save("odd.npy", np.zeros(3, dtype))
    assert "float32" in fails(capsys, "run", "odd.npy")


@pytest.mark.usefixtures("no_compiling")
def test_a_full_disk_is_said(x, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert "y.npy: No space left" in fails(capsys, "run", "x.npy", "-o", "y.npy")


def test_an_error_leaves_a_process_quickly_with_status_1_and_no_traceback(x, plain):
    start = time.monotonic()
    result = command("run", "nowhere.npy", environment=plain)
    assert time.monotonic() - start < 20
    assert result.returncode == 1
    assert (result.stdout, result.stderr) == ("", "maxsoftmax: nowhere.npy: No such file or directory\n")


def test_a_reader_that_has_seen_enough_is_no_error(plain):
    process = subprocess.Popen([*COMMAND, "info"], env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_a_terminal_without_unicode_is_no_error(x, plain):
    np.save("x.npy", x[:0])
    result = command("run", "x.npy", environment={**plain, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "x.softmax.npy: softmax of 0\\xd75\\xd74 float32, as float32\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("existing", [True, False])
def test_an_interrupted_run_leaves_nothing(x, plain, number, existing):
    if existing:
        Path("y.npy").write_text("mine")
    before = sorted(os.listdir())
    arguments = [sys.executable, "-c", SLOW, "run", "x.npy", "-o", "y.npy"]
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this process ignores the signal, as under nohup, and so would its children")
    process = subprocess.Popen(arguments, env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while sorted(os.listdir()) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir()) == len(before) + 1
    process.send_signal(number)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130
    assert sorted(os.listdir()) == before
    assert not existing or Path("y.npy").read_text() == "mine"


def test_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"maxsoftmax {maxsoftmax.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["demo", "run", "info", "--version"]),
        (["run", "--help"], ["INPUT.npy", "--output", "--axis", "--device", "--algorithm"]),
        (["demo", "--help"], ["usage: maxsoftmax demo"]),
        (["info", "--help"], ["usage: maxsoftmax info"]),
        (["completion", "--help"], ["usage: maxsoftmax completion"]),
    ],
)
def test_help(capsys, arguments, expected):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(arguments)
    printed = capsys.readouterr().out
    assert [word for word in expected if word not in printed] == []


@pytest.mark.parametrize("command", ["demo", "run", "bench", "tune", "train", "compile", "cache", "info", "completion"])
def test_the_help_of_a_command_is_a_sentence_and_the_variables(capsys, command):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\w\. (positional arguments|options):", printed)
    assert [name for name in cli.VARIABLES if f"{name}, " not in printed.partition("Environment variables: ")[2]] == []


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_a_shell_completes_it(capsys, shell):
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [word for word in ("demo", "train", "--algorithm") if word not in script] == []
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, encoding="utf-8", check=True)


def test_without_shtab_completion_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert fails(capsys, "completion", "bash") == "maxsoftmax: completion needs shtab: pip install shtab\n"


def test_figures_are_json_where_that_is_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    cache.entry("model-1", "file", lambda path: path.write_bytes(b"x" * 1936))
    expected = {"folder": str(tmp_path / "cache"), "entries": {"model-1": 2000}}
    assert cli.main(["cache", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert cli.main(["cache", "--clear", "--json", str(tmp_path / "figures.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache: took away 2.0 kB in 1 entry\n"
    assert json.loads((tmp_path / "figures.json").read_text()) == {**expected, "freed": 2000}
    assert cli.main(["info", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["variables"][cache.VARIABLE] == str(tmp_path / "cache")
    assert list(told["devices"]) == [runtime.name(device) for device in runtime.devices()]


def test_what_is_told_beside_figures_on_standard_output_is_on_standard_error(capsys):
    arguments = ["bench", "--shape", "2x3", "--device", "cpu", "--providers", "numpy"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    printed, told = capsys.readouterr()
    assert [record["provider"] for record in json.loads(printed)["records"]] == ["numpy"]
    assert "standard output: 1 record\n" in told
    assert "GB/s" in told


def test_what_fails_leaves_standard_output_empty(capsys):
    assert "--resume needs --json FILE" in fails(capsys, "bench", "--resume", "--json", "-")


def test_the_figures_of_the_demo_are_json(capsys, monkeypatch):
    result = demo.Result("small", "cpu", 1.5, 0.25, 1e-8, 1.0)
    monkeypatch.setattr(demo, "measure", lambda device: [result])
    assert cli.main(["demo", "--json", "-"]) == 0
    assert result._asdict() in json.loads(capsys.readouterr().out)["results"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["what"], ["run"], ["run", "x.npy", "y.npy"], ["run", "x.npy", "--axis", "first"], ["demo", "x"], ["--what"]],
)
def test_wrong_usage_exits_with_2(capsys, arguments):
    misused(capsys, *arguments)


def test_info_tells_versions_devices_and_folders(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.tuning, "location", lambda: tmp_path / "tuned.json")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "[red]cache" / ("long" * 30)))
    monkeypatch.setenv("MODULAR_CACHE_DIR", str(tmp_path / "modular"))
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = [(line[:12].rstrip(), line[13:]) for line in printed.splitlines()]
    devices = [value.split()[0] for name, value in lines if name == "device"]
    assert devices == [runtime.name(device) for device in runtime.devices()]
    found = dict(lines)
    assert found["maxsoftmax"] == maxsoftmax.__version__
    assert re.match(r"\d+\.\d+", found["MAX"])
    assert re.match(r"\d+\.\d+", found["Mojo"])
    assert (Path(found["op package"]) / "__init__.mojo").is_file()
    assert found["cache"] == str(tmp_path / "[red]cache" / ("long" * 30))
    assert found["kept"] == "0 bytes in 0 entries"
    assert found["MAX's cache"] == str(tmp_path / "modular")
    assert found["tuned"] == f"{tmp_path / 'tuned.json'}, nothing yet"
    assert not (tmp_path / "[red]cache").exists()
    (tmp_path / "tuned.json").touch()
    cli.main(["info"])
    assert f"tuned        {tmp_path / 'tuned.json'}\n" in capsys.readouterr().out


def test_the_installed_command_is_this_one():
    (entry,) = entry_points(group="console_scripts", name="maxsoftmax")
    assert entry.load() is cli.main


def test_progress_reaches_the_whole(x, monkeypatch, capsys):
    monkeypatch.setattr(npy, "SLAB", 80)
    monkeypatch.setattr(npy, "softmax", lambda x, **options: x)
    done = []
    monkeypatch.setattr(Progress, "advance", lambda self, task, amount: done.append(amount))
    assert cli.main(["run", "x.npy"]) == 0
    assert len(done) > 1
    assert sum(done) == x.nbytes


@pytest.mark.parametrize("error", [RuntimeError("MAX cannot\ndo that"), ImportError("MAX cannot do that")])
def test_what_max_cannot_do_is_one_sentence(x, capsys, monkeypatch, error):
    def fail(*_, **options):
        raise error

    monkeypatch.setattr(npy, "softmax", fail)
    assert fails(capsys, "run", "x.npy") == "maxsoftmax: MAX cannot do that\n"


@pytest.mark.parametrize("more", [[], ["--clear"]])
def test_a_cache_that_is_not_used_is_no_empty_one(capsys, tmp_path, monkeypatch, more):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o770)
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    reason = "is not used, because others may write to it: make it private"
    assert reason in fails(capsys, "cache", *more)
    assert cli.main(["info"]) == 0
    assert f"kept         {folder} {reason}" in capsys.readouterr().out


def test_the_cache_is_shown_and_cleared(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache: 0 bytes in 0 entries\n"
    cache.entry("model-1", "file", lambda path: path.write_bytes(b"x" * 1936))
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache: 2.0 kB in 1 entry\n"
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache: took away 2.0 kB in 1 entry\n"
    assert os.listdir(tmp_path / "cache") == []
