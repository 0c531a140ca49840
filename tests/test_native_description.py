import maxsoftmax
from libraries import CPU, SOFTMAX
from maxsoftmax._native import build, description
from maxsoftmax._native.description import Library, Target, library


def test_what_a_kernel_does_not_leave_to_its_caller_makes_no_other_library():
    gpu = Target("gpu", "sm_90a")
    for target, algorithm in ((CPU, "auto"), (CPU, "naive"), (gpu, "auto")):
        one, other = (library("softmax", "float32", target, algorithm, block_size=size) for size in (128, 256))
        assert one == other
        assert one.defines().keys() - {"ALGORITHM"} == {"DTYPE", "TARGET"}
    online = library("softmax", "bfloat16", gpu, "online", block_size=512, unroll=2)
    assert online.defines() == {
        **{"DTYPE": "bfloat16", "TARGET": "gpu"},
        **{"ALGORITHM": "online", "BLOCK_SIZE": "512", "UNROLL": "2"},
    }


def test_libraries_have_names_of_their_own():
    made = [
        library(name, dtype, target)
        for name in description.POINTERS
        for dtype in description.DTYPES
        for target in (CPU, Target("gpu", "sm_90a"), Target("gpu", "gfx942"))
    ]
    names = [each.file_name(cpu) for each in made for cpu in ("", "x86-64-v4")]
    assert len(set(names)) == len(names) == len(set(map(build.key, made))) * 2
    assert "softmax-float32-gpu-sm_90a-x86-64-v4.so" in names


def test_every_function_has_its_libraries():
    assert {name for names in description.OPS.values() for name in names} == set(description.POINTERS)
    others = {"SoftmaxKernel", "drop_into", "dropin", "extension", "ops", "softmax_kernels", "warm_up"}
    assert set(description.OPS) - {"sharded", "jax.cross_entropy"} == set(maxsoftmax.__all__) - others


def test_a_bundle_has_all_that_is_for_a_cpu():
    bundle = Library("all", "float32", CPU)
    assert SOFTMAX.bundle() == Library("statistics", "float32", CPU).bundle() == bundle
    assert SOFTMAX._replace(dtype="float16").bundle() != bundle
    for other in (bundle, SOFTMAX._replace(algorithm="naive"), SOFTMAX._replace(target=Target("gpu", "sm_90a"))):
        assert other.bundle() is None
    text = build.bundle.text()
    assert {name for name in description.POINTERS if f'@export("maxsoftmax_run_{name}")' in text} == {
        *description.WHOLE
    }
    assert Library("shard", "float32", CPU).bundle() is None
    assert "def run_cross_entropy(call: Int, stream: Int, p0: Int, p1: Int, p2: Int, p3: Int, scratch: Int)" in text
    assert str(bundle) == "every op of float32 for the CPU"
