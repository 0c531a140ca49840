"""C functions of the kernels of `maxsoftmax`: what Python, torch and XLA call without a graph.

Every file but `border.mojo` and `xla.mojo` is one op, of which `mojo build --emit shared-lib -I op -I op/maxsoftmax_native/cpu
-D DTYPE=float32 -D TARGET=cpu` makes a library of these functions (one of all ops has the op's name behind those of the last
three):

    void *maxsoftmax_open(int64_t device, char **error)
        Opens the CPU (-1) or a GPU (its index), once a process: a context of one library is good in all.
    int64_t maxsoftmax_scratch(const int64_t *call)
        The bytes of device memory that a call needs beside its arguments; negative where the call is wrong.
    char *maxsoftmax_run(const int64_t *call, void *stream, void *...)
        Computes, on a GPU enqueues. Returns NULL, or an error text to be released with free(): its first character is the
        status, V for a wrong value and R for anything else.
    XLA_FFI_Error *maxsoftmax_xla(XLA_FFI_CallFrame *frame)
        Does the same for XLA; `softmax_forms`, `cross_entropy_gradient` and `kl_divergence` have none.

`call` is an array of what does not change from one tensor to the next: the context; outer, n and inner of the row-major
memory (see `Rows`); the most threads on a CPU, or the bytes of scratch memory on a GPU, or 0; and from there on the op's
options. Nothing raises, waits or allocates device memory on the way.
"""
