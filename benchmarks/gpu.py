"""Tokens (or samples) a second of eight workers on one GPU: a plain PyTorch loop, and NetGym's kinds of workers.

    python benchmarks/gpu.py [--device cuda] [--quick]

DiLoCo with H = 10 over `wan-4-regions`, so that every worker trains by itself between exchanges. The models: the digits
MLP, a byte-level GPT of a million parameters (fp32), and GPT-2 (124 million, bf16 autocast, sequences of 1,024 tokens).
The plain loop takes the workers in turn, in one stream and with a stream for each worker; start-up is apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import harness
import torch
import training

from netgym.tasks import build_model, build_task

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = 8
KINDS: dict[str, Any] = {
    "threads": "threads",
    "stacked": "stacked",
    "stacked, graphs": {"kind": "stacked", "cuda_graphs": True},
    "processes": {"kind": "processes", "processes": 4},
}


def cases(device: str) -> Iterator[tuple[training.Case, int]]:
    """Cases, and the tokens (or samples) of a worker's step."""
    for case in training.cases(quick=True):
        yield replace(case, device=device, steps=20), case.batch_size * (128 if "GPT" in case.name else 1)
    task = build_task("text", num_bytes=300_000, block_size=1024)
    model = build_model("gpt", task=task, preset="base", vocab_size=50304, block_size=1024, seed=0)
    yield training.Case("GPT-2, 8 x 1024", task, model, 8, 10, device, "bf16"), 8 * 1024


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="without GPT-2")
    arguments = parser.parse_args()
    device = arguments.device
    print(harness.machine(), torch.cuda.get_device_name() if device == "cuda" else "")
    for case, size in cases(device):
        if arguments.quick and case.autocast:
            break
        print(f"{case.name}; thousand tokens (or samples) a second")

        def show(name: str, seconds: float, case: training.Case = case, size: int = size) -> None:
            print(f"  {name:<18}{size * WORKERS * case.steps / seconds / 1e3:>12,.1f}", flush=True)

        show("plain loop", training.Loop(case, WORKERS, True).seconds(case.steps))
        if device == "cuda":
            show("loop, streams", training.Loop(case, WORKERS, True, streams=True).seconds(case.steps))
        for name, kind in KINDS.items():
            if device != "cuda" and "graphs" in name:
                continue
            strategy = training.STRATEGIES["DiLoCo"]()
            try:
                show(name, training.carried_seconds(case, WORKERS, strategy, kind, "wan-4-regions"))
            except Exception as error:
                print(f"  {name:<18}{str(error).strip().splitlines()[0][:90]}", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
