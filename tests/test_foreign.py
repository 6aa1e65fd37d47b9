"""Networks in the formats of others: what is read is what was measured, and what is written reads back."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import netsim
from netsim import Topology
from netsim.cli.main import cli
from netsim.errors import InputError
from netsim.files.documents import parse_document
from netsim.formats.builder import Assumed, safe_name
from netsim.formats.commands import read_foreign
from netsim.formats.networks import shaping_script

FILES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))


def write(folder: Path, files: dict[str, Any]) -> list[Path]:
    paths = []
    for name, content in files.items():
        path = folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(path)
    return paths


def topology_of(folder: Path, files: dict[str, Any], **assumed: Any) -> Topology:
    text = read_foreign(write(folder, files), "net", Assumed(**assumed)).to_yaml()
    return Topology.from_mapping(parse_document(text).data)  # type: ignore[arg-type]


def way(topology: Topology, one: str, other: str) -> tuple[float, float]:
    """(narrowest rate, one-way latency) between the first hosts of two places."""
    src, dst = (topology.host_index(name) for name in (one, other))
    rate = min(topology.links[link].bits_per_second for link in topology.route(src, dst))
    return rate, topology.route_latency_seconds(src, dst)


def lost_each_way(share: float) -> float:
    """Loss of each direction, of which a ping loses `share` of its round trips."""
    return 1.0 - (1.0 - share) ** 0.5


def iperf(rate: float, rtt_us: int, *, reverse: int = 0, streams: int = 1) -> dict[str, Any]:
    return {
        "start": {
            "connected": [{"local_host": "10.0.0.1", "remote_host": "10.0.0.2"}],
            "timestamp": {"time": "Mon, 01 Sep 2025 10:00:00 GMT"},
            "test_start": {"protocol": "TCP", "num_streams": streams, "reverse": reverse},
        },
        "end": {
            "streams": [{"sender": {"mean_rtt": rtt_us + 5000, "min_rtt": rtt_us}}],
            "sum_sent": {"bits_per_second": rate * 1.01, "retransmits": 12},
            "sum_received": {"bits_per_second": rate},
        },
    }


def test_iperf3_by_address_in_both_directions(tmp_path: Path) -> None:
    """Rates are goodput, with their streams; the least round trip counts, halved; the larger of two runs counts."""
    files = {
        "a.json": iperf(300e6, 80_000),
        "b.json": iperf(400e6, 81_000, streams=8),
        "c.json": iperf(100e6, 82_000, reverse=1),
    }
    net = topology_of(tmp_path, files)
    assert net.protocol == "linux-tcp"
    assert way(net, "10.0.0.1.0", "10.0.0.2.0") == pytest.approx((400e6, 0.04), rel=1e-6)
    assert way(net, "10.0.0.2.0", "10.0.0.1.0") == pytest.approx((100e6, 0.04), rel=1e-6)
    text = read_foreign([tmp_path / name for name in files]).to_yaml()
    assert "iperf3 with 8 streams, 12 retransmits" in text
    assert "Mon, 01 Sep 2025" in text
    assert "Assumed:" in text


def test_iperf3_and_ping_by_the_files_names(tmp_path: Path) -> None:
    run = iperf(50e6, 0)
    del run["end"]["streams"][0]["sender"]["min_rtt"], run["end"]["streams"][0]["sender"]["mean_rtt"]
    ping = (
        "PING eu.example (192.0.2.7) 56(84) bytes of data.\n\n"
        "100 packets transmitted, 98 received, 2% packet loss, time 99ms\n"
        "rtt min/avg/max/mdev = 30.1/31.5/40.2/1.1 ms\n"
    )
    net = topology_of(tmp_path, {"us--eu.json": run, "eu--us.txt": ping})
    assert way(net, "us.0", "eu.0") == pytest.approx((50e6, 0.01505), rel=1e-6)
    assert max(net.loss) == pytest.approx(lost_each_way(0.02), rel=1e-4)


def test_iperf3_both_ways_in_one_run(tmp_path: Path) -> None:
    """--bidir reports the way back separately, and nowhere else that it was one."""
    run = iperf(300e6, 80_000)
    run["end"]["sum_sent_bidir_reverse"] = {"bits_per_second": 101e6, "retransmits": 3}
    run["end"]["sum_received_bidir_reverse"] = {"bits_per_second": 100e6}
    net = topology_of(tmp_path, {"a.json": run})
    assert way(net, "10.0.0.1.0", "10.0.0.2.0")[0] == pytest.approx(300e6)
    assert way(net, "10.0.0.2.0", "10.0.0.1.0")[0] == pytest.approx(100e6)


def served(rate: float, client: str, *, reverse: int = 0) -> dict[str, Any]:
    """The same as a server writes it: its own address is `local_host`."""
    run = iperf(rate, 0, reverse=reverse)
    run["start"]["accepted_connection"] = {"host": client, "port": 38_822}
    run["start"]["connected"] = [{"local_host": "::ffff:10.0.0.2", "remote_host": f"::ffff:{client}"}]
    run["end"]["streams"] = [{"receiver": {"bits_per_second": rate, "sender": False}}]
    return run


def test_iperf3_of_a_server_and_as_a_stream_of_events(tmp_path: Path) -> None:
    """A server's file has run after run, seen from the other side; --json-stream has an event a line."""
    both = (
        json.dumps(served(300e6, "10.0.0.1"), indent=1)
        + "\n"
        + json.dumps(served(50e6, "10.0.0.3", reverse=1))
    )
    run = iperf(200e6, 60_000)
    run["start"]["connected"] = [{"local_host": "10.0.0.1", "remote_host": "10.0.0.3"}]
    events = "\n".join(json.dumps({"event": name, "data": run[name]}) for name in ("start", "end"))
    pings = "from,to,rtt\n10.0.0.1,10.0.0.2,80 ms\n10.0.0.2,10.0.0.3,20 ms\n"
    net = topology_of(tmp_path, {"server.json": both, "events.json": events, "rtt.csv": pings})
    assert way(net, "10.0.0.1.0", "10.0.0.2.0") == pytest.approx((300e6, 0.04))
    assert way(net, "10.0.0.2.0", "10.0.0.3.0") == pytest.approx((50e6, 0.01))
    assert way(net, "10.0.0.1.0", "10.0.0.3.0") == pytest.approx((200e6, 0.03))


