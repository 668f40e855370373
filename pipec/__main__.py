"""``python -m pipec``: the command line."""

import sys

from pipec.cli import main

sys.exit(main())
