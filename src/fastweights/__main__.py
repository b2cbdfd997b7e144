"""``python -m fastweights``: the command, as ``python -m fastweights.cli`` is."""

from fastweights.cli.__main__ import run

if __name__ == "__main__":
    run()
