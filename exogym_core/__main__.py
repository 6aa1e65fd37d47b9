"""`python -m exogym_core` is `netgym`."""

import sys

from exogym_core.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
