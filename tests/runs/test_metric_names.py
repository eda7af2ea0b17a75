"""One table of metrics: the terminal has no names of its own (the trackers' test is in test_sinks)."""

from __future__ import annotations

from ascent.cli.runs import METRIC_COLUMNS, OPTIONAL_COLUMNS
from ascent.runs.display.terminal import BOARD, SHOWN, board, numbers
from ascent.runs.metrics import CHART_METRICS, CHARTS, short_name


def test_the_terminal_shows_metrics_of_the_table_under_its_names() -> None:
    on_board = [key for cells in BOARD.values() for key in cells]
    assert {*SHOWN, *on_board} <= set(CHART_METRICS) and {*METRIC_COLUMNS} <= {
        *CHART_METRICS,
        "step",
        "trust_region/kl",
    }
    assert {*OPTIONAL_COLUMNS} <= {short_name(key) for key in METRIC_COLUMNS}
    for shown in (SHOWN, METRIC_COLUMNS, *BOARD.values()):
        assert len({short_name(key) for key in shown}) == len(shown), "no two are called the same"
    words = {metric.name: metric.short for chart in CHARTS for metric in chart.series}
    assert numbers(dict.fromkeys(SHOWN, 0.5), 1000) == "  ".join(f"{words[key]} 0.500" for key in SHOWN)
    lines = dict(board(dict.fromkeys(on_board, 1.0)))
    assert list(lines) == list(BOARD)
    for name, cells in BOARD.items():
        assert all(words[key].removeprefix(name).strip() in lines[name] for key in cells)


def test_a_metric_that_the_table_does_not_know_has_its_own_name() -> None:
    assert short_name("unknown/metric") == "unknown/metric"


def test_what_was_not_measured_is_left_out() -> None:
    line = {"reward": 0.5, "reward_std": 0.25, "kl": None, "loss": 1.0, "reward_errors": 0, "rewards/accuracies": 0.75}
    assert board(line) == [("reward", "0.500  ± 0.250"), ("pairs", "right 75.0%"), ("loss", "1.0000")]
    assert numbers(line) == "reward 0.500  pairs right 0.750"
    assert numbers(line | {"reward_errors": 2}, room=20) == "reward 0.500"
    assert numbers(line | {"reward_errors": 2}).endswith("reward errors 2")
