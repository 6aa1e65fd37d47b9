"""Experiment files: what is accepted, what is refused with which line, and the resolved form."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from exogym_core.app.experiment import Experiment
from netsim.files.documents import parse_document
from netsim.files.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

SMALL = """\
task: digits
workers: {count: 2}
topology: two-datacenters
compute: 50 ms
steps: 6
strategies:
  - AllReduce
  - {name: DiLoCo, H: 3}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_written_out_and_the_topology_inlined(write: Any) -> None:
    plain = yaml.safe_load(Experiment.load(write(SMALL)).to_yaml())
    assert plain["name"] == "small"
    assert plain["task"] == {"name": "digits"}
    assert plain["workers"] == {
        "count": 2,
        "kind": "auto",
        "processes": None,
        "intra_op_threads": 1,
        "address": None,
    }
    assert plain["topology"]["name"] == "two-datacenters"
    assert plain["strategies"][1] == {"name": "DiLoCo", "label": "DiLoCo", "H": 3}
    assert plain["evaluate"] == {
        "every": 100,
        "samples": None,
        "correlation_every": None,
        "every_seconds": None,
    }
    assert plain["seed"] == 0


def test_the_resolved_form_resolves_to_itself(write: Any) -> None:
    tricky = SMALL.replace("task: digits", "task: {name: digits, seed: 3}") + "name: '1e9'\ntarget_loss: 1\n"
    text = Experiment.load(write(tricky)).to_yaml()
    again = Experiment.load(write(text))
    assert again.to_yaml() == text
    assert again.settings.name == "1e9"


def test_the_order_of_keys_changes_nothing(write: Any) -> None:
    expected = Experiment.load(write(SMALL)).to_yaml()
    plain = yaml.safe_load(SMALL)
    for seed in range(5):
        keys = list(plain)
        random.Random(seed).shuffle(keys)
        shuffled = {key: plain[key] for key in keys}
        shuffled["strategies"] = ["AllReduce", {"H": 3, "name": "DiLoCo"}]
        assert Experiment.load(write(yaml.safe_dump(shuffled, sort_keys=False))).to_yaml() == expected


def test_equal_strategies_get_labels_of_their_own(write: Any) -> None:
    text = SMALL + "  - {name: DiLoCo, H: 2}\n  - {name: DiLoCo, H: 2, label: often}\n"
    labels = [entry.label for entry in Experiment.load(write(text)).strategies]
    assert labels == ["AllReduce", "DiLoCo", "DiLoCo-2", "often"]


def test_one_strategy_can_be_chosen(write: Any) -> None:
    experiment = Experiment.load(write(SMALL))
    assert [entry.label for entry in experiment.only("DiLoCo").strategies] == ["DiLoCo"]
    with pytest.raises(UnknownNameError, match="unknown strategy 'Diloco': did you mean 'DiLoCo'"):
        experiment.only("Diloco")


