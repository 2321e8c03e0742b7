"""The configuration of reward models: those that a run serves, and those served elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dataflow.config.section import Section, Text


class PromptConfig(Section):
    """The prompt of a judge, and how its reply is read."""

    method: Literal["strict", "flexible"] = "strict"
    """Where the default prompt tells the judge to find the answer: on a line '#### <number>', or the last number."""
    template: Text | None = None
    """User message with {question}, {reference} and {response}, or a .txt or .md file with it; null for the default."""
    system: Text | None = None
    """System message, also a template; null for the default, or for none if template is given."""
    score_pattern: Text | None = None
    """Regular expression that matches the reply once; its group is the score; null for a line 'Score: <number>'."""
    score_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score that the judge may give."""
    normalize: bool = True
    """Map that range to 0..1."""
    temperature: NonNegativeFloat | None = 0.0
    """Temperature of the judge; null sends none."""
    max_tokens_reply: PositiveInt | None = None
    """Longest reply; null for the server's own limit."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the request's body."""


class ServedModelConfig(Section):
    """A reward model: served by the run, or elsewhere (url)."""

    path: Text | None = None
    """Directory of the model; required unless url is given."""
    url: Text | list[Text] | None = None
    """Base URL of a server that runs elsewhere, or of several equal ones; null serves the model in this run."""
    kind: Literal["classify", "pooling", "chat"] = "classify"
    """How it scores: classify and pooling return the raw score of a classification head, chat is a judge."""
    engine: Literal["vllm", "hf"] = "vllm"
    """What serves it: vllm, or transformers (hf) for tiny models of kind classify or pooling."""
    replicas: PositiveInt = 1
    """Servers, each with the whole model."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one server."""
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that a server takes."""
    max_num_seqs: PositiveInt = 64
    """Requests in flight at one server."""
    max_model_len: PositiveInt | None = None
    """Longest input of a request, in tokens; null for the model's own limit."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision: auto, bfloat16, float16 or float32; auto takes the model's on a GPU, float32 on a CPU."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further options of vllm serve, such as {enforce_eager: true}, or of the hf server, such as {threads: 4}."""
    placement: Literal["own", "colocated"] = "own"
    """own: on GPUs of its own; colocated: on those of trainer and engine, asleep except between rollout and update."""
    template: Text | None = None
    """Chat template, a Jinja file; null for the model's own."""
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    """The rubric of kind chat, and how its reply is read."""
    normalize: Literal["none", "sigmoid", "running"] = "none"
    """none: the raw score; sigmoid: of it; running: its distance from the mean of all earlier steps in deviations."""
    routing: Literal["least", "prefix"] = "least"
    """Who takes a request: least, the server with the fewest in flight; prefix, that which had its prompt before."""
    timeout: PositiveFloat = 60.0
    """Seconds that a server may take for a request; the request then goes to another server."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that a server may take to start; one given by url, to answer before the run starts."""
    restarts: NonNegativeInt = 3
    """How often its servers, counted together, may be restarted after they died."""

    @property
    def given_urls(self) -> tuple[str, ...]:
        """The servers' addresses, maybe with a login, where they are known."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' addresses without passwords, where they are known."""
        parts = map(urlsplit, self.given_urls)
        return tuple(each._replace(netloc=each.netloc.rpartition("@")[2]).geturl() for each in parts)

    @property
    def servers(self) -> int:
        """Number of its servers, here or elsewhere."""
        return len(self.urls) or self.replicas

    def client_options(self, name: str) -> dict[str, Any]:
        """Returns the keyword arguments of :class:`~dataflow.rewards.models.served.ServedReward`.

        Args:
            name: of the model.
        """
        keys = ("path", "kind", "template", "max_model_len", "routing", "timeout", "normalize")
        url = None if self.url is None else list(self.given_urls)
        own = self.model_dump(include={*keys, "prompt"})
        return {"name": name, "url": url, "slots": self.max_num_seqs, **own}

    def scoring(self, name: str) -> dict[str, Any]:
        """Returns all that decides its scores: an answer is used again only where this is equal.

        Args:
            name: of the model.
        """
        keys = {"path", "kind", "engine", "dtype", "engine_kwargs", "template", "max_model_len", "normalize", "prompt"}
        # A running normalisation comes after the agent, whose answers are raw scores.
        rule = "none" if self.normalize == "running" else self.normalize
        # The run's own servers have other ports each time; of one that runs elsewhere nothing else is known.
        at = None if self.path else sorted(self.urls)
        return {"name": name, "url": at, **self.model_dump(include=keys), "normalize": rule}

    def server_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of :func:`~dataflow.rewards.models.server.server_command` about the model."""
        keys = {"kind", "engine", "dtype", "tensor_parallel", "gpu_memory", "max_num_seqs", "max_model_len"}
        paths = {key: None if value is None else str(Path(value).expanduser())
                 for key, value in (("path", self.path), ("template", self.template))}  # fmt: skip
        return {**self.model_dump(include=keys | {"engine_kwargs"}), **paths, "sleeps": self.placement == "colocated"}

    @model_validator(mode="after")
    def _keys_of_a_server_of_this_run(self) -> ServedModelConfig:
        try:
            _ = self.urls
        except ValueError as error:  # not with the url, which may hold a password
            raise ValueError(f"url is no address ({error}); give http://host:port") from None
        if self.url is None:
            return self
        # With path, too, the others say what scores: a run that has served the model may be resumed with a url.
        others = () if self.path is not None else ("engine", "dtype", "engine_kwargs")
        for key in ("replicas", "tensor_parallel", "gpu_memory", "restarts", *others):
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                raise ValueError(
                    f"{key} has no effect with url, whose servers the run does not start; leave it at {default}"
                )
        return self

    @model_validator(mode="after")
    def _one_place(self) -> ServedModelConfig:
        if (self.path is None) == (self.url is None) and self.path is None:
            raise ValueError("give path=DIR to serve it in this run, or the url of its server")
        if self.engine == "hf" and self.kind == "chat" and self.url is None:
            raise ValueError("engine=hf serves kind classify and pooling; give engine=vllm for kind=chat")
        if self.engine == "hf" and self.url is None:
            for key, default in (("tensor_parallel", 1), ("gpu_memory", 0.9)):
                if getattr(self, key) != default:
                    raise ValueError(f"{key} has no effect with engine=hf, which has one GPU or none; leave it out")
        if "model" in self.prompt.options:
            raise ValueError("prompt.options may not contain 'model': requests name it as its section; rename that")
        if self.kind != "chat" and self.prompt != PromptConfig():
            raise ValueError(f"prompt has no effect with kind={self.kind}; leave it out, or give kind=chat")
        return self
