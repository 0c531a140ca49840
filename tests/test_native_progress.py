import contextlib
import io
import sys
import time

from libraries import SOFTMAX
from maxsoftmax import _native
from maxsoftmax._native import load, progress


def test_an_observer_sees_each_build_and_nothing_is_written(fresh, compiler, capfd):
    seen = []

    @contextlib.contextmanager
    def observer(library):
        seen.append(str(library))
        yield
        seen.append("built")

    with _native.observing(observer):
        load.load(SOFTMAX)
    assert seen == ["softmax of float32 for the CPU", "built"]
    assert capfd.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_it_is_wiped_in_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(sys, "stderr", terminal)
    display = progress.Display()
    with display.showing("building this"):
        with display.showing("building that"):
            time.sleep(0.2)
        time.sleep(0.2)
    shown = terminal.getvalue()
    assert "building this" in shown
    assert "building that (and 1 more)" in shown
    assert shown.rstrip().endswith("\x1b[2K")
    assert display._status is None


def test_without_stderr_nothing_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.shown(SOFTMAX):
        pass
