"""Request bodies of the OpenAI-compatible endpoint as pydantic models.

Size and nesting are limited before a body is validated. Validation is strict: no value is converted to another type.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ascent.environments.tool_call_formats import schema_types

MAX_BODY_BYTES = 8 * 2**20
MAX_DISCARDED_BYTES = 64 * 2**20
"""Bytes of an oversized request that are received and discarded, so that its client can read the error."""
MAX_RECORDED_CHARACTERS = 100
"""Characters of a setting's value that are recorded or quoted in an error."""
MAX_MESSAGES, MAX_TOOLS, MAX_STOP_STRINGS = 2048, 128, 16
CALL_CHARACTERS = 32
"""Characters of a rendered tool call besides its name and arguments."""
UNSUPPORTED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "guided_json": (),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
"""Settings that are not implemented, each with the values that have no effect and are therefore accepted."""
Body = TypeVar("Body", bound=BaseModel)


class WireModel(BaseModel):
    """A JSON object of a request. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


# ---- messages and tools -----------------------------------------------------------------------------------------


def _as_parts(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, Mapping | list):
        raise ValueError("Input should be text, or a list of parts of type text")
    return [content] if isinstance(content, Mapping) else content


def _parse_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = parse_json(arguments) if arguments.strip() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("Input should be a JSON object")
    return value


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool as the client wrote it: chat templates render all of its keys, in their order."""
    Tool.model_validate(tool)
    return tool


def _check_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Check what the tool-call parsers read: the types of the properties and the list of required ones."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    try:
        valid = isinstance(required, list) and all(
            isinstance(schema, Mapping) and all(isinstance(kind, str) for kind in schema_types(schema))
            for schema in properties.values()
        )
    except (AttributeError, TypeError):
        valid = False
    if not valid:
        raise ValueError("Input should be the JSON schema of an object")
    return parameters


class TextPart(WireModel):
    """A part of a message's content. Images and audio are not supported."""

    type: Literal["text"]
    text: str


class Function(WireModel):
    """The function that a tool call names."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parse_arguments)] = {}


class WireToolCall(WireModel):
    """A tool call in a message of the assistant."""

    function: Function
    id: str | None = None


class ChatMessage(WireModel):
    """A message of a chat request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_as_parts)] = []
    tool_calls: Annotated[list[WireToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _only_assistants_call(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the role assistant have tool_calls")
        return self

    @property
    def num_characters(self) -> int:
        """The approximate length of the rendered message."""
        calls = [call.function for call in self.tool_calls or ()]
        texts = [part.text for part in self.content] + [call.name + json.dumps(call.arguments) for call in calls]
        return sum(map(len, texts)) + CALL_CHARACTERS * len(calls)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: its content as text, the arguments of its calls as objects."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content)}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or "",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        if role == "tool":
            message |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        return message


class FunctionSchema(WireModel):
    """The function of a tool."""

    name: Annotated[str, Field(min_length=1)]
    parameters: Annotated[dict[str, Any], AfterValidator(_check_schema)] = {}


class Tool(WireModel):
    """A tool: {"type": "function", "function": {"name": …, "parameters": …}}."""

    function: FunctionSchema


# ---- sampling settings ------------------------------------------------------------------------------------------


def _as_stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) and stop else stop or []


def _check_stop(stop: str) -> str:
    if "\N{REPLACEMENT CHARACTER}" in stop:
        raise ValueError("Input should be text without U+FFFD")
    return stop


StopString = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_stop)]


class StreamOptions(WireModel):
    """Options of a streamed response."""

    include_usage: bool | None = None


class SamplingFields(WireModel):
    """Settings that all routes share. None: the default of the server."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), BeforeValidator(_as_stops)
    ] = []
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**30)] | None = None
    top_p: Annotated[float, Field(ge=1e-9, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0)] | bool | None = None
    return_token_ids: bool | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(default=None, ge=1, le=1, description="A request has one completion")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=0, description="Only log-probs of sampled tokens are available"
    )

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False  # 0 asks for those of the sampled tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p is set."""
        return not self.top_k is self.top_p is self.min_p is None

    @property
    def unsupported(self) -> dict[str, Any]:
        """The settings that are not implemented and would have an effect."""
        extra = self.model_extra or {}
        return {
            name: extra[name]
            for name, neutral in UNSUPPORTED_SETTINGS.items()
            if extra.get(name) is not None and extra[name] not in neutral
        }

    def for_record(self) -> dict[str, Any]:
        """The settings that differ from the defaults, with long values shortened."""
        sampling = ("temperature", "top_k", "top_p", "min_p", "seed")
        values = {name: getattr(self, name) for name in sampling if getattr(self, name) is not None} | self.unsupported
        return {name: _shorten(value) for name, value in values.items()}


class ChatRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: (
        Annotated[
            list[Annotated[dict[str, Any], AfterValidator(_check_tool)]], Field(max_length=MAX_TOOLS, fail_fast=True)
        ]
        | None
    ) = None
    tool_choice: Literal["auto", "none"] | None = Field(default=None, description="A tool call cannot be forced")
    logprobs: bool | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def num_characters(self) -> int:
        """The approximate length of the rendered prompt."""
        return sum(message.num_characters for message in self.messages) + len(json.dumps(self.offered_tools))


def _as_single_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        raise ValueError("Input should be one prompt per request")
    return prompt


TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    prompt: Annotated[TokenIds | str, BeforeValidator(_as_single_prompt), Field(description="Text or token ids")]


class GenerateRequest(WireModel):
    """The body of /inference/v1/generate."""

    token_ids: TokenIds
    sampling_params: Annotated[SamplingFields, BeforeValidator(lambda value: value or {})] = SamplingFields()
    stream: Literal[False] | None = Field(default=None, description="This route returns whole responses")
    request_id: Annotated[str, Field(max_length=200)] | None = None


# ---- reading a request ------------------------------------------------------------------------------------------


def parse_json(text: bytes | str) -> Any:
    """Parse JSON of limited depth. ValueError for NaN, infinite numbers and unpaired surrogates."""
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # the parser reads 1e999 as infinity
    return value


async def read_request(request: Request, model: type[Body], max_bytes: int = MAX_BODY_BYTES) -> Body:
    """Read and validate the body of a request."""
    body = await _read_body(request, max_bytes)
    try:
        value = parse_json(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request body is not valid JSON with finite numbers") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise HTTPException(400, describe_error(error, model)) from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    body, size = bytearray(), 0
    if not length.isdecimal() or int(length) <= MAX_DISCARDED_BYTES:
        async for piece in request.stream():  # to its end: a client that is still sending cannot read an error
            size += len(piece)
            if size <= max_bytes:
                body += piece
            elif size > MAX_DISCARDED_BYTES:
                break
    if size > max_bytes or (length.isdecimal() and int(length) > max_bytes):
        raise HTTPException(413, f"the request body has more than {max_bytes} bytes, the limit for this context length")
    return bytes(body)


def describe_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe the first error: the field, what it should be, and what was given."""
    first = error.errors(include_url=False)[0]
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
    path = "".join(name for name in names if name[0] == "[" or name[1:].isidentifier()).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    given = "" if first["type"] == "missing" else f", got {_quoted(first['input'])}"
    field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    hint = f". {field.description}" if field and field.description else ""
    return f"{path or 'the request body'}: {message}{given}{hint}"


def _shorten(value: Any) -> Any:
    """Return a value, or the beginning of its JSON if it is long."""
    text = _quoted(value)
    return text if text.endswith("…") else value


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_RECORDED_CHARACTERS else f"{text[:MAX_RECORDED_CHARACTERS]}…"
