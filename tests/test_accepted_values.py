"""Values that users may write, in the forms in which they meet them elsewhere."""

from __future__ import annotations

import gzip
import urllib.error
import urllib.request

import pytest
import torch
from torch.distributed import ReduceOp

from exogym_core import Trainer
from exogym_core.communicator.arguments import reduce_op_name
from exogym_core.strategy import AllReduceStrategy
from exogym_core.strategy.optimizers import build_scheduler, resolve_scheduler
from exogym_core.strategy.parts.selectors import slice_bounds
from netgym.tasks import build_model, build_task
from netgym.tasks.images import read_idx
from netsim.errors import InputError, UnknownNameError


def test_reduce_ops_come_as_text_as_kinds_and_as_objects_of_c10d():
    for name in ("sum", "avg", "min", "max", "product"):
        kind = getattr(ReduceOp, name.upper())
        assert {reduce_op_name(form) for form in (name, name.upper(), kind, ReduceOp(kind))} == {name}
    for unknown in (ReduceOp.BXOR, ReduceOp(ReduceOp.BAND), 3, None):
        with pytest.raises(UnknownNameError, match="unknown reduce op"):
            reduce_op_name(unknown)


def test_null_in_a_schedule_means_its_default():
    """`warmup_steps: null` in an experiment used to fail inside a rank."""
    options = dict.fromkeys(("warmup_steps", "max_steps", "floor", "cosine_anneal"))
    resolve_scheduler("lambda_cosine", options)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert build_scheduler(optimizer, "lambda_cosine", options, 10).get_last_lr() == [1.0]


def test_bounds_of_a_random_selection_do_not_overflow():
    """At 3e10 values and p=0.02 the product of the last place and the size passed 2 ** 63."""
    places = torch.arange(600_000_000 - 3, 600_000_001)
    bounds = slice_bounds(places, 30_000_000_000, 600_000_000)
    assert bounds.tolist() == [30_000_000_000 - 50 * behind for behind in (3, 2, 1, 0)]


@pytest.mark.parametrize(("of_trainer", "of_fit"), [("", "cpu"), ("auto", "cpu"), (None, ""), ("", "auto")])
def test_no_device_is_written_as_exo_gym_and_as_experiments_do(of_trainer, of_fit):
    """`device=""` is EXO Gym's default, "auto" the experiment files'; fit used to refuse both."""
    samples = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))
    trainer = Trainer(build_model("mlp", inputs=6, hidden=[4], classes=2), samples, device=of_trainer)
    model = trainer.fit(
        strategy=AllReduceStrategy(), num_nodes=2, max_steps=1, batch_size=2, device=of_fit, workers="threads"
    )
    assert model.fit_result.complete
    with pytest.raises(InputError, match="device is 'mps', but Trainer was given 'cpu'"):
        Trainer(model, samples, device="cpu").fit(strategy=AllReduceStrategy(), num_nodes=2, device="mps")


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b\x08" + bytes(40), gzip.compress(bytes(1_000_001), mtime=0) * 100]
)
def test_a_gzip_file_that_is_broken_or_never_ends_is_reported(content, tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"images\.gz: .*fetch it again"):
        read_idx(path)


def test_a_download_that_fails_is_reported_in_one_line(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(InputError, match=r"task mnist: https://.* cannot be fetched: .*no network here"):
        build_task("mnist", path=str(tmp_path), download=True)
