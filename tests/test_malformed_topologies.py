"""Mistakes in topology files, each with the exact line that tells it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from netsim.files.errors import InputError, UnknownNameError
from netsim.topology import Topology

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
name: two
hosts:
  a: {}
  b: {}
routers: [r]
links:
  - {between: [a, r], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [r, b], bandwidth: 1 Gbit/s, latency: 1 ms}
"""
RATE = "bandwidth: 1 Gbit/s"
REGION = "regions:\n  us: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}\n"

RATE_UNITS = (
    "Gbit/s, Gbps, Gibit/s, Kibit/s, Mbit/s, Mbps, Mibit/s, Tbit/s, Tbps, Tibit/s, bit/s, bps, kbit/s, kbps"
)
NAME_RULE = "expected a name (up to 100 letters, digits and . _ - : @ +, a letter, digit or _ first)"
FILE_KEYS = (
    "Accepted: routers, routes, source, background, drift, events, hosts, links, name, protocol, regions, "
    "traces, wan"
)
NEST = "[0]" * 48


def changed(old: str, new: str) -> str:
    """The good file with one thing changed."""
    assert old in GOOD
    return GOOD.replace(old, new, 1)


# What is wrong: the file, and its error without the file's name (of YAML's own syntax, only how it begins).
MISTAKES = {
    "bare bandwidth": (
        changed(RATE, "bandwidth: 1000"),
        "7: links[0].bandwidth: expected a rate such as '100 Mbit/s', got the bare number 1000: add its unit",
    ),
    "bare latency": (
        changed("latency: 1 ms", "latency: 0"),
        "7: links[0].latency: expected a time such as '30 ms', got the bare number 0: add its unit",
    ),
    "bare loss": (
        changed("latency: 1 ms", "loss: 0.01"),
        "7: links[0].loss: expected a percentage such as '0.01 %', got the bare number 0.01: add its unit",
    ),
    "bare rtt in text": (
        changed("latency: 1 ms", "rtt: '30'"),
        "7: links[0].rtt: expected a time such as '30 ms', got the bare number 30: add its unit",
    ),
    "zero bandwidth": (
        changed(RATE, "bandwidth: 0 Mbit/s"),
        "7: links[0].bandwidth: expected a rate above zero, got '0 Mbit/s': leave out the link instead",
    ),
    "negative bandwidth": (
        changed(RATE, "bandwidth: -1 Mbit/s"),
        "7: links[0].bandwidth: expected a rate such as '100 Mbit/s' and not negative, got '-1 Mbit/s'",
    ),
    "nan bandwidth": (
        changed(RATE, "bandwidth: nan Mbit/s"),
        "7: links[0].bandwidth: expected a rate such as '100 Mbit/s', got 'nan Mbit/s'",
    ),
    "yaml nan": (changed(RATE, "bandwidth: .nan"), "7: links[0].bandwidth: '.nan' is not a finite number"),
    "inf bandwidth": (
        changed(RATE, "bandwidth: inf Mbit/s"),
        "7: links[0].bandwidth: expected a rate such as '100 Mbit/s', got 'inf Mbit/s'",
    ),
    "1e400": (changed(RATE, "bandwidth: 1e400"), "7: links[0].bandwidth: '1e400' is too large for a number"),
    "1e400 with unit": (
        changed(RATE, "bandwidth: 1e400 bit/s"),
        "7: links[0].bandwidth: expected a rate such as '100 Mbit/s', got '1e400 bit/s', which is too large",
    ),
    "tiny bandwidth": (
        changed(RATE, "bandwidth: 1e-320 bit/s"),
        "7: links[0].bandwidth: expected a rate from 0.001 bit/s to 1e21 bit/s, got '1e-320 bit/s'",
    ),
    "bytes a second": (
        changed(RATE, "bandwidth: 1 GB/s"),
        "7: links[0].bandwidth: '1 GB/s' is in bytes, and rates are in bits: write '8 Gbit/s' if bytes are meant",
    ),
    "wrong case": (
        changed(RATE, "bandwidth: 1 gbit/s"),
        f"7: links[0].bandwidth: unknown unit 'gbit/s' in '1 gbit/s': did you mean 'Gbit/s'? Accepted: {RATE_UNITS}",
    ),
    "sexagesimal latency": (
        changed("latency: 1 ms", "latency: 1:30"),
        "7: links[0].latency: expected a time such as '30 ms', got '1:30'",
    ),
    "negative latency": (
        changed("latency: 1 ms", "latency: -1 ms"),
        "7: links[0].latency: expected a time such as '30 ms' and not negative, got '-1 ms'",
    ),
    "eternal latency": (
        changed("latency: 1 ms", "latency: 1e300 s"),
        "7: links[0].latency: expected a time of at most 1e6 s, got '1e300 s'",
    ),
    "loss above one": (
        changed("latency: 1 ms", "loss: 120 %"),
        "7: links[0].loss: expected a percentage of at most 100 %, got '120 %'",
    ),
    "total loss": (
        changed("latency: 1 ms", "loss: 100 %"),
        "7: links[0].loss: expected a loss below 100 %, got '100 %': leave out the link instead",
    ),
    "queue in bytes": (
        changed("latency: 1 ms", "queue: 1 MB"),
        "7: links[0].queue: expected a whole number of packets, at least 1, got '1 MB'",
    ),
    "no queue": (
        changed("latency: 1 ms", "queue: 0"),
        "7: links[0].queue: expected a whole number of packets, at least 1, got 0",
    ),
    "latency and rtt": (
        changed("latency: 1 ms", "latency: 1 ms, rtt: 2 ms"),
        "7: links[0]: give either latency (one way) or rtt (twice that), not both",
    ),
    "no bandwidth": (
        changed("bandwidth: 1 Gbit/s, ", ""),
        "7: links[0]: give bandwidth (each way), or both up and down, such as '100 Mbit/s'",
    ),
    "up without down": (
        changed(RATE, "up: 1 Gbit/s"),
        "7: links[0]: give bandwidth (each way), or both up and down, such as '100 Mbit/s'",
    ),
    "bandwidth and up": (
        changed(RATE, "bandwidth: 1 Gbit/s, up: 1 Gbit/s"),
        "7: links[0]: give either bandwidth (each way) or up and down, not both",
    ),
    "misspelt key of a link": (
        changed("bandwidth", "bandwith"),
        "7: links[0].bandwith: unknown key 'bandwith': did you mean 'bandwidth'? "
        "Accepted: bandwidth, between, down, egress, latency, loss, queue, rtt, up",
    ),
    "misspelt key of the file": (
        changed("routers", "router"),
        f"5: router: unknown key 'router': did you mean 'routers'? {FILE_KEYS}",
    ),
    "misspelt key of a host": (
        changed("a: {}", "a: {devise: h100}"),
        "3: hosts.a.devise: unknown key 'devise': did you mean 'device'? Accepted: device, devices, region",
    ),
    "unknown end": (
        changed("[r, b]", "[r, bb]"),
        "8: links[1].between: unknown host or router 'bb': did you mean 'b'? Accepted: b, a, r",
    ),
    "self-loop": (
        changed("[r, b]", "[r, r]"),
        "8: links[1].between: links 'r' to itself: name two different ends",
    ),
    "three ends": (changed("[r, b]", "[r, b, a]"), "8: links[1].between: expected at most 2 entries, got 3"),
    "one end": (changed("[r, b]", "[b]"), "8: links[1].between: expected at least 2 entries, got 1"),
    "ends as text": (changed("[r, b]", "a-b"), "8: links[1].between: expected a list, got 'a-b'"),
    "two links": (
        GOOD + "  - {between: [b, r], bandwidth: 2 Gbit/s}\n",
        "9: links[2].between: 'b' and 'r' are linked on line 8: make it one link",
    ),
    "unreachable": (
        changed("routers: [r]", "routers: [r]").replace("  b: {}", "  b: {}\n  c: {}"),
        "5: hosts.c: host 'c' cannot reach 'a': add a link between them",
    ),
    "duplicate key": (
        changed("  b: {}", "  a: {}"),
        "4: hosts: duplicate key 'a' (first on line 3): remove one",
    ),
    "duplicate name": (
        changed("routers: [r]", "routers: [r, a]"),
        "5: routers[1]: duplicate name 'a' (first in 'hosts' on line 3): rename one",
    ),
    "duplicate listed host": (
        changed("hosts:\n  a: {}\n  b: {}", "hosts: [a, b, a]"),
        "2: hosts: duplicate host 'a': remove one",
    ),
    "region takes a host's name": (
        GOOD + REGION.replace("us:", "b:"),
        "10: regions.b: duplicate name 'b' (first in 'hosts' on line 4): rename one",
    ),
    "region host taken": (
        changed("  b: {}", "  b: {}\n  us.1: {}") + REGION,
        "11: regions.us: duplicate name 'us.1' (first in 'hosts' on line 5): rename one",
    ),
    "no hosts": ("name: none\nrouters: [r]\n", "1: has no hosts: add 'hosts' or 'regions'"),
    "zero hosts": (REGION.replace("hosts: 2", "hosts: 0"), "2: regions.us.hosts: expected at least 1, got 0"),
    "half a host": (
        REGION.replace("hosts: 2", "hosts: 1.5"),
        "2: regions.us.hosts: expected a whole number, got 1.5",
    ),
    "hosts as text": (
        REGION.replace("hosts: 2", "hosts: '2'"),
        "2: regions.us.hosts: expected a whole number, got '2'",
    ),
    "too many hosts": (
        REGION.replace("hosts: 2", "hosts: 999999999"),
        "2: regions.us.hosts: expected at most 20000, got 999999999",
    ),
    "too many in all": (
        "regions:\n  a: {hosts: 15000, nic: 1 Gbit/s}\n  b: {hosts: 15000, nic: 1 Gbit/s}\n",
        "3: regions.b.hosts: expected at most 20,000 hosts in all",
    ),
    "no card": (
        REGION.replace("nic: 1 Gbit/s, ", ""),
        "2: regions.us: give nic (each way), or both up and down, such as '100 Mbit/s'",
    ),
    "region unknown in wan": (
        REGION + "wan:\n  - {between: [us, ue], bandwidth: 1 Gbit/s}\n",
        "4: wan[0].between: unknown region 'ue': Accepted: us",
    ),
    "host in wan": (
        GOOD + REGION + "wan:\n  - {between: [us, a], bandwidth: 1 Gbit/s}\n",
        "12: wan[0].between: a is a host: put this link under links:",
    ),
    "regions apart": (
        REGION + "  eu: {hosts: 2, nic: 1 Gbit/s}\n",
        "2: regions.us: host 'us.0' cannot reach 'eu.0': add a link between them",
    ),
    "route from nobody": (
        GOOD + "routes:\n  - {from: x, to: b, through: [r]}\n",
        "10: routes[0].from: unknown host or region 'x': Accepted: a, b",
    ),
    "route without to": (
        GOOD + "routes:\n  - {from: a, through: [r]}\n",
        "10: routes[0].to: is missing: add this key",
    ),
    "route over air": (
        GOOD + "routes:\n  - {from: a, to: b}\n",
        "10: routes[0]: no link between 'a' and 'b': add one, or name the stops between",
    ),
    "route to itself": (
        GOOD + "routes:\n  - {from: a, to: a}\n",
        "10: routes[0]: visits 'a' twice: name the way between two ends, each stop once",
    ),
    "route in circles": (
        GOOD + "routes:\n  - {from: a, to: b, through: [r, a, r]}\n",
        "10: routes[0]: visits 'a' twice: name the way between two ends, each stop once",
    ),
    "second route": (
        GOOD + "routes:\n" + "  - {from: a, to: b, through: [r]}\n" * 2,
        "11: routes[1]: a second route from 'a' to 'b': remove one",
    ),
    "route through text": (
        GOOD + "routes:\n  - {from: a, to: b, through: r}\n",
        "10: routes[0].through: expected a list, got 'r'",
    ),
    "boolean name": (
        changed("routers: [r]", "routers: [true]"),
        "5: routers[0]: expected a name, got true: quote it if it is meant as text",
    ),
    "name with a comma": (
        changed("routers: [r]", "routers: ['r,s']"),
        f"5: routers[0]: {NAME_RULE}, got 'r,s'",
    ),
    "name with a tag": (
        changed("routers: [r]", "routers: ['<script>']"),
        f"5: routers[0]: {NAME_RULE}, got '<script>'",
    ),
    "octal": (
        changed("name: two", "name: 010"),
        "1: name: '010' has a leading zero: remove it, or quote it as text",
    ),
    "number as source": (changed("name: two", "source: 12"), "1: source: expected text, got 12"),
    "control characters": (
        changed("name: two", 'name: "a\\e[31m"'),
        "1: name: expected text without control characters, got 'a\\x1b[31m'",
    ),
    "links as mapping": ("hosts: [a]\nlinks: {a: b}\n", "2: links: expected a list, got a mapping"),
    "list as file": ("- a\n- b\n", "1: expected a mapping (keys and values), got a list"),
    "text as file": ("hello\n", "1: expected a mapping (keys and values), got text"),
    "empty file": ("# nothing\n", " is empty: expected a topology with hosts or regions, and links"),
    "alias": ("hosts: &h {a: {}}\nregions: *h\n", "1: hosts: anchor '&h': anchors are not accepted"),
    "merge key": ("hosts:\n  a: {<<: {device: x}}\n", "2: hosts.a: merge key '<<': write the keys out"),
    "tag": (
        "hosts: !!python/object/apply:os.system [ls]\n",
        "1: hosts: tag 'tag:yaml.org,2002:python/object/apply:os.system': tags are not accepted",
    ),
    "directive": (
        "%YAML 1.1\n---\nhosts: [a]\n",
        "1: YAML directives ('%...') are not accepted: remove the line",
    ),
    "two documents": (
        "hosts: [a]\n---\nhosts: [b]\n",
        "2: a second document ('---') in one file: use one file each",
    ),
    "nested deep": ("hosts: " + "[" * 1000 + "\n", f"1: hosts{NEST}: nested more than 50 levels deep"),
    "huge integer": (
        "hosts: " + "1" * 100_000 + "\n",
        "1: hosts: '1111111111111111111111111111111111111111111111111111111... is beyond 64 bits",
    ),
    "complex key": ("? [a, b]\n: 1\n", "1: a key must be a single word or text, not a list or mapping"),
    "unfinished": ("hosts: [a, b\n", "2: not valid YAML:"),
    "tabs": (
        "hosts:\n\ta: {}\n",
        "2: not valid YAML: found character that cannot start any token: indent with spaces, not with tabs",
    ),
    "NUL": ("hosts: [a]\nrouters: [b\0]\n", "2: control character \\u0000: remove it"),
    "protocol as a number": (
        "hosts: [a]\nprotocol: 5\n",
        "2: protocol: expected a preset such as 'linux-tcp', or a mapping, got 5",
    ),
    "event about nothing": (
        GOOD + "events:\n  - {at: 1 s, down: true}\n",
        "10: events[0]: give either link: [A, B] or host: NAME",
    ),
    "event twice": (
        GOOD + "events:\n  - {at: 1 s, link: [a, r], down: true, loss: 1 %}\n",
        "10: events[0]: give exactly one of down, up, bandwidth, latency or loss",
    ),
    "event no": (
        GOOD + "events:\n  - {at: 1 s, link: [a, r], down: no}\n",
        "10: events[0].down: expected true, got 'no'",
    ),
    "event on no link": (
        GOOD + "events:\n  - {at: 1 s, link: [a, b], down: true}\n",
        "10: events[0].link: no link between 'a' and 'b': name the two ends of one",
    ),
    "link that crashes": (
        GOOD + "events:\n  - {at: 1 s, link: [a, r], crash: true}\n",
        "10: events[0]: crash belongs to a host; down, bandwidth, latency and loss belong to a link",
    ),
    "host unknown": (
        GOOD + "events:\n  - {at: 1 s, host: c, crash: true}\n",
        "10: events[0].host: unknown host 'c': name a host of this topology",
    ),
    "bare at": (
        GOOD + "events:\n  - {at: 1, host: a, crash: true}\n",
        "10: events[0].at: expected a time such as '30 ms', got the bare number 1: add its unit",
    ),
    "trace file": (
        GOOD + "traces:\n  - {link: [a, r], bandwidth: missing.csv}\n",
        "10: traces[0].bandwidth: 'missing.csv' cannot be read: No such file or directory",
    ),
    "trace order": (
        GOOD + "traces:\n  - {link: [a, r], bandwidth: [[1 s, 1 Mbit/s], [1 s, 2 Mbit/s]]}\n",
        "10: traces[0].bandwidth: times must ascend, but 1.0 s follows 1.0 s",
    ),
    "trace of nothing": (
        GOOD + "traces:\n  - {link: [a, r]}\n",
        "10: traces[0]: give either bandwidth or latency: a CSV file, or a list of [time, value]",
    ),
    "background to itself": (
        GOOD + "background:\n  - {from: a, to: a, rate: 1 Mbit/s}\n",
        "10: background[0]: leads from 'a' to itself: name two hosts",
    ),
    "background half": (
        GOOD + "background:\n  - {from: a, to: b, bytes: 1 MB}\n",
        "10: background[0]: bytes and every belong together: so many bytes, every so often",
    ),
    "drift kind": (
        GOOD + "drift:\n  - {link: [a, r], kind: log-normal, every: 1 s, sigma: 0.1}\n",
        "10: drift[0].kind: unknown choice 'log-normal': did you mean 'lognormal'? Accepted: lognormal, regime",
    ),
    "drift sigma": (
        GOOD + "drift:\n  - {link: [a, r], kind: lognormal, every: 1 s, sigma: 0}\n",
        "10: drift[0].sigma: expected more than 0.0, got 0",
    ),
    "drift levels": (
        GOOD + "drift:\n  - {link: [a, r], kind: regime, every: 1 s, sigma: 1}\n",
        "10: drift[0]: kind regime takes levels such as [100 %, 30 %] and no sigma",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_is_told_in_one_line(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, line = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        Topology.load("bad.yaml")
    told = str(caught.value).splitlines()[0]
    assert told == f"bad.yaml:{line}" or (line.endswith("YAML:") and told.startswith(f"bad.yaml:{line}"))
    # What does not exist is a ValueError and a TypeError at once, as Python has it for unknown arguments.
    assert isinstance(caught.value, TypeError) == ("Accepted: " in told and "unknown unit" not in told)


def test_all_mistakes_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("1 Gbit/s", "0 bit/s").replace("a: {}", "a: {devise: x}")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        Topology.load(tmp_path / "bad.yaml")
    assert [line.split("bad.yaml:")[1].split(":")[0] for line in str(caught.value).splitlines()] == [
        "3",
        "7",
        "8",
    ]


def test_many_mistakes_are_counted(tmp_path: Path) -> None:
    links = "".join(f"  - {{between: [a, nobody{number}], bandwidth: 1 bit/s}}\n" for number in range(2000))
    (tmp_path / "bad.yaml").write_text(GOOD + links)
    with pytest.raises(InputError) as caught:
        Topology.load(tmp_path / "bad.yaml")
    told = str(caught.value).splitlines()
    assert len(told) == 21
    assert told[-1].endswith("bad.yaml: and 1980 more")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_bytes(b"#" * 1_000_001)
    (tmp_path / "latin.yaml").write_bytes(b"name: a\nsource: caf\xe9\n")
    for name, words in [
        ("big.yaml", ": larger than 1 MB"),
        ("latin.yaml", ":2: not UTF-8"),
        ("no.yaml", ": no such file"),
    ]:
        with pytest.raises(InputError, match=re.escape(name + words)):
            Topology.load(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        Topology.load(tmp_path)
    with pytest.raises(
        InputError, match=r"^\\x16/e\\x1b\[2J: no such file: "
    ):  # nothing reaches the terminal
        Topology.load("\x16/e\x1b[2J")


def test_data_from_python_has_no_lines() -> None:
    with pytest.raises(InputError, match=r"^my net: links\[0\]: give bandwidth"):
        Topology.from_mapping({"hosts": ["a", "b"], "links": [{"between": ["a", "b"]}]}, where="my net")
    with pytest.raises(InputError, match=r"^<mapping>: expected a mapping"):
        Topology.from_mapping([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("protocol", "line"),
    [
        ("linux-tpc", "2: protocol: unknown protocol 'linux-tpc': did you mean 'linux-tcp'?"),
        (
            "{preset: linux-tcp, streems: 8}",
            "2: protocol: unknown key in protocol 'streems': did you mean 'streams'?",
        ),
    ],
)
def test_the_protocol_is_checked_with_its_line(protocol: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(f"hosts: [a]\nprotocol: {protocol}\n")
    with pytest.raises(UnknownNameError) as caught:
        Topology.load(tmp_path / "bad.yaml")
    assert f"bad.yaml:{line}" in str(caught.value)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert len(Topology.load(tmp_path / "good.yaml").links) == 4
