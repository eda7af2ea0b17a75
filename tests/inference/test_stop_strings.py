"""Where a response ends: stop strings, min_tokens and limits per prompt; the same for every runner."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ascent
from ascent.build.language_backend import LanguageBackend
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError
from ascent.core.groups import Overlong
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts, Rollouts
from ascent.inference.runners import decode_loop
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.inference.stop_strings import StopStrings
from ascent.ops.token_sampling import sample_tokens
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.settings import config_from, configure
from ascent.tasks.text import TextTask
from ascent.tasks.text.text_task import Problem
from tests.inference.test_cuda_graph_runner import same
from tests.language import END, VOCAB, AtOnce, model_of, prompts_of, rewarded, sampler_of, tiny_tokenizer, write_tiny
from tests.training.test_observations import language_logp

PIECES = [b"a", b"b", b"\n", b"", b"c", b"ab", b"ca", b"\n\n", b" b", b" ", b".", b"bc", b"\xc3", b"\xa9", b"\xa9b"]
PIECES += [b"\xe2\x82", b"\xac", b"\xaca", b"a\xe2", b"\x82", b"a.\n", b"d", b"ef", b"\xe2\x82\xac"]
PIECES += [bytes([c]) for c in b"fghijklmnopqr"]
"""The text of each token; the one without any is the end token."""
RUNNERS = [PagedRunner, EagerRunner, "graphs"]


@cache
def tokenizer_of(kind: str = "bytes") -> Any:
    """Byte-level BPE; tokens with a mark for a space and bytes where there is none; or words with spaces between."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        letters = sorted(ByteLevel.alphabet())
        order = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order += [b for b in range(256) if b not in order]
        printed = dict(zip(order, [*(chr(b) for b in order[:188]), *(chr(256 + i) for i in range(68))], strict=True))
        assert sorted(printed.values()) == letters
        names = ["".join(printed[b] for b in piece) or "<end>" for piece in PIECES]
        decoder: Any = decoders.ByteLevel()
    elif kind == "marks":
        names = ["▁a", "▁", "b", "<end>", "<0xC3>", "<0xA9>", "▁▁", "é", "<0x0A>", "a", ".", "▁b", "ab"]
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        decoder = decoders.Sequence(parts)
    else:
        names, decoder = ["a", "##b", "b", "<end>", "##a", "é", "c"], decoders.WordPiece(cleanup=False)
    assert len(set(names)) == len(names)
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=kind == "words"
    )


def first_end(tokenizer: Any, strings: tuple[str, ...], tokens: list[int]) -> int:
    """The definition: the length of the shortest prefix that contains a stop string or ends with its special token."""
    texts = (tokenizer.decode(tokens[: k + 1], skip_special_tokens=True) for k in range(len(tokens)))
    named = [token for token in tokenizer.all_special_ids if tokenizer.decode([token]) in strings]
    return next((k + 1 for k, text in enumerate(texts) if tokens[k] in named or any(s in text for s in strings)), 0)


# ---- the strings ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bytes", "marks", "words"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_string_is_complete_at_the_first_token_whose_text_has_it(kind: str, data: st.DataObject) -> None:
    """Whatever tokens it is spread over, and wherever in them it begins and ends."""
    tokenizer = tokenizer_of(kind)
    one = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    run = st.integers(1, 9).map([4, 5].__mul__)
    tokens = [token for part in data.draw(st.lists(one | run, min_size=1, max_size=25)) for token in part]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    cuts = [data.draw(st.integers(0, len(text))) for _ in range(4)]
    found = (text[min(pair) : max(pair)] for pair in (cuts[:2], cuts[2:]))
    strings = tuple(
        s for s in (*found, "é.", "<end>"[data.draw(st.integers(0, 9)) :]) if s and "\N{REPLACEMENT CHARACTER}" not in s
    )
    assert StopStrings(strings, tokenizer, len(tokenizer)).end(tokens) == first_end(tokenizer, strings, tokens)


@pytest.mark.parametrize(
    ("string", "pieces", "length"),
    [
        ("b\n\nc", [b"ab", b"\n", b"\n", b"ca", b"a"], 4),  # begins and ends inside tokens
        ("\n", [b"a", b"a.\n", b"b"], 2),
        ("é", [b"a", b"\xc3", b"\xa9b", b"a"], 3),  # its bytes are in two tokens, and more is in the second
        ("€", [b"a\xe2", b"\x82", b"\xaca"], 3),
        ("a", [b"\xc3", b"a\xe2"], 2),  # complete, though another character has only begun
        ("<end>", [b"a", b"", b"b"], 2),  # a special token by its name
        ("n", [b"a", b"", b"n"], 3),  # whose letters are no text
        ("zz", [b"a", b"b"], 0),
        ("ab" * 30, [b"ab"] * 31, 30),
    ],
)
def test_where_a_string_ends(string: str, pieces: list[bytes], length: int) -> None:
    tokens = [PIECES.index(piece) for piece in pieces]
    assert StopStrings((string, "zzz"), tokenizer_of(), VOCAB).end(tokens) == length


