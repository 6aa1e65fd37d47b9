"""The smallest run: FedAvg on three workers, two passes over handwritten digits, on the CPU."""

from netgym import LocalTrainer
from netgym.strategy import FedAvgStrategy
from netgym.tasks import build_model, build_task

digits = build_task("digits")
trainer = LocalTrainer(build_model(task=digits, seed=0), digits.train, digits.validation)
model = trainer.fit(
    num_epochs=2,
    strategy=FedAvgStrategy("adam", H=1),
    num_nodes=3,
    device="cpu",
    topology="lan",
    compute="10 ms",
)

result = model.fit_result
print(f"{len(result.history)} steps, {result.virtual_seconds:.3f} virtual seconds, {result.bytes_sent} bytes")
print(f"loss {result.final_loss:.3f}")
