"""TensorBoard tracker."""

import json
import re

from ascent.runs.metrics import CHARTS
from ascent.runs.trackers.tracker import StepMetrics, Tracker


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard, with the charts of `ascent show` under Custom Scalars.

    A resumed run hides the steps that it repeats.
    """

    package = "torch.utils.tensorboard"

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.resume_step or None)
        text = json.dumps(self.config, indent=2, ensure_ascii=False, default=str)
        self.writer.add_text("config", f"```json\n{text}\n```", self.resume_step)
        charts = {chart.title: ["Multiline", [f"{re.escape(m.name)}$" for m in chart.series]] for chart in CHARTS}
        self.writer.add_custom_scalars({"Ascent": charts})

    def log(self, steps: list[StepMetrics]) -> None:
        for step, metrics in steps:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, status: str) -> None:
        self.writer.close()
