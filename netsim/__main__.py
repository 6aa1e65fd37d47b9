"""Entry point of `python -m netsim`."""

import sys

from netsim.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