def test_only_what_a_token_completes_counts() -> None:
    """A string that was complete before `start` is not found again behind it; one that begins there is."""
    stops = StopStrings(("ab",), tokenizer_of(), VOCAB)
    tokens = [PIECES.index(piece) for piece in (b"ab", b"c", b"a", b"b", b"ab")]
    assert [stops.end(tokens, start) for start in range(5)] == [1, 4, 4, 4, 5]


def test_a_long_run_of_bytes_is_decoded_as_a_whole() -> None:
    """Its bytes decode together or not at all, depending on tokens far before the last one."""
    tokenizer = tokenizer_of("marks")
    for first, end in (([0], 82), ([0, 4], 0)):  # the second has a byte too many
        tokens = [*first, *[4, 5] * 40, 10]
        assert (
            StopStrings(("é.",), tokenizer, len(tokenizer)).end(tokens) == first_end(tokenizer, ("é.",), tokens) == end
        )


# ---- the runners ---------------------------------------------------------------------------------------------


@cache
def one_model(soon: bool = False) -> Any:
    """`soon`: its end token is likely."""
    lm = model_of()
    with torch.no_grad():
        lm.model.get_output_embeddings().weight[END] *= 3 if soon else 1
    return lm


def drawn_by(decoder: Any, limits: list[int] | None = None, observe: Any = None, **more: Any) -> Rollouts:
    lm = more.pop("lm", None) or one_model()
    greedy, strings = more.pop("greedy", False), more.pop("stop", ())
    stops = StopStrings(strings, tokenizer_of(), VOCAB) if strings else None
    sampler = sampler_of(lm, rows=5, stops=stops, **{"limit": 24, **more})
    sampler.runner = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder
    play = None if observe is None else AtOnce(observe)
    prompts = replace(
        Prompts.of(prompts_of()), limits=None if limits is None else torch.tensor(limits), start_episodes=play
    )
    return sampler.generate(prompts, 4, greedy)


def truncate(rollouts: Rollouts, lengths: torch.Tensor, ended: torch.Tensor) -> Rollouts:
    """The first tokens of each response."""
    mask = rollouts.mask & (torch.arange(rollouts.mask.shape[-1]) < lengths.unsqueeze(-1))
    mask = mask[..., : int(lengths.max())]
    return replace(
        rollouts,
        mask=mask,
        present=mask,
        response=torch.where(mask, rollouts.response[..., : mask.shape[-1]], 0),
        logp_sampler=torch.where(mask, rollouts.logp_sampler[..., : mask.shape[-1]], 0.0),
        truncated=~ended,
    )


