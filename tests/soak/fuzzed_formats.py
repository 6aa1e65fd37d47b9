"""Damaged files of others' formats, as `netsim import` reads them."""

from __future__ import annotations

import json

from drawn_damage import RAW, Choices, as_json, damaged_text, damaged_tree, keys_of
from fuzzed_folder import FOLDER, accepted

from netsim import Topology
from netsim.files.documents import parse_document
from netsim.formats.builder import Assumed
from netsim.formats.commands import read_foreign

__all__ = ["foreign"]

_IPERF = {
    "start": {
        "connected": [{"local_host": "10.0.0.1", "remote_host": "10.0.0.2"}],
        "test_start": {"protocol": "TCP", "num_streams": 1, "reverse": 0},
    },
    "end": {
        "streams": [{"sender": {"mean_rtt": 80000, "min_rtt": 79000}}],
        "sum_sent": {"bits_per_second": 3e8, "retransmits": 12},
        "sum_received": {"bits_per_second": 3e8},
    },
}
_PING = b"""PING 10.0.0.2 (10.0.0.2) 56(84) bytes of data.
64 bytes from 10.0.0.2: icmp_seq=1 ttl=64 time=80.1 ms
--- 10.0.0.2 ping statistics ---
2 packets transmitted, 2 received, 0% packet loss, time 1001ms
rtt min/avg/max/mdev = 80.1/80.5/81.0/0.4 ms
"""
_GRAPH = b"""<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="d0" for="edge" attr.name="LinkSpeedRaw" attr.type="double"/>
<graph edgedefault="undirected"><node id="0"/><node id="1"/>
<edge source="0" target="1"><data key="d0">1e9</data></edge></graph></graphml>"""
_GML = b'graph [\n node [ id 0 label "A" ] node [ id 1 label "B" ] edge [ source 0 target 1 LinkSpeedRaw 1.0e9 ]\n]'
_MATRIX = b"from,to,rtt_ms,throughput_mbit_s\nus,eu,80,300\neu,us,81,200\n"
_PAIRS = json.dumps({"metadata": {}, "data": {"us": {"eu": 80, "asia": 150}, "eu": {"us": 82, "asia": 200}}})
_FOREIGN: list[tuple[str, bytes]] = [
    ("a.json", json.dumps(_IPERF).encode()),
    ("us--eu.txt", _PING),
    ("g.graphml", _GRAPH),
    ("g.gml", _GML),
    ("m.csv", _MATRIX),
    ("ping.json", _PAIRS.encode()),
]


def foreign(data: bytes) -> bool:
    """One input: a file of one of the formats."""
    choices = Choices(data)
    kind = choices.below(4)
    name, text = choices.pick(_FOREIGN)
    if kind == 0:
        content = choices.rest()
    elif kind < 3 and name.endswith(".json"):
        tree = json.loads(text)
        values = [*map(str, RAW), 0, -1, 1e9, 1e300, None, [], {}]
        content = as_json(damaged_tree(choices, tree, keys_of([tree]), values)).encode()
    else:
        words = [
            b"<",
            b">",
            b"&",
            b'"',
            b"<!ENTITY x 'y'>",
            b"&x;",
            b"-1",
            b"1e999",
            b"[",
            b"]",
            b"0",
            b"\0",
            b"nan",
        ]
        content = damaged_text(choices, text, words)
    path = FOLDER.write(name, content)
    assumed = Assumed(latency_seconds=0.01, bits_per_second=1e9)

    def imported() -> Topology:
        text = read_foreign([path], "fuzzed", assumed).to_yaml()
        return Topology.from_document(parse_document(text))

    return accepted(None, imported) is not None
