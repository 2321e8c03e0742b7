"""A server around a transformers model with a classification head; its protocol is vLLM's.

    python -m dataflow.rewards.models.hf.server --model DIR --kind classify --port 8000

prints ``{"url": ...}`` on one line when it is ready. It ends on SIGTERM and at the end of its standard input.
Requests that arrive while it computes are the next batch. Requests that arrive while it sleeps wait until it is woken,
as vLLM's do: an error would use up tries of a client that only has to wait.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import os
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError

from dataflow.errors import ConfigError, DataflowError, UserError
from dataflow.models.directory import HEADS, check_classifier
from dataflow.rewards.judge.server import serve
from dataflow.rewards.models.hf.batcher import Batcher, Closed
from dataflow.system import clock
from dataflow.system.address import family_of
from dataflow.system.loopback import ADDRESS

if TYPE_CHECKING:
    from aiohttp import web

    from dataflow.rewards.models.hf.model import HfModel

_BODY = 1 << 28  # bytes


class Refused(DataflowError):
    """A request cannot be answered.

    Attributes:
        status: of the reply.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Request(BaseModel):
    """The body of a request: ``input``, or ``messages`` to which the chat template is applied."""

    model_config = ConfigDict(extra="forbid")

    input: str | list[str] | list[StrictInt] | list[list[StrictInt]] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    use_activation: bool = True
    add_special_tokens: bool | None = None
    """Of a text; by default those of ``input`` get them, and ``messages`` only those of the template."""
    add_generation_prompt: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    user: str | None = None
    request_id: str | None = None


class HfServer:
    """Answers requests with the scores of a model.

    Args:
        model: scores the rows.
        name: of the model in requests.
        batcher: computes them.
        template: chat template; None for the tokenizer's.
    """

    def __init__(self, model: HfModel, name: str, batcher: Batcher[list[float]], template: str | None = None) -> None:
        self._model, self._name, self._batcher, self._template = model, name, batcher, template

    def application(self) -> web.Application:
        """Returns the server: POST /classify, /pooling, /sleep, /wake_up; GET /health, /v1/models, /is_sleeping."""
        from aiohttp import web

        app = web.Application(client_max_size=_BODY, middlewares=[web.middleware(_answer_errors)])
        app.router.add_post("/classify", self._classify)
        app.router.add_post("/pooling", self._pooling)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)

        async def close(_app: web.Application) -> None:
            await self._batcher.close()

        app.on_shutdown.append(close)
        return app

    async def _classify(self, request: web.Request) -> web.Response:
        scores, tokens = await self._scores(request)
        data = [
            {"index": at, "label": self._model.labels[row.index(max(row))], "probs": row, "num_classes": len(row)}
            for at, row in enumerate(scores)
        ]
        return self._reply("classify", data, tokens)

    async def _pooling(self, request: web.Request) -> web.Response:
        scores, tokens = await self._scores(request)
        data = [{"index": at, "object": "pooling", "data": row} for at, row in enumerate(scores)]
        return self._reply("pool", data, tokens)

    def _reply(self, kind: str, data: list[dict[str, Any]], tokens: int) -> web.Response:
        from aiohttp import web

        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(clock.now()), "model": self._name}
        return web.json_response({**head, "data": data, "usage": usage})

    async def _scores(self, request: web.Request) -> tuple[list[list[float]], int]:
        """Returns the scores of a request's rows, and the number of their tokens."""
        try:
            body = Request.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Refused(f"{'.'.join(map(str, first['loc'][:2])) or 'the body'}: {first['msg']}.") from error
        if body.model not in (None, self._name):
            raise Refused(f"the model '{body.model}' is not served here; this is '{self._name}'.", 404)
        if (body.input is None) == (body.messages is None):
            raise Refused("give either input or messages.")
        # Encoding may take long: /health must be answered meanwhile.
        rows = await asyncio.to_thread(self._rows, body)
        scores = await asyncio.gather(*map(self._batcher.result, rows))
        if not all(math.isfinite(score) for row in scores for score in row):
            raise Refused("the model's score is not a finite number; give another --dtype, or check its weights.", 500)
        if body.use_activation:
            scores = [self._model.activated(row) for row in scores]
        return list(scores), sum(map(len, rows))

    def _rows(self, body: Request) -> list[list[int]]:
        if body.messages is not None:
            rows = self._encoded([self._rendered(body)], bool(body.add_special_tokens))
        else:
            given: Any = [body.input] if isinstance(body.input, str) else body.input
            if given and isinstance(given[0], int):
                given = [given]
            texts = bool(given) and isinstance(given[0], str)
            rows = self._encoded(given, body.add_special_tokens is not False) if texts else given
        limit, known = self._model.max_model_len, self._model.vocabulary
        for row in rows or [[]]:
            if not row:
                raise Refused("the input is empty; give at least one token.")
            if len(row) > limit:
                raise Refused(
                    f"the input has {len(row)} tokens, and the model takes at most {limit} (max_model_len); shorten it."
                )
            if not 0 <= min(row) <= max(row) < known:
                raise Refused(f"the input has a token id that is not in the model's vocabulary, 0 to {known - 1}.")
        return rows

    def _encoded(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        ids: list[list[int]] = self._model.tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        return ids

    def _rendered(self, body: Request) -> str:
        if self._template is None and self._model.tokenizer.chat_template is None:
            raise Refused("the model has no chat template; give one (--chat-template), or send input.")
        try:
            text: str = self._model.tokenizer.apply_chat_template(
                body.messages,
                tokenize=False,
                chat_template=self._template,
                add_generation_prompt=body.add_generation_prompt,
                **body.chat_template_kwargs,
            )
        # A template may raise any exception.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise Refused(f"the chat template cannot be applied to the messages ({reason}).") from error
        return text

    async def _sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in ("1", "2"):
            raise Refused(f"level={level}; give 1 or 2.")
        await self._batcher.pause(lambda: self._model.sleep(int(level)))
        return _plain({"is_sleeping": True})

    async def _wake(self, _request: web.Request) -> web.Response:
        await self._batcher.resume(self._model.wake)
        return _plain({"is_sleeping": False})

    async def _is_sleeping(self, _request: web.Request) -> web.Response:
        return _plain({"is_sleeping": self._batcher.paused})

    async def _health(self, _request: web.Request) -> web.Response:
        return _plain({"status": "ok", "batches": self._batcher.batches, "rows": self._batcher.rows})

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "owned_by": "dataflow", "max_model_len": self._model.max_model_len}
        return _plain({"object": "list", "data": [card]})