def zero_padding(rollouts: Rollouts) -> Rollouts:
    """Set tokens and log-probs after the end to 0."""
    zeroed = {name: torch.where(rollouts.mask, getattr(rollouts, name), 0) for name in ("response", "logp_sampler")}
    return replace(rollouts, **zeroed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("decoder", "steps"), [(PagedRunner, 1), (EagerRunner, 1), ("graphs", 1), ("graphs", 4), ("graphs", 7)]
)
def test_every_runner_stops_where_the_text_contains_the_string(
    decoder: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses equal those without stop strings, up to the token that completes one, with the same log-probs."""
    monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", steps)
    strings = ("é", "€", "bc", "aa", "l")
    plain = drawn_by(PagedRunner)
    lengths, ended = plain.length.clone(), ~plain.truncated
    for p, s in ((p, s) for p in range(3) for s in range(4)):
        tokens = plain.response[p, s][plain.mask[p, s]].tolist()
        if found := first_end(tokenizer_of(), strings, tokens):
            lengths[p, s], ended[p, s] = found, True
    assert (lengths < plain.length).sum() > 3 and not ended.all()
    same(zero_padding(drawn_by(decoder, stop=strings)), truncate(plain, lengths, ended))


@pytest.mark.long
@pytest.mark.parametrize("decoder", RUNNERS)
def test_every_runner_respects_the_limit_of_each_prompt(decoder: Any) -> None:
    """A response is truncated at the limit of its prompt; the limit of the run stays the same."""
    plain, limits = drawn_by(PagedRunner), torch.tensor([3, 24, 9])
    lengths = torch.minimum(plain.length, limits[:, None])
    ended = ~plain.truncated & (plain.length <= limits[:, None])
    got = drawn_by(decoder, limits=limits.tolist())
    same(zero_padding(got), truncate(plain, lengths, ended))
    assert got.limit == 24 and got.limits is not None and got.limits.tolist() == limits.tolist()


@pytest.mark.long
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.6, "temperature": 0.5}, {"greedy": True}])
def test_no_decoder_ends_a_response_before_its_fewest_tokens(how: dict[str, Any]) -> None:
    """An end token cannot be drawn, and a stop string that is complete by then is passed over."""
    lm, least = one_model(soon=True), 6
    how = {**how, "lm": lm, "stop": ("b", "c", "f"), "limit": 14}
    before = drawn_by(PagedRunner, **how)
    got, *others = (drawn_by(decoder, min_tokens=least, **how) for decoder in RUNNERS)
    assert int(before.length.min()) < least <= int(got.length.min()) < 14
    assert not (got.response[..., :least] == END).any()
    for other in others:
        same(zero_padding(other), zero_padding(got), bound=2e-5)
    if "temperature" not in how:
        with torch.no_grad():
            assert (language_logp(lm, rewarded(got)) - got.logp_sampler)[got.mask].abs().max() < 2e-5


@pytest.mark.long
@pytest.mark.parametrize("decoder", RUNNERS)
def test_the_kept_mass_excludes_the_end_token_before_min_tokens(decoder: Any) -> None:
    """M = 1 − p(end) before the fewest tokens, 1 behind them; the log-prob is over the whole vocabulary."""
    lm = one_model(soon=True)
    got = drawn_by(decoder, lm=lm, min_tokens=4, limit=8)
    want = probabilities(lm, got)[..., END]
    assert got.kept_mass is not None
    early = torch.arange(got.mask.shape[-1]) < 4
    assert (got.kept_mass - torch.where(early, 1 - want, 1.0))[got.mask].abs().max() < 1e-6


def probabilities(lm: Any, rollouts: Rollouts) -> torch.Tensor:
    """The whole distribution before each token of every response, by plain forward passes."""
    rows = torch.zeros(*rollouts.mask.shape, VOCAB, dtype=torch.float64)
    for p, s in ((p, s) for p in range(len(rollouts.prompt)) for s in range(rollouts.mask.shape[1])):
        prompt = rollouts.prompt[p][rollouts.prompt[p] >= 0]
        response = rollouts.response[p, s][rollouts.mask[p, s]]
        with torch.no_grad():
            logits = lm.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows[p, s, : len(response)] = logits.softmax(-1)
    return rows


def test_barred_tokens_come_before_top_p() -> None:
    """P = (½, ¼, ⅛, ⅛), the first barred: ½, ¼, ¼ are left, of which top-p 0.7 keeps two, ⅜ of the whole."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 2).log()
    barred = (torch.tensor([True, False]), torch.tensor([0, 0]))
    token, logp, mass = sample_tokens(logits, 1.0, SamplingParams(top_p=0.7), torch.tensor([0.9, 0.9]).double(), barred)
    assert token.tolist() == [2, 1] and mass is not None
    assert torch.allclose(mass, torch.tensor([0.375, 0.75])) and torch.allclose(logp.exp(), torch.tensor([0.125, 0.25]))
    certain = torch.tensor([[200.0, 0.0, 1.0]])
    token, logp, mass = sample_tokens(
        certain, 1.0, SamplingParams(), torch.tensor([0.9]).double(), (barred[0][:1], barred[1])
    )
    assert token.tolist() == [2] and logp.tolist() == [-199.0] and mass is not None and 0 < float(mass) < 1e-30
    assert sample_tokens(certain, 1.0, SamplingParams(), None, (barred[0][:1], barred[1]))[0].tolist() == [2]


@pytest.mark.long
@pytest.mark.parametrize("decoder", RUNNERS)
def test_a_stop_string_ends_a_turn(decoder: Any) -> None:
    """What follows it is the observation; a string in an observation, or one that begins there, does not count."""
    turns: dict[int, list[list[int]]] = {}
    observation = [PIECES.index(piece) for piece in (b"\n", b"b", b"c")]

    def observe(response: int, tokens: list[int]) -> list[int]:
        turns.setdefault(response, []).append(tokens)
        return observation if len(turns[response]) < 3 else []

    lm, strings = one_model(), ("\n", "ca", "g")
    got = drawn_by(decoder, lm=lm, observe=observe, stop=strings, limit=32)
    for seen in turns.values():
        start = 0
        for tokens in seen:
            turn = tokens[start:]
            assert first_end(tokenizer_of(), strings, turn) == len(turn) or turn[-1] == END
            assert first_end(tokenizer_of(), strings, turn[:-1]) == 0
            start = len(tokens) + len(observation)
    assert sum(len(seen) for seen in turns.values()) > 12
    for i, truncated in enumerate(got.truncated.flatten().tolist()):
        assert truncated == (len(turns.get(i, [])) < 3), "over only if nothing followed"
    with torch.no_grad():
        assert (language_logp(lm, rewarded(got)) - got.logp_sampler)[got.mask].abs().max() < 5e-6


@pytest.mark.long
def test_a_response_that_is_continued_ends_as_a_whole() -> None:
    """A string that begins in the prefix counts, and so do the prefix's tokens, against both limits."""
    config: Any = SimpleNamespace(task=SimpleNamespace(max_tokens=14))
    prompts = replace(Prompts.of(prompts_of()), limits=torch.tensor([6, 14, 9]))
    prefixes = [[PIECES.index(piece) for piece in pieces] for pieces in ([b"d", b"d"], [b"a\xe2"], [b"d"] * 7)]

    def continued(**more: Any) -> list[list[list[int]]]:
        lm = one_model(soon="min_tokens" in more)
        sampler = sampler_of(lm, limit=14, **more)
        groups = LanguageBackend().continue_responses(config, lm, prompts, prefixes, 40, sampler)
        for prefix, group, limit in zip(prefixes, groups, (6, 14, 9), strict=True):
            assert all(ids[: len(prefix)] == prefix and len(prefix) < len(ids) <= limit for ids in group)
        assert sampler.sampling_params == SamplingParams(min_tokens=more.get("min_tokens", 0))
        return groups

    firsts = [tokenizer_of().decode(ids[2:3]) for ids in continued()[0] if ids[2] != END]
    first = next(text for text in firsts if text.isascii())
    strings = (f"d{first}", "\N{EURO SIGN}", "b")
    stopped = [ids for group in continued(stops=StopStrings(strings, tokenizer_of(), VOCAB)) for ids in group]
    ends = [first_end(tokenizer_of(), strings, ids) for ids in stopped]
    assert any(ends) and all(end in (0, len(ids)) for end, ids in zip(ends, stopped, strict=True))
    assert any(len(ids) == 3 and tokenizer_of().decode(ids) == f"dd{first}" for ids in stopped)
    late = continued(min_tokens=5)
    assert all(END not in ids[:5] and len(ids) > 5 for group in late for ids in group)
    assert any(ids[5] == END for ids in late[1]), "the token of its prefix is one of the five"


# ---- settings and tasks ---------------------------------------------------------------------------------------


def rows_file(folder: Path, *limits: int | None) -> Path:
    file = folder / "mixture.jsonl"
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "most": limit} for i, limit in enumerate(limits)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_stop_strings_are_words_on_the_command_line_and_a_list_in_files(tmp_path: Path) -> None:
    config, _ = parse_train(["countdown", "--stop", "\n\n", "Question: ", "--min-tokens", "3"], "ascent train")
    assert config.task.stop == ("\n\n", "Question: ") and config.task.min_tokens == 3
    recorded = json.loads(json.dumps(config.to_dict()))
    assert recorded["task"]["stop"] == ["\n\n", "Question: "]
    assert config_from(recorded).task == config.task
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    again, _ = parse_train(["--config", str(tmp_path / "config.json"), "--stop=--end"], "ascent train")
    assert again.task.stop == ("--end",)
    assert configure("countdown", {"stop": "END"}).task.stop == TextTask(stop="END").stop == ("END",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "given", "words"),
    [
        ("countdown", {"min_tokens": 9, "max_tokens": 8}, "--min-tokens 9 --max-tokens 8"),
        ("countdown", {"min_tokens": -1}, "--min-tokens -1"),
        ("countdown", {"stop": ("a", "")}, "--stop ''"),
        ("countdown", {"stop": ("\N{REPLACEMENT CHARACTER}",)}, "U\\+FFFD"),
        ("sort", {"stop": ("a",)}, "--stop: there is no such setting for sort"),
        ("sort", {"min_tokens": 2}, "--min-tokens: there is no such setting for sort"),
    ],
)
def test_impossible_settings_are_rejected(task: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(task, given)


def test_rows_of_a_data_set_have_separate_limits(tmp_path: Path) -> None:
    """They go with the prompts, drawn or held out; null is --max-tokens, which no row exceeds, and a note says so."""
    file = rows_file(tmp_path, *[3, None, 40] * 8)
    task = configure(f"jsonl:{file}", {"limit_column": "most", "max_tokens": 16}).task
    bound = TokenizedTask(task, one_model())
    bound.encoder.encode = lambda _: [1, 2]  # type: ignore[method-assign]
    for prompts in (
        bound.draw(8, torch.Generator()),
        bound.held_out(4),
        bound.step_prompts(0, 5, 0, torch.Generator()),
    ):
        assert prompts.limits is not None and set(prompts.limits.tolist()) <= {3, 16}
        for identity, limit in zip(prompts.problem.tolist(), prompts.limits.tolist(), strict=True):
            assert limit == (3 if bound.problem(identity).max_tokens == 3 else 16)
        assert prompts[1:3].limits is not None and prompts[1:3].limits.tolist() == prompts.limits[1:3].tolist()
    assert task.data_notes() == ["8 rows have a limit above --max-tokens 16, which applies to them too"]


@pytest.mark.parametrize("limit", [0, -3, 2.5, "9", True, 4])
def test_a_row_with_an_impossible_limit_is_rejected_with_its_line(tmp_path: Path, limit: Any) -> None:
    task = configure(f"jsonl:{rows_file(tmp_path, 7, limit)}", {"limit_column": "most", "min_tokens": 5}).task
    with pytest.raises(ConfigError, match=r"mixture.jsonl.*2.*column most"):
        task.verify()


def test_a_column_of_limits_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="limit"):
        configure(f"jsonl:{rows_file(tmp_path, 7, 8)}", {"limit_column": "limit"}).task.verify()


