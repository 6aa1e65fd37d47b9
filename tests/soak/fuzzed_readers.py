"""The readers that anybody's files reach, and what must hold whatever is in them.

Whatever bytes a file holds: it is accepted, or refused by one of our errors whose first line is printable and names
it; within seconds and a bounded memory. What is accepted can be used, and what we write of it reads back.
"""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.checkpoints.checkpoint import StoredCheckpoint, manifest_text
from exogym_core.results.disk import RecordError
from exogym_core.strategy import DiLoCoStrategy
from netgym.experiment.experiment import Experiment
from netsim import Topology
from netsim.errors import DeadlockError, InputError
from netsim.files.documents import parse_document
from netsim.formats.builder import Assumed
from netsim.formats.commands import read_foreign
from netsim.transfers import read_flows, time_flows

# --- where damaged files are written ------------------------------------------------------------------------

_LONGEST_LINE = 3000


class Folder:
    """A private folder in memory, made when it is first needed and emptied at the end of the process."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None

    @property
    def path(self) -> Path:
        if self._made is None:
            shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
            self._made = tempfile.TemporaryDirectory(prefix="netgym-fuzz-", dir=shared)
        return Path(self._made.name)

    def write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        path.write_bytes(content)
        return path

    def remove(self) -> None:
        if self._made is not None:
            self._made.cleanup()


FOLDER = Folder()


def accepted(path: Path | None, read: Callable[[], Any]) -> Any:
    """What `read` returns, or None where it refuses as it should, in a line that names `path`."""
    try:
        return read()
    except (InputError, RecordError) as error:
        line, *more = str(error).splitlines()
        assert all(map(str.isprintable, (line, *more))), f"a line that is not printable: {(line, *more)!r}"
        assert len(line) <= _LONGEST_LINE, f"a first line of {len(line)} characters"
        assert path is None or path.name in line, f"the file is not named: {line!r}"
        return None


# --- damage -------------------------------------------------------------------------------------------------

T = TypeVar("T")

# Scalars as they stand in a file, unquoted: what readers take for different things, or stumble over.
RAW = [
    "",
    *"""~  null  true  no  0  -1  1  1.5  1e400  -0.0  .nan  -.inf  010  1:30  1_000  0x10  99999999999999999999
1e-320  5e-324  1.7976931348623157e308  {}  []  [[]]  {a: 1}  &a x  *a  !!python/object:os.system x
<<  ? x  - x  a: b  #  '  "  `  @
%  |  >  0 s  -1 ms  1e9 s  1e-9 s  1 kbit/s  1e22 bit/s  0 Mbit/s  1e-4 bit/s  nan Mbit/s  50 %  100 %  101 %  -1 %
1e308 Tbit/s  1 GB  1 MB/s  3 parsec  1 ms ms  a/b  ../x  /dev/zero  é  a b  \\u0000  9223372036854775807  -5
""".replace("\n", "  ").split("  "),
    "x" * 200,
    "1" * 400,
    "[" * 60 + "]" * 60,
    "9" * 19,
]


class Raw(str):
    """Stands in a file as it is, not as a quoted text."""

    __slots__ = ()


class Choices:
    """Decisions drawn from bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, limit: int) -> int:
        """A whole number from 0 up to below `limit`."""
        width = 1 if limit <= 256 else 4
        part = self._data[self._at : self._at + width].ljust(width, b"\0")
        self._at += width
        return int(part[0] if width == 1 else struct.unpack("<I", part)[0]) % max(limit, 1)

    def pick(self, of: Sequence[T]) -> T:
        """One of them."""
        return of[self.below(len(of))]

    def rest(self) -> bytes:
        """What has not been used."""
        return self._data[self._at :]


