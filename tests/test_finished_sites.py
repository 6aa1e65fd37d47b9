"""A run at a rendezvous that was finished before: its folder tells so, and who is there ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from exogym_core.app.cli import main
from exogym_core.communicator import SiteCommunicator
from exogym_core.communicator.elastic.link import SiteLink
from exogym_core.ranks.rendezvous.service import Meeting
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "known to these tests alone"
EXPERIMENT = """\
name: apart
task: digits
model: {name: mlp, hidden: [4]}
workers: {count: 1}
device: cpu
steps: 4
batch_size: 4
evaluate: {every: 4, samples: 16}
checkpoint: {every: 2}
strategies:
  - {name: DiLoCo, H: 2, averaging_timeout: 10 min, timeout_waiting_for_peers: 4 s}
"""


def test_a_finished_folder_that_is_resumed_tells_the_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that was started after everything had been killed: it knows nothing of the run else."""
    (tmp_path / "one.yaml").write_text(EXPERIMENT)
    out = str(tmp_path / "out")
    monkeypatch.setenv("NETGYM_SECRET", SECRET)
    monkeypatch.setenv("NETGYM_SITE", "0")
    lines: list[str] = []
    with Meeting(1, ("127.0.0.1", 0), SECRET.encode(), say=lines.append) as at:
        monkeypatch.setenv("NETGYM_RENDEZVOUS", f"127.0.0.1:{at.address[1]}")
        assert main(["compare", str(tmp_path / "one.yaml"), "--out", out]) == 0
        (run,) = at.told()
    assert lines[-1] == "site 0 is through, after step 4"
    with Meeting(2, ("127.0.0.1", 0), SECRET.encode(), say=lines.append) as at:
        monkeypatch.setenv("NETGYM_RENDEZVOUS", f"127.0.0.1:{at.address[1]}")
        assert main(["compare", "--resume", out]) == 0
        assert "is finished and left as it is" in capsys.readouterr().out
        assert lines[-1] == "site 0 has finished this run already: its folder has the model"
        with pytest.raises(
            InputError, match="this run is over: site 0 has finished it, its folder has the model"
        ):
            SiteLink(at.address, SECRET.encode(), 1, run=run["run"], resumed=True)
    monkeypatch.setattr("exogym_core.communicator.elastic.finished._SECONDS", 0.01)
    assert main(["compare", "--resume", out]) == 0
    assert (
        "warning: other sites were not told that DiLoCo is finished here: rendez" in capsys.readouterr().err
    )


def test_the_last_step_is_told_though_the_site_ends_before_it_has_told_of_it() -> None:
    lines: list[str] = []
    with Meeting(1, ("127.0.0.1", 0), b"secret", say=lines.append) as at:
        with SiteCommunicator(SiteLink(at.address, b"secret", 0), b"secret") as comm:
            comm.link.mark(0, {"step": 3000})
        assert lines[-1] == "site 0 is through, after step 3000"