def test_a_problem_below_the_fewest_tokens_is_refused() -> None:
    task = TextTask(min_tokens=5, max_tokens=9)
    assert [task.token_limit(Problem("", max_tokens=limit)) for limit in (None, 7, 30)] == [9, 7, 9]
    with pytest.raises(ConfigError, match="at least 5"):
        task.token_limit(Problem("", max_tokens=4))


@pytest.mark.long
def test_the_penalty_for_length_ends_at_each_limit() -> None:
    """By hand: margin 4, limits 5 and 10: (limit − 4 − length)/4 between −1 and 0, and −1 where it was cut off."""
    batch = rewarded(drawn_by(PagedRunner, limits=[5, 10, 24]))
    penalty = Overlong(4)(batch)
    assert penalty is not None
    want = ((torch.tensor([[5], [10], [24]]) - 4 - batch.length) / 4).clamp(-1, 0)
    assert torch.equal(penalty.squeeze(-1), torch.where(batch.truncated, -1.0, want).to(penalty.dtype))
    assert bool(batch.truncated[0].any()) and int(batch.length[0].max()) == 5
    halves = [batch.select(slice(0, 2)), batch.select(slice(2, 3))]
    joined = Overlong(4)(ascent.core.types.join(halves))
    assert joined is not None and torch.equal(joined, penalty)