def flow(value: Any) -> str:
    """Plain data as YAML of one line; `Raw` as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return json.dumps(value)


def damaged_text(choices: Choices, text: bytes, words: Sequence[bytes]) -> bytes:
    """A text with up to four pieces left out, doubled, exchanged or put in."""
    for _ in range(1 + choices.below(4)):
        at, length = choices.below(len(text) + 1), choices.below(40)
        match choices.below(6):
            case 0:
                text = text[:at] + text[at + length :]
            case 1:
                text = text[:at] + text[at : at + length] * 2 + text[at + length :]
            case 2:
                text = text[:at] + choices.pick(words) + text[at + length :]
            case 3:
                text = text[:at] + choices.pick(words) + text[at:]
            case 4:
                text = text[:at] + bytes([choices.below(256)]) + text[at + 1 :]
            case _:
                text = text[:at]
    return text


def damaged_tree(choices: Choices, tree: Any, keys: Sequence[str], values: Sequence[Any]) -> Any:
    """Plain data with up to four places replaced, left out, renamed, doubled or put in; the original is left alone."""
    tree = copy.deepcopy(tree)
    for _ in range(1 + choices.below(4)):
        tree = _damaged_once(choices, tree, keys, values)
    return tree


def _damaged_once(choices: Choices, tree: Any, keys: Sequence[str], values: Sequence[Any]) -> Any:
    inner: Any = tree
    put: Callable[[Any], None] | None = None
    for _ in range(1 + choices.below(6)):
        if not isinstance(inner, dict | list) or not inner:
            break
        holder: Any = inner
        key: Any = choices.pick(list(holder)) if isinstance(holder, dict) else choices.below(len(holder))
        inner, put = holder[key], lambda value, holder=holder, key=key: holder.__setitem__(key, value)
    if put is None:
        return copy.deepcopy(choices.pick(values))
    match choices.below(7):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[choices.pick(keys)] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder[choices.pick(keys)] = copy.deepcopy(choices.pick(values))
        case 3 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case 4:
            put([inner])
        case 5 if isinstance(inner, str) and not isinstance(inner, Raw):
            put(damaged_text(choices, inner.encode(), [b" ", b"-", b"1e9", b"/"]).decode(errors="replace"))
        case _:
            put(copy.deepcopy(choices.pick(values)))
    return tree


def tree_of(text: str) -> Any:
    """The plain data of a good YAML file."""
    return parse_document(text).data


def keys_of(trees: Sequence[Any]) -> list[str]:
    """All keys in them, and some that are nearly right."""
    found: set[str] = set()
    stack = list(trees)
    while stack:
        tree = stack.pop()
        if isinstance(tree, dict):
            found |= set(map(str, tree))
            stack += tree.values()
        elif isinstance(tree, list):
            stack += tree
    names = sorted(found)
    return [*names, *(name[:-1] or "x" for name in names[:20]), "", "__class__", "x" * 300, "\x1b[31m"]


# --- damaged lists of flows and traces ----------------------------------------------------------------------

TRACE = b"start_s,latency_s\n0,0.01\n5,0.02\n7.5,1e-3\n"
_NET = {
    "hosts": {"a": {}, "b": {}, "7": {}, "été": {}},
    "links": [
        {"between": [one, other], "bandwidth": "8 Mbit/s", "latency": "1 ms"}
        for one, other in (("a", "b"), ("b", "7"), ("7", "été"))
    ],
}
_FLOWS = b"start_s,src,dst,bytes,note\n0,a,b,1000,x\n0.5,b,7,1e6,\n1.25,a,7,0,y\n2,7,a,12345.5,z\n"
_CELLS = [
    b"nan",
    b"inf",
    b"-1",
    b"1e400",
    b"1e300",
    b"",
    b",",
    b'"',
    b"\n",
    b"\r",
    b"\0",
    b"a",
    b"0",
    b"7",
    b"\xff",
]
_CELLS += [b"1_0", b"1e-300", b"\xef\xbb\xbf", b"finish_s", b"bytes", b"999", "\u0661".encode(), b"\x1b[2J"]
_RATES = b"start_s,bits_per_second\n0,1000000\n5,2e6\n7.5,0\n20,3e6\n"


def _csv_reader(read: Callable[[bytes, int], bool], texts: list[bytes]) -> Callable[[bytes], bool]:
    def one(data: bytes) -> bool:
        choices = Choices(data)
        kind, use = choices.below(4), choices.below(256)
        text = choices.pick(texts)
        return read(choices.rest() if kind == 0 else damaged_text(choices, text, _CELLS), use)

    return one


def _flows(data: bytes, use: int) -> bool:
    path = FOLDER.write("flows.csv", data)
    net = _net()
    table = accepted(path, lambda: read_flows(path, net))
    if table is not None and use % 4 == 0 and len(table.flows) <= 50:
        ends = time_flows(net, table.flows)
        assert all(end >= flow.start_seconds for end, flow in zip(ends.tolist(), table.flows, strict=True))
    return table is not None


@functools.cache
def _net() -> Topology:
    return Topology.from_mapping(_NET)


def _traces(data: bytes, use: int) -> bool:
    path = FOLDER.write("trace.csv", data)
    quantity = ("bandwidth", "latency")[use % 2]
    trace = {"link": ["a", "b"], quantity: path.name}
    net = FOLDER.write("traced.yaml", flow({**_NET, "traces": [trace]}).encode())
    found: Topology | None = accepted(net, lambda: Topology.load(net))
    if found is not None and use % 8 == 4:
        runs(found)
    return found is not None


def runs(topology: Topology) -> None:
    """Use it: two transfers over it end, or never can."""
    last = len(topology.hosts) - 1
    try:
        ends = accepted(None, lambda: time_flows(topology, [(0.0, 0, last, 1000.0), (0.5, last, 0, 0.0)]))
    except DeadlockError:
        return
    assert ends is None or all(0 < end <= math.inf for end in ends.tolist())


flows = _csv_reader(_flows, [_FLOWS])
traces = _csv_reader(_traces, [_RATES, TRACE])


# --- damaged topologies and experiments ---------------------------------------------------------------------

_TOPOLOGIES = [
    """
