"""Entry point of `python -m netgym`."""

import sys

from exogym_core.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
