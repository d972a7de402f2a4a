"""`python -m phub_collective` is `phub`."""

import sys

from phub_collective.cli import main

if __name__ == "__main__":
    sys.exit(main())
