"""What the tests of the contract share: the command line, a judge over HTTP, and readers of what a run leaves.

Nothing here or in the tests beside it imports more of the project than ``import dataflow`` offers.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil

import dataflow

ROOT = Path(__file__).parents[2]
PIPELINE = str(ROOT / "pipelines" / "gsm8k_grpo.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# A tiny run on transformers in one process; a step has 16 samples in 4 groups, and the second half of it is a
# mini-batch of its own.
SMALL = (
    "engine.rollout=hf",
    "executor=inline",
    "data.prompts=4",
    "engine.n=4",
    "engine.max_tokens=8",
    "trainer.mini_batches=2",
    "steps=2",
    "val.every=0",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "tracking.backends=[]",
    "reward.backoff=0.01",
)


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Returns what a condition is once it is true.

    Raises:
        AssertionError: it was not within the time.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


class Command:
    """``dataflow ARGUMENTS`` in a process of its own."""

    def __init__(self, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dataflow", *map(str, arguments)],
            cwd=cwd,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Returns its process and all below it."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Ends it and all processes below it with SIGKILL."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.communicate()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def done(self, seconds: float = 120.0) -> Done:
        """Waits for its end; a command that takes longer is killed, and the test fails."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return Done(self._process.returncode, out, err)


def command(*arguments: str | Path, cwd: Path | None = None, seconds: float = 120.0, **environment: str) -> Done:
    """Runs ``dataflow ARGUMENTS`` to its end."""
    return Command(*arguments, cwd=cwd, **environment).done(seconds)


@dataclass(frozen=True)
class Task:
    """A task of a trace; ``part`` counts from 0, times are seconds."""

    stage: str
    step: int
    part: int
    parts: int
    resource: str
    begin: float
    end: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """A reward request of a trace."""

    step: Any
    group: int
    sample: int
    begin: float
    end: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What a run leaves behind; also while it runs."""

    directory: Path
    error: str = ""

    def _events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.directory / "trace.json").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line.strip().rstrip(",")))
            except ValueError:  # the brackets, and the last line of a file that is written now
                continue
        return [event for event in found if isinstance(event, dict)]

    @property
    def meta(self) -> dict[str, Any]:
        """The trace's facts about the run."""
        return [e for e in self._events() if e["name"] == "process_labels"][-1]["args"]["meta"]

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the trace, as they ended."""
        names = ("stage", "step", "part", "parts", "resource", "begin_s", "end_s")
        return [Task(*(e["args"][n] for n in names), e["args"]) for e in self._events() if e.get("cat") == "task"]

    @property
    def requests(self) -> list[Request]:
        """The reward requests of the trace."""
        names = ("step", "group", "sample", "begin_s", "end_s")
        return [
            Request(*(e["args"][n] for n in names), e["args"])
            for e in self._events()
            if e.get("cat") == "request" and e["ph"] == "b"
        ]

    @property
    def levels(self) -> dict[str, list[float]]:
        """The values of each number that changes, in the order of the file."""
        found: dict[str, list[float]] = {}
        for event in self._events():
            if event.get("cat") == "level":
                found.setdefault(event["name"], []).append(event["args"]["value"])
        return found

    def task(self, stage: str, step: int, part: int = 0) -> Task:
        """Returns one task."""
        return self.has(stage, step, part) or self._missing(f"{stage}[{step}.{part + 1}]")

    def has(self, stage: str, step: int, part: int = 0) -> Task | None:
        """Returns one task, or None if it has not ended."""
        return next((t for t in self.tasks if (t.stage, t.step, t.part) == (stage, step, part)), None)

    def _missing(self, name: str) -> Any:
        raise AssertionError(f"{self.directory} has no task {name}")

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """The metrics of each step, those of several rows together."""
        found: dict[int, dict[str, Any]] = {}
        for line in (self.directory / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["step"], {}).update(row)
        return found

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @functools.cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The samples of all training steps, in the order of step, group and sample."""
        from pyarrow import parquet

        files = sorted((self.directory / "samples").glob("step_*.parquet"))
        rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
        return sorted(rows, key=lambda row: (row["step"], row["group"], row["sample"]))


