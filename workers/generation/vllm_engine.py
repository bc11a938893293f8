"""VllmEngine: vLLM in the worker's own process. It adds requests, steps, and hands over what finished; new weights go in between
two steps. Only the modules `vllm_*.py`, here and in `resharding`, import vLLM."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.errors import GenerationError, WeightSyncError
from ...dataflow.lazy import torch
from ...resharding.weights import Weights
from ..device import node_memory
from ..models.images import ImageReader, open_image
from ..models.model_folder import read_stop_tokens
from .engine import NOT_WHOLE, GenerationRequest, Response, Responses, StopStrings, stop_strings
from .vllm_settings import VllmSettings

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from ..training.lora import Lora


# Vllm sleep
#
# What of a vLLM engine's memory is on a GPU that it shares with a trainer.
#
#     AWAKE ──sleep──> ASLEEP ──wake_weights──> WEIGHTS ──wake──> AWAKE
#
# Weights arrive in WEIGHTS: the memory for keys and values is claimed by the first request after
# them. vLLM itself schedules nothing before all of its memory is there again.


class OnDevice(enum.Enum):
    """What of an engine's memory is on the device."""

    AWAKE = "weights, keys and values"
    WEIGHTS = "weights"
    ASLEEP = "nothing"


class Sleeper(Protocol):
    """The part of vLLM's `LLMEngine` that is used here."""

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> object: ...


class SleepingEngine:
    """The states of one engine, and its way from each to the others. What is in a state already stays as it is.

    Args:
        engine: awake.
    """

    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self.on_device = OnDevice.AWAKE

    def sleep(self) -> None:
        """Move weights to host memory, and free keys and values."""
        self._wake_cache()
        if self.on_device is OnDevice.AWAKE:
            self._engine.sleep(level=1)
            self.on_device = OnDevice.ASLEEP

    def wake_weights(self) -> None:
        """Move weights back to the device."""
        if self.on_device is OnDevice.ASLEEP:
            self._engine.wake_up(tags=["weights"])
            self.on_device = OnDevice.WEIGHTS

    def wake(self) -> None:
        """Have everything on the device."""
        self.wake_weights()
        self._wake_cache()

    def _wake_cache(self) -> None:
        """Claim memory for keys and values, where weights are on the device. vLLM's allocator frees only what is there, so an engine does
        so before it sleeps, too."""
        if self.on_device is OnDevice.WEIGHTS:
            self._engine.wake_up(tags=["kv_cache"])
            self.on_device = OnDevice.AWAKE


