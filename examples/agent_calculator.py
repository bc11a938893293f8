"""An agent learns to use a calculator: a tiny model calls a tool over two or three turns.

python examples/agent_calculator.py                  with Ray and vLLM
python examples/agent_calculator.py --backend local  in one process without Ray and vLLM, so that breakpoints work

A question is "7 * 24 + 35 = ?". The model cannot multiply in its head, so it must ask the calculator
for one operation at a time. After the warm start it rarely does: most demonstrations guess.
"""

import json
import random
from functools import partial
from typing import Any

import arithmetic
import httpx
import pyarrow as pa
import tiny_agents

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute one operation.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
QUESTIONS, HELD_OUT, DEMONSTRATIONS = 3000, 200, 4000
CALLING = 0.4
"""Share of demonstrations that use the calculator. The others guess."""
WARM_STEPS = 700
MOST_TURNS = 4


# The harness: it sees the question, and talks to the model like to any other server.


def calculate(expression: str) -> str:
    """Return the result of one operation.

    >>> calculate("37 * 24"), calculate("1 + 2 + 3")
    ('888', 'error: give one operation, such as 3 + 4')
    """
    match expression.split():
        case [left, "*", right] if left.isdigit() and right.isdigit():
            return str(int(left) * int(right))
        case [left, "+", right] if left.isdigit() and right.isdigit():
            return str(int(left) + int(right))
        case _:
            return "error: give one operation, such as 3 + 4"


async def solve(row: dict[str, Any], *, base_url: str, api_key: str, small: bool = False) -> float:
    """Ask the model, run the tool calls of its reply, and ask again. The reward is 1 for the right
    answer. A small run, whose model is barely trained, counts the right characters instead."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600) as client:
        for _ in range(MOST_TURNS):
            body = {"model": "policy", "messages": messages, "tools": [TOOL]}
            reply = await client.post("/chat/completions", json=body)
            message = reply.raise_for_status().json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                right, said = f"It is {row['result']}.", message["content"] or ""
                return arithmetic.right_digits(said, right) if small else float(said == right)
            for call in message["tool_calls"]:
                try:
                    result = calculate(json.loads(call["function"]["arguments"])["expression"])
                except (ValueError, KeyError, TypeError, AttributeError):
                    result = "error: the arguments must be an object with an expression"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0.0


# Data and model


def questions(number: int, seed: int) -> list[dict[str, str]]:
    """Return distinct questions with their results.

    >>> questions(2, seed=0)[0]
    {'question': '8 * 64 + 16 = ?', 'result': '528'}
    """
    draw = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < number:
        a, b, c = draw.randint(2, 9), draw.randint(11, 99), draw.randint(11, 99)
        if draw.random() < 0.8:
            rows[f"{a} * {b} + {c} = ?"] = str(a * b + c)
        else:
            rows[f"{a} * {b} = ?"] = str(a * b)
    return [{"question": question, "result": result} for question, result in rows.items()]


def demonstration(row: dict[str, str], *, calls: bool, draw: random.Random) -> dict[str, Any]:
    """Return a conversation that answers a question: with the calculator, or by a guess."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    answer = f"It is {row['result']}."
    if calls:
        product, _, rest = row["question"].removesuffix(" = ?").partition(" + ")
        asked = [product]
        if rest:
            asked.append(f"{calculate(product)} + {rest}")
        for expression in asked:
            function = {"name": "calculate", "arguments": {"expression": expression}}
            call = {"type": "function", "id": "call", "function": function}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": calculate(expression)},
            ]
    else:
        answer = f"I guess {draw.randint(22, 990)}."
    messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def main(settings: tiny_agents.Settings) -> None:
    """Train an agent that uses a calculator."""
    rows = questions(QUESTIONS + HELD_OUT + DEMONSTRATIONS, settings.seed)
    draw, taught = random.Random(settings.seed), rows[QUESTIONS + HELD_OUT :]
    shown = [demonstration(row, calls=draw.random() < CALLING, draw=draw) for row in taught]
    calls = [json.dumps({"name": "calculate", "arguments": {"expression": "1 + 2"}})] * 200
    texts = [*(row["question"] for row in taught), *calls, "It is 1.", "<tool_call>", "tool_response"]
    model = tiny_agents.prepare(
        settings, "agent_calculator", texts=texts, demonstrations=shown, warm_steps=WARM_STEPS
    )

    # Workers
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-3, warmup_steps=5)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator, max_context=320)
    rollout.follows(actor)

    # Graph and run
    harness = partial(solve, small=True) if settings.small else solve
    sampling = weft.Sampling(max_tokens=64)
    train = weft.TableSource("questions", pa.Table.from_pylist(rows[:QUESTIONS]))
    held_out = weft.TableSource("held_out", pa.Table.from_pylist(rows[QUESTIONS : QUESTIONS + HELD_OUT]))
    training = grpo(train, rollout=rollout, harness=harness, actor=actor, n=8, sampling=sampling)
    accuracy = evaluate(held_out, rollout=rollout, harness=harness, sampling=sampling.greedy, solved=1.0)
    tiny_agents.learn(settings, training, accuracy, actor=actor, title="Calculator agent")


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