name: small
source: made
hosts: {a: {device: h100, devices: 8}, b: {region: r0}, c: {}}
routers: [x, y]
regions: {eu: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}}
links:
  - {between: [a, x], bandwidth: 1 Gbit/s, latency: 1 ms, loss: 0.01 %, queue: 100, egress: 0.02 $/GB}
  - {between: [b, x], up: 10 Mbit/s, down: 100 Mbit/s, rtt: 20 ms}
  - {between: [c, y], bandwidth: 1 Gbit/s}
  - {between: [x, y], bandwidth: 100 Mbit/s, latency: 10 ms}
  - {between: [eu, x], bandwidth: 1 Gbit/s, rtt: 30 ms}
routes: [{from: a, to: c, through: [x, y]}]
protocol: linux-tcp
""",
    """
name: weather
hosts: {a: {}, b: {}, c: {}}
links:
  - {between: [a, b], bandwidth: 10 Mbit/s, latency: 10 ms}
  - {between: [b, c], bandwidth: 10 Mbit/s, latency: 10 ms}
events:
  - {at: 1 s, link: [a, b], down: true, for: 2 s}
  - {at: 2 s, link: [b, c], bandwidth: 1 Mbit/s, direction: up}
  - {at: 3 s, link: [b, c], latency: 100 ms}
  - {at: 3 s, link: [b, c], loss: 1 %}
  - {at: 4 s, host: c, crash: true}
  - {at: 5 s, host: c, up: true}
traces:
  - {link: [a, b], bandwidth: [[0 s, 1 Mbit/s], [10 s, 5 Mbit/s]]}
  - {link: [b, c], latency: trace.csv}
background: [{from: a, to: c, rate: 1 Mbit/s, stop: 9 s}, {from: c, to: a, bytes: 1 MB, every: 2 s}]
drift: [{link: [b, c], kind: regime, levels: [100 %, 30 %], every: 10 s, seed: 3},
  {link: [a, b], direction: up, kind: lognormal, sigma: 0.2, every: 10 s}]
protocol: {preset: gloo, connections: persistent}
""",
]
_EXPERIMENTS = [
    """
name: small
task: {name: digits, validation_fraction: 0.1}
model: {name: mlp, hidden: [8]}
workers: {count: 3, kind: threads, processes: 2}
device: cpu
topology: {name: t, hosts: {a: {}, b: {}, c: {}}, links: [{between: [a, b], bandwidth: 1 Gbit/s},
  {between: [b, c], bandwidth: 1 Gbit/s, latency: 5 ms}]}
placement: [a, b, c]
protocol: gloo
collectives: {all_reduce: ring}
compute: {fixed: 10 ms, jitter: 0.1}
steps: 20
batch_size: 16
minibatch_size: auto
shuffle: false
autocast: bf16
evaluate: {every: 5, samples: 10, correlation_every: 10}
target_loss: 0.2
checkpoint: {every: 5}
seeds: [1, 2]
network_seed: 3
loggers: [csv]
scales: {full: {steps: 100, model.hidden: [64]}}
strategies:
  - {name: AllReduce, optim_spec: adamw, lr: 1e-3}
  - {name: DiLoCo, H: 10, outer_momentum: 0.6, averaging_timeout: 2 s, label: x}
  - {name: SPARTA, p_sparta: 0.05}
  - DeMo
""",
    """
