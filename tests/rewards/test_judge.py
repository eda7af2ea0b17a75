"""A judge behind an address that misbehaves: a verdict or a typed error, never a number made up; nothing paid twice."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, Reply, serving

from ascent.core.errors import ConfigError, RunError
from ascent.rewards.judge.judge_client import (
    AnswerCache,
    JudgeClient,
    JudgeParseError,
    JudgeTimeoutError,
    largest_reply,
    request_key,
)
from ascent.rewards.judge.judge_rewards import JudgeScore, Preference, compare_responses, score_responses
from ascent.rewards.judge.judge_settings import PAIR_LINE, SCORE_LINE, Judge, read_judge
from ascent.rewards.judge.pattern_search import PatternSearcher

QUICK: dict[str, Any] = {"model": "tester", "backoff": 0.01, "timeout": 0.3, "deadline": 5.0, "retries": 3}
SECRET = "sk-very-secret-4711"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def client_of(server: FakeJudge, cache: Path, **more: Any) -> JudgeClient:
    return JudgeClient(Judge(**{**QUICK, "url": server.url, "cache": str(cache), **more}))


def scores(server: FakeJudge, cache: Path, responses: list[str], **more: Any) -> list[Any]:
    return score_responses(client_of(server, cache, **more), [("2 + 2 =", response, "4") for response in responses])


def test_a_score_becomes_a_reward_from_0_to_1(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving(lambda *_: Reply("Rather good.\n**Score:** 7/10")) as server:
        more = {"key_env": "JUDGE_KEY", "criteria": "wit", "options": '{"seed": 3, "max_tokens": null}'}
        found = scores(server, cache, ["4 {prompt}"], **more)
    assert found == [JudgeScore((7 - 1) / (10 - 1), "Rather good. **Score:** 7/10")]
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["seed"], "max_tokens" in body) == ("tester", 0.0, 3, False)
    asked = body["messages"][0]["content"]
    assert "2 + 2 =" in asked and "wit" in asked and "4 {prompt}" in asked, "what a text holds in braces stays"


def test_without_a_key_none_is_sent(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(lambda *_: Reply()) as server:
        assert isinstance(scores(server, cache, ["4"])[0], JudgeScore)
    assert "Authorization" not in server.headers[0]


# ---- trouble that passes ----------------------------------------------------------------------------

RETRIED_STATUSES: dict[str, Callable[[], Reply]] = {
    "slow": lambda: Reply(delay=0.6),
    "a byte now and then": lambda: Reply(trickle=0.05),
    "malformed JSON": lambda: Reply(raw=b'{"choices": [{"mess'),
    "no chat": lambda: Reply(raw=b'{"choices": []}'),
    "not even text": lambda: Reply(raw=b"\xff\xfe\x00"),
    "429": lambda: Reply(status=429, headers={"Retry-After": "0.05"}),
    "429 until a date": lambda: Reply(status=429, headers={"Retry-After": formatdate(time.time() - 5, usegmt=True)}),
    "429 with nonsense": lambda: Reply(status=429, headers={"Retry-After": "soon"}),
    "500": lambda: Reply(status=500, raw=b"<html>oops</html>"),
    "503": lambda: Reply(status=503),
    "a dropped connection": lambda: Reply(drop=True),
}


@pytest.mark.parametrize("trouble", RETRIED_STATUSES)
def test_what_passes_is_waited_out(trouble: str, cache: Path) -> None:
    with serving(lambda _, number: RETRIED_STATUSES[trouble]() if number == 0 else Reply("Score: 10")) as server:
        client = client_of(server, cache)
        assert score_responses(client, [("p", "r", None)])[0].value == 1.0  # type: ignore[union-attr]
    assert (client.usage.retried, client.usage.asked, server.count) == (1, 1, 2)


LAST_WORDS = {
    "slow": "no answer within 0.1 s",
    "malformed JSON": "not a chat completion",
    "429": "429: ",
    "500": "500: <html>oops</html>",
    "a dropped connection": "RemoteProtocolError",
}


@pytest.mark.parametrize("trouble", LAST_WORDS)
def test_what_does_not_pass_is_an_error_and_no_number(trouble: str, cache: Path) -> None:
    with serving(lambda *_: RETRIED_STATUSES[trouble]()) as server:
        patience = 0.1 if trouble == "slow" else 5  # a busy machine is slow too
        found = scores(server, cache, ["r"], retries=2, timeout=patience)[0]
    assert isinstance(found, JudgeTimeoutError)
    assert "after 3 tries" in str(found) and LAST_WORDS[trouble] in str(found)
    assert server.count == 3


def test_nobody_there(cache: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = JudgeClient(Judge(**QUICK, url=f"http://127.0.0.1:{port}/v1", cache=str(cache)))
    found = score_responses(client, [("p", "r", None)])[0]
    assert isinstance(found, JudgeTimeoutError) and "ConnectError" in str(found)


def test_after_many_silences_the_rest_is_not_waited_for(cache: Path) -> None:
    with serving(lambda *_: Reply(status=500)) as server:
        found = scores(server, cache, [str(i) for i in range(40)], retries=0, concurrency=4)
    assert all(isinstance(error, JudgeTimeoutError) for error in found)
    assert server.count <= 8 + 4
    assert "not asked" in str(found[-1])


def test_the_deadline_is_over_all_tries(cache: Path) -> None:
    with serving(lambda *_: Reply(delay=0.5)) as server:
        found = scores(server, cache, ["r"], timeout=0.2, deadline=0.5, retries=50, backoff=0.05)[0]
    assert isinstance(found, JudgeTimeoutError) and "deadline" in str(found)
    assert server.count <= 3, "a try takes 0.2 s"


def test_a_wait_beyond_the_deadline_is_not_begun(cache: Path) -> None:
    with serving(lambda *_: Reply(status=429, headers={"Retry-After": "3600"})) as server:
        assert isinstance(scores(server, cache, ["r"])[0], JudgeTimeoutError)  # and not in an hour
    assert server.count == 1


@pytest.mark.long
@pytest.mark.parametrize("header", ["0.4", "date"])
def test_retry_after_is_heeded(header: str, cache: Path) -> None:
    """A date has whole seconds: two ahead is at least one."""
    when = header if header != "date" else formatdate(time.time() + 2, usegmt=True)
    least = 0.4 if header != "date" else 0.9
    busy = Reply(status=429, headers={"Retry-After": when})
    with serving(lambda _, number: busy if number == 0 else Reply()) as server:
        begin = time.monotonic()
        assert isinstance(scores(server, cache, ["r"])[0], JudgeScore)
        assert time.monotonic() - begin >= least


# ---- trouble that does not ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_ends_everything(status: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    said = json.dumps({"error": {"message": f"Incorrect API key provided: {SECRET}"}}).encode()
    with serving(lambda *_: Reply(status=status, raw=said)) as server, pytest.raises(RunError) as raised:
        scores(server, cache, [str(i) for i in range(20)], concurrency=1)
    assert server.count == 1
    assert str(status) in str(raised.value) and SECRET not in str(raised.value)


def test_a_refused_text_is_the_end_of_that_question_alone(cache: Path) -> None:
    too_long = Reply(status=400, raw=b'{"error": {"message": "too many tokens"}}')
    with serving(lambda prompt, _: too_long if "LONG" in prompt else Reply()) as server:
        long, short = scores(server, cache, ["LONG", "short"])
    assert isinstance(long, JudgeTimeoutError) and "too many tokens" in str(long)
    assert isinstance(short, JudgeScore)
    assert server.count == 2


# ---- answers without a verdict ------------------------------------------------------------------------


def test_an_answer_without_a_verdict_is_asked_for_anew_and_kept(cache: Path) -> None:
    words = ["I would rather not say.", "Score: 4"]
    with serving(lambda _, number: Reply(words[number])) as server:
        assert scores(server, cache, ["r"])[0].value == pytest.approx(1 / 3)
        assert scores(server, cache, ["r"])[0].value == pytest.approx(1 / 3), "and then from disk"
    assert server.count == 2


BAD = {
    "no words about it": "the answer has no score",
    "": "the answer is empty",
    "Score: 11": "its score is 11",
    "Score: 0": "its score is 0",
    "Score: seven": "the answer has no score",
    "Score (1-10): 8": "the answer has no score",
    "Score: 3 or 4": "the answer has no score",
    "<think>\nScore: 9\n</think>\nhm": "the answer has no score",
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_read_is_a_typed_error_with_the_raw_text(words: str, cache: Path) -> None:
    with serving(lambda *_: Reply(words)) as server:
        found = scores(server, cache, ["r"], again=2)[0]
        assert isinstance(found, JudgeParseError)
        assert found.raw == words and BAD[words] in str(found)
        assert server.count == 3
        assert isinstance(scores(server, cache, ["r"], again=2)[0], JudgeParseError)
    assert server.count == 3, "a bad answer was paid for too, and is not paid for again"


def test_a_null_answer_that_was_cut_off_says_so(cache: Path) -> None:
    with serving(lambda *_: Reply(None, finish="length")) as server:
        found = scores(server, cache, ["r"], again=0)[0]
    assert isinstance(found, JudgeParseError) and "raise --max-tokens" in str(found)


@pytest.mark.parametrize(
    "words",
    [
        "<think>maybe\nVerdict: A\nbut hmm",
        "<think>maybe\nVerdict: A",
        "</think><think>Hm.\nVerdict: A",
        "Verdict: A\nbut hmm",
        "Verdict: A\n\n---",
        "Verdict: A",
        "Verdict: A.",
    ],
)
def test_a_verdict_before_the_end_of_an_answer_that_was_cut_off_is_none(words: str, cache: Path) -> None:
    with serving(lambda *_: Reply(words, finish="length")) as server:
        found = compare_responses(client_of(server, cache, again=0), [("p", "x", "y", None)])[0]
    assert isinstance(found, JudgeParseError) and "cut off before its verdict" in str(found) and found.raw == words


@pytest.mark.parametrize("words", ["Score: 1", "Good.\nScore: 1", "Score: 1.", "**Score:** 1", "Score: 1/1", "1"])
def test_a_score_that_may_be_cut_off_is_no_verdict(words: str, cache: Path) -> None:
    """Score: 1 is what is left of Score: 10; with a pattern of your own too. Its line has to be closed."""
    more = {"again": 0, "score_pattern": r"(\d+)"} if words == "1" else {"again": 0}
    with serving(lambda *_: Reply(words, finish="length")) as server:
        cut = scores(server, cache, ["r"], **more)[0]
    assert isinstance(cut, JudgeParseError) and "cut off before its score" in str(cut)
    assert "raise --max-tokens" in str(cut) and cut.raw == words
    with serving(lambda prompt, _: Reply(f"{words}\n" if "closed" in prompt else words, finish="length")) as server:
        assert isinstance(scores(server, cache, ["closed"], **more)[0], JudgeScore)
    with serving(lambda *_: Reply(words, finish="stop")) as server:
        assert isinstance(scores(server, cache, ["whole"], **more)[0], JudgeScore)


@pytest.mark.parametrize("pattern", [SCORE_LINE, PAIR_LINE], ids=["score", "pair"])
@pytest.mark.parametrize("part", ["\n", " \n", "- ", "score ", "score\n", "score:", "verdict:.", "**\n", "score:\n"])
def test_no_answer_of_a_judge_takes_long_to_read(pattern: str, part: str) -> None:
    started = time.thread_time()
    assert not list(re.finditer(pattern, part * 16_000 + "x")) and not list(
        re.finditer(pattern, "score:" + ":" * 16_000)
    )
    assert time.thread_time() - started < 1


# ---- answers that attack ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [SCORE_LINE, PAIR_LINE], ids=["score", "pair"])
def test_the_longest_answer_is_read_at_once(pattern: str) -> None:
    """Digits, signs and spaces after forty colons: each was tried again for every colon."""
    n = largest_reply({"max_tokens": 1024})
    started = time.thread_time()
    for tail in ("1" * n, "1 " + " " * n, "1/" + " " * n, "1/" + "1" * n, "1." + "1" * n, "a" + "-" * n):
        assert not list(re.finditer(pattern, f"score:{':-' * 20}{tail}x\nverdict:{':-' * 20}{tail}x"))
    assert time.thread_time() - started < 0.5


def test_forty_thousand_newlines_stay_inside_the_deadline(cache: Path) -> None:
    with serving(lambda *_: Reply("\n" * 40_000)) as server:
        started = time.process_time()
        found = scores(server, cache, ["r"], again=0)[0]
    assert isinstance(found, JudgeParseError) and time.process_time() - started < 2


@pytest.mark.long
def test_a_pattern_of_your_own_ends_in_time(cache: Path) -> None:
    """It would take longer than the universe has existed. Its answer has no verdict; the others have theirs."""
    slow = {"score_pattern": r"^((?:\d+)+)$", "again": 0, "timeout": 5.0, "deadline": 0.4, "concurrency": 2}
    with serving(lambda prompt, _: Reply("1" * 60 + "x" if "BAD" in prompt else "7")) as server:
        for _ in range(2):  # from the judge, then from the cache
            bad, good = scores(server, cache, ["BAD", "good"], **slow)
            assert isinstance(bad, JudgeParseError) and "more than 0." in str(bad) and "pattern" not in bad.raw
            assert isinstance(good, JudgeScore)
    assert server.count == 2


def test_a_search_that_was_ended_leaves_no_process_behind(cache: Path) -> None:
    searches = PatternSearcher()
    assert searches.last_match(r"(\d)", "é😀 1 2", time.monotonic() + 1) == ("2", 6)
    with pytest.raises(TimeoutError, match=r"more than 0\.05 s"):
        searches.last_match(r"^(\d+)+$", "1" * 60 + "x", time.monotonic() - 1)
    assert searches.last_match(r"(\d)?$", "x", time.monotonic() + 1) == ("", -1)
    processes = list(searches._idle)
    searches.close()
    assert [process.returncode for process in processes] == [-9]


@pytest.mark.parametrize("deep", ["[", '{"a":', '{"choices":[', '{"error":{"message":'])
@pytest.mark.parametrize("status", [200, 400, 500])
def test_deep_json_is_an_error_of_its_question_alone(deep: str, status: int, cache: Path) -> None:
    bad = Reply(status=status, raw=(deep * 5_000).encode())
    with serving(lambda prompt, _: bad if "BAD" in prompt else Reply()) as server:
        error, score = scores(server, cache, ["BAD", "good"], retries=0, timeout=5.0)
    assert isinstance(error, JudgeTimeoutError) and isinstance(score, JudgeScore)


def test_deep_json_in_the_usage_or_the_cache_does_no_harm(cache: Path) -> None:
    inner = "[" * 900 + "]" * 900
    choice = f'{{"message": {{"content": "Score: 5"}}, "finish_reason": {inner}}}'
    chat = f'{{"choices": [{choice}], "usage": {{"a": {inner}}}}}'
    cache.write_text("[" * 50_000 + '\n{"key": "k", "text": 5}\n[]\n')
    with serving(lambda *_: Reply(raw=chat.encode())) as server:
        assert isinstance(scores(server, cache, ["r"])[0], JudgeScore)
    assert AnswerCache(cache).get("k") is None and json.loads(cache.read_text().splitlines()[-1])["usage"] == {}


def test_a_reply_has_a_limit_that_holds_while_it_is_read(cache: Path) -> None:
    with serving(lambda *_: Reply(raw=b" " * 50_000, endless=True)) as server:
        found = scores(server, cache, ["r"], retries=0, max_tokens=10, timeout=5.0)[0]
    assert isinstance(found, JudgeTimeoutError) and "a reply of more than 65,856 bytes" in str(found)
    assert server.sent < 20_000_000, "what is in the buffers of two sockets"


def test_the_limit_of_a_reply_follows_the_tokens_that_were_allowed(cache: Path) -> None:
    """Thoughts count, wherever they are: in the text or beside it."""
    assert largest_reply({"max_tokens": 1024}) == 65_536 + 32 * 1024
    assert largest_reply({"max_tokens": 5, "max_completion_tokens": 4096}) == 65_536 + 32 * 4096
    assert largest_reply({}) == largest_reply({"max_tokens": 10**9}) == 65_536 + (1 << 22)
    message = {"content": "Score: 5", "reasoning_content": "x" * 70_000}
    chat = json.dumps({"choices": [{"message": message}]}).encode()
    with serving(lambda *_: Reply(raw=chat)) as server:
        few, many = (scores(server, cache, ["r"], retries=0, max_tokens=n)[0] for n in (100, 1000))
    assert isinstance(few, JudgeTimeoutError) and isinstance(many, JudgeScore)


def test_a_compressed_reply_is_not_unpacked(cache: Path) -> None:
    """Sixty kilobytes of it would become as many megabytes at once."""
    bomb = gzip.compress(b" " * (1 << 22))
    with serving(lambda *_: Reply(raw=bomb, headers={"Content-Encoding": "gzip"})) as server:
        found = scores(server, cache, ["r"], retries=0)[0]
    assert isinstance(found, JudgeTimeoutError) and "compressed" in str(found)
    assert server.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "usage", [{"total_tokens": 10**4000}, {"total_tokens": True}, {"total_tokens": -5}, [], "many"]
)
def test_an_odd_usage_counts_nothing(usage: Any, cache: Path) -> None:
    chat = json.dumps({"choices": [{"message": {"content": "Score: 5"}}], "usage": usage}).encode()
    with serving(lambda *_: Reply(raw=chat)) as server:
        client = client_of(server, cache)
        assert isinstance(score_responses(client, [("p", "r", None)])[0], JudgeScore)
    assert client.usage.tokens == 0 and client.usage.summary()


@pytest.mark.parametrize("when", ["nan", "-inf", f"Mon, 01 Jan {10**20} 00:00:00 -0000"])
def test_an_odd_retry_after_is_none(when: str, cache: Path) -> None:
    busy = Reply(status=429, headers={"Retry-After": when})
    with serving(lambda _, number: busy if number == 0 else Reply()) as server:
        assert isinstance(scores(server, cache, ["r"], deadline=1e9)[0], JudgeScore)


@pytest.mark.parametrize("words", ["Verdict: A\n", "<think>B?</think>Hm.\n**Verdict:** A.\n \n"])
def test_a_verdict_at_the_end_of_an_answer_that_was_cut_off_counts(words: str, cache: Path) -> None:
    with serving(lambda *_: Reply(words, finish="length")) as server:
        assert compare_responses(client_of(server, cache), [("p", "x", "y", None)]) == [Preference(None, ("A", "A"))]


def test_thoughts_are_not_verdicts_and_the_last_line_counts(cache: Path) -> None:
    with serving(lambda *_: Reply("<think>Score: 2</think>Score: 3\nno:\nScore: 10")) as server:
        assert scores(server, cache, ["r"])[0].value == 1.0


# ---- the cache ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_equal_questions_are_asked_once_and_others_are_not_equal(cache: Path) -> None:
    with serving(lambda *_: Reply(delay=0.02)) as server:
        scores(server, cache, ["same"] * 12)
        assert server.count == 1
        changes: list[dict[str, Any]] = [
            {"model": "other"},
            {"temperature": 0.5},
            {"max_tokens": 7},
            {"system": "Be kind."},
            {"criteria": "wit"},
            {"low": 0.0},
            {"options": '{"seed": 1}'},
            {"score_prompt": "{prompt} {response}"},
        ]
        for number, change in enumerate(changes, 2):
            scores(server, cache, ["same"], **change)
            assert server.count == number, change
        for same in ({"timeout": 0.2}, {"score_pattern": r"Score: (\d)"}, {"retries": 1}, {"key_env": "NONE"}, {}):
            scores(server, cache, ["same"], **same)
        assert server.count == len(changes) + 1
        scores(server, cache, ["another"])
    assert server.count == len(changes) + 2


def test_the_cache_outlives_a_crash_in_the_middle_of_a_line(cache: Path) -> None:
    first = AnswerCache(cache)
    first.put("one", {"text": "Score: 1"})
    first.put("two", {"text": "Score: 2"})
    whole = cache.read_bytes()
    cache.write_bytes(whole[:-9])  # the second line is torn
    again = AnswerCache(cache)
    assert again.get("one") == {"text": "Score: 1"}
    assert again.get("two") is None
    again.put("three", {"text": "Score: 3 \ud800"})
    last = AnswerCache(cache)
    assert [last.get(key) is not None for key in ("one", "two", "three")] == [True, False, True]
    assert last.get("three") == {"text": "Score: 3 \ud800"}


def test_a_cache_that_is_no_regular_file_is_refused(cache: Path) -> None:
    """Opening a pipe would wait for whoever writes into it."""
    os.mkfifo(cache)
    for path in (cache, cache.parent):
        with pytest.raises(ConfigError, match="not a regular file"):
            AnswerCache(path)


def test_two_processes_share_a_cache(cache: Path) -> None:
    one, other = AnswerCache(cache), AnswerCache(cache)
    assert one.get("k") is None
    other.put("k", {"text": "x"})
    assert one.get("k") == {"text": "x"}
    other.put("l", {"text": "y"})
    assert one.get("l") == {"text": "y"}

    def write(answers: AnswerCache, name: str) -> None:
        for i in range(50):
            answers.put(f"{name}{i}", {"text": "y" * 500})

    threads = [threading.Thread(target=write, args=pair) for pair in ((one, "a"), (other, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = AnswerCache(cache)
    assert all(fresh.get(f"{name}{i}") for name in "ab" for i in range(50))


def test_a_full_disk_stops_before_more_is_paid_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with serving(lambda *_: Reply(delay=0.02)) as server:
        client = client_of(server, cache, concurrency=1)
        monkeypatch.setattr("ascent.rewards.judge.judge_client.os.fsync", full)
        with pytest.raises(RunError, match="No space left"):
            score_responses(client, [("p", str(i), None) for i in range(9)])
    assert server.count <= 2


def test_no_key_on_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with serving(lambda *_: Reply(f"You sent {SECRET}.\nScore: 5")) as server:
        assert SECRET not in scores(server, cache, ["r"])[0].reason
    assert SECRET not in cache.read_text()


def test_a_dummy_key_changes_no_answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of 0, as local servers are given: 10 stays 10, in the reward and on disk."""
    monkeypatch.setenv("OPENAI_API_KEY", "0")
    with serving(lambda *_: Reply("Fine.\nScore: 10")) as server:
        assert scores(server, cache, ["r"])[0] == JudgeScore(1.0, "Fine. Score: 10")
    assert json.loads(cache.read_text())["text"] == "Fine.\nScore: 10"