@dataclass(frozen=True)
class Ask:
    """A request that came to the judge.

    Attributes:
        question, response: what is to be judged.
        nth: how often the same was asked before.
        at: when it came, in seconds of the monotonic clock.
    """

    question: str
    response: str
    nth: int
    at: float

    @property
    def text(self) -> str:
        return f"{self.question}\n{self.response}"

    @property
    def problem(self) -> int:
        """The number of the problem, from 0 (:func:`problems`)."""
        return int(re.findall(r"\d+", self.question)[0])


@dataclass(frozen=True)
class Reply:
    """What the judge sends back.

    Attributes:
        says: the text of the verdict; or
        body: the whole body.
        closes: sends nothing, and closes the connection.
        hangs: sends nothing until the client leaves.
    """

    says: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    closes: bool = False
    hangs: bool = False


def verdict(ask: Ask) -> float:
    """The judge's score of a response, never 0: a 0 in a run's files did not come from it."""
    return (1 + crc32(ask.text.encode()) % 9) / 10


class Judge:
    """An OpenAI-style server in threads; ``rule`` says what it answers, and may wait.

    Attributes:
        asked: the requests, as they came.
        answered: those that got a score.
        errors: what its rule asserted in vain, which :meth:`close` raises.
        most: how many it had at a time.
    """

    def __init__(self, rule: Callable[[Ask], float | Reply] = verdict) -> None:
        self.rule = rule
        self.asked: list[Ask] = []
        self.answered: list[Ask] = []
        self.errors: list[AssertionError] = []
        self.most = self.open = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        assert not self.errors, self.errors[0]

    @property
    def order(self) -> list[int]:
        """The problems in the order in which they came, which is that of the steps."""
        return list(dict.fromkeys(ask.problem for ask in list(self.asked)))

    def until_asked(self, problems: int) -> None:
        """Waits for the first request of so many problems."""
        until(lambda: len(self.order) >= problems, f"requests for {problems} problems")

    def _receive(self, body: Mapping[str, Any]) -> Ask:
        question, response = body["messages"][-1]["content"].split("\n", 1)
        with self._lock:
            nth = sum((a.question, a.response) == (question, response) for a in self.asked)
            self.asked.append(ask := Ask(question, response, nth, time.monotonic()))
            self.open += 1
            self.most = max(self.most, self.open)
        return ask

    def _handler(judge) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._send(200, {}, "{}")

            def do_POST(self) -> None:
                ask = judge._receive(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                try:
                    reply = judge.rule(ask)
                    if isinstance(reply, Reply) and reply.hangs:
                        self._hang()
                except AssertionError as error:  # which the run may survive by a further try
                    judge.errors.append(error)
                    raise
                finally:
                    with judge._lock:
                        judge.open -= 1
                if isinstance(reply, float):
                    with judge._lock:
                        judge.answered.append(ask)
                    reply = Reply(f"Looked at it.\nScore: {reply}")
                if reply.hangs or reply.closes:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                message = {"role": "assistant", "content": reply.says}
                body = {
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40},
                }
                self._send(reply.status, reply.headers, json.dumps(body) if reply.body is None else reply.body)

            def _hang(self) -> None:
                while not judge._over.is_set() and not select.select([self.connection], [], [], 0.05)[0]:
                    pass

            def _send(self, status: int, headers: Mapping[str, str], body: str) -> None:
                try:
                    self.send_response(status)
                    for name, value in {"Content-Type": "application/json", **headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body.encode())))
                    self.end_headers()
                    self.wfile.write(body.encode())
                except (BrokenPipeError, ConnectionResetError):  # the run has cancelled it
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        return Handler