@pytest.mark.parametrize("ping", FILES["pings"])
def test_ping_of_any_system_and_language(ping: dict[str, Any], tmp_path: Path) -> None:
    net = topology_of(tmp_path, {"ping.txt": ping["text"]}, bits_per_second=1e9)
    one, other = ping.get("ends", ["here", "192.0.2.7"])
    seconds = ping.get("seconds", 0.08) / 2
    assert way(net, f"{one}.0", f"{other}.0") == pytest.approx((1e9, seconds), rel=1e-6)
    assert max(net.loss) == pytest.approx(lost_each_way(ping["loss"]), rel=1e-4)


def test_skyplanes_tables_as_they_are(tmp_path: Path) -> None:
    """Its latencies have other columns than its throughputs, rows of what was not measured, and both tiers."""
    head = "src_region,src_tier,src_instance_class,dst_region,dst_tier,dst_instance_class,"
    trips = (
        f"{head}min_rtt,avg_rtt,max_rtt,mdev_rtt\n"
        "gcp:us-east1-b,PREMIUM,n2-standard-4,gcp:us-west1-a,PREMIUM,n2-standard-4,,,,\n"
        "azure:uksouth,PREMIUM,Standard_D2_v3,aws:eu-south-1,STANDARD,m5.large,9,9.2,9.3,0.1\n"
        "azure:uksouth,PREMIUM,Standard_D2_v3,aws:eu-south-1,PREMIUM,m5.large,29.8,30,31,0.1\n"
    )
    rates = (
        f"{head}iperf3_connections,iperf3_runtime,tag,throughput_sent,throughput_recieved,cpu_utilization,success\n"
        "azure:uksouth,PREMIUM,D32,aws:eu-south-1,PREMIUM,m5,64,5,x,9307217192.5,9043348420.7,14.9,True\n"
        "azure:uksouth,PREMIUM,D32,aws:eu-south-1,STANDARD,m5,64,5,x,19307217192.5,19043348420.7,14.9,True\n"
    )
    net = topology_of(tmp_path, {"latency.csv": trips, "throughput.csv": rates})
    assert [host.name for host in net.hosts] == ["aws-eu-south-1.0", "azure-uksouth.0"]
    assert way(net, "azure-uksouth.0", "aws-eu-south-1.0") == pytest.approx((9043348420.7, 0.015))


