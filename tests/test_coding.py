"""What compressing costs in virtual time: nothing, a given speed, or one measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import strategy_reference as reference
import torch
from experiments import Squares, fitted
from torch import nn
from torch.utils.data import TensorDataset

from exogym_core.cost.compute import BothWays, Coding, Compute
from exogym_core.strategy import (
    STRATEGIES,
    AllReduceStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    Strategy,
    build_strategy,
)
from exogym_core.strategy.parts.codecs import CODECS, CastCodec
from netsim.errors import InputError

ENCODED, DECODED = 1000, 4000  # bytes a second: slow enough to see


def both(encode: int, decode: int) -> BothWays:
    return BothWays.model_construct(encode=encode, decode=decode)


SPEEDS = Coding({"": both(ENCODED, DECODED)})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, Coding({})),
        ("free", Coding({})),
        ("measured", Coding.model_construct(None)),
        ("2 GB/s", Coding({"": both(2 * 10**9, 2 * 10**9)})),
        ({"encode": "1 kB/s", "decode": "4 kB/s"}, SPEEDS),
        (
            {"int8": "1 MB/s", "fp16": {"encode": "2 MiB/s", "decode": "1 B/s"}},
            Coding({"fp16": both(2**21, 1), "int8": both(10**6, 10**6)}),
        ),
    ],
)
def test_specs_parse_and_come_back(spec: Any, expected: Coding) -> None:
    parsed = Coding.model_validate(spec)
    assert parsed == expected
    assert Coding.model_validate(parsed.model_dump()) == parsed
    compute = Compute.parse({"fixed": "1 s", "coding": spec})
    assert compute.coding == parsed
    assert Compute.parse(compute.to_mapping()) == compute


def seconds(strategy: Strategy, coding: Coding | None, num_ranks: int = 2, steps: int = 2) -> float:
    """Virtual seconds on a network where nothing but coding takes time worth telling."""
    model, batches = reference.make_problem(num_ranks, steps, 3, 8, seed=1)
    run = reference.run_strategy(strategy, model, batches, coding=coding, topology="two-datacenters")
    without = reference.run_strategy(strategy, model, batches, topology="two-datacenters")
    assert all(torch.equal(a, b) for a, b in zip(run.results, without.results, strict=True))
    assert [t.bytes_sent for t in run.traffic] == [t.bytes_sent for t in without.traffic]
    return run.virtual_seconds - without.virtual_seconds


def cost(encoded: float, decoded: float) -> float:
    return 4 * encoded / ENCODED + 4 * decoded / DECODED


NUM_VALUES = 8 * 3 + 8 + 8 * 6 + 1


def test_what_codecs_do_is_charged_to_the_second() -> None:
    """Of 81 values two ranks sum up 41 and 40: the slower one counts."""
    largest = 41
    once = cost(NUM_VALUES + largest, 2 * largest + NUM_VALUES)
    assert seconds(AllReduceStrategy(codec="int8"), SPEEDS) == pytest.approx(2 * once, rel=1e-6)
    assert seconds(FedAvgStrategy(codec="fp16", H=2), SPEEDS) == pytest.approx(once, rel=1e-6)
    assert seconds(DiLoCoStrategy(codec="int8", H=2), SPEEDS) == pytest.approx(once, rel=1e-6)
    fed_back = once + cost(0, NUM_VALUES + largest)  # what is owed must be decoded
    feedback = DiLoCoStrategy(codec="int8", H=2, error_feedback=True)
    assert seconds(feedback, SPEEDS) == pytest.approx(fed_back, rel=1e-6)
    robust = cost(NUM_VALUES, 2 * NUM_VALUES)
    median = DiLoCoStrategy(codec="int8", H=2, aggregate="median")
    assert seconds(median, SPEEDS) == pytest.approx(robust, rel=1e-6)
    assert seconds(DeMoStrategy(), SPEEDS) == pytest.approx(2 * cost(NUM_VALUES, NUM_VALUES), rel=1e-6)


def test_what_is_not_coded_costs_nothing() -> None:
    for strategy in (AllReduceStrategy(), DiLoCoStrategy(H=1), FedAvgStrategy(codec="fp32")):
        assert seconds(strategy, SPEEDS) == 0
    assert seconds(AllReduceStrategy(codec="int8"), Coding({})) == 0
    assert seconds(DiLoCoStrategy(codec="int8", H=2), SPEEDS, num_ranks=1) == 0


def test_speeds_by_codec() -> None:
    speeds = Coding(dict.fromkeys(["fp16", "CastCodec"], both(ENCODED, DECODED)))
    assert seconds(AllReduceStrategy(codec="fp16"), speeds) > 0
    assert seconds(AllReduceStrategy(codec=CastCodec(torch.float16)), speeds) > 0
    line = "compute.coding: has no speed for codec 'int8', only for CastCodec, fp16; add one"
    with pytest.raises(InputError, match=line):
        seconds(DiLoCoStrategy(codec="int8", H=100), speeds)  # before the first round


def fit(strategy: Strategy, **options: Any) -> Any:
    values = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    given = {"strategy": strategy, "topology": "two-datacenters", **options}
    return fitted(Squares(6, 6), TensorDataset(values, values), **given)


def test_measured_speeds_are_stored_and_run_again_as_they_are(tmp_path: Path) -> None:
    compute = {"fixed": "10 ms", "coding": "measured"}
    strategy = DiLoCoStrategy(codec="quantile8bit", H=1)
    kept = {"checkpoint_interval": 2, "save_dir": tmp_path}
    measured = fit(strategy, compute=compute, **kept)
    names = {name for name, codec in CODECS.items() if codec is not None} | {
        *("demo", "largest", "linear", "low-rank", "qsgd", "sign", "statistical"),
    }
    assert set(measured.compute["coding"]) == names
    assert all(
        speed > 0
        for each in Compute.parse(measured.compute).coding.speeds.values()
        for speed in (each.encode, each.decode)
    )
    again = fit(strategy, compute=measured.compute)
    assert again.virtual_seconds == measured.virtual_seconds > fit(strategy, compute="10 ms").virtual_seconds
    assert again.compute_utilisation > fit(strategy, compute="10 ms").compute_utilisation
    resumed = fit(strategy, compute=compute, checkpoint_interval=2, resume_from=measured.checkpoint_folder)
    assert resumed.resumed_step == 2
    assert resumed.compute == measured.compute, "the speeds of then hold now"
    assert resumed.virtual_seconds == measured.virtual_seconds


class Halves(Strategy):
    """Averages parameters in bf16 at each step; `charges` what that costs, or not."""

    def __init__(self, charges: bool, **options: Any) -> None:
        super().__init__(**options)
        self.charges = charges

    def step(self) -> None:
        self.optimizer_step()
        flat = torch.cat([parameter.detach().flatten() for parameter in self.trainable])
        sent = flat.to(torch.bfloat16)
        self.comm.all_reduce(sent, "avg")
        if self.charges:
            self.charge("halves", "encode", len(flat))
            self.charge("halves", "decode", len(flat))
        nn.utils.vector_to_parameters(sent.float(), self.trainable)
        super().step()


class TenthCodec(CastCodec):
    """One of one's own."""

    def __init__(self) -> None:
        super().__init__(torch.float16)