@pytest.mark.slow
def test_a_run_and_its_policy_keep_them(tmp_path: Path) -> None:
    """Trained with stop strings, fewest tokens and limits, and asked afterwards with the same and with others."""
    model, file, end = write_tiny(tmp_path / "model"), rows_file(tmp_path, *[6, None, 12] * 6), 2
    settings: dict[str, Any] = {"policy.model": str(model), "limit_column": "most", "max_tokens": 16, "min_tokens": 2}
    settings |= {"stop": ["a", "E"], "prompts": 6, "samples": 4, "eval_prompts": 2, "preflight": False, "steps": 1}
    settings |= {"record_rollouts": "all", "check": "number", "shaping": "overlong", "shaping.margin": 2}
    run = ascent.train(f"jsonl:{file}", **settings, out=tmp_path / "run")
    stops = set(tiny_tokenizer().convert_tokens_to_ids(["a", "E"]))
    rows = run.rollouts(0)
    assert any(row["response"][-1] in stops for row in rows) and any(row["truncated"] for row in rows)
    for row in rows:
        ids, limit = row["response"], [6, 16, 12][int(row["prompt_text"].split(" + ")[0].split()[-1]) % 3]
        assert 2 <= len(ids) <= limit and not set(ids[1:-1]) & stops and end not in ids[:2]
        assert row["truncated"] == (len(ids) == limit and ids[-1] not in stops | {end})
    for row in ascent.sample(run.folder, task="own", count=4):
        assert 2 <= row["length"] <= 16 and not set(row["response"][1:-1]) & {"a", "E"}
    for row in ascent.sample(run.folder, "What is 3 + 4?", count=4, stop="e", min_tokens=0, max_tokens=30):
        assert "e" not in row["response"][:-1]
        assert row["truncated"] or row["response"].endswith("e") or row["ids"][-1] == end
