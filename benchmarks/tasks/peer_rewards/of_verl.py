"""A reward file for verl's custom_reward_function.path."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    correct = solution_str.strip() == ground_truth
    return {
        "score": 1.0 if correct else -1.0,
        "acc": correct,
        "pred": solution_str,
        "index": (extra_info or {})["index"],
    }


def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return float(solution_str.strip() == ground_truth) + bonus


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s.strip() == g) for s, g in zip(solution_strs, ground_truths, strict=True)]
