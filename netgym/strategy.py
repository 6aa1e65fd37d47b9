"""The strategies, `OptimSpec` and the parts of `exogym_core.strategy`, for programs that import `netgym` alone."""

from exogym_core.strategy import *  # noqa: F403
from exogym_core.strategy import __all__ as __all__
