"""DPO on pairs of responses, with a real model of 0.5B to 8B parameters.

python examples/dpo_pairs.py --model Qwen/Qwen3-0.6B --data trl-lib/ultrafeedback_binarized    all GPUs of this machine
python examples/dpo_pairs.py --model models/qwen3 --data pairs.jsonl --gpus 8                  own data, 8 GPUs
python examples/dpo_pairs.py --tiny                                                            a tiny model, on a CPU
"""

import time

import tiny_qwen3
from real_task import RealSettings, summary

import weft
from weft.algorithms.preference import dpo, preference_accuracy, reference_of_pairs
from weft.algorithms.preference_loss import PreferenceLoss

SYSTEM = "Reason step by step, and put the final answer into \\boxed{}."
ACCURACY = "eval/preference_accuracy"


def main(settings: RealSettings) -> None:
    """Train a real model with DPO on pairs of responses."""
    started, tiny = time.monotonic(), settings.tiny
    data, model = settings.data, settings.model
    if tiny:
        problems, model = tiny_qwen3.prepare(settings.root, None, SYSTEM, settings.seed)
        data = data or tiny_qwen3.wrong_and_right(problems, SYSTEM)
    assert data is not None and model is not None
    pairs = weft.Prompts.read(
        data, model, chat_template_kwargs={"enable_thinking": settings.thinking}, too_long="drop"
    )
    train, held_out = pairs.hold_out(min(128 if tiny else 512, len(pairs) // 5), settings.seed)

    # The reference is frozen, so compute its log-probabilities only once per pair.
    reference = weft.group(
        weft.ReferenceWorker, model=model, dtype="bfloat16" if settings.num_gpus else "float32"
    )
    train = weft.precompute(
        reference_of_pairs(train, reference=reference),
        placement=settings.places(("reference",)),
        backend=settings.new_backend(),
        root=settings.root,
    )
    actor = weft.group(
        weft.ActorWorker,
        model=model,
        learning_rate=settings.rate(1e-4 if tiny else 5e-7),
        **settings.training,
    )
    with weft.Driver(
        dpo(train, actor=actor, loss=PreferenceLoss()),
        schedule=weft.Synchronous(
            steps=settings.num_steps, prompts_per_step=settings.prompts_per_step or (16 if tiny else 128)
        ),
        evaluations=[
            weft.Evaluation(preference_accuracy(held_out, actor=actor), every=8 if tiny else 25)
        ],
        placement=settings.places(("actor",)),
        backend=settings.new_backend(),
        checkpoint=weft.CheckpointConfig(every_s=None if tiny else 1800, best=ACCURACY),
        root=settings.root,
        name=settings.name,
        resume=settings.resume,
        seed=settings.seed,
        trackers=settings.trackers,
        dashboard=settings.dashboard,
        settings=settings,
    ) as driver:
        metrics = driver.run()
        driver.call(actor, "save", path=driver.directory.path / "model")
    print(summary(metrics, ACCURACY, started))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
