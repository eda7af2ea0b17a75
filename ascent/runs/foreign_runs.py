"""Read runs of TRL and verl like runs of Ascent. Missing values stay absent; steps count from 1, as in TRL and verl."""

import hashlib
import itertools
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ascent.core.errors import ConfigError
from ascent.runs.alerts.trend_alerts import alert_events
from ascent.runs.parquet_reader import open_parquet
from ascent.runs.run_folder import mark_nonfinite
from ascent.runs.untrusted_files import (
    READ_ERRORS,
    FileCache,
    finite_json,
    finite_number,
    naming_file,
    numbered_files,
    open_regular,
    parse_json,
    read_regular,
)
from ascent.tasks.base import error_line

Row = dict[str, Any]
MAX_ROLLOUT_BYTES = 1 << 28
"""Maximum bytes of one step of verl's rollouts."""
WEIGHTED_REWARD_TOLERANCE = 1e-3
"""If a logged reward differs from the sum of its parts by more than this (relative), the parts were weighted."""
_rows_cache = FileCache(200_000)
_lines_cache = FileCache(20_000)
_logs_cache = FileCache(50)
_alerts_cache = FileCache(200)


class Trl:
    """TRL's GRPO with `log_completions=True`: completions/completions_00010.parquet, one file per logged step.

    Columns (TRL 1.16): step, prompt, completion, one per reward function, whatever a reward function logged itself,
    and advantage. Prompts and completions are text, or lists of messages. The rows of a group are adjacent. TRL's other
    trainers show the same table, but write no file. The curves are the log of trainer_state.json, in the folder or in
    its checkpoints. (An evaluation writes its completions under the name of the step before it.)
    """

    title = "TRL"
    part = "rewards/{}/mean"
    """The metric of the mean of a reward component."""
    columns: ClassVar = {"step", "prompt", "completion", "advantage"}

    def files(self, folder: Path) -> dict[int, Path]:
        """Return the completion files by step, from the folder of a run or its folder `completions`."""
        name = r"completions_(\d{1,12})\.parquet"
        inner = folder / "completions"
        return ({} if inner.is_symlink() else numbered_files(inner, name)) or numbered_files(folder, name)

    def is_run(self, folder: Path) -> bool:
        """Return whether a folder is a run of TRL. File names are checked first, then one file."""
        paths = list(self.files(folder).values())
        for path in paths[-1:] + paths[:1]:
            with suppress(ConfigError), open_parquet(path) as file:
                return set(file.schema.names) >= self.columns - {"advantage"}
        return bool(paths)  # the names match; errors in the files are reported when they are opened

    def rows(self, path: Path, names: tuple[str, ...] | None = None) -> list[Row]:
        """Read the rows of a file. The reward of a completion is the sum of its reward functions."""
        import pyarrow as pa

        with open_parquet(path) as file:
            table = file.read(file.schema.names)
        missing = {"prompt", "completion"} - set(table.column_names)
        if missing:
            raise ConfigError(
                f"{path.name} has no column {' and '.join(sorted(missing))}: these are not TRL's completions"
            )
        numeric = [f.name for f in table.schema if pa.types.is_floating(f.type) or pa.types.is_integer(f.type)]
        rewards = [name for name in numeric if name not in self.columns and (names is None or name in names)]
        others = [name for name in table.column_names if name not in self.columns.union(rewards)]
        rows: list[Row] = []
        for (group, sample), line in zip(
            _group_and_sample(table.column("prompt").to_pylist()), table.to_pylist(), strict=True
        ):
            parts = {name: line[name] for name in rewards}
            known = [value for value in parts.values() if value is not None and not math.isnan(value)]
            row = {
                "step": line.get("step"),
                "group": group,
                "sample": sample,
                "prompt_text": message_text(line["prompt"]),
                "response_text": message_text(line["completion"]),
                "reward": sum(known) if known else None,
                "valid": bool(known) or not parts,
                "parts": parts,
            }
            if isinstance(line.get("advantage"), int | float):
                row["advantage"] = [line["advantage"]]
            if parts and not known:
                row["reason"] = "no reward function gave a number"
            if others:
                row["extra"] = {name: str(line[name])[:500] for name in others if line[name] is not None}
            rows.append(row)
        return rows

    def logs(self, folder: Path) -> list[Path]:
        """Return all trainer_state.json files: that of the run, then those of its checkpoints, newest first."""
        checkpoints = reversed(numbered_files(folder, r"checkpoint-(\d+)").values())
        folders = [path for path in checkpoints if not path.is_symlink()]
        return [path for parent in (folder, *folders) if (path := parent / "trainer_state.json").exists()]


def _group_and_sample(prompts: list[Any]) -> list[tuple[int, int]]:
    """Return the group and the sample of every row.

    All groups have the same size, so two adjacent groups with the same prompt are told apart.
    """
    runs = [len(list(equal)) for _, equal in itertools.groupby(prompts)]
    size = math.gcd(*runs) if len(runs) > 1 else len(prompts)
    return [divmod(i, max(size, 1)) for i in range(len(prompts))]