@pytest.mark.parametrize("layout", FILES["layouts"])
def test_tables_in_every_layout_say_the_same(layout: str, tmp_path: Path) -> None:
    net = topology_of(tmp_path, FILES["layouts"][layout], hosts=2)
    assert [host.name for host in net.hosts] == ["asia.0", "asia.1", "eu.0", "eu.1", "us.0", "us.1"]
    assert way(net, "us.0", "eu.1") == pytest.approx((1.2e9, 0.04), rel=1e-6)
    assert way(net, "eu.0", "us.0") == pytest.approx((0.8e9, 0.04), rel=1e-6)
    assert way(net, "eu.0", "asia.0") == pytest.approx((0.3e9, 0.1), rel=1e-6)


def test_ways_that_were_measured_do_not_lead_through_a_third_place(tmp_path: Path) -> None:
    rows = "from,to,rtt,throughput\na,b,10 ms,1 Gbit/s\nb,c,10 ms,1 Gbit/s\na,c,90 ms,100 Mbit/s\n"
    net = topology_of(tmp_path, {"ways.csv": rows})
    assert way(net, "a.0", "c.0") == pytest.approx((100e6, 0.045), rel=1e-6)
    assert way(net, "c.0", "a.0") == pytest.approx((100e6, 0.045), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("zoo.graphml", ("Latitude", "Longitude")),
        ("zoo.gml", ("Latitude", "Longitude")),
        ("zoo.gml", ("LATITUDE", "lng")),
    ],
)
def test_graphs_with_coordinates(name: str, names: tuple[str, str], tmp_path: Path) -> None:
    zoo = FILES[name.removeprefix("zoo.")].replace("Latitude", names[0]).replace("Longitude", names[1])
    net = topology_of(tmp_path, {name: zoo}, bits_per_second=1e9, latency_seconds=0.003)
    assert [host.name for host in net.hosts] == ["London", "New-York-NY", "Nowhere"]
    rate, latency = way(net, "New-York-NY", "London")
    assert rate == 10e9
    assert latency == pytest.approx(5572e3 / 2e8, rel=1e-3)
    assert way(net, "London", "Nowhere") == (1e9, 0.003)
    drafted = read_foreign([tmp_path / name], None, Assumed(1e9, 0.003)).to_yaml()
    assert "estimated from coordinates" in drafted
    assert "latency assumed" in drafted


def test_a_graph_with_parallel_links_that_does_not_say_so(tmp_path: Path) -> None:
    """As some of the Topology Zoo's FILES["gml"] files have them: their rates are added up."""
    double = FILES["gml"].replace(
        "edge [ source 0", "edge [ source 0 target 1 LinkSpeedRaw 2500000000.0 ]\n  edge [ source 0", 1
    )
    net = topology_of(tmp_path, {"zoo.gml": double}, bits_per_second=1e9, latency_seconds=0.003)
    assert way(net, "New-York-NY", "London")[0] == 12.5e9


def test_rates_that_only_a_label_tells(tmp_path: Path) -> None:
    """Most of the Topology Zoo's links have no LinkSpeedRaw, and some a label that leaves no doubt."""
    labelled = (
        FILES["gml"]
        .replace("LinkSpeedRaw 10000000000.0", 'LinkLabel "OC-192c"')
        .replace("source 1 target 2", 'source 1 target 2 LinkLabel "10-20Gbps"')
    )
    net = topology_of(tmp_path, {"zoo.gml": labelled}, bits_per_second=1e9, latency_seconds=0.003)
    assert way(net, "New-York-NY", "London")[0] == pytest.approx(9.95328e9)
    assert way(net, "London", "Nowhere")[0] == 1e9
    drafted = read_foreign([tmp_path / "zoo.gml"], None, Assumed(1e9, 0.003)).to_yaml()
    assert "rate by its label OC-192c" in drafted


def exported(topology: Topology, form: str, folder: Path) -> str:
    path = folder / "exported.yaml"
    path.write_text(json.dumps(topology.to_mapping()))
    result = CliRunner().invoke(cli, ["export", str(path), "--format", form])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", ["wan-4-regions", "home-broadband", "two-datacenters", "wan-10-regions"])
def test_simgrid_reads_the_same_routes(name: str, tmp_path: Path) -> None:
    """Every pair's route, in the order of its links, with their rates and latencies."""
    net = Topology.load(name)
    text = exported(net, "simgrid", tmp_path).partition("<platform")
    zone = ElementTree.fromstring("".join(text[1:])).find("zone")
    assert [host.get("id") for host in zone.iter("host")] == [host.name for host in net.hosts]
    figures = {link.get("id"): (link.get("bandwidth"), link.get("latency")) for link in zone.iter("link")}
    assert figures == {
        link.name: (f"{link.bits_per_second / 8!r}Bps", f"{link.latency_seconds!r}s") for link in net.links
    }
    routes = {(r.get("src"), r.get("dst")): [s.get("id") for s in r] for r in zone.iter("route")}
    for one, other in itertools.permutations(net.hosts, 2):
        expected = [net.links[link].name for link in net.route(one.index, other.index)]
        assert routes[one.name, other.name] == expected