def test_own_coding_is_charged_or_reported() -> None:
    """At 10 kB/s 42 values take 16.8 ms to encode and as long to decode, three times."""
    slow = {"fixed": "1 s", "coding": "10 kB/s"}
    with pytest.warns(UserWarning, match="Halves: coding not charged: it sends encoded values"):
        free = fit(Halves(charges=False, lr=0.1), compute=slow)
    assert free.coding == "not charged"
    paid = fit(Halves(charges=True, lr=0.1), compute=slow)
    assert paid.coding == "charged"
    assert paid.virtual_seconds - free.virtual_seconds == pytest.approx(3 * 2 * 42 * 4 / 10_000, rel=1e-3)
    assert fit(Halves(charges=False, lr=0.1), compute="1 s").coding is None, "coding is free for all"
    for strategy in (AllReduceStrategy(lr=0.1), DiLoCoStrategy(H=2, lr=0.1)):
        assert fit(strategy, compute=slow).coding is None, "nothing is encoded"
    assert fit(AllReduceStrategy(codec=TenthCodec(), lr=0.1), compute=slow).coding == "charged"


@pytest.mark.parametrize("coding", ["measured", {"int8": "2 GB/s"}])
def test_a_codec_of_ones_own_without_a_speed_is_measured(coding: Any, tmp_path: Path) -> None:
    compute = {"fixed": "10 ms", "coding": coding}
    strategy = DiLoCoStrategy(codec=TenthCodec(), H=1)
    kept = {"checkpoint_interval": 2, "save_dir": tmp_path}
    measured = fit(strategy, compute=compute, **kept)
    assert "TenthCodec" in measured.compute["coding"]
    assert measured.coding == "charged"
    again = fit(strategy, compute=compute, checkpoint_interval=2, resume_from=measured.checkpoint_folder)
    assert again.resumed_step == 2
    assert again.compute == measured.compute, "the speeds of then hold now"
    assert fit(DiLoCoStrategy(codec="int8", H=1), compute=measured.compute).coding == "charged"


def test_an_override_of_setup_from_times_in_which_coding_was_free_still_runs() -> None:
    class Old(AllReduceStrategy):
        def setup(self, model: nn.Module, comm: Any, max_steps: int, seed: int) -> None:  # type: ignore[override]
            super().setup(model, comm, max_steps, seed)

    assert fit(Old(lr=0.1), compute={"fixed": "1 s", "coding": "10 kB/s"}).coding is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_shipped_strategy_encodes_for_nothing(name: str) -> None:
    options: dict[str, Any] = {"servers": 3} if name == "HALoS" else {}
    if name in (
        "SPARTA+DiLoCo",
        "DiLoCo",
        "FedAvg",
        "LocalSGD",
        "SlowMo",
        "MuLoCo",
        "SparseLoCo",
        "QsparseLocalSGD",
    ):
        strategy = build_strategy(name, H=2)
    else:
        strategy = build_strategy(name)
    compute = {"fixed": "10 ms", "coding": "1 GB/s"}
    assert fit(strategy, compute=compute, workers="threads", **options).coding in (None, "charged")
