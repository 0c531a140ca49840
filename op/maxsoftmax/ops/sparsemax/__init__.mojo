"""Sparsemax, and its gradient: the probabilities that are nearest to a row's logits, most of them exactly 0 (Martins and
Astudillo 2016, arXiv 1602.02068).

y = max(z - t, 0), where z = x - max x, and t is the threshold that makes a row sum to 1. The excess f(t) = Σ max(z - t, 0) - 1
is convex and falls in straight pieces, whose slope is the number of elements above t. So Newton's steps from t = -1, where f
is not negative, never pass the threshold, and reach it once a step leaves the same elements above. If a step leaves a share
a of f and a share b of the slope, then a + b ≤ 1: f times the slope falls to a quarter at least, which for 2^20 float32 takes
about 30 steps at most. Logits of a language model take 4 to 7, on a CPU 1 to 3: rows along the last axis begin there at the
threshold of some of their largest elements, which is not above that of all.

A step is of what elements exceed the current threshold by, not of the elements: towards the end these sum to 1, and what
rounding did to earlier steps is made up for.

Special values need no branches of their own: for NaN, +inf and a row of nothing but -inf some z is NaN, and so is the sum.

The bits of a row depend on its elements, its length, its dtype, and whether it lies along the last axis. Which chain of additions an element belongs to follows from
its index, and chains merge in a fixed order.
"""

from .direct import sparsemax, sparsemax_backward
