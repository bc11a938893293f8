"""RolloutWorker: sample responses to prompts, and return each one as soon as it finishes."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..algorithms.sampling import Sampling
from ..dataflow.batch import Batch
from ..dataflow.column import (
    BEGUN_NUMBER,
    DRAW_PATH,
    EXPECTED_TOKENS,
    FINISH_REASON,
    GROUP_ID,
    IDENTITY,
    IMAGES,
    KEPT_COUNTS,
    KEPT_IDS,
    MADE_BEFORE,
    POLICY,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    ROUTES,
    SAMPLE_ID,
    TEMPERATURE,
)
from ..dataflow.errors import GenerationError, SampleError, UserError
from ..dataflow.graph import Handle
from ..dataflow.lazy import torch
from ..dataflow.metrics import Max, Mean, Metrics, Sum
from ..dataflow.operation import ALL_COLUMNS, Shape
from .agents.harness import Interact, PlannedHarness, as_harness
from .agents.link import Hello, Link
from .agents.serving import EpisodeCall, EpisodeServer, episode_columns
from .dispatch import Dispatch
from .environment import EnvWorker
from .generation.engine import (
    GenerationEngine,
    GenerationRequest,
    Response,
    generate,
    stable_hash,
)
from .generation.longest_first import HandOver, LongestFirst
from .generation.transformers_engine import TransformersEngine
from .generation.vllm_engine import VllmEngine
from .generation.vllm_settings import LORA_RANKS
from .kept_sets import KeptSets, kept_columns
from .models.images import ImageReader
from .models.model_folder import (
    context_of,
    read_model_config,
    read_vocabulary,
    sees_images,
)
from .models.node_folder import node_folder
from .node_memory import node_memory
from .worker import IDLE, Children, Context, Unfinished, Worker, rank_device, remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source
    from ..resharding.weights import Weights


from .rollout_config import RolloutConfig, context_at_start

MAX_RESPONSES = 10_000_000
"""Limit on the responses of one `generate` call, which holds a request for each."""
EpisodeParts = Generator[tuple[Children, Metrics] | Literal["idle"] | None, Collection[int] | None, None]
"""Yields the rows of ended episodes, None after a step of the engine, or IDLE."""
POLL_S = 0.001
"""[s] Polling interval for new weights while the engine has nothing to decode."""


def _writes(sampling: Sampling, config: RolloutConfig, policy: str | None) -> tuple[str, ...]:
    more = (RESPONSE_VERSIONS, FINISH_REASON, TEMPERATURE, *((ROUTES,) if config.routes else ()))
    return (str(RESPONSE_IDS), *sampling.writes, *map(str, more), *_of_policy(policy))


def _writes_of_run(harness: object, sampling: Sampling, policy: str | None) -> tuple[str, ...]:
    return (*episode_columns(harness, sampling), *_of_policy(policy))


def _of_policy(policy: str | None) -> tuple[str, ...]:
    return () if policy is None else (str(POLICY),)


def _interact_with(env: Any) -> Interact:
    """Return the harness of a group of environments. Raises a UserError if the handle is of another
    group."""
    if not issubclass(getattr(env, "worker_class", object), EnvWorker):
        raise UserError(
            f"interact(env=...) takes a group of environments, weft.group(weft.EnvWorker, make=...), not {env!r}"
        )
    return Interact(env=env.called)


@dataclass(frozen=True)
class _WithPolicy:
    rollout: Any
    policy: Any

    def __getattr__(self, method: str) -> Any:
        # Pickle and copy look up special methods on instances.
        if method.startswith("__"):
            raise AttributeError(method)
        return partial(getattr(self.rollout, method), policy=self.policy)


def with_policy(rollout: Any, actor: Any) -> Any:
    """Return a rollout group that samples with the adapter of one of the actors that it follows, for
    any graph: `grpo(prompts, rollout=weft.with_policy(rollout, actor), reward=reward, actor=actor)`.
    Raises a UserError unless both are handles."""
    for handle in (rollout, actor):
        if not isinstance(handle, Handle):
            raise UserError(
                f"with_policy() takes the handles of a rollout group and of an actor, made by weft.group, not {handle!r}"
            )
    return _WithPolicy(rollout, actor)


class RolloutWorker(Worker):
    """One replica of the policy that generates responses."""

    Config = RolloutConfig
    replaceable = True
    config: RolloutConfig

    def __init__(self, config: RolloutConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        rank_device(context)  # sets the device that the engine will use
        self._folder = node_folder(config.model, advance=context.advance)
        self.max_context = config.max_context or context_at_start(self._folder)
        self._vocabulary = read_vocabulary(self._folder)
        self._generating = 0
        """Number of calls that are sampling."""
        self._hand_over: HandOver | None = None
        """Request of the driver to the running `generate`."""
        # Requests without a seed must differ between replicas.
        seed = stable_hash(context.seed, context.rank) % 2**31
        reads_images = sees_images(read_model_config(self._folder))
        self._images = ImageReader(config.model, self._folder) if reads_images else None
        # A user's own engine may not accept these.
        served = {
            "adapters": config.adapters or None,
            "images": self._images,
            "kept_sets": config.kept_sets or None,
        }
        served = {name: value for name, value in served.items() if value is not None}
        self.engine = self.new_engine(
            max_context=self.max_context, dtype=config.dtype, seed=seed, **served
        )

    def new_engine(self, **settings: Any) -> GenerationEngine:
        """Create the generation engine. Subclasses may override this."""
        if self.config.engine == "vllm":
            return VllmEngine(str(self._folder), self.config, routes=self.config.routes, **settings)
        settings |= {"max_num_seqs": self.config.max_num_seqs, "routes": self.config.routes}
        return TransformersEngine(str(self._folder), **settings)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=(PROMPT_IDS,),
        may_read=(DRAW_PATH, MADE_BEFORE, EXPECTED_TOKENS, BEGUN_NUMBER, IMAGES),
        writes=_writes,
    )
    def generate(
        self,
        prompts: Batch,
        *,
        n: int = 1,
        sampling: Sampling = Sampling(),
        policy: Worker | str | None = None,
    ) -> Generator[tuple[Children | Unfinished, Metrics] | None, Collection[int] | None, None]:
        """Sample `n` responses to each prompt.

        After each engine step, yields the responses that finished in it. If none did, yields None,
        which lets another call on this worker run. The caller may send back the sample ids of
        prompts whose remaining responses are no longer wanted.

        Args:
            prompts: has the columns `sample_id`, `group_id` and `prompt_ids` ([P] int32). Optional:
                `draw_path` (in later expansions of a graph), `made_before` (numbers of responses
                that already exist), `expected_tokens` (starts the longest responses first),
                `begun_number` (continues one response per row, which another replica began and whose
                columns the row has), and `images`, each with a placeholder in the prompt.
            policy: the handle of the actor whose adapter samples, if the group follows several. A
                worker gets its name.

        Returns:
            Rows with `parent_id` (the prompt's `sample_id`), `response_ids` [L] int32,
            `response_logprobs` [L] float32 nats, `response_versions` [L] int32, `finish_reason`,
            `temperature` float32 and, if set in the configuration, `routes`. Log-probabilities are
            those of the sampling distribution; for greedy responses, of the model's own
            distribution (with `temperature` 1). If the sampling truncates the distribution and a
            trainer reads the rows, they also have `kept_counts` and `kept_ids`. With `policy`, they
            have the column `policy`; their versions count its updates. Metrics: `tokens`,
            `response_length` and `truncation_rate` (share of responses that reached the token limit);
            with speculation, also `speculating` and the metrics of `DraftCounts`.

        Raises:
            SampleError: a prompt is empty or too long, or its images are unreadable.
            GenerationError: the engine fails, or lacks the kept sets that a trainer needs.
        """
        if n < 1 or n * len(prompts) > MAX_RESPONSES:
            raise UserError(
                f"n={n}: {len(prompts)} prompts have {n * len(prompts):,} responses in one "
                f"call; choose n for 1 to {MAX_RESPONSES:,} responses"
            )
        values, offsets = prompts.ragged_numpy(PROMPT_IDS)
        prompt_ids = np.split(values, offsets[1:-1]) if len(prompts) else []
        sample_ids, group_ids = prompts.numpy(SAMPLE_ID), prompts.numpy(GROUP_ID)
        images: list[list[Any]] = [[] for _ in range(len(prompts))]
        if IMAGES in prompts:
            images = [[image.as_buffer() for image in row.values or ()] for row in prompts[IMAGES]]
        self._check_prompts(prompt_ids, images, sample_ids, sampling.max_tokens)
        draws = prompts[DRAW_PATH].to_pylist() if DRAW_PATH in prompts else [[]] * len(prompts)
        made = prompts[MADE_BEFORE].to_pylist() if MADE_BEFORE in prompts else [[]] * len(prompts)
        begun_numbers = prompts[BEGUN_NUMBER].to_pylist() if BEGUN_NUMBER in prompts else None
        begun = [] if begun_numbers is None else _begun(prompts)
        requests: list[GenerationRequest] = []
        of_rows: list[range] = []
        """Indexes of the requests of each row."""
        for row, ids in enumerate(prompt_ids):
            first = len(requests)
            own = range(n) if begun_numbers is None else (begun_numbers[row],)
            for index in (index for index in own if index not in made[row]):
                seed = self._seed(int(group_ids[row]), draws[row], ids.tobytes(), index)
                number = row * n + index
                requests.append(GenerationRequest(number, ids, seed, images[row], policy=_name(policy)))
            of_rows.append(range(first, len(requests)))
        # Number of unfinished responses per prompt.
        left = Counter(request.request_id // n for request in requests)
        given_up: list[int] = []
        order = slots = None
        if EXPECTED_TOKENS in prompts:
            so_far = {index: len(response.token_ids) for index, response in enumerate(begun)}
            order = LongestFirst(of_rows, prompts.numpy(EXPECTED_TOKENS), so_far)
            slots = self.config.max_num_seqs
        steps = generate(self.engine, requests, sampling, order=order, slots=slots, begun=begun)
        # `send` raises StopIteration when the engine has finished.
        self._generating += 1
        self._hand_over = None
        try:
            with contextlib.closing(steps), contextlib.suppress(StopIteration):
                while True:
                    responses = sorted(steps.send(given_up or None), key=lambda one: one.request_id)
                    self.context.advance()
                    self._check_kept_sets(responses, sampling)
                    left.subtract(response.request_id // n for response in responses)
                    if responses:
                        children = _children(responses, sample_ids, left, n, sampling, policy)
                        sent = yield children, {**_metrics(responses), **self._engine_metrics()}
                    else:
                        sent = yield None
                    if self._hand_over is not None and (given := steps.send(self._hand_over)):
                        self._hand_over = None
                        left.subtract(response.request_id // n for response in given)
                        unfinished = self._unfinished(given, sample_ids, left, n, sampling, policy)
                        moved = {"moved_responses": Sum(float(len(given)))}
                        sent = [*(sent or ()), *((yield unfinished, moved) or ())]
                    rows = np.flatnonzero(np.isin(sample_ids, list(sent))) if sent else ()
                    given_up = [row * n + index for row in rows for index in range(n)]
        finally:
            self._generating -= 1

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def hand_over(self, parts: int = 2, min_tokens: int = 0) -> None:
        """Ask the running `generate` to give up unfinished responses once, for other replicas to
        continue (see `HandOver`). It does so as soon as it has some to give."""
        if self._generating:
            self._hand_over = HandOver(parts, min_tokens)

    def _unfinished(
        self,
        given: Sequence[Response],
        sample_ids: np.ndarray,
        left: Mapping[int, int],
        n: int,
        sampling: Sampling,
        policy: Worker | str | None,
    ) -> Unfinished:
        kept = KeptSets.whole(0) if self.config.kept_sets and sampling.truncates else None
        routes = np.zeros(0, np.uint16) if self.config.routes else None
        # The next engine computes the routes of all tokens.
        given = [replace(one, kept_sets=one.kept_sets or kept, routes=routes) for one in given]
        children = _children(given, sample_ids, left, n, sampling, policy)
        return Unfinished(children.rows, children.numbers, children.finished)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        may_read=(ALL_COLUMNS, *IDENTITY),
        writes=_writes_of_run,
    )
    def run(
        self,
        prompts: Batch,
        *,
        harness: Any,
        n: int = 1,
        sampling: Sampling = Sampling(),
        policy: Worker | str | None = None,
    ) -> EpisodeParts:
        """Run `n` episodes of a harness for each prompt, and make training rows of their turns.

        The harness talks to the model over HTTP, in its own process. An episode has one row, or
        several if its conversation branches. All tokens in a row are those that the model sampled or
        was given.

        Args:
            prompts: any columns. The harness gets all of them but token ids and images.
            harness: a function `async def run(row, *, base_url, api_key) -> float`, a class whose
                methods are tools, or a `Harness` of `workers/agents/harness.py`.
            sampling: `max_tokens` limits one turn; `max_context` limits a conversation.
            policy: as in `generate`.

        Returns:
            The columns of `generate`, and `prompt_ids` [P] int32 of the conversation,
            `response_mask` [L] (0 for given tokens), `turn_ends`, `episode_id`, `episode_rows`,
            `episode_tokens`, and the columns of the harness, such as `reward`. Metrics: the
            metrics of `generate`, `turns`, `episode_rows`, `retokenised`, `dropped_episodes` and `WHERE_failures`.

        Raises:
            SampleError: all episodes of a prompt failed, and the policy did not cause it.
            GatewayLost: the gateway is gone, and no other answers in time.
        """
        call = EpisodeCall(prompts, as_harness(harness), n, sampling, self._seed, _name(policy))
        # The gateway finds the model as the driver does; this rank may be on another node.
        parsers = self.config.tool_parser, self.config.reasoning_parser
        opened = call.opened(str(self.config.model), self.max_context, *parsers)
        server = self._episodes
        self._generating += 1
        try:
            server.open(opened)
            while call.pending:
                server.work()
                self.context.advance()
                if ended := call.take(server.take_ended(opened)):
                    ended = ended[0], {**ended[1], **self._engine_metrics()}
                sent = yield ended or (None if server.is_sampling else IDLE)
                if given_up := call.give_up(sent or ()):
                    server.close(opened, given_up)
        finally:
            self._generating -= 1
            server.close(opened, [*call.pending])
        call.check()

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        may_read=(ALL_COLUMNS, *IDENTITY),
        writes=lambda env, sampling, policy: _writes_of_run(_interact_with(env), sampling, policy),
    )
    def interact(
        self,
        prompts: Batch,
        *,
        env: EnvWorker | str,
        n: int = 1,
        sampling: Sampling = Sampling(),
        policy: Worker | str | None = None,
    ) -> EpisodeParts:
        """Play `n` episodes for each prompt in the environments of an `EnvWorker` group. Returns what
        `run` returns, with `reward` (the sum of an episode's rewards) and `turn_rewards`.

        Args:
            env: the handle of the group. A worker gets its name.
            policy: as in `generate`.
        """
        assert isinstance(env, str)
        harness = Interact(env=env)
        yield from self.run(prompts, harness=harness, n=n, sampling=sampling, policy=policy)

    @cached_property
    def _episodes(self) -> EpisodeServer:
        address = self.context.gateway
        if address is None:
            raise UserError(f"{self.context.name}.run() needs a gateway, which only a driver starts")
        hello = Hello(self.context.name, self.context.rank, self.config.max_num_seqs)
        return EpisodeServer(self.engine, lambda: Link(address, hello, self.context.wake))

    @remote(dispatch=Dispatch.ONE_TO_ALL, interruptible=True)
    def receive_weights(
        self, weights: Weights, recompute: bool = False, policy: str = ""
    ) -> str | Generator[None, None, tuple[str, Metrics]]:
        """Load a published version of the weights, and return its checksum. With a double buffer
        and while the worker is sampling, return a generator: it yields while the version arrives,
        and returns the checksum and the metric `weights_pause_s`. `recompute` rebuilds the KV cache
        of unfinished responses. `policy` is the actor that published the weights, if the group
        follows several. Raises a WeightSyncError if the bytes differ from the published ones or do
        not fit the model."""
        weights = weights.to(f"{self.context.name}[{self.context.rank}]")
        # vLLM's own backends write directly into the model, so they cannot stage a version.
        # Adapters are small enough to load at once.
        if self._generating and not policy and self._doubles and not weights.backend:
            return self._stage(weights, recompute)
        return self._take(weights, recompute, policy)

    @cached_property
    def _doubles(self) -> bool:
        """Whether new weights arrive in separate memory while the worker uses the old ones."""
        if self.config.double_buffer is not None:
            return self.config.double_buffer
        memory = None if torch.cuda.is_available() else node_memory()
        return memory is not None and memory.free_bytes >= 2 * self.engine.weight_bytes()

    def _take(self, weights: Weights, recompute: bool, policy: str = "") -> str:
        # A user's own engine may not accept a policy.
        named = {"policy": policy} if policy else {}
        checksum = self.engine.update_weights(weights, **named)
        if recompute:
            self.engine.recompute()
        return checksum

    def _stage(self, weights: Weights, recompute: bool) -> Generator[None, None, tuple[str, Metrics]]:
        for _ in self.engine.stage_weights(weights):
            self.context.advance()
            if not self.engine.num_unfinished:
                time.sleep(POLL_S)
            yield
        started = time.perf_counter()
        checksum = self._take(weights, recompute)
        return checksum, {"weights_pause_s": Max(time.perf_counter() - started)}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def canary(self, policy: str = "") -> Canary:
        """Sample a few responses to random prompts, for `check_canary`."""
        prompts = _canary_prompts(self._vocabulary)
        max_tokens = min(_CANARY_RESPONSE_TOKENS, self.max_context - _CANARY_PROMPT_TOKENS)
        requests = [
            GenerationRequest(row, ids, seed=row, policy=policy) for row, ids in enumerate(prompts)
        ]
        steps = generate(self.engine, requests, Sampling(max_tokens=max_tokens, stop=None))
        found = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
        dtype, quantised = self.config.dtype, self.config.quantization is not None
        full = dtype == "float32" or (dtype == "auto" and not torch.cuda.is_available())
        return Canary(
            tuple(tuple(ids.tolist()) for ids in prompts),
            tuple(tuple(one.token_ids.tolist()) for one in found),
            tuple(tuple(one.logprobs.tolist()) for one in found),
            exact=full and not quantised,
        )

    def onload(self) -> None:
        self.engine.wake_up()

    def offload(self, discard_weights: bool = False) -> None:
        if discard_weights:  # engines of users need not know the argument
            self.engine.sleep(discard_weights=True)
        else:
            self.engine.sleep()

    def close(self) -> None:
        self.engine.close()

    def _seed(self, group_id: int, draw: Sequence[int], content: bytes, index: int) -> int | None:
        """Return the seed of one response. It depends on prompt and draw path, because rows of
        later turns share their group and may share their prompt."""
        if not self.config.seeded:
            return None
        return stable_hash(self.context.seed, group_id, *draw, index, content=content)

    def _check_prompts(
        self,
        prompt_ids: Sequence[np.ndarray],
        images: Sequence[Sequence[Any]],
        sample_ids: np.ndarray,
        max_tokens: int,
    ) -> None:
        size = np.inf if self._vocabulary is None else self._vocabulary
        problems: dict[int, str] = {}
        for row, ids in enumerate(prompt_ids):
            length = len(ids)
            if images[row] and self._images is None:
                problems[row] = f"it has images, but the model in {self.config.model} reads text alone"
                continue
            if images[row] and self._images is not None:
                try:
                    length = len(self._images.read(ids, images[row]).ids)
                except UserError as error:
                    problems[row] = str(error)
                    continue
            if not length:
                problems[row] = "the prompt has no tokens"
            elif length + max_tokens > self.max_context:
                both = f"{length} prompt tokens and max_tokens={max_tokens}"
                problems[row] = f"{both} exceed the context of {self.max_context}"
            elif (largest := ids.max()) >= size:
                problems[row] = (
                    f"the prompt has token id {largest}, and the model has ids 0 to {size - 1}"
                )
        if problems:
            row, problem = next(iter(problems.items()))
            raise SampleError(
                f"sample {sample_ids[row]}: {problem}", sample_ids[list(problems)].tolist()
            )

    def _engine_metrics(self) -> Metrics:
        return self.engine.take_metrics() if isinstance(self.engine, VllmEngine) else {}

    def _check_kept_sets(self, responses: Sequence[Response], sampling: Sampling) -> None:
        if self.config.kept_sets and sampling.truncates and any(r.kept_sets is None for r in responses):
            raise GenerationError(
                f"{type(self.engine).__name__} returned no kept_sets with a response to {sampling!r}, which a trainer reads; let it record "
                "them (workers/kept_sets.py), or sample from the whole vocabulary"
            )

    @classmethod
    def needs_gateway(cls, nodes: Sequence[Node]) -> bool:
        return any({"harness", "env"} & node.arguments.keys() for node in nodes)

    @classmethod
    def sent_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if "harness" not in arguments:
            return arguments
        return {**arguments, "harness": PlannedHarness.of(as_harness(arguments["harness"]))}

    @classmethod
    def check(cls, config: RolloutConfig, nodes: Sequence[Node], source: Source) -> None:
        config.check(nodes, source)
        takes = inspect.signature(cls.new_engine).parameters.values()
        if config.kept_sets and not any(p.name == "kept_sets" or p.kind is p.VAR_KEYWORD for p in takes):
            raise UserError(
                f"{cls.__name__}.new_engine does not take kept_sets, so its engine cannot record from which tokens it samples, which a "
                "trainer reads; add the parameter (docs/your_own.md), or sample without top_p, top_k, min_p and min_tokens"
            )

    @classmethod
    def check_machine(cls, config: RolloutConfig, ranks: int) -> None:
        memory = node_memory()
        if config.engine == "vllm" and memory is not None:
            config.check_memory(memory.free_bytes, "this machine", ranks)

    @classmethod
    def refuses_adapter(cls, config: RolloutConfig, leader: Any) -> str:
        if cls.new_engine is not RolloutWorker.new_engine:
            return f"{cls.__name__} has a custom engine"
        if leader.vllm_backend:
            return f"transport={leader.transport!r} carries complete weights"
        if str(config.model) != str(leader.model):
            return f"it starts from the model {config.model}, and the adapter belongs to {leader.model}"
        if config.dtype not in ("auto", leader.dtype):
            return f"its dtype is {config.dtype}, and the actor's is {leader.dtype}"
        if config.quantization is not None:
            return f"it has quantization={config.quantization!r}, and takes complete weights"
        if config.engine == "vllm" and leader.lora.dora:
            return "vLLM cannot serve adapters with dora=True"
        if config.engine == "vllm" and leader.lora.rank > LORA_RANKS[-1]:
            return f"vLLM serves adapters up to rank {LORA_RANKS[-1]}, and this one has rank {leader.lora.rank}"
        return ""

    @classmethod
    def discards_weights(cls, config: RolloutConfig) -> bool:
        # An adapter's base model and the weights of drafts never arrive again.
        own, drafts = RolloutWorker, config.speculation
        keeps = bool(config.adapters) or (drafts is not None and drafts.has_weights)
        return cls.offload is own.offload and cls.new_engine is own.new_engine and not keeps

    @classmethod
    def refuses_vllm_backends(cls, config: RolloutConfig) -> str:
        if cls.new_engine is not RolloutWorker.new_engine:
            return f"{cls.__name__} has a custom engine"
        if config.engine != "vllm":
            return f"its engine is {config.engine!r}, not vLLM"
        unsupported = "it has double_buffer=True, which vLLM's backends do not support"
        return unsupported if config.double_buffer else ""

    @classmethod
    def longest_prompt(cls, config: RolloutConfig, nodes: Sequence[Node]) -> int | None:
        context = config.max_context or context_of(read_model_config(config.model))
        if context is None:
            return None
        # Only prompts of the source ("") are filtered by length.
        given = [n.arguments for n in nodes if n.writers.get(str(PROMPT_IDS)) == ""]
        samplings = [arguments.get("sampling", Sampling()) for arguments in given]
        return min((context - s.max_tokens for s in samplings if isinstance(s, Sampling)), default=None)


# Canary: log-probabilities that a rank and its trainer both compute before the rank serves the run.
#
# Checksums show that the weights arrived. The canary shows that both sides compute the same
# results with them. A rank samples it once, after its first weights.

_CANARIES = 4
_CANARY_PROMPT_TOKENS = 4
_CANARY_RESPONSE_TOKENS = 12


@dataclass(frozen=True)
class Canary:
    """Samples of a rank, as plain data."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities of each response's tokens, in nats."""
    exact: bool
    """Whether the rank computes in float32, with unquantised weights."""


def _canary_prompts(vocabulary: int | None) -> list[np.ndarray]:
    """Return the prompts that every rank answers, [_CANARY_PROMPT_TOKENS] int32 each.

    >>> len(_canary_prompts(100)), int(max(ids.max() for ids in _canary_prompts(3))) < 3
    (4, True)
    """
    # If config.json lacks the vocabulary size, only the smallest ids are certain to be valid.
    drawn = np.random.default_rng(0).integers(0, vocabulary or 2, (_CANARIES, _CANARY_PROMPT_TOKENS))
    return list(drawn.astype(np.int32))


def _children(
    responses: Sequence[Response],
    sample_ids: np.ndarray,
    left: Mapping[int, int],
    n: int,
    sampling: Sampling,
    policy: Worker | str | None,
) -> Children:
    """Return responses as child rows. `left` maps a prompt's row to its unfinished responses."""
    rows, numbers = np.divmod(np.array([response.request_id for response in responses], np.int64), n)
    finished = [row for row in dict.fromkeys(rows.tolist()) if not left[row]]
    batch = _batch(sample_ids[rows], responses, sampling)
    if policy is not None:
        batch = batch.with_columns(**{str(POLICY): [_name(policy)] * len(batch)})
    return Children(batch, numbers, sample_ids[finished])


def _name(policy: Worker | str | None) -> str:
    """Return a policy as requests name it. Workers get names instead of handles."""
    assert policy is None or isinstance(policy, str)
    return policy or ""


def _batch(parent_ids: np.ndarray, responses: Sequence[Response], sampling: Sampling) -> Batch:
    offsets = np.cumsum([0, *(len(r.token_ids) for r in responses)], dtype=np.int32)
    columns = {
        str(RESPONSE_IDS): (np.concatenate([r.token_ids for r in responses]), offsets),
        str(RESPONSE_LOGPROBS): (np.concatenate([r.logprobs for r in responses]), offsets),
        str(RESPONSE_VERSIONS): (np.concatenate([r.versions for r in responses]), offsets),
        str(FINISH_REASON): [r.finish_reason for r in responses],
        # Trainers divide logits by it; greedy responses use the model's own distribution.
        str(TEMPERATURE): np.full(len(responses), sampling.temperature or 1.0, dtype=np.float32),
    }
    if responses[0].routes is not None:
        routes = [r.routes.ravel() for r in responses if r.routes is not None]
        columns[str(ROUTES)] = (
            np.concatenate(routes),
            np.cumsum([0, *map(len, routes)], dtype=np.int32),
        )
    if kept := [r.kept_sets for r in responses if r.kept_sets is not None]:
        columns |= kept_columns(kept)
    return Batch.of(parent_id=parent_ids, **columns)


def _begun(rows: Batch) -> list[Response]:
    """Return the response so far of each row of a call that continues responses."""
    has_kept = KEPT_COUNTS in rows
    names = (RESPONSE_IDS, RESPONSE_LOGPROBS, RESPONSE_VERSIONS, *(KEPT_COUNTS, KEPT_IDS) * has_kept)
    columns: list[list[np.ndarray]] = []
    for name in names:
        values, offsets = rows.ragged_numpy(name)
        columns.append(np.split(values, offsets[1:-1]) if len(rows) else [])
    return [
        Response(
            -1, -1, ids, logprobs, versions, "unfinished", None, KeptSets(*kept) if has_kept else None
        )
        for ids, logprobs, versions, *kept in zip(*columns, strict=True)
    ]


def _metrics(responses: Sequence[Response]) -> Metrics:
    tokens, number = float(sum(len(r.token_ids) for r in responses)), float(len(responses))
    truncated = Mean(float(sum(r.finish_reason == "length" for r in responses)), number)
    return {"tokens": Sum(tokens), "response_length": Mean(tokens, number), "truncation_rate": truncated}
