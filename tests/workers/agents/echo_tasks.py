"""A task set of verifiers. Its own environment imports it, without Weft."""

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class EchoData(vf.TaskData):
    answer: str


class EchoTask(vf.Task[EchoData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        if self.data.answer == "Nothing":
            raise ValueError("no grader today")
        return float(self.data.answer in trace.last_reply)


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        for word in ("Hello", "Goodbye", "Nothing"):
            yield EchoTask(EchoData(prompt=f"Say {word}.", answer=word), self.config.task)


__all__ = ["EchoTaskset"]