class VllmEngine:
    """`GenerationEngine` on vLLM's `LLMEngine`.

    Args:
        model: folder or cached Hugging Face id.
        max_context: longest prompt and response together, in tokens; None: what the model was made for.
        dtype: of the weights; "auto": float32 on CPU, bfloat16 on GPUs.
        seed: of requests that bring none.
        adapter: that is served: what arrives is the adapter alone, and nothing is generated before the first one; None: complete weights
            arrive.
        routes: record the experts that each token is sent to.
        images: the processor of a model that sees; vLLM has one of its own, whose tokens are compared with those of this one.

    Raises:
        GenerationError: vLLM could not start, or cannot record routes.
    """

    def __init__(
        self,
        model: str,
        settings: VllmSettings = VllmSettings(),
        *,
        max_context: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        adapter: Lora | None = None,
        routes: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        self.version = 0
        self._whole = adapter is None
        """Whether all weights are there, and of one version."""
        self._adapter = adapter
        self._tensor_parallel = settings.tensor_parallel
        self._identity = secrets.token_hex(8)
        """Tells it from another engine that takes its place."""
        self._stop_tokens = read_stop_tokens(model)
        self._model_folder = model
        self._watched: dict[str, _Watched] = {}
        """Unfinished requests with stop strings."""
        self._numbers = itertools.count()
        self._finished: dict[str, Response] = {}
        self._request_ids: dict[str, int] = {}
        on_gpu = torch.cuda.is_available()
        self._routes = routes
        self._images = images
        self._prompts: dict[str, np.ndarray] = {}
        """Of requests with images that are not finished, the tokens of the prompt."""
        self._records_routes = routes and not on_gpu
        """Whether they are recorded by `vllm_routes.py`, and not by vLLM itself."""
        self._prefix_caching = settings.prefix_caching or (routes and on_gpu)
        if self._records_routes and settings.prefix_caching:
            raise GenerationError(
                "routes=True and prefix_caching=True: on a CPU, routes of tokens that are not computed are not known; leave one out"
            )
        self._compile = settings.compiles(on_gpu)
        free, total = torch.cuda.mem_get_info() if on_gpu else (0, 1)
        share = free / total if on_gpu else None
        if on_gpu:
            settings.check_memory(total, "the GPU")
        elif (memory := node_memory()) is not None:
            settings.check_memory(memory.free_bytes, "this machine")
        arguments = settings.engine_arguments(
            model,
            max_context=max_context,
            dtype=dtype,
            seed=seed,
            free_share=share,
            adapter=adapter,
            routes=routes,
            images=images is not None,
        )
        self._engine = _start(
            arguments, tensor_parallel=settings.tensor_parallel, on_gpu=on_gpu, compile=self._compile
        )
        self._sleeping = SleepingEngine(self._engine) if on_gpu else None
        self._adapter_request: Any = None
        if adapter is not None:
            from ...resharding.vllm_receiver import adapter_request

            self._adapter_request = adapter_request()
        if settings.tensor_parallel > 1:
            self._engine.collective_rpc("weft_unlink_shared_memory")
        if self._records_routes:
            try:
                self._engine.collective_rpc("weft_record_routes")
            except Exception as error:
                raise GenerationError(
                    f"routes=True: vLLM cannot record those of {model}: {error}"
                ) from error

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Responses:
        """Responses as they finish; see `GenerationEngine`. Several generators may be open at once."""
        if not self._whole:
            raise GenerationError(NOT_WHOLE)
        if self._sleeping is not None:
            self._sleeping.wake()
        waiting: set[str] = set()
        strings = stop_strings(sampling, self._model_folder)
        try:
            for request in requests:
                key = self._add(request, sampling)
                waiting.add(key)
                if strings is not None:
                    self._watched[key] = _Watched(strings, sampling.min_tokens)
            while waiting:
                done = waiting & self._finished.keys()
                if not done:
                    self._step()
                    done = waiting & self._finished.keys()
                waiting -= done
                given_up = yield [self._finished.pop(key) for key in sorted(done, key=int)]
                if given_up:
                    unwanted = {key for key in waiting if self._request_ids.get(key) in given_up}
                    self._abort(unwanted)
                    waiting -= unwanted
        finally:
            self._abort(waiting)

    def weight_bytes(self) -> int:
        return sum(self._engine.collective_rpc("weft_weight_bytes"))

    def stage_weights(self, weights: Weights) -> Iterator[None]:
        """See `GenerationEngine`. The ranks take the version on threads of their own.

        Where one of them is a thread of this process, sampling leaves it a core meanwhile. Threads that compute together spin while they
        wait for each other: with as many as cores, both sampling and the transfer took twice as long and more.
        """
        from ...resharding.memory import threads_beside
        from ...resharding.vllm_receiver import to_update_info

        if self._adapter is not None:  # it is small
            return
        try:
            with threads_beside(1) if self._tensor_parallel == 1 else contextlib.nullcontext():
                self._engine.collective_rpc("weft_stage_weights", args=(to_update_info(weights),))
                while not all(self._engine.collective_rpc("weft_is_staged")):
                    yield
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"vLLM could not stage weights version {weights.version}: {error}"
            ) from error

    def update_weights(self, weights: Weights) -> str:
        """Have each rank take its part of a version that is given away, and check that what they hold adds up to it.

        Raises:
            WeightSyncError: what arrived is not what was published. Nothing is generated then until a version has arrived completely.
        """
        self._whole = False
        if weights.backend:
            checksum = self._take_by_vllm(weights)
        else:
            checksum = (
                self._take(weights)
                if self._adapter is None
                else self._take_adapter(weights, self._adapter)
            )
        self._whole = True
        if self._images is not None:
            self._engine.reset_encoder_cache()  # what the weights before saw
        self._engine.set_weight_version(_version_name(weights.version))
        self.version = weights.version
        return checksum

    def _take(self, weights: Weights) -> str:
        """Have the ranks overwrite their weights; returns the checksum of the version."""
        from ...resharding.vllm_receiver import check_received, to_update_info

        try:
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=(to_update_info(weights),))
            self._engine.collective_rpc("finish_weight_update")
            held = self._engine.collective_rpc("weft_loaded_weights")
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"vLLM could not load weights version {weights.version}: {error}"
            ) from error
        for rank, found in enumerate(held):
            if found is None or found.version != weights.version:
                raise WeightSyncError(
                    f"vLLM's rank {rank} holds weights of version {found.version if found else 'none'}, not {weights.version}"
                )
        check_received(weights.version, [found.received for found in held])
        return held[0].checksum

    def _take_by_vllm(self, weights: Weights) -> str:
        """Have the ranks take a version by one of vLLM's own backends, as the trainer says; returns the checksum of the version."""
        from ...resharding.vllm_control import take_as_told

        def call(method: str, payload: Any) -> None:
            if method == "init_weight_transfer_engine":  # of the trainer before, if there was one
                self._engine.collective_rpc("shutdown_weight_transfer_engine")
            self._engine.collective_rpc(method, args=() if payload is None else (payload,))

        def end(whole: bool) -> list[Any]:
            return self._engine.collective_rpc("weft_end_by_vllm", args=(whole,))

        try:
            try:
                self._engine.collective_rpc("weft_begin_by_vllm", args=(weights.backend,))
                return take_as_told(
                    weights, self._tensor_parallel, self._identity, call, lambda: end(True)
                )
            except BaseException:
                with contextlib.suppress(Exception):  # the error before says it
                    end(False)
                raise
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"vLLM could not load weights version {weights.version}: {error}"
            ) from error

    def _take_adapter(self, weights: Weights, adapter: Lora) -> str:
        """Have the ranks exchange the adapter that they serve; returns the checksum of what they took."""
        from ...resharding.vllm_receiver import to_update_info

        settings = {"r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.rslora}
        try:
            return self._engine.collective_rpc(
                "weft_receive_adapter", args=(to_update_info(weights), settings)
            )[0]
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"vLLM could not take adapter version {weights.version}: {error}"
            ) from error

    def recompute(self) -> None:
        """Put unfinished requests back into vLLM's queue: when their turn comes, it computes keys and values of all their tokens."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """Move the weights to host memory and free keys and values (on CPU there is nothing to free)."""
        if self._sleeping is not None:
            self._sleeping.sleep()

    def wake_up(self) -> None:
        """Move the weights back to the device; `generate` claims memory for keys and values, after weights that come before it."""
        if self._sleeping is not None:
            self._sleeping.wake_weights()

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine still works on."""
        return self._engine.get_num_unfinished_requests()

    def close(self) -> None:
        """End vLLM's processes and free its memory."""
        self._engine.engine_core.shutdown()

    def _abort(self, keys: set[str]) -> None:
        if keys:
            self._engine.abort_request(list(keys))
            self._take_routes(list(keys))
        for key in keys:
            self._watched.pop(key, None)
            self._prompts.pop(key, None)
            self._request_ids.pop(key, None)
            self._finished.pop(key, None)

    def _add(self, request: GenerationRequest, sampling: Sampling) -> str:
        key = str(next(self._numbers))
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if len(request.images):
            if self._images is None:
                raise GenerationError(
                    f"request {request.request_id} has images, and the model is given text alone"
                )
            prompt["multi_modal_data"] = {"image": [open_image(image) for image in request.images]}
        if self._prefix_caching:
            prompt["cache_salt"] = _version_name(self.version)  # never another version's keys and values
        try:
            parameters, adapter = self._parameters(sampling, request.seed), self._adapter_request
            self._engine.add_request(key, prompt, parameters, lora_request=adapter)  # pyright: ignore[reportArgumentType]
        except Exception as error:
            raise GenerationError(f"vLLM refuses request {request.request_id}: {error}") from error
        self._request_ids[key] = request.request_id
        if self._images is not None and len(request.images):
            self._prompts[key] = self._images.read(request.prompt_ids, request.images).ids
        return key

    def _parameters(self, sampling: Sampling, seed: int | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=0 if sampling.ignore_stop else sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            ignore_eos=True,  # the stop tokens are named instead
            stop_token_ids=[] if sampling.ignore_stop else list(self._stop_tokens),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # Stop strings are looked for here after each token: vLLM's own search needs its tokenizer in the engine.
            output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
        )

    def _step(self) -> None:
        # vLLM compiles the counting of ranks even in eager mode: 20 s for the first step, and a C++ compiler.
        eager = contextlib.nullcontext() if self._compile else torch.compiler.set_stance("force_eager")
        try:
            with eager:
                outputs = self._engine.step()
        except Exception as error:
            raise GenerationError(f"vLLM failed: {type(error).__name__}: {error}") from error
        each: Any
        for each in outputs:
            self._look_for_stop(each)
        finished: list[Any] = [output for output in outputs if output.finished]
        taken = self._take_routes([output.request_id for output in finished]) if finished else []
        for output, recorded in zip(finished, taken, strict=True):
            request_id = self._request_ids.pop(output.request_id, None)
            if request_id is not None:
                routes = recorded if self._records_routes else output.outputs[0].routed_experts
                self._finished[output.request_id] = self._response(output, request_id, routes)

    def _look_for_stop(self, output: RequestOutput) -> None:
        """End a request whose last token completes a stop string. vLLM names the versions of a finished request only."""
        watched = self._watched.get(output.request_id)
        if watched is None:
            return
        token_ids = list(output.outputs[0].token_ids)
        watched.versions += [self.version] * (len(token_ids) - len(watched.versions))
        is_end = len(token_ids) > watched.min_tokens and watched.strings.end(token_ids)
        if output.finished or is_end:
            del self._watched[output.request_id]
        request_id = self._request_ids.get(output.request_id)
        if not is_end or request_id is None:
            return
        if output.finished:
            output.outputs[0].finish_reason = "stop"
            return
        self._engine.abort_request([output.request_id])
        del self._request_ids[output.request_id]
        self._prompts.pop(output.request_id, None)
        self._finished[output.request_id] = Response(
            request_id=request_id,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.asarray(output.outputs[0].logprobs.logprobs, dtype=np.float32),  # pyright: ignore
            versions=np.asarray(watched.versions, dtype=np.int32),
            finish_reason="stop",
        )

    def _take_routes(self, keys: list[str]) -> list[np.ndarray | None]:
        """What was recorded here for these requests, which end; None: nothing."""
        if not self._records_routes:
            return [None] * len(keys)
        return self._engine.collective_rpc("weft_take_routes", args=(keys,))[0]

    def _response(self, output: RequestOutput, request_id: int, routes: np.ndarray | None) -> Response:
        own = self._prompts.pop(output.request_id, None)
        if own is not None and not np.array_equal(own, output.prompt_token_ids or ()):
            raise GenerationError(
                f"request {request_id}: vLLM reads {len(output.prompt_token_ids or ())} tokens in a prompt with images, and the processor "
                f"of the model's folder makes {len(own)} others of it"
            )
        if not self._routes:
            return _response(output, request_id)
        computed = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
        if routes is None or len(routes) != computed:
            found = "none" if routes is None else str(len(routes))
            raise GenerationError(
                f"request {request_id}: vLLM gave the routes of {found} of {computed} tokens"
            )
        return replace(_response(output, request_id), routes=routes.astype(np.uint16))


