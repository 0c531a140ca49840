"""What is done vector by vector, and vectors folded into narrower ones, in as short a chain of operations as a row of a few
vectors has time for."""

from ..math.online import Sum


@inline(.always)
def larger[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width], m: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the larger of `x` and `m`, or `m` where `x` is NaN: one instruction, where `max` is three.
    """
    return x.gt(m).select(x, m)


@inline(.always)
def fold_max[
    dtype: DType, lanes: SIMDLength, //, width: SIMDLength
](m: SIMD[dtype, lanes]) -> SIMD[dtype, width]:
    """Returns the largest of every `lanes` / `width` elements, none of them NaN.
    """
    comptime if lanes == width:
        return rebind[SIMD[dtype, width]](m)
    else:
        comptime half = lanes // 2
        return fold_max[width](
            larger(m.slice[half](), m.slice[half, offset=half]())
        )


@inline(.always)
def fold_sum[
    dtype: DType, lanes: SIMDLength, //, width: SIMDLength
](terms: SIMD[dtype, lanes]) -> SIMD[dtype, width]:
    """Returns the sum of every `lanes` / `width` elements, by halves: four terms round twice, which the accuracy can
    bear.
    """
    comptime if lanes == width:
        return rebind[SIMD[dtype, width]](terms)
    else:
        comptime half = lanes // 2
        return fold_sum[width](
            terms.slice[half]() + terms.slice[half, offset=half]()
        )


@inline(.always)
def collapse[
    dtype: DType, lanes: SIMDLength, //
](d: Sum[dtype, lanes]) -> Sum[dtype, 1]:
    """Returns the sum of all lanes, as `Sum.collapse` does; where there is a wider dtype, in that, in a third of the time.
    """
    comptime if dtype == DType.float64:
        return d.collapse()
    else:
        comptime wide = DType.float64
        var exact = fold_sum[1](d.value.cast[wide]() - d.excess.cast[wide]())
        var result = Sum[dtype, 1](exact.cast[dtype]())
        result.excess = (result.value.cast[wide]() - exact).cast[dtype]()
        return result


@inline(.always)
def spread[
    dtype: DType, rows: SIMDLength, //, width: SIMDLength
](values: SIMD[dtype, rows]) -> SIMD[dtype, width]:
    """Returns one value in each of `width` lanes, or as many as there are lanes as they are.
    """
    comptime if rows == 1:
        return SIMD[dtype, width](values[0])
    else:
        return rebind[SIMD[dtype, width]](values)


@inline(.always)
def each[
    F: def[n: SIMDLength](Int, Int) -> None, //, step: Int, rest: Int
](body: F, start: Int, stop: Int, end: Int) -> Int:
    """Calls `body[n](i, count)` for the numbers `i` from `start` to `stop`, `n` at a time, of which `count` are below `end`:
    `n` is `step` as long as so many are, and then `rest`. Returns the first number that was not given to `body`.
    """
    var i = start
    var last = min(stop, end - step + 1)
    while i < last:
        body[SIMDLength(step)](i, step)
        i += step
    while i < stop:
        body[SIMDLength(rest)](i, end - i)
        i += rest
    return i


@inline(.always)
def each_from[
    F: def[n: SIMDLength](Int, Int) -> None, //, step: Int, rest: Int
](body: F, start: Int, line: Int, stop: Int, end: Int) -> Int:
    """Calls `body` as `each` does, but that where `n` is `step`, `i` is `line` or so many times `step` more.
    """
    var i = start
    while i < min(line, stop):
        body[SIMDLength(rest)](i, min(line, end) - i)
        i += rest
    return each[step, rest](body, min(i, max(line, start)), stop, end)
