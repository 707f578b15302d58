"""One of several processes with a part of a drafter (FSDP2, as in configs/accelerate/fsdp2.yaml): run by torchrun.

Every process has a batch of its own. Exits with an error unless the exchanged gradients are the mean of the batches'.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from tests.training.test_losses import Step


def batch(rank, head):
    torch.manual_seed(rank)
    return Step(markov_head_type=head)


def expected_gradients(head, processes):
    sums = {}
    for rank in range(processes):
        step = batch(rank, head)
        for name, gradient in step.gradients(step.ours()[0]).items():
            sums[name] = sums.get(name, 0) + gradient / processes
    return sums


def main(head):
    dist.init_process_group("gloo")
    expected = expected_gradients(head, dist.get_world_size())
    step = batch(dist.get_rank(), head)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in step.drafter.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(step.drafter, mesh=mesh, reshard_after_forward=False)
    for _ in range(2):  # the second time, weights that were whole are in parts again
        step.drafter.zero_grad()
        total, _ = step.ours()
        total.backward()
        for name, parameter in step.drafter.named_parameters():
            if name in expected:
                assert_close(parameter.grad.full_tensor(), expected[name], atol=1e-5, rtol=1e-4, msg=name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
