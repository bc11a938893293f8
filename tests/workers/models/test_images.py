"""Vision models in training and generation, against plain `transformers`."""

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import seeing_model
import seeing_ranks
import torch
from PIL import ExifTags, Image
from ranks import run_processes
from seeing_model import IMAGE, PICTURES, make_rows, picture
from spmd import one_step
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import weft
from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import SampleError, UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.critic import CriticConfig, CriticWorker
from weft.workers.generation.engine import GenerationRequest, Response
from weft.workers.models.images import ImageInputs, ImageReader, open_image
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.reward_model import RewardModelConfig, RewardModelWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.training.lora import Lora
from weft.workers.training.packed_sequences import PackedSequences
from weft.workers.training.response_model import ResponseModel

ROWS = make_rows()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return seeing_model.save_model(tmp_path_factory.mktemp("models") / "seeing")


def actor(model: Path, **settings: Any) -> ActorWorker:
    return ActorWorker(
        ActorConfig(model=model, **{"learning_rate": 1e-3, "max_grad_norm": None, **settings})
    )


def plain(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def straight(model: Any, folder: Path, rows: Batch) -> list[torch.Tensor]:
    """Return response logprobs of the model's own forward pass, row by row.

    Image inputs are computed here. An image token in a response is embedded like any other token,
    while the model itself would take it for an image.
    """
    processor = AutoImageProcessor.from_pretrained(folder)
    found = []
    for row in rows.to_rows():
        seen = [processor(images=[seeing_image(data)], return_tensors="pt") for data in row["images"]]
        counts = iter([int(one["image_grid_thw"].prod()) // 4 for one in seen])
        prompt = [
            i for token in row["prompt_ids"] for i in [token] * (next(counts) if token == IMAGE else 1)
        ]
        kinds = torch.tensor(
            [[token == IMAGE for token in prompt] + [False] * len(row["response_ids"])]
        ).int()
        ids = torch.tensor([prompt + row["response_ids"]])
        shown = {name: torch.cat([one[name] for one in seen]) for name in (seen[0] if seen else ())}
        positions = None
        if shown:
            positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=shown["image_grid_thw"])
        said = torch.where(
            kinds.bool(), ids, ids.masked_fill(ids == IMAGE, 0)
        )  # drop image tokens in the response
        swap = (ids != said)[..., None]

        def embedded(module: Any, inputs: Any, output: torch.Tensor, swap: Any = swap) -> torch.Tensor:
            return torch.where(swap, module.weight[IMAGE], output)

        hook = model.get_input_embeddings().register_forward_hook(embedded)
        logits = model(input_ids=said, position_ids=positions, **shown).logits / row["temperature"]
        hook.remove()
        log_p = F.log_softmax(logits, -1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        found.append(log_p[len(prompt) - 1 :])
    return found


def seeing_image(data: bytes) -> Any:
    import io

    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("worker", ["actor", "reference"])
def test_logprobs_are_those_of_the_plain_model(seeing: Path, worker: str):
    with torch.no_grad():
        expected = straight(plain(seeing), seeing, ROWS)
    made = (
        actor(seeing, microbatch_tokens=60)
        if worker == "actor"
        else ReferenceWorker(ReferenceConfig(model=seeing))
    )
    found = made.logprobs(ROWS, into="said")["said"].to_pylist()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.tensor(mine).double().sub(theirs).abs().max() < 1e-4
    without = made.logprobs(
        ROWS.with_columns(images=pa.array([[]] * 5, pa.list_(pa.large_binary()))), into="said"
    )
    assert (
        max(
            np.abs(np.subtract(*pair)).max()
            for pair in zip(found, without["said"].to_pylist(), strict=True)
        )
        > 0.1
    )


@pytest.mark.parametrize(
    "settings",
    [{"microbatch_tokens": 30}, {"microbatch_tokens": 1000, "activation_checkpointing": True}],
)
def test_gradients_are_those_of_the_plain_model(seeing: Path, settings: dict[str, Any]):
    model = plain(seeing)
    said = straight(model, seeing, ROWS)
    (-torch.cat(said).mean()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    gradient, _ = one_step(actor(seeing, **settings), ROWS, NegativeLogLikelihood())
    assert gradient.keys() == expected.keys() and any("visual" in name for name in gradient)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, own in expected.items():
        assert (gradient[name].double() - own).norm() / norm < 1e-5, name


def generated(
    worker: RolloutWorker, prompts: Batch, **asked: Any
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return responses by (sample id of the prompt, sample index)."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for step in worker.generate(prompts, **asked):
        if step is not None:
            children, _ = step
            numbers = children.numbers.tolist()
            rows |= {
                (row["parent_id"], n): row
                for row, n in zip(children.rows.to_rows(), numbers, strict=True)
            }
    return rows


def as_samples(prompts: Batch, found: dict[tuple[int, int], dict[str, Any]]) -> Batch:
    """Return the responses with the columns of their prompts, in this order."""
    rows = [found[key] for key in sorted(found)]
    own = prompts.take([prompt for prompt, _ in sorted(found)]).select(["prompt_ids", "images"])
    columns = ("response_ids", "response_logprobs", "response_versions", "temperature")
    return own.with_columns(
        sample_id=np.arange(len(rows)), **{name: [row[name] for row in rows] for name in columns}
    )


PROMPTS = ROWS.select(["sample_id", "prompt_ids", "images"]).with_columns(
    group_id=np.arange(len(PICTURES))
)


def test_responses_have_the_trainers_logprobs_and_follow_its_weights(seeing: Path):
    trainer, rollout = (
        actor(seeing, learning_rate=1e-2),
        RolloutWorker(RolloutConfig(model=seeing, engine="transformers")),
    )
    asked = {"n": 2, "sampling": Sampling(max_tokens=12, temperature=2, stop=None)}
    for version in range(2):
        found = generated(rollout, PROMPTS, **asked)
        assert len(found) == 2 * len(PICTURES)
        samples = as_samples(PROMPTS, found)
        assert any(
            IMAGE in response for response in samples["response_ids"].to_pylist()
        )  # the policy samples the image token like any other
        assert set(samples.ragged_numpy("response_versions")[0].tolist()) == {version}
        said = trainer.logprobs(samples, into="said").ragged_numpy("said")[0]
        assert np.abs(said - samples.ragged_numpy("response_logprobs")[0]).max() < 2e-4
        before = dict(trainer.engine.named_tensors())["model.visual.patch_embed.proj.weight"].clone()
        trainer.update(samples, loss=NegativeLogLikelihood())
        assert not torch.equal(
            dict(trainer.engine.named_tensors())["model.visual.patch_embed.proj.weight"], before
        )
        weights = trainer.publish_weights(version + 1, ("rollout[0]",))
        rollout.receive_weights(weights)
        trainer.finish_publishing(version + 1)
    rollout.close()


def test_prompts_of_different_lengths_and_images_do_not_change_each_others_responses(seeing: Path):
    rollout = RolloutWorker(RolloutConfig(model=seeing, engine="transformers"))
    asked = {"sampling": Sampling(max_tokens=6, temperature=0)}
    together = generated(rollout, PROMPTS, **asked)
    for row in range(len(PICTURES)):
        alone = generated(rollout, PROMPTS.take([row]), **asked)[row, 0]
        assert alone["response_ids"] == together[row, 0]["response_ids"]
        assert alone["response_logprobs"] == pytest.approx(
            together[row, 0]["response_logprobs"], abs=1e-5
        )
    rollout.close()


def test_prompts_with_images_join_a_running_batch(seeing: Path):
    rollout = RolloutWorker(RolloutConfig(model=seeing, engine="transformers"))
    engine, sampling = rollout.engine, Sampling(max_tokens=8, temperature=0, stop=None)
    found: dict[int, Response] = {}
    for row, ids in enumerate(PROMPTS["prompt_ids"].to_pylist()):
        request = GenerationRequest(row, np.array(ids, np.int32), images=PICTURES[row])
        engine.submit(request, sampling)
        found |= {one.request_id: one for _ in range(2) for one in engine.step()}
    assert 0 < engine.num_unfinished < len(PICTURES)
    while engine.num_unfinished:
        found |= {one.request_id: one for one in engine.step()}
    for row, response in found.items():
        alone = generated(rollout, PROMPTS.take([row]), sampling=sampling)[row, 0]
        assert alone["response_ids"] == response.token_ids.tolist()
        assert alone["response_logprobs"] == pytest.approx(response.logprobs.tolist(), abs=1e-5)
    assert len(found) == len(PICTURES)
    rollout.close()


def test_a_prompt_with_too_many_or_unreadable_images_is_named(seeing: Path):
    rollout = RolloutWorker(RolloutConfig(model=seeing, engine="transformers"))
    with pytest.raises(
        SampleError, match="sample 2: 27 prompt tokens and max_tokens=70 exceed the context of 96"
    ) as caught:
        generated(rollout, PROMPTS, sampling=Sampling(max_tokens=70))
    assert [*caught.value.sample_ids] == [2]
    torn = PROMPTS.with_columns(images=[*PICTURES[:3], [PICTURES[3][0][:60]], PICTURES[4]])
    with pytest.raises(SampleError, match="sample 3: an image of 60 bytes cannot be read"):
        generated(rollout, torn, sampling=Sampling(max_tokens=4))
    rollout.close()


def test_a_run_trains_on_rows_with_images(seeing: Path, tmp_path: Path):
    rows = [{"prompt": "what color is it ?", "images": [picture(seed, 16, 16)]} for seed in range(4)]
    prompts = Prompts.from_rows(rows, seeing)
    assert prompts.table["prompt_ids"][0].as_py().count(IMAGE) == 1
    metrics = weft.train(
        seeing, rows, lambda response: float("red" in response), steps=2, prompts_per_step=2, n=2, max_tokens=4, root=tmp_path,
        name="seeing", progress=False,
    )  # fmt: skip
    gaps = [step["actor/max_logprob_gap"] for step in metrics if "actor/max_logprob_gap" in step]
    assert len(gaps) == 2 and max(gaps) < 1e-3
    # the processor is saved with the model
    saved = ImageReader("saved", tmp_path / "seeing" / "model")
    assert len(saved.read(np.array([IMAGE], np.int32), [picture(0, 16, 16)]).ids) == 4


@pytest.mark.thorough
def test_ranks_with_and_without_images_take_one_step_together(seeing: Path, tmp_path: Path):
    """On a rank without images the vision tower has no gradient, and FSDP would hang."""
    expected, _ = one_step(actor(seeing), ROWS)
    (tmp_path / "model").symlink_to(seeing)
    run_processes(seeing_ranks.main, tmp_path, len(seeing_ranks.SHARES))
    found = torch.load(tmp_path / "rank0.pt", weights_only=False)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() / norm < 1e-5, name


def test_an_image_is_rotated_by_its_exif_data_and_runs_no_program():
    file, turned = io.BytesIO(), Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (24, 16)).save(file, "JPEG", exif=turned)
    assert open_image(file.getvalue()).size == (16, 24)
    with pytest.raises(ValueError, match="PostScript, which is a program"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n")


@pytest.mark.parametrize("with_image", [False, True])
def test_the_same_parameters_have_gradients_with_an_image_and_without(with_image: bool):
    """LLaVA reads an inner layer of its tower, and FSDP reduces only parameters with a gradient."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    text = {
        "model_type": "llama",
        "vocab_size": 8,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        **small,
    }
    tower = {
        "model_type": "clip_vision_model",
        "num_hidden_layers": 2,
        "image_size": 4,
        "patch_size": 4,
        **small,
    }
    llava = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=tower, text_config=text, image_token_index=7)
    )
    model, ids = ResponseModel(llava), torch.tensor([1, 7, 2])
    shown = ImageInputs(ids == 7, {"pixel_values": torch.ones(1, 3, 4, 4)}) if with_image else None
    rows = replace(PackedSequences.of_lengths([3], ids.device), shown=shown)
    model(ids, rows, np.array([1]), torch.tensor([2]), None)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_in_bfloat16_it_computes_nearly_the_same(seeing: Path):
    exact = actor(seeing).logprobs(ROWS, into="said").ragged_numpy("said")[0]
    for worker in (
        actor(seeing, dtype="bfloat16"),
        ReferenceWorker(ReferenceConfig(model=seeing, dtype="bfloat16")),
    ):
        rounded = worker.logprobs(ROWS, into="said").ragged_numpy("said")[0]
        assert 0 < np.abs(rounded - exact).mean() < 0.1


@pytest.mark.parametrize("lora", [False, True])
def test_saved_models_load_in_transformers_with_the_adapter_on_the_language_part(
    seeing: Path, tmp_path: Path, lora: bool
):
    worker = actor(seeing, **({"lora": Lora(rank=4, alpha=8), "learning_rate": 1e-2} if lora else {}))
    engine: Any = worker.engine
    names = {
        name for name, parameter in engine.model.causal_lm.named_parameters() if parameter.requires_grad
    }
    assert any("visual" in name for name in names) is not lora
    before = worker.logprobs(ROWS, into="said")["said"].to_pylist()
    worker.update(ROWS, loss=NegativeLogLikelihood())
    worker.save(tmp_path / "saved", merged=True)
    after = worker.logprobs(ROWS, into="said")["said"].to_pylist()
    with torch.no_grad():
        expected = straight(plain(tmp_path / "saved"), seeing, ROWS)
    for mine, theirs, first in zip(after, expected, before, strict=True):
        assert torch.tensor(mine).double().sub(theirs).abs().max() < 2e-4
        assert np.abs(np.subtract(mine, first)).max() > 1e-3


def test_an_adapter_alone_reaches_an_engine_that_serves_it(seeing: Path):
    lora = Lora(rank=4, alpha=8, published="adapter")
    trainer = actor(seeing, lora=lora, learning_rate=1e-2)
    rollout = RolloutWorker(RolloutConfig(model=seeing, engine="transformers", adapters={"actor": lora}))
    trainer.update(ROWS, loss=NegativeLogLikelihood())
    rollout.receive_weights(trainer.publish_weights(1, ("rollout[0]",)))
    trainer.finish_publishing(1)
    samples = as_samples(
        PROMPTS, generated(rollout, PROMPTS, sampling=Sampling(max_tokens=8, stop=None))
    )
    said = trainer.logprobs(samples, into="said").ragged_numpy("said")[0]
    assert np.abs(said - samples.ragged_numpy("response_logprobs")[0]).max() < 2e-4
    rollout.close()


def source(**columns: Any) -> TableSource:
    return TableSource("rows", pa.table(columns))


SEEN = pa.array(PICTURES, pa.list_(pa.large_binary()))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            ActorConfig(model="", tensor_parallel=2),
            "tensor_parallel=2: model .* reads images, and ranks cannot share",
        ),
        (ActorConfig(model="", sequence_parallel=2), "sequence_parallel=2: model .* reads images"),
        (ActorConfig(model="", pipeline_parallel=2), "pipeline_parallel=2: model .* reads images"),
        (CriticConfig(model=""), "reads images, and such models cannot have a scalar head"),
        (RewardModelConfig(model=""), "reads images, and such models cannot have a scalar head"),
        (
            RolloutConfig(model="", engine="transformers", routes=True),
            "routes=True: .* reads images, and its routes cannot",
        ),
        (
            RolloutConfig(model="", engine="vllm"),
            "engine='vllm': .* reads images, .* needs torchvision for such models, which is not",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name_before_anything_starts(
    seeing: Path, config: Any, said: str, monkeypatch: pytest.MonkeyPatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchvision" else find(name)
    )
    workers: dict[type, Any] = {
        ActorConfig: ActorWorker,
        CriticConfig: CriticWorker,
        RewardModelConfig: RewardModelWorker,
        RolloutConfig: RolloutWorker,
    }
    with pytest.raises(UserError, match=said):
        workers[type(config)].check(
            config.model_copy(update={"model": seeing}), (), source(prompt_ids=pa.array([[1, 2]]))
        )


def test_a_source_with_unsuitable_images_is_refused_before_anything_starts(
    seeing: Path, tiny_model: Path
):
    prompts = ROWS["prompt_ids"]
    of_text: Any = [
        (ActorConfig(model=tiny_model), ActorWorker),
        (RolloutConfig(model=tiny_model), RolloutWorker),
    ]
    for config, worker in of_text:
        with pytest.raises(
            UserError,
            match=r"'images' holds images, but the model in .* reads text alone \(type 'qwen2', which is",
        ):
            worker.check(config, (), source(prompt_ids=pa.array([[1]] * 5), images=SEEN))
    rollout = RolloutConfig(model=seeing, engine="transformers")
    RolloutWorker.check(rollout, (), source(prompt_ids=prompts, images=SEEN))
    with pytest.raises(
        UserError, match=r"row 1 has 2 images, and its prompt has 0 placeholders \(token id 19"
    ):
        RolloutWorker.check(
            rollout, (), source(prompt_ids=prompts.take([0, 1]), images=SEEN.take([0, 2]))
        )


def test_a_row_that_does_not_fit_its_images_is_named(seeing: Path, tiny_model: Path):
    wrong = ROWS.with_columns(prompt_ids=[seeing_model.asked(1)] * 5)
    with pytest.raises(
        UserError, match="row with sample_id 2: it has 2 images, and its prompt has 1 placeholders"
    ):
        actor(seeing).logprobs(wrong, into="said")
    with pytest.raises(UserError, match=r"holds images, but .* reads text alone"):
        actor(tiny_model).logprobs(ROWS, into="said")
