"""Damaged topologies and experiments: YAML that anybody may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drawn_damage import RAW, Choices, Raw, damaged_text, damaged_tree, flow, keys_of, tree_of
from fuzzed_folder import FOLDER, accepted
from fuzzed_tables import TRACE, runs

from netgym.experiment.experiment import Experiment
from netsim import Topology
from netsim.files.documents import parse_document

__all__ = ["experiment", "topology"]

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
