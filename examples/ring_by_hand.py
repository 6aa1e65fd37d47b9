"""Any code on ranks: an all-reduce written as a ring of sends and receives, next to the built-in ones.

`run_ranks` runs a function on every rank, here without any training. The time is the network's. Left to itself
(`collectives="auto"`), a run takes the algorithm that is fastest on its network.
"""

import torch

from netgym import run_ranks

NUM_VALUES = 4_000_000  # of 4 bytes


def by_hand(comm):
    """Reduce-scatter, then all-gather: each rank passes slices on to its right-hand neighbour."""
    slices = list(torch.full((NUM_VALUES,), float(comm.rank)).tensor_split(comm.world_size))
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for round_number in range(2 * (comm.world_size - 1)):
        send = (comm.rank - round_number) % comm.world_size
        receive = (send - 1) % comm.world_size
        sending = comm.isend(slices[send], right)
        arrived = comm.recv(torch.empty_like(slices[receive]), left)
        sending.wait()
        adds_up = round_number < comm.world_size - 1
        slices[receive] = slices[receive] + arrived if adds_up else arrived
    return torch.cat(slices)[0].item()


def built_in(comm):
    return comm.all_reduce(torch.full((NUM_VALUES,), float(comm.rank)))[0].item()


for body, collectives in ((by_hand, "auto"), (built_in, "ring"), (built_in, "auto")):
    run = run_ranks(body, 8, topology="two-datacenters", collectives=collectives)
    algorithm = " ".join(run.collectives.get("all_reduce", ["ring of messages"]))
    total = sum(sent.bytes_sent for sent in run.traffic)
    print(
        f"{body.__name__:<8} {algorithm:<16} {run.results[0]:g} after {run.virtual_seconds:.6f} s, {total} bytes"
    )