def test_own_code_by_module_and_callable(write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "from exogym_core.strategy import DiLoCoStrategy\n"
        "from exogym_core.tasks import digits\n"
        "class Mine(DiLoCoStrategy):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = SMALL.replace("DiLoCo", "mine_for_test:Mine").replace("digits", "mine_for_test:digits")
    experiment = Experiment.load(write(text))
    assert type(experiment.build_strategy(experiment.strategies[1])).__name__ == "Mine"
    assert experiment.strategies[1].label == "mine_for_test:Mine"
    assert experiment.build_task().model == "mlp"


def test_overrides_go_through_keys_positions_and_names(write: Any) -> None:
    overrides = [
        "steps=20",
        "workers.kind=processes",
        "strategies.DiLoCo.H=9",
        "strategies.0.lr=1e-2",
        "task.validation_fraction=0.5",
        "checkpoint.every=5",
        "evaluate={every: 2, samples: 8}",
    ]
    experiment = Experiment.load(write(SMALL), overrides, {"topology": "lan", "protocol": "linux-tcp"})
    plain = experiment.to_mapping()
    assert plain["steps"] == 20
    assert plain["workers"]["kind"] == "processes"
    assert plain["strategies"][0]["lr"] == 0.01
    assert plain["strategies"][1]["H"] == 9
    assert plain["task"] == {"name": "digits", "validation_fraction": 0.5}
    assert plain["checkpoint"] == {"every": 5}
    assert plain["evaluate"] == {"every": 2, "samples": 8, "correlation_every": None, "every_seconds": None}
    assert plain["topology"]["name"] == "lan"
    assert plain["protocol"] == "linux-tcp"


BAD_OVERRIDES = [
    ("steps", "--set steps: expected KEY=VALUE, such as --set steps=20"),
    ("=3", "--set =3: expected KEY=VALUE, such as --set steps=20"),
    ("steps=x", "--set steps=x: steps: expected a whole number, got 'x'"),
    ("steps=-1", "--set steps=-1: steps: expected at least 1, got -1"),
    ("stepps=3", "--set stepps=3: stepps: unknown key 'stepps': did you mean 'steps'? "),
    ("steps.a=3", "--set steps.a=3: 'steps' has no keys inside"),
    (
        "workers.kind=thread",
        "--set workers.kind=thread: workers.kind: unknown choice 'thread': did you mean ",
    ),
    ("strategies.Dilco.H=2", "--set strategies.Dilco.H=2: unknown entry 'Dilco': did you mean 'DiLoCo'? "),
    ("strategies.DiLoCo.h=2", "--set strategies.DiLoCo.h=2: strategies[1].h: unknown argument of "),
    ("a..b=2", "--set a..b=2: an empty key between dots"),
    ("seed=[", "--set seed=[: not valid YAML: "),
]


@pytest.mark.parametrize(("override", "line"), BAD_OVERRIDES)
def test_errors_in_overrides_name_the_flag(write: Any, override: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        Experiment.load(write(SMALL), [override])
    assert str(caught.value).splitlines()[0].startswith(line)


@pytest.mark.parametrize(
    ("key", "change", "told"),
    [
        ("task", ("digits", "{name: 'CODE:fails'}"), "it fails with KeyError at CODE.py:2: 'width'"),
        (
            "model",
            ("steps: 6", "steps: 6\nmodel: {name: 'CODE:fails'}"),
            "it fails with KeyError at CODE.py:2",
        ),
        ("strategy", ("AllReduce", "{name: 'CODE:fails'}"), "it fails with KeyError at CODE.py:2: 'width'"),
        (
            "task",
            ("digits", "{name: 'CODE_import:any'}"),
            "its import fails with ZeroDivisionError at CODE_i",
        ),
    ],
)
def test_own_code_that_fails_is_told_with_file_line_and_key(
    write: Any, tmp_path: Path, key: str, change: tuple[str, str], told: str
) -> None:
    """It used to be told as a bare KeyError: whose, of which key and in which file could not be seen."""
    name = f"failing_{key}"
    (tmp_path / f"{name}.py").write_text("def fails(**options):\n    return {}['width']\n")
    (tmp_path / f"{name}_import.py").write_text("any = 1 / 0\n")
    old, new = change
    path = write(SMALL.replace(old, new.replace("CODE", name), 1))
    experiment = Experiment.load(path)
    builds = {
        "strategy": lambda: experiment.build_strategy(experiment.strategies[0]),
        "task": experiment.build_task,
        "model": lambda: experiment.build_model(experiment.build_task()),
    }
    with pytest.raises(InputError) as caught:
        builds[key]()
    line = str(caught.value).splitlines()[0]
    place = "strategies[0]" if key == "strategy" else key
    assert line.startswith(f"{path}:"), line
    assert f": {place}: {key} '{name}" in line
    assert told.replace("CODE", name) in line


BAD_FILES = [
    (("steps: 6", "stepz: 6"), 5, "stepz: unknown key 'stepz': did you mean 'steps'? "),
    (("steps: 6", "steps: six"), 5, "steps: expected a whole number, got 'six'"),
    (("steps: 6", "steps: true"), 5, "steps: expected a whole number, got true"),
    (("steps: 6", "steps: 6.0"), 5, "steps: expected a whole number, got 6.0"),
    (("steps: 6", "steps: 0"), 5, "steps: expected at least 1, got 0"),
    (("count: 2", "count: 0"), 2, "workers.count: expected at least 1, got 0"),
    (("count: 2", "cout: 2"), 2, "workers.cout: unknown key 'cout': did you mean 'count'? "),
    (
        ("count: 2", "count: 2, kind: threds"),
        2,
        "workers.kind: unknown choice 'threds': did you mean 'threads'?",
    ),
    (("compute: 50 ms", "compute: 0.05"), 4, "compute: 0.05 has no unit: write '0.05 s' or '0.05 ms'"),
    (("compute: 50 ms", "compute: {fixed: 1}"), 4, "compute: 1 has no unit: write '1 s' or '1 ms'"),
    (("compute: 50 ms", "compute: -1 s"), 4, "compute: expected a time such as '30 ms' and not negative"),
    (("compute: 50 ms", "compute: {jiter: 1}"), 4, "compute: unknown key of compute 'jiter': did you mean"),
    (("two-datacenters", "two-datacentres"), 3, "topology: "),
    (
        ("topology: two-datacenters", "protocol: linux-tpc"),
        3,
        "protocol: unknown protocol 'linux-tpc': did you",
    ),
    (("AllReduce", "AllReduse"), 7, "strategies[0]: unknown strategy 'AllReduse': did you mean 'AllReduce'?"),
    (("H: 3", "h: 3"), 8, "strategies[1].h: unknown argument of DiLoCoStrategy 'h': did you mean 'H'?"),
    (("H: 3", "H: 0"), 8, "strategies[1].H: "),
    (("H: 3", "optim_spec: {name: adm}"), 8, "strategies[1]: "),
    (("name: DiLoCo, ", ""), 8, "strategies[1].name: is missing: add this key"),
    (
        ("AllReduce", "nowhere_at_all:Thing"),
        7,
        "strategies[0]: strategy 'nowhere_at_all:Thing': cannot import",
    ),
    (("steps: 6", "steps: 6\nseed: -1"), 6, "seed: expected at least 0, got -1"),
    (("steps: 6", "steps: 6\ntarget_loss: .nan"), 6, "target_loss: '.nan' is not a finite number"),
    (("steps: 6", "steps: 6\nplacement: [dc1.0]"), 6, "placement: "),
    (("steps: 6", "steps: 6\nloggers: [csvv]"), 6, "loggers[0]: unknown choice 'csvv': did you mean 'csv'?"),
    (("steps: 6", "steps: 6\nsteps: 7"), 6, "duplicate key 'steps'"),
    (("steps: 6", "steps: 6\ndevice: gpu"), 6, "device: device 'gpu' is no device; use 'cpu', 'cuda', "),
    (("steps: 6", "steps: 6\ndevice: [cpu, 5]"), 6, "device[1]: expected text, got 5"),
    (("steps: 6", "steps: 6\ndevice: 5"), 6, "device: expected text or a list, got 5"),
    (
        ("steps: 6", "steps: 6\nautocast: bf32"),
        6,
        "autocast: expected true or false or 'bf16' or 'fp16', got 'bf32'",
    ),
    (
        ("steps: 6", "steps: 6\nminibatch_size: 5"),
        6,
        "minibatch_size: 5 does not divide batch_size 16: write 4",
    ),
    (
        ("steps: 6", "steps: 6\nminibatch_size: atuo"),
        6,
        "minibatch_size: unknown choice 'atuo': did you mean 'auto'?",
    ),
    (("steps: 6", "steps: 6\nuntil: 0"), 6, "until: got 0.0; give a positive duration such as '2 h'"),
    (("steps: 6", "steps: 6\nuntil: 0 s"), 6, "until: got '0 s'; give a positive duration such as '2 h'"),
    (("steps: 6", "steps: 6\nuntil: 2 kg"), 6, "until: got '2 kg': unknown unit 'kg'"),
    (("steps: 6", "steps: 6\nuntil: 30"), 6, "until: 30 has no unit: write '30 s' or '30 h'"),
    (
        ("topology: two-datacenters", "until: 2 h"),
        3,
        "until: needs virtual time, and there is no topology: add one",
    ),
    (("steps: 6", "steps: 6\nfailures: {mtbf: 0 s}"), 6, "failures: failures.mtbf is '0 s'; give a positive"),
    (
        (
            "two-datacenters\ncompute: 50 ms",
            "{regions: {a: {hosts: 2, nic: 1 Gbit/s, device: h1000}}}\ncompute: flops",
        ),
        3,
        "topology: host a.0: unknown device 'h1000': did you mean 'h100'?",
    ),
]


@pytest.mark.parametrize(("change", "line", "message"), BAD_FILES)
def test_errors_in_files_name_file_line_and_key(
    write: Any, change: tuple[str, str], line: int, message: str
) -> None:
    assert change[0] in SMALL
    path = write(SMALL.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        Experiment.load(path)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{path}:{line}: {message}")


def test_a_task_or_model_that_does_not_exist_is_told_with_its_line(write: Any) -> None:
    path = write(SMALL.replace("digits", "digts"))
    with pytest.raises(
        UnknownNameError, match=rf"{path}:1: task: unknown task 'digts': did you mean 'digits'"
    ):
        Experiment.load(path).build_task()
    experiment = Experiment.load(write(SMALL + "model: {name: mlp, hiden: [3]}\n"))
    with pytest.raises(
        UnknownNameError, match=r":9: model\.hiden: unknown option of model mlp 'hiden': did you mean"
    ):
        experiment.build_model(experiment.build_task())


def test_an_inlined_topology_is_checked_like_a_file(write: Any) -> None:
    inlined = "topology: {hosts: {a: {}, b: {}}, links: [{betwen: [a, b]}]}"
    path = write(SMALL.replace("topology: two-datacenters", inlined))
    with pytest.raises(InputError) as caught:
        Experiment.load(path)
    assert str(caught.value).startswith(
        f"{path}:3: topology: links[0].betwen: unknown key 'betwen': did you mean"
    )


def test_a_placement_needs_a_network(write: Any) -> None:
    path = write(SMALL.replace("topology: two-datacenters", "placement: [a]"))
    with pytest.raises(InputError, match=r":3: placement: there is no topology to place ranks on: add one"):
        Experiment.load(path)


@pytest.mark.parametrize("text", ["", "3", "[]", "just text", "- a\n- b"])
def test_what_is_no_mapping_is_refused(write: Any, text: str) -> None:
    with pytest.raises(InputError, match=r"small\.yaml"):
        Experiment.load(write(text), ["steps=3"])


def test_a_mapping_without_a_file_is_checked_alike() -> None:
    with pytest.raises(InputError, match=r"(?m)^<text>:2: steps: expected a whole number"):
        Experiment.from_document(parse_document("task: digits\nsteps: x"))


SCALES = """\
scales:
  tiny:
    steps: 2
    workers.count: 1
    strategies.DiLoCo: {name: DiLoCo, H: 1}
  wrong:
    strategies.DiLoCo: {name: DiLoCo, h: 1}
  lost:
    strategies.Diloco.H: 1
"""


def test_a_scale_replaces_keys_before_overrides_and_leaves_no_trace(write: Any) -> None:
    path = write(SMALL + SCALES)
    tiny = Experiment.load(path, scale="tiny")
    assert (tiny.settings.steps, tiny.settings.workers.count, tiny.strategies[1].options) == (2, 1, {"H": 1})
    assert Experiment.load(path, ["steps=3"], scale="tiny").settings.steps == 3
    plain = "\n".join(SMALL.splitlines()).replace("steps: 6", "steps: 2").replace("count: 2", "count: 1")
    assert tiny.to_yaml() == Experiment.load(write(plain.replace("H: 3", "H: 1"))).to_yaml()
    assert Experiment.load(write(SMALL + SCALES)).to_yaml() == Experiment.load(write(SMALL)).to_yaml()


@pytest.mark.parametrize(
    ("scale", "line"),
    [
        ("wrong", "{path}:15: strategies[1].h: unknown argument of DiLoCoStrategy 'h': "),
        (
            "lost",
            "{path}:17: scales.lost.strategies.Diloco.H: unknown entry 'Diloco': did you mean 'DiLoCo'?",
        ),
        ("tinny", "{path}:9: scales: unknown scale 'tinny': did you mean 'tiny'?"),
    ],
)
def test_mistakes_in_scales_are_placed(write: Any, scale: str, line: str) -> None:
    path = write(SMALL + SCALES)
    with pytest.raises(UnknownNameError) as caught:
        Experiment.load(path, scale=scale)
    assert str(caught.value).startswith(line.format(path=path))


def test_a_file_without_scales_says_so(write: Any) -> None:
    path = write(SMALL)
    with pytest.raises(InputError, match=f"--scale tiny: {path} has no 'scales'; leave --scale out"):
        Experiment.load(path, scale="tiny")


def test_a_mistake_in_an_inlined_topology_is_told_at_its_own_line(write: Any) -> None:
    """Not at the line of `topology:`, which may be far above."""
    link = "    - between: [a, b]\n      bandwidth: 300 MB/s\n      latency: 1 ms"
    inlined = f"topology:\n  hosts: [a, b]\n  links:\n{link}"
    path = write(SMALL.replace("topology: two-datacenters", inlined))
    wrong = 1 + path.read_text().splitlines().index("      bandwidth: 300 MB/s")
    with pytest.raises(InputError) as caught:
        Experiment.load(path)
    assert str(caught.value).startswith(
        f"{path}:{wrong}: topology: links[0].bandwidth: '300 MB/s' is in bytes"
    )