def test_scripts_of_tc_shape_what_the_routes_say(tmp_path: Path) -> None:
    """Syntax by the shell itself; rates, delays and losses by the routes."""
    out = tmp_path / "scripts"
    result = CliRunner().invoke(cli, ["export", "home-broadband", "--format", "tc", "--out", str(out)])
    assert result.exit_code == 0, result.output
    net = Topology.load("home-broadband")
    assert {path.name for path in out.iterdir()} == {
        "addresses.sh",
        *(f"{host.name}.sh" for host in net.hosts),
    }
    for path in out.iterdir():
        subprocess.run(["sh", "-n", str(path)], check=True)
    script = shaping_script(net, net.host_index("cable0"))
    peer = net.host_index("fibre0")
    rate, latency = way(net, "cable0", "fibre0")
    chunk = script[script.index("# to fibre0\n") :].split("# to ")[1]
    assert f"ceil {rate:.0f}bit" in chunk
    assert f"netem delay {latency * 1e6:.0f}us loss 0.01%" in chunk
    assert f'"$address_{peer}"/32' in chunk
    again = CliRunner().invoke(cli, ["export", "home-broadband", "--format", "tc", "--out", str(out)])
    assert again.exit_code == 1
    assert "is there already" in again.output


@pytest.mark.parametrize("mistake", FILES["mistakes"])
def test_errors_are_reported_in_one_line(mistake: dict[str, Any], tmp_path: Path) -> None:
    paths = write(tmp_path, mistake["files"])
    result = CliRunner().invoke(cli, ["import", *map(str, paths)])
    assert result.exit_code == 1
    assert mistake["line"] in result.output
    assert len(result.output.splitlines()) == 1


def test_some_places_of_a_large_table(tmp_path: Path) -> None:
    """Public tables have hundreds of places: all of them are too large for a topology file, and a few are wanted."""

    def table(num_cities: int) -> str:
        pairs = itertools.combinations([f"city{number}" for number in range(num_cities)], 2)
        return "\n".join(["from,to,rtt,throughput", *(f"{a},{b},90 ms,1 Gbit/s" for a, b in pairs)])

    path, world = write(tmp_path, {"land.csv": table(30), "world.csv": table(170)})
    few = CliRunner().invoke(cli, ["import", str(path), "--only", "city7, city21,city29"])
    assert few.exit_code == 0, few.output
    net = Topology.from_mapping(parse_document(few.stdout).data)  # type: ignore[arg-type]
    assert sorted(host.name for host in net.hosts) == ["city21.0", "city29.0", "city7.0"]
    unknown = CliRunner().invoke(cli, ["import", str(path), "--only", "city7,cityy21"])
    assert unknown.exit_code == 1
    assert "unknown place in the measurements 'cityy21': did you mean" in unknown.output
    whole = CliRunner().invoke(cli, ["import", str(world)])
    assert whole.exit_code == 1
    assert (
        "14,365 links make a topology file of more than 1 MB, which is not read: take some of the"
        in whole.output
    )


@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_name_becomes_one_of_its_own_that_files_accept(names: list[str]) -> None:
    taken: dict[str, str] = {}
    safe = {name: safe_name(name, taken) for name in names}
    assert len(set(safe.values())) == len(safe)
    assert len(safe) < 2 or Topology.from_mapping(
        {
            "hosts": list(safe.values()),
            "routers": ["the-switch"],
            "links": [
                {"between": [name, "the-switch"], "bandwidth": "1 Gbit/s", "latency": "1 ms"}
                for name in safe.values()
            ],
        }
    )


