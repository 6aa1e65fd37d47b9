"""c10d's calls, each compared with its definition on every rank."""

import sys
import warnings

import torch
import torch.distributed as dist

import netgym

warnings.simplefilter("ignore")  # newer names of the same calls
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
everyone = range(size)


def same(got, expected):
    torch.testing.assert_close(got, expected)


def reduced(tensor, op):
    got = tensor.clone()
    dist.all_reduce(got, op=op)
    return got


own = torch.arange(4) + 10 * rank
all_own = torch.stack([torch.arange(4) + 10 * each for each in everyone])
same(reduced(own, dist.ReduceOp.SUM), all_own.sum(0))
same(reduced(own, dist.ReduceOp.MAX), all_own.amax(0))
same(reduced(own, dist.ReduceOp.PRODUCT), all_own.prod(0))
same(reduced(torch.tensor([rank, 6]), dist.ReduceOp.BOR)[0], torch.tensor(3))
same(reduced(torch.tensor([1 + 2j]) * rank, dist.ReduceOp.SUM), torch.tensor([(1 + 2j) * sum(everyone)]))
same(reduced(torch.tensor([rank == 1, True]), dist.ReduceOp.MIN), torch.tensor([False, True]))
same(
    reduced(torch.full((2,), 2000.0, dtype=torch.float16), dist.ReduceOp.AVG), torch.full((2,), 2000.0).half()
)

root = torch.full((2, 2), float(rank))
dist.broadcast(root, src=1)
same(root, torch.ones(2, 2))
into = own.clone()
dist.reduce(into, dst=2)
same(into, all_own.sum(0) if rank == 2 else own)
parts = [torch.empty_like(own) for _ in everyone]
dist.all_gather(parts, own)
same(torch.stack(parts), all_own)
flat = torch.empty(size * 4, dtype=own.dtype)
dist.all_gather_into_tensor(flat, own)
same(flat, all_own.flatten())
out = torch.empty(2)
dist.reduce_scatter_tensor(out, torch.arange(2.0 * size) * (rank + 1))
same(out, torch.arange(2.0 * size)[2 * rank : 2 * rank + 2] * sum(each + 1 for each in everyone))
dist.reduce_scatter(out, [torch.full((2,), float(each)) for each in everyone])
same(out, torch.full((2,), float(rank * size)))
gathered = [torch.empty_like(own) for _ in everyone] if rank == 0 else None
dist.gather(own, gathered, dst=0)
if rank == 0:
    same(torch.stack(gathered), all_own)
scattered = torch.empty(4, dtype=own.dtype)
dist.scatter(scattered, list(all_own) if rank == 1 else None, src=1)
same(scattered, own)
received = torch.empty(size)
dist.all_to_all_single(received, torch.arange(float(size)) + 10 * rank)
same(received, torch.tensor([rank + 10.0 * each for each in everyone]))
uneven = torch.empty(sum(each + 1 for each in everyone) * 0 + size * (rank + 1))
dist.all_to_all_single(
    uneven,
    torch.full((sum(each + 1 for each in everyone),), float(rank)),
    [rank + 1] * size,
    [each + 1 for each in everyone],
)
same(uneven, torch.arange(float(size)).repeat_interleave(rank + 1))

work = dist.all_reduce(doubled := torch.ones(3), async_op=True)
netgym.advance(1.0)
work.wait()
same(doubled, torch.full((3,), float(size)))
future = dist.all_reduce(tripled := torch.ones(3), async_op=True).get_future()
same(future.then(lambda done: done.value()[0] * 3).wait(), torch.full((3,), 3.0 * size))

if rank < 2:
    message = torch.full((3,), float(rank))
    (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
    # One element, and nobody asks in what shape: torch's pipelines send losses so.
    dist.send(torch.tensor(7.0), 1) if rank == 0 else dist.recv(one := torch.empty(1), 0)
    assert rank == 0 or one.item() == 7.0
    same(message, torch.zeros(3))
operations = [
    dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
    dist.P2POp(dist.irecv, ring := torch.empty(2), (rank - 1) % size),
]
for each in dist.batch_isend_irecv(operations):
    each.wait()
same(ring, torch.full((2,), float((rank - 1) % size)))
if rank == 0:
    anyone = torch.empty(1)
    assert sorted(dist.recv(anyone) for _ in everyone[1:]) == list(everyone[1:])
else:
    dist.send(torch.tensor([float(rank)]), 0)

pair = dist.new_group([0, 2])
if rank in (0, 2):
    same(reduced_in_pair := torch.ones(1), torch.ones(1))
    dist.all_reduce(reduced_in_pair, group=pair)
    same(reduced_in_pair, torch.full((1,), 2.0))
objects = [None] * size
dist.all_gather_object(objects, ("rank", rank))
assert objects == [("rank", each) for each in everyone]
received_list = [{"any": "thing"}] if rank == 0 else [None]
dist.broadcast_object_list(received_list, src=0)
assert received_list == [{"any": "thing"}]
dist.barrier()
dist.monitored_barrier() if dist.get_backend() == "gloo" else dist.barrier(async_op=True).wait()
if rank == 0:
    print("all calls are right", flush=True)
dist.destroy_process_group()
