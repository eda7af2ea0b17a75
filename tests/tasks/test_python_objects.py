"""Objects of Python where names were: functions, rows, models, choices and tasks, as a notebook has them."""

# ruff: noqa: ARG005

from __future__ import annotations

import asyncio
import json
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.cli.main import main
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.processes.reward_calls import (
    GROUP_FORM,
    SINGLE_FORM,
    TRL_FORM,
    RewardCallError,
    RewardJob,
    compute_rewards,
    describe_error,
    parse_reward_signature,
)
from ascent.rewards.reward_manager import InProcess, RewardManager
from ascent.runs.display.terminal import Display
from ascent.runs.run_writer import RunWriter
from ascent.settings import configure
from ascent.tasks import python_objects
from ascent.tasks.text.python_rows import STREAM_BUFFER_SIZE, RestartableRows, StreamReader, task_from_object
from ascent.tasks.user_files import is_held_out
from tests.language import config_of
from tests.runs.test_resume import bits, differing
from tests.tasks.test_epochs import stopping_after

ROWS = [{"prompt": f"What is {a} + {b}?", "level": a} for a in range(5) for b in range(4)]
ANSWERED = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b), "level": a} for a in range(5) for b in range(4)]
QUICK: dict[str, Any] = {"steps": 4, "prompts": 2, "samples": 2, "max_tokens": 4, "eval_every": 100, "eval_prompts": 1}
QUICK |= {"reward_workers": 1}
QUICK |= {"checkpoint_every": 2, "show": False, "preflight": False, "threads": 1, "temperature": 1.3}
NOISE = """
import zlib

scale = 97

def noise(response):
    return zlib.crc32(response.encode()) % scale / scale
"""
cells = iter(range(10**6))


def cell(code: str, **names: Any) -> dict[str, Any]:
    """What a cell of a notebook defines: its functions are in no file, and their module is __main__."""
    name = f"/tmp/ipykernel/cell-{next(cells)}.py"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space = {"__name__": "__main__", **names}
    exec(compile(code, name, "exec"), space)
    return space