@pytest.mark.parametrize("files", FILES["fuzzed"])
def test_what_fuzzing_found_is_refused_in_a_line(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_foreign(write(tmp_path, files)).to_yaml()
    assert str(caught.value).isprintable()


TABLE = "from,to,rtt,throughput\na,b,80 ms,1 Gbit/s\n"
GERMAN = (
    "PING eu.example (192.0.2.7) 56(84) Bytes an Daten.\n\n"
    "100 Pakete \u00fcbertragen, 95 empfangen, 5% Paketverlust, Zeit 99ms\n"
    "rtt min/avg/max/mdev = 30,1/31,5/40,2/1,1 ms\n"
)


def test_what_a_ping_says_is_read_or_refused(tmp_path: Path) -> None:
    """A second ping was dropped, a summary in unknown words was no reply, and less than 1 ms was 0 without a word."""
    short = (
        "Pinging 192.0.2.7 with 32 bytes of data:\nPackets: Sent = 100, Received = 96, Lost = 4 (4% loss),\n"
        "    Minimum = 0ms, Maximum = 41ms, Average = 33ms\n"
    )
    for text, line in (
        (GERMAN + GERMAN, r"a--b\.txt: has several pings: give each a file"),
        (GERMAN + pings(4, 4), r"a--b\.txt: has several pings: give each a file"),
        (GERMAN.replace(" ms", " usec"), r"a--b\.txt: no summary of round trips in ms ends this ping"),
    ):
        with pytest.raises(InputError, match=line):
            read_foreign(write(tmp_path, {"a--b.txt": text}))
    text = read_foreign(write(tmp_path, {"a--b.txt": short}), None, Assumed(1e9)).to_yaml()
    assert "whole milliseconds: below 1 ms taken for 0" in text
    assert "4 of 100 pings lost, there or back: 2.02 % each way" in text
    assert "assumed in the other" not in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("end", "sum_received", {}), r"run of iperf3 -J: 'bits_per_second' is missing$"),
        (("start", "connected", []), r"run of iperf3 -J: list index out of range$"),
        (
            ("start", "test_start", "target_bitrate", 6_030_000),
            r"held at 6.03 Mbit/s \(iperf3 -b\).*without -b",
        ),
        (("start", "test_start", "target_bitrate", 10**9), None),  # far above what arrived
        (("start", "sock_bufsize", 65536), r"held at windows of 65.54 kB \(iperf3 -w\).*without -w"),
        (("start", "sock_bufsize", 2**24), None),  # would have let 1.7 Gbit/s through
        (("end", iperf(0.0, 80_000)["end"]), "nothing arrived in this run"),
        (("end", "streams", 0, "sender", "min_rtt", -5), "a run of iperf3 with -5 as a rate, round trip"),
        (("start", "test_start", "num_streams", 0), "a run of iperf3 with 0 as a rate"),
    ],
)
def test_a_run_of_iperf3_that_cannot_be_used_says_why(change: Any, line: str | None, tmp_path: Path) -> None:
    """6 Mbit/s at 80 ms are a window of 64 KiB."""
    run = part = iperf(6e6, 80_000)
    for key in change[:-2]:
        part = part[key]
    part[change[-2]] = change[-1]
    if line is None:
        rate, _ = way(topology_of(tmp_path, {"a.json": run}), "10.0.0.1.0", "10.0.0.2.0")
        assert rate == pytest.approx(6e6)
        return
    with pytest.raises(InputError, match=line):
        read_foreign(write(tmp_path, {"a.json": run}))


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters(delimiter: str, tmp_path: Path) -> None:
    net = topology_of(tmp_path, {"a.csv": TABLE.replace(",", delimiter)})
    assert way(net, "a.0", "b.0") == pytest.approx((1e9, 0.04))


def test_what_is_not_read_stands_in_the_source(tmp_path: Path) -> None:
    table = TABLE.replace("throughput", "throughput,operator,bandwidth").replace(
        "Gbit/s", "Gbit/s,me,2 Gbit/s"
    )
    (path,) = write(tmp_path, {"a.csv": table})
    text = read_foreign([path]).to_yaml()
    assert "Not read: a.csv: columns operator, bandwidth." in text


DIRECTED = """graph [ directed 1
  node [ id 0 label "a" Latitude 50.0 Longitude 8.0 ] node [ id 1 label "b" Latitude 51.0 Longitude 0.0 ]
  edge [ source 0 target 1 LinkSpeedRaw 20000000 delay 7 ] edge [ source 1 target 0 LinkSpeedRaw 100000000 ] ]
"""
GRAPHML = """<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="s" for="edge" attr.name="LinkSpeedRaw" attr.type="double"/>
<graph edgedefault="directed"><node id="a"/><node id="b"/>
<edge source="b" target="a"><data key="s">1e10</data></edge>
<edge source="a" target="b"><data key="s">1e10</data></edge></graph></graphml>
"""