def problems(count: int, path: Path) -> Path:
    """Writes a file of problems in GSM8K's form, each with its number."""
    rows = ({"question": f"Problem {n}: what is it?", "answer": f"#### {n}"} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(path: Path) -> Path:
    """Writes a Qwen2 of two layers with random weights, whose tokens are bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token=words[2], pad_token=words[0], chat_template=TEMPLATE, padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": words[1:2]})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": None}
    config = transformers.Qwen2Config(vocab_size=len(words), eos_token_id=2, pad_token_id=0, **sizes, **heads)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def scripted_model(path: Path, text: str) -> Path:
    """Writes a model that answers each prompt with one text, which is one token, and ends."""
    import torch
    import transformers

    tiny_model(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([text])
    model = transformers.Qwen2ForCausalLM.from_pretrained(path, tie_word_embeddings=False)
    model.resize_token_embeddings(len(tokenizer))
    said, end, tokens = tokenizer.convert_tokens_to_ids(text), tokenizer.eos_token_id, model.get_input_embeddings()
    with torch.no_grad():
        for layer in model.model.layers:  # what a token means reaches the head unchanged
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for weight in (tokens.weight, model.lm_head.weight):
            weight.zero_()
        tokens.weight[:, 0] = 1.0
        tokens.weight[said] = torch.eye(len(tokens.weight[0]))[1]
        model.lm_head.weight[said, 0] = model.lm_head.weight[end, 1] = 10.0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def classifier(path: Path) -> Path:
    """Writes the tiny model with a head of one label, whose outputs differ."""
    import torch
    import transformers

    tiny_model(path)
    # vLLM's attention on CPUs takes heads of 32 and more.
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.AutoConfig.from_pretrained(path, num_labels=1, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.Qwen2ForSequenceClassification(config)
        model.score.weight.data.normal_()
    model.save_pretrained(path)
    return path


def weights(model: Path) -> dict[str, Any]:
    """Returns the tensors of a saved model by name."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(model.glob("*.safetensors")) for name, value in load_file(file).items()}


class Trainer:
    """Trains the tiny model in this process, which is ten times cheaper than a command.

    Args:
        model: a directory with the model.
        data: a file of problems.
        template: a file with the prompt of the judge.
        new_folder: returns a new one for each run that names none.
    """

    def __init__(self, model: Path, data: Path, template: Path, new_folder: Callable[[], Path]) -> None:
        self.model, self._base = model, [*SMALL, f"model.path={model}", f"data.train={data}"]
        self._template, self._new_folder = template, new_folder

    def arguments(self, *overrides: str, judge: Judge | None = None, without: Sequence[str] = ()) -> list[str]:
        """Returns the arguments of a run; a later one replaces an earlier one of the same key."""
        scored = [f"judge.url={judge.url}", f"judge.template={self._template}"] if judge else []
        keys = {each.split("=", 1)[0]: each for each in [*self._base, *scored, *overrides]}
        return [each for key, each in keys.items() if key not in without]

    def __call__(
        self,
        *overrides: str,
        judge: Judge | None = None,
        folder: Path | None = None,
        fails: bool = False,
        pipeline: str = PIPELINE,
        without: Sequence[str] = (),
    ) -> Record:
        """Runs to the end.

        Args:
            overrides: ``key=value`` arguments beside those of ``SMALL``.
            judge: that scores; without one, the arguments name a reward.
            folder: where the run's directory ``run`` is made.
            fails: whether the run must end with an error, which the record then has.
            pipeline: the pipeline's file.
            without: keys of ``SMALL`` to leave out.
        """
        folder = folder or self._new_folder()
        arguments = self.arguments(f"runs={folder}", "name=run", *overrides, judge=judge, without=without)
        try:
            dataflow.run(pipeline, *arguments)
        except dataflow.DataflowError as error:
            if not fails:
                raise
            return Record(folder / "run", str(error))
        assert not fails, "the run ended without an error"
        return Record(folder / "run")
