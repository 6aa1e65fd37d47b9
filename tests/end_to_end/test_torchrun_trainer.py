"""fit in processes that torchrun has started."""

from __future__ import annotations

import json
import warnings

import pytest
from experiments import fit
from forks import Fork, ranks, run_script

from exogym_core import Trainer
from exogym_core.strategy import AllReduceStrategy, AsyncDiLoCoStrategy
from netgym.tasks import MLP
from netsim.errors import InputError

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("error")
import torch
from torch.utils.data import TensorDataset
from exogym_core import Trainer
from exogym_core.strategy import DiLoCoStrategy
from netgym.tasks import build_model

inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
# An own, different start on every process: rank 0's is the one that counts.
model = build_model("mlp", inputs=6, hidden=[5], classes=3, seed=int(os.environ.get("RANK", 0)))
arguments = json.loads(sys.argv[1])
trained = Trainer(model, data, data).fit(strategy=DiLoCoStrategy(H=2), device="cpu", max_steps=5, batch_size=4,
                                         val_interval=2, **arguments)
result = trained.fit_result
print(json.dumps({
    "losses": [row["train_loss"] for row in result.history],
    "validation": [row["global_loss"] for row in result.validation],
    "bytes_sent": result.bytes_sent,
    "ranks": len(result.rank_states),
    "weights": trained.state_dict()["layers.0.weight"].sum().item(),
}))
"""


def test_processes_of_torchrun_train_together_as_simulated_ranks_do(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    real, alone = json.dumps({"transport": "gloo"}), json.dumps({"num_nodes": 2})
    ends = ranks(2, run_script, "script.py", real, folder=tmp_path)
    ends.append(Fork(run_script, "script.py", alone, folder=tmp_path).end())
    assert [end.returncode for end in ends] == [0, 0, 0], [end.stderr for end in ends]
    first, second, simulated = (json.loads(end.stdout.splitlines()[-1]) for end in ends)
    for name in ("losses", "validation", "weights"):
        assert first[name] == pytest.approx(simulated[name], rel=1e-4)
    assert first["bytes_sent"] == simulated["bytes_sent"]
    assert (first["ranks"], second["ranks"]) == (1, 1), "no rank has all models"
    assert second["losses"] == [], "rank 0 keeps the rows"


def test_num_nodes_must_be_torchruns(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="num_nodes is 4, but torchrun has started 2 processes"):
        Trainer(MLP(), []).fit(strategy=AllReduceStrategy(), num_nodes=4, transport="gloo")


def test_servers_are_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="has 1 server, which processes of torchrun do not run"):
        Trainer(MLP(), []).fit(strategy=AsyncDiLoCoStrategy(), transport="gloo")


@pytest.mark.parametrize(
    "place", [{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "y", "SLURM_PROCID": "1"}]
)
def test_a_run_that_joins_no_launcher_is_a_run_of_its_own(place, monkeypatch, tmp_path, capsys):
    """Shells of Slurm, MPI and accelerate have these variables."""
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for transport in ("netsim", "gloo"):
        out = tmp_path / transport
        about = {"num_nodes": 2, "max_steps": 2, "transport": transport, "device": "cpu", "out": out}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(strategy=AllReduceStrategy(), **about)
        assert (out / "summary.json").is_file()
        assert "step 2" in capsys.readouterr().err
        named = f"fit: RANK={place['RANK']} is set, but not by torchrun"
        assert any(named in str(each.message) for each in told) == (transport == "gloo")


def test_a_rank_that_is_no_number_is_named(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "x", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="environment: RANK='x' is no whole number"):
        fit(strategy=AllReduceStrategy(), transport="gloo")
