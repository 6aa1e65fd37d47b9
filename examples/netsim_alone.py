"""The network without any training: how long do 100 MB take to be summed over a WAN, with which algorithm?

netsim needs neither torch nor tensors: a collective is a schedule of messages, played on links in virtual time.
"""

from netsim.collectives import algorithm_names, play, schedule
from netsim.fluid.clock import Clock
from netsim.fluid.network import Network
from netsim.topology import Topology

WAN = {
    "name": "lab-and-cloud",
    "source": "made up for this example",
    "regions": {
        "lab": {"hosts": 4, "nic": "1 Gbit/s", "latency": "100 us"},
        "cloud": {"hosts": 4, "nic": "10 Gbit/s", "latency": "50 us"},
    },
    "wan": [{"between": ["lab", "cloud"], "bandwidth": "500 Mbit/s", "rtt": "40 ms"}],
    "protocol": "ideal",
}


def seconds(topology, algorithm, num_bytes):
    """When the last of all hosts is through, all having entered at time 0."""
    clock = Clock()
    hosts = range(len(topology.hosts))
    plan = schedule(
        "all_reduce",
        len(hosts),
        num_bytes=num_bytes,
        algorithm=algorithm,
        hosts=tuple(hosts),
        topology=topology,
    )
    through = {}
    playing = play(
        Network(clock, topology), plan, hosts, on_done=lambda rank: through.setdefault(rank, clock.now)
    )
    for member in hosts:
        playing.arrive(member)
    clock.run()
    return max(through.values())


topology = Topology.from_mapping(WAN)
for algorithm in algorithm_names("all_reduce"):
    print(f"{algorithm:<16} {seconds(topology, algorithm, 100_000_000):8.3f} s")
