"""MLflow tracker."""

import logging
import os
import re
import time

from ascent.runs.trackers.tracker import StepMetrics, Tracker, flatten_config


class Mlflow(Tracker):
    """MLflow, in RUN/mlflow/mlflow.db or at MLFLOW_TRACKING_URI."""

    package = "mlflow"
    max_metrics_per_call = 1000
    """A server refuses more."""

    def start(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        home = self.folder.resolve() / "mlflow"
        home.mkdir(exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
        self.id = self.run_id(lambda: self._new_run(None if uri else (home / "artifacts").as_uri()))
        self.client.update_run(self.id, status="RUNNING")
        if not self.resume_step:
            params = [Param(_valid_name(key), str(value)[:500]) for key, value in flatten_config(self.config).items()]
            for first in range(0, len(params), 100):
                self.client.log_batch(self.id, params=params[first : first + 100])

    def _new_run(self, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ascent")
        existing = self.client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self.client.create_experiment(name, artifacts)
        return self.client.create_run(experiment, run_name=self.name).info.run_id

    def log(self, steps: list[StepMetrics]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [
            Metric(_valid_name(name), value, now, step) for step, metrics in steps for name, value in metrics.items()
        ]
        for first in range(0, len(values), self.max_metrics_per_call):
            self.client.log_batch(self.id, metrics=values[first : first + self.max_metrics_per_call])

    def end(self, status: str) -> None:
        statuses = {"finished": "FINISHED", "interrupted": "KILLED"}
        self.client.set_terminated(self.id, statuses.get(status, "FAILED"))


def _valid_name(name: str) -> str:
    """Return a name that MLflow accepts. An invalid name would make it reject the whole step."""
    return re.sub(r"[^\w\-./ :]", "_", name)
