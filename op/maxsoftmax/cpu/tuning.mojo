"""What was measured of CPUs: where no name is given, of an Intel Xeon of two cores. `SPAN` shapes bits; all else is about time only."""

from std.sys import CompilationTarget

comptime IS_EPYC = CompilationTarget._arch().startswith("znver")
"""Whether the CPU is AMD's."""

comptime SPAN = 4096
"""Elements of a row that one pair is made of before pairs merge: in float32 half of a core's first cache, since they are
read twice. Constant, so that the same input gives the same bits whatever the number of cores."""

comptime VECTORS = 4
"""Vectors that are under way at a time, written as one so that their instructions take turns: each waits for the one
before it, and a core looks ahead no further than a few exponentials. 16384 float32 in the cache take 7.2 us, two vectors
at a time 8.2, one 11.0."""

comptime TOGETHER = 16
"""Rows at most that are reduced together, each step of all before the next of any: where a row waits for its lanes
to be folded, another goes on. 131072×64 float32 take 3.0 ms, one row at a time 3.5."""

comptime BLOCK = 4096
"""Elements at most of such rows, read twice and written twice: a core's first cache. On one core of an EPYC (Zen 4) 256×1024 float32 take 78 us,
with half of it 81."""

comptime BLOCK_STREAMED = BLOCK // 2
"""The same where results are streamed: exponentials wait in the core's own memory, which needs room in the first cache, too. On two cores of an EPYC
(Zen 5) 32768×256 float32 take 0.83 ms, with all of `BLOCK` 0.97, with a quarter 1.0 and more."""

comptime READ_AHEAD = 16384
"""Bytes by which reads are prefetched: while one span is computed, memory delivers the next. 8192×1024 float32 in
2.7 ms, without 3.6."""

comptime WRITE_AHEAD = 4096
"""The same for writes."""

comptime KEPT = 1 << 19
"""Bytes of a row's exponentials up to which they are stored and read again, and not computed again: they have to stay in
a core's second cache. One row in the cache, 50240 float32: 21 us, computed again 32."""

comptime KEPT_IN_RESULTS = 1 << 22 if IS_EPYC else KEPT
"""The same where exponentials wait in the results: the third cache will do. One core of an AMD EPYC (Zen 4), float32, kept and computed again: 1×151936
45 us and 67, 1×1000000 275 and 411, 32×500000 6.6 ms and 8.1. Nobody has measured other CPUs."""

comptime WIDTH = 1024
"""Most rows a panel: memory is read in pieces of this length, and as many pairs stay in the first cache."""

comptime GRAIN = 1 << 17
"""Fewest elements worth another thread: a core computes as many float32 in 62 us, and a thread that went to sleep, as MAX's
do after about as long, was awake only after 210 us in a virtual machine."""

comptime SHARES = 8
"""Shares a core, at least, that work is cut into if there are as many tasks; more where they would be much larger than a
grain. A core that is done with its own takes others', because cores are not equally fast: other threads of MAX, and who waits
for the result, run on one of them. On two cores 8192×1024 float32 take 2.0 ms in 64 shares, in 16 2.3, in two 2.8."""

comptime SPINS = 2000
"""How often whoever called looks, 44 us long on an EPYC (Zen 5), whether the other threads are done, before MAX is asked to wait for them: that takes 16 us
even if they are. On two of its cores 256×1024 float32 take 24 us instead of 43, 1024×1024 90 instead of 95 to 118."""

comptime NEVER = 1 << 62
"""More bytes than there are."""

comptime STREAMED = 1 << 24 if IS_EPYC else NEVER
"""Bytes of results from which on they are written past the caches, which would not hold them until they are read.

AMD EPYC (Zen 5, 2 cores, 32 MiB of third cache), float32, regular stores and streaming ones, us: 512×1024 49 and 51, 2048×1024 166 and 165, 3072×1024
260 and 261; 4096×1024 runs at 0.90 of a copy's rate and 1.03. Nobody has measured other CPUs."""
