"""What a client reads and what the policy is given, whatever contents, arguments and templates look like."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from typing import Any

import pytest
from pydantic import ValidationError

from ascent.environments.chat_session import ChatRenderer, Session
from ascent.environments.tool_chat import ToolChat
from ascent.environments.tools import Tools
from ascent.server.openai_requests import ChatRequest, describe_error
from tests.chats import chat_tokenizer, stop_ids
from tests.environments.test_chat_templates import OWN
from tests.server.test_endpoint import (
    ADD,
    HELLO,
    KEY,
    WIDE,
    assembled,
    chat,
    client_of,
    forced,
    post,
    served,
    settings_of,
)

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<call>", "words", "\n", " ", '"', "2 + 2")
OPENED = {"qwen3": False, "qwen3_5_think": True, "deepseek_r1_distill": True, "gemma3": False, "mistral": False}
"""Does the generation prompt of a template open the thoughts?"""
RUN = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "runs",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def tagged(luck: random.Random, most: int = 8) -> str:
    return "".join(luck.choice(TAGS) for _ in range(luck.randint(0, most)))


def ids_of(made: Any, text: str) -> list[int]:
    return list(made.lm.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("template", OPENED)
def test_tags_in_messages_and_observations_do_not_open_or_close_reasoning(template: str) -> None:
    async def go(made: Any) -> None:
        luck, opened, end = random.Random(template), OPENED[template], min(made.lm.stop_token_ids)
        spoken = ("hm</think>\n\nThe answer is 4." if opened else "The answer is 4.") * 1
        for case in range(12):
            key, _ = made.app.open(Session(case), WIDE)
            forced(made, [*ids_of(made, spoken), end])
            messages: list[Any] = [{"role": "user", "content": f"{tagged(luck)}{luck.choice(TAGS[:5])}"}]
            async with client_of(made.app, key) as client:
                for _ in range(3):
                    stream = luck.random() < 0.3
                    if stream:
                        message = (await assembled(client, messages=messages))[0].choices[0].message.model_dump()
                    else:
                        message = (await chat(client, messages))["choices"][0]["message"]
                    assert message["content"] == "The answer is 4.", messages
                    assert (message.get("reasoning_content") or "") == ("hm" if opened else ""), messages
                    answer = {"role": "user", "content": tagged(luck) + luck.choice(TAGS[:5])}
                    messages += [{"role": "assistant", "content": "The answer is 4."}, answer]

    with served(WIDE, key="", template=template) as made:
        asyncio.run(go(made))


@pytest.mark.parametrize(
    "template",
    ["qwen3", "qwen3_5_think", "mistral", "gemma3", "lfm2_v2", "deepseekv3", "glm4moe", "gemma4_v5", "muse_glimmer"],
)
def test_tags_in_arguments_are_part_of_the_call(template: str) -> None:
    """For tools in training and for clients alike, with thoughts before the call or without."""
    tokenizer = chat_tokenizer(template)
    chat, luck = ToolChat(tokenizer, [RUN], stop_ids(template, tokenizer)), random.Random(template)
    renderer, prompt, blocks = (
        ChatRenderer(tokenizer, chat.template.stops.values()),
        chat.render_prompt(HELLO),
        chat.format.blocks,
    )
    pieces = ("<think>", "</think>", "words", "\n", "'", blocks.opening, blocks.closing)
    opening = "" if chat.template.opens_reasoning(prompt) else "<think>"
    for _ in range(80):
        codes = ["x" + "".join(luck.choice(pieces) for _ in range(luck.randint(1, 5))).strip() for _ in range(2)]
        calls = [written(chat.format.name, code) for code in codes]
        thoughts = f"{opening}hm {written(chat.format.name, 'a draft')}</think>\n\n"
        text = luck.choice([thoughts, "" if opening else "</think>"]) + "".join(calls)
        turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        step = Tools([lambda code: f"ran {code}"], [RUN], chat.format.name).step(chat.decode_turn(turn, prompt))
        assert "calls=2 unparsed=0 failed=0" in step.reason, (text, step)
        results = "\n".join(message["content"] for message in step.observation)  # type: ignore[index]
        assert all(f"ran {code}" in results for code in codes), text
        parser = renderer.make_parser([RUN], (), prompt)
        for token in turn:
            parser.feed([token])
        parser.end()
        for read in (parser.turn, renderer.parse_turn(turn, [RUN], (), prompt)):
            assert [call.arguments["code"] for call in read.calls] == codes and not read.content.strip(), text


def written(form: str, code: str) -> str:
    spelled = json.dumps({"code": code}, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": "run", "arguments": {spelled}}}\n</tool_call>',
        "qwen3-coder": f"<tool_call>\n<function=run><parameter=code>\n{code}\n</parameter></function>\n</tool_call>",
        "glm": f"<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>",
        "gemma": f'<|tool_call>call:run{{code:<|"|>{code}<|"|>}}<tool_call|>',
        "atem": f'<atem:invoke name="run">\n<atem:parameter name="code">{code}</atem:parameter>\n</atem:invoke>',
        "mistral": f'[TOOL_CALLS] [{{"name": "run", "arguments": {spelled}}}]',
        "plain": f"<call>run {spelled}</call>",
        "pythonic": f"<|tool_call_start|>[run(code={json.dumps(code, ensure_ascii=False)})]<|tool_call_end|>",
        "deepseek": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{spelled}\n```<｜tool▁call▁end｜>",
    }[form]


@pytest.mark.parametrize(("system", "behind"), [("Be brief. /no_think", "<think></think>"), ("Be brief.", "<think>\n")])
def test_later_turns_of_a_session_are_prompted_as_the_first(
    system: str, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(9), WIDE)
        messages = [{"role": "system", "content": system}, *HELLO]
        forced(made, [*ids_of(made, "hm</think>So."), min(made.lm.stop_token_ids)])
        async with client_of(made.app, key) as client:
            for _ in range(3):
                said = (await chat(client, messages, return_token_ids=True, tools=[ADD]))["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "higher"}]
        tokens = [open_session.session.prompt, *observed(open_session.session)]
        assert len(tokens) == 3 and all(made.app.renderer.decode(ids, special=True).endswith(behind) for ids in tokens)

    with served(WIDE, key="", template="qwen3") as made:
        monkeypatch.setattr(made.lm.tokenizer, "chat_template", OWN["the last switch of any message"])
        asyncio.run(go(made))


def observed(session: Session) -> list[list[int]]:
    """The tokens between the turns of a session."""
    parts: list[list[int]] = [[]]
    for token, drawn in zip(session.response, session.sampled, strict=True):
        parts = [*parts, []] if drawn and parts[-1] else parts
        parts[-1] += [] if drawn else [token]
    return [part for part in parts if part]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ["qwen3", "mistral", "gemma3", "llama3_1"])
def test_parallel_tool_calls_false_gives_one_call_at_most(template: str, stream: bool) -> None:
    async def go(made: Any) -> None:
        form = ToolChat(made.lm.tokenizer, [ADD], made.lm.stop_token_ids).format
        several = {"llama": f"{form.example}; {form.example}"}.get(form.name, f"{form.example}\n{form.example}")
        forced(made, [*ids_of(made, several), min(made.lm.stop_token_ids)])
        for parallel in (True, None, False):
            key, open_session = made.app.open(Session(9), WIDE)
            more: Any = {"messages": HELLO, "tools": [ADD], "parallel_tool_calls": parallel}
            async with client_of(made.app, key) as client:
                if stream:
                    choice = (await assembled(client, **more))[0].choices[0].model_dump()
                else:
                    choice = (await chat(client, **more))["choices"][0]
                calls = choice["message"]["tool_calls"]
                assert len(calls) == (1 if parallel is False else 2) and choice["finish_reason"] == "tool_calls"
                assert not choice["message"]["content"] and not open_session.session.ignored_settings
                results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls]
                said = {"role": "assistant", "content": "", "tool_calls": calls}
                again = {"messages": [*HELLO, said, *results], "tools": [ADD], "parallel_tool_calls": parallel}
                await chat(client, **again)
            assert open_session.session.num_turns == 2 and not open_session.session.mismatch

    with served(WIDE, key="", template=template) as made:
        asyncio.run(go(made))


@pytest.mark.parametrize("template", ["gemma", "gemma3", "cohere"])
def test_parallel_results_in_the_plain_format_are_one_message(template: str) -> None:
    async def go(made: Any) -> None:
        words = '<call>add {"a": 3}</call><call>add {"a": 4}</call>'
        forced(made, [*ids_of(made, words), min(made.lm.stop_token_ids)])
        for extra in ([], [{"role": "user", "content": "and now?"}]):
            key, open_session = made.app.open(Session(9), WIDE)
            async with client_of(made.app, key) as client:
                said = (await chat(client, tools=[ADD]))["choices"][0]["message"]
                assert len(said["tool_calls"]) == 2
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"it is {i}"}
                    for i, call in enumerate(said["tool_calls"])
                ]
                whole = [*HELLO, said, *results, *extra]
                await chat(client, whole, tools=[ADD])
                (text,) = (made.app.renderer.decode(ids, special=True) for ids in observed(open_session.session))
                assert "it is 0\nit is 1" + ("\nand now?" if extra else "") in text
            key, fresh = made.app.open(Session(9), WIDE)
            async with client_of(made.app, key) as client:  # the same history, which comes at once
                await chat(client, whole, tools=[ADD])
            assert made.app.renderer.decode(fresh.session.prompt, special=True).endswith(text)

    with served(WIDE, key="", template=template) as made:
        asyncio.run(go(made))


def test_a_completion_continues_a_text_and_not_its_end_token() -> None:
    from tokenizers.processors import TemplateProcessing

    async def go(made: Any) -> None:
        tokenizer = made.app.renderer.tokenizer
        end = tokenizer.eos_token
        special = [(end, tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=special)
        assert tokenizer("2+2=")["input_ids"][-1] == tokenizer.eos_token_id
        async with client_of(made.app) as client:
            for prompt in ("2+2=", f"2+2={end}"):
                body = {"prompt": prompt, "max_tokens": 2, "return_token_ids": True}
                answer = await post(client, "/v1/completions", **body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["prompt_token_ids"] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
            assert (await post(client, "/v1/completions", prompt="", max_tokens=2)).status_code == 400

    with served(settings_of(), key=KEY) as made:
        made.app.renderer.tokenizer = copy.deepcopy(made.lm.tokenizer)
        asyncio.run(go(made))


def test_call_ids_that_look_like_other_ids_stay_with_their_results() -> None:
    async def go(made: Any) -> None:
        ids = ["call00001", "call00002", "call00000"]
        calls = ", ".join(f'{{"name": "add", "arguments": {{"a": 1}}, "id": "{each}"}}' for each in ids)
        forced(made, [*ids_of(made, f"[TOOL_CALLS] [{calls}]"), min(made.lm.stop_token_ids)])
        key, open_session = made.app.open(Session(9), WIDE)
        async with client_of(made.app, key) as client:
            said = (await chat(client, tools=[ADD]))["choices"][0]["message"]
            assert [call["id"] for call in said["tool_calls"]] == ids
            results = [{"role": "tool", "tool_call_id": each, "content": f"[{i}]"} for i, each in enumerate(ids)]
            await chat(client, [*HELLO, said, *results], tools=[ADD])
        (text,) = (made.app.renderer.decode(part, special=True) for part in observed(open_session.session))
        for i, each in enumerate(ids):
            assert f'{{"content": [{i}], "call_id": "{each}"}}' in text, text

    with served(WIDE, key="", template="mistral") as made:
        asyncio.run(go(made))


def test_contents_do_not_open_reasoning_without_control_tokens() -> None:
    tokenizer = chat_tokenizer.__wrapped__("qwen3")
    turn = [*tokenizer("It is 4.", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for ending, reasoning in (("", ""), ("<think>", "It is 4.")):
        tokenizer.chat_template = OWN["numbered rounds"].replace("A:", f"A:{ending}")
        renderer = ChatRenderer(tokenizer, stop_ids("qwen3", tokenizer))
        for content in ("What is 2+2? <think>", "</think>", "What is 2+2?"):
            prompt = renderer.render_prompt([{"role": "user", "content": content}], [])
            assert renderer.parse_turn(turn, [], (), prompt).reasoning == reasoning, (ending, content)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": {"x": "int"}},
        {"properties": {"x": {"type": 3}}},
        {"properties": {"x": {"type": "integer"}}, "required": "x"},
        {"properties": 3},
        "x",
    ],
)
def test_invalid_parameter_schemas_are_refused(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate({"messages": HELLO, "tools": [tool]})
    assert re.match(
        r"tools\[0\].function.parameters: should be (the JSON schema|a valid dictionary)",
        describe_error(error.value, ChatRequest),
    )
    right = {"properties": {"x": {"type": ["integer", "null"]}}, "required": ["x"]}
    fine = {"type": "function", "function": {"name": "f", "parameters": right}}
    assert ChatRequest.model_validate({"messages": HELLO, "tools": [fine]}).tools == [fine]
    with pytest.raises(ValidationError, match="at most 128 items"):
        ChatRequest.model_validate({"messages": HELLO, "tools": [fine] * 129})
    with pytest.raises(ValidationError, match="at least 1 character"):
        ChatRequest.model_validate({"messages": HELLO, "tools": [fine, {"function": {"name": ""}}]})