def here(function: Callable[..., Any]) -> ascent.Reward:
    return ascent.Reward(function, in_process=True)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A process that knows no object yet; call it for another one."""

    def fresh() -> None:
        monkeypatch.setattr(python_objects, "OBJECTS", {})
        monkeypatch.setattr(python_objects, "OBJECT_DESCRIPTIONS", {})

    fresh()
    return fresh


# ---- how a function is called -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "form", "by_name"),
    [
        ("def f(prompt, response, answer, **columns): ...", SINGLE_FORM, False),
        ("def f(p, r, a): ...", SINGLE_FORM, False),
        ("def f(question, response, answer, level): ...", SINGLE_FORM, False),
        ("def f(response): ...", SINGLE_FORM, True),
        ("def f(response, level): ...", SINGLE_FORM, True),
        ("def f(response, answer, prompt): ...", SINGLE_FORM, True),
        ("def f(*args): ...", SINGLE_FORM, False),
        ("def f(*, response): ...", SINGLE_FORM, True),
        ("f = lambda response: 0", SINGLE_FORM, True),
        ("async def f(response): ...", SINGLE_FORM, True),
        ("@ascent.batch\ndef f(prompts, responses, answers): ...", GROUP_FORM, False),
        ("@ascent.batch\ndef f(a, b, c, **columns): ...", GROUP_FORM, False),
        ("@ascent.batch\ndef f(responses): ...", GROUP_FORM, True),
        ("def f(completions, **kwargs): ...", TRL_FORM, True),
        ("def f(prompts, completions, answer, **kwargs): ...", TRL_FORM, True),
        ("class F:\n    def __call__(self, response): ...\nf = F()", SINGLE_FORM, True),
        ("import functools\nf = functools.partial(lambda k, response: k, 3)", SINGLE_FORM, True),
    ],
)
def test_the_signature_says_how_a_function_is_called(code: str, form: tuple[str, ...], by_name: bool) -> None:
    call = parse_reward_signature(cell(code, ascent=ascent)["f"])
    assert call.form == form and (call.positional is None) == by_name
    assert call.is_async == code.startswith("async")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("f = lambda x: 0", "takes (x): name its parameters prompt, response, answer"),
        ("def f(): ...", "name its parameters"),
        ("def f(prompts, responses, answers): ...", "mark it with @ascent.batch"),
        ("def f(responses): ...", "one response or a group"),
        ("def f(completion): ...", "one response or a group"),
        ("f = len", "name its parameters"),
        ("@ascent.batch\ndef f(x): ...", "name its parameters prompts, responses, answers"),
    ],
)
def test_a_signature_that_says_nothing_is_refused(code: str, why: str) -> None:
    with pytest.raises(RewardCallError) as error:
        parse_reward_signature(cell(code, ascent=ascent)["f"])
    assert why in str(error.value)


def test_columns_that_are_missing_or_could_be_a_place_are_refused() -> None:
    with pytest.raises(
        RewardCallError, match="asks for solution, and the rows have no such column; their columns: answer, level"
    ):
        parse_reward_signature(lambda completions, solution: 0).check_columns(["level"])
    with pytest.raises(RewardCallError, match="its parameter level is at the position of the answer"):
        parse_reward_signature(lambda prompt, response, level: 0).check_columns(["level"])
    parse_reward_signature(lambda completions, answer, level, **rest: 0).check_columns(["level"])


def jobs(count: int = 3, chat: bool = False) -> list[RewardJob]:
    prompt: Any = [{"role": "user", "content": "p"}] if chat else "p"
    return [RewardJob(0, prompt, f"r{i}", f"a{i}", {"level": i, "other": "x"}) for i in range(count)]


def values(function: Any, many: list[RewardJob], seconds: float = 5.0) -> list[Any]:
    call = parse_reward_signature(function)
    loop = asyncio.new_event_loop() if call.is_async else None
    answers = compute_rewards(call, many, loop, seconds)
    if loop is not None:
        loop.close()
    return [answer.get("value", answer.get("error", answer.get("skipped"))) for answer in answers]


def test_each_form_gets_what_it_asks_for() -> None:
    asked = cell("def f(response, level):\n    return level * 10 + len(response)")["f"]
    assert values(asked, jobs()) == [2, 12, 22]
    assert values(lambda a, b, c, level: float(b == f"r{level}" and c == f"a{level}"), jobs()) == [1, 1, 1]
    assert values(
        ascent.batch(lambda prompts, responses, answers: range(len(responses)) and [1, (2, "why"), None]), jobs()
    )
    assert values(ascent.batch(lambda responses, level: level), jobs()) == [0, 1, 2]
    trl = cell("def f(completions, prompts, answer, **kwargs):\n    return [kwargs['level'][i] for i in range(3)]")["f"]
    assert values(trl, jobs()) == [0, 1, 2]
    chats = cell("def f(completions, **kwargs):\n    return [float(c[0]['content'] == 'r0') for c in completions]")["f"]
    assert values(chats, jobs(chat=True)) == [1, 0, 0]


def test_none_is_not_for_this_row_and_a_wrong_list_is_an_error() -> None:
    assert values(ascent.batch(lambda responses: [1.0, None, 0.0]), jobs()) == [1.0, True, 0.0]
    with pytest.raises(RewardCallError, match="returned 2 values for a group of 3"):
        values(ascent.batch(lambda responses: [1.0, 2.0]), jobs())
    with pytest.raises(RewardCallError, match="returned float for a group of 3"):
        values(ascent.batch(lambda responses: 1.0), jobs())


@pytest.mark.long
def test_async_functions_run_at_the_same_time_each_with_its_own_limit() -> None:
    together: set[int] = set()
    most: list[int] = []

    async def waits(response: str, level: int) -> float:
        together.add(level)
        most.append(len(together))
        await asyncio.sleep(99 if level == 1 else 0.1)
        together.remove(level)
        if level == 2:
            raise ValueError("two")
        return level

    got = values(waits, jobs(20), seconds=2.0)
    assert max(most) == 20, "all of them began before one of them ended"
    assert got[1] == "took longer than 2 s" and got[2].startswith("ValueError: two") and got[3:] == list(range(3, 20))


# ---- what an object looks like ------------------------------------------------------------------------------


def hash_of(code: str, name: str = "f", **names: Any) -> str:
    return python_objects.describe_object(cell(code, **names)[name])["hash"]


def test_the_hash_is_of_the_code_and_of_what_it_holds() -> None:
    plain = hash_of("def f(response):\n    return 1")
    assert plain == hash_of("\n\n# a comment\ndef f(response):  # another\n    return  1"), "spelling does not count"
    assert plain != hash_of("def f(response):\n    return 2")
    held = "def f(response):\n    return k"
    assert hash_of(held, k=1) == hash_of(held, k=1) != hash_of(held, k=2), "a global"
    made = "def make(k):\n    def f(response, m=3):\n        return k * m\n    return f\nf = make({})"
    assert hash_of(made.format(1)) == hash_of(made.format(1)) != hash_of(made.format(2)), "a closure"
    called = "def g(): return {}\ndef f(response): return g()"
    assert hash_of(called.format(1)) != hash_of(called.format(2)), "another function of the notebook"


def test_code_of_main_counts_though_a_library_started_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `python -m pytest`: __main__ has the file of the library."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/lib/site-packages/pytest/__main__.py", raising=False)
    assert hash_of("def f(response):\n    return 1") != hash_of("def f(response):\n    return 2")


def test_two_lambdas_of_one_line_are_two_and_their_line_does_not_count() -> None:
    one = cell("fs = [lambda response: 1, lambda response: 2]")["fs"]
    assert [python_objects.describe_object(f)["source"] for f in one] == ["lambda response: 1", "lambda response: 2"]
    assert python_objects.describe_object(one[0])["hash"] == hash_of("x = 3; f = (lambda response: 1)")


def test_code_without_a_text_is_told_by_its_bytecode() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("f = lambda response: 1\ng = lambda response: 2", space)
    f, g = (python_objects.describe_object(space[name]) for name in "fg")
    assert f["source"] is None and f["hash"] != g["hash"]


def test_what_cannot_be_compared_counts_by_its_type() -> None:
    held = "def f(response):\n    return client"
    assert hash_of(held, client=object()) == hash_of(held, client=object()) != hash_of(held, client=print)
    about = python_objects.describe_object(cell(held, client=object())["f"])
    assert about["holds"] == {"client": "object"} and about["name"] == "__main__.f"


# ---- rows ---------------------------------------------------------------------------------------------------


def test_rows_may_be_a_list_a_dataset_or_a_frame() -> None:
    import datasets
    import pandas

    given = [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS)]
    tasks = [configure(rows, {"reward": here(lambda response: 1)}).task for rows in given]
    assert all(task == tasks[0] for task in tasks), "the same rows have the same name"
    task = tasks[0]
    assert task.size == 17 and len(task.test(10)) == 3
    assert {p.prompt for p in task.table.train + task.table.test} == {row["prompt"] for row in ROWS}
    assert task.train(0).columns == {"level": 0}


def test_words_alone_are_prompts_and_a_dataset_with_splits_brings_its_test_rows() -> None:
    import datasets

    words = configure([f"Say {i}" for i in range(5)], {"reward": here(lambda response: 1)}).task
    assert words.train(0).prompt == "Say 1" and words.train(0).answer is None
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ANSWERED[:9]), test=datasets.Dataset.from_list(ANSWERED[9:])
    )
    task = configure(splits, {}).task
    assert (task.size, len(task.test(100))) == (9, 11)
    assert configure(ANSWERED[:9], {"eval": ANSWERED[9:]}).task.test(100) == task.test(100)


def test_a_frame_of_polars_is_read_by_its_rows_and_dates_count() -> None:
    class Frame:
        """As far as polars is looked at: it iterates over columns, and has its rows as dicts."""

        def __init__(self, rows: list[dict[str, Any]]):
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __iter__(self) -> Iterator[Any]:
            return iter(zip(*map(dict.values, self.rows), strict=True))

        def to_dicts(self) -> list[dict[str, Any]]:
            return self.rows

    settings = {"reward": here(lambda response: 1)}
    assert configure(Frame(ROWS), settings).task == configure(ROWS, settings).task
    days = [[{"prompt": f"{i}", "day": date(2026, 1, day + i)} for i in range(4)] for day in (1, 2)]
    assert configure(days[0], settings).task != configure(days[1], settings).task


def test_missing_values_of_a_frame_are_none() -> None:
    import pandas

    frame = pandas.DataFrame([{"prompt": "a", "answer": "1", "n": 1.5}, {"prompt": "b", "answer": None, "n": None}])
    (_, brought) = task_from_object(frame)
    assert python_objects.OBJECTS[brought["source"]][1] == {"prompt": "b", "answer": None, "n": None}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "rows is empty"),
        ([1, 2], "row 0: a row must be a dict of columns; got 1"),
        ((row for row in ROWS), "can be read only once"),
        ({"prompt": ["a"]}, "expected the name of a task"),
        (3, "expected the name of a task"),
        (lambda response: 1.0, "a function that returns rows must take no arguments. Reward functions go to reward="),
        ([{"question": "?"}], "has no column prompt; there are: question. Set --prompt-column"),
        (ROWS, "has no column answer; there are: prompt, level"),
        (ROWS[:1], "has no column answer"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(rows: Any, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        configure(rows, {}).task.verify()
    assert why in str(error.value)


def test_a_function_that_asks_for_another_column_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigError, match="reward f: it asks for solution, and the rows have no such column"):
        configure(ROWS, {"reward": here(cell("def f(response, solution): ...")["f"])}).task.verify()
    with pytest.raises(ConfigError, match="reward 3: a reward must be a function"):
        configure(ROWS, {"reward": [3]})


def test_rows_are_not_for_the_command_line(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    assert main(["train", "rows", "--model", str(tiny_folder)]) == 2
    assert "rows are passed from Python: ascent.train(rows, …)" in capsys.readouterr().err


# ---- streams ------------------------------------------------------------------------------------------------


def numbers(end: int | None = None) -> Callable[[], Iterator[dict[str, Any]]]:
    def made() -> Iterator[dict[str, Any]]:
        i = 0
        while end is None or i < end:
            yield {"prompt": f"number {i}", "n": i}
            i += 1

    return made


def test_a_stream_is_read_in_order_and_its_held_out_rows_are_never_trained_on() -> None:
    task = configure(numbers(), {"reward": here(lambda response: 1)}).task
    task.verify()
    train, test = [task.train(i).columns["n"] for i in range(200)], [p.columns["n"] for p in task.test(30)]
    assert train == sorted(train) and test == sorted(test) and len(test) == 30
    assert not set(train) & set(test)
    assert set(range(max(train))) <= {*train, *test}, "none is lost"


def test_a_stream_that_ends_starts_over_and_old_rows_are_read_again() -> None:
    def problem(row: Any, where: str) -> ascent.Problem:
        return ascent.Problem(row["prompt"])

    reader = StreamReader(RestartableRows(numbers(7)), problem, lambda p: p.prompt == "number 3")
    assert [reader[i].prompt for i in (0, 5, 6, 12)] == ["number 0", "number 6", "number 0", "number 0"]
    long = StreamReader(RestartableRows(numbers()), problem, lambda p: False)
    assert long[STREAM_BUFFER_SIZE + 5].prompt == f"number {STREAM_BUFFER_SIZE + 5}" and long[2].prompt == "number 2"


def test_a_dataset_without_a_length_is_a_stream_and_its_first_rows_tell_it() -> None:
    import datasets

    def made() -> Iterator[dict[str, Any]]:
        yield from ROWS

    stream = datasets.IterableDataset.from_generator(made)
    (cls, brought), (_, other) = (
        task_from_object(stream),
        task_from_object(datasets.IterableDataset.from_generator(numbers())),
    )
    assert cls.__name__ == "RowStream" and brought["source"] != other["source"]
    assert task_from_object(datasets.IterableDataset.from_generator(made))[1] == brought


@pytest.mark.long
def test_a_run_on_a_stream_resumes_where_it_was(
    tiny_folder: Path, tmp_path: Path, monkeypatch: Any, own_process: Any
) -> None:
    """With dynamic sampling, which draws again from the rows that have come so far."""
    space = cell(NOISE + "def rows():\n    yield from ({'prompt': f'number {i}'} for i in range(1000))\n")
    settings = QUICK | {"model": tiny_folder, "algorithm": "dapo", "shaping.margin": 1}
    given = {"reward": [here(space["noise"]), here(lambda response: 0)]}
    whole = ascent.train(space["rows"], **given, **settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "should_stop", stopping_after(1))
        ascent.train(space["rows"], **given, **settings, out=tmp_path / "again")
    own_process()
    again = ascent.resume(tmp_path / "again", Display(), rows=space["rows"], **given)
    assert again.status == "finished" and not differing(again.folder, bits(whole.folder))
    del settings["steps"]
    with pytest.raises(ConfigError, match="the length of a stream is unknown"):
        ascent.train(space["rows"], **given, **settings, data_epochs=1.0, out=tmp_path / "no")


# ---- a run --------------------------------------------------------------------------------------------------


def interrupted(folder: Path, model: Path, monkeypatch: Any, given: dict[str, Any], **more: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "should_stop", stopping_after(1))
        run = ascent.train(ROWS, **given, **QUICK, **more, model=model, out=folder)
    assert run.status == "interrupted"


@pytest.mark.long
def test_a_run_with_objects_resumes_to_the_same_bits(
    tiny_folder: Path, tmp_path: Path, monkeypatch: Any, own_process: Any, capsys: Any
) -> None:
    given = {"reward": [here(cell(NOISE)["noise"]), (0.2, here(lambda response, level: level))]}
    whole = ascent.train(ROWS, **given, **QUICK, model=tiny_folder, out=tmp_path / "whole")
    interrupted(tmp_path / "run", tiny_folder, monkeypatch, given)
    assert {"rewards/noise", "rewards/lambda"} <= whole.metrics[0].keys()
    own_process()
    with pytest.raises(ConfigError, match=r"started with Python objects.*reward=noise, reward=lambda, rows=rows"):
        ascent.resume(tmp_path / "run")
    assert main(["show", str(tmp_path / "run")]) == 0, "looking needs none of them"
    assert main(["report", str(tmp_path / "run")]) == 0
    assert ascent.load(tmp_path / "run").policy is not None, "nor does the policy"
    again = ascent.resume(tmp_path / "run", Display(), rows=ROWS, **given)
    assert not differing(again.folder, bits(whole.folder))


@pytest.mark.long
def test_another_function_or_other_rows_are_refused_with_the_difference(
    tiny_folder: Path, tmp_path: Path, monkeypatch: Any, own_process: Any
) -> None:
    interrupted(tmp_path / "run", tiny_folder, monkeypatch, {"reward": here(cell(NOISE)["noise"])})
    own_process()
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ConfigError) as error:
        ascent.resume(tmp_path / "run", rows=ROWS, reward=here(cell(NOISE.replace("/ scale", "/ 2"))["noise"]))
    assert "-    return zlib.crc32(response.encode()) % scale / scale\n+    return" in str(error.value)
    other = here(cell(NOISE.replace("97", "3"))["noise"])
    with pytest.raises(ConfigError, match="scale: 97 in the run, 3 now"):
        ascent.resume(tmp_path / "run", rows=ROWS, reward=other)
    with pytest.raises(ConfigError, match="rows: 20 in the run, 19 now"):
        ascent.resume(tmp_path / "run", rows=ROWS[1:], reward=here(cell(NOISE)["noise"]))
    own_process()
    with pytest.raises(ConfigError, match=r"rewrad: no such object of a run.*Did you mean reward"):
        ascent.resume(tmp_path / "run", rewrad=other)
    assert (tmp_path / "run" / "config.json").read_text() == before, "nothing was written"
    run = ascent.resume(tmp_path / "run", Display(), rows=ROWS, reward=other, anyway=True)
    assert run.status == "finished" and run.info["history"][-2]["event"] == "objects changed"
    (new,) = (name for name, about in run.info["objects"].items() if about["setting"] == "reward")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task"]["reward"] == [new]
    assert run.info["objects"][new]["holds"]["scale"] == "3"


def test_a_folder_that_claims_odd_objects_runs_nothing(tmp_path: Path) -> None:
    """A run folder never brings code: a name in it is looked up among the objects of this process, and not there."""
    run = ascent.train("lecture", steps=1, show=False, threads=1, out=tmp_path / "run")
    for odd in (3, {"object:f@00": 3}, {"object:f@00": {"setting": [], "source": 3}}):
        info = json.loads((run.folder / "run.json").read_text()) | {"objects": odd, "status": "interrupted"}
        (run.folder / "run.json").write_text(json.dumps(info))
        if isinstance(odd, dict) and isinstance(odd["object:f@00"], dict):
            with pytest.raises(ConfigError, match="Pass them again"):
                ascent.resume(run.folder)
        else:
            assert ascent.resume(run.folder, Display()).status == "finished"
    config = json.loads((run.folder / "config.json").read_text())
    config["loss"]["name"] = "object:os.system@00"
    (run.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is a Python object that this process does not have"):
        _ = ascent.load(run.folder).config


# ---- choices and tasks --------------------------------------------------------------------------------------

CHOICE = """
from dataclasses import dataclass
import ascent

