"""ReasoningGym: grades the tasks of reasoning-gym with the task's own check."""

from __future__ import annotations

import re

from ...dataflow.errors import SampleError
from ...dataflow.prompts.procedural_tasks import task_set
from .extraction import without_reasoning
from .grader import Grader

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(Grader):
    """The task's own score of the last `<answer>...</answer>` of a response, 0 to 1; without a tag, of
    the text after the reasoning. For rows of `weft.Prompts.reasoning_gym`.

        prompts = weft.Prompts.reasoning_gym("chain_sum", model, size=10_000)
        reward = weft.group(weft.RewardWorker, function=ReasoningGym(), tokenizer=model)

    Many tasks give a small score, such as 0.01, to wrong answers in the right form.
    """

    exact: bool = False
    """Count only a full score, as 1; all others are 0. Set it if partial scores reward wrong
    answers."""

    def __call__(self, response: str, task: str, task_settings: str, task_number: int) -> float:
        text = without_reasoning(response)
        tagged = _ANSWER.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        made = task_set(task, task_settings)
        entry = made[task_number]
        try:
            score = float(made.score_answer(answer, entry))
        except Exception as error:  # a task's check reads the answer in its own way
            raise SampleError(f"reasoning-gym's check of {task!r} failed: {error!r}") from error
        return float(score >= 1) if self.exact else score
