"""fit on a simulated network: virtual seconds, what is exposed, what looking costs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from experiments import fitted, samples
from worlds import star_form

from exogym_core.cost.compute import Compute
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, OptimSpec
from netgym.tasks import build_model
from netsim import Topology
from netsim.errors import InputError, UnknownNameError


def network(latency="0 ms", bandwidth="100 Mbit/s", hosts=3, devices=()):
    named = {f"h{index}": {"device": device} for index, device in enumerate(devices)}
    every = {f"h{index}": named.get(f"h{index}", {}) for index in range(hosts)}
    return {**star_form(every, bandwidth, latency), "hosts": every}


def fit(**arguments):
    model = build_model("mlp", inputs=6, hidden=[300, 200], classes=3, seed=0)
    given = {"num_nodes": 3, "max_steps": 5, "topology": network(), "compute": "500 ms", "val_size": 8}
    given |= {"strategy": AllReduceStrategy(lr=1e-3)}
    return fitted(model, samples(120), samples(120), **(given | arguments))


def test_computing_alone_takes_exactly_its_time():
    result = fit(num_nodes=1)
    assert [row["virtual_seconds"] for row in result.history] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert (result.virtual_seconds, result.compute_utilisation) == (2.5, 1.0)
    assert result.compute == {"fixed": "0.5 s"}
    assert result.bytes_sent == 0


def test_the_world_is_the_topologys_hosts_by_default():
    assert fit(num_nodes=None).num_nodes == 3


def test_communication_is_added_and_reported():
    slow, fast = fit(strategy=FedAvgStrategy(H=1)), fit(strategy=FedAvgStrategy(H=5))
    num_bytes = 4 * (7 * 300 + 301 * 200 + 201 * 3)
    ring = 2 * 2 / 3 * num_bytes * 8 / 100e6
    assert slow.virtual_seconds == pytest.approx(5 * (0.5 + ring), rel=1e-3)
    assert fast.virtual_seconds == pytest.approx(5 * 0.5 + ring, rel=1e-3)
    assert slow.compute_utilisation == pytest.approx(0.5 / (0.5 + ring), rel=1e-3)
    assert slow.bytes_sent == 5 * fast.bytes_sent == pytest.approx(5 * 4 * num_bytes, rel=1e-3)
    assert slow.exposed_seconds == pytest.approx([5 * ring] * 3, rel=1e-3)


def test_a_backward_pass_hides_the_communication_of_what_is_ready():
    # One bucket can leave only at the end; small ones leave while earlier layers are still differentiated.
    whole = fit(strategy=AllReduceStrategy(lr=1e-3))
    buckets = fit(strategy=AllReduceStrategy(lr=1e-3, bucket_bytes=1000))
    assert whole.bytes_sent == pytest.approx(buckets.bytes_sent, rel=1e-3)
    assert buckets.virtual_seconds < whole.virtual_seconds
    assert [row["train_loss"] for row in whole.history] == pytest.approx(
        [row["train_loss"] for row in buckets.history], rel=1e-6
    )


def test_only_the_last_micro_batch_communicates():
    whole, pieces = fit(), fit(minibatch_size=1)
    assert pieces.bytes_sent == whole.bytes_sent
    assert sum(pieces.compute_seconds) == pytest.approx(sum(whole.compute_seconds))
    # A quarter of the backward pass is left to hide behind.
    assert pieces.virtual_seconds >= whole.virtual_seconds


@pytest.mark.parametrize("strategy", [AllReduceStrategy(lr=1e-3), DiLoCoStrategy(H=2)])
def test_looking_costs_no_virtual_time(strategy):
    blind = fit(strategy=strategy, val_size=0)
    looking = fit(strategy=strategy, val_interval=1, correlation_interval=1)
    assert looking.history == blind.history
    assert looking.virtual_seconds == blind.virtual_seconds
    assert looking.bytes_sent == blind.bytes_sent
    by_step = {row["step"]: row["virtual_seconds"] for row in looking.history} | {0: 0.0}
    assert [row["virtual_seconds"] for row in looking.validation] == [by_step[step] for step in range(6)]


def test_all_strategies_meet_the_same_jitter():
    spread = {"fixed": "500 ms", "jitter": 0.3}
    one, other = fit(compute=spread), fit(compute=spread, strategy=FedAvgStrategy(H=2))
    assert one.compute_seconds == pytest.approx(other.compute_seconds, abs=1e-6)
    assert len({round(seconds, 6) for seconds in one.compute_seconds}) == 3
    assert fit(compute=spread, seed=7).compute_seconds != one.compute_seconds


def test_ranks_of_one_host_share_its_fate():
    spread = {"fixed": "500 ms", "jitter": 0.3}
    seconds = fit(compute=spread, placement=["h1", "h0", "h1"]).compute_seconds
    assert seconds[0] == pytest.approx(seconds[2], abs=1e-6)
    assert seconds[0] != pytest.approx(seconds[1], abs=1e-3)


def test_flops_are_divided_by_each_hosts_device():
    result = fit(
        topology=network(devices=["raspberry-pi-5", "a100", "a100"]), compute={"flops": {"utilisation": 0.5}}
    )
    slow, fast, _ = result.compute_seconds
    assert result.hosts == ["h0", "h1", "h2"]
    assert slow / fast == pytest.approx(19.5e12 / (4 * 2.4e9 * 16), rel=1e-2)
    with pytest.raises(InputError, match=r"host h1: names no device, .* give compute='measured'"):
        fit(topology=network(devices=["raspberry-pi-5"]), compute=None)  # which was an a100 without a word
    with pytest.raises(UnknownNameError, match="host h1: unknown device 'a10o'"):
        fit(topology=network(devices=["a100", "a10o"]), compute=None)


def test_smaller_batches_need_fewer_flops():
    def compute_seconds(max_steps):
        device = {"flops": {"device": "raspberry-pi-5"}}
        return fit(compute=device, batch_size=16, max_steps=max_steps).compute_seconds[0]

    # 120 samples by 3 x 16: two full steps and one of 8 samples a rank.
    assert compute_seconds(3) / compute_seconds(2) == pytest.approx(1.25, rel=1e-3)


@pytest.mark.parametrize("minibatch_size", [None, 200])
def test_a_batch_larger_than_the_data_takes_the_time_of_the_samples_there_are(minibatch_size):
    def compute_seconds(**sizes):
        device = {"flops": {"device": "raspberry-pi-5"}}
        return fit(compute=device, **sizes).compute_seconds

    # 120 samples are 40 for each of three ranks; their count for 120 used to be divided by the 1000 asked for.
    large = compute_seconds(batch_size=1000, minibatch_size=minibatch_size)
    assert large == pytest.approx(compute_seconds(batch_size=40), rel=1e-6)


def test_measured_seconds_are_settled_as_fixed():
    result = fit(compute={"measured": {"factor": 3}, "jitter": 0.1})
    settled = Compute.parse(result.compute)
    assert settled.jitter == 0.1
    assert settled.fixed > 0
    assert fit(compute=settled).history == result.history


def test_time_to_target_is_the_first_evaluation_that_reaches_it():
    result = fit(
        strategy=AllReduceStrategy(optim_spec=OptimSpec("adam", lr=1e-2)), val_interval=1, val_size=100
    )
    losses = [row["global_loss"] for row in result.validation]
    assert losses[3] < losses[0]
    reached = fit(
        strategy=AllReduceStrategy(optim_spec=OptimSpec("adam", lr=1e-2)),
        val_interval=1,
        val_size=100,
        target_loss=losses[3],
    )
    first = next(row for row in result.validation if row["global_loss"] <= losses[3])
    assert reached.virtual_seconds_to_target == first["virtual_seconds"]
    assert result.virtual_seconds_to_target is None


@pytest.mark.parametrize(
    ("topology", "left"), [("home-broadband", "dsl0 or 3 more"), ("home-tiers", ".* or 7 more")]
)
def test_workers_on_hosts_of_one_kind_among_several_are_warned_of(topology: str, left: str) -> None:
    """Four workers of home-broadband were on cable0 to cable3, in silence."""
    options: dict[str, Any] = {"num_nodes": 4, "topology": topology, "compute": "10 ms", "max_steps": 1}
    with pytest.warns(
        UserWarning, match=rf"none is on {left} hosts with other links: name the hosts by placement"
    ):
        fitted(**options)
    names = [host.name for host in Topology.load(topology).hosts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(**options, placement=names[-4:])
        fitted(**{**options, "num_nodes": len(names)})
