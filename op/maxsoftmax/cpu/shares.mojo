"""Work that is shared out to the cores."""

from std.atomic import Atomic
from std.math import ceildiv
from std.runtime import parallelism_level
from std.sys import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

from ..queue import Queue
from ..io.rows import Rows
from .memory import LINE, end_streams
from .tuning import GRAIN, SHARES, SPINS


comptime NUMBERS = LINE // 8
"""How far numbers are apart that cores change often: a line."""


struct Shares(Iterable, Iterator, TrivialRegisterPassable):
    """The numbers below `count`, in contiguous shares. Each core takes those of a range of its own, which lie one after the other, and then what is left of others' ranges.
    """

    comptime Element = Int
    comptime IteratorType[
        iterable_mut: Bool, //, iterable_origin: Origin[mut=iterable_mut]
    ]: Iterator = Self

    var count: Int
    """How many numbers there are."""
    var shares: Int
    """In how many shares."""
    var workers: Int
    """How many cores there are, and so many ranges of shares."""
    var taken: Pointer[Int64, MutUntrackedOrigin]
    """How many shares of each range were asked for, by all cores together, each number in a line of its own."""
    var core: Int
    """Which core this is."""
    var done: Int
    """How many ranges it has found to be done."""
    var next: Int
    """The next number of this core's share."""
    var end: Int
    """Where its share ends."""

    @inline(.always)
    def __init__(
        out self,
        count: Int,
        shares: Int,
        workers: Int,
        taken: Pointer[Int64, MutUntrackedOrigin],
    ):
        """All of them, of which nobody has any yet."""
        self.count = count
        self.shares = shares
        self.workers = workers
        self.taken = taken
        self.core = 0
        self.done = 0
        self.next = 0
        self.end = 0

    @inline(.always)
    def of(self, core: Int) -> Self:
        """Returns them for a core, which has none yet."""
        var mine = self
        mine.core = core
        return mine

    def __iter__(ref self) -> Self.IteratorType[origin_of(self)]:
        return self

    @inline(.always)
    def __next__(mut self) raises StopIteration -> Int:
        """Returns the next number of this core's share, or the first of the next share.
        """
        if self.next == self.end:
            var share = self._share()
            while share < 0:
                self.done += 1
                if self.done >= self.workers:
                    raise StopIteration()
                share = self._share()
            var size, more = divmod(self.count, self.shares)
            self.next = share * size + min(share, more)
            self.end = self.next + size + Int(share < more)
        self.next += 1
        return self.next - 1

    @inline(.always)
    def _share(self) -> Int:
        """Returns the next share of the range that this core is at, or -1 if there is none.
        """
        var range = (self.core + self.done) % self.workers
        var first = range * self.shares // self.workers
        var end = (range + 1) * self.shares // self.workers
        var taken = self.taken.unsafe_offset(range * NUMBERS)
        var share = first + Int(Atomic.fetch_add(taken, 1))
        return share if share < end else -1


@inline(.always)
def parallel[
    F: def(Shares) -> None
](work: F, count: Int, elements: Int, queue: Queue) raises:
    """Calls `work` on each core that there is work for, or where it is if that is one; the shares that it goes through give
    every number below `count` to one of them.

    Parameters:
        F: What `work` is.

    Args:
        work: What to do.
        count: How many tasks there are, of about one size.
        elements: How many elements they have together.
        queue: The CPU to run on.

    Raises:
        Error: If other cores cannot be had, once no core is at work.
    """
    var workers = max(1, min(count, workers_for(elements, queue)))
    # How many shares of each range were asked for, and how many workers are done.
    var counts = List[Int64](length=(workers + 1) * NUMBERS, fill=0)
    var taken = counts.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var done = taken.unsafe_offset(workers * NUMBERS)
    var shares = Shares(
        count,
        min(count, max(workers * SHARES, elements // GRAIN)),
        workers,
        taken,
    )

    # Once for one core and for many: kernels are long, and what is compiled twice takes twice as long to compile.
    @inline(.never)
    def on_core(core: Int) {imm}:
        work(shares.of(core))
        end_streams()
        # The last that is done with anything of the caller's.
        _ = Atomic.fetch_add(done, 1)

    # The caller is one of the workers: it is awake, and would only wait. On two cores 1024×1024 float32 take 140 us, with
    # two others 440.
    var failure: Optional[Error] = None
    if workers > 1:
        try:
            queue.ctx.enqueue_cpu_range(on_core, count=workers - 1)
        except e:
            failure = e^
    var looks = SPINS
    if not failure:
        on_core(workers - 1)
        while looks > 0 and Atomic[Int64].load(done) < Int64(workers):
            looks -= 1
            _pause()
    # After a failure, too: some may have been enqueued, and what they use ends with this call.
    if failure or looks == 0:
        queue.ctx.synchronize()
    _ = counts^
    if failure:
        raise failure.take()


@inline(.always)
def _pause():
    """Lets the other thread of a core go first, for a moment."""
    comptime if CompilationTarget.is_x86():
        llvm_intrinsic["llvm.x86.sse2.pause", NoneType]()


@inline(.always)
def share_rows[F: def(Int) -> None](task: F, rows: Rows, queue: Queue) raises:
    """Calls task(row) for every row, on as many cores as there is work for."""
    share_tasks(task, rows.count(), rows.count() * rows.n, queue)


@inline(.always)
def share_tasks[
    F: def(Int) -> None
](task: F, count: Int, elements: Int, queue: Queue) raises:
    """Calls task(0) … task(count - 1), which have so many elements together, on as many cores as there is work for.
    """

    @inline(.always)
    def work(shares: Shares) {imm}:
        for i in shares:
            task(i)

    parallel(work, count, elements, queue)


def workers_for(elements: Int, queue: Queue) -> Int:
    """Returns on how many cores to compute so many."""
    # Who wants one thread may have no others: what a fork leaves of them are their names.
    if queue.workers == 1:
        return 1
    var most = queue.workers if queue.workers > 0 else parallelism_level()
    return min(most, ceildiv(elements, GRAIN))
