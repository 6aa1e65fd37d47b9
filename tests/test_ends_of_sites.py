"""Start and end of a site: a failed start is reported and leaves nothing, an earlier finish is reported to others."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from experiments import experiment

from exogym_core.events import StepDone
from netgym.cli.main import main
from netgym.sites.communicator import SiteCommunicator
from netgym.sites.link import SiteLink
from netgym.sites.service import RendezvousService
from netsim.errors import InputError, RankError
from netsim.files.signed import PeerError

SECRET = "known to these tests alone"
EXPERIMENT = experiment(
    workers="{count: 1}",
    batch_size=4,
    evaluate="{every: 4, samples: 16}",
    checkpoint="{every: 2}",
    strategies="[{name: DiLoCo, H: 2, averaging_timeout: 10 min, timeout_waiting_for_peers: 4 s}]",
)


def test_a_finished_folder_that_is_resumed_tells_the_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that was started after everything had been killed: it knows nothing of the run else."""
    (tmp_path / "one.yaml").write_text(EXPERIMENT)
    out = str(tmp_path / "out")
    monkeypatch.setenv("NETGYM_SECRET", SECRET)
    monkeypatch.setenv("NETGYM_SITE", "0")
    lines: list[str] = []
    with RendezvousService(1, ("127.0.0.1", 0), SECRET.encode(), say=lines.append) as at:
        monkeypatch.setenv("NETGYM_RENDEZVOUS", f"127.0.0.1:{at.address[1]}")
        assert main(["compare", str(tmp_path / "one.yaml"), "--out", out]) == 0
        (run,) = at.status()
    assert lines[-1] == "site 0 has finished, after step 4"
    with RendezvousService(2, ("127.0.0.1", 0), SECRET.encode(), say=lines.append) as at:
        monkeypatch.setenv("NETGYM_RENDEZVOUS", f"127.0.0.1:{at.address[1]}")
        assert main(["compare", "--resume", out]) == 0
        assert "is finished and left as it is" in capsys.readouterr().out
        assert lines[-1] == "site 0 has finished this run already: its folder has the model"
        with pytest.raises(
            InputError, match="this run is over: site 0 has finished it, its folder has the model"
        ):
            SiteLink(at.address, SECRET.encode(), 1, run=run["run"], resumed=True)
    monkeypatch.setattr("netgym.sites.link._SECONDS_TO_CONNECT", 0.01)
    assert main(["compare", "--resume", out]) == 0
    assert (
        "warning: could not report to other sites that DiLoCo is finished: rendez" in capsys.readouterr().err
    )


def test_the_last_step_is_reported_though_the_site_ends_first() -> None:
    lines: list[str] = []
    with RendezvousService(1, ("127.0.0.1", 0), b"secret", say=lines.append) as at:
        with SiteCommunicator(SiteLink(at.address, b"secret", 0), b"secret") as comm:
            comm.link.mark(0, StepDone(3000, 1.0, 1, 0.1, 0, 0, 0))
        assert lines[-1] == "site 0 has finished, after step 3000"


# --- what never begins --------------------------------------------------------------------------------------

LINK = "netgym.sites.link"


def test_where_no_rendezvous_answers_a_line_tells_it_every_30_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How long it is tried in all, and what to do; before, one line was followed by ten minutes of silence."""

    def nobody(*_: Any) -> None:
        raise PeerError("rendezvous 10.0.0.1:29400: cannot be reached")

    seconds = count(step=10)
    monkeypatch.setattr(f"{LINK}.connect_peer", nobody)
    monkeypatch.setattr(f"{LINK}._SECONDS_BETWEEN_TRIES", 0.0)
    monkeypatch.setattr(f"{LINK}.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    with pytest.raises(RankError, match="start it there with netgym rendezvous"):
        SiteLink(("10.0.0.1", 29400), b"secret", 0, patience_seconds=95.0)
    assert capsys.readouterr().err.splitlines() == [
        f"rendezvous 10.0.0.1:29400: cannot be reached; retrying for {left} s: start `netgym rendezvous ...` "
        "there, or check NETGYM_RENDEZVOUS (unset it for ranks on this machine)"
        for left in (85, 55, 25)
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankError("rendezvous: cannot be reached", 0)])
def test_what_ends_before_its_first_step_leaves_no_folder(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the same command, given again, says that the folder is not empty."""

    def ends(*_: Any) -> None:
        raise error

    (tmp_path / "one.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr(f"{LINK}.connect_peer", ends)
    monkeypatch.setenv("NETGYM_SECRET", SECRET)
    monkeypatch.setenv("NETGYM_RENDEZVOUS", "127.0.0.1:29400")
    code = main(["compare", str(tmp_path / "one.yaml"), "--out", str(tmp_path / "out")])
    errors = capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    if isinstance(error, RankError):
        assert (code, errors.splitlines()[-1]) == (1, "error: rendezvous: cannot be reached")
    else:
        assert (code, errors.splitlines()[-1]) == (
            130,
            "interrupted: nothing was trained yet, and nothing is left",
        )


@pytest.mark.parametrize(
    ("address", "site", "message"),
    [
        ("nonsense", "0", "environment: NETGYM_RENDEZVOUS: 'nonsense' is no address: write HOST:PORT"),
        ("127.0.0.1:29400", "x", "environment: NETGYM_SITE='x' is no number of a site: write 0, 1, ..."),
        (
            "127.0.0.1:29400",
            "7",
            "environment: NETGYM_SITE=7: there is no such site: they are numbered 0 to 1",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused_before_anything_is_made(
    address: str, site: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETGYM_RENDEZVOUS", address)
    monkeypatch.setenv("NETGYM_SITE", site)
    monkeypatch.setattr("exogym_core.results.run_folder.RunFolder.create", None)
    (tmp_path / "two.yaml").write_text(EXPERIMENT.replace("count: 1", "count: 2"))
    errors: list[str] = []
    monkeypatch.setattr("click.echo", lambda text="", **_: errors.append(str(text)))
    assert main(["compare", str(tmp_path / "two.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert errors[-1].startswith(f"error: {message}")
