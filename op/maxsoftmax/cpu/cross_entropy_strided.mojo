"""Cross entropy along an axis that is not the last, as that of images: what has to walk all of its rows, in panels."""

from std.math import ceildiv
from std.utils.numerics import nan

from ..exponential import Unit
from ..loss import Class, Smoothing, Targets, Upstream
from ..online import Sum, accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .memory import fetch, fetch_to_write, load, rounded, store, store_plain
from .panels import Panels
from .shares import share_tasks

comptime AHEAD = 4
"""Positions by which reads and writes are announced ahead."""


def distances[
    dtype: DType, //
](
    sums: Target[accumulator[dtype]()],
    pairs: Source[accumulator[dtype]()],
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the sum of m - x over each row.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        sums: One a row.
        pairs: (m, d) of each row.
        x: Logits.
        rows: Rows along an axis that is not the last.
        queue: The CPU to run on.
    """
    comptime accum = accumulator[dtype]()
    comptime lanes = Panels[accum].lanes
    comptime Vector = SIMD[accum, lanes]
    var panels = Panels[accum](rows, rows.inner, 1)

    @inline(.always)
    def write(panel: Int) {imm}:
        var outer, inner, count = panels.place(panel)
        var row = outer * rows.inner + inner
        var offset = rows.start(row)
        var vectors = ceildiv(count, Int(lanes))
        var maxima = List[Vector](length=vectors, fill=0)
        var found = List[Sum[accum, lanes]](length=vectors, fill={})
        for i in range(count):
            var vector, lane = divmod(i, Int(lanes))
            maxima[vector][lane] = pairs[unsafe_offset=2 * (row + i)]
        for i in range(rows.n):
            for vector in range(vectors):
                var column = vector * Int(lanes)
                var at = x.unsafe_offset(offset + i * rows.inner + column)
                fetch[1](at.unsafe_offset(AHEAD * rows.inner))
                found[vector].add(
                    maxima[vector] - load[lanes](at, count - column)
                )
        for vector in range(vectors):
            var column = vector * Int(lanes)
            store_plain(
                sums.unsafe_offset(row + column),
                found[vector].value,
                count - column,
            )

    share_tasks(write, panels.count(), rows.count() * rows.n, queue)


@fieldwise_init
struct _Gradients[accum: DType, lanes: SIMDLength](TrivialRegisterPassable):
    """What the gradients of neighbouring rows are computed from.

    Parameters:
        accum: The accumulator's dtype.
        lanes: How many rows.
    """

    comptime Vector = SIMD[Self.accum, Self.lanes]

    var m: Self.Vector
    """The largest logits."""
    var d: Self.Vector
    """Σ e^(x - m)."""
    var scale: Self.Vector
    """Gradients of the losses; NaN where the target is no class."""
    var counts: SIMD[DType.bool, Self.lanes]
    """Whether a row has a gradient at all, whatever is in it."""
    var targets: Self.Vector
    """The logits of the targets, which may be overwritten before their gradients are written."""

    @inline(.always)
    def of(
        self, logits: Self.Vector, wanted: Scalar[Self.accum]
    ) -> Self.Vector:
        """Returns the gradients of logits, of each of which `wanted` is the target's share.
        """
        var unit = Unit(self.m)
        var p = unit.exp(logits) / (self.d * unit.exp(self.m))
        return self.counts.select((p - wanted) * self.scale, Self.Vector(0))


def strided_gradients[
    dtype: DType, up: DType, //
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Targets,
    upstream: Upstream[up, accumulator[dtype]()],
    counted: Scalar[accumulator[dtype]()],
    smoothing: Smoothing[accumulator[dtype]()],
    rows: Rows,
    ignored: Int,
    queue: Queue,
) raises:
    """Writes the gradient of every row's logits.

    Parameters:
        dtype: Dtype of the logits.
        up: Dtype of the upstream gradient that a caller handed over.

    Args:
        dx: Gradients; may be the same memory as `x`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        upstream: Gradient of each row's loss.
        counted: What it is divided by.
        smoothing: Share of the target that is spread over all classes.
        rows: Rows along an axis that is not the last.
        ignored: The class of rows that do not count.
        queue: The CPU to run on.
    """
    comptime accum = accumulator[dtype]()
    comptime lanes = Panels[accum].lanes
    comptime Gradients = _Gradients[accum, lanes]
    var panels = Panels[accum](rows, rows.inner, 1)
    var even = smoothing.share / Scalar[accum](rows.n)
    var aim = smoothing.rest

    @inline(.always)
    def write(panel: Int) {imm}:
        var outer, inner, count = panels.place(panel)
        var row = outer * rows.inner + inner
        var offset = rows.start(row)
        var vectors = ceildiv(count, Int(lanes))
        var gradients = List[Gradients](
            length=vectors,
            fill=Gradients(0, 1, 0, SIMD[DType.bool, lanes](fill=False), 0),
        )
        for i in range(count):
            var vector, lane = divmod(i, Int(lanes))
            var target = Class.of(targets, row + i, rows.n, ignored)
            ref own = gradients[vector]
            own.m[lane] = pairs[unsafe_offset=2 * (row + i)]
            own.d[lane] = pairs[unsafe_offset=2 * (row + i) + 1]
            own.counts[lane] = not target.is_ignored
            own.scale[lane] = upstream[row + i] / counted
            if target.is_class:
                own.targets[lane] = x[
                    unsafe_offset=offset + i + Int(target.index) * rows.inner
                ].cast[accum]()
            else:
                own.scale[lane] = nan[accum]()
        # As if no class were wanted, and then the one that is.
        for i in range(rows.n):
            for vector in range(vectors):
                var column = vector * Int(lanes)
                var at = offset + i * rows.inner + column
                fetch[1](x.unsafe_offset(at + AHEAD * rows.inner))
                fetch_to_write[1](dx.unsafe_offset(at + AHEAD * rows.inner))
                var logits = load[lanes](x.unsafe_offset(at), count - column)
                store(
                    dx.unsafe_offset(at),
                    gradients[vector].of(logits, even),
                    count - column,
                )
        for vector in range(vectors):
            ref own = gradients[vector]
            var values = own.of(own.targets, even + aim)
            var column = vector * Int(lanes)
            for lane in range(min(Int(lanes), count - column)):
                var i = column + lane
                var target = Class.of(targets, row + i, rows.n, ignored)
                if target.is_class:
                    dx[
                        unsafe_offset=offset
                        + i
                        + Int(target.index) * rows.inner
                    ] = rounded[dtype](values[lane])

    share_tasks(write, panels.count(), rows.count() * rows.n, queue)
