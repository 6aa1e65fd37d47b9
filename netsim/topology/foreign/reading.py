"""Any files that people have, told apart by what is in them, to one topology."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from netsim.files.documents import parse_document
from netsim.files.errors import InputError
from netsim.topology.foreign.astrasim import is_astrasim, read_astrasim
from netsim.topology.foreign.draft import Assumed, Draft, read_text
from netsim.topology.foreign.graphs import read_graph
from netsim.topology.foreign.iperf3 import (
    FailedMeasurementError,
    is_iperf3,
    is_ping,
    parsed_json,
    read_iperf3,
    read_ping,
)
from netsim.topology.foreign.matrices import read_csv, read_json
from netsim.topology.foreign.pairs import Pairs
from netsim.topology.foreign.simgrid import read_simgrid

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["read_foreign"]


def read_foreign(
    paths: Sequence[str | Path],
    name: str | None = None,
    assumed: Assumed | None = None,
    only: Sequence[str] = (),
) -> Draft:
    """The topology that files describe: measurements of any number of them together, or one description.

    Told apart by their contents: iperf3 -J, ping's output, tables of round trips and throughput (CSV or JSON, see
    `netsim.topology.foreign.matrices`), GraphML, GML, ASTRA-sim's YAML, SimGrid's XML.

    Args:
        paths: of the files.
        name: of the topology; None: the file's.
        assumed: what stands in for what files do not say.
        only: of measured places, as files call them; none: all.

    Raises InputError with the file, and line or entry, of what is wrong or missing.
    """
    assumed = assumed if assumed is not None else Assumed()
    if not paths:
        raise InputError("import: no files given")
    pairs, servers = Pairs(), dict[str, str]()
    texts = [(Path(path), read_text(path)) for path in paths]
    for path, text in texts:
        if not text.strip():
            raise InputError(f"{path}: is empty")
    # Lists of servers first: other files may call them by number.
    texts.sort(
        key=lambda each: not each[1][:400].lower().split("\n", 1)[0].strip().startswith(('"id"', "id,"))
    )
    failed: list[str] = []
    for path, text in texts:
        draft = _described(path, text, assumed)
        if draft is not None:
            if len(texts) > 1:
                raise InputError(f"{path}: describes a whole network: import it alone")
            if only:
                raise InputError(f"{path}: describes a whole network, of which --only cannot take a part")
            if assumed.nics or assumed.hosts_of:
                raise InputError(f"{path}: describes a whole network: it takes no place's --nic or --hosts")
            draft.name = name or draft.name
            return draft
        try:
            _measured(path, text, pairs, servers)
        except FailedMeasurementError as error:
            failed.append(str(error))
    if failed:
        those = "this file" if len(failed) == 1 else "these files"
        raise InputError(f"{'; '.join(failed)}: measure again, or leave {those} out")
    if only:
        pairs.keep(only)
    return pairs.draft(name or (texts[0][0].stem if len(texts) == 1 else "measured"), assumed)


def _described(path: Path, text: str, assumed: Assumed) -> Draft | None:
    """The network that a file describes; None for measurements."""
    kind, start = path.suffix.lower(), text.lstrip()[:2000]
    if kind == ".gml" or start.startswith(("graph [", "graph[", "Creator")):
        return read_graph(path, text, assumed)
    if start.startswith("<"):
        return read_graph(path, text, assumed) if "<graphml" in start else read_simgrid(path, text)
    if kind in (".yml", ".yaml"):
        data = parse_document(text, str(path)).data
        if not is_astrasim(data):
            raise InputError(
                f"{path}: is no network file of ASTRA-sim: it needs topology, npus_count, bandwidth, latency"
            )
        return read_astrasim(path, data)
    return None


def _measured(path: Path, text: str, pairs: Pairs, servers: dict[str, str]) -> None:
    if text.lstrip().startswith(("{", "[")):
        for data in parsed_json(path, text):
            if is_iperf3(data):
                read_iperf3(path, data, pairs)
            else:
                read_json(path, data, pairs)
    elif is_ping(text):
        read_ping(path, text, pairs)
    else:
        read_csv(path, text, pairs, servers)
