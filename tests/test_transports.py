"""Transports are a registry: names, capabilities, one's own beside ours."""

from __future__ import annotations

import pytest

from exogym_core import Trainer
from exogym_core.communicator import run_ranks
from exogym_core.ranks.run import Transport, register_transport, transport_named
from exogym_core.strategy import AllReduceStrategy
from netsim.files.errors import InputError, UnknownNameError


def test_ours_are_entries_like_any_other():
    netsim, gloo = transport_named("netsim"), transport_named("gloo")
    assert (netsim.has_clock, netsim.can_leave_behind, netsim.joins_launchers) == (True, True, False)
    assert (gloo.has_clock, gloo.can_leave_behind, gloo.joins_launchers) == (False, False, True)


def test_one_of_ones_own_is_carried_and_its_capabilities_are_asked():
    seen = []

    def carry(run):
        seen.append((run.num_ranks, run.seed))
        return transport_named("netsim").carry(run)

    mine = Transport("untimed", carry)
    register_transport(mine)
    register_transport(mine)  # again changes nothing
    assert run_ranks(lambda comm: comm.rank, 2, transport="untimed", seed=5).results == [0, 1]
    assert seen == [(2, 5)]
    with pytest.raises(InputError, match="there is a transport 'untimed' already"):
        register_transport(Transport("untimed", carry))
    with pytest.raises(InputError, match="no virtual time over 'untimed'"):
        run_ranks(lambda comm: None, 1, transport="untimed", trace="trace.json")
    with pytest.raises(
        InputError, match="transport 'untimed' has no virtual time and no topology; drop topology"
    ):
        Trainer(None, None).fit(
            strategy=AllReduceStrategy(), num_nodes=1, topology="lan", transport="untimed"
        )


def test_unknown_names_list_what_there_is():
    with pytest.raises(UnknownNameError, match="unknown transport 'glo': did you mean 'gloo'"):
        run_ranks(lambda comm: None, 1, transport="glo")
    with pytest.raises(UnknownNameError, match="unknown transport 'None'"):
        transport_named(None)