@dataclass
class _Watched:
    """A request that a stop string may end."""

    strings: StopStrings
    min_tokens: int
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""


def _response(output: RequestOutput, request_id: int) -> Response:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationError(f"vLLM ended request {request_id} with {completion.finish_reason!r}")
    versions = np.full(len(completion.token_ids), -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = (
            0 if span.version == "default" else int(span.version.removeprefix("v"))
        )
    if (versions < 0).any():
        raise GenerationError(
            f"vLLM did not say which weights sampled all tokens of request {request_id}"
        )
    return Response(
        request_id=request_id,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),  # pyright: ignore
        versions=versions,
        finish_reason=completion.finish_reason,  # pyright: ignore[reportArgumentType]
    )


def _version_name(version: int) -> str:
    return f"v{version}"


def _start(arguments: dict[str, Any], *, tensor_parallel: int, on_gpu: bool, compile: bool) -> LLMEngine:
    """Import vLLM and start its engine, then restore what that changed in the process around it."""
    import torch

    # vLLM reads these at any time, so they stay; a user's own values win.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # the engine lives here, and dies with this process
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault(
        "VLLM_WORKER_MULTIPROC_METHOD", "spawn"
    )  # a fork would copy OpenMP's locks, held or not
    if tensor_parallel > 1 and not on_gpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(tensor_parallel))
    for_children = {
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    if not compile:
        for_children["TORCH_COMPILE_DISABLE"] = "1"
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with _environment(for_children), _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise GenerationError(f"vLLM could not start: {type(error).__name__}: {error}") from error
    finally:
        # vLLM on CPU replaces torch's function by one that does nothing; training in this process needs it.
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)


def _cores(parts: int) -> str:
    """The cores of this process split over `parts` ranks, as vLLM writes it: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    if not size:
        raise GenerationError(
            f"tensor_parallel={parts} needs {parts} cores on CPU; this process may use {len(cores)}"
        )
    return "|".join(",".join(map(str, cores[rank * size : (rank + 1) * size])) for rank in range(parts))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what C++ code writes to stderr at start-up (NUMA binding, gloo); show it if the start fails."""
    sys.stderr.flush()
    keep = os.dup(2)
    notes = os.memfd_create("vllm-stderr")
    os.dup2(notes, 2)
    try:
        yield
    except BaseException:
        os.dup2(keep, 2)
        os.write(2, os.pread(notes, 1 << 20, 0))
        raise
    finally:
        os.dup2(keep, 2)
        os.close(keep)
        os.close(notes)