def message_text(value: Any) -> str:
    """Return text unchanged, and messages as their contents, with roles if there are several."""
    if not isinstance(value, list):
        return "" if value is None else _text(value)
    turns = [(str(m.get("role", "")), _content(m)) if isinstance(m, dict) else ("", str(m)) for m in value]
    return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # content parts, some of which are text
        return "".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
    rest = {k: v for k, v in message.items() if k != "role" and v is not None}
    return _text(rest) if rest else ""


class Verl:
    """verl's rollouts (`trainer.rollout_data_dir`): 10.jsonl, one file per step and one line per response.

    A line has input, output, gts (the right answer; missing in old files), score, step, and any other values that the
    reward function returned (`acc` is the strict score). Lines are balanced over the workers, so a group consists of
    all lines with the same input, in any order. There are no tokens, and verl writes its metrics to trackers only.
    """

    title = "verl"
    part = "{}"
    required = ("input", "output", "score")
    known: ClassVar = {*required, "gts", "step", "acc", "request_id", "uid"}

    def files(self, folder: Path) -> dict[int, Path]:
        return numbered_files(folder, r"(\d{1,12})\.jsonl")

    def logs(self, folder: Path) -> list[Path]:
        return []

    def is_run(self, folder: Path) -> bool:
        for path in self.files(folder).values():
            try:
                with open_regular(path) as file:
                    first = finite_json(file.readline(10_000_000))
            except (OSError, ValueError):
                return False
            return isinstance(first, dict) and all(key in first for key in self.required)
        return False

    def rows(self, path: Path, names: tuple[str, ...] | None = None) -> list[Row]:
        """Read the rows of a file. An incomplete last line is skipped; other invalid lines raise ConfigError."""
        groups: dict[str, int] = {}
        sizes: Counter[int] = Counter()
        rows = []
        data = read_regular(path, MAX_ROLLOUT_BYTES)
        complete_lines = data[: data.rfind(b"\n") + 1].split(b"\n")
        for number, text in enumerate((line for line in complete_lines if line.strip()), 1):
            try:
                line = finite_json(text)
            except ValueError:
                raise ConfigError(f"{path.name}, line {number}, is not JSON") from None
            if not isinstance(line, dict) or not all(key in line for key in self.required):
                raise ConfigError(
                    f"{path.name}, line {number}, has no {', '.join(self.required)}: these are not verl's rollouts"
                )
            prompt, score = _text(line["input"]), line["score"]
            group = groups.setdefault(str(line.get("uid") or prompt), len(groups))
            valid = isinstance(score, int | float) and math.isfinite(score)
            row = {
                "step": line.get("step"),
                "group": group,
                "sample": sizes[group],
                "prompt_text": prompt,
                "response_text": _text(line["output"]),
                "reward": score if valid else None,
                "valid": valid,
            }
            sizes[group] += 1
            if isinstance(line.get("acc"), int | float) and line["acc"] in (0, 1):  # also true and false
                row["correct"] = bool(line["acc"])
            if line.get("gts") is not None:
                row["answer"] = _text(line["gts"])
            extra = {k: v for k, v in line.items() if k not in self.known and v is not None}
            row["parts"] = {k: float(v) for k, v in extra.items() if isinstance(v, int | float)}
            row["extra"] = {k: _text(v)[:500] for k, v in extra.items() if not isinstance(v, int | float)}
            rows.append(row)
        return sorted(rows, key=lambda row: (row["group"], row["sample"]))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


Reader = Trl | Verl
READERS: dict[str, Reader] = {"trl": Trl(), "verl": Verl()}


def foreign_kind(folder: Path) -> str | None:
    """Return the library that wrote a folder: `trl`, `verl`, or None."""
    return next((name for name, reader in READERS.items() if reader.is_run(folder)), None)


def find_reader(folder: Path) -> tuple[Reader, dict[int, Path]]:
    """Return the reader of a folder and its completion files by step."""
    kind = foreign_kind(folder)
    if kind is None:
        raise ConfigError(f"{folder.name}: there are no completions of TRL or verl here")
    return READERS[kind], READERS[kind].files(folder)


def foreign_rows(folder: Path, step: int) -> list[Row]:
    """Read the completions of a step as rows like those of Ascent's runs, without unknown values."""
    reader, files = find_reader(folder)
    if step not in files:
        raise ConfigError(f"step {step}: there are no completions of that step")
    return _read_rows(reader, files[step], _reward_names(reader, folder))


