"""The network without any training: how long do 100 MB take to be summed over a WAN, with which algorithm?

netsim needs neither torch nor tensors: a collective is a schedule of messages, simulated on links in virtual time.
"""

import netsim

WAN = {
    "name": "lab-and-cloud",
    "source": "made up for this example",
    "regions": {
        "lab": {"hosts": 4, "nic": "1 Gbit/s", "latency": "100 us"},
        "cloud": {"hosts": 4, "nic": "10 Gbit/s", "latency": "50 us"},
    },
    "wan": [{"between": ["lab", "cloud"], "bandwidth": "500 Mbit/s", "rtt": "40 ms"}],
}

for algorithm in ("ring", "tree", "direct", "two-level", "auto"):
    took = netsim.collective(WAN, "all_reduce", num_bytes="100 MB", algorithm=algorithm)
    over = took.link_bytes["lab->cloud"] / 1e6
    print(f"{algorithm:<10} {took.seconds:8.3f} s  {over:5.0f} MB to the cloud  (by {took.algorithm})")
print(f"any        {took.bound_seconds:8.3f} s  at the least")

transfers = [(0.0, "lab.0", "cloud.0", 10_000_000), (0.1, "lab.1", "cloud.1", 10_000_000)]
print("two transfers end at", netsim.flows(WAN, transfers).finish_seconds)
