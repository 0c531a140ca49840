import numpy as np
from fakes import CASE, Watch, array
from max.driver import CPU
from maxsoftmax._bench import clock as clocks
from maxsoftmax._bench.clock import HostClock
from maxsoftmax._bench.data import Inputs


def test_the_host_s_clock_times_every_lap_but_the_first(monkeypatch):
    stopped = Watch()
    monkeypatch.setattr(clocks, "time", stopped)
    lengths = iter([100.0, 8.0, 4.0, 12.0])

    def lap():
        stopped.now += next(lengths)
        return [None] * 4

    assert HostClock().seconds(lap, 3, replay=False) == [2.0, 1.0, 3.0]
    assert next(lengths, None) is None


def test_the_host_s_copy_copies_every_input_every_time():
    inputs = Inputs.place(CASE, 3, CPU()).buffers
    lap = HostClock().copy(inputs)
    for _ in range(2):
        for x in inputs:
            array(x)[...] += 1
        outputs = lap()
        for x, y in zip(inputs, outputs, strict=True):
            np.testing.assert_array_equal(array(x), array(y))
    assert len({b._data_ptr() for b in (*inputs, *outputs)}) == 6
