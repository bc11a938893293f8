"""A harness of verifiers: a chat without tools, in the process of the episode.

Verifiers' own harness `null` starts a program for each turn, which takes longer than a tiny model's
turn. This file is imported in the Python environment of verifiers.
"""

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask the model once. Verifiers calls it again with the whole conversation for the next turn."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message_to_wire(message) for message in given]
        # The endpoint is on this machine. Loading certificates would take longer than the turn.
        async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=int(reply.is_error), stdout="", stderr=reply.text)


__all__ = ["ChatHarness"]