@dataclass(frozen=True)
class Halved(ascent.Advantage):
    factor: float = 0.5
    group = False

    def __call__(self, batch, state):
        return self.factor * batch.reward
"""


def test_a_choice_is_an_object_of_the_menu_or_ones_own(tmp_path: Path, own_process: Any) -> None:
    quick = {"steps": 1, "show": False, "threads": 1}
    run = ascent.train(
        "lecture", advantage=ascent.Normalized(eps=0.0), loss=ascent.Clipped(0.1, 0.3), **quick, out=tmp_path / "a"
    )
    assert run.config.algorithm.advantage == ascent.Normalized(eps=0.0) and run.info["objects"] == {}
    choice = cell(CHOICE)["Halved"]
    run = ascent.train("lecture", advantage=choice(0.25), loss="log-prob", **quick, out=tmp_path / "b")
    assert run.config.algorithm.advantage == choice(0.25)
    own_process()
    with pytest.raises(ConfigError, match="advantage Halved is a Python object that this process does not have"):
        _ = ascent.load(run.folder).config
    again = ascent.load(run.folder, advantage=cell(CHOICE)["Halved"])
    assert again.config.algorithm.advantage.factor == 0.25, "its fields are in config.json"  # type: ignore[attr-defined]
    own_process()
    with pytest.raises(ConfigError, match=r"-        return self.factor \* batch.reward"):
        ascent.load(run.folder, advantage=cell(CHOICE.replace("self.factor *", "self.factor +"))["Halved"])


def test_a_class_that_derives_from_ones_own_has_a_name_of_its_own() -> None:
    space = cell(
        CHOICE + "\n@dataclass(frozen=True)\nclass More(Halved):\n    def __call__(self, batch, state): return 1\n"
    )
    names = [
        configure("lecture", {"advantage": space[name], "loss": "log-prob"}).to_dict()["advantage"]["name"]
        for name in ("Halved", "More")
    ]
    assert [python_objects.object_label(name) for name in names] == ["Halved", "More"] and names[0] != names[1]


def test_what_config_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    code = CHOICE.replace("factor: float = 0.5", "factor: object = None")
    with pytest.raises(ConfigError, match=r"fields config.json cannot hold"):
        ascent.train(
            "lecture", advantage=cell(code)["Halved"]({1, 2}), loss="log-prob", steps=1, show=False, out=tmp_path / "x"
        )


# ---- in processes of their own ------------------------------------------------------------------------------

PARTS = (
    NOISE
    + """