def test_directed_graphs_keep_their_directions(tmp_path: Path) -> None:
    net = topology_of(tmp_path, {"a.gml": DIRECTED})
    assert [way(net, *ends)[0] for ends in (("a", "b"), ("b", "a"))] == [20e6, 100e6]
    same = topology_of(tmp_path, {"a.graphml": GRAPHML}, latency_seconds=0.01)
    assert way(same, "a", "b") == way(same, "b", "a") == (1e10, 0.01)
    builder = read_foreign([tmp_path / "a.gml"])
    assert "Not read: edges' delay." in builder.to_yaml()
    assert any("delay: not read" in remark for remark in builder.remarks)


def gml(attributes: str) -> str:
    ends = 'node [ id 0 label "a" ] node [ id 1 label "b" ]'
    return f"graph [ {ends} edge [ source 0 target 1 {attributes} ] ]"


def graphml(**attributes: str) -> str:
    keys = "".join(f'<key id="{key}" for="edge" attr.name="{key}" attr.type="string"/>' for key in attributes)
    data = "".join(f'<data key="{key}">{value}</data>' for key, value in attributes.items())
    return (
        f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">{keys}<graph edgedefault="undirected">'
        f'<node id="a"/><node id="b"/><edge source="a" target="b">{data}</edge></graph></graphml>'
    )


@pytest.mark.parametrize(
    "files",
    [
        {"a.gml": gml('latency "10 ms" packet_loss 0.01 bandwidth "100 Mbit"')},  # as Shadow's
        {"a.gml": gml("delay_ms 10 loss_pct 1.0 bandwidth_mbps 100")},
        {"a.graphml": graphml(Delay="10ms", bw="100Mbps", loss="1%")},
        {"a.graphml": graphml(rtt_seconds="0.02", LinkSpeedRaw="100000000", loss_percent="1")},
        {"a.graphml": graphml(latency="10 ms", LinkSpeed="100 Mbps", loss_percent="1")},
        {"a.graphml": graphml(latency="10 ms", LinkSpeed="100", LinkSpeedUnits="M", loss_percent="1")},
    ],
)
def test_edges_with_units_say_their_latency_loss_and_rate(files: dict[str, str], tmp_path: Path) -> None:
    """In value or name, whatever --latency and --bandwidth say of others."""
    net = topology_of(tmp_path, files, bits_per_second=1e9, latency_seconds=0.5)
    assert (*way(net, "a", "b"), net.links[0].loss) == pytest.approx((100e6, 0.01, 0.01))
    assert "Not read" not in net.source


def test_figures_of_edges_without_units_are_named_before_anything_is_assumed(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {"a.gml": gml("latency 10 bandwidth 100 weight 3 delays 5")})
    with pytest.raises(
        InputError,
        match=r"a to b: no rate with a unit.*\(bandwidth 100, delays 5, latency 10: not read, for want",
    ):
        read_foreign([path])
    with pytest.raises(
        InputError, match=r"a to b: no latency with a unit.*bandwidth 100, delays 5, latency 10: not read"
    ):
        read_foreign([path], None, Assumed(1e9))
    text = read_foreign([path], None, Assumed(1e9, 0.01)).to_yaml()
    assert "Not read: edges' bandwidth, delays, latency, weight." in text


@pytest.mark.parametrize(
    ("attributes", "not_read"),
    [
        ('bandwidth_up "20 Mbps" bandwidth_down "100 Mbps" latency_ms 5', "bandwidth_down, bandwidth_up"),
        ('LinkSpeedRaw 1.0e7 delay_ms "5 s"', "delay_ms"),
        ('LinkSpeedRaw 1.0e7 latency "-5 ms"', "latency"),
        ('LinkSpeedRaw 1.0e7 latency "5 ms" latency "6 ms"', "latency"),
        ('LinkSpeed "1,5" LinkSpeedUnits "G" latency_ms 5', "LinkSpeed, LinkSpeedUnits"),
        ('bandwidth "0 Mbps" latency_ms 5', "bandwidth"),
        ('LinkSpeedRaw 1.0e7 LinkLabel "< 10 Mbps" latency_ms 5', "LinkLabel"),
        ('LinkSpeedRaw 1.0e7 LinkSpeed "20" LinkSpeedUnits "M" latency_ms 5', "LinkSpeed, LinkSpeedUnits"),
        ('LinkSpeedRaw 1.0e7 bandwidth "20 Mbps" latency_ms 5', "bandwidth"),
    ],
)
def test_attributes_of_edges_are_read_or_listed(attributes: str, not_read: str, tmp_path: Path) -> None:
    """A suffix that is no unit was dropped, figures that lost to others were not listed."""
    (path,) = write(tmp_path, {"a.gml": gml(attributes)})
    builder = read_foreign([path], None, Assumed(1e7, 0.005))
    assert f"Not read: edges' {not_read}." in builder.to_yaml()
    assert (builder.links[0].there.bits_per_second, builder.links[0].there.latency_seconds) == (1e7, 0.005)


