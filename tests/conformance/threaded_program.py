"""Ranks as threads of one process, as torch's own multi-threaded tests run: their test case, on `netsim`."""

import sys
import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from netgym.launch.registration import replace_backends

replace_backends(["threaded"])


class Threads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_collectives(self):
        assert type(dist.group.WORLD).__name__ == "NetsimGroup"
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total)
        torch.testing.assert_close(total, torch.tensor([6.0]))
        parts = [torch.zeros(2) for _ in range(4)]
        dist.all_gather(parts, torch.full((2,), float(self.rank)))
        torch.testing.assert_close(torch.stack(parts)[:, 0], torch.arange(4.0))
        objects = [None] * 4
        dist.all_gather_object(objects, {"rank": self.rank})
        assert [each["rank"] for each in objects] == [0, 1, 2, 3]
        pair = dist.new_group([0, 3])
        if self.rank in (0, 3):
            dist.broadcast(total, 3, group=pair)

    def test_split_groups(self):
        half = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total, group=half)
        torch.testing.assert_close(total, torch.tensor([2.0 + 2 * (self.rank % 2)]))
        assert (dist.split_group(split_ranks=[[1, 2]]) is None) == (self.rank in (0, 3))

        # DTensor, and an operation that autograd goes through, in the same groups' run
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Replicate()])
        torch.testing.assert_close(
            (tensor @ tensor).full_tensor(), torch.arange(16.0).view(4, 4) @ torch.arange(16.0).view(4, 4)
        )

        weight = torch.ones(2, requires_grad=True)
        loss = dist._functional_collectives.all_reduce(weight * self.rank, "sum", dist.group.WORLD).sum()
        assert float(loss.detach()) == 12.0


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
