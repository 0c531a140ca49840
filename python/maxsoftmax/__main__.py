"""`python -m maxsoftmax` is the command `maxsoftmax`."""

import sys

from maxsoftmax.cli import main

sys.exit(main())
