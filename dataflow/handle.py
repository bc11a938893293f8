"""Handle: a worker group in a script, before its processes are started."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, TypeVar, cast

from .config import Config
from .errors import NoSuchNodeError, UserError, nearest
from .operation import Declaration, declaration_of

W = TypeVar("W")


def _from_here(config: Any) -> Any:
    """A configuration whose relative folders of models and tokenizers are absolute paths."""
    found: dict[str, Any] = {}
    for name, value in dict(config).items() if isinstance(config, Config) else ():
        if isinstance(value, str | Path) and ("model" in name or "tokenizer" in name):
            folder = Path(value).expanduser()
            if not Path(value).is_absolute() and folder.is_dir():
                found[name] = type(value)(folder.absolute()) if isinstance(value, str) else folder.absolute()
    return config.model_copy(update=found) if found else config


class Handle:
    """Stands for a worker group: its class, its configuration, its name.

    Inside a `@graph` function, calling one of its methods with rows records a node. Made by `group`, which types it
    as the worker class, so that an editor jumps from `rollout.generate` to the code.
    """

    def __init__(self, worker_class: type, config: Any, name: str | None) -> None:
        self.worker_class = worker_class
        self.given = config
        """Its configuration, as it was asked for."""
        self.config = _from_here(config)
        """The configuration that a run uses: with absolute paths, since a reward function may change the working directory, and with the
        adapter of its leader."""
        self.name = name
        self.leader: Handle | None = None
        """The group whose weights it loads."""
        self.follows_every = 1
        """Number of updates of the leader between two loads of its weights."""

    @property
    def called(self) -> str:
        """Its name; until a graph gives it one, that of its class: "actor" for `ActorWorker`."""
        return self.name or self.worker_class.__name__.removesuffix("Worker").lower()

    @property
    def transport(self) -> str:
        """How the weights that it publishes reach its followers; "auto" where its worker offers no choice."""
        return getattr(self.given, "transport", "auto")

    @property
    def vllm_backend(self) -> str:
        """vLLM's own backend by which it sends them, while it and its followers work at the same time; empty: none."""
        return getattr(self.given, "vllm_backend", "")

    def __repr__(self) -> str:
        return f"<handle {self.name or '(unnamed)'}: {self.worker_class.__name__}>"

    def follows(self, leader: object, *, every: int = 1) -> None:
        """Load the weights of `leader` after every `every`-th update of it.

        Args:
            leader: the handle of the group that publishes weights.
            every: number of updates between two loads.

        Raises:
            UserError: `leader` is not a handle or has no weights to publish, or this group cannot receive any.
        """
        if not isinstance(leader, Handle):
            raise UserError(f"{self.name or self.worker_class.__name__}.follows() takes a handle, not {leader!r}")
        if not isinstance(every, int) or every < 1:
            raise UserError(f"{self!r}.follows(every={every!r}): every must be an integer of at least 1")
        wanted = ((leader, "publish_weights"), (leader, "finish_publishing"), (self, "receive_weights"))
        for handle, method in wanted:
            if not hasattr(handle.worker_class, method):
                raise UserError(f"{self!r} cannot follow {leader!r}: {handle.worker_class.__name__} has no {method}()")
        if self.leader is not None and self.leader is not leader:
            raise UserError(f"{self!r} follows {self.leader!r} already; a group has one leader")
        self.leader, self.follows_every = leader, every

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        function = inspect.getattr_static(self.worker_class, method, None)
        declaration = declared(self.worker_class, method)
        if declaration is None or not declaration.is_node:
            declarations = ((n, declared(self.worker_class, n)) for n in dir(self.worker_class))
            known = [name for name, each in declarations if each is not None and each.is_node]
            hint = nearest(method, known) or f"; it has {', '.join(known) or 'none'}"
            raise NoSuchNodeError(f"{self.worker_class.__name__} has no node {method!r}{hint}")

        def call(*args: Any, **kwargs: Any) -> Any:
            add_node = getattr(args[0], "__trace__", None) if args else None
            if add_node is None:
                raise UserError(
                    f"{self!r}.{method}() takes the rows of a graph that is being traced first; call it inside a @weft.graph function"
                )
            return add_node(self, function, declaration, args[1:], kwargs)

        return call


def declared(worker_class: type, method: str) -> Declaration | None:
    """The declaration of a worker's method, or of the method that it overrides; None: it is not remote."""
    for each in worker_class.__mro__:
        declaration = declaration_of(vars(each).get(method))
        if declaration is not None:
            return declaration
    return None


def group(worker_class: type[W], *, name: str | None = None, **settings: Any) -> W:
    """A handle on a worker group of this class, configured by keyword (checked here, against `worker_class.Config`).

    Args:
        worker_class: the class of the workers.
        name: name of the group; None: the name of the parameter under which it is first passed to a graph.
        settings: fields of `worker_class.Config`.

    Raises:
        UserError: a setting is wrong, or the class has no `Config`.
    """
    made_of = getattr(worker_class, "Config", None)
    if not isinstance(made_of, type):
        raise UserError(
            f"weft.group({getattr(worker_class, '__name__', repr(worker_class))}): a worker class names the class of its settings; "
            "derive it from weft.Worker, with `Config = MyConfig` in it, where MyConfig is a weft.Config"
        )
    config = cast(Any, made_of)(**settings)
    return cast(W, Handle(worker_class, config, name))
