"""Makes the turns of many sessions with a client of verifiers. Runs in the environment of verifiers.

Reads a line of JSON from standard input:

    {"client": "train" or "eval", "base_url": ..., "model": FOLDER,
     "sessions": [{"key": ..., "tokens": [40, 70]}]}

and prints the number of turns per second, from the first request to the last reply. A session's key is
its `X-Session-ID`. verifiers' interception server uses the same clients and the same graph of messages.
"""

import asyncio
import json
import sys
import time

from verifiers.v1 import graph  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients import (  # pyright: ignore[reportMissingImports]
    EvalClientConfig,
    TrainClientConfig,
    resolve_client,
)
from verifiers.v1.clients.train import ElasticRendererPool  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects import ChatDialect  # pyright: ignore[reportMissingImports]
from verifiers.v1.trace import Trace  # pyright: ignore[reportMissingImports]
from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]


async def make_turns(client, key, tokens):
    dialect, trace = ChatDialect(), Trace.model_construct(id=key, nodes=[], tools=[])
    messages = [{"role": "user", "content": "number"}]
    for most in tokens:
        body = {"model": "policy", "messages": messages, "max_tokens": most}
        request = dialect.parse_request(body)
        turn = graph.prepare_turn(trace, request.messages, request.tools)
        sampling = SamplingConfig(max_tokens=most)
        response = await client.get_response(dialect, body, sampling, session_id=key, turn=turn)
        turn.commit(response)
        messages = [
            *messages,
            response.raw["choices"][0]["message"],
            {"role": "user", "content": "go on"},
        ]


async def main():
    asked = json.loads(sys.stdin.readline())
    place = {"base_url": asked["base_url"], "api_key_var": "WEFT_BENCHMARK_KEY"}
    is_train = asked["client"] == "train"
    if is_train:
        config = TrainClientConfig(**place, renderer_model_name=asked["model"])
    else:
        config = EvalClientConfig(**place)
    client = resolve_client(config)
    if is_train:  # its renderer loads in the background
        await ElasticRendererPool(asked["model"], config.renderer, multiplex=config.multiplex).grow()
    sessions = asked["sessions"]
    began_s = time.perf_counter()
    await asyncio.gather(*(make_turns(client, each["key"], each["tokens"]) for each in sessions))
    seconds = time.perf_counter() - began_s
    await client.close()
    print(json.dumps({"turns_per_s": sum(len(each["tokens"]) for each in sessions) / seconds}))


if __name__ == "__main__":
    asyncio.run(main())
