"""`python -m exogym_core` is `netgym`."""

import sys

from exogym_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
