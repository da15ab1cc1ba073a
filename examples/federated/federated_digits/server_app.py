"""The server: a strategy that waits for nobody, and the accuracy after each aggregation."""

import dataclasses
import json
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import trainwright as tw
from trainwright.federated import flower

from .task import accuracy, build_model

app = ServerApp()


def strategy_of(config) -> flower.ServerStrategy:
    """Return the strategy that the run's config names."""
    settings = {
        "min_available_nodes": config["num-clients"],
        "state_path": config["state"] or None,
        "keep_journal": True,
    }
    if config["strategy"] == "fedfix":
        return flower.FedFix(config["seconds"], **settings)
    if config["strategy"] == "fedbuff":
        return flower.FedBuff(config["size"], **settings)
    makers = {"async": flower.AsyncFedAvg, "fedavg": flower.FedAvg, "fedspeed": flower.FedSpeed}
    return makers[config["strategy"]](**settings)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy and print how it went."""
    config = context.run_config
    strategy = strategy_of(config)

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": accuracy(flower.arrays_of(arrays), config["seed"])})

    start = tw.federated.model_arrays(build_model(config["seed"]))
    result = strategy.start(
        grid, flower.array_record(start),
        num_rounds=config["num-aggregations"], timeout=600, evaluate_fn=evaluate,
    )  # fmt: skip
    last = result.evaluate_metrics_serverapp[max(result.evaluate_metrics_serverapp)]
    if config["record"]:
        write_record(Path(config["record"]), strategy.server)
    print(f"accuracy {last['accuracy']:.3f} after {strategy.server.version} aggregations, {strategy.server.traffic}")


def write_record(path: Path, server: tw.federated.Server) -> None:
    """Write the order of arrivals, from which `tw.federated.replay` computes the same bits, and the model's digest."""
    clients = {name: [known.importance, known.predicted_s] for name, known in server.clients.known.items()}
    events = [dataclasses.asdict(event) for event in server.journal]
    text = {"digest": tw.federated.digest(server.arrays), "clients": clients, "events": events}
    path.write_text(json.dumps(text))