def _plain(content: dict[str, Any]) -> web.Response:
    from aiohttp import web

    return web.json_response(content)


async def _answer_errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    """Answers an error as vLLM does: ``{"error": {"message": ..., "code": ...}}``."""
    from aiohttp import web

    try:
        return await handler(request)
    except (web.HTTPException, asyncio.CancelledError):
        raise
    except Refused as error:
        message, status = str(error), error.status
    except Closed as error:
        message, status = str(error), 503
    except Exception as error:
        message, status = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", 500
        print(f"{request.path}: {message}", file=sys.stderr, flush=True)
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket at an address that does not listen yet: clients are refused until the model is loaded."""
    bound = socket.socket(family_of(host))
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise _unusable(host, port, error) from error
    return bound


def _unusable(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port={port} is taken by another server of this machine; give another, or 0.")
    return ConfigError(f"--host={host} --port={port}: {error}; give an address of this machine and a port.")


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template={path} cannot be read ({error}); give a Jinja file.") from error


def _run(given: Any) -> None:
    """Loads the model and serves it until the server is ended."""
    with _bound(given.host, given.port) as bound:
        path, template = Path(given.model).expanduser(), _template(given.chat_template)
        check_classifier(path, given.kind, "hf")
        from dataflow.rewards.models.hf.model import HfModel

        model = HfModel(path, given.dtype, given.device, given.threads, given.max_model_len)
        batcher = Batcher(model.scores, given.max_num_seqs, given.max_batch_tokens)
        app = HfServer(model, given.served_model_name or given.model, batcher, template).application()
        try:
            # A request whose client has left is not computed.
            serve(app, bound, handler_cancellation=True)
        except OSError as error:
            raise _unusable(given.host, given.port, error) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Runs the server from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dataflow.rewards.models.hf.server", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="directory")
    parser.add_argument("--served-model-name", help="its name in requests; the directory by default")
    parser.add_argument("--kind", choices=sorted(HEADS), default="classify")
    parser.add_argument("--host", default=ADDRESS)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--max-num-seqs", type=_positive, default=64, help="rows of a batch")
    parser.add_argument("--max-batch-tokens", type=_positive, default=16384, help="tokens of a batch, padding included")
    parser.add_argument("--max-model-len", type=_positive, help="tokens of a row; the model's limit by default")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; a GPU if there is one by default")
    parser.add_argument("--threads", type=_positive, help="of the CPU; as many as torch takes by default")
    parser.add_argument("--chat-template", help="a Jinja file; the tokenizer's template by default")
    try:
        _run(parser.parse_args(arguments))
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit(), which waits for the thread of a batch that may take minutes.
    os._exit(code)