def test_what_nodes_and_graphs_have_is_read_or_listed(tmp_path: Path) -> None:
    """A latitude of 400 degrees had a distance; defaults of GraphML and a second graph were dropped."""
    far = FILES["gml"].replace("Latitude 40.7", 'Country "US" Latitude 400.7')
    text = read_foreign(write(tmp_path, {"a.gml": far}), None, Assumed(1e9, 0.02)).to_yaml()
    assert "Not read: nodes' Country, Latitude, Longitude." in text
    assert "latency estimated" not in text
    default = graphml(latency="5 ms").replace('"string"/>', '"string"><default>7 ms</default></key>')
    default = default.replace('<data key="latency">5 ms</data>', "")
    net = topology_of(tmp_path, {"a.graphml": default}, bits_per_second=1e9, latency_seconds=0.02)
    assert way(net, "a", "b")[1] == pytest.approx(0.007)
    whole = gml("latency_ms 5").replace("graph [", 'graph [ delay_unit "s"')
    builder = read_foreign(write(tmp_path, {"c.gml": whole}), None, Assumed(1e9))
    assert "Not read: the graph's delay_unit." in builder.to_yaml()
    assert any("delay_unit: not read" in remark for remark in builder.remarks)
    two = graphml(latency="5 ms").replace("</graphml>", '<graph edgedefault="undirected"/></graphml>')
    with pytest.raises(InputError, match=r"b\.graphml: has several graphs: keep one of them"):
        read_foreign(write(tmp_path, {"b.graphml": two}))


def one_after_another(topology: Topology, protocol: str = "linux-tcp") -> list[float]:
    """Seconds that 100 MB take from the first place's host to the second's, and back."""
    ends = [topology.hosts[0].name, topology.hosts[1].name]
    return [
        netsim.flows(topology, [("0 s", *pair, "100 MB")], protocol=protocol).finish_seconds[0]
        for pair in (ends, ends[::-1])
    ]


STREAMS_APART: dict[str, dict[str, Any]] = {
    "iperf3": {
        "a--b.json": iperf(200e6, 80_000),
        "b--a.json": iperf(220e6, 80_000, streams=4),
        "loss.csv": "from,to,loss\na,b,0.1 %\n",
    },
    "csv": {
        "t.csv": "from,to,rtt,throughput,streams,loss\na,b,80 ms,200 Mbit/s,1,0.1 %\nb,a,80 ms,220 Mbit/s,4,0.1 %\n"
    },
    "skyplane": {
        "throughput.csv": "src_region,dst_region,src_tier,dst_tier,throughput_sent,iperf3_connections\n"
        "a,b,PREMIUM,PREMIUM,200e6,1\nb,a,PREMIUM,PREMIUM,220e6,4\n",
        "rtt.csv": "src_region,dst_region,src_tier,dst_tier,avg_rtt\na,b,PREMIUM,PREMIUM,80\n",
        "loss.csv": "from,to,loss\na,b,0.1 %\n",
    },
}


@pytest.mark.parametrize("form", STREAMS_APART)
def test_each_direction_keeps_the_streams_that_it_was_measured_with(form: str, tmp_path: Path) -> None:
    """One stream of a direction measured with one gets its rate, whatever the other was measured with."""
    net = topology_of(tmp_path, STREAMS_APART[form])
    assert (net.link_between["a", "b"].measured_streams, net.link_between["b", "a"].measured_streams) == (
        1,
        4,
    )
    there, back = one_after_another(net)
    assert there == pytest.approx(100e6 * 8 / 200e6, rel=0.15)  # slow start
    assert back > 2 * there  # a single stream of the four
    assert Topology.from_mapping(net.to_mapping()).to_mapping() == net.to_mapping()


# --- import as somebody meets it who has measured a few places ----------------------------------------------

