"""`python -m maxsoftmax` is the command `maxsoftmax`."""

import sys

from maxsoftmax._commands.cli import main

sys.exit(main())
