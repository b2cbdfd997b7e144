"""Builds the compiled kernels in place: `python -m fastweights.kernels.native`."""

import sys

from fastweights.kernels.native.build import BuildError, build

try:
    sys.stdout.write(f"{build()}\n")
except BuildError as error:
    sys.exit(str(error))
