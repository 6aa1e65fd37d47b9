"""`netsim import` and `netsim export`: topology files from measurements and other tools' network files, and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from netsim.cli.terminal import OneLineCommand, check_new, given, plain_lines, takes, write_new
from netsim.errors import InputError, locate_errors
from netsim.files.plain_files import read_text
from netsim.formats.builder import Assumed, TopologyBuilder
from netsim.formats.measurements import (
    FailedMeasurementError,
    Pairs,
    is_iperf3,
    is_ping,
    parse_json,
    read_csv,
    read_iperf3,
    read_json,
    read_ping,
)
from netsim.formats.networks import (
    address_file,
    read_graph,
    shaping_script,
    write_simgrid,
)
from netsim.topology.topology import Topology
from netsim.units import parse_bits_per_second, parse_seconds, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_BYTES = 64_000_000

__all__ = ["export_command", "import_command", "read_foreign"]


def read_foreign(
    paths: Sequence[str | Path],
    name: str | None = None,
    assumed: Assumed | None = None,
    only: Sequence[str] = (),
) -> TopologyBuilder:
    """Read the topology that files describe: measurements of any number of them together, or one description.

    Recognised by their contents: iperf3 -J, ping's output, tables of round trips and throughput (CSV or JSON, see
    `netsim.formats.measurements`), GraphML, GML.

    Args:
        paths: of the files.
        name: of the topology; None: the file's.
        assumed: values for what files do not say.
        only: of measured places, as files call them; none: all.

    Raises InputError with the file, and line or entry, of what is wrong or missing.
    """
    assumed = assumed if assumed is not None else Assumed()
    if not paths:
        raise InputError("import: no files given")
    pairs, servers = Pairs(), dict[str, str]()
    texts = [(Path(path), read_text(path, _MOST_BYTES, "give a smaller extract")) for path in paths]
    for path, text in texts:
        if not text.strip():
            raise InputError(f"{path}: is empty")
    # Lists of servers first: other files may call them by number.
    texts.sort(
        key=lambda each: not each[1][:400].lower().split("\n", 1)[0].strip().startswith(('"id"', "id,"))
    )
    failed: list[str] = []
    for path, text in texts:
        builder = _read_whole_network(path, text, assumed)
        if builder is not None:
            if len(texts) > 1:
                raise InputError(f"{path}: describes a whole network: import it alone")
            if only:
                raise InputError(f"{path}: describes a whole network, of which --only cannot take a part")
            for option, values in (
                ("--hosts", (assumed.hosts, *assumed.hosts_of.values())),
                ("--nic", (assumed.nic_bits_per_second, *assumed.nics.values())),
            ):
                if any(values):
                    raise InputError(
                        f"{path}: describes a whole network, each node a host with its links: leave out {option}"
                    )
            builder.name = name or builder.name
            return builder
        try:
            _read_measurements(path, text, pairs, servers)
        except FailedMeasurementError as error:
            failed.append(str(error))
    if failed:
        those = "this file" if len(failed) == 1 else "these files"
        raise InputError(f"{'; '.join(failed)}: measure again, or leave {those} out")
    if only:
        pairs.keep(only)
    return pairs.builder(name or (texts[0][0].stem if len(texts) == 1 else "measured"), assumed)


def _read_whole_network(path: Path, text: str, assumed: Assumed) -> TopologyBuilder | None:
    """The network that a file describes; None for measurements."""
    kind, start = path.suffix.lower(), text.lstrip()[:2000]
    if kind == ".gml" or start.startswith(("graph [", "graph[", "Creator")):
        return read_graph(path, text, assumed)
    if start.startswith("<"):
        if "<graphml" not in start:
            raise InputError(f"{path}: is no GraphML: networks are read from GraphML and GML")
        return read_graph(path, text, assumed)
    if kind in (".yml", ".yaml"):
        raise InputError(f"{path}: is no format that is read: see 'netsim import --help'")
    return None


def _read_measurements(path: Path, text: str, pairs: Pairs, servers: dict[str, str]) -> None:
    if re.search(r"^\[ *ID\] *Interval", text, re.MULTILINE):
        raise InputError(f"{path}: a table of iperf3: give what iperf3 -J writes")
    json_begins = re.search(r"^\s*[{[]", text, re.MULTILINE)
    if json_begins is not None and not is_ping(text):
        before = text[: json_begins.start()].strip()
        if before:  # such as a warning of iperf3
            pairs.not_read.append(f"{path.name}: {printable(before)[:100]}")
        for data in parse_json(path, text[json_begins.start() :]):
            if is_iperf3(data):
                read_iperf3(path, data, pairs)
            else:
                read_json(path, data, pairs)
    elif is_ping(text):
        read_ping(path, text, pairs)
    else:
        read_csv(path, text, pairs, servers)


T = TypeVar("T")

_MOST_HOSTS = 1000


@click.command("import", cls=OneLineCommand)
@takes()
def import_command(
    files: tuple[Path, ...] = given(is_argument=True, required=True, metavar="FILE..."),
    name: str | None = given(metavar="NAME"),
    only: str = given(metavar="PLACE,...", default=""),
    hosts: tuple[str, ...] = given(metavar="[PLACE=]NUMBER"),
    nic: tuple[str, ...] = given(metavar="[PLACE=]RATE[:RATE]"),
    bandwidth: str | None = given(metavar="RATE"),
    latency: str | None = given(metavar="TIME"),
    out: Path | None = given(metavar="FILE.yaml"),
) -> None:
    """Make a topology from measurements, or from another tool's graph.

    Measurements, any number of files: iperf3 -J (FROM--TO.json, else by address), ping's output (FROM--TO.txt), tables
    of round trip, throughput and loss as CSV (columns from,to,rtt,throughput,loss; or a square whose first cell is
    'rtt ms') or JSON; tables of CloudPing, WonderNetwork and skyplane. Whole networks, one file: GraphML and GML
    (Topology Zoo). Comments in the topology name all assumptions, its source what was not read.

    Args:
        name: Name of the topology; default: the file's.
        only: Measured places to import; default: all.
        hosts: Number of hosts of each place, or of this one; may be repeated. [default: 1]
        nic: Each host's own link (up:down), everywhere or at this place; may be repeated. [default: 10 Gbit/s]
        bandwidth: Rate of links without one, such as '1 Gbit/s'.
        latency: One-way latency of links without one.
        out: Default: standard output.
    """
    check_new(out)
    number, hosts_of = _by_place("--hosts", hosts, _number)
    line, nics = _by_place("--nic", nic, _rates)
    if line is not None and line[0] != line[1]:
        raise InputError(
            f"--nic {nic[-1]}: up:down is for one place: say which, such as --nic home={nic[-1]}"
        )
    assumed = Assumed(
        parse_bits_per_second(bandwidth) if bandwidth is not None else None,
        parse_seconds(latency) if latency is not None else None,
        line[0] if line is not None else None,
        number,
        nics,
        hosts_of,
    )
    places = [place.strip() for place in only.split(",") if place.strip()]
    builder = read_foreign(files, name, assumed, places)
    text = builder.to_yaml()
    for remark in builder.remarks:
        click.echo(plain_lines(f"note: {remark}"), err=True)
    write_new(out, text)


def _by_place(option: str, given: Sequence[str], read: Callable[[str], T]) -> tuple[T | None, dict[str, T]]:
    """Value for all places, and values for some of them; the last of several counts."""
    default: T | None = None
    those: dict[str, T] = {}
    for text in given:
        place, mark, value = text.rpartition("=")
        with locate_errors(f"{option} {text}"):
            read_value = read(value.strip())
        if mark:
            those[place.strip()] = read_value
        else:
            default = read_value
    return default, those


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MOST_HOSTS:
        raise InputError(f"expected a whole number from 1 to {_MOST_HOSTS:,}, or PLACE=NUMBER")
    return int(text)


def _rates(text: str) -> tuple[float, float]:
    """Parse a rate for both directions, or `up:down`."""
    up, mark, down = text.partition(":")
    return parse_bits_per_second(up.strip()), parse_bits_per_second((down if mark else up).strip())


@click.command("export", cls=OneLineCommand)
@takes()
def export_command(
    topology: str = given(is_argument=True, required=True),
    form: str = given("--format", required=True, type=click.Choice(["simgrid", "tc"])),
    out: Path | None = given(metavar="PATH"),
) -> None:
    """Write TOPOLOGY as SimGrid's XML, or as shell scripts with tc commands.

    `tc` writes a folder with a script for each host, which shapes its outgoing traffic (rate, latency and loss to
    each other host), and addresses.sh, in which you enter the hosts' addresses.

    Args:
        form: Format to write.
        out: A new file; for tc a new folder.
    """
    net = Topology.load(topology)
    if form != "tc":
        write_new(out, write_simgrid(net))
        return
    if out is None:
        raise InputError("export: tc is a script for each host: say where with --out FOLDER")
    if not out.is_dir():
        check_new(out)
        try:
            out.mkdir()
        except OSError as error:
            raise InputError(f"--out {out}: cannot be written: {error.strerror}") from None
    write_new(out / "addresses.sh", address_file(net))
    for host in net.hosts:
        write_new(out / f"{host.name}.sh", shaping_script(net, host.index))