task: gpt_text
workers: {count: 2}
topology: lan
compute: flops
steps: 3
strategies: [{name: DiLoCo, H: 5}, FedAvg]
sweep: {strategies.0.lr: [1e-3, 2e-3], search: {kind: random, points: 3}}
""",
]


def _topology(data: bytes, use: int) -> bool:
    path = FOLDER.write("fuzzed.yaml", data)
    FOLDER.write("trace.csv", TRACE)
    found: Topology | None = accepted(path, lambda: Topology.load(path))
    if found is not None and use % 8 == 0:
        plain = found.to_mapping()
        assert Topology.from_mapping(plain).to_mapping() == plain
    if found is not None and use % 16 == 0 and 2 <= len(found.hosts) <= 50:
        runs(found)
    return found is not None


def _experiment(data: bytes, use: int) -> bool:
    path = FOLDER.write("fuzzed.yaml", data)
    found: Experiment | None = accepted(path, lambda: Experiment.load(path))
    if found is not None and use % 8 == 0:
        text = found.to_yaml()
        again = Experiment.from_document(parse_document(text), FOLDER.path)
        assert again.to_yaml() == text
    return found is not None


def _yaml_reader(read: Callable[[bytes, int], bool], texts: list[str]) -> Callable[[bytes], bool]:
    trees = [tree_of(text) for text in texts]
    keys, raw = keys_of(trees), [Raw(word) for word in RAW]
    values = [*raw, *(value for tree in trees for value in _values(tree))]
    words = [word.encode() for word in [*RAW, *keys]]

    def one(data: bytes) -> bool:
        choices = Choices(data)
        kind, use = choices.below(8), choices.below(256)
        which = choices.below(len(trees))
        if kind == 0:
            return read(choices.rest(), use)
        if kind == 1:
            return read(damaged_text(choices, texts[which].encode(), words), use)
        return read(flow(damaged_tree(choices, trees[which], keys, values)).encode(), use)

    return one


def _values(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [tree, *(found for value in tree.values() for found in _values(value))]
    if isinstance(tree, list):
        return [tree, *(found for value in tree for found in _values(value))]
    return [tree]


topology = _yaml_reader(_topology, _TOPOLOGIES)
experiment = _yaml_reader(_experiment, _EXPERIMENTS)


# --- damaged files of others' formats, as `netsim import` reads them ----------------------------------------

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
        content = json.dumps(damaged_tree(choices, tree, keys_of([tree]), values)).encode()
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


# --- damaged checkpoints, by accident or on purpose ---------------------------------------------------------


@functools.cache
def _made_checkpoint() -> tuple[Path, dict[str, bytes]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5), torch.nn.Flatten(0))
    data = TensorDataset(torch.randn(16, 3))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: Any) -> torch.Tensor:
            return self.inner(batch[0]).square().mean()

    trainer = Trainer(Loss(), data)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 3, "batch_size": 2, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(strategy=DiLoCoStrategy(H=2), checkpoint_interval=2, save_dir=folder, **options)
        (made,) = Path(folder).glob("*/step-*")
        path = FOLDER.path / made.name
        shutil.copytree(made, path)
    return path, {each.name: each.read_bytes() for each in sorted(path.iterdir())}


def checkpoint(data: bytes) -> bool:
    """A file of a checkpoint changed; with honest digests, as somebody who means harm would, or without."""
    folder, files = _made_checkpoint()
    choices = Choices(data)
    name, honest = choices.pick(sorted(files)), choices.below(4) > 0
    content = _damaged_part(choices, name, files[name])
    written = {name: content}
    if honest:
        body = json.loads(files["manifest.json"])["body"]
        if name == "manifest.json":
            body = damaged_tree(
                choices, body, [*keys_of([body]), "../x"], [*map(str, RAW), 0, -1, True, 1e9, None, []]
            )
        else:
            facts = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            (body["files"].get(name) or body["logs"][0]).update(facts)
        written["manifest.json"] = manifest_text(body).encode()
    for each, new in written.items():
        (folder / each).write_bytes(new)
    try:
        loaded = accepted(folder, lambda: _loaded(folder))
        same = content == files[name] or (name.startswith("log-") and content.startswith(files[name]))
        assert honest or loaded is None or same, f"{name} was changed, and loads"
        return loaded is not None
    finally:
        for each in written:
            (folder / each).write_bytes(files[each])


def _damaged_part(choices: Choices, name: str, content: bytes) -> bytes:
    if name.endswith(".json") and choices.below(4):
        tree = json.loads(content)
        return json.dumps(
            damaged_tree(choices, tree, [*keys_of([tree]), "$"], [*map(str, RAW), 0, -1, 1e9, None, []])
        ).encode()
    words = [b"[", b"]", b"{", b'"', b"-1", b"1e999", b"null", b",", b"\n", b"\xff", b"9" * 30]
    if name.endswith(".gz") and choices.below(4):
        return gzip.compress(damaged_text(choices, gzip.decompress(content), words), 1)
    return damaged_text(choices, content, words)


def _loaded(folder: Path) -> bool:
    found = StoredCheckpoint.open(folder)
    found.past()
    found.messages()
    for rank in range(min(found.world_size, 4)):
        found.rank_state(rank)
    return True


# --- the readers ------------------------------------------------------------

READERS: dict[str, Callable[[bytes], bool]] = {
    "topology": topology,
    "experiment": experiment,
    "flows": flows,
    "traces": traces,
    "checkpoint": checkpoint,
    "foreign": foreign,
}


def one_input(reader: str, data: bytes) -> bool:
    """Give one input to a reader; whether it was accepted. Whatever is raised is a finding."""
    return READERS[reader](data)
