"""Entry point of `python -m fastweights.cli`."""

import sys

from fastweights.cli import main

sys.exit(main())