def test_no_key_in_what_is_parsed_nor_half_of_one_in_errors(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in SECRET)
    chat = f'{{"choices": [{{"message": {{"content": "{escaped}\\nScore: 5"}}}}], "usage": {{"by": "{SECRET}"}}}}'
    with serving(lambda *_: Reply(raw=chat.encode())) as server:
        assert SECRET not in scores(server, cache, ["r"])[0].reason
    assert SECRET not in cache.read_text()
    for status, room in ((400, 300), (200, 120)):
        words = "x" * (room - 5) + SECRET  # it would be cut in the middle of the key
        with serving(lambda *_, s=status, w=words: Reply(status=s, raw=w.encode())) as server:  # type: ignore[misc]
            assert SECRET[:5] not in str(scores(server, cache, [f"{status}"], retries=0)[0])


def test_no_key_in_the_names_of_a_usage_nor_half_of_one_anywhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    half, escaped = SECRET[:12], "".join(f"\\u{ord(letter):04x}" for letter in SECRET)
    choice = {"message": {"content": f"{SECRET[4:]} {SECRET}.\nScore: 5\n{half}"}, "finish_reason": SECRET}
    chat = {"choices": [choice], "usage": {SECRET: 3, "total_tokens": 3, half: {half: 1}}}
    with serving(lambda *_: Reply(raw=json.dumps(chat).encode())) as server:
        reason = scores(server, cache, ["r"], score_pattern=r"Score: (\d)")[0].reason
    assert reason == "*** ***. Score: 5 ***"
    assert json.loads(cache.read_text())["usage"] == {"total_tokens": 3}
    assert not any(SECRET[i : i + 8] in cache.read_text() for i in range(len(SECRET) - 7))
    for status in (200, 400):
        for raw in (
            f'{{"error": "{half}',
            f'{{"x": "{escaped}"}}',
            f'{{"error": {{"message": {{"{SECRET}": "{escaped}"}}}}}}',
        ):
            with serving(lambda *_, s=status, r=raw: Reply(status=s, raw=r.encode())) as server:  # type: ignore[misc]
                error = str(scores(server, cache, [f"{status} {raw}"], retries=0)[0])
            assert "***" in error and half not in error and "\\u0073" not in error


