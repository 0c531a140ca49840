"""Fails if `mojo format` would change a Mojo file: the formatter has no check of its own that names them all."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

root = Path(__file__).parents[1]
with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder)
    files = [path.relative_to(root) for top in ("op", "tests") for path in sorted((root / top).rglob("*.mojo"))]
    for file in files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, copy / file)
    subprocess.run([shutil.which("mojo"), "format", "--quiet", str(copy)], check=True)
    changed = [str(file) for file in files if (copy / file).read_bytes() != (root / file).read_bytes()]
if changed:
    sys.exit(f"not formatted by `mojo format`: {', '.join(changed)}")
print(f"{len(files)} Mojo files are formatted")
