"""Annexes: folders of this package that the core never imports, and that declare what they bring.

An annex has an `annex.toml`, read without importing it:

    [commands.plan]                                       # of netgym
    command = "exogym_core.planning.commands:plan"
    help = "One line for netgym --help."

    [listed]                                              # a section of `netgym list`: its (name, line) pairs
    "planned models" = "exogym_core.planning.model_sizes:listed_models"

    [schemas]                                             # formats of `netgym schema`
    launch = "exogym_core.torch_backend.report:launch_schema"

    [experiment_keys.sweep]                               # a key of experiment files that the annex alone reads
    schema = "exogym_core.studies.points:sweep_schema"    # its JSON Schema and the definitions that it needs
    check = "exogym_core.studies.study:check_sweep"       # for `netgym validate`: a line on it

    [run_folders."launch.json"]                           # a file that marks a folder of results
    report = "exogym_core.torch_backend.report:report_launch"

    [elastic]                                             # runs whose sites come and go
    fit = "exogym_core.sites.elastic_runs:fit_elastic"

    [names]                                               # public names of core modules
    "exogym_core.now" = "exogym_core.torch_backend.session:now"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netsim import annex_entries
from netsim import load_reference as load
from netsim.errors import InputError

__all__ = ["declared", "load", "required"]


def declared(table: str) -> dict[str, Any]:
    """Entries of one table of all installed annexes, by key."""
    return annex_entries(Path(__file__).parent, table)


def required(table: str, key: str, purpose: str) -> Any:
    """Object that an annex declares under `key`.

    Raises:
        InputError: no installed annex does; the line begins with `purpose`.
    """
    reference = declared(table).get(key)
    if reference is None:
        raise InputError(f"{purpose}: this installation of netgym has no part for it; install all of netgym")
    return load(reference)
