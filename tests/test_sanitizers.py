import shutil
import subprocess
import sys

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["softmax", "relatives"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(root, environment, tool, what):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    script = str(root / "tests" / "sanitize.py")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, script, what, "gpu", tool]
    # MAX's own memory pool would hide accesses beyond the end of a buffer.
    env = {**environment, "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "all correct" in output
    assert "ERROR SUMMARY: 0 errors" in output or "0 hazards displayed (0 errors, 0 warnings)" in output, output
    print(output[-400:])
