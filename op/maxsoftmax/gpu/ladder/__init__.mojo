"""The teaching rungs, from the naive kernel up, each reproducing a published one and readable on its own."""

from ...io.rows import Rows, Source, Target
from ...queue import Queue
from .elementwise import elementwise
from .multipass import multipass
from .naive import naive
from .online import online
from .split import split
from .tree import tree
from .tree_blocked import tree_blocked
from .vector import vector
from .warp import warp


def rung[
    algorithm: StaticString, dtype: DType, block_size: Int, unroll: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Enqueues the softmax of every row along the last axis by the kernel of a name.
    """
    comptime if algorithm == "elementwise":
        elementwise[dtype, block_size](y, x, rows, queue)
    elif algorithm == "naive":
        naive[dtype, block_size](y, x, rows, queue)
    elif algorithm == "tree":
        tree[dtype, block_size](y, x, rows, queue)
    elif algorithm == "tree_blocked":
        tree_blocked[dtype, block_size](y, x, rows, queue)
    elif algorithm == "warp":
        warp[dtype, block_size](y, x, rows, queue)
    elif algorithm == "vector":
        vector[dtype, block_size, unroll](y, x, rows, queue)
    elif algorithm == "online":
        online[dtype, block_size, unroll](y, x, rows, queue)
    elif algorithm == "multipass":
        multipass[dtype, block_size](y, x, rows, queue)
    elif algorithm == "split":
        split[dtype, block_size](y, x, rows, queue)
    else:
        comptime assert False, "there is no such algorithm"
