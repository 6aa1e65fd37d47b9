"""`python -m exogym_core` is `netgym`."""

from exogym_core.cli import main

if __name__ == "__main__":
    main()
