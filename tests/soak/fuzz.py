"""Give readers very many damaged files, and keep those that they stumble over.

    python tests/soak/fuzz.py topology --inputs 200000 --with atheris --seed 1 --out build/soak

With `atheris` (pip install atheris) what an input reaches in our code guides the next; with `random` inputs are drawn.
Either way the last line of output is a JSON object, appended to OUT/fuzz.jsonl too: reader, tool, inputs, how many
were accepted, seconds of CPU, and what was found, each with the input that shows it in OUT/. Exit code 1 if anything
was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS_FOR_ONE = 10
MOST_MEMORY = 6 << 30  # of addresses: torch alone has reserved 2 GB


class TooLongError(Exception):
    """One input takes seconds."""


class Findings:
    """What was found, once for each place where it shows."""

    def __init__(self, reader: str, tool: str, out: Path) -> None:
        self._reader, self._tool, self._out = reader, tool, out
        self.num_inputs = self.num_accepted = 0
        self.found: dict[str, str] = {}

    def take(self, data: bytes) -> None:
        """Give one input to the reader."""
        from fuzzed_readers import one_input

        self.num_inputs += 1
        signal.setitimer(signal.ITIMER_PROF, SECONDS_FOR_ONE)  # of the processor's: the machine may be busy
        try:
            self.num_accepted += one_input(self._reader, data)
        except Exception as error:
            self._keep(data, error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _keep(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            frame
            for frame in frames
            if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
        ]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        key = f"{type(error).__name__} at {place}"
        if key not in self.found:
            path = self._out / f"{self._reader}-{len(self.found)}-{os.getpid()}.input"
            path.write_bytes(data)
            self.found[key] = f"{str(error).partition(chr(10))[0][:300]} ({path.name})"

    def summary(self) -> dict[str, Any]:
        """As it goes into the file."""
        return {
            "reader": self._reader,
            "tool": self._tool,
            "inputs": self.num_inputs,
            "accepted": self.num_accepted,
            "cpu_seconds": round(time.process_time(), 1),
            "found": self.found,
        }


def main() -> None:
    """Read the command line, and fuzz."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reader")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--with", dest="tool", choices=["atheris", "random"], default="atheris")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    findings = Findings(options.reader, options.tool, options.out)
    signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    if options.tool == "random":
        draw = random.Random(f"{options.reader} {options.seed}")
        for _ in range(options.inputs):
            findings.take(draw.randbytes(draw.choice((12, 40, 120))))
        _end(findings, options.out)
    _with_atheris(findings, options)


def _with_atheris(findings: Findings, options: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=["netsim", "exogym_core"], enable_loader_override=False):
        import fuzzed_readers  # noqa: F401

    def one(data: bytes) -> None:
        findings.take(data)
        if findings.num_inputs >= options.inputs:
            _end(findings, options.out)

    corpus = options.out / f"corpus-{options.reader}"
    corpus.mkdir(exist_ok=True)
    draw = random.Random(f"{options.reader} {options.seed}")
    for number in range(0 if any(corpus.iterdir()) else 40):  # libFuzzer itself begins with the shortest
        (corpus / f"drawn-{number}").write_bytes(draw.randbytes(draw.choice((12, 40, 120))))
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-seed={options.seed}",
        "-max_len=400",
        "-print_final_stats=0",
        "-verbosity=0",
    ]
    atheris.Setup(arguments, one)
    atheris.Fuzz()


def _end(findings: Findings, out: Path) -> None:
    text = json.dumps(findings.summary())
    with (out / "fuzz.jsonl").open("a") as file:
        file.write(text + "\n")
    print(text, flush=True)
    from fuzzed_readers import FOLDER

    FOLDER.remove()
    os._exit(1 if findings.found else 0)  # libFuzzer would go on


def _too_long(number: int, frame: Any) -> None:
    raise TooLongError(f"more than {SECONDS_FOR_ONE} s")


if __name__ == "__main__":
    main()