import asyncio, os
import ascent

def crash(response, level):
    return os._exit(3) if level == 1 else 1.0

async def slow(prompt, response, answer, level):
    await asyncio.sleep(0.2)
    return level, "waited"

@ascent.batch
def alike(responses):
    return [len(set(responses)), *[None] * (len(responses) - 1)]

def trl(completions, level, **kwargs):
    return [float(len(completions)) for _ in completions]
"""
)


@pytest.mark.slow
def test_functions_of_a_notebook_run_in_the_workers_under_their_limits() -> None:
    space = cell(PARTS)
    rewards = [space[name] for name in ("noise", "crash", "slow", "alike", "trl")] + [
        lambda response: float(os.getpid())
    ]
    task = configure(ROWS, {"reward": rewards, "reward_seconds": 5.0}).task
    problems = [p for p in task.table.train[:8] for _ in range(2)]
    with closing(RewardManager(task)) as grading:
        marks = grading([(p, f"{i % 2}") for i, p in enumerate(problems)])
    for i, (problem, mark) in enumerate(zip(problems, marks, strict=True)):
        level = problem.columns["level"]
        if level == 1:
            assert "reward crash: the reward ended its process: exit status 3" in (mark.error or "")
            continue
        expected = {"noise", "crash", "slow", "trl", "lambda", *(["alike"] if i % 2 == 0 else [])}
        assert mark.parts.keys() == expected and mark.error is None
        assert mark.parts["noise"] == space["noise"](str(i % 2)) and mark.parts["slow"] == level
        assert mark.parts["trl"] == 2 and mark.parts.get("alike", 2) == 2 and "slow: waited" in mark.reason
        assert mark.parts["lambda"] != os.getpid(), "it ran elsewhere"


@pytest.mark.slow
def test_a_task_of_a_notebook_grades_in_the_workers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    code = page[page.index("# my_task.py") :].partition("```")[0]
    cls = cell(code)["Doubling"]
    task = configure(cls(lenient=0.25), {}).task
    with closing(RewardManager(task)) as grading:
        marks = grading([(task.train(4), "8"), (task.train(4), "it is 8"), (task.train(4), "9")])
    assert [mark.value for mark in marks] == [1.0, 0.25, 0.0] and python_objects.object_label(
        configure(cls, {}).to_dict()["task"]["name"]
    ) == "Doubling"


@pytest.mark.slow
def test_a_function_of_a_notebook_rewards_numbers_too(tmp_path: Path) -> None:
    f = cell("def first(prompt, response):\n    return float(response[0] == min(prompt))")["first"]
    run = ascent.train("lecture", reward=["exact", (0.5, f)], steps=1, show=False, threads=1, out=tmp_path / "run")
    assert "rewards/first" in run.metrics[0] and run.metrics[0]["reward_errors"] == 0
    with pytest.raises(ConfigError, match="on numbers a reward is a plain function"):
        ascent.train("lecture", reward=here(f), steps=1, show=False, out=tmp_path / "no")


def test_a_function_that_cannot_be_sent_is_refused_with_what_to_do() -> None:
    space = cell("import threading\nlock = threading.Lock()\ndef f(response):\n    return lock.locked()")
    task = configure(ROWS, {"reward": space["f"]}).task
    with pytest.raises(ConfigError, match=r"reward f cannot be pickled.*lock \(lock\).*in_process=True"):
        RewardManager(task)
    with closing(RewardManager(configure(ROWS, {"reward": here(space["f"])}).task)) as grading:
        assert grading([(task.train(0), "x")])[0].value == 0.0 and not grading.pool.workers


def test_in_this_process_async_functions_have_a_loop_of_their_own() -> None:
    """A notebook has a running loop already, so theirs is in another thread."""
    code = "import asyncio\nasync def f(response, level):\n    await asyncio.sleep(0.01)\n    return 1 / level"
    task = configure(ROWS, {"reward": here(cell(code)["f"])}).task

    async def inside() -> list[Any]:
        with closing(RewardManager(task)) as grading:
            return grading([(problem, "x") for problem in task.table.train[:8]])

    marks = asyncio.run(inside())
    assert any("ZeroDivisionError" in (mark.error or "") for mark in marks) and any(mark.value == 1 for mark in marks)


def test_where_every_reward_returns_none_the_response_has_failed() -> None:
    task = configure(ROWS, {"reward": [here(lambda response: None), here(lambda level, response: level or None)]}).task
    with closing(RewardManager(task)) as grading:
        marks = grading([(ascent.Problem("p", None, {"level": level}), "r") for level in (0, 3)])
    assert "every reward returned None" in (marks[0].error or "")
    assert (marks[1].value, marks[1].parts) == (3, {"lambda-2": 3})


# ---- a model ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_is_given_is_trained_in_place_and_the_run_needs_it_no_more(
    lora: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = QUICK | {"reward": here(cell(NOISE)["noise"]), "algorithm": "grpo", "lr": 1e-2, "keep": 9}
    settings |= {"peft_config": peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    run = ascent.train(ROWS, model=model, tokenizer=tokenizer, **settings, out=tmp_path / "run")
    named = ascent.train(ROWS, model=tiny_folder, **settings, out=tmp_path / "named")
    assert not differing(named.folder, bits(run.folder)), "the same as from its folder"
    now = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    moved = [name for name, p in now.items() if name not in start or not p.equal(start[name])]
    assert moved and all("lora" in name for name in moved) == lora
    assert json.loads((run.folder / "config.json").read_text())["policy"]["model"] == "run:model"
    elsewhere = run.folder.rename(tmp_path / "elsewhere")
    again = ascent.resume(elsewhere, Display(), from_step=2)
    assert not differing(named.folder, bits(again.folder)), "the reference is the model as it was given"
    kept = transformers.AutoModelForCausalLM.from_pretrained(elsewhere / "model")
    assert all(p.equal(start[name]) for name, p in kept.named_parameters())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda model, tokenizer: {"model": model}, "needs its tokenizer"),
        (lambda model, tokenizer: {"model": model.model, "tokenizer": tokenizer}, "give a name on the hub, a folder"),
        (lambda model, tokenizer: {"model": model.double(), "tokenizer": tokenizer}, "model is in torch.float64"),
        (lambda model, tokenizer: {"model": "x", "tokenizer": tokenizer}, "brings its own"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(given: Any, why: str) -> None:
    from transformers import LlamaForCausalLM

    from tests.language import config_of, tiny_tokenizer

    with pytest.raises(ConfigError) as error:
        configure(ROWS, given(LlamaForCausalLM(config_of("Llama")), tiny_tokenizer()))
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"lora_dropout": 0.1, "target_modules": "all-linear"}, "peft_config.lora_dropout is 0.1"),
        ({"use_rslora": True, "target_modules": "all-linear"}, "peft_config.use_rslora is True"),
    ],
)
def test_a_field_of_a_peft_config_without_counterpart_is_refused(fields: dict[str, Any], why: str) -> None:
    import peft

    with pytest.raises(ConfigError) as error:
        configure(ROWS, {"peft_config": peft.LoraConfig(r=4, **fields)})
    assert why in str(error.value)
    with pytest.raises(ConfigError, match="peft_config is IA3Config: only LoraConfig is supported"):
        configure(ROWS, {"peft_config": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])})
    plain = peft.LoraConfig(r=4, lora_alpha=16, target_modules={"v_proj", "q_proj"}, task_type="CAUSAL_LM")
    policy = configure(ROWS, {"peft_config": plain, "reward": here(lambda response: 0)}).policy
    assert (policy.lora, policy.lora_alpha, policy.lora_targets) == (4, 16.0, "q_proj,v_proj")


def test_a_refused_run_leaves_no_model_behind(tiny_folder: Path, tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    bad = here(cell("def f(response, solution): ...")["f"])
    with pytest.raises(ConfigError, match="asks for solution"):
        ascent.train(ROWS, model=model, tokenizer=tokenizer, reward=bad, **QUICK, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == [] and not (tmp_path / "run").exists()


# ---- offline data as rows -----------------------------------------------------------------------------------

PAIRS = [{"prompt": f"Say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(12)]
SHOWN_RESPONSES = [{"prompt": f"Say {i}", "response": f"yes {i}"} for i in range(12)]
LABELLED = [{"prompt": f"Say {i}", "steps": ["a", "b"], "labels": [1, 0]} for i in range(12)]


@pytest.mark.parametrize(
    ("rows", "name", "row"),
    [(PAIRS, "preferences", "dpo"), (SHOWN_RESPONSES, "demonstrations", "sft"), (LABELLED, "steps", "process-reward")],
)
def test_the_columns_of_rows_say_that_they_are_offline_data(rows: Any, name: str, row: str) -> None:
    import pandas

    config = configure(rows, {"model": "x"})
    assert name_of(config.task) == name and config.algorithm.loss == ALGORITHMS[row].loss
    assert len(config.task.table.train) + len(config.task.table.test) == 12
    assert configure(pandas.DataFrame(rows), {"model": "x"}).task == config.task
    with pytest.raises(ConfigError, match="need a length"):
        configure(lambda: iter(rows), {"model": "x"})
    rewarded = configure(rows, {"model": "x", "reward": here(lambda response: 1)}).task
    assert name_of(rewarded) == "rows", "with a reward they are prompts, whatever else they have"


@pytest.mark.long
@pytest.mark.parametrize("rows", [PAIRS, SHOWN_RESPONSES, LABELLED])
def test_a_run_on_offline_rows_is_that_on_their_file_and_resumes(
    rows: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: Any, own_process: Any
) -> None:
    quick = {name: value for name, value in QUICK.items() if name not in ("samples", "temperature")}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = name_of(configure(rows, {"model": "x"}).task)
    named = ascent.train(f"{name}:{file}", model=tiny_folder, **quick, out=tmp_path / "named")
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "should_stop", stopping_after(1))
        assert ascent.train(rows, model=tiny_folder, **quick, out=tmp_path / "run").status == "interrupted"
    own_process()
    with pytest.raises(ConfigError, match=r"started with Python objects.*rows=rows"):
        ascent.resume(tmp_path / "run")
    with pytest.raises(ConfigError, match="rows: 12 in the run, 11 now"):
        ascent.resume(tmp_path / "run", rows=rows[1:])
    again = ascent.resume(tmp_path / "run", Display(), rows=rows)
    assert [line["loss"] for line in again.metrics] == [line["loss"] for line in named.metrics]
    assert main(["show", str(again.folder)]) == 0 and main(["report", str(again.folder)]) == 0


@pytest.mark.long
def test_a_finished_run_checks_what_it_is_given_all_the_same(
    tiny_folder: Path, tmp_path: Path, own_process: Any
) -> None:
    given = {"reward": here(cell(NOISE)["noise"])}
    run = ascent.train(ROWS, **given, **QUICK | {"steps": 1}, model=tiny_folder, out=tmp_path / "run")
    own_process()
    assert ascent.resume(run.folder).status == "finished", "it needs none of them"
    assert ascent.resume(run.folder, **given).status == "finished", "some are enough"
    assert ascent.resume(run.folder, rows=ROWS, **given).status == "finished"
    with pytest.raises(ConfigError, match="scale: 97 in the run, 3 now"):
        ascent.resume(run.folder, reward=here(cell(NOISE.replace("97", "3"))["noise"]))
    with pytest.raises(ConfigError, match="rows: 20 in the run, 19 now"):
        ascent.resume(run.folder, rows=ROWS[1:])
    with pytest.raises(ConfigError, match=r"rewrad: no such object of a run.*Did you mean reward"):
        ascent.resume(run.folder, rewrad=1)
    with pytest.raises(ConfigError, match=r"made with .*tiny by its name.*Give no model"):
        ascent.resume(run.folder, model=object(), tokenizer=object())
    assert ascent.resume(run.folder, rows=ROWS[1:], anyway=True).info == run.info


@pytest.mark.long
def test_a_model_that_is_given_again_is_trained_in_place_to_the_same_bits(
    tiny_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    import transformers

    def fresh() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    settings = QUICK | {"reward": here(cell(NOISE)["noise"]), "algorithm": "grpo", "lr": 1e-2, "tokenizer": tokenizer}
    whole = ascent.train(ROWS, model=fresh(), **settings, out=tmp_path / "whole")
    moved = fresh()
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "should_stop", stopping_after(1))
        assert ascent.train(ROWS, model=moved, **settings, out=tmp_path / "run").status == "interrupted"
    other = transformers.LlamaForCausalLM(config_of("Llama"))
    with pytest.raises(ConfigError, match="model is not the one of this run"):
        ascent.resume(tmp_path / "run", Display(), model=other, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        ascent.resume(tmp_path / "run", Display(), model=moved)
    run = ascent.resume(tmp_path / "run", Display(), model=moved, tokenizer=tokenizer)
    assert not differing(run.folder, bits(whole.folder)), "the reference is again the model of the first step"
    now, trained = dict(moved.named_parameters()), run.policy.model.state_dict()
    assert all(p.equal(trained[name]) for name, p in now.items()), "the object has the weights of the last step"
    assert json.loads((run.folder / "config.json").read_text())["policy"]["model"] == "run:model"


@pytest.mark.parametrize(
    ("kind", "targets"), [("Llama", "q_proj v_proj"), ("GPT2", "c_attn"), ("Bloom", "query_key_value")]
)
def test_a_peft_config_without_targets_adapts_what_peft_does(kind: str, targets: str) -> None:
    import peft
    import transformers

    from tests.language import tiny_tokenizer

    made = transformers.AutoModelForCausalLM.from_config
    policy = configure(
        ROWS,
        {"peft_config": peft.LoraConfig(r=2), "model": made(config_of(kind)), "tokenizer": tiny_tokenizer()}
        | {"reward": here(lambda response: 0)},
    ).policy
    ours = {name for name, _ in policy.load().model.named_parameters() if "lora_A" in name}
    plain = peft.get_peft_model(made(config_of(kind)), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    theirs = {name.removeprefix("base_model.model.") for name, _ in plain.named_parameters() if "lora_A" in name}
    assert ours == theirs and {name.split(".lora_A")[0].split(".")[-1] for name in ours} == set(targets.split())


def test_an_architecture_that_peft_does_not_know_is_refused_with_what_to_set() -> None:
    import peft
    import transformers

    from tests.language import tiny_tokenizer

    model = transformers.LlamaForCausalLM(config_of("Llama"))
    model.config.model_type = "brand-new"
    given = {"peft_config": peft.LoraConfig(r=2), "model": model, "tokenizer": tiny_tokenizer()}
    with pytest.raises(ConfigError, match=r"peft has no default for brand-new\. Set all-linear"):
        configure(ROWS, given | {"reward": here(lambda response: 0)}).policy.load()


# ---- rare values, signatures and errors ---------------------------------------------------------------------


HELD = """
import functools
import numpy as np

