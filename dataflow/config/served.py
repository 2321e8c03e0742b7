"""The configuration of reward models: those that a run serves, and those served elsewhere."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from dataflow.config.section import Fraction, Section, Text, Texts
from dataflow.system.address import is_address


class PromptConfig(Section):
    """The prompt of a judge, and how its reply is read."""

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
    url: Texts | None = None
    """Base URL of a server that runs elsewhere, or of several equal ones; null serves the model in this run."""
    kind: Literal["classify", "pooling", "chat"] = "classify"
    """How it scores: classify and pooling return the raw score of a classification head, chat is a judge."""
    replicas: PositiveInt = 1
    """Servers, each with the whole model."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one server."""
    gpu_memory: Fraction = 0.9
    """Share of each GPU's memory that a server takes."""
    max_num_seqs: PositiveInt = 64
    """Requests in flight at one server."""
    max_model_len: PositiveInt | None = None
    """Longest input of a request, in tokens; a longer one is an error; null for the model's own limit."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision: auto, bfloat16, float16 or float32; auto takes the model's on a GPU, float32 on a CPU."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further options of vllm serve, such as {enforce_eager: true}."""
    placement: Literal["own", "colocated"] = "own"
    """own: on GPUs of its own; colocated: on those of trainer and engine, awake only while it scores a step."""
    template: Text | None = None
    """Chat template, a Jinja file; null for the model's own."""
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    """The rubric of kind chat, and how its reply is read."""
    normalize: Literal["none", "sigmoid"] = "none"
    """none: the raw score; sigmoid: of it."""
    routing: Literal["power_of_two", "cache_aware", "round_robin", "consistent_hash"] = "power_of_two"
    """How vllm-router chooses among several servers: power_of_two by load, cache_aware by what their caches hold."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that a server may take to start, or to wake; one given by url, to answer before the run starts."""
    restarts: NonNegativeInt = 3
    """How often its servers and their router, counted together, may be restarted after they died."""
    _base: str | None = PrivateAttr(None)
    _servers: tuple[str, ...] = PrivateAttr(())

    @property
    def servers(self) -> int:
        """Number of its servers, here or elsewhere."""
        return len(self.url or ()) or self.replicas

    def serve_at(self, base: str, servers: tuple[str, ...]) -> None:
        """Sets where it is while the run serves it.

        ``base`` is the URL of the only server or of the router; ``servers`` are those of the servers, where they are
        known.
        """
        self._base, self._servers = base, servers

    @property
    def base(self) -> str | None:
        """URL for requests; None before the run serves it."""
        return self._base or (self.url[0] if self.url is not None and len(self.url) == 1 else None)

    @property
    def each_server(self) -> tuple[str, ...]:
        """URLs of its servers, where they are known."""
        return self._servers or tuple(self.url or ())

    def client_options(self, name: str) -> dict[str, Any]:
        """Returns the keyword arguments of :class:`~dataflow.rewards.models.served.ServedReward`."""
        keys = {"path", "kind", "normalize", "prompt"}
        return {"name": name, "url": self.base, **self.model_dump(include=keys)}

    def scoring(self, name: str) -> dict[str, Any]:
        """Returns all that decides its scores: an answer is used again only where this is equal."""
        keys = {"path", "kind", "dtype", "engine_kwargs", "template", "max_model_len", "normalize", "prompt"}
        # The run's own servers have other ports each time; of one that runs elsewhere nothing else is known.
        at = None if self.path else sorted(self.url or ())
        return {"name": name, "url": at, **self.model_dump(include=keys)}

    @model_validator(mode="after")
    def _one_place(self) -> ServedModelConfig:
        if self.path is None and self.url is None:
            raise ValueError("give path=DIR to serve it in this run, or the url of its server")
        if any(
            not is_address(url) or "@" in url for url in self.url or ()
        ):  # not with the url, which may hold a password
            raise ValueError("url is no address of a server; give http://host:port, without a login")
        if "model" in self.prompt.options:
            raise ValueError("prompt.options may not contain 'model': requests name it as its section; rename that")
        if self.kind != "chat" and self.prompt != PromptConfig():
            raise ValueError(f"prompt has no effect with kind={self.kind}; leave it out, or give kind=chat")
        # With path, too, the others say what scores: a run that has served the model may be resumed with a url.
        others = () if self.path is not None else ("dtype", "engine_kwargs", "template", "max_model_len")
        for key in ("replicas", "tensor_parallel", "gpu_memory", *others) if self.url is not None else ():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                raise ValueError(
                    f"{key} has no effect with url, whose servers the run does not start; leave it at {default}"
                )
        return self
