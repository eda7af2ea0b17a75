"""The terminal shows metrics under the names of the table of metrics (for trackers, see test_trackers)."""

from __future__ import annotations

from ascent.cli.runs import METRIC_COLUMNS, OPTIONAL_COLUMNS
from ascent.runs.display.terminal import METRIC_LINES, SUMMARY_METRICS, metric_lines, summary_text
from ascent.runs.metrics import CHART_METRICS, CHARTS, short_name


def test_the_terminal_shows_metrics_of_the_table_under_its_names() -> None:
    displayed = [key for cells in METRIC_LINES.values() for key in cells]
    assert {*SUMMARY_METRICS, *displayed} <= set(CHART_METRICS) and {*METRIC_COLUMNS} <= {
        *CHART_METRICS,
        "step",
        "trust_region/kl",
    }
    assert {*OPTIONAL_COLUMNS} <= {short_name(key) for key in METRIC_COLUMNS}
    for metrics in (SUMMARY_METRICS, METRIC_COLUMNS, *METRIC_LINES.values()):
        assert len({short_name(key) for key in metrics}) == len(metrics), "names are unique"
    words = {metric.name: metric.short for chart in CHARTS for metric in chart.series}
    assert summary_text(dict.fromkeys(SUMMARY_METRICS, 0.5), 1000) == "  ".join(
        f"{words[key]} 0.500" for key in SUMMARY_METRICS
    )
    lines = dict(metric_lines(dict.fromkeys(displayed, 1.0)))
    assert list(lines) == list(METRIC_LINES)
    for name, cells in METRIC_LINES.items():
        assert all(words[key].removeprefix(name).strip() in lines[name] for key in cells)


def test_unknown_metrics_keep_their_names() -> None:
    assert short_name("unknown/metric") == "unknown/metric"


def test_unmeasured_metrics_are_omitted() -> None:
    line = {"reward": 0.5, "reward_std": 0.25, "kl": None, "loss": 1.0, "reward_errors": 0, "rewards/accuracies": 0.75}
    assert metric_lines(line) == [("reward", "0.500  ± 0.250"), ("pairs", "right 75.0%"), ("loss", "1.0000")]
    assert summary_text(line) == "reward 0.500  pairs right 0.750"
    assert summary_text(line | {"reward_errors": 2}, max_width=20) == "reward 0.500"
    assert summary_text(line | {"reward_errors": 2}).endswith("reward errors 2")
