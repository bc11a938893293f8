"""Columns: the fields of a row, declared once with type, shape and unit.

A ragged column holds a list of any length per row, such as the tokens of a response. Its Arrow
offsets are the `cu_seqlens` of attention kernels and losses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa


def ragged(item: pa.DataType) -> pa.DataType:
    """Return the Arrow type of a ragged column with items of type `item` and int32 offsets."""
    return pa.list_(item)


@dataclass(frozen=True)
class Column:
    """One named field of a row.

    >>> str(REWARD)
    'reward'
    """

    name: str
    type: pa.DataType
    doc: str
    made: str = ""
    """Advice on how to get the column; part of the error if no node writes it."""

    def __str__(self) -> str:
        return self.name


int32, int64, float32, string = pa.int32(), pa.int64(), pa.float32(), pa.string()
INTS, FLOATS, FLAGS = ragged(int32), ragged(float32), ragged(pa.uint8())

# Identity: columns of every row. A node gets the last four only if it names them.
SAMPLE_ID = Column("sample_id", int64, "unique over all rows of a run")
GROUP_ID = Column("group_id", int64, "the rows of one prompt instance share it")
PARENT_ID = Column("parent_id", int64, "sample_id of the parent row; for rows of a source, their own")
DRAW_PATH = Column(
    "draw_path",
    INTS,
    "path for seeds, in addition to the group: the expansion, and the expanded row (`Row.draw`)",
)
MADE_BEFORE = Column(
    "made_before",
    INTS,
    "numbers of the child rows that an earlier worker already published; absent: none",
)
EXPECTED_TOKENS = Column(
    "expected_tokens",
    float32,
    "forecast of the length of the child rows; NaN: no earlier rows of the same source row are known",
)
BEGUN_NUMBER = Column(
    "begun_number",
    int32,
    "number of the only child row to make, which another replica began; the row then has the columns of this child so far",
)
IDENTITY = (SAMPLE_ID, GROUP_ID, PARENT_ID, DRAW_PATH, MADE_BEFORE, EXPECTED_TOKENS, BEGUN_NUMBER)

# Prompts and generated responses.
PROMPT = Column("prompt", string, "text of the prompt, after the chat template")
PROMPT_IDS = Column("prompt_ids", INTS, "[P] token ids")
IMAGES = Column(
    "images",
    ragged(pa.large_binary()),
    "[images] encoded (PNG, JPEG, ...), in the order of their placeholders in prompt_ids, one each",
    "the data has them: a column 'images' of encoded images, read by Prompts.read",
)
ANSWER = Column(
    "answer", string, "ground truth of the prompt: text, or any other value of the file (`JsonType`)"
)
RESPONSE_IDS = Column("response_ids", INTS, "[L] sampled token ids, including the stop token")
RESPONSE = Column("response", string, "text of the response, without special tokens")
RESPONSE_LOGPROBS = Column(
    "response_logprobs", FLOATS, "[L] nats, under the weights that sampled each token"
)
RESPONSE_VERSIONS = Column("response_versions", INTS, "[L] policy version that sampled each token")
POLICY = Column(
    "policy",
    string,
    "the actor whose adapter sampled the response, to which its versions refer",
    "a rollout that follows several actors makes it: rollout.generate(prompts, policy=actor)",
)
_OF_ROLLOUT = "a rollout makes it with Sampling(top_p=..., top_k=..., min_p=... or min_tokens=...)"
KEPT_COUNTS = Column(
    "kept_counts",
    INTS,
    "[L] how kept_ids give the kept set of each token, from which it was sampled: n: the next n ids; -n: all tokens but the next n ids; "
    "0: all tokens, without ids",
    _OF_ROLLOUT,
)
KEPT_IDS = Column(
    "kept_ids", INTS, "[sum of |kept_counts|] token ids, position by position", _OF_ROLLOUT
)
ROUTES = Column(
    "routes",
    ragged(pa.uint16()),
    "[(P + L - 1) * layers * k] indices of the k experts of each token in the generator (except the last token of the response), "
    "token by token, layer by layer; 0 in layers without a router",
    "the generator records it: rollout = weft.group(weft.RolloutWorker, model=..., routes=True)",
)
RESPONSE_MASK = Column("response_mask", FLAGS, "[L] 1 for trained tokens; absent: all are trained")
EPISODE_ID = Column(
    "episode_id", int64, "the rows of one episode share it; absent: each row is an episode"
)
EPISODE_ROWS = Column("episode_rows", int32, "number of rows of the row's episode")
EPISODE_TOKENS = Column("episode_tokens", int32, "trained tokens of the row's episode, in all its rows")
_OF_HARNESS = "a rollout with a harness makes it: rollout.run(prompts, harness=...)"
TURN_ENDS = Column(
    "turn_ends",
    INTS,
    "[turns] positions in response_ids after the last token of each sampled turn",
    _OF_HARNESS,
)
TURN_REWARDS = Column(
    "turn_rewards",
    FLOATS,
    "[turns] reward of each sampled turn",
    f"{_OF_HARNESS}, if the harness returns 'turn_rewards'",
)
TEMPERATURE = Column("temperature", float32, "sampling temperature of the response; absent: 1")
FINAL_ANSWER = Column(
    "final_answer",
    string,
    "final answer of the response, in a form that is equal for equal answers; null without one",
    "a reward group with a grader finds it: samples = reward.final_answers(samples)",
)
FINISH_REASON = Column(
    "finish_reason", string, "'stop' (ended by a stop token) or 'length' (reached the limit)"
)

# Inputs of training.
SOLVE_RATE = Column(
    "solve_rate",
    float32,
    "share of the responses to the prompt, those with a vote, that solve it; nan: none has a vote",
    "a curriculum measures it: prompts.with_curriculum(weft.Curriculum())",
)
REWARD = Column("reward", float32, "scalar reward of the complete response")
SHAPED_REWARD = Column(
    "shaped_reward", float32, "reward with penalties, such as that for long responses"
)
LARGEST_REWARD = 3.4028234663852886e38
"""Largest reward that float32 columns can hold."""
REWARD_PARTS = Column("reward_parts", string, "JSON object: name -> number, the parts of the reward")
BASELINE_REWARD = Column(
    "baseline_reward",
    float32,
    "reward of the greedy response to the same prompt",
    "sample the greedy response first: prompts = greedy_baselines(prompts, rollout=rollout, reward=reward) (weft.algorithms.grpo)",
)
TOKEN_REWARDS = Column(
    "token_rewards", FLOATS, "[L] reward of each token; the sum is the reward of the response"
)
VALUES = Column(
    "values",
    FLOATS,
    "[L] the critic's prediction of future rewards, before each token",
    "a critic makes it: critic = weft.group(weft.CriticWorker, model=...), and samples = critic.values(samples)",
)
RETURNS = Column("returns", FLOATS, "[L] training target of the critic")
ADVANTAGES = Column("advantages", FLOATS, "[L] advantage of each token")
OLD_LOGPROBS = Column(
    "old_logprobs",
    FLOATS,
    "[L] nats, under the actor before the update",
    "the actor makes it: samples = old_logprobs(samples, actor=actor) (weft.algorithms.policy_loss)",
)
HIGH_COVARIANCE = Column(
    "high_covariance",
    FLAGS,
    "[L] 1 for tokens whose log-probability and advantage have a high covariance, otherwise 0",
    "the graph marks them: samples = with_covariance(samples, loss=loss) (weft.algorithms.covariance)",
)
TOKEN_WEIGHTS = Column(
    "token_weights",
    FLOATS,
    "[L] weight of each token in the policy gradient, from a comparison of all tokens of the step; 0: no gradient",
    "the graph computes it: samples = with_step_weights(samples, loss=loss) (weft.algorithms.step_corrections)",
)
ENTROPIES = Column(
    "entropies",
    FLOATS,
    "[L] nats, entropy of the actor's distribution of each token before the update",
    "the actor makes it with its log-probabilities: grpo(..., entropies=True), or in your own graph "
    "old_logprobs(samples, actor=actor, entropies=True) (weft.algorithms.policy_loss)",
)
ENTROPY_COEFFICIENT = Column(
    "entropy_coefficient",
    float32,
    "loss per nat: coefficient of the entropy bonus",
    "an AdaptiveEntropyWorker makes it: grpo(..., entropy=weft.group(weft.AdaptiveEntropyWorker, target=...))",
)
LOG_COLLISIONS = Column(
    "log_collisions",
    FLOATS,
    "[L] nats, log sum_v p_v^2 of the actor's distribution of each token before the update: the log-probability that two samples "
    "are the same token",
    "the actor makes it with its log-probabilities: old_logprobs(samples, actor=actor, collisions=True) (weft.algorithms.policy_loss)",
)
REFERENCE_LOGPROBS = Column(
    "reference_logprobs",
    FLOATS,
    "[L] nats, under the reference model",
    "a reference makes it: give the graph reference=weft.group(weft.ReferenceWorker, model=...), or, for an actor with LoRA, "
    "reference=weft.adapter_off(actor); in a graph of your own, samples = reference.logprobs(samples)",
)

# Distillation.
_OF_TEACHER = "a teacher makes it: samples = teacher.top_logprobs(samples, top=64)"
TEACHER_IDS = Column(
    "teacher_ids",
    INTS,
    "[L * k] the k likeliest tokens of the teacher at each position, position by position",
    _OF_TEACHER,
)
TEACHER_LOGPROBS = Column(
    "teacher_logprobs", FLOATS, "[L * k] nats, of teacher_ids under the teacher", _OF_TEACHER
)
TEACHER_PROMPT_IDS = Column(
    "teacher_prompt_ids",
    INTS,
    "[P] the prompt, rendered and tokenised for a teacher with another tokenizer",
    "the data has it: weft.Prompts.read(..., teacher=MODEL)",
)
_OF_SPANS = "the graph aligns it: samples = retokenized(samples, tokenizers=SharedSpans(...)) (weft.algorithms.cross_tokenizer)"
TEACHER_RESPONSE_IDS = Column(
    "teacher_response_ids", INTS, "[M] the response in the tokens of a teacher", _OF_SPANS
)
STUDENT_SPANS = Column(
    "student_spans",
    INTS,
    "[L] the span of each token, from 0; spans end where tokens of both models end; -1: none",
    _OF_SPANS,
)
TEACHER_SPANS = Column(
    "teacher_spans", INTS, "[M] the span of each token of teacher_response_ids", _OF_SPANS
)
TEACHER_RESPONSE_LOGPROBS = Column(
    "teacher_response_logprobs", FLOATS, "[M] nats, of teacher_response_ids under the teacher"
)
PER_CANDIDATE = frozenset((str(TEACHER_IDS), str(TEACHER_LOGPROBS)))
"""Columns with k values per response token."""

# Reward models.
TOKEN_SCORES = Column(
    "token_scores",
    FLOATS,
    "[L] a reward model's score of the response up to and including each token",
)
STEP_LABELS = Column(
    "step_labels",
    FLOATS,
    "[L] 0 to 1: correctness of the step that ends with this token; nan: no step ends here",
)

# Preferences.
CHOSEN_IDS = Column("chosen_ids", INTS, "[L] tokens of the preferred response")
REJECTED_IDS = Column("rejected_ids", INTS, "[L] tokens of the other response")
MISMATCHED_IDS = Column("mismatched_ids", INTS, "[L] tokens of the response to another prompt")
CHOSEN_MASK, REJECTED_MASK = (
    Column(name, FLAGS, f"[L] 1 for tokens of {ids} that count; absent: all count")
    for name, ids in (("chosen_mask", CHOSEN_IDS), ("rejected_mask", REJECTED_IDS))
)
MISMATCHED_MASK = Column("mismatched_mask", FLAGS, "[L] 1 for tokens of mismatched_ids that count")
PREFERRED = Column(
    "preferred",
    pa.uint8(),
    "1 for the better response of a pair, or a good single response; otherwise 0",
)
REFERENCE_POINT = Column(
    "reference_point",
    float32,
    "nats; the log-ratio that responses are compared with: KTO's z0, or BCO's boundary",
)
QUANTILE_MARGIN = Column(
    "quantile_margin",
    float32,
    "reward; beta times the reference's lead of the preferred response, in the pair of the same rank",
    "the graph aot computes it (weft.algorithms.preference)",
)
MISMATCHED_LOGPROBS = Column(
    "mismatched_logprobs", FLOATS, "[L] nats, of mismatched_ids under the actor"
)
CHOSEN_REFERENCE_LOGPROBS, REJECTED_REFERENCE_LOGPROBS, MISMATCHED_REFERENCE_LOGPROBS = (
    Column(f"{of}_reference_logprobs", FLOATS, f"[L] nats, of {of}_ids under the reference model")
    for of in ("chosen", "rejected", "mismatched")
)

DESCRIBED: dict[Column, tuple[Column, ...]] = {
    PROMPT_IDS: (ROUTES, TEACHER_PROMPT_IDS),
    RESPONSE_IDS: (
        *(RESPONSE_LOGPROBS, RESPONSE_VERSIONS, KEPT_COUNTS, KEPT_IDS, ROUTES, RESPONSE_MASK),
        *(TOKEN_REWARDS, VALUES, RETURNS),
        *(
            ADVANTAGES,
            OLD_LOGPROBS,
            ENTROPIES,
            LOG_COLLISIONS,
            REFERENCE_LOGPROBS,
            TOKEN_SCORES,
            STEP_LABELS,
        ),
        *(POLICY, TURN_ENDS, TURN_REWARDS, EPISODE_ID, EPISODE_ROWS, EPISODE_TOKENS),
        *(TEACHER_IDS, TEACHER_LOGPROBS, HIGH_COVARIANCE, TOKEN_WEIGHTS, STUDENT_SPANS),
        *(TEACHER_RESPONSE_IDS, TEACHER_SPANS, TEACHER_RESPONSE_LOGPROBS),
    ),
    CHOSEN_IDS: (CHOSEN_REFERENCE_LOGPROBS, CHOSEN_MASK),
    REJECTED_IDS: (REJECTED_REFERENCE_LOGPROBS, REJECTED_MASK),
    MISMATCHED_IDS: (MISMATCHED_MASK, MISMATCHED_LOGPROBS, MISMATCHED_REFERENCE_LOGPROBS),
}
"""Maps a column of token ids to the columns that describe its tokens, their turns or their episode.
New rows with other tokens do not inherit these columns."""

ON_DEMAND = frozenset((str(KEPT_COUNTS), str(KEPT_IDS)))
"""Columns that a node writes only if another node of the graph names them."""

KNOWN = {c.name: c for c in list(globals().values()) if isinstance(c, Column)}
"""Maps names to all columns that Weft declares. Users' own columns need no declaration."""


def not_inherited(written: Collection[str]) -> set[str]:
    """Return the columns that new rows do not inherit if their node writes the columns `written`.

    >>> sorted(not_inherited(("chosen_ids", "prompt_ids")))
    ['chosen_mask', 'chosen_reference_logprobs', 'routes', 'teacher_prompt_ids']
    """
    return {str(c) for ids, columns in DESCRIBED.items() if str(ids) in written for c in columns}


def is_of_reward(column: str) -> bool:
    """Whether a column is the reward, one of its components, or the column `reward_parts`.

    >>> is_of_reward("reward/format"), is_of_reward("baseline_reward")
    (True, False)
    """
    return column in (str(REWARD), str(REWARD_PARTS)) or column.startswith(f"{REWARD}/")
