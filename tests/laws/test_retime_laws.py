"""Law of retiming: losses do not depend on the network, so a training that is timed on another is equal to one there.

A training whose losses may depend on it says so, and is refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from experiments import fit_until, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume_laws import OPTIONS, Augmented, Model
from worlds import regions_form

from exogym_core import Trainer
from exogym_core.results.fit_result import FitResult
from exogym_core.run.retiming import TrainAgainError
from exogym_core.strategy import build_strategy

Form = dict[str, Any]
# Their ranks take what comes first, wait for what is late, or send the next part of an average once one has come.
TIMED = {
    number
    for number, (name, options) in enumerate(OPTIONS)
    if name in {"ADPSGD", "AsyncDiLoCo", "DecoupledDiLoCo", "HALoS", "HeLoCo"}
    or ("codec" in options and name in {"StreamingDiLoCo", "DelayedDiLoCo"})
}
NUM_NODES = 3
HOSTS = ("us.0", "us.1", "eu.0", "eu.1", "eu.2")
HERE: Form = {"topology": regions_form({"us": 2, "eu": 3}), "compute": {"fixed": "3 ms", "jitter": 0.2}}


def train(number: int, network: Form, **options: Any) -> FitResult:
    """Train with a strategy of `OPTIONS` on a network."""
    name, own = OPTIONS[number]
    trainer = Trainer(Model(), Augmented(), Augmented(noise=0.0))
    arguments: Form = {
        **{"num_nodes": NUM_NODES, "max_steps": 6, "batch_size": 4, "minibatch_size": 2, "device": "cpu"},
        **{
            "val_size": 8,
            "val_interval": 2,
            "correlation_interval": 4,
            "target_loss": 1.2,
            "progress": False,
        },
        **{"workers": "threads", "strategy": build_strategy(name, **own)},
    }
    return fit_until(trainer, None, **(arguments | network | options))


@cache
def trained(number: int) -> FitResult:
    """The training that is timed elsewhere."""
    return train(number, HERE)


numbers = st.integers(1, 2000)
link = st.sampled_from([["us", "eu"], ["us.0", "us"], ["eu.1", "eu"]])
event = st.builds(
    lambda at, lasts, what: {"at": f"{at} ms", "for": f"{lasts} ms", **what},
    st.integers(0, 200),
    st.integers(5, 300),
    st.one_of(
        link.map(lambda each: {"link": each, "down": True}),
        link.map(lambda each: {"link": each, "bandwidth": "30 kbit/s"}),
        st.sampled_from(HOSTS).map(lambda host: {"host": host, "crash": True}),
    ),
)
weather = st.fixed_dictionaries(
    {"events": st.lists(event, max_size=3)},
    optional={
        "drift": link.map(
            lambda each: [{"link": each, "kind": "lognormal", "every": "20 ms", "sigma": 0.3, "seed": 1}]
        ),
        "background": numbers.map(
            lambda rate: [{"from": "us.0", "to": "eu.0", "rate": f"{rate} kbit/s", "start": "10 ms"}]
        ),
    },
)
topologies = st.builds(
    lambda wan, rtt, more: regions_form({"us": 2, "eu": 3}, wan=f"{wan} kbit/s", rtt=f"{rtt} ms", **more),
    st.integers(100, 100_000),
    st.integers(1, 90),
    weather,
)
networks = st.fixed_dictionaries(
    {
        "topology": st.one_of(st.sampled_from(["lan", "wan-4-regions"]), topologies),
        "compute": st.builds(
            lambda milliseconds, jitter, slow: {
                "fixed": f"{milliseconds} ms",
                "jitter": jitter,
                **({"stragglers": {"fraction": 0.3, "slowdown": 4}} if slow else {}),
            },
            st.integers(0, 30),
            st.sampled_from([0, 0.3]),
            st.booleans(),
        ),
    },
    optional={
        "protocol": st.sampled_from(["ideal", "gloo", {"preset": "linux-tcp", "streams": 4}]),
        "collectives": st.sampled_from(["ring", "tree", {"all_reduce": "direct"}]),
    },
)


@given(st.integers(0, len(OPTIONS) - 1), networks)
@settings(max_examples=4)
def test_a_training_timed_on_another_network_is_one_trained_there(number: int, network: Form) -> None:
    encodes = "codec" in OPTIONS[number][1]
    refusal = None
    try:
        timed = trained(number).retime(**network)
    except TrainAgainError as error:
        refusal = str(error)
    if refusal is None:
        assert outcome(timed) == outcome(train(number, network))
    assert (number in TIMED) == bool(refusal and "trained again" in refusal)
    assert number in TIMED or encodes or refusal is None


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=name, marks=[pytest.mark.thorough] if number % 8 else [])
        for number, (name, _) in enumerate(OPTIONS)
    ],
)
def test_every_strategy_is_retimed_or_refused(number: int) -> None:
    original = trained(number)
    if number in TIMED:
        with pytest.raises(TrainAgainError, match="has to be trained again"):
            original.retime(topology="lan")
    else:
        assert outcome(original.retime()) == outcome(original)
        assert outcome(original.retime(topology="lan")) == outcome(train(number, HERE | {"topology": "lan"}))