RTT = "rtt ms,home,ore,fra,vir\nhome,-,150,30,95\nore,,-,140,60\nfra,,,-,90\nvir,,,,-\n"
RATES = (
    "throughput Mbit/s,home,ore,fra,vir\n"
    "home,-,38.2,38,37.5\nore,250,-,800,2000\nfra,300,800,-,1200\nvir,290,2000,1200,-\n"
)


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    (tmp_path / "rtt.csv").write_text(RTT)
    (tmp_path / "tp.csv").write_text(RATES)
    return [str(tmp_path / "rtt.csv"), str(tmp_path / "tp.csv")]


def imported(arguments: list[str], out: Path) -> tuple[Topology, str, str]:
    """The topology, its file and what was said of it."""
    result = CliRunner().invoke(cli, ["import", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return Topology.load(out), out.read_text(), result.stderr


def line(topology: Topology, host: str, end: str) -> float:
    """Bit/s of a host's own link, from it or to it."""
    own = next(link for link in topology.links if getattr(link, end) == host)
    return own.bits_per_second


def test_a_place_whose_rates_are_alike_is_reported_and_can_be_given_its_line(
    tables: list[str], tmp_path: Path
) -> None:
    """Three links of 39 Mbit/s behind a card of 10 Gbit/s let a home send 119 at once, and nothing was said."""
    _, text, notes = imported(tables, tmp_path / "a.yaml")
    wanted = "home's rates to all others are alike (37.5 to 38.2 Mbit/s): probably its own line"
    assert wanted in notes
    assert "--nic home=39.9Mbit/s:10Gbit/s" in notes
    assert f"# Note: {wanted}" in text
    assert notes.count("note: ") == 1
    given = ["--nic", "20 Gbit/s", "--nic", "home=39.9Mbit/s:10Gbit/s"]
    net, _, notes = imported([*tables, *given], tmp_path / "b.yaml")
    assert notes == ""
    assert line(net, "home.0", "source") == 39.9e6
    assert line(net, "home.0", "target") == 10e9
    assert line(net, "ore.0", "source") == 20e9


def test_rates_that_others_lines_explain_are_not_laid_to_a_place(tmp_path: Path) -> None:
    """A server that three homes send 40 Mbit/s each may well take more: it is theirs."""
    rows = ["from,to,rtt,throughput"]
    for one, up in (("h1", 40), ("h2", 30), ("h3", 40)):
        rows += [f"{one},{other},20 ms,{up} Mbit/s" for other in ("h1", "h2", "h3", "dc") if other != one]
        rows.append(f"dc,{one},20 ms,{up * 7} Mbit/s")
    (tmp_path / "ways.csv").write_text("\n".join(rows))
    _, _, notes = imported([str(tmp_path / "ways.csv")], tmp_path / "a.yaml")
    assert [each.split()[1] for each in notes.splitlines()] == ["h1's", "h2's", "h3's"]
    assert "rates to dc" not in notes


def test_places_have_as_many_hosts_as_is_said_of_each(tables: list[str], tmp_path: Path) -> None:
    net, _, notes = imported([*tables, "--hosts", "4", "--hosts", "home=1"], tmp_path / "a.yaml")
    assert len(net.hosts) == 13
    assert sum(host.name.startswith("home.") for host in net.hosts) == 1
    assert "--hosts" not in notes
    _, _, notes = imported([*tables, "--hosts", "4"], tmp_path / "b.yaml")
    assert "--nic home=39.9Mbit/s:10Gbit/s --hosts home=1" in notes


def pings(num: int, lost: int) -> str:
    return (
        f"PING eu (192.0.2.7)\n{num} packets transmitted, {num - lost} received, {100 * lost / num:g}% packet loss\n"
        "rtt min/avg/max/mdev = 30.1/31.5/40.2/1.1 ms\n"
    )


@pytest.mark.parametrize(
    ("num", "lost", "loss", "message"),
    [
        (4, 1, 0.0, "1 of 4 pings lost: too few for a loss, which takes 100"),
        (99, 1, 0.0, "1 of 99 pings lost: too few"),
        (100, 1, 0.01, "1 of 100 pings lost"),
        (4, 0, 0.0, "31.5 ms in the mean"),
    ],
)
def test_a_loss_takes_enough_pings(num: int, lost: int, loss: float, message: str, tmp_path: Path) -> None:
    """One lost of four became 25 %, under which TCP's line is dead."""
    (tmp_path / "us--eu.txt").write_text(pings(num, lost))
    net, text, _ = imported([str(tmp_path / "us--eu.txt"), "--bandwidth", "1 Gbit/s"], tmp_path / "a.yaml")
    assert max(net.loss) == pytest.approx(lost_each_way(loss), rel=1e-4)
    assert message in text