class Scale:
    def __init__(self, by):
        self.by = by

    def apply(self, response):
        return self.by * len(response)

def plus(a, response):
    return a + len(response)

def times(a, response):
    return a * len(response)

def make(held):
    return lambda response: held
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.5", "0.25"),
        ("b'ab'", "b'ac'"),
        ("1j", "2j"),
        ("functools.partial(plus, 1)", "functools.partial(plus, 2)"),
        ("functools.partial(plus, 1)", "functools.partial(times, 1)"),
        ("functools.partial(plus, a=1)", "functools.partial(plus, a=2)"),
        ("Scale(2).apply", "Scale(3).apply"),
        ("np.arange(3)", "np.array([0, 1, 3])"),
        ("np.arange(4)", "np.arange(4).reshape(2, 2)"),
        ("np.zeros(2, np.int32)", "np.zeros(2, np.float32)"),
    ],
)
def test_the_hash_of_an_object_follows_the_values_that_it_holds(one: str, other: str) -> None:
    space = cell(HELD)
    hashes = [python_objects.describe_object(space["make"](eval(value, space)))["hash"] for value in (one, one, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_marked_reward_is_still_the_function() -> None:
    marked = ascent.batch(in_process=True)(lambda responses, scale=2: [scale * len(r) for r in responses])
    assert (marked.batch, marked.in_process) == (True, True)
    assert marked(["a", "bb"]) == [2, 4] and marked(["a"], scale=5) == [5]
    assert ascent.batch(in_process=False)(len).in_process is False


@pytest.mark.parametrize("function", [max, type("F", (), {"__call__": 3})()])
def test_a_signature_that_cannot_be_read(function: Any) -> None:
    with pytest.raises(
        RewardCallError, match=r"its signature cannot be read: wrap it in a function, f\(prompt, response"
    ):
        parse_reward_signature(function)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ((1.0, "a", "b"), "returned a tuple of 3: a reward returns one number"),
        ([1.0, "a"], "returned a list of 2: a reward returns one number"),
        ("1", "returned str: a reward returns one number"),
        (float("nan"), "returned nan: a reward is a finite number"),
        (float("-inf"), "returned -inf: a reward is a finite number"),
        (1e39, "returned 1e+39: a reward is a finite number"),
    ],
)
def test_what_is_no_reward_says_what_it_is(returned: Any, why: str) -> None:
    with pytest.raises(RewardCallError) as error:
        compute_rewards(parse_reward_signature(lambda response: returned), jobs(1), None, 1.0)
    assert str(error.value).startswith(why)


