"""A reward file as users of TRL's GRPOTrainer write it."""


def accuracy_reward(completions, solution, **kwargs):
    """Completions are texts, or lists of one message if the prompts were messages."""
    contents = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        1.0 if content.strip() == gold else 0.0 for content, gold in zip(contents, solution, strict=True)
    ]


def only_sums(prompts, completions, task, **kwargs):
    """Return None for other tasks, which this reward does not apply to."""
    return [
        None if kind != "sum" else float("=" not in c) for c, kind in zip(completions, task, strict=True)
    ]


async def short(completion_ids, log_metric=None, **kwargs):
    lengths = [len(ids) for ids in completion_ids]
    if log_metric:
        log_metric("longest", max(lengths))
    return [1.0 if length <= 2 else 0.5 for length in lengths]


class RepetitionPenalty:
    """Some of TRL's rewards are objects."""

    def __call__(self, completion_ids, **kwargs):
        return [len(set(ids)) / len(ids) - 1 if ids else 0.0 for ids in completion_ids]
