"""Input from regular files alone; output whole, through links, and in place where there is a pipe or a device."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from netsim import Topology
from netsim.cli.main import main
from netsim.errors import InputError
from netsim.files.plain_files import input_file, output_file, read_bytes

FLOWS = "start_s,src,dst,bytes\n0,0,1,1000000\n"
DONE = "start_s,src,dst,bytes,finish_s\n0,0,1,1000000,0.0009000000000000001\n"
LINK = "hosts: [a, b]\nlinks: [{between: [a, b], bandwidth: 1 Gbit/s, latency: 1 ms}]\n"


def run(*arguments: str) -> str:
    """What it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(list(arguments))
    return printed.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("flows.csv").write_text(FLOWS)
    return tmp_path


def read_in_the_background(path: str) -> tuple[threading.Thread, list[bytes]]:
    """Somebody who reads a pipe to its end."""
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path(path).read_bytes()), daemon=True)
    reader.start()
    return reader, got


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "pipe"),
        ("show", "pipe"),
        ("collective", "pipe", "all_reduce", "--bytes", "1MB"),
        ("flows", "two-datacenters", "pipe"),
        ("import", "pipe"),
        ("plot", "pipe"),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_a_pipe_is_refused_at_once(arguments: tuple[str, ...], here: Path) -> None:
    """All readers waited for somebody to write into it."""
    os.mkfifo("pipe")
    assert "pipe: is not a regular file but a pipe: write it to a file first" in run(*arguments)


def test_a_file_that_is_too_large_is_not_read(here: Path) -> None:
    with (here / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"huge: larger than 1 MB"):
        read_bytes(here / "huge", 1_000_000)


def test_so_are_devices_and_a_trace_that_a_topology_names(here: Path) -> None:
    with pytest.raises(InputError, match="/dev/zero: is not a regular file but a device"):
        input_file("/dev/zero")
    with pytest.raises(IsADirectoryError):
        input_file(here)
    os.mkfifo("pipe.csv")
    Path("net.yaml").write_text(f"{LINK}traces: [{{link: [a, b], bandwidth: pipe.csv}}]\n")
    assert "traces[0].bandwidth: " in run("validate", "net.yaml")
    assert "is not a regular file but a pipe" in run("validate", "net.yaml")


def test_output_goes_into_a_pipe_and_through_a_link(here: Path) -> None:
    """A pipe was replaced by a file, as /dev/null was; so was a link."""
    os.mkfifo("pipe")
    reader, got = read_in_the_background("pipe")
    assert (
        run("flows", "two-datacenters", "flows.csv", "--protocol", "ideal", "--out", "pipe")
        == "protocol: ideal\n"
    )
    reader.join()
    assert got == [DONE.encode()]
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
    reader, got = read_in_the_background("pipe")
    run("flows", "two-datacenters", "flows.csv", "--out", "a.csv", "--trace", "pipe")
    reader.join()
    assert b"traceEvents" in got[0]
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
    Path("link.csv").symlink_to("real.csv")
    for _ in range(2):
        run("flows", "two-datacenters", "flows.csv", "--protocol", "ideal", "--out", "link.csv")
        assert Path("link.csv").is_symlink()
        assert Path("real.csv").read_text() == DONE
    assert sorted(path.name for path in here.iterdir()) == [
        "a.csv",
        "flows.csv",
        "link.csv",
        "pipe",
        "real.csv",
    ]


def write_and_fail(path: str) -> None:
    with output_file(path) as file:
        file.write(b"2")
        raise KeyError


def test_a_file_is_there_as_a_whole_or_not_at_all_with_the_rights_that_it_had(here: Path) -> None:
    before = os.umask(0o027)
    try:
        with output_file("new") as file:
            file.write(b"1")
        assert stat.S_IMODE(os.stat("new").st_mode) == 0o640
        os.chmod("new", 0o604)
        with pytest.raises(KeyError):
            write_and_fail("new")
        assert Path("new").read_bytes() == b"1"
        with output_file("new") as file:
            file.write(b"3")
        assert stat.S_IMODE(os.stat("new").st_mode) == 0o604
    finally:
        os.umask(before)
    with pytest.raises(InputError, match="cannot be written: Is a directory"), output_file("."):
        pass
    assert sorted(path.name for path in here.iterdir()) == ["flows.csv", "new"]


@pytest.mark.parametrize("name", ["../secret", "{top}/secret", "sub/../../secret", "link"])
def test_a_topology_reads_files_below_its_own_folder_alone(name: str, here: Path) -> None:
    """`netsim validate` printed the first line of any file that the topology named."""
    (here / "secret").write_text("deadbeef\n")
    (here / "nets/sub").mkdir(parents=True)
    (here / "nets/link").symlink_to(here / "secret")
    named = name.format(top=here)
    (here / "nets/net.yaml").write_text(f"{LINK}traces: [{{link: [a, b], bandwidth: {named}}}]\n")
    for command in ("validate", "show"):
        output = run(command, "nets/net.yaml")
        assert "is not below the folder of this file: put it there, and name it from there" in output
        assert "deadbeef" not in output


def test_its_contents_are_not_printed(here: Path) -> None:
    (here / "nets").mkdir()
    (here / "nets/net.yaml").write_text(f"{LINK}traces: [{{link: [a, b], bandwidth: t.csv}}]\n")
    for text in ("deadbeef\n", "start_s,bits_per_second\n0,deadbeef\n"):
        (here / "nets/t.csv").write_text(text)
        output = run("validate", "nets/net.yaml")
        assert "nets/net.yaml:3: traces[0].bandwidth: 't.csv' line" in output
        assert "deadbeef" not in output
    (here / "nets/t.csv").write_text("start_s,bits_per_second\n0,1e6\n")
    assert Topology.load("nets/net.yaml").weather.traces[0].rows[0] == (0.0, 1e6)
    (here / "text").write_text("deadbeef\n")
    assert "got text" in run("validate", "text")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("command", ["netsim.cli.main validate lan", "netgym.cli.main list"])
def test_an_output_without_room_is_named_in_a_line(command: str) -> None:
    """netsim ended in a traceback, netgym advised another folder for temporary files."""
    module, *arguments = command.split()
    with open("/dev/full", "w") as full:
        program = [
            sys.executable,
            "-c",
            f"import sys, {module} as m; sys.exit(m.main(sys.argv[1:]))",
            *arguments,
        ]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered
        )
    assert ended.stderr == "error: the output could not be written: No space left on device\n"
    assert ended.returncode == 1