def test_the_largest_reward_and_one_with_a_reason() -> None:
    assert values(lambda response: -3e38, jobs(1)) == [-3e38]
    assert compute_rewards(parse_reward_signature(lambda response: (1, "w" * 400)), jobs(1), None, 1.0) == [
        {"value": 1.0, "reason": "w" * 300}
    ]


def test_an_error_whose_words_are_broken() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    assert describe_error(MuteError()) == "MuteError, and KeyError in its message"


def test_an_error_in_this_process_is_that_of_every_response() -> None:
    def fail(responses: list[str]) -> list[float]:
        raise ValueError(f"not for {len(responses)}")

    outcomes = InProcess(parse_reward_signature(ascent.batch(fail)), 1.0)(jobs(3))
    assert len(outcomes) == 3
    assert all(
        re.fullmatch(r"ValueError: not for 3 \(test_python_objects.py, line \d+\)", o.error or "") for o in outcomes
    )


def test_a_stream_without_rows_to_train_on_or_to_test_on() -> None:
    reader = StreamReader(RestartableRows(numbers(0)), lambda row, _: ascent.Problem(row["prompt"]), lambda p: False)
    with pytest.raises(ConfigError, match="rows: the stream has no training row"):
        reader[0]
    few = next(i for i in range(9) if not is_held_out(f"number {i}"))

    def one() -> Iterator[dict[str, Any]]:
        yield {"prompt": f"number {few}"}

    with pytest.raises(ConfigError, match=r"none of the first rows of the stream is held out\. Pass held-out rows"):
        configure(one, {"reward": here(lambda response: 1)}).task.verify()


def test_a_stream_with_held_out_rows_of_its_own() -> None:
    task = configure(numbers(9), {"reward": here(lambda response: 1), "eval": ROWS[:3]}).task
    task.verify()
    assert [p.prompt for p in task.test(2)] == [row["prompt"] for row in ROWS[:2]] and len(task.test(9)) == 3
    assert task.data_notes() == []
    assert [task.train(i).prompt for i in range(9)] == [f"number {i}" for i in range(9)]