def _read_logs(reader: Reader, folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the metrics that the library logged, by step, from the newest log, and the errors of reading it."""
    problems: list[str] = []
    for path in reader.logs(folder):
        try:
            return _logs_cache(path, partial(_log_by_step, path)), problems
        except READ_ERRORS as error:
            problems.append(f"{path.relative_to(folder)} cannot be read: {error_line(error)[:160]}")
    return {}, problems


def _log_by_step(path: Path) -> dict[int, dict[str, Any]]:
    """Read a log by step. TRL counts tokens from the start of the run; Ascent's num_tokens counts those of a step."""
    ours = {"step_time": "time/step", "num_tokens": "num_tokens/seen"}
    history: dict[int, dict[str, Any]] = {}
    for entry in parse_json(read_regular(path))["log_history"]:
        values = {ours.get(k, k): v for k, v in entry.items() if finite_number(v) is not None or v != v}
        history.setdefault(int(entry["step"]), {}).update(values)
    return history


def _reward_names(reader: Reader, folder: Path) -> tuple[str, ...] | None:
    """Return the names of the reward functions in the log; None without a log: any numeric column may be one."""
    known = {key for values in _read_logs(reader, folder)[0].values() for key in values if key.startswith("rewards/")}
    return tuple(sorted(key[8:-5] for key in known if key.endswith("/mean"))) or None


def _read_rows(reader: Reader, path: Path, names: tuple[str, ...] | None) -> list[Row]:
    with naming_file(path):
        return _rows_cache(path, lambda: reader.rows(path, names), names, weight=len)


def foreign_lines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a line of metrics per step, and errors of reading. Logged metrics override those computed from rows."""
    reader, files = find_reader(folder)
    names = _reward_names(reader, folder)
    computed: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    for step, path in files.items():
        try:
            with naming_file(path):
                computed[step] = dict(_lines_cache(path, partial(_step_metrics, reader, path, step, names), names))
        except ConfigError as error:
            problems.append(str(error))
    logged, unread = _read_logs(reader, folder)
    problems += unread
    rewards = [(computed[s].get("reward"), logged[s].get("reward")) for s in computed if s in logged]
    if any(
        a is not None and b is not None and abs(a - b) > WEIGHTED_REWARD_TOLERANCE * max(1.0, abs(b))
        for a, b in rewards
    ):
        problems.append("the reward functions were weighted: a completion's reward is shown as their plain sum")
    steps = sorted({*computed, *logged})
    return [mark_nonfinite(computed.get(step, {}) | {"step": step} | logged.get(step, {})) for step in steps], problems


def foreign_files(folder: Path) -> list[Path]:
    """Return all files of a run that are read."""
    reader, files = find_reader(folder)
    return [*files.values(), *reader.logs(folder)]


def fingerprint(folder: Path) -> bytes:
    """Return a hash of the names, sizes and modification times of the files, which changes with any of them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in foreign_files(folder):
        try:
            about = path.lstat()
        except OSError:
            continue
        digest.update(f"{path.name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return digest.digest()


def foreign_events(folder: Path) -> list[dict[str, Any]]:
    """Return the alerts that Ascent would have raised, computed again whenever a file has changed."""
    return _alerts_cache(folder, lambda: _raised_alerts(folder), fingerprint(folder))


def _raised_alerts(folder: Path) -> list[dict[str, Any]]:
    reader, files = find_reader(folder)
    names = _reward_names(reader, folder)

    def rows_of(step: int) -> list[Row]:
        with suppress(ConfigError):
            return _read_rows(reader, files[step], names)
        return []

    return alert_events(foreign_lines(folder)[0], list(files), rows_of)


def _step_metrics(reader: Reader, path: Path, step: int, names: tuple[str, ...] | None) -> dict[str, Any]:
    """Compute the metrics of a step from its completions."""
    rows = _read_rows(reader, path, names)
    failed = [row for row in rows if not row["valid"] or not math.isfinite(row["reward"] or 0.0)]
    scored = [
        row for row in rows if row["valid"] and math.isfinite(math.nan if row["reward"] is None else row["reward"])
    ]
    rewards = [float(row["reward"]) for row in scored]
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in scored:
        groups[row["group"]].append(row)
    line: dict[str, Any] = {"step": step, "num_responses": len(rows), "reward_errors": len(failed)}
    if rewards:
        line["reward"] = statistics.fmean(rewards)
        line["reward_std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        line["frac_reward_zero_std"] = _fraction(groups, lambda g: len({row["reward"] for row in g}) == 1)
    if scored and all("correct" in row for row in scored):
        line["accuracy"] = statistics.fmean(row["correct"] for row in scored)
        line["frac_all_right"] = _fraction(groups, lambda g: all(row["correct"] for row in g))
        line["frac_all_wrong"] = _fraction(groups, lambda g: not any(row["correct"] for row in g))
    if rows:
        line["completions/mean_characters"] = statistics.fmean(len(row["response_text"]) for row in rows)
    for name in dict.fromkeys(name for row in rows for name in row.get("parts", {})):
        known = [v for row in scored if (v := row["parts"].get(name)) is not None and math.isfinite(v)]
        if known:
            line.setdefault(reader.part.format(name), statistics.fmean(known))
    return line


def _fraction(groups: dict[int, list[Row]], holds: Callable[[list[Row]], bool]) -> float:
    return statistics.fmean(holds(group) for group in groups.values())