@pytest.mark.parametrize("host", ["10.1.2.3", "judge.local", "localhost.example.org", "[fe80::1]", "0.0.0.0", "127.1"])
def test_a_key_does_not_go_to_another_machine_over_plain_http(
    host: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    judge = Judge(url=f"http://{host}:8000/v1", model="m", cache=str(cache))
    with pytest.raises(ConfigError, match="plain http") as raised:
        JudgeClient(judge)
    assert SECRET not in str(raised.value) and "insecure = true" in str(raised.value)
    for allowed in ({"insecure": True}, {"key_env": "NO_SUCH_KEY"}, {"url": f"https://{host}:8000/v1"}):
        replace(judge, **allowed).validated()  # type: ignore[arg-type]
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    judge.validated()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "[::1]"])
def test_a_key_goes_to_this_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert not Judge(url=f"http://{host}:8000/v1", model="m").validated().exposed


def test_answers_to_an_exposed_key_say_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setattr(Judge, "local", False)
    with serving(lambda *_: Reply()) as server:
        assert isinstance(scores(server, cache, ["r"], insecure=True)[0], JudgeScore)
    assert json.loads(cache.read_text())["insecure"] is True


def test_a_proxy_is_not_sent_the_key_of_a_local_judge(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(lambda *_: Reply("Score: 1")) as proxy, serving(lambda *_: Reply("Score: 10")) as server:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert scores(server, cache, ["r"])[0].value == 1.0
    assert proxy.count == 0


def test_a_key_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-€uro-secret")
    with pytest.raises(ConfigError, match="characters that cannot be part of a key"):
        Judge(url="http://localhost:1/v1", model="m").validated()


def test_the_key_of_an_answer_is_that_of_its_whole_request() -> None:
    judge = Judge(url="http://localhost:1/v1", model="m")
    keys = {
        request_key(judge.body(judge.messages("{prompt}", prompt=p)), again) for p in ("a", "b") for again in (0, 1)
    }
    assert len(keys) == 4
    moved = replace(judge, url="http://localhost:2/v1")
    assert request_key(moved.body([]), 0) == request_key(judge.body([]), 0), "a model that moved is the same model"


# ---- how many at once, and from where -------------------------------------------------------------------


def test_no_more_at_once_than_was_allowed(cache: Path) -> None:
    with serving(lambda *_: Reply(delay=0.03)) as server:
        found = scores(server, cache, [str(i) for i in range(20)], concurrency=3)
    assert all(isinstance(s, JudgeScore) for s in found)
    assert server.peak == 3


def test_a_judge_can_be_asked_where_a_loop_is_running(cache: Path) -> None:
    """A notebook."""

    async def cell() -> list[Any]:
        return scores(server, cache, ["r"])

    with serving(lambda *_: Reply()) as server:
        assert isinstance(asyncio.run(cell())[0], JudgeScore)


# ---- pairs -----------------------------------------------------------------------------------------------


def longer(prompt: str, _: int) -> Reply:
    """Prefers the longer response, wherever it stands."""
    a = prompt.split("[Response A]\n")[1].split("\n\n[Response B]")[0]
    b = prompt.split("[Response B]\n")[1].split("\n\n[End")[0]
    better = "tie" if len(a) == len(b) else "A" if len(a) > len(b) else "B"
    return Reply(f"Hm.\nVerdict: {better}")


def test_both_orders_are_asked_and_have_to_agree(cache: Path) -> None:
    asked = [("p", "short", "much longer", None), ("p", "long one", "s", None)]
    with serving(longer) as server:
        assert compare_responses(client_of(server, cache), asked) == [
            Preference(1, ("B", "A")),
            Preference(0, ("A", "B")),
        ]
    assert server.count == 4
    with serving(lambda *_: Reply("Verdict: A")) as server:  # likes whatever stands first
        biased = compare_responses(client_of(server, cache, model="biased"), asked)
    assert biased == [Preference(None, ("A", "A"))] * 2
    with serving(lambda _, number: Reply(["Verdict: A", "Verdict: tie"][number % 2])) as server:
        undecided = compare_responses(client_of(server, cache, model="undecided", concurrency=1), asked)
    assert undecided == [Preference(None, ("A", "tie"))] * 2


def test_one_order_without_a_verdict_is_no_verdict(cache: Path) -> None:
    with serving(lambda _, number: Reply("Verdict: A" if number == 0 else "both are fine")) as server:
        found = compare_responses(client_of(server, cache, concurrency=1), [("p", "x", "y", None)])
    assert isinstance(found[0], JudgeParseError) and found[0].raw == "both are fine"


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1/chat/completions"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1/chat/completions"),
        ("https://host/openai/v1", "https://host/openai/v1/chat/completions"),
        ("http://localhost:8000/v1/chat/completions", "http://localhost:8000/v1/chat/completions"),
        (
            "https://x/openai/deployments/d?api-version=1",
            "https://x/openai/deployments/d/chat/completions?api-version=1",
        ),
        ("http://x/v1/chat/completions/?a=/v1/&b=", "http://x/v1/chat/completions?a=/v1/&b="),
        ("http://localhost:8000?a=1", "http://localhost:8000/v1/chat/completions?a=1"),
    ],
)
def test_addresses(given: str, made: str) -> None:
    assert Judge(url=given).url == Judge(url=made).url == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "localhost:8000"}, "begins with http"),
        ({"url": f"https://me:{SECRET}@host/v1"}, "written down"),
        ({"url": "http://host:port/v1"}, "--url"),
        *(
            ({"url": f"https://host/v1?a=1&{name}={SECRET}"}, "environment variable")
            for name in ("key", "api_key", "API-Key", "apikey", "token", "access_token", "secret")
        ),
        ({"low": 3.0, "high": 3.0}, "low up to high"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"deadline": 0.0}, "--deadline is 0"),
        ({"options": "{"}, "not valid JSON"),
        ({"options": '{"messages": []}'}, "without messages"),
        ({"score_prompt": "{prompt}"}, "{response}"),
        ({"pair_prompt": "{first}"}, "{second}"),
        ({"score_pattern": "("}, "not a regular expression"),
        ({"pair_pattern": "(a)(b)"}, "2 groups"),
        ({"pair_pattern": "(" * 3000 + ")" * 3000}, "not a regular expression"),
        ({"options": "[" * 5000}, "not valid JSON"),
    ],
)
def test_what_cannot_be_a_judge_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Judge(**change)
    assert words in str(raised.value)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("url = true", "url is True"),
        ("modell = 'x'", "Did you mean model?"),
        ("api_key = 'x'", "does not belong in a file"),
        ("url = ", "cannot be read as TOML"),
        ("url = " + "[" * 5000, "cannot be read as TOML"),
    ],
)
def test_a_judges_file_is_checked(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "judge.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        read_judge(file)


def test_a_judges_file(tmp_path: Path) -> None:
    file = tmp_path / "judge.toml"
    file.write_text('url = "http://localhost:1/v1"\nmodel = "m"\nlow = 0\nsystem = "Be just."\n')
    judge = read_judge(file)
    assert (judge.low, judge.system, Path(judge.cache)) == (0.0, "Be just.", tmp_path / "judge.answers.jsonl")
    with pytest.raises(ConfigError, match="has no url"):
        Judge().validated()
    with pytest.raises(ConfigError, match="there is no such file"):
        read_judge(tmp_path / "none.toml")


# ---- rare answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["[1]", '{"text": "Score: 7"}', "7", "true"])
def test_content_that_is_no_text_is_no_chat_completion(content: str, cache: Path) -> None:
    raw = f'{{"choices": [{{"message": {{"content": {content}}}, "finish_reason": "stop"}}]}}'.encode()
    with serving(lambda *_: Reply(raw=raw)) as server:
        found = scores(server, cache, ["r"], retries=1)[0]
    assert isinstance(found, JudgeTimeoutError) and "the reply is not a chat completion" in str(found)
    assert server.count == 2


def test_a_pattern_of_your_own_may_find_what_is_no_verdict(cache: Path) -> None:
    with serving(lambda *_: Reply("I say: seven")) as server:
        found = scores(server, cache, ["r"], score_pattern=r"say: (\w+)", again=0)[0]
        assert isinstance(found, JudgeParseError) and found.raw == "I say: seven"
        assert "its score is 'seven', which is not a number" in str(found)
        client = client_of(server, cache, model="other", pair_pattern=r"say: (\w+)", again=0)
        (neither,) = compare_responses(client, [("p", "x", "y", None)])
    assert isinstance(neither, JudgeParseError)
    assert "its verdict is 'seven', and it has to be A, B or tie" in str(neither)


def test_a_client_that_was_stopped_asks_nothing(cache: Path) -> None:
    with serving(lambda *_: Reply()) as server:
        client = client_of(server, cache)
        client.stop = True
        with pytest.raises(KeyboardInterrupt):
            score_responses(client, [("p", "r", None)])
    assert server.count == 0


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"--cache .*file/answers.jsonl: cannot write there \((Not a directory|File exists)"
    ):
        AnswerCache(tmp_path / "file" / "answers.jsonl")


@pytest.mark.parametrize(("host", "why"), [("xn--", "Malformed A-label"), ("1.2.3.256", "Invalid IPv4 address")])
def test_an_address_that_no_request_can_have_is_refused(host: str, why: str, cache: Path) -> None:
    client = JudgeClient(Judge(**QUICK, url=f"http://{host}/v1", cache=str(cache)))
    with pytest.raises(ConfigError, match=f"--url http://{host}/v1/chat/completions: {why}"):
        score_responses(client, [("p", "r", None)])
