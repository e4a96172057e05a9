"""A loop-back server that judges requests by the types of the official clients, and asks itself through them.

Usage: clients.py FOLDER [CERTIFICATE KEY], where FOLDER holds recorded replies, NAME.sse; with a certificate it
speaks TLS.
POST /NAME/v1/... checks the body (400 tells what is wrong) and streams the reply NAME.
GET /seen/NAME tells as JSON what the official client makes of that reply, or null where it raises.
"""

import json
import pathlib
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from pydantic import BaseModel, ConfigDict, TypeAdapter
from typing_extensions import is_typeddict


def strict(kind):
    """The types allow unknown fields unless each says otherwise."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("anthropic.types", "openai.types")):
            for thing in filter(is_typeddict, list(vars(module).values())):
                thing.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return TypeAdapter(kind)


def walk(value):
    """Pydantic checks the elements of an Iterable only when somebody takes them, and takes a part of a reply, which
    may have any further field, for a part of a request."""
    if isinstance(value, BaseModel):
        raise ValueError(f"no part of a request: {value!r}")
    if isinstance(value, dict):
        value = value.values()
    if not isinstance(value, str) and hasattr(value, "__iter__"):
        for part in value:
            walk(part)


KINDS = {"messages": strict(MessageCreateParamsStreaming), "completions": strict(CompletionCreateParamsStreaming)}


def seen_by_anthropic(url):
    client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
        message = stream.get_final_message()
    if message.stop_reason is None:
        return None
    texts = [block.text for block in message.content if block.type == "text"]
    calls = [[block.id, block.name, block.input] for block in message.content if block.type == "tool_use"]
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    read = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
    return {"text": "\n\n".join(texts), "calls": calls, "tokens": [read, usage.output_tokens, cached]}


def seen_by_openai(url):
    client = openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0)
    text, calls, tokens, stop = "", {}, [0, 0, 0], None
    given = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    for chunk in client.chat.completions.create(**given):
        if chunk.usage:
            details = chunk.usage.prompt_tokens_details
            tokens = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens, details and details.cached_tokens or 0]
        for choice in [choice for choice in chunk.choices if choice.index == 0]:
            stop = choice.finish_reason or stop
            text += (choice.delta.content or "") + (choice.delta.refusal or "")
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, [part.id, part.function.name, ""])
                call[2] += part.function.arguments or ""
    if stop is None:
        return None
    calls = [[name, tool, json.loads(text or "{}")] for name, tool, text in calls.values()]
    return {"text": text, "calls": calls, "tokens": tokens}


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            walk(KINDS[self.path.split("?")[0].rsplit("/", 1)[1]].validate_python(body, strict=True))
        except Exception as error:  # whatever is wrong with it is the answer
            told = json.dumps({"error": {"message": str(error)}})
            return self.answer(400, "application/json", told.encode())
        name = pathlib.PurePath(self.path).parts[1]
        self.answer(200, "text/event-stream", (FOLDER / f"{name}.sse").read_bytes())

    def do_GET(self):
        name = self.path.rsplit("/", 1)[1]
        see = seen_by_anthropic if name.startswith("anthropic-") else seen_by_openai
        try:
            told = see(f"http://127.0.0.1:{self.server.server_port}/{name}")
        except Exception as error:  # a reply that is an error, or one that only lax readers take
            print(f"{name}: {error!r}", file=sys.stderr)
            told = None
        self.answer(200, "application/json", json.dumps(told).encode())

    def log_message(self, *_):
        pass


FOLDER = pathlib.Path(sys.argv[1])
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sys.argv[2:])
    server.socket = context.wrap_socket(server.socket, server_side=True)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
