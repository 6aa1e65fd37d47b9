"""Connection to a Ray cluster: a running one, or one that is started on this machine for the time of a run.

Tensors and calls go through Ray's own object store; nothing here opens a socket. Ray itself lets every process that
reaches its ports run code: keep a cluster on a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from typing import TYPE_CHECKING, Any, Self

from exogym_core.names import visible
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["RayCluster"]

_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


class RayCluster:
    """Context manager: connected while entered. Where this process is connected already, that connection is used.

    Args:
        address: as `ray.init` takes it (`10.0.0.1:6379`, `auto`); None: that of RAY_ADDRESS, else a cluster of this
            machine alone, which ends on leaving.

    Attributes:
        num_cpus: of all nodes together.
        ray: the module, once entered.

    Raises:
        InputError: (on entering) Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._is_ours = False
        self.num_cpus = 1
        self.ray: Any = None

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Else it warns on machines without a GPU.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise InputError("ray: Ray is not installed: pip install 'netgym[ray]'") from None
        self.ray = ray
        if not self.ray.is_initialized():
            self._connect()
        self.num_cpus = max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        return self

    def _connect(self) -> None:
        options: dict[str, Any] = {"address": self._address}
        if self._address is None:
            options = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.ray.init(logging_level="ERROR", log_to_driver=False, **options)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            where = visible(self._address or "on this machine", 100)
            reason = visible(str(error).partition("\n")[0], 300)
            raise InputError(
                f"ray: no cluster at {where} ({reason}): start one with 'ray start --head', or give its address"
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself
                if main and handler is not None:
                    signal.signal(number, handler)
        self._is_ours = True

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self.ray.shutdown()
            self._is_ours = False

    def require(self, needs: Mapping[str, float], who: str) -> None:
        """Refuse needs that no node can hold, for which Ray would wait without end.

        Args:
            needs: `num_cpus`, `num_gpus`, `memory` (bytes).
            who: the part of the run that needs it.

        Raises:
            InputError: no node has enough.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if any(all(node.get(_NAMES[key], 0) >= amount for key, amount in needs.items()) for node in nodes):
            return
        wanted = ", ".join(f"{amount:g} {_NAMES[key]}" for key, amount in needs.items())
        most = ", ".join(
            f"{max((node.get(_NAMES[key], 0) for node in nodes), default=0):g} {_NAMES[key]}" for key in needs
        )
        raise InputError(f"ray: {who} needs {wanted}, and no node has more than {most}: add a node that has")

    def room(self, num_under_way: int) -> int:
        """Number of calls to submit now: twice as many as cores, so that a node that gets free has one to run."""
        return max(0, 2 * self.num_cpus - num_under_way)

    def batch(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        """Block of calls, each of which is submitted at once; nothing is written to `folder`."""
        return contextlib.nullcontext()

    def room_for(self, needs: Mapping[str, float]) -> int:
        """Number of calls with these needs that the empty cluster can hold."""
        has = self.ray.cluster_resources()
        return int(min(has.get(_NAMES[key], 0) // amount for key, amount in needs.items()))

    def require_all(self, needs: Mapping[str, float], num: int, who: str) -> None:
        """Refuse `num` times these needs if all nodes together cannot hold them.

        Raises:
            InputError: they have less.
        """
        has = self.ray.cluster_resources()
        for key, amount in needs.items():
            there = has.get(_NAMES[key], 0)
            if num * amount > there:
                raise InputError(
                    f"ray: {who} need {num * amount:g} {_NAMES[key]}, and the cluster has {there:g}: use fewer"
                )

    def submit(
        self, call: Callable[..., Any], *arguments: Any, needs: Mapping[str, float], tries: int
    ) -> Any:
        """Run `call(*arguments)` on a node, again on another one if that is lost; returns a reference."""
        remote = self.ray.remote(**needs, max_retries=tries - 1, scheduling_strategy="SPREAD")(call)
        return remote.remote(*arguments)

    def ready(self, references: Sequence[Any], timeout_seconds: float | None) -> list[Any]:
        """Finished references, waiting up to `timeout_seconds` for the first."""
        if not references:
            return []
        found, _ = self.ray.wait(list(references), num_returns=1, timeout=timeout_seconds)
        if found:
            found, _ = self.ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(found)

    def result(self, reference: Any) -> Any:
        """Result of a call; a text with the cause where it was lost for good or raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            return f"{type(cause).__name__}: {cause}" if cause is not None else str(error).splitlines()[-1]
        except self.ray.exceptions.RayError as error:
            return f"lost with its node ({type(error).__name__})"

    def cancel(self, reference: Any) -> None:
        """Cancel a call of an actor."""
        with contextlib.suppress(self.ray.exceptions.RayError, TypeError, ValueError):
            self.ray.cancel(reference, force=True)
